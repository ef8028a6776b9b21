"""The trainer's end: broadcasts to groups of workers, and a service thread that looks after the control sockets."""

from __future__ import annotations

import itertools
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from weightwire import wire
from weightwire.errors import ClosedError, EndpointError, WaitTimeout, WireError
from weightwire.forks import Origin, forbid, give_up
from weightwire.transport import (
    Applied,
    Deadline,
    Event,
    Joined,
    Left,
    Lost,
    Refused,
    Sender,
    SenderContext,
    Shelf,
    Staged,
    choose,
)
from weightwire_nccl import place, secret
from weightwire_nccl.board import Board, BrokenBoard
from weightwire_nccl.groups import (
    GlooGroup,
    Graveyard,
    Group,
    GroupError,
    NcclGroup,
    Works,
    device_of,
    gpu_label,
)
from weightwire_nccl.peers import Generation, Generations, Kept, Peer, Transfer, engine_for
from weightwire_nccl.pool import Pool
from weightwire_nccl.protocol import (
    CHUNK,
    LIMIT,
    PROTOCOL,
    SHY,
    Abort,
    Accepted,
    Add,
    Added,
    Challenge,
    Chunk,
    Done,
    Drop,
    Go,
    Goodbye,
    Got,
    Hello,
    Key,
    Link,
    Message,
    Parcel,
    Ping,
    Plan,
    Pong,
    Proof,
    Ready,
    Reject,
    Report,
    Trouble,
)
from weightwire_nccl.source import Ring, Source, Whole

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.weights.payload import Payload
    from weightwire_nccl.options import NcclOptions

__all__ = ["NcclSender"]

READY = 0.5
"""Seconds in which a worker that is awake answers a plan. Who does not is left out, and gets the version later."""
PATIENT = 2.0
"""The same where no copy is kept for later; and how long a worker may be silent while a broadcast stands still."""
STALL = 0.3
"""Seconds without progress after which the workers are asked whether they are awake."""
SLICE = 0.02
"""Seconds between looks at who is alive while a broadcast goes on."""
ATTEMPTS = 4
"""Groups that are tried for one version."""
HANDSHAKE = 10.0
"""Seconds that a connection may take to say who it is."""
STRANGERS = 256
"""Connections that have not said it yet; the oldest makes way."""
HANG = (2.0, 30.0)
"""Seconds after which a broadcast that nobody ends ends by itself, at least and at most."""


class _Failed(Exception):
    """This round came to nothing."""


class _Announcement(NamedTuple):
    kept: Kept | None
    stamp: Any
    base: Any
    header: bytes
    to: frozenset[str] | None
    round: int
    served: tuple[Peer, ...]


class NcclSender(Sender):
    """See :class:`weightwire.transport.Sender`.

    The service thread alone reads, writes, opens and closes sockets; everybody else queues and rings. ``_changed``
    guards all that both threads know; no wait for a worker happens under it.
    """

    def __init__(self, endpoint: Endpoint, options: NcclOptions, context: SenderContext) -> None:
        self._options = options
        self._logger = context.logger
        self._token = secret.read_token(options.token_file)
        self._device = device_of(options.device)
        self._label = gpu_label(self._device)
        host, port = place.address_of(endpoint.location)
        self._listener = place.claim(host, port)
        bound, port = self._listener.getsockname()[:2]
        if not self._token and not place.is_loopback(self._listener):
            self._listener.close()
            raise EndpointError(
                f"{place.location_of(host, port)} can be reached from other hosts, and no token is set: name a file "
                f"with token_file=..., or set {secret.VARIABLE}, to the same secret on all sides; or stay on 127.0.0.1"
            )
        wildcard = bound in ("0.0.0.0", "::")
        self._host = "" if wildcard else bound  # where the engines listen
        self.epoch = context.epoch
        self.endpoint = str(
            replace(endpoint, location=place.location_of(socket.gethostname() if wildcard else host, port))
        )
        self._origin = Origin(f"The nccl sender of {self.endpoint}")
        self._changed = threading.Condition()
        self._pool = Pool()
        self._shelf: Shelf[Kept] = Shelf()
        self._announcement: _Announcement | None = None
        self._peers: list[Peer] = []
        self._workers: dict[str, Peer] = {}
        self._events: list[Event] = []
        self._generations = Generations()
        self._graveyard = Graveyard()
        self._rounds, self._numbers = itertools.count(1), itertools.count(1)
        self._fell_back = ""
        self._closing: Deadline | None = None
        self._closed = False
        self._bell, self._ring_end = socket.socketpair()
        for end in (self._bell, self._ring_end):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        forbid(self)
        self._thread = threading.Thread(target=self._serve, name=f"weightwire-nccl {port}", daemon=True)
        self._thread.start()

    # -- stage -------------------------------------------------------------------------------------------------------

    def stage(self, payload: Payload, to: frozenset[str] | None, deadline: Deadline) -> None:
        self._check()
        with self._changed:
            engine = self._engine(self._candidates(payload, to))
            self._graveyard.sweep()
        source = self._source(payload, self._device if engine == "nccl" else "cpu")
        round_, served = self._broadcast(source, engine, to, deadline)
        try:
            source.finish()
            header = payload.header_bytes()
        except BaseException:
            self._call_off(round_, served)
            raise
        with payload.phase("notify"):
            kept = None
            if isinstance(source, Whole):
                kept = Kept(payload.stamp, payload.base, header, payload.nbytes, source.lease)
            # From here on it happens, if need be by the service thread: no worker is left out by a Ctrl-C.
            self._announcement = _Announcement(kept, payload.stamp, payload.base, header, to, round_, tuple(served))
            try:
                with self._changed:
                    self._announce()
            finally:
                self._ring()

    def _source(self, payload: Payload, device: str) -> Source:
        size = self._options.bucket
        if self._options.keep:
            return Whole(payload, size, self._pool.take(payload.nbytes, device))
        return Ring(payload, size, self._pool, device)

    def _engine(self, peers: Sequence[Peer]) -> str:
        engine, why = engine_for(self._label, (peer.device for peer in peers))
        if why and peers and why != self._fell_back:
            self._fell_back = why
            self._logger.warning("%s: weights go through the CPU and Gloo: %s", self.endpoint, why)
        return engine

    def _candidates(self, payload: Payload, to: frozenset[str] | None) -> list[Peer]:
        """Who can take part: addressed, awake, and with the full version that a subset lies on."""
        names = self._workers if to is None else self._workers.keys() & to
        peers = [self._workers[name] for name in sorted(names)]
        return [p for p in peers if not p.silent and (payload.base is None or p.has.base == payload.base)]

    def _broadcast(
        self, source: Source, engine: str, to: frozenset[str] | None, deadline: Deadline
    ) -> tuple[int, list[Peer]]:
        """Bring the bytes to whoever is awake; the round, and who has them. Groups are made anew around the lost."""
        failed: _Failed | None = None
        for attempt in range(ATTEMPTS):
            with self._changed:
                peers = self._candidates(source.payload, to)
            if not peers or (attempt and deadline.expired):
                break
            round_ = next(self._rounds)
            try:
                ready = self._muster(round_, source, engine, peers, deadline)
                if ready:
                    self._transfer(round_, source, engine, ready, deadline)
                    return round_, ready
            except _Failed as exc:
                failed = exc
                self._logger.info("%s: version %s: %s", self.endpoint, source.payload.stamp.number, exc)
                source.again()
            except BaseException:
                self._call_off(round_, peers)
                raise
        if failed is not None and not self._options.keep:
            raise WaitTimeout(
                f"version {source.payload.stamp.number} reached nobody: {failed}",
                version=source.payload.stamp.number,
                phase="stage",
            )
        return 0, []

    def _muster(self, round_: int, source: Source, engine: str, peers: list[Peer], deadline: Deadline) -> list[Peer]:
        """Announce a round and see who is awake. The first bucket is packed meanwhile."""
        payload = source.payload
        plan = Plan(round_, payload.stamp, payload.base, payload.nbytes, source.stops, engine)
        with self._changed:
            for peer in peers:
                peer.engaged = round_
                peer.link.send(plan)
        self._ring()
        until = deadline.sooner(min(READY if self._options.keep else PATIENT, max(deadline.remaining / 3, 0.05)))
        if isinstance(source, Whole) and source.ranges:
            source.bucket(0)
        with self._changed:
            awake = partial(self._answered, peers, round_)
            self._changed.wait_for(awake, until.remaining)
            late = [peer for peer in peers if not self._answered([peer], round_)]
            for peer in late:
                self._logger.warning("%s: worker %r does not answer; it is left out", self.endpoint, peer.name)
                peer.silent = True
            ready = [peer for peer in peers if not peer.gone and peer.ready == round_]
            self._call_off(round_, set(peers) - set(ready))
            return ready

    @staticmethod
    def _answered(peers: list[Peer], round_: int) -> bool:
        return all(peer.gone or round_ in (peer.ready, peer.trouble) for peer in peers)

    def _transfer(self, round_: int, source: Source, engine: str, peers: list[Peer], deadline: Deadline) -> None:
        """Broadcast all buckets to these workers. Raises :class:`_Failed`; the group is then of no more use."""
        generation = self._generation(engine, peers)
        timeout = min(max(deadline.remaining, HANG[0]), HANG[1])
        works: Works | None = None
        try:
            with self._changed:
                for rank, peer in enumerate(generation.peers, 1):
                    size = len(generation.peers) + 1
                    peer.link.send(Go(round_, generation.number, rank, size, self._options.algorithm, timeout))
            self._ring()
            group = generation.group = generation.group or self._make_group(generation, timeout)
            group.limit(timeout)
            works = Works(group, self._options.algorithm)
            watch = _Watch(self, round_, generation.peers, deadline)
            for number in range(len(source.ranges)):
                for _ in works.post(source.bucket(number)):
                    watch.look()
                while works.full:
                    watch.progress(works.wait(SLICE))
            while works:
                watch.progress(works.wait(SLICE))
            group.finish()
            self._confirm(round_, peers, watch)
        except BaseException as exc:
            self._give_up(generation, works, source.held, f"round {round_} failed")
            self._call_off(round_, peers, generation.number)
            if isinstance(exc, (GroupError, BrokenBoard)):
                raise _Failed(str(exc)) from exc
            raise

    def _confirm(self, round_: int, peers: list[Peer], watch: _Watch) -> None:
        """Be sure that everybody has all bytes: workers pass them on to each other, and one may have died meanwhile."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: all(peer.got == round_ for peer in peers), SLICE):
                    return
            watch.look()

    # -- groups ------------------------------------------------------------------------------------------------------

    def _generation(self, engine: str, peers: list[Peer]) -> Generation:
        """The group of these workers: a known one, or a new one that is still to be made."""
        with self._changed:
            found = self._generations.find(engine, peers)
            if found is not None:
                return found
            number = next(self._numbers)
            board = Board(partial(self._publish, number, tuple(peers), None))
            generation = Generation(number, engine, peers, board)
            for old in self._generations.add(generation):
                self._retire(old, "others were used since")
            return generation

    def _make_group(self, generation: Generation, timeout: float) -> Group:
        size = len(generation.peers) + 1
        if generation.engine == "nccl":
            return NcclGroup(generation.board, self._device, 0, size, timeout)
        hosts = [self._host] if self._host else [peer.link.host for peer in generation.peers]
        outside = [host for host in hosts if not host.startswith("127.") and host != "::1"]
        return GlooGroup(generation.board, (outside or hosts)[0], self._options.interface, 0, size, timeout)

    def _publish(self, number: int, peers: tuple[Peer, ...], author: Peer | None, key: str, value: bytes) -> None:
        # Without the lock: the engines call this from threads of their own, for which somebody may wait who has it.
        for peer in peers:
            if peer is not author and not peer.gone:
                peer.link.send(Key(number, key, value))
        self._ring()

    def _give_up(self, generation: Generation, works: Works | None, held: object, why: str) -> None:
        with self._changed:
            self._generations.remove(generation)
            self._bury(generation, works, held, why)

    def _retire(self, generation: Generation, why: str) -> None:
        """Nobody uses this group any more."""
        self._generations.remove(generation)
        for peer in generation.peers:
            if not peer.gone:
                peer.link.send(Drop(generation.number))
        self._bury(generation, None, None, why)

    def _bury(self, generation: Generation, works: Works | None, held: object, why: str) -> None:
        generation.board.end(why)
        group, generation.group = generation.group, None
        if group is not None:
            self._graveyard.bury(group, works, held)

    def _call_off(self, round_: int, peers: Iterable[Peer], generation: int = 0) -> None:
        """A round is off: who took part goes back to waiting."""
        with self._changed:
            for peer in peers:
                if not peer.gone and peer.engaged == round_:
                    peer.engaged = 0
                    peer.link.send(Abort(round_, generation))
        self._ring()

    # -- what is kept, and who is given it ---------------------------------------------------------------------------

    def _announce(self) -> None:
        """Make a version known: to those who have its bytes by its header, to the others as a whole. Under the lock."""
        news, self._announcement = self._announcement, None
        if news is None:
            return
        if news.kept is not None:
            self._shelf.put(news.kept, news.to)
        for peer in news.served:
            if not peer.gone and peer.engaged == news.round:
                peer.engaged = 0
                peer.give(news.stamp, news.base)
                peer.link.send(Done(news.round, news.header))
        self._tidy()
        for peer in self._workers.values():
            self._supply(peer)

    def _supply(self, peer: Peer) -> None:
        """Begin to send what the worker lacks, or stop what it needs no more. Under the lock."""
        if peer.joined is None or peer.gone:
            return
        full, subset = self._shelf.of(peer.name)
        if peer.transfer is not None and peer.transfer.kept not in (full, subset):
            peer.link.send(Abort(peer.transfer.round, 0))
            peer.transfer = None
        if peer.transfer is None and not peer.silent and not peer.engaged:
            kept = choose(peer.has, full, subset)
            if kept is not None:
                peer.transfer = Transfer(next(self._rounds), kept)
                peer.link.send(Parcel(peer.transfer.round, kept.stamp, kept.base, kept.nbytes))

    def _send_on(self, peer: Peer) -> None:
        """The next chunk of what is on its way to a worker that has read the last one."""
        transfer = peer.transfer
        assert transfer is not None
        kept = transfer.kept
        if transfer.at < kept.nbytes:
            stop = min(transfer.at + CHUNK, kept.nbytes)
            part = kept.lease.buffer[transfer.at : stop].cpu()
            peer.link.send_chunk(transfer.round, transfer.at, memoryview(part.numpy()))  # type: ignore[arg-type]
            transfer.at = stop
            return
        peer.give(kept.stamp, kept.base)
        more = choose(peer.has, *self._shelf.of(peer.name)) is not None
        peer.link.send(Done(transfer.round, kept.header, more))
        peer.transfer = None
        self._supply(peer)

    # -- the service thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._over():
            try:
                self._turn()
            except Exception:
                self._logger.exception("%s: the service thread failed and goes on", self.endpoint)
                time.sleep(0.1)
        with self._changed:
            self._wind_up()

    def _over(self) -> bool:
        """Whether it is time to go: everything accepted is with the workers, or there is no time left."""
        if self._closing is None:
            return False
        with self._changed:
            waiting = [p for p in self._workers.values() if not p.silent and (p.transfer or not p.link.idle)]
            return not waiting or self._closing.expired

    def _turn(self) -> None:
        ready = self._selector.select(0.05 if self._closing else 0.5)
        with self._changed:
            self._announce()
            for key, _ in ready:
                if key.fileobj is self._bell:
                    self._hush()
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._peers:
                    self._listen(key.data)
            for peer in list(self._peers):
                self._attend(peer)

    def _accept(self) -> None:
        with suppress(OSError):
            sock, _ = self._listener.accept()
            place.tune(sock)
            peer = Peer(Link(sock, SHY))
            self._peers.append(peer)
            self._selector.register(sock, selectors.EVENT_READ, peer)
            peer.link.send(Challenge(PROTOCOL, peer.nonce, bool(self._token)))
        strangers = [peer for peer in self._peers if peer.joined is None]
        if len(strangers) > STRANGERS:
            self._drop(strangers[0], "too many connections")

    def _attend(self, peer: Peer) -> None:
        """Send what the socket takes."""
        if peer.gone:
            return
        if peer.joined is None and time.monotonic() - peer.opened > HANDSHAKE:
            self._drop(peer, "it did not say who it is")
            return
        for _ in range(8):  # then it is the others' turn
            if not peer.link.flush() or peer.transfer is None:
                break
            self._send_on(peer)
        wanted = selectors.EVENT_READ | (0 if peer.link.idle else selectors.EVENT_WRITE)
        if self._selector.get_key(peer.link.fileno()).events != wanted:
            self._selector.modify(peer.link.fileno(), wanted, peer)

    def _listen(self, peer: Peer) -> None:
        """Read what a worker says. Anything malformed ends this connection, and no other."""
        try:
            for frame in peer.link.frames():
                self._hear(peer, frame)
                if peer.gone:
                    return
        except (WireError, BrokenBoard) as exc:
            self._logger.warning("%s: %s: %s; connection closed", self.endpoint, peer.name, exc)
            self._lose(peer, f"it sent something malformed: {exc}")
            return
        if peer.link.ended:
            self._lose(peer, "its connection ended without a goodbye: it died, or its host cannot be reached")

    def _hear(self, peer: Peer, frame: Message | Chunk) -> None:
        if peer.joined is None:
            self._meet(peer, frame)
            return
        peer.heard = time.monotonic()
        if isinstance(frame, Ready):
            peer.ready = frame.round
        elif isinstance(frame, Got):
            peer.got = frame.round
        elif isinstance(frame, Trouble):
            self._hear_of_trouble(peer, frame)
        elif isinstance(frame, Key):
            self._hear_key(peer, frame)
        elif isinstance(frame, Add):
            generation = self._generations.numbered(frame.generation)
            if generation is not None and peer in generation.peers:
                peer.link.send(Added(frame.serial, generation.board.add(frame.key, frame.amount)))
        elif isinstance(frame, Report):
            self._hear_report(peer, frame)
        elif isinstance(frame, Goodbye):
            self._part(peer, Left(worker=peer.name, incarnation=peer.joined.incarnation), "it said goodbye")
        elif not isinstance(frame, Pong):
            raise WireError(f"{type(frame).__name__} came out of turn")
        if peer.silent and not peer.gone:
            peer.silent = False
            self._supply(peer)
        self._changed.notify_all()

    def _hear_of_trouble(self, peer: Peer, trouble: Trouble) -> None:
        peer.trouble, peer.reason = trouble.round, trouble.reason[:500]
        transfer = peer.transfer
        if transfer is not None and transfer.round == trouble.round:  # it has no room; perhaps for the next version
            peer.transfer = None
            peer.give(transfer.kept.stamp, transfer.kept.base)

    def _hear_key(self, peer: Peer, key: Key) -> None:
        generation = self._generations.numbered(key.generation)
        if generation is not None and peer in generation.peers:
            generation.board.learn(key.key, key.value)
            self._publish(key.generation, generation.peers, peer, key.key, key.value)

    def _hear_report(self, peer: Peer, report: Report) -> None:
        assert peer.joined is not None
        event = wire.decode_event(report.event)
        if not isinstance(event, (Staged, Applied, Refused)):
            raise WireError(f"a report of kind {type(event).__name__}")
        joined = peer.joined
        self._events.append(msgspec.structs.replace(event, worker=joined.worker, incarnation=joined.incarnation))

    # -- who comes and goes ------------------------------------------------------------------------------------------

    def _meet(self, peer: Peer, frame: Message | Chunk) -> None:
        """From strangers: first the proof, then the hello."""
        if isinstance(frame, Proof) and not peer.proven:
            self._prove(peer, frame)
        elif isinstance(frame, Hello) and peer.proven:
            self._greet(peer, frame)
        elif not isinstance(frame, Goodbye):
            raise WireError(f"{type(frame).__name__} came out of turn")

    def _prove(self, peer: Peer, proof: Proof) -> None:
        if proof.protocol != PROTOCOL:
            text = f"the updater speaks protocol {PROTOCOL}, this worker {proof.protocol}: install one version of "
            self._reject(peer, "protocol", text + "weightwire-nccl on all sides")
        elif self._token and not secret.verify(self._token, "worker", peer.nonce, proof.nonce, proof.proof):
            self._reject(
                peer, "token", f"the updater asks for a token (token_file, {secret.VARIABLE}): it is not this one"
            )
        else:
            peer.proven = True
            peer.link.limit = LIMIT
            answer = secret.prove(self._token, "trainer", proof.nonce, peer.nonce) if self._token else b""
            peer.link.send(Accepted(answer, self.epoch))

    def _greet(self, peer: Peer, hello: Hello) -> None:
        joined = wire.decode_event(hello.joined)
        if not isinstance(joined, Joined) or len(hello.device) > wire.MAX_LABEL:
            raise WireError(f"a hello of kind {type(joined).__name__}")
        other = self._workers.get(joined.worker)
        if other is not None:
            self._listen(other)  # it may have gone a moment ago
        if joined.worker in self._workers:
            where = f"process {other.joined.pid} on {other.joined.host}" if other and other.joined else "another"
            text = f"another live worker is called {joined.worker!r} ({where}); give each a name of its own"
            self._reject(peer, "name", text)
            return
        peer.joined, peer.device, peer.has = joined, hello.device, joined.have
        self._workers[joined.worker] = peer
        self._events.append(joined)
        peer.link.send(Ping())  # it knows by this that it is known
        self._supply(peer)
        self._changed.notify_all()

    def _reject(self, peer: Peer, kind: str, reason: str) -> None:
        self._logger.warning("%s: turned away %s: %s", self.endpoint, peer.name, reason)
        peer.link.send(Reject(kind, reason[:2000]))
        peer.link.flush()
        self._drop(peer, reason)

    def _lose(self, peer: Peer, reason: str) -> None:
        joined = peer.joined
        event = Lost(worker=joined.worker, incarnation=joined.incarnation, reason=reason) if joined else None
        self._part(peer, event, reason)

    def _part(self, peer: Peer, event: Event | None, why: str) -> None:
        self._drop(peer, why)
        if event is not None:
            self._events.append(event)
        self._changed.notify_all()

    def _drop(self, peer: Peer, why: str) -> None:
        """Forget a connection, and the groups that it was in."""
        peer.gone, peer.engaged = why, 0
        if peer in self._peers:
            self._peers.remove(peer)
            self._selector.unregister(peer.link.fileno())
        if self._workers.get(peer.name) is peer:
            del self._workers[peer.name]
            self._shelf.forget(peer.name)
        peer.transfer = None
        peer.link.close()
        for generation in self._generations.of(peer):
            generation.board.end(f"worker {peer.name!r} is gone")
        self._tidy()

    def _tidy(self) -> None:
        """Give up groups that have lost a member, but for one that is in use: whoever uses it finds out."""
        for generation in self._generations.all():
            lost = next((peer for peer in generation.peers if peer.gone), None)
            if lost is not None and not any(peer.engaged for peer in generation.peers):
                self._retire(generation, f"worker {lost.name!r} is gone")

    # -- events, end -------------------------------------------------------------------------------------------------

    def events(self, deadline: Deadline) -> list[Event]:
        if self._closed or not self._origin.here:
            return []
        with self._changed:
            while not self._events and not deadline.expired and not self._closed:
                self._changed.wait(min(deadline.remaining, 0.5))
            # No call between these lines: a Ctrl-C is noticed only at calls, and must not lose an event.
            events = self._events[:]
            del self._events[: len(events)]
            return events

    def close(self, deadline: Deadline) -> None:
        if self._closed or not self._origin.here:
            return
        self._closed = True
        self._closing = deadline
        self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(max(2.0, deadline.remaining + 1.0))
        with self._changed:
            for generation in self._generations.all():
                self._generations.remove(generation)
                self._bury(generation, None, None, "the updater has closed")
            self._graveyard.close(min(1.0, deadline.remaining))
            self._shelf = Shelf()
            self._pool.clear()

    def _wind_up(self) -> None:
        """The last act of the service thread."""
        for peer in list(self._peers):
            peer.link.send(Goodbye())
            peer.link.flush()
            self._peers.remove(peer)
            peer.gone = "the updater has closed"
            peer.link.close()
        self._workers.clear()
        self._selector.close()
        for sock in (self._listener, self._bell, self._ring_end):
            sock.close()
        self._changed.notify_all()

    def _check(self) -> None:
        self._origin.check()
        if self._closed:
            raise ClosedError(f"{self._origin.what} is closed")

    def _ring(self) -> None:
        with suppress(OSError):  # it rings already; or this end is closed
            self._ring_end.send(b"!")

    def _hush(self) -> None:
        with suppress(BlockingIOError):
            self._bell.recv(4096)

    def in_child(self) -> None:
        """In a forked child: let go of everything that tells the others that we live, and never touch the engines."""
        self._graveyard.leak()
        for generation in self._generations.all():
            if generation.group is not None:
                generation.group.leak()
        sockets = [peer.link.detach() for peer in self._peers]
        give_up(*sockets, *(sock.detach() for sock in (self._listener, self._bell, self._ring_end)))


class _Watch:
    """Looks after a broadcast: is everybody still there, and does it go on?"""

    def __init__(self, sender: NcclSender, round_: int, peers: Sequence[Peer], deadline: Deadline) -> None:
        self._sender = sender
        self._round = round_
        self._peers = peers
        self._deadline = deadline
        self._moved = time.monotonic()
        self._asked = 0.0

    def progress(self, done: bool) -> None:
        """After each wait for a bucket."""
        if done:
            self._moved, self._asked = time.monotonic(), 0.0
        else:
            self.look()

    def look(self) -> None:
        """Raise :class:`_Failed` where it makes no sense to wait any longer."""
        now = time.monotonic()
        with self._sender._changed:
            for peer in self._peers:
                if peer.gone:
                    raise _Failed(f"worker {peer.name!r} is lost: {peer.gone}")
                if peer.trouble == self._round:
                    raise _Failed(f"worker {peer.name!r} has trouble: {peer.reason}")
            if self._deadline.expired:
                raise _Failed("there is no time left")
            if now - self._moved > STALL:
                self._ask(now)

    def _ask(self, now: float) -> None:
        """Nothing has moved for a while: find out who sleeps."""
        if not self._asked:
            self._asked = now
            self._patience = min(PATIENT, max(0.2, self._deadline.remaining / 4))
            for peer in self._peers:
                peer.link.send(Ping())
            self._sender._ring()
            return
        if now - self._asked > self._patience:
            asleep = [peer for peer in self._peers if peer.heard < self._asked]
            for peer in asleep:
                peer.silent = True
            if asleep:
                raise _Failed(f"worker {asleep[0].name!r} does not answer")
            self._asked = 0.0
