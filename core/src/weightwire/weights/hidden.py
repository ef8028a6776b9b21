"""State that only a Module's ``state_dict`` finds, as quantised layers keep their scales and packed weights.

:func:`~weightwire.weights.walk.walk` sees parameters, buffers and extra state. To send those and leave the rest behind
would make a mixture that nobody hears of, so the rest is named, and refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from weightwire.weights.walk import is_data_parallel, is_state, leaves

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["Hidden", "hidden"]

KNOWN = ("torch.", "tensordict.")
"""Whose own ``state_dict`` and hooks on it add nothing: they are not asked."""
ASKED = "torch.ao."
"""Of those, the quantised layers, which add to it."""


class Hidden:
    """Stands for such state among leaves."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __str__(self) -> str:
        return f"state that only state_dict() knows ({self.how})"


def hidden(state: Any) -> list[tuple[str, Hidden]]:
    """Names of what ``state_dict`` has and ``walk`` has not, in a Module or in the Modules of a mapping.

    Only Modules whose class or hooks change what ``state_dict`` gives are asked for theirs.
    """
    return list(_of_state(state, ""))


def _of_state(state: Any, prefix: str) -> Iterator[tuple[str, Hidden]]:
    import torch

    if isinstance(state, torch.nn.Module):
        yield from _of_module(state, prefix)
    elif isinstance(state, Mapping):
        for key, value in state.items():
            if is_state(value):
                yield from _of_state(value, f"{prefix}{key}.")


def _of_module(module: Module, prefix: str) -> Iterator[tuple[str, Hidden]]:
    how = _changed_as_a_whole(module)
    if how:
        yield from _compared(module, prefix, how, whole=True)
        return  # its children are in there
    if _is_users(type(module)._save_to_state_dict):
        yield from _compared(module, prefix, f"{type(module).__qualname__}._save_to_state_dict", whole=False)
    for name, child in module._modules.items():
        if child is not None:
            unseen = name == "module" and is_data_parallel(module)
            yield from _of_module(child, prefix if unseen else f"{prefix}{name}.")


def _changed_as_a_whole(module: Module) -> str:
    """What changes the ``state_dict`` of a module and all below it; empty where nothing does."""
    hooks = [hook for hook in vars(module).get("_state_dict_hooks", {}).values() if _is_users(hook)]
    if not hooks and not _is_users(type(module).state_dict):
        return ""
    if _among_ranks():  # they may talk to each other in there, and perhaps only one of them pushes
        return ""
    return "a hook on it" if hooks else f"{type(module).__qualname__}.state_dict"


def _is_users(function: Any) -> bool:
    import torch

    if function in (torch.nn.Module._save_to_state_dict, torch.nn.Module.state_dict):
        return False
    home = str(getattr(function, "__module__", None) or type(function).__module__)
    return home.startswith(ASKED) or not home.startswith(KNOWN)


def _among_ranks() -> bool:
    import torch

    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _compared(module: Module, prefix: str, how: str, *, whole: bool) -> Iterator[tuple[str, Hidden]]:
    seen = leaves(module) if whole else _leaves_of(module)
    names = {_plain(name) for name, _ in seen}
    memory = {place for _, leaf in seen if (place := _memory(leaf))}
    try:
        told = _whole(module) if whole else _own(module)
    except Exception as exc:
        yield f"{prefix}*", Hidden(f"{how} raised {type(exc).__name__}: {exc}")
        return
    if whole and _is_users(type(module).state_dict) and not names <= {_plain(str(name)) for name in told}:
        return  # something else, with names of its own: nothing can be said
    for name, value in told.items():
        if _plain(str(name)) not in names and _memory(value) not in memory:
            yield f"{prefix}{name}", Hidden(how)


def _leaves_of(module: Module) -> list[tuple[str, Any]]:
    """As :func:`~weightwire.weights.walk.leaves`, of this level alone."""
    unsaved = module._non_persistent_buffers_set
    buffers = [(name, buffer) for name, buffer in module._buffers.items() if name not in unsaved]
    return [*module._parameters.items(), *buffers, ("_extra_state", None)]


def _own(module: Module) -> dict[str, Any]:
    told: dict[str, Any] = {}
    module._save_to_state_dict(told, "", True)
    return told


def _whole(module: Module) -> Mapping[str, Any]:
    import torch

    if not _is_users(type(module).state_dict):
        return module.state_dict(keep_vars=True)
    told: Any = module.state_dict()  # which may take no arguments
    return told if isinstance(told, Mapping) and not isinstance(told, torch.nn.Module) else {}


def _plain(name: str) -> str:
    """Without the level that DDP adds, which a walk does not see."""
    return ".".join(part for part in name.split(".") if part != "module")


def _memory(value: Any) -> int:
    """Where a tensor's storage lies: what has another name there is not hidden. 0: nowhere."""
    import torch

    try:
        return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0
    except RuntimeError:  # made of other tensors
        return id(value)
