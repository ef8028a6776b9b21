"""Which bytes are sent, and from where they are read: from tensors to a layout and the sources of its blocks.

Tensors that share memory are found by their addresses, are sent once and come out tied: those of equal geometry are one
block; views of one of them are strided entries in its block; those that overlap otherwise are strided entries in a
*run*, a flat piece of their storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weightwire.weights.blocks import Block, Run
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.layout import Entry, Layout, extent
from weightwire.weights.spans import Span, fold, overlapping, span_of
from weightwire.weights.windows import Windows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Plan", "make_plan"]


class Plan:
    """A layout, the source of each of its blocks, and what else the tensors' geometry says. Holds none of the tensors.

    Attributes:
        tied: entries that share their block with others.
        unusual: entries whose tensor is not what is sent: to be cast, gathered, or conjugated.
        devices: other than the CPU, from which is read.
        windows: the places of blocks in memory that is packed again and again.
        independent: whether no block is read in a way that depends on others having been read.
    """

    def __init__(
        self, layout: Layout, blocks: tuple[Block, ...], unusual: tuple[int, ...], devices: frozenset[torch.device]
    ) -> None:
        self.layout = layout
        self.blocks = blocks
        self.unusual = unusual
        self.devices = devices
        self.independent = not devices and not any(block.gathered or block.scaled for block in blocks)
        self.windows = Windows(layout, blocks)
        uses = Counter(entry.block for entry in layout.entries)
        self.tied = [position for position, entry in enumerate(layout.entries) if uses[entry.block] > 1]

    def same_as(self, other: Plan) -> bool:
        """Whether one will do for the other."""
        return (self.layout, self.blocks, self.unusual, self.devices) == (
            other.layout,
            other.blocks,
            other.unusual,
            other.devices,
        )


def make_plan(
    names: Sequence[str], tensors: Sequence[Tensor], dtypes: Sequence[str], scaled: Sequence[str] = ()
) -> Plan:
    """Lay out tensors under these names, to be sent as these dtypes; ``scaled`` where a scale is made: the float8 of
    the tensor, both for it and for its scale.

    Ties are lost only where keeping them is impossible or absurd: views of different dtypes of which one is cast; a
    misaligned view; overlapping sparse views (every thousandth element, say) of memory that is not sent itself.
    """
    spans: dict[tuple[Any, ...], Span] = {}
    spans_of = []
    for leaf, (tensor, dtype) in enumerate(zip(tensors, dtypes)):
        span = span_of(leaf, tensor, dtype, scaled[leaf] if scaled else "")
        spans_of.append(spans.setdefault(span.key, span))
    places: dict[int, _Place] = {}
    for group in overlapping(spans.values()):
        places.update(_shared(group, tensors) if len(group) > 1 else _alone(group))

    numbers: dict[Block, int] = {}
    entries: list[Entry] = []
    for name, tensor, dtype, span in zip(names, tensors, dtypes, spans_of):
        place = places[span.leaf]
        number = numbers.setdefault(place.block, len(numbers))
        shape = span.shape if span.scaled else tuple(tensor.shape)
        entries.append(Entry(name, dtype, shape, number, place.offset, place.strides))
    sizes = tuple(extent(b.written.shape, b.written.strides) * DTYPES[b.written.dtype] for b in numbers)
    unusual = tuple(n for n, span in enumerate(spans_of) if span.unusual)
    devices = frozenset(tensor.device for tensor in tensors if tensor.device.type != "cpu")
    return Plan(Layout(tuple(entries), sizes), tuple(numbers), unusual, devices)


class _Place(NamedTuple):
    block: Block
    offset: int
    strides: tuple[int, ...]


def _alone(spans: Iterable[Span]) -> dict[int, _Place]:
    """Each in a block of its own: in its own order where it is dense, packed row by row where it is not."""
    places = {}
    for span in spans:
        strides = span.strides if span.dense else ()
        written = Entry("", span.sent, span.shape, 0, 0, strides)
        places[span.leaf] = _Place(Block(span.leaf, written, gathered=span.gathered, scaled=span.scaled), 0, strides)
    return places


def _shared(group: list[Span], tensors: Sequence[Tensor]) -> dict[int, _Place]:
    """All in one block, where that is possible and less than twice what they would take one by one."""
    start, stop = min(s.start for s in group), max(s.stop for s in group)
    covering = [s for s in group if (s.start, s.stop) == (start, stop)]
    if not any(s.dense for s in covering):
        for owner in covering:
            places = _folded(group, owner)
            if places:
                return places
        if stop - start > 2 * sum(s.used for s in group):
            # Without the sparse ones the rest are fine: a range is no longer than the sum of its parts.
            places = _alone(s for s in group if s.sparse)
            for rest in overlapping(s for s in group if not s.sparse):
                places.update(_shared(rest, tensors) if len(rest) > 1 else _alone(rest))
            return places
    return _run(group, start, stop, tensors)


def _folded(group: Sequence[Span], owner: Span) -> dict[int, _Place]:
    """The owner, packed, and all others as views of it; nothing where one of them is no view of it."""
    places = _alone([owner])
    block = places[owner.leaf].block
    for span in group:
        if span is owner:
            continue
        found = fold(span, owner) if (span.dtype, span.sent) == (owner.dtype, owner.sent) else None
        if found is None:
            return {}
        places[span.leaf] = _Place(block, found[0] * DTYPES[owner.sent], found[1])
    return places


def _run(group: Sequence[Span], start: int, stop: int, tensors: Sequence[Tensor]) -> dict[int, _Place]:
    """All in one flat piece of their storage."""
    dtype, sent = _unit(group, start)
    reader = next((s for s in group if _covers(tensors[s.leaf], start, stop)), None)
    if not dtype or reader is None:
        return _alone(group)
    size = DTYPES[dtype]
    run = Run(dtype, start - reader.start, (stop - start) // size)
    block = Block(reader.leaf, Entry("", sent, (run.length,), 0), run)
    places = {}
    for span in group:
        # In bytes as sent: a cast of all changes the size of all alike.
        offset = (span.start - start) // size * DTYPES[sent]
        aligned = offset % DTYPES[span.sent] == 0
        places.update({span.leaf: _Place(block, offset, span.strides)} if aligned else _alone([span]))
    return places


def _unit(group: Sequence[Span], start: int) -> tuple[str, str]:
    """The dtypes in which a run is read and sent: the members' own where they agree, else bytes; empty for casts."""
    dtype, sent = group[0].dtype, group[0].sent
    agree = all(s.dtype == dtype and s.sent == sent for s in group)
    if agree and not any((s.start - start) % DTYPES[dtype] for s in group):
        return dtype, sent
    return ("", "") if any(s.dtype != s.sent for s in group) else ("uint8", "uint8")


def _covers(tensor: Tensor, start: int, stop: int) -> bool:
    storage = tensor.untyped_storage()
    base = tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()
    return base <= start and stop <= base + storage.nbytes()
