"""What a payload looks like: entries (named, typed views) over blocks (bytes that are sent once).

A tensor that shares memory with no other has a block of its own. Tied tensors, and views of one another, are several
entries over one block, so that ties travel once and come out tied. Blocks start at multiples of 64 bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from weightwire.weights.dtypes import DTYPES, torch_dtype

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
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
    def used(self) -> int:
        """Bytes of the blocks, without padding."""
        return sum(self.sizes)

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

    def array_blocks(self, array: NDArray[np.uint8]) -> list[Tensor]:
        """Cut a packed flat uint8 array into its blocks. Each has a storage of its own, which keeps the array alive."""
        import torch

        return [torch.from_numpy(array[start : start + size]) for start, size in zip(self.starts, self.sizes)]

    def array_views(self, array: NDArray[np.uint8]) -> list[Tensor]:
        """A typed tensor for each entry over a packed flat uint8 array. Each block has a storage of its own, which
        keeps the array alive."""
        import torch

        shape_as, tensor_of, cuts = np.ndarray, torch.from_numpy, self._cuts
        # All in NumPy, where that can be: a view made by torch costs several times as much.
        tensors = [tensor_of(shape_as(shape, carrier, array, start)) for shape, carrier, start in cuts.arrays]
        for position, dtype in cuts.recast:
            tensors[position] = tensors[position].view(dtype)
        if cuts.odd:
            blocks = {self.entries[position].block: tensors[position] for position in cuts.odd}
            for position in cuts.odd:
                entry = self.entries[position]
                tensors[position] = view(entry, blocks[entry.block])
        return tensors

    @cached_property
    def _cuts(self) -> _Cuts:
        users = Counter(entry.block for entry in self.entries)
        cuts = _Cuts([], [], [])
        for position, entry in enumerate(self.entries):
            start = self.starts[entry.block]
            if entry.strides or users[entry.block] > 1:
                cuts.odd.append(position)
                cuts.arrays.append(((self.sizes[entry.block],), np.dtype(np.uint8), start))
                continue
            plain = entry.dtype in _IN_NUMPY
            if not plain:
                cuts.recast.append((position, torch_dtype(entry.dtype)))
            carrier = np.dtype(entry.dtype if plain else _CARRIERS[DTYPES[entry.dtype]])
            cuts.arrays.append((entry.shape, carrier, start + entry.offset))
        return cuts

    def slice(self, buffer: Tensor) -> list[Tensor]:
        """Cut a packed flat uint8 tensor into its blocks. They share the buffer's storage."""
        return [buffer[start : start + size] for start, size in zip(self.starts, self.sizes)]

    def views(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """A typed tensor for each entry over flat uint8 blocks. Entries of one block share its storage."""
        return [view(entry, blocks[entry.block]) for entry in self.entries]


class _Cuts(NamedTuple):
    """How a layout's tensors are cut out of an array."""

    arrays: list[tuple[tuple[int, ...], np.dtype[Any], int]]
    """For each entry: shape, dtype, first byte."""
    recast: list[tuple[int, torch.dtype]]
    """Positions whose dtype NumPy lacks, and that dtype."""
    odd: list[int]
    """Positions that share a block or are strided; their array is the whole block."""


_IN_NUMPY = frozenset(
    {"float64", "float32", "float16", "complex128", "complex64", "bool"}
    | {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
)
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32"}
"""Bytes an element -> the dtype in place of one that NumPy lacks."""


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
