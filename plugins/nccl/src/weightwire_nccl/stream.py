"""Versions that a worker fetches while it applies them, piece by piece: ``stream=True``."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from weightwire.errors import UpdaterLostError, WireError
from weightwire.transport import Delivery
from weightwire_nccl.messages import Fetch

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.transport import Header

__all__ = ["Streamed", "StreamedDelivery", "Streams"]

QUIET = 30.0
"""Seconds without a byte after which the trainer counts as lost, where the receiver's timeout is not shorter."""
SLICE = 0.05
"""Seconds of a wait, between looks at whether it makes sense."""


class Streams:
    """What is being fetched over one connection. ``ask`` tells the trainer; ``bucket``: bytes in memory, at most;
    ``patience``: seconds that one version may be waited for, all waits for its bytes together."""

    def __init__(self, ask: Callable[[Fetch], None], bucket: int, patience: float) -> None:
        self.ask = ask
        self.piece = bucket // 2
        self.patience = patience
        self.why = ""
        """Why no more will come, where it will not."""
        self._tickets = itertools.count(1)
        self._open: dict[int, _Fetching] = {}

    def open(self, round_: int, nbytes: int) -> _Fetching:
        fetching = _Fetching(self, round_, next(self._tickets), nbytes)
        self._open[fetching.ticket] = fetching
        return fetching

    def close(self, fetching: _Fetching) -> None:
        self._open.pop(fetching.ticket, None)
        self.ask(Fetch(fetching.round, fetching.ticket, 0, 0))

    def take(self, ticket: int, start: int, data: memoryview) -> None:
        """Bytes have come; for a ticket that nobody holds any more: too late."""
        fetching = self._open.get(ticket)
        if fetching is not None:
            fetching.take(start, data)

    def refuse(self, ticket: int) -> None:
        """The trainer does not have it any more."""
        fetching = self._open.get(ticket)
        if fetching is not None:
            fetching.end("newer versions have taken its place")

    def end(self, why: str) -> None:
        """The connection is over."""
        self.why = why
        for fetching in list(self._open.values()):
            fetching.end(why)


class _Fetching:
    """One way through a version: two pieces in memory, of which one is read while the other comes."""

    def __init__(self, streams: Streams, round_: int, ticket: int, nbytes: int) -> None:
        self.round, self.ticket = round_, ticket
        self._streams = streams
        self._piece = streams.piece
        self._ranges = [(start, min(start + self._piece, nbytes)) for start in range(0, nbytes, self._piece)]
        self._buffers = [torch.empty(stop - start, dtype=torch.uint8) for start, stop in self._ranges[:2]]
        self._lock = threading.RLock()  # "with" a Condition is Python code: Ctrl-C in it would leave it locked
        self._changed = threading.Condition(self._lock)
        self._come = 0  # bytes
        self._why = streams.why
        self._patience = streams.patience  # what is left of it

    def pieces(self, pump: Callable[[float], None] | None) -> Iterator[tuple[int, Tensor]]:
        for number in range(min(2, len(self._ranges))):
            self._ask(number)
        for number, (start, stop) in enumerate(self._ranges):
            self._await(stop, pump)
            yield start, self._buffers[number % 2][: stop - start]
            if number + 2 < len(self._ranges):
                self._ask(number + 2)

    def _ask(self, number: int) -> None:
        self._streams.ask(Fetch(self.round, self.ticket, *self._ranges[number]))

    def _await(self, stop: int, pump: Callable[[float], None] | None) -> None:
        begun = moved = time.monotonic()
        seen = self._come
        while self._come < stop:
            now = time.monotonic()
            if self._come > seen:
                moved, seen = now, self._come
            come = f"{self._come} of {self._ranges[-1][1]} bytes had come"
            if self._why:
                raise UpdaterLostError(f"{come} when it ended: {self._why}")
            if now - moved > QUIET:
                raise UpdaterLostError(f"{come}, and nothing for {QUIET:.0f} s")
            if now - begun > self._patience:
                raise UpdaterLostError(
                    f"{come} when they had been waited for {self._streams.patience:.3g} s, which is the receiver's "
                    "timeout: give it a longer one, or find out what slows down the trainer or the network"
                )
            if pump is not None:
                pump(SLICE)
                continue
            with self._lock:
                if self._come < stop and not self._why:
                    self._changed.wait(SLICE)
        self._patience -= time.monotonic() - begun

    def take(self, start: int, data: memoryview) -> None:
        number, offset = divmod(start, self._piece)
        stop = start + len(data)
        if start != self._come or number >= len(self._ranges) or stop > self._ranges[number][1]:
            raise WireError(f"bytes {start} to {stop} came after {self._come}")
        self._buffers[number % 2].numpy()[offset : offset + len(data)] = data
        with self._lock:
            self._come += len(data)
            self._changed.notify_all()

    def end(self, why: str) -> None:
        with self._lock:
            self._why = why
            self._changed.notify_all()


class Streamed:
    """A version that the trainer offers."""

    def __init__(self, header: Header, round_: int, streams: Streams) -> None:
        self.header = header
        self.stamp = header.stamp
        self.base = header.base
        self._round = round_
        self._streams = streams

    def pieces(self, pump: Callable[[float], None] | None) -> Iterator[tuple[int, Tensor]]:
        """``(start byte, bytes)``, each valid until the next is asked for. ``pump`` reads the control socket, where no
        thread does. Raises :class:`~weightwire.UpdaterLostError`."""
        fetching = self._streams.open(self._round, self.header.layout.nbytes)
        try:
            yield from fetching.pieces(pump)
        finally:
            self._streams.close(fetching)


class StreamedDelivery(Delivery):
    """Its bytes come while it is applied."""

    def __init__(self, item: Streamed, pump: Callable[[float], None] | None) -> None:
        super().__init__(item.header)
        self._item = item
        self._pump = pump

    def buckets(self) -> Iterator[tuple[int, Tensor]]:
        return self._item.pieces(self._pump)
