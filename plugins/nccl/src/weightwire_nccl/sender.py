"""The trainer's end. What it is made of:

* :mod:`~weightwire_nccl.service`: the control sockets, and the thread that looks after them;
* :mod:`~weightwire_nccl.rounds`: broadcasts to those who are awake;
* :mod:`~weightwire_nccl.crews`: the groups over which they go;
* :mod:`~weightwire_nccl.depot`: what is kept for the others, and how they get it;
* :mod:`~weightwire_nccl.peers`: what all of these know.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from weightwire.errors import ClosedError, EndpointError
from weightwire.forks import Origin, forbid, give_up
from weightwire.transport import Deadline, Event, Sender, SenderContext
from weightwire_nccl import place, secret
from weightwire_nccl.crews import Crews
from weightwire_nccl.depot import Announcement, Depot
from weightwire_nccl.groups import device_of, gpu_label
from weightwire_nccl.handshake import Doorman
from weightwire_nccl.peers import Hall, Kept, Peer, engine_for
from weightwire_nccl.pool import Pool
from weightwire_nccl.rounds import Rounds
from weightwire_nccl.service import Service
from weightwire_nccl.source import Ring, Source, Whole

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.weights.payload import Payload
    from weightwire_nccl.options import NcclOptions

__all__ = ["NcclSender"]


class NcclSender(Sender):
    """See :class:`weightwire.transport.Sender`."""

    def __init__(self, endpoint: Endpoint, options: NcclOptions, context: SenderContext) -> None:
        self._options = options
        self._device = device_of(options.device)
        self._label = gpu_label(self._device)
        place.check_interface(options.interface)
        token = secret.read_token(options.token_file)
        self.epoch = context.epoch
        self._pool = Pool()
        self._fell_back = ""
        self._closed = False
        host, port = place.address_of(endpoint.location)
        with ExitStack() as undo:
            listener = place.claim(host, port)
            undo.callback(listener.close)
            bound, port = listener.getsockname()[:2]
            if not token and not place.is_loopback(listener):
                raise EndpointError(
                    f"{place.location_of(host, port)} can be reached from other hosts, and no token is set: name a "
                    f"file with token_file=..., or set {secret.VARIABLE}, to the same secret on all sides; or stay on "
                    "127.0.0.1"
                )
            # No byte leaves this host. Who sets a token all the same trusts nobody else here: engines know of none.
            self.digests = not token and place.is_loopback(listener)
            wildcard = bound in ("0.0.0.0", "::")
            where = place.location_of(socket.gethostname() if wildcard else host, port)
            self.endpoint = str(replace(endpoint, location=where))
            self._origin = Origin(f"The nccl sender of {self.endpoint}")
            self._hall = Hall(self.endpoint, context.logger)
            undo.callback(self._hall.bell.close)
            self._crews = Crews(self._hall, self._device, "" if wildcard else bound, options.interface)
            self._depot = Depot(self._hall, keeps=options.keep)
            self._rounds = Rounds(self._hall, self._crews, options.algorithm, keep=options.keep)
            self._service = Service(self._hall, self._crews, self._depot, Doorman(token, self.epoch), listener)
            forbid(self)
            self._service.start()
            undo.pop_all()

    # -- stage -------------------------------------------------------------------------------------------------------

    def stage(self, payload: Payload, to: frozenset[str] | None, deadline: Deadline) -> None:
        self._check()
        peers = self._rounds.candidates(payload, to)
        engine = self._engine(peers)
        with self._hall.lock:
            self._crews.sweep()
        source = self._source(payload, self._device if engine == "nccl" else "cpu")
        round_, served, refused = self._rounds.broadcast(source, engine, to, deadline, suit=peers)
        try:
            source.finish()
            header = payload.header_bytes()
        except BaseException:
            self._rounds.call_off(round_, served)
            raise
        with payload.phase("notify"):
            kept = None
            if isinstance(source, Whole):
                kept = Kept(payload.stamp, payload.base, header, payload.nbytes, source.lease)
            # From here on it happens, if need be by the service thread: no worker is left out by a Ctrl-C.
            self._depot.news = Announcement(
                kept, payload.stamp, payload.base, header, to, round_, tuple(served), refused
            )
            try:
                with self._hall.lock:
                    self._service.announce()
            finally:
                self._hall.bell.ring()

    def _source(self, payload: Payload, device: str) -> Source:
        size = self._options.bucket
        if self._options.keep:
            return Whole(payload, size, self._pool.take(payload.nbytes, device))
        return Ring(payload, size, self._pool, device)

    def _engine(self, peers: Sequence[Peer]) -> str:
        engine, why = engine_for(self._label, (peer.device for peer in peers))
        if why and peers and why != self._fell_back:
            self._fell_back = why
            self._hall.logger.warning("%s: weights go through the CPU and Gloo: %s", self.endpoint, why)
        return engine

    # -- events, end -------------------------------------------------------------------------------------------------

    def events(self, deadline: Deadline) -> list[Event]:
        if self._closed or not self._origin.here:
            return []
        known = self._hall.events
        with self._hall.lock:
            while not known and not deadline.expired and not self._closed:
                self._hall.changed.wait(min(deadline.remaining, 0.5))
            # No call between these lines: a Ctrl-C is noticed only at calls, and must not lose an event.
            events = known[:]
            del known[: len(events)]
            return events

    def close(self, deadline: Deadline) -> None:
        if self._closed or not self._origin.here:
            return
        self._closed = True
        self._service.close(deadline)
        self._crews.close(min(1.0, deadline.remaining))
        with self._hall.lock:
            self._depot.clear()
            self._pool.clear()

    def _check(self) -> None:
        self._origin.check()
        if self._closed:
            raise ClosedError(f"{self._origin.what} is closed")

    def in_child(self) -> None:
        """In a forked child: let go of everything that tells the others that we live, and never touch the engines."""
        self._crews.in_child()
        give_up(*self._service.in_child())
