"""What goes on in a group: the works of one version, and what becomes of those that failed.

A group that fails is never waited for and never used again. Its works may go on for a while, with the buffers that they
read and write; :class:`Graveyard` holds all of them until they have ended.
"""

from __future__ import annotations

import atexit
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from weightwire import forks
from weightwire.weights.layout import aligned

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire_nccl.groups import Group

__all__ = ["IN_FLIGHT", "SLICE", "Graveyard", "Works"]

IN_FLIGHT = 3
"""Buckets under way at once: while one is sent, the next is packed, and the engine has another to begin with."""
SHORT = 4 << 10
"""Bytes of a part, below which a bucket is not cut."""
SLICE = 0.02
"""Seconds of a wait, between looks at who is alive."""


class Works:
    """The works of one version over one group, a few buckets at a time.

    ``scatter_allgather`` cuts a bucket into as many parts as there are members. The parts are scattered, then gathered
    by all, so that what the trainer sends does not grow with the number of workers. A short bucket is broadcast: two
    operations would cost more than they save. All members post the same operations in the same order: the scatter of a
    bucket before the gathering of the one before it, so that they go on together.
    """

    def __init__(self, group: Group, algorithm: str) -> None:
        self.group = group
        self._cut = algorithm == "scatter_allgather"
        self._posted: deque[list[Any]] = deque()
        self._half: _Half | None = None  # of the newest bucket

    @property
    def full(self) -> bool:
        return len(self._posted) >= IN_FLIGHT

    def __bool__(self) -> bool:
        return bool(self._posted)

    def post(self, bucket: Tensor) -> Iterator[None]:
        """Post a bucket; yields whenever a step has to be waited for before the next can be posted."""
        works: list[Any] = []
        self._posted.append(works)
        before, self._half = self._half, None
        if self._cut and bucket.numel() >= SHORT * self.group.size:
            self._half = self._scatter(bucket, works)
        else:
            works.append(self.group.broadcast(bucket))
        if before is not None:
            while not self.group.wait(before.scattered, SLICE):
                yield
            self._gather(before)

    def wait(self, seconds: float) -> bool:
        """Wait for the oldest bucket; whether it is through. Raises :class:`GroupError`."""
        works = self._posted[0]
        while works:
            if not self.group.wait(works[0], seconds):
                return False
            if self._half is not None and self._half.works is works:
                self._gather(self._half)
                self._half = None
            else:
                works.pop(0)
        self._posted.popleft()
        return True

    def _scatter(self, bucket: Tensor, works: list[Any]) -> _Half:
        """Post the first half. The last part ends with the bucket, and may overlap the one before it."""
        group, length = self.group, bucket.numel()
        size = min(aligned(-(-length // group.size)), length)
        starts = [min(rank * size, length - size) for rank in range(group.size)]
        parts = [bucket[start : start + size] for start in starts]
        works.append(group.scatter(parts[group.rank], parts if group.rank == 0 else ()))
        return _Half(parts, works)

    def _gather(self, half: _Half) -> None:
        """Post the other half, of a bucket whose parts are where they belong."""
        group, parts = self.group, half.parts
        mine = parts[group.rank].clone()
        if group.rank == 0:  # what the trainer keeps is never written again, not even with what should be the same
            parts = group.scratch(len(parts), parts[0])
        half.works[0] = group.gather(parts, mine)

    @property
    def ended(self) -> bool:
        return all(self.group.ended(work) for works in self._posted for work in works)


class _Half(NamedTuple):
    """A bucket whose parts were scattered."""

    parts: Sequence[Tensor]
    works: list[Any]

    @property
    def scattered(self) -> Any:
        return self.works[0]


class _Grave:
    def __init__(self, group: Group, works: Works | None, held: object) -> None:
        self.group, self.works, self.held = group, works, held
        self._until = time.monotonic() + (group.patience if works is not None else 0.0)

    @property
    def ended(self) -> bool:
        """Whether its works have; what they held is free then."""
        if self.works is not None and not self.works.ended:
            return False
        self.held = None
        return True

    @property
    def quiet(self) -> bool:
        return self.ended and time.monotonic() >= self._until

    def leak(self) -> None:
        self.group.leak()
        for thing in (self.works, self.held):
            forks.keep(thing)


class Graveyard:
    """Groups that failed, with all that their works still hold.

    Gloo's destructors wait for as long as another member is under way in the group, which ends at the works' time
    limit. So nothing is destroyed before that, and whoever else keeps a reference would have to wait.
    """

    _left: ClassVar[list[_Grave]] = []  # by those that were closed before; any other of this process sweeps them
    _ending: ClassVar[bool] = False

    def __init__(self) -> None:
        self._graves: list[_Grave] = []
        self.sweep()

    def bury(self, group: Group, works: Works | None, held: object) -> None:
        """Keep ``group`` and ``held`` until the works have ended."""
        group.abort()
        self._graves.append(_Grave(group, works, held))
        self.sweep()

    def sweep(self) -> None:
        """Let go what can go."""
        self._graves = [grave for grave in self._graves if not grave.quiet]
        left, Graveyard._left = Graveyard._left, []
        Graveyard._left += [grave for grave in left if not grave.quiet]

    def close(self, seconds: float) -> None:
        """Wait that long for the last works, then leave the rest to other graveyards, or to the end of the process."""
        until = time.monotonic() + seconds
        while not all(grave.ended for grave in self._graves) and time.monotonic() < until:
            time.sleep(0.01)
        self.sweep()
        if not Graveyard._ending:
            Graveyard._left += self._graves
            self._graves = []
        self.leak()

    def leak(self) -> None:
        """Never free what is here: in a forked child, or at the end of the process, when nobody may wait."""
        for grave in self._graves:
            grave.leak()
        self._graves = []


def _end() -> None:
    Graveyard._ending = True
    _leak_left()


def _leak_left() -> None:
    for grave in Graveyard._left:
        grave.leak()
    Graveyard._left = []


atexit.register(_end)
os.register_at_fork(after_in_child=_leak_left)
