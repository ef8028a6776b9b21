"""A module with LoRA adapters, seen as the plain one that it stands for: adapters added to the weights, live tensors
untouched.

Layers are known by what they have: ``lora_A``, ``lora_B``, ``scaling``, and a ``base_layer`` (as in PEFT, whose
``get_delta_weight`` is asked) or a ``weight`` of their own (as in loralib). Modules that PEFT trains as a whole
(``modules_to_save``) stand for the one that it has now. The result is what PEFT's ``merge_and_unload`` leaves behind,
names included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from weightwire.errors import PreflightError
from weightwire.weights.guarded import is_guarded
from weightwire.weights.hidden import hidden
from weightwire.weights.walk import is_data_parallel, is_dtensor, leaves

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ["is_deferred", "made_of", "merged"]

BASE = "base_layer."
PEFT = "base_model.model."


def is_deferred(tensor: object) -> bool:
    """Whether a tensor is made only when it is read (:func:`merged`)."""
    return getattr(type(tensor), "_weightwire_deferred", False)


def made_of(deferred: Any) -> Tensor:
    """The weight of which such a tensor is made, and whose place in memory says whether it is still the same one."""
    weight: Tensor = deferred._weightwire_weight
    return weight


def merged(weights: Any) -> dict[str, Tensor]:
    """Names and tensors of the module without adapters. Merged ones are made one by one, when they are sent.

    Raises :class:`~weightwire.PreflightError` for what is no Module with adapters, and for adapters that cannot be
    added up (DoRA, biases, sharded or quantised weights), naming them.
    """
    import torch

    while isinstance(weights, torch.nn.Module) and is_data_parallel(weights):  # whose part of names is not seen
        weights = weights.module
    layers = dict(_layers(weights)) if isinstance(weights, torch.nn.Module) else {}
    if not layers:
        raise PreflightError(
            "merge=True adds LoRA adapters to the weights, but there are no layers with lora_A, lora_B and scaling in "
            f"this {type(weights).__qualname__}"
        )
    tensors: dict[str, Any] = {}
    added: set[str] = set()
    made: dict[tuple[int, int], Tensor] = {}  # by layer and weight: what has two names is one tensor
    for name, leaf in (*_in_place_of_wrappers(weights), *hidden(weights)):
        prefix = max((p for p in layers if name.startswith(p)), key=len, default=None)
        if prefix is None:
            tensors[name] = leaf
            continue
        own = name[len(prefix) :]
        layer = layers[prefix]
        if own.startswith("lora_"):
            _check_adapter(prefix, own, layer, leaf)
            continue
        inner = own.removeprefix(BASE)
        if inner == "weight":
            added.add(prefix)
            if not getattr(layer, "merged", False):  # added already, in place, by its owner
                what, key = prefix.rstrip("."), (id(layer), id(leaf))
                if key not in made:
                    made[key] = _deferred(leaf, partial(_made, what, _adder(what, layer, leaf)))
                leaf = made[key]
        tensors[prefix + inner] = leaf
    _check_ties(tensors, {id(tensor): tensor for tensor in made.values()})
    if left := [prefix.rstrip(".") for prefix in layers if prefix not in added]:
        raise PreflightError(f"merge=True: there is no plain weight to add adapters to (quantised?) in {left[:5]}")
    if hasattr(weights, "peft_config") and all(name.startswith(PEFT) for name in tensors):
        tensors = {name[len(PEFT) :]: tensor for name, tensor in tensors.items()}
    return tensors


_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def _check_adapter(prefix: str, own: str, layer: Any, leaf: Tensor) -> None:
    """Refuse what could not be added, and what is more than a sum: it would be lost."""
    name, part = prefix.rstrip("."), own.split(".")
    if hasattr(layer, "get_delta_weight") and len(part) > 1 and part[1] not in _active(layer):
        return
    if part[0] not in _PARTS:
        raise PreflightError(f"merge=True: {name!r} has {part[0]}, which is more than a sum")
    if is_guarded(leaf):
        raise PreflightError(f"merge=True: {prefix + own!r} is offloaded: reload() it first")
    if leaf.is_meta:
        raise PreflightError(f"merge=True: {prefix + own!r} is on the meta device, without values")


def _check_ties(tensors: dict[str, Any], made: dict[int, Any]) -> None:
    """A weight that others are tied to cannot be merged for one of them alone."""
    owners: dict[int, tuple[str, int]] = {}  # place of a weight -> a name of it, and what is made of it
    for name, tensor in tensors.items():
        if id(tensor) in made:
            owner = owners.setdefault(_address(made_of(tensor)), (name, id(tensor)))
            if owner[1] != id(tensor) and _address(made_of(tensor)):
                raise PreflightError(f"merge=True: the weights {owner[0]!r} and {name!r} are tied: {_TIED}")
    for name, tensor in tensors.items():
        if id(tensor) not in made and hasattr(tensor, "data_ptr") and not is_guarded(tensor):
            place = _address(tensor)
            if place and place in owners:
                raise PreflightError(f"merge=True: the weights {owners[place][0]!r} and {name!r} are tied: {_TIED}")


_TIED = "with the adapters of one added they would differ; untie them, or push select='*lora_*', partial=True"


def _address(tensor: Any) -> int:
    """Where it lies; 0 for what has no elements, or is made of others."""
    try:
        return int(tensor.data_ptr()) if tensor.numel() else 0
    except RuntimeError:
        return 0


def _in_place_of_wrappers(weights: Module) -> Iterator[tuple[str, Any]]:
    """Names and leaves; of a module that PEFT has wrapped to train it as a whole, only those that count now."""
    wrappers = {f"{name}.": child for name, child in _modules(weights) if hasattr(child, "original_module")}
    inner = {prefix: f"{prefix}{_counting(prefix, wrapper)}." for prefix, wrapper in wrappers.items()}
    for name, leaf in leaves(weights):
        prefix = max((p for p in wrappers if name.startswith(p)), key=len, default="")
        if not prefix:
            yield name, leaf
        elif name.startswith(inner[prefix]):
            yield prefix + name[len(inner[prefix]) :], leaf


def _counting(prefix: str, wrapper: Any) -> str:
    """Where in a wrapper the module is that is used."""
    copies = getattr(wrapper, "modules_to_save", None)
    if copies is None:
        raise PreflightError(
            f"merge=True: {prefix.rstrip('.')!r} is a {type(wrapper).__qualname__}, and nobody knows what that adds"
        )
    active = [name for name in _named(wrapper) if name in copies]
    return f"modules_to_save.{active[0]}" if active else "original_module"


def _layers(module: Module) -> Iterator[tuple[str, Any]]:
    for name, child in _modules(module):
        parts = [hasattr(child, part) for part in ("lora_A", "lora_B", "scaling")]
        if all(parts) and (hasattr(child, "base_layer") or hasattr(child, "weight")):
            yield f"{name}." if name else "", child


def _modules(module: Module) -> Iterator[tuple[str, Module]]:
    """All under all of their names."""
    yield from module.named_modules(remove_duplicate=False)


def _adder(name: str, layer: Any, weight: Tensor) -> Callable[[], Tensor]:
    """What makes the merged weight."""
    if is_dtensor(weight):
        raise PreflightError(f"merge=True: {name!r} is sharded; push adapters alone: select='*lora_*', partial=True")
    if is_guarded(weight):
        raise PreflightError(f"merge=True: the weight of {name!r} is offloaded: reload() it first")
    if not weight.is_floating_point():
        raise PreflightError(f"merge=True: the weight of {name!r} is {weight.dtype}, to which no adapter can be added")
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
    if not (isinstance(layer.scaling, (int, float)) or getattr(layer.scaling, "shape", None) == ()):
        raise PreflightError(f"merge=True: the scaling of {name!r} is {layer.scaling!r:.100}, not a number")
    return partial(_with_product, layer, weight)


def _active(layer: Any) -> list[str]:
    return [name for name in _named(layer) or list(layer.scaling) if name in layer.scaling]


def _named(layer: Any) -> list[str]:
    """The adapters that are active now."""
    found = getattr(layer, "active_adapters", None) or getattr(layer, "active_adapter", None) or ()
    return [found] if isinstance(found, str) else list(found)


def _with_peft(layer: Any, weight: Tensor, adapters: list[str]) -> Tensor:
    whole = weight.detach().clone()
    for adapter in adapters:
        delta = layer.get_delta_weight(adapter).to(whole.dtype)
        if delta.shape != whole.shape:
            raise ValueError(f"its delta is of shape {tuple(delta.shape)}, the weight of {tuple(whole.shape)}")
        whole += delta
    return whole


def _with_product(layer: Any, weight: Tensor) -> Tensor:
    delta = layer.lora_B.detach() @ layer.lora_A.detach() * layer.scaling
    if getattr(layer, "fan_in_fan_out", False):
        delta = delta.T
    whole = weight.detach().clone()
    whole += delta  # rounded once, as where it is merged in place
    return whole


def _deferred(like: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """A tensor that looks like another, has no memory, and is made when ``full_tensor()`` asks for it."""
    import torch

    tensor: Any = torch.Tensor._make_wrapper_subclass(
        _deferred_class(), like.shape, dtype=like.dtype, device=like.device, requires_grad=False
    )
    tensor.full_tensor = make
    tensor._weightwire_weight = like
    whole: Tensor = tensor
    return whole


def _made(name: str, make: Callable[[], Tensor]) -> Tensor:
    import torch

    try:
        with torch.no_grad():
            return make()
    except Exception as exc:
        raise PreflightError(f"merge=True: the adapters of {name!r} cannot be added to its weight: {exc}") from exc


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
