"""What a policy needs so that it can be moved: memory of its own, its ties, and the buffers that never travel.

TorchRL sends a policy to a worker process with its tensors on the meta device (each a tensor of its own, so that ties
are gone), or in memory that the worker then shares with the trainer. Either way the worker's copy is made whole here.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from weightwire.errors import PreflightError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

__all__ = ["Kept", "kept", "settle", "without_constants"]


class Constant(NamedTuple):
    """A buffer that is no part of a state: its dtype (``torch.`` left out), shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Kept(NamedTuple):
    """Plain data beside a policy's structure: what it loses when its tensors are taken out, or turned into others."""

    ties: tuple[tuple[str, ...], ...] = ()
    constants: Mapping[str, Constant] = {}
    parameters: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()


def kept(module: Module) -> Kept:
    """What of the trainer's policy no version carries: which names are one tensor, and non-persistent buffers."""
    groups: dict[int, list[str]] = {}
    constants: dict[str, Constant] = {}
    kinds: tuple[set[str], set[str]] = (set(), set())
    for name, owner, key, tensor in _tensors(module):
        groups.setdefault(id(tensor), []).append(name)
        if key in owner._non_persistent_buffers_set and not tensor.is_meta:
            constants[name] = _constant(tensor)
        kinds[key in owner._buffers].add(name)
    ties = tuple(tuple(names) for names in groups.values() if len(names) > 1)
    return Kept(ties, constants, frozenset(kinds[0]), frozenset(kinds[1]))


def without_constants(module: Module) -> list[str] | None:
    """``select`` for a receiver: names of non-persistent buffers, which TorchRL sends along, are left alone."""
    names = [name for name, owner, key, _ in _tensors(module) if key in owner._non_persistent_buffers_set]
    return [f"!{glob.escape(name)}" for name in names] or None


def settle(module: Module, lost: Kept) -> bool:
    """Give every tensor of a worker's policy private memory; whether any was on the meta device, and so has no value
    before the first version.

    Raises :class:`~weightwire.PreflightError` for a non-persistent buffer whose value nobody kept.
    """
    import torch

    real: dict[int, tuple[Tensor, Tensor]] = {}  # the old one too, so that its id stays its own
    placed: dict[str, tuple[Module, str, Tensor]] = {}
    private: dict[int, torch.UntypedStorage] = {}
    with torch.no_grad():
        loose = _register(module, lost)
        for name, owner, key, tensor in _tensors(module):
            if name in loose:
                placed[name] = (owner, key, tensor)
            if torch.nn.parameter.is_lazy(tensor):
                continue  # refused by name when the receiver is made
            if tensor.is_meta:
                if id(tensor) not in real:
                    real[id(tensor)] = (tensor, _real(tensor, name, lost, key in owner._non_persistent_buffers_set))
                placed[name] = (owner, key, real[id(tensor)][1])
            elif tensor.is_shared():  # type: ignore[no-untyped-call]
                _own(tensor, private)
        for group in lost.ties:
            first = next((placed[name][2] for name in group if name in placed), None)
            for name in group:
                if first is not None and name in placed and placed[name][2].shape == first.shape:
                    placed[name] = (*placed[name][:2], first)
        for owner, key, tensor in placed.values():
            table = owner._parameters if key in owner._parameters else owner._buffers
            table[key] = tensor  # type: ignore[assignment]
    return bool(real)


def _register(module: Module, lost: Kept) -> set[str]:
    """Make parameters and buffers again of those that came as plain attributes, as releases before 0.9 send them; their
    names."""
    import torch

    found: set[str] = set()
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, tensor in list(vars(owner).items()):
            name = f"{prefix}.{key}" if prefix else key
            if isinstance(tensor, torch.Tensor) and (name in lost.parameters or name in lost.buffers):
                del owner.__dict__[key]
                if name in lost.parameters:
                    owner._parameters[key] = torch.nn.Parameter(tensor, requires_grad=False)
                else:
                    owner._buffers[key] = tensor
                found.add(name)
    return found


def _tensors(module: Module) -> Iterator[tuple[str, Module, str, Tensor]]:
    """Name, owner, key and tensor of each parameter and buffer, under each of its names."""
    seen = list(module.named_modules(remove_duplicate=False))
    for prefix, owner in seen:
        for table in (owner._parameters, owner._buffers):
            for key, tensor in list(table.items()):
                if tensor is not None:
                    yield (f"{prefix}.{key}" if prefix else key), owner, key, tensor


def _real(tensor: Tensor, name: str, lost: Kept, constant: bool) -> Tensor:
    import torch

    if not constant:
        made = torch.empty_like(tensor, device="cpu")
    elif name in lost.constants:
        dtype, shape, data = lost.constants[name]
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        made = flat.view(getattr(torch, dtype)).reshape(shape)
    else:
        raise PreflightError(
            f"the non-persistent buffer {name!r} came to this worker without a value, and no version brings one: "
            "register it as persistent, or make the policy in the worker (policy_factory)"
        )
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _own(tensor: Tensor, private: dict[int, torch.UntypedStorage]) -> None:
    """Out of shared memory; views of one storage stay views of one."""
    import torch

    storage = tensor.untyped_storage()
    copy = private.setdefault(storage.data_ptr(), storage.clone())  # type: ignore[no-untyped-call]
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    tensor.data = empty.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())


def _constant(tensor: Tensor) -> Constant:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return Constant(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().tobytes())
