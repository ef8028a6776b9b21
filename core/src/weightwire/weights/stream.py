"""A payload that is applied bucket by bucket, in bounded memory: not all or nothing, but never unnoticed either.

What is checked for a whole payload is checked before its first byte: names, shapes, dtypes. Then pieces are prepared
and committed as their bytes come in. A piece is all that has become complete with a bucket; what belongs together
(entries of one block, and groups that the user names) is never divided between two.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from weightwire.errors import DigestError, WireError
from weightwire.transport import Header
from weightwire.weights.arrays import array_of
from weightwire.weights.commit import commit
from weightwire.weights.layout import Layout
from weightwire.weights.slots import quietly

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.weights.layout import Entry
    from weightwire.weights.target import Target

__all__ = ["Group", "Poured", "StreamPlan", "pour"]

Group = Callable[[str], Hashable]
"""A tensor's name -> what it belongs to; ``None``: to nothing. Tensors that belong together are applied together."""


class Poured(NamedTuple):
    """What a target took, ties counted once in bytes."""

    tensors: int
    nbytes: int


class StreamPlan:
    """How the blocks of a layout belong together; made once a layout."""

    def __init__(self, layout: Layout, group: Group | None) -> None:
        self.layout = layout
        self.entries: dict[int, list[Entry]] = {}  # by block
        first: dict[Hashable, int] = {}  # of each group, its first block
        self._with: list[int] = list(range(len(layout.sizes)))
        for entry in layout.entries:
            self.entries.setdefault(entry.block, []).append(entry)
            key = None if group is None else group(entry.name)
            if key is not None:
                self._join(first.setdefault(key, entry.block), entry.block)
        groups: dict[int, list[int]] = {}
        for block in range(len(layout.sizes)):
            groups.setdefault(self._root(block), []).append(block)
        self.group_of = {block: tuple(blocks) for blocks in groups.values() for block in blocks}
        self._pieces: dict[tuple[int, ...], Layout] = {}

    def _root(self, block: int) -> int:
        while self._with[block] != block:
            block = self._with[block]
        return block

    def _join(self, one: int, other: int) -> None:
        one, other = self._root(one), self._root(other)
        self._with[max(one, other)] = min(one, other)

    def piece(self, blocks: tuple[int, ...]) -> Layout:
        """The layout of some blocks: the same object for the same blocks."""
        known = self._pieces.get(blocks)
        if known is None:
            entries = [
                type(entry)(entry.name, entry.dtype, entry.shape, number, entry.offset, entry.strides)
                for number, block in enumerate(blocks)
                for entry in self.entries.get(block, ())
            ]
            known = self._pieces[blocks] = Layout(tuple(entries), tuple(self.layout.sizes[block] for block in blocks))
        return known


def pour(header: Header, buckets: Iterable[tuple[int, Tensor]], target: Target, plan: StreamPlan) -> Poured:
    """Apply a payload to a target as its buckets come: ``(start byte, flat uint8 tensor)``, in ascending order.

    ``target.admit`` has to have been asked before. Raises :class:`~weightwire.DigestError` or
    :class:`~weightwire.WireError` where the bytes are not those of the header, and what the target raises: in any case
    it may have taken a part.
    """
    pouring = _Pouring(header, target, plan)
    for start, flat in buckets:
        pouring.take(start, flat)
    pouring.finish()
    return Poured(pouring.tensors, pouring.nbytes)


class _Pouring:
    def __init__(self, header: Header, target: Target, plan: StreamPlan) -> None:
        import xxhash

        self._header, self._target, self._plan = header, target, plan
        self._layout = header.layout
        self._hash = xxhash.xxh3_128() if header.digest else None
        self._done = 0  # bytes of the packed payload that have come
        self._held: dict[int, Tensor] = {}  # blocks, or what there is of them, that wait for others
        self._filled: dict[int, int] = {}  # bytes of each of them
        self._direct: dict[int, Tensor | None] = {}  # the target's own memory for blocks that are larger than a bucket
        self.tensors = self.nbytes = 0

    def take(self, start: int, flat: Tensor) -> None:
        """One bucket; its memory is not used when this returns."""
        if start < self._done or self._lacks(start) or start + flat.numel() > self._layout.nbytes:
            raise WireError(f"bytes {start} to {start + flat.numel()} came after {self._done} of {self._layout.nbytes}")
        self._done = start + flat.numel()
        whole: dict[int, Tensor] = {}
        for block, first, last in self._layout.within(start, self._done):
            begin = self._layout.starts[block] + first - start
            part = flat[begin : begin + last - first]
            if self._hash:
                self._hash.update(array_of(part.cpu()))  # type: ignore[arg-type]
            if last - first == self._layout.sizes[block]:
                whole[block] = part
            elif not self._write(block, first, part):
                self._hold(block, first, part)
        self._apply(whole)

    def finish(self) -> None:
        """All bytes are there, and they are those that were sent."""
        import torch

        if self._lacks(self._layout.nbytes):
            raise WireError(f"the payload ended after {self._done} of {self._layout.nbytes} bytes")
        sizes = self._layout.sizes
        self._apply({block: torch.empty(0, dtype=torch.uint8) for block, size in enumerate(sizes) if not size})
        if self._hash and self._hash.digest() != self._header.digest:
            raise DigestError(
                f"the bytes of version {self._header.stamp.number} have digest {self._hash.hexdigest()}, but the "
                f"trainer sent {self._header.digest.hex()}"
            )

    def _lacks(self, until: int) -> bool:
        """Whether anything but padding is missing before that byte."""
        return next(self._layout.within(self._done, until), None) is not None

    def _write(self, block: int, first: int, part: Tensor) -> bool:
        """Put a part of a block where it belongs for good, if the target has plain memory for it."""
        if block not in self._direct:
            entries = self._plan.entries.get(block, [])
            alone = len(entries) == 1 and self._plan.group_of[block] == (block,)
            memory = self._target.plain_memory(entries[0]) if alone else None
            whole = memory is not None and memory.numel() == self._layout.sizes[block]  # else a view of a part of it
            self._direct[block] = memory if whole else None
        into = self._direct[block]
        if into is None:
            return False
        quietly(lambda: into[first : first + part.numel()].copy_(part))
        if first + part.numel() == self._layout.sizes[block]:
            self.tensors += 1
            self.nbytes += self._layout.sizes[block]
        return True

    def _hold(self, block: int, first: int, part: Tensor) -> None:
        import torch

        size = self._layout.sizes[block]
        if block not in self._held:
            self._held[block] = quietly(lambda: torch.empty(size, dtype=torch.uint8, device=part.device))
            self._filled[block] = 0
        held = self._held[block]
        quietly(lambda: held[first : first + part.numel()].copy_(part))
        self._filled[block] += part.numel()

    def _apply(self, whole: dict[int, Tensor]) -> None:
        """Prepare and commit all groups that are complete now; keep what waits for others."""
        there = whole.keys() | {block for block, filled in self._filled.items() if filled == self._layout.sizes[block]}
        ready = sorted(block for block in there if all(other in there for other in self._plan.group_of[block]))
        if ready:
            blocks = [whole[block] if block in whole else self._held[block] for block in ready]
            piece = self._plan.piece(tuple(ready))
            if piece.entries:
                header = Header(self._header.stamp, piece, base=self._header.base or self._header.stamp)
                views = quietly(lambda: piece.views(blocks))
                prepared = self._target.prepare(header, views, writable=False)
                try:
                    commit([prepared])
                    self.tensors += prepared.tensors
                    self.nbytes += prepared.nbytes
                finally:
                    prepared.done()
        for block in ready:
            self._held.pop(block, None)
            self._filled.pop(block, None)
        for block in whole.keys() - set(ready):
            self._hold(block, 0, whole[block])
