"""A module with LoRA adapters, seen as the plain one that it stands for: adapters added to the weights, live tensors
untouched.

Layers are known by what they have: ``lora_A``, ``lora_B``, ``scaling``, and a ``base_layer`` (as in PEFT, whose
``get_delta_weight`` is asked) or a ``weight`` of their own (as in loralib). The result is what PEFT's
``merge_and_unload`` leaves behind, names included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from weightwire.errors import PreflightError
from weightwire.weights.walk import is_dtensor, leaves

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ["is_deferred", "merged"]

BASE = "base_layer."
PEFT = "base_model.model."


def is_deferred(tensor: object) -> bool:
    """Whether a tensor is made only when it is read (:func:`merged`)."""
    return getattr(type(tensor), "_weightwire_deferred", False)


def merged(weights: Any) -> dict[str, Tensor]:
    """Names and tensors of the module without adapters. Merged ones are made one by one, when they are sent.

    Raises :class:`~weightwire.PreflightError` for what is no Module with adapters, and for adapters that cannot be
    added up (DoRA, biases, sharded or quantised weights), naming them.
    """
    import torch

    layers = dict(_layers(weights)) if isinstance(weights, torch.nn.Module) else {}
    if not layers:
        raise PreflightError(
            "merge=True adds LoRA adapters to the weights, but there are no layers with lora_A, lora_B and scaling in "
            f"this {type(weights).__qualname__}"
        )
    tensors: dict[str, Tensor] = {}
    added: set[str] = set()
    for name, leaf in leaves(weights):
        prefix = max((p for p in layers if name.startswith(p)), key=len, default=None)
        if prefix is None:
            tensors[name] = leaf
            continue
        own = name[len(prefix) :]
        if own.startswith("lora_"):
            continue
        inner = own.removeprefix(BASE)
        if inner == "weight":
            leaf = _deferred(leaf, _adder(prefix.rstrip("."), layers[prefix], leaf))
            added.add(prefix)
        tensors[prefix + inner] = leaf
    if left := [prefix.rstrip(".") for prefix in layers if prefix not in added]:
        raise PreflightError(f"merge=True: there is no plain weight to add adapters to (quantised?) in {left[:5]}")
    if hasattr(weights, "peft_config") and all(name.startswith(PEFT) for name in tensors):
        tensors = {name[len(PEFT) :]: tensor for name, tensor in tensors.items()}
    return tensors


def _layers(module: Module) -> Iterator[tuple[str, Any]]:
    for name, child in module.named_modules():
        parts = [hasattr(child, part) for part in ("lora_A", "lora_B", "scaling")]
        if all(parts) and (hasattr(child, "base_layer") or hasattr(child, "weight")):
            yield f"{name}." if name else "", child


def _adder(name: str, layer: Any, weight: Tensor) -> Callable[[], Tensor]:
    """What makes the merged weight."""
    if is_dtensor(weight):
        raise PreflightError(f"merge=True: {name!r} is sharded; push adapters alone: select='*lora_*', partial=True")
    if not weight.is_floating_point():
        raise PreflightError(f"merge=True: the weight of {name!r} is {weight.dtype}, to which no adapter can be added")
    if getattr(layer, "merged", False):  # added already, in place, by its owner
        return weight.detach
    if hasattr(layer, "get_delta_weight"):
        adapters = _active(layer)
        for trait in ("use_dora", "lora_bias"):
            if any(dict(getattr(layer, trait, None) or {}).get(adapter) for adapter in adapters):
                raise PreflightError(f"merge=True: {name!r} has {trait}, which is more than a sum")
        return partial(_with_peft, layer, weight, adapters)
    if not hasattr(layer.lora_A, "shape") or not hasattr(layer.lora_B, "shape"):
        raise PreflightError(f"merge=True: the adapters of {name!r} are neither tensors nor PEFT's")
    rows, columns = layer.lora_B.shape[0], layer.lora_A.shape[-1]
    shape = (columns, rows) if getattr(layer, "fan_in_fan_out", False) else (rows, columns)
    if tuple(weight.shape) != shape or layer.lora_B.shape[-1] != layer.lora_A.shape[0]:
        raise PreflightError(f"merge=True: lora_B @ lora_A of {name!r} is not of the weight's shape")
    return partial(_with_product, layer, weight)


def _active(layer: Any) -> list[str]:
    found = getattr(layer, "active_adapters", None) or getattr(layer, "active_adapter", None) or list(layer.scaling)
    names = [found] if isinstance(found, str) else list(found)
    return [name for name in names if name in layer.scaling]


def _with_peft(layer: Any, weight: Tensor, adapters: list[str]) -> Tensor:
    whole = weight.detach().clone()
    for adapter in adapters:
        whole += layer.get_delta_weight(adapter).to(whole.dtype)
    return whole


def _with_product(layer: Any, weight: Tensor) -> Tensor:
    delta = layer.lora_B.detach() @ layer.lora_A.detach() * layer.scaling
    if getattr(layer, "fan_in_fan_out", False):
        delta = delta.T
    whole: Tensor = weight.detach() + delta.to(weight.dtype)
    return whole


def _deferred(like: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """A tensor that looks like another, has no memory, and is made when ``full_tensor()`` asks for it."""
    import torch

    tensor: Any = torch.Tensor._make_wrapper_subclass(
        _deferred_class(), like.shape, dtype=like.dtype, device=like.device, requires_grad=False
    )
    tensor.full_tensor = partial(_made, make)
    whole: Tensor = tensor
    return whole


def _made(make: Callable[[], Tensor]) -> Tensor:
    import torch

    with torch.no_grad():
        return make()


def _deferred_class() -> type[Tensor]:
    global _class
    if _class is None:
        import torch

        class Deferred(torch.Tensor):
            _weightwire_deferred = True

            @classmethod
            def __torch_dispatch__(  # type: ignore[override]
                cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                raise RuntimeError("a merged weight is made when it is sent; it cannot be used before")

        _class = Deferred
    return _class


_class: type[Tensor] | None = None
