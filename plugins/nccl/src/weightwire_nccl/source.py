"""A payload, bucket by bucket, in buffers of our own: nothing of the caller's is ever sent, only read once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from weightwire.weights.layout import aligned
from weightwire_nccl.works import IN_FLIGHT

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.weights.payload import Payload
    from weightwire_nccl.pool import Lease, Pool

__all__ = ["Ring", "Source", "Whole"]


class Source(ABC):
    """``bucket(0)``, ``bucket(1)``, ... pack as they are asked for, so that one is packed while others are sent."""

    def __init__(self, payload: Payload, size: int) -> None:
        self.payload = payload
        self.ranges = list(payload.buckets(size))

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple(stop for _, stop in self.ranges)

    @abstractmethod
    def bucket(self, number: int) -> Tensor:
        """The bytes of a bucket, to be asked for in order; from 0 again after :meth:`again`."""

    @abstractmethod
    def again(self) -> None:
        """The works that read the buckets have failed, and may go on reading."""

    @property
    @abstractmethod
    def held(self) -> object:
        """What has to stay until the works have ended."""

    @abstractmethod
    def finish(self) -> None:
        """Read what is still unread: the header needs it."""


class Whole(Source):
    """The whole payload, packed once and kept: it can be sent again without being read again."""

    def __init__(self, payload: Payload, size: int, lease: Lease) -> None:
        super().__init__(payload, size)
        self.lease = lease
        self._packed = 0
        self._slices = lease.memory.slices(self.ranges)

    def bucket(self, number: int) -> Tensor:
        into = self._slices[number]
        if number >= self._packed:
            self.payload.pack(into, *self.ranges[number])
            self._packed = number + 1
        return into

    def again(self) -> None:
        """Nobody writes to it any more, so that two may read."""

    @property
    def held(self) -> object:
        return self.lease

    def finish(self) -> None:
        for number in range(self._packed, len(self.ranges)):
            self.bucket(number)


class Ring(Source):
    """A few buckets in turn, for trainers that keep no copy. To send again is to read again."""

    def __init__(self, payload: Payload, size: int, pool: Pool, device: str) -> None:
        super().__init__(payload, size)
        self._pool, self._device = pool, device
        self._largest = max((stop - start for start, stop in self.ranges), default=0)
        self._count = min(IN_FLIGHT + 1, len(self.ranges))
        self.again()

    def bucket(self, number: int) -> Tensor:
        start, stop = self.ranges[number]
        into = self._slices[number % self._count][: stop - start]
        self.payload.pack(into, start, stop)
        self._next = number + 1
        return into

    def again(self) -> None:
        """A work that hangs still has the old buffers."""
        size = aligned(self._largest)
        self._lease = self._pool.take(self._count * size, self._device)
        self._slices = self._lease.memory.slices([(at * size, (at + 1) * size) for at in range(self._count)])
        self._next = 0

    @property
    def held(self) -> object:
        return self._lease

    def finish(self) -> None:
        if self.payload.digest:
            for number in range(self._next, len(self.ranges)):
                self.bucket(number)
