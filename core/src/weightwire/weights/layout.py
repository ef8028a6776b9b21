"""What a payload looks like: entries (named, typed views) over blocks (bytes that are sent once).

A tensor that shares memory with no other has a block of its own. Tied tensors, and views of one another, are several
entries over one block, so that ties travel once and come out tied. Blocks start at multiples of 64 bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

import msgspec

from weightwire.weights.dtypes import DTYPES, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ALIGNMENT", "Entry", "Layout", "aligned", "dense_strides", "extent", "view"]

ALIGNMENT = 64
"""Bytes. A wider dtype after an odd-sized bool, and every device we know, is content with it."""


def aligned(nbytes: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One named tensor: ``block[offset:]`` (bytes) seen as ``dtype`` with ``shape`` and ``strides`` (elements).

    ``strides`` is empty for row-major, which is the rule.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    block: int
    offset: int = 0
    strides: tuple[int, ...] = ()


class Layout(msgspec.Struct, frozen=True, dict=True, eq=True):
    """Entries and the sizes of the blocks under them, in bytes.

    One ``Layout`` object stands for one layout: whoever decodes or builds an equal one again hands out the same
    object, so that everything derived from it (views, plans) can be kept by identity.
    """

    entries: tuple[Entry, ...]
    sizes: tuple[int, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each block begins in the packed payload, in bytes; one more for the end."""
        return tuple(accumulate((aligned(size) for size in self.sizes), initial=0))

    @property
    def nbytes(self) -> int:
        """Bytes of the packed payload, padding included."""
        return self.starts[-1]

    @cached_property
    def index(self) -> dict[str, int]:
        """Name -> position in ``entries``."""
        return {entry.name: position for position, entry in enumerate(self.entries)}

    @property
    def names(self) -> Iterable[str]:
        return self.index.keys()

    @cached_property
    def wire(self) -> bytes:
        """The encoded form, made once."""
        from weightwire.wire import encode_layout

        return encode_layout(self)

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """For each block with bytes in a range of the packed payload: its number, and which of its bytes (from, to)."""
        starts, sizes = self.starts, self.sizes
        for block in range(max(bisect_right(starts, start) - 1, 0), len(sizes)):
            begin = starts[block]
            if begin >= stop:
                return
            first, last = max(start - begin, 0), min(stop - begin, sizes[block])
            if first < last:
                yield block, first, last

    def slice(self, buffer: Tensor) -> list[Tensor]:
        """Cut a packed flat uint8 tensor into its blocks. They share the buffer's storage."""
        return [buffer[start : start + size] for start, size in zip(self.starts, self.sizes)]

    def views(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """A typed tensor for each entry over flat uint8 blocks. Entries of one block share its storage."""
        return [view(entry, blocks[entry.block]) for entry in self.entries]


def view(entry: Entry, block: Tensor) -> Tensor:
    """The typed tensor of an entry over its block, a flat uint8 tensor, whose storage it shares."""
    nbytes = extent(entry.shape, entry.strides) * DTYPES[entry.dtype]
    # Cut first, so that a block of any length can be seen as any dtype.
    cut = block if nbytes == block.numel() else block[entry.offset : entry.offset + nbytes]
    typed = cut.view(torch_dtype(entry.dtype))
    return typed.as_strided(entry.shape, entry.strides) if entry.strides else typed.view(entry.shape)


def extent(shape: Sequence[int], strides: Sequence[int] = ()) -> int:
    """Elements from the first to behind the last; 0 where there are none. No strides: row-major."""
    if not strides or 0 in shape:
        return prod(shape)
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
