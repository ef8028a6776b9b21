"""How the bytes of one block are read from the caller's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from weightwire.errors import PreflightError
from weightwire.weights.dtypes import DTYPES, needs_bit_copy, torch_dtype
from weightwire.weights.pieces import Feed, Gather, Piece, Want, whole_piece
from weightwire.weights.scaled import quantised, scale_of, scale_to

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.weights.layout import Entry, Layout

__all__ = ["Block", "Reader", "Run", "bits"]


SLICE = 1 << 18
"""Elements that are cast at a time while they are gathered: what that takes in between stays small."""


class Run(NamedTuple):
    """A flat piece of a tensor's storage: ``length`` elements of ``dtype``, ``start`` bytes from the tensor's first."""

    dtype: str
    start: int
    length: int

    def read(self, tensor: Tensor) -> Tensor:
        """The piece, live."""
        import torch

        first = tensor.storage_offset() * tensor.element_size() + self.start
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        flat.set_(tensor.untyped_storage(), first, (self.length * DTYPES[self.dtype],), (1,))
        return flat.view(torch_dtype(self.dtype))


class Block(NamedTuple):
    """Where a block is read (``tensors[leaf]``, or a run in its storage), and the entry that says how it is written."""

    leaf: int
    written: Entry
    run: Run | None = None
    gathered: bool = False
    scaled: str = ""  # the float8 to which the tensor is cast with a scale: this block is that, or the scale

    @property
    def plain(self) -> bool:
        """Whether ``tensors[leaf]`` is what :meth:`read` gives."""
        made = self.run is not None or self.gathered or self.scaled
        return not made and not needs_bit_copy(torch_dtype(self.written.dtype))

    @property
    def is_scale(self) -> bool:
        return bool(self.scaled) and self.written.dtype != self.scaled

    def read(self, tensors: Sequence[Tensor], reader: Reader) -> Tensor:
        """The values, live and in the shape in which they are written, before any cast. Not of what is gathered."""
        tensor = tensors[self.leaf]
        if self.scaled:
            return reader.scaled(tensor, self.scaled, whole=not self.is_scale)
        return bits(tensor if self.run is None else self.run.read(tensor))

    def flat(self, tensors: Sequence[Tensor], reader: Reader) -> Tensor:
        """The bytes as they are written, flat uint8, on the tensor's device: its own memory where that is fit."""
        import torch

        tensor = self.read(tensors, reader).detach()
        if not tensor.numel():
            return torch.empty(0, dtype=torch.uint8, device=tensor.device)
        tensor = _as_written(tensor, self.written.dtype)
        order = self.written.strides
        if not order:
            tensor = tensor.contiguous()
        elif any(n != 1 and ours != theirs for n, ours, theirs in zip(tensor.shape, tensor.stride(), order)):
            tensor = torch.empty_strided(tensor.shape, order, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        # Not view(-1), which leaves any stride to a tensor of one element.
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _as_written(tensor: Tensor, dtype: str) -> Tensor:
    """Cast, and without anything that is only said of its bits; of a dtype that torch can copy."""
    import torch

    if tensor.dtype != torch.uint8:
        tensor = tensor.to(torch_dtype(dtype)).resolve_conj().resolve_neg()
    if tensor.dtype == torch.complex32:  # of which torch makes no new one without a warning
        tensor = tensor.view(torch.int32)
    return tensor


class Reader:
    """Reads what is no tensor that is simply there: gathers, and makes scales, once each for one payload."""

    def __init__(
        self, blocks: Sequence[Block], tensors: Sequence[Tensor], layout: Layout, gather: Gather | None = None
    ) -> None:
        self._blocks = blocks
        self._tensors = tensors
        self._layout = layout
        self._gather = gather
        self._scales: dict[tuple[int, str], Tensor] = {}
        self._leaves: dict[tuple[int, str], int] = {}
        self._feed: Feed | None = None  # made when something is gathered, which is rare

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None  # it may lead back here

    def scaled(self, tensor: Tensor, dtype: str, *, whole: bool) -> Tensor:
        """The tensor in float8, or its scale: which is known by then, for the tensor comes first."""
        scale = self._scales.get((id(tensor), dtype))
        if scale is None:
            scale = self._scales[id(tensor), dtype] = self._finite(scale_of(tensor.detach(), dtype), tensor)
        return quantised(tensor.detach(), scale, dtype) if whole else scale

    def parts(self, number: int, start: int, stop: int, put: Callable[[Tensor, int], object]) -> None:
        """Bytes ``start`` to ``stop`` of a gathered block as they are written: ``put(flat bytes, at)``, where ``at``
        counts from ``start``. In ascending order of blocks and bytes; they are to be forgotten when ``put`` returns."""
        import torch

        block = self._blocks[number]
        size = DTYPES[block.written.dtype]

        def take(values: Tensor, position: int) -> None:
            made = bool(block.scaled) or values.dtype != torch_dtype(block.written.dtype)
            step = SLICE if made else values.numel()
            for at in range(0, values.numel(), step):
                some = values[at : at + step]
                if block.scaled and not block.is_scale:
                    some = quantised(some, self._scale(block), block.scaled)
                data = _as_written(bits(some), block.written.dtype).contiguous().view(torch.uint8)
                origin = (position + at) * size
                first, last = max(start - origin, 0), min(stop - origin, data.numel())
                put(data[first:last], origin + first - start)

        if block.is_scale:
            take(self._scale(block).reshape(1), 0)
        else:
            self._fed().read(block.leaf, start // size, -(-stop // size), take)

    def _scale(self, block: Block) -> Tensor:
        import torch

        tensor = self._tensors[block.leaf]
        key = (id(tensor), block.scaled)
        scale = self._scales.get(key)
        if scale is None:
            feed = self._fed()
            amax = feed.amax(self._leaves[key]) if tensor.numel() else torch.zeros(())
            scale = self._scales[key] = self._finite(scale_to(amax, block.scaled), tensor)
        return scale

    def _finite(self, scale: Tensor, tensor: Tensor) -> Tensor:
        """The scale, which only numbers that float32 has not can make infinite: others need no look."""
        import torch

        if tensor.dtype == torch.float64 and not scale.isfinite():
            name = next(e.name for e, other in zip(self._layout.entries, self._tensors) if other is tensor)
            raise PreflightError(
                f"{name!r} holds numbers beyond float32, in which its scale would be sent: leave it out"
            )
        return scale

    def _fed(self) -> Feed:
        if self._feed is None:
            tensors = self._tensors
            wanted = [block for block in self._blocks if block.gathered and not block.is_scale]
            self._leaves = {(id(tensors[block.leaf]), block.scaled): block.leaf for block in wanted}
            wants = [Want(block.leaf, bool(block.scaled)) for block in wanted if tensors[block.leaf].numel()]
            self._feed = Feed(wants, self._gather or self._here)
        return self._feed

    def _here(self, wants: Sequence[Want]) -> Iterator[Piece]:
        for want in wants:
            yield whole_piece(want, self._tensors[want.leaf])


def bits(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes where torch cannot copy its dtype."""
    import torch

    return tensor.view(torch.uint8) if needs_bit_copy(tensor.dtype) else tensor
