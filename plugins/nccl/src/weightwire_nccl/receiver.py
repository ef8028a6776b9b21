"""A worker's end: what was staged, and a :class:`~weightwire_nccl.station.Station` that stages it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weightwire import wire
from weightwire.errors import EndpointError
from weightwire.forks import Origin
from weightwire.transport import (
    NOW,
    Applied,
    Deadline,
    Delivery,
    Have,
    Receiver,
    ReceiverContext,
    Refused,
    choose,
)
from weightwire_nccl import place
from weightwire_nccl.intake import Shelved, Shelves
from weightwire_nccl.station import Station
from weightwire_nccl.stream import Streamed, StreamedDelivery

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire_nccl.options import NcclOptions

__all__ = ["NcclReceiver"]

GREETING = 0.5
"""Seconds that the constructor gives the trainer, where there is one, to get to know of this worker."""
LOOK = 0.001
"""Seconds between looks at the socket, without a thread."""


class NcclReceiver(Receiver):
    """See :class:`weightwire.transport.Receiver`. The shelves' lock guards what the station brings and tells."""

    def __init__(self, endpoint: Endpoint, options: NcclOptions, context: ReceiverContext) -> None:
        host, port = place.address_of(endpoint.location)
        if not port:
            raise EndpointError(
                f"endpoint {str(endpoint)!r}: a worker needs to know the place. Name host and port on both sides, as "
                "in 'nccl://127.0.0.1:29600', or hand updater.endpoint on to the workers."
            )
        self._origin = Origin(f"The nccl receiver {context.worker!r} of {str(endpoint)!r}")
        self._alias = context.apply == "alias"
        self._shelves = Shelves()
        self._look_at = 0.0
        self._inline = options.staging == "inline"
        self._ended = False
        self._room = threading.RLock()  # inline: who has it works for the station
        self._within = self._through = False
        self._station = Station((host, port), options, context, self._shelves, _weakly(self))
        self._thread: threading.Thread | None = None
        if self._inline:
            return
        self._thread = threading.Thread(
            target=self._station.run, name=f"weightwire-nccl {context.worker}"[:60], daemon=True
        )
        try:
            self._thread.start()
            with self._shelves.lock:
                self._shelves.changed.wait_for(lambda: self._station.tried, GREETING)
        except BaseException:
            self._station.stop(NOW)
            if not self._thread.is_alive():  # or else it frees everything itself
                self._station.free()
            raise

    # -- what the station tells --------------------------------------------------------------------------------------

    def _news(self) -> None:
        """The station has met the trainer, or lost it."""
        with self._shelves.lock:
            self.connected = self._station.connected
            self.whereabouts = self._station.whereabouts
            self._shelves.stir()

    # -- poll --------------------------------------------------------------------------------------------------------

    def poll(self, have: Have, deadline: Deadline | None) -> Delivery | None:
        if deadline is None and have is self._shelves.settled and not self._inline:
            return None
        self._origin.check()
        while not self._ended:
            if self._inline:
                self._take_turn(deadline)
            with self._shelves.lock:
                delivery = self._look(have)
                if delivery is not None or self.closed or deadline is None or deadline.expired:
                    return delivery
                if not self._inline and self._shelves.settled is have:
                    self._shelves.changed.wait(min(deadline.remaining, 0.5))
        return None

    def _take_turn(self, deadline: Deadline | None) -> None:
        now = time.monotonic()
        if deadline is not None:
            self._turn(min(deadline.remaining, 0.5) if self._shelves.settled is not None else 0.0)
        elif now >= self._look_at:
            self._look_at = now + LOOK
            self._turn(0.0)

    def _turn(self, seconds: float) -> None:
        """The station's work, in this thread; also its last, where ``close`` comes meanwhile."""
        with self._room:
            if not self._ended:
                self._within = True
                try:
                    self._station.turn(seconds)
                finally:
                    self._within = False
            if self._ended:
                self._wind_up()

    def _wind_up(self) -> None:
        if not self._through:
            self._through = True
            self._station.run()

    def _look(self, have: Have) -> Delivery | None:
        """Hand out what is newest. Under the lock."""
        station, shelves = self._station, self._shelves
        error, station.refused = station.refused, None
        if error is not None:
            raise error
        item: Any = choose(have, shelves.full, shelves.subset)
        if item is not None:
            return self._deliver(item)
        self._shelves.settled = have
        self.closed = self.closed or station.farewell
        return None

    def _deliver(self, item: Shelved | Streamed) -> Delivery:
        if isinstance(item, Streamed):
            return StreamedDelivery(item, self._turn if self._inline else None)
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
        self._shelves.stir()
        self._station.stop(deadline)
        if self._thread is None:
            if self._room.acquire(timeout=max(2.0, deadline.remaining + 1.0)):
                try:
                    if not self._within:
                        self._wind_up()
                finally:
                    self._room.release()
        elif threading.current_thread() is not self._thread:
            self._thread.join(max(2.0, deadline.remaining + 1.0))
        self.connected = False


def _weakly(receiver: NcclReceiver) -> Callable[[], None]:
    """Its ``_news``, for a thread that must not keep a forgotten receiver alive."""
    reference = weakref.ref(receiver)

    def news() -> None:
        found = reference()
        if found is not None:
            found._news()

    return news
