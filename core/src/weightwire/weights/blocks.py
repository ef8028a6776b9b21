"""How the bytes of one block are read from the caller's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from weightwire.weights.dtypes import DTYPES, needs_bit_copy, torch_dtype
from weightwire.weights.scaled import quantised, scale_of

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.weights.layout import Entry

__all__ = ["Block", "Gather", "Reader", "Run", "gathered"]

Gather = Callable[[int, "Tensor"], "Tensor"]
"""Position and tensor -> all of it, where it is sharded."""


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

    def read(self, tensors: Sequence[Tensor], reader: Reader) -> Tensor:
        """The values, live and in the shape in which they are written, before any cast; gathered now where sharded."""
        tensor = tensors[self.leaf]
        if self.scaled:
            return reader.scaled(self.leaf, tensor, self.scaled, whole=self.written.dtype == self.scaled)
        if self.gathered:
            tensor = reader.gather(self.leaf, tensor)
        if self.run is not None:
            tensor = self.run.read(tensor)
        return bits(tensor)

    def flat(self, tensors: Sequence[Tensor], reader: Reader) -> Tensor:
        """The bytes as they are written, flat uint8, on the tensor's device: its own memory where that is fit."""
        import torch

        tensor = self.read(tensors, reader).detach()
        if not tensor.numel():
            return torch.empty(0, dtype=torch.uint8, device=tensor.device)
        if tensor.dtype != torch.uint8:
            tensor = tensor.to(torch_dtype(self.written.dtype)).resolve_conj().resolve_neg()
        if tensor.dtype == torch.complex32:  # of which torch makes no new one without a warning
            tensor = tensor.view(torch.int32)
        order = self.written.strides
        if not order:
            tensor = tensor.contiguous()
        elif any(n != 1 and ours != theirs for n, ours, theirs in zip(tensor.shape, tensor.stride(), order)):
            tensor = torch.empty_strided(tensor.shape, order, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        # Not view(-1), which leaves any stride to a tensor of one element.
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class Reader:
    """Gathers, and makes scales, once each for one payload."""

    def __init__(self, gather: Gather | None = None) -> None:
        self.gather: Gather = gather or _gathered
        self._scales: dict[tuple[int, str], Tensor] = {}

    def scaled(self, leaf: int, tensor: Tensor, dtype: str, *, whole: bool) -> Tensor:
        """The tensor in float8, or its scale: which is known by then, for the tensor comes first."""
        key = (id(tensor), dtype)
        scale = self._scales.get(key)
        if scale is not None and not whole:
            return scale
        tensor = self.gather(leaf, tensor).detach()
        if scale is None:
            scale = self._scales[key] = scale_of(tensor, dtype)
        return quantised(tensor, scale, dtype) if whole else scale


def _gathered(_: int, tensor: Tensor) -> Tensor:
    return gathered(tensor)


def gathered(tensor: Tensor) -> Tensor:
    """All of a DTensor (every rank of it has to come here at the same time), and of what is made when it is read; any
    other tensor as it is."""
    import torch

    if not hasattr(tensor, "full_tensor"):
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        whole: Tensor = tensor.full_tensor()
        return whole


def bits(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes where torch cannot copy its dtype."""
    import torch

    return tensor.view(torch.uint8) if needs_bit_copy(tensor.dtype) else tensor
