"""How the bytes of a version lie in Ray's object store.

Blocks go in as flat uint8 arrays, in lists ("buckets") that Ray pickles out of band: array after array, each at a
multiple of 64 bytes. Blocks lie just like that in a packed payload, so a bucket that is mapped is one stretch of it.
That is checked, not trusted: where a release of Ray lays arrays otherwise, the stretch is a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from weightwire.errors import WireError
from weightwire.weights.arrays import array_of
from weightwire.weights.layout import ALIGNMENT, aligned

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightwire.weights.layout import Layout
    from weightwire.weights.payload import Payload

    Bytes = NDArray[np.uint8]

__all__ = ["blocks_of", "buckets", "digest_of", "stretches_of"]

PIECE = 1 << 20
"""Ray starts six threads for each array that is larger than this, to copy it."""
WHOLE = 64 << 20
"""From here on those threads are worth it; a block between the two is handed over in pieces."""
SMALL = 64 << 10
"""Smaller blocks are gathered in a piece: pickling an array costs as much as copying this many bytes."""


def buckets(payload: Payload, size: int) -> Iterator[list[Bytes]]:
    """The payload's bytes in lists of up to ``size`` bytes, or of one block that is larger. One that is gathered from
    several ranks goes into several lists then: nobody needs more memory than two of them take."""
    bucket = _Bucket()
    for flat in payload.parts(size):
        if bucket.nbytes and bucket.nbytes + flat.numel() > size:
            yield bucket.pieces()
            bucket = _Bucket()
        bucket.add(array_of(flat))
    if bucket.nbytes:
        yield bucket.pieces()


class _Bucket:
    """Whole blocks, cut or gathered into arrays that Ray copies fast."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._pieces: list[Bytes] = []
        self._gathered = np.empty(0, np.uint8)
        self._used = 0

    def add(self, block: Bytes) -> None:
        self.nbytes += aligned(block.size)
        if block.size > SMALL:
            self._flush()
            step = PIECE if block.size < WHOLE else block.size
            self._pieces.extend(block[start : start + step] for start in range(0, block.size, step))
        elif block.size:
            if self._used + block.size > self._gathered.size:
                self._flush()
                self._gathered = np.zeros(PIECE, np.uint8)  # not empty: padding must not carry old memory away
            self._gathered[self._used : self._used + block.size] = block
            self._used += aligned(block.size)

    def pieces(self) -> list[Bytes]:
        self._flush()
        return self._pieces

    def _flush(self) -> None:
        if self._used:
            self._pieces.append(self._gathered[: self._used])
        self._gathered, self._used = np.empty(0, np.uint8), 0


def stretches_of(buckets: Iterable[Sequence[Any]], layout: Layout) -> list[Bytes]:
    """Each bucket's arrays as one. Raises ``WireError`` where they are not a payload of this layout."""
    stretches = [_joined(bucket) for bucket in buckets if len(bucket)]
    nbytes = sum(aligned(stretch.size) for stretch in stretches)
    if nbytes != layout.nbytes:
        raise WireError(f"the buckets hold {nbytes} bytes, but the header speaks of {layout.nbytes}")
    return stretches


def blocks_of(stretches: Sequence[Bytes], layout: Layout) -> Iterator[Bytes]:
    """The blocks, in the layout's order; a copy of one that does not lie within one stretch. Raises ``WireError`` where
    a stretch ends amid others than those."""
    rest, begin, end = iter(stretches), 0, 0
    stretch = np.empty(0, np.uint8)
    for start, size in zip(layout.starts, layout.sizes):
        while size and start >= end:
            stretch = next(rest)  # there is one: the sizes were held against the layout's
            begin, end = end, end + aligned(stretch.size)
        first = start - begin if size else 0
        block = stretch[first : first + size]
        if block.size != size:
            parts, lacking = [block], size - block.size
            while lacking:
                if first or parts[-1].size % ALIGNMENT:
                    raise WireError(f"a block of {size} bytes is cut off after {size - lacking}")
                stretch = next(rest)
                begin, end = end, end + aligned(stretch.size)
                parts.append(stretch[:lacking])
                lacking -= parts[-1].size
            block = np.concatenate(parts)
        yield block


def digest_of(buckets: Iterable[Sequence[Any]], layout: Layout) -> bytes:
    """The xxh3-128 that :mod:`weightwire.weights.digest` makes of the same blocks."""
    import xxhash

    state = xxhash.xxh3_128()
    for block in blocks_of(stretches_of(buckets, layout), layout):
        state.update(block)  # type: ignore[arg-type]
    return state.digest()


def _joined(arrays: Sequence[Any]) -> Bytes:
    """Arrays that lie one after the other, each at a multiple of 64 bytes, as one; others are copied together."""
    if not all(type(array) is np.ndarray and array.dtype == np.uint8 and array.ndim == 1 for array in arrays):
        raise WireError("a bucket in Ray's store holds something else than flat arrays of bytes")
    row = _row(tuple(map(_SIZE, arrays)))
    first = _address(arrays[0])
    if first % ALIGNMENT == 0 and row.holds(arrays, first):
        return np.asarray(_Window(arrays, first, row.nbytes))
    spacious = np.zeros(row.nbytes + ALIGNMENT, np.uint8)
    joined = spacious[-_address(spacious) % ALIGNMENT :][: row.nbytes]
    for array, place in zip(arrays, row.places):
        joined[place : place + array.size] = array
    return joined


_SIZE = attrgetter("size")


class _Row:
    """Where arrays of some sizes are to lie, and where the last one ends."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.places = [0, *accumulate(map(aligned, sizes[:-1]))]
        self.nbytes = self.places[-1] + sizes[-1]
        self._known = False

    def holds(self, arrays: Sequence[Bytes], first: int) -> bool:
        """Whether they lie so. Ray places the arrays of one object by their sizes alone: where a thousand of these
        sizes did once, a look at the last one is enough."""
        if not self._known:
            self._known = all(_address(array) == first + place for array, place in zip(arrays, self.places))
        return self._known and _address(arrays[-1]) == first + self.places[-1]


@lru_cache(64)
def _row(sizes: tuple[int, ...]) -> _Row:
    return _Row(sizes)


def _address(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class _Window:
    """The memory of several arrays, which NumPy keeps alive with the array that it makes of this. It is read-only, but
    not called so: torch warns of such arrays. ``Delivery(writable=False)`` says it."""

    def __init__(self, owners: Sequence[Bytes], address: int, nbytes: int) -> None:
        self._owners = owners
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}
