"""A worker's end: what was staged, and a :class:`~weightwire_nccl.station.Station` that stages it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from weightwire import wire
from weightwire.errors import EndpointError
from weightwire.forks import Origin
from weightwire.transport import Applied, Deadline, Delivery, Have, Receiver, ReceiverContext, Refused, choose
from weightwire_nccl import place
from weightwire_nccl.station import Shelved, Station

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire_nccl.options import NcclOptions

__all__ = ["NcclReceiver"]

GREETING = 0.5
"""Seconds that the constructor gives the trainer, where there is one, to get to know of this worker."""
LOOK = 0.001
"""Seconds between looks at the socket, without a thread."""


class NcclReceiver(Receiver):
    """See :class:`weightwire.transport.Receiver`. ``_changed`` guards what the station's thread brings."""

    def __init__(self, endpoint: Endpoint, options: NcclOptions, context: ReceiverContext) -> None:
        host, port = place.address_of(endpoint.location)
        if not port:
            raise EndpointError(
                f"endpoint {str(endpoint)!r}: a worker needs to know the place. Name host and port on both sides, as "
                "in 'nccl://127.0.0.1:29600', or hand updater.endpoint on to the workers."
            )
        self._origin = Origin(f"The nccl receiver {context.worker!r} of {str(endpoint)!r}")
        self._alias = context.apply == "alias"
        self._changed = threading.Condition()
        self._settled: Have | None = None  # for whoever has this, there is nothing new
        self._look_at = 0.0
        self._inline = options.staging == "inline"
        self._ended = False
        self._station = Station(self, (host, port), options, context)
        self._thread: threading.Thread | None = None
        if self._inline:
            return
        self._thread = threading.Thread(
            target=self._station.run, name=f"weightwire-nccl {context.worker}"[:60], daemon=True
        )
        self._thread.start()
        self._station.tried.wait(GREETING)

    # -- what the station tells --------------------------------------------------------------------------------------

    def news(self) -> None:
        """Something has changed: the next ``poll`` has to look, and one that waits now."""
        with self._changed:
            self.connected = self._station.connected
            self.whereabouts = self._station.whereabouts
            self._settled = None
            self._changed.notify_all()

    # -- poll --------------------------------------------------------------------------------------------------------

    def poll(self, have: Have, deadline: Deadline | None) -> Delivery | None:
        if deadline is None and have is self._settled and not self._inline:
            return None
        self._origin.check()
        while not self._ended:
            if self._inline:
                self._take_turn(deadline)
            with self._changed:
                delivery = self._look(have)
                if delivery is not None or self.closed or deadline is None or deadline.expired:
                    return delivery
                if not self._inline and self._settled is have:
                    self._changed.wait(min(deadline.remaining, 0.5))
        return None

    def _take_turn(self, deadline: Deadline | None) -> None:
        now = time.monotonic()
        if deadline is not None:
            self._station.turn(min(deadline.remaining, 0.5) if self._settled is not None else 0.0)
        elif now >= self._look_at:
            self._look_at = now + LOOK
            self._station.turn(0.0)

    def _look(self, have: Have) -> Delivery | None:
        """Hand out what is newest. Under the lock."""
        station = self._station
        error, station.refused = station.refused, None
        if error is not None:
            raise error
        item = choose(have, station.full, station.subset)
        if item is not None:
            return self._deliver(item)
        self._settled = have
        self.closed = self.closed or station.farewell
        return None

    def _deliver(self, item: Shelved) -> Delivery:
        if self._alias:
            return Delivery(item.header, blocks=item.own_blocks(), writable=True)
        hold = [item.lease]  # the buffer is not written again before this is cleared
        buffer = item.lease.buffer[: item.header.layout.nbytes]
        return Delivery(item.header, buffer=buffer, memory=item.lease.memory, release=hold.clear)

    # -- reports, end ------------------------------------------------------------------------------------------------

    def report(self, event: Applied | Refused) -> None:
        if self._origin.here:
            self._station.tell(wire.encode_event(event))
            if self._inline:
                self._look_at = 0.0

    def close(self, deadline: Deadline) -> None:
        if self._ended or not self._origin.here:
            return
        self._ended = True
        with self._changed:
            self._settled = None
            self._changed.notify_all()
        self._station.stop(deadline)
        if self._thread is None:
            self._station.run()
        elif threading.current_thread() is not self._thread:
            self._thread.join(max(2.0, deadline.remaining + 1.0))
        self.connected = False
