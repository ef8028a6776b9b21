"""The places of a target into which tensors go: what each of them is, and why some cannot be used."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, MutableMapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from weightwire.weights.dtypes import DTYPES, dtype_name, needs_bit_copy
from weightwire.weights.guarded import is_guarded
from weightwire.weights.layout import Entry, extent, view
from weightwire.weights.shards import part_of
from weightwire.weights.walk import is_dtensor

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

__all__ = [
    "ARRAY",
    "EXTRA",
    "ODD",
    "PLAIN",
    "SHARD",
    "Slot",
    "as_array",
    "bits",
    "has_memory",
    "is_plain",
    "like",
    "make_slot",
    "normal",
    "overlaps_itself",
    "put",
    "quietly",
    "raw_of",
    "same_bits",
]

T = TypeVar("T")

PLAIN, ARRAY, SHARD, ODD, EXTRA = "plain", "array", "shard", "odd", "extra"
"""Kinds of slots: a tensor, a NumPy array, this rank's part of a DTensor, a tensor that has to be written by itself, a
module's extra state."""


class Slot(NamedTuple):
    """One place of a target.

    ``raw`` is a plain tensor over the slot's memory, without autograd; ``None`` where there is no such thing. ``flips``
    are the dimensions along which it runs backwards against the array. ``part`` is where a shard lies in the whole.
    ``fixed``: others may rely on its memory, which has to stay where it is.
    """

    name: str
    kind: str
    leaf: Any
    place: tuple[Any, Any]  # container and key
    value: Any  # what has the dtype and shape of the slot: a tensor
    raw: Tensor | None
    flips: tuple[int, ...] = ()
    part: tuple[slice, ...] = ()
    fixed: bool = False

    @property
    def dtype(self) -> str:
        return dtype_name(self.value.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


def make_slot(name: str, leaf: Any, place: tuple[Any, Any], *, replace: bool) -> Slot | str:
    """The slot of a leaf that :func:`~weightwire.weights.walk.walk` found, or what is wrong with it.

    ``replace``: an array may be replaced in its mapping, so that a read-only one will do.
    """
    import numpy as np
    import torch

    if is_guarded(leaf):
        return "offloaded: reload() it first"
    if is_dtensor(leaf):
        return _shard_slot(name, leaf, place)
    if isinstance(leaf, torch.Tensor):
        return _fault(leaf) or _tensor_slot(name, leaf, place)
    if isinstance(leaf, np.ndarray):
        return _array_slot(name, leaf, place, replace=replace and isinstance(place[0], MutableMapping))
    if getattr(leaf, "__name__", "") == "get_extra_state" and callable(leaf):
        state = leaf()
        if isinstance(state, torch.Tensor):
            return _fault(state) or Slot(name, EXTRA, leaf, place, state, None)
        return f"extra state that is no tensor but a {type(state).__qualname__}"
    hint = ": torch.tensor(x) makes one of it" if isinstance(leaf, (bool, int, float, complex, np.generic)) else ""
    return f"a {type(leaf).__qualname__}, not a tensor{hint}"


def _fault(tensor: Tensor) -> str:
    """Why nothing can be put into a tensor; empty where it can."""
    import torch
    from torch.nn.parameter import is_lazy

    if is_lazy(tensor):
        return "not initialised yet: run its lazy module once"
    if tensor.is_meta:
        return "on the meta device, without memory: use to_empty() first"
    if tensor.is_nested or tensor.is_quantized or dtype_name(tensor.dtype) not in DTYPES:
        return (
            f"a {'nested tensor' if tensor.is_nested else dtype_name(tensor.dtype) + ' tensor'}, which does not travel"
        )
    return "" if tensor.layout is torch.strided else f"of layout {tensor.layout}, which does not travel"


def _tensor_slot(name: str, tensor: Tensor, place: tuple[Any, Any]) -> Slot | str:
    raw = raw_of(tensor)
    if raw is not None and not has_memory(raw):
        return _NO_MEMORY
    plain = is_plain(type(tensor)) and not (tensor.is_conj() or tensor.is_neg())
    fixed = raw is not None and _is_relied_on(tensor, raw)
    if fixed and raw is not None and overlaps_itself(raw):
        return _OVERLAPS
    return Slot(name, PLAIN if plain else ODD, tensor, place, tensor, raw, fixed=fixed)


_OVERLAPS = "over memory that others share, in which its elements overlap: nothing can be copied into it"
_NO_MEMORY = "without memory under it: its storage is smaller than it says (freed?)"


def has_memory(tensor: Tensor) -> bool:
    """Whether the storage is as large as the tensor says."""
    if tensor.numel() == 0:
        return True
    try:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
        return tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() >= needed
    except RuntimeError:  # no storage at all: fake and functional tensors
        return False


def _is_relied_on(tensor: Tensor, raw: Tensor) -> bool:
    """Whether the memory is a file's, or shared with other processes, who would not see the tensor move away."""
    tensordict = sys.modules.get("tensordict")
    if tensordict is not None and isinstance(tensor, tensordict.MemoryMappedTensor):
        return True
    return raw.is_cpu and raw.untyped_storage().is_shared()


def _shard_slot(name: str, tensor: Any, place: tuple[Any, Any]) -> Slot | str:
    """This rank's part of a DTensor: what arrives is whole, and no other rank is asked."""
    local = tensor.to_local().detach()
    if fault := _fault(local) or ("" if has_memory(local) else _NO_MEMORY):
        return fault
    mesh, placements = tensor.device_mesh, tensor.placements
    at = [mesh.get_local_rank(axis) for axis in range(mesh.ndim)]
    box = part_of(tensor.shape, tuple(mesh.mesh.shape), placements, at)
    if box is None:
        return f"a DTensor that is placed as {placements}, of which no rank holds a plain piece: send it whole"
    if tuple(local.shape) != tuple(stop - start for start, stop in box):
        return f"a DTensor whose part of shape {tuple(local.shape)} does not lie where its placement says"
    part = tuple(slice(start, stop) for start, stop in box)
    return Slot(name, SHARD, tensor, place, tensor, local, part=part)


@cache
def is_plain(kind: type) -> bool:
    """Whether torch handles tensors of this class all by itself, in C."""
    import torch

    return kind in (torch.Tensor, torch.nn.Parameter) or (
        kind.__torch_function__ is torch._C._disabled_torch_function_impl  # type: ignore[attr-defined]
        and kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]
        and kind.data is torch.Tensor.data  # type: ignore[attr-defined]
        and kind.copy_ is torch.Tensor.copy_  # type: ignore[attr-defined]
    )


def raw_of(tensor: Tensor) -> Tensor | None:
    """A plain, detached tensor over the same memory, with the same version counter."""
    import torch

    if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return None  # made of other tensors: it has no memory of its own
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return tensor.as_subclass(torch.Tensor).detach()


def _array_slot(name: str, array: np.ndarray[Any, Any], place: tuple[Any, Any], *, replace: bool) -> Slot | str:
    import numpy as np
    import torch

    kind = array.dtype.name
    fixed = _is_view_of_others(array)
    replace = replace and not fixed
    if isinstance(array, np.ma.MaskedArray):
        return "a masked array, whose mask would stay"
    if not array.dtype.isnative:
        return f"{kind} in foreign byte order"
    if kind not in DTYPES:
        return f"an array of dtype {array.dtype}, which is none of torch's"
    if not array.flags.writeable and not replace:
        return "a read-only array"
    flips = tuple(dim for dim, stride in enumerate(array.strides) if stride < 0)
    seen = np.flip(array, flips) if flips else array
    if not array.flags.aligned or any(stride % array.itemsize for stride in array.strides):
        if not replace:
            return "an array that is not aligned"
        seen = array.copy()
    elif not array.flags.writeable:
        seen = array.copy()  # only looked at: it will be replaced
    if array.dtype.kind == "V":  # bfloat16 and the float8 kinds, as ml_dtypes registers them with NumPy
        tensor = torch.from_numpy(seen.view(f"u{array.itemsize}")).view(getattr(torch, kind))
    else:
        tensor = torch.from_numpy(seen)
    if fixed and overlaps_itself(tensor):
        return _OVERLAPS
    return Slot(name, ARRAY, array, place, tensor, tensor, flips, fixed=fixed)


def _is_view_of_others(array: np.ndarray[Any, Any]) -> bool:
    """Whether an array is more than its numbers: of a class of its own, or over a file or shared memory."""
    import numpy as np

    if type(array) is not np.ndarray:
        return True
    base: Any = array
    while hasattr(base, "base"):
        base = base.base
    return isinstance(base, (mmap.mmap, memoryview))


def as_array(tensor: Tensor, like: np.ndarray[Any, Any], *, writable: bool) -> np.ndarray[Any, Any]:
    """A CPU tensor as an array of the same dtype as ``like``, over the tensor's memory."""
    array = (bits(tensor).numpy().view(like.dtype)) if like.dtype.kind == "V" else tensor.numpy()
    if not writable:
        array.flags.writeable = False
    return array


def bits(tensor: Tensor) -> Tensor:
    """The same memory seen as integers, for dtypes that torch, or NumPy, cannot handle."""
    import torch

    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(same[tensor.element_size()])


def put(into: Tensor, value: Tensor) -> None:
    """Copy, whatever the dtype."""
    if needs_bit_copy(into.dtype):
        into, value = bits(into), bits(value)
    into.copy_(value)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype, shape and device hold the same bits, signs of zeros and NaNs included."""
    import torch

    one, other = one.resolve_conj().resolve_neg(), other.resolve_conj().resolve_neg()
    if needs_bit_copy(one.dtype):
        one, other = bits(one), bits(other)
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    import torch

    dense = tensor.contiguous()  # which may still have any stride along a dimension of one element
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def normal(tensor: Tensor) -> Tensor:
    """The same memory, seen by a tensor that takes part in autograd although it was made in inference mode."""
    return _anew(tensor) if tensor.is_inference() else tensor


def like(tensor: Tensor, leaf: Tensor) -> Tensor:
    """The same memory, seen by an inference tensor where ``leaf`` is one, else by none: what can become its data."""
    import torch

    if tensor.is_inference() == leaf.is_inference():
        return tensor
    with torch._C._InferenceMode(leaf.is_inference()):
        return _anew(tensor)


def _anew(tensor: Tensor) -> Tensor:
    import torch

    size, shape, strides = tensor.element_size(), tuple(tensor.shape), tensor.stride()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    memory.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (extent(shape, strides) * size,), (1,))
    return view(Entry("", dtype_name(tensor.dtype), shape, 0, 0, strides), memory)


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements of a tensor may share memory with one another (stride 0 is the usual case)."""
    reach = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride < reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def quietly(function: Callable[[], T]) -> T:
    """Call a function that makes tensors: no autograd, no inference tensors, no default device of the user's.

    The modes are entered and left in C, so that Ctrl-C cannot leave one of them on.
    """
    import torch

    with torch._C._InferenceMode(False), torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(False)  # leaving the inference mode brings the old one back
        return function()
