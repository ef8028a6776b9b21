"""Where the parts of a sharded tensor lie, and how it is cut into pieces that are gathered one by one.

Pure geometry. A *box* is a range ``(start, stop)`` for each dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from weightwire.weights.layout import dense_strides

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Box", "boxes", "common", "cut", "extent_of", "first_of", "holders", "is_spread", "part_of"]

Box = tuple[tuple[int, int], ...]


def is_spread(tensor: Any) -> bool:
    """Whether no rank alone has all of a DTensor."""
    return bool(tensor.device_mesh.size() > 1) and not all(p.is_replicate() for p in tensor.placements)


def part_of(shape: Sequence[int], sizes: Sequence[int], placements: Sequence[Any], at: Sequence[int]) -> Box | None:
    """The box of a tensor that the rank at coordinate ``at`` of a mesh of these ``sizes`` holds; ``None`` where it
    holds no plain box (sums that nobody has added up yet)."""
    axes = _order(placements, sizes)
    if axes is None:
        return None
    box = [(0, size) for size in shape]
    for axis in axes:  # each cuts what the one before has left, as `torch.chunk` does
        dim = placements[axis].dim
        start, stop = box[dim]
        step = -(-(stop - start) // sizes[axis])
        first = min(start + step * at[axis], stop)
        box[dim] = (first, min(first + step, stop))
    return tuple(box)


def _order(placements: Sequence[Any], sizes: Sequence[int]) -> list[int] | None:
    """The axes of the mesh that cut the tensor, in the order in which they do.

    From the first to the last; but one that is strided (FSDP2 over tensor parallelism) cuts after the later axes of its
    dimension, as many ranks as its ``split_factor`` says.
    """
    from torch.distributed.tensor import Replicate, Shard

    order: list[int] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        factor = getattr(placement, "split_factor", None)
        if type(placement) is Shard:
            order.insert(0, axis)
        elif factor is not None:
            later = [other for other in order if placements[other].dim == placement.dim]
            if prod(sizes[other] for other in later) != factor:
                return None
            order.append(axis)
        elif type(placement) is not Replicate:
            return None
    return order


def holders(tensor: Any, leader: int) -> list[tuple[int, Box]] | None:
    """Ranks that together have all of a DTensor, each element once, and the box of each; ``None`` where nobody has
    plain boxes. Of copies, those that are nearest to rank ``leader`` are taken: in its own row of the mesh. Nobody
    where it is not in the mesh: then it has another row of the same tensor."""
    mesh, placements = tensor.device_mesh, tensor.placements
    ranks, sizes = mesh.mesh, tuple(mesh.mesh.shape)
    if not (ranks == leader).any():
        return []
    home = (ranks == leader).nonzero()[0].tolist()
    found = []
    for at in product(*map(range, sizes)):
        if any(p.is_replicate() and here != there for p, here, there in zip(placements, at, home)):
            continue
        box = part_of(tensor.shape, sizes, placements, at)
        if box is None:
            return None
        if extent_of(box):
            found.append((int(ranks[at]), box))
    return found


def boxes(shape: Sequence[int], most: int) -> Iterator[Box]:
    """Cut a shape into boxes of at most ``most`` elements, each a stretch of the row-major tensor, in its order."""

    def cut_from(lead: Box, rest: Sequence[int]) -> Iterator[Box]:
        inner = prod(rest[1:])
        if inner > most:
            for index in range(rest[0]):
                yield from cut_from((*lead, (index, index + 1)), rest[1:])
            return
        step = max(most // max(inner, 1), 1)
        for first in range(0, rest[0], step):
            yield (*lead, (first, min(first + step, rest[0])), *((0, size) for size in rest[1:]))

    if not prod(shape):
        return iter(())
    return cut_from((), shape) if shape else iter([()])


def first_of(box: Box, shape: Sequence[int]) -> int:
    """The position of a box's first element in the row-major tensor."""
    return sum(start * stride for (start, _), stride in zip(box, dense_strides(shape)))


def extent_of(box: Box) -> int:
    """How many elements."""
    return prod(stop - start for start, stop in box)


def common(one: Box, other: Box) -> Box | None:
    """What two boxes share; ``None`` where that is nothing."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other))
    return None if any(start >= stop for start, stop in both) else both


def cut(tensor: Tensor, whole: Box, box: Box) -> Tensor:
    """The view of a box in a tensor that is the box ``whole``."""
    return tensor[tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, whole))]
