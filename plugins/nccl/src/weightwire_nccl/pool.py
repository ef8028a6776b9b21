"""Memory that is used again and again: a buffer goes back to its pool when the last reference to its lease dies.

A version that is kept, a delivery, a view of aliased weights, a broadcast that hangs: whatever still needs a buffer
holds its lease, and nobody has to know who else does.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch

from weightwire.errors import StorageFullError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Lease", "Memory", "Pool"]

SMALL = 1 << 20
"""Bytes below which nothing is called wasteful."""
SPARE = 2
"""Buffers of other sizes that are kept although nobody uses them."""


class Memory:
    """One buffer: a flat uint8 tensor that always lies at the same address."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._ranges: list[tuple[int, int]] = []
        self._slices: list[Tensor] = []

    def slices(self, ranges: list[tuple[int, int]]) -> list[Tensor]:
        """Parts of the buffer; the same objects where the ranges are the same, since packing keeps plans by object."""
        if ranges != self._ranges:
            self._slices = [self.buffer[start:stop] for start, stop in ranges]
            self._ranges = ranges
        return self._slices


class Lease:
    """The right to use a buffer."""

    def __init__(self, memory: Memory, back: deque[Memory]) -> None:
        self.memory = memory
        weakref.finalize(self, back.append, memory).atexit = False

    @property
    def buffer(self) -> Tensor:
        return self.memory.buffer


class Pool:
    """Buffers of one end. ``take`` belongs to one thread; a lease may die in any."""

    def __init__(self) -> None:
        self._free: deque[Memory] = deque()

    def take(self, nbytes: int, device: str = "cpu") -> Lease:
        """A lease of a buffer of at least ``nbytes``. Raises :class:`~weightwire.StorageFullError`."""
        wanted = torch.device(device)
        free = [self._free.popleft() for _ in range(len(self._free))]
        fitting = [m for m in free if m.buffer.device == wanted and nbytes <= m.buffer.numel() <= 2 * nbytes + SMALL]
        memory = min(fitting, key=lambda m: m.buffer.numel(), default=None)
        # More of one size are not needed at once; other sizes may be, for a full version after a subset.
        others = [m for m in free if m not in fitting]
        self._free.extend(others[-SPARE:] if memory is not None else others[-1:])
        del free, fitting, others
        if memory is None:
            memory = _allocate(nbytes, wanted)
        return Lease(memory, self._free)

    def clear(self) -> None:
        """Give up what nobody uses."""
        self._free.clear()


def _allocate(nbytes: int, device: torch.device) -> Memory:
    try:
        return Memory(torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device))
    except (RuntimeError, MemoryError) as exc:  # torch has no kind of its own for the CPU's allocator
        raise StorageFullError(f"a version needs {nbytes / 2**20:.1f} MiB on {device}: {exc}") from exc
