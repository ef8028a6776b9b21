"""How the bytes of one block are read from the caller's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from weightwire.weights.dtypes import DTYPES, needs_bit_copy, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.weights.layout import Entry

__all__ = ["Block", "Run", "gathered"]


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
    sharded: bool = False

    @property
    def plain(self) -> bool:
        """Whether ``tensors[leaf]`` is what :meth:`read` gives."""
        return self.run is None and not self.sharded and not needs_bit_copy(torch_dtype(self.written.dtype))

    def read(self, tensors: Sequence[Tensor]) -> Tensor:
        """The values, live and in the shape in which they are written, before any cast; gathered now where sharded."""
        tensor = tensors[self.leaf]
        if self.sharded:
            tensor = gathered(tensor)
        if self.run is not None:
            tensor = self.run.read(tensor)
        return bits(tensor)

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """The bytes as they are written, flat uint8, on the tensor's device: its own memory where that is fit."""
        import torch

        tensor = self.read(tensors).detach()
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


def gathered(tensor: Tensor) -> Tensor:
    """All of a DTensor; any other tensor as it is. Every rank has to come here."""
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
