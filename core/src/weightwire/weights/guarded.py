"""Tensors whose memory is elsewhere for a while: every use is a clear error, and a push reads where they are now.

The tensor *object* stays, so that modules and optimizers keep theirs: only its class changes, to a subclass whose
``__torch_function__`` refuses. Without that, torch reads an emptied storage, and some of its kernels crash.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from weightwire.errors import OffloadedError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["guard", "is_guarded", "release", "stand_in"]


class _Away(NamedTuple):
    name: str
    read: Callable[[], Tensor]  # the same values, elsewhere


def guard(tensor: Tensor, name: str, read: Callable[[], Tensor]) -> None:
    """Refuse every use of a tensor from now on. ``read()`` gives its values, in its shape, dtype and order."""
    tensor._weightwire_away = _Away(name, read)  # type: ignore[attr-defined]
    tensor.__class__ = _guarded(type(tensor))


def release(tensor: Tensor) -> None:
    """Let it be used again. Idempotent."""
    if is_guarded(tensor):
        tensor.__class__ = type(tensor)._weightwire_was  # type: ignore[attr-defined]
        del tensor._weightwire_away  # type: ignore[attr-defined]


def is_guarded(tensor: object) -> bool:
    return "_weightwire_was" in type(tensor).__dict__


def stand_in(tensor: Tensor) -> Tensor:
    """A tensor with the values of a guarded one."""
    away: _Away = object.__getattribute__(tensor, "_weightwire_away")
    return away.read()


@cache
def _guarded(kind: type) -> type:
    import torch

    looks = _looks()

    def refuse(cls: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in looks and not (function is torch.Tensor.type and (len(args) > 1 or kwargs)):  # which converts
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        found = next((arg for arg in _flat(args) if is_guarded(arg)), None)
        name = "a tensor" if found is None else repr(object.__getattribute__(found, "_weightwire_away").name)
        if getattr(function, "__name__", "") == "__repr__":
            return f"<{kind.__name__} {name}, offloaded>"
        what = getattr(function, "__qualname__", None) or getattr(function, "__name__", repr(function))
        raise OffloadedError(f"{name} is offloaded, so {what} cannot use it: reload() first")

    def refuse_pickle(tensor: Tensor, _: object) -> None:
        name = object.__getattribute__(tensor, "_weightwire_away").name
        raise OffloadedError(f"{name!r} is offloaded, so it cannot be pickled: reload() first")

    members = {
        "__torch_function__": classmethod(refuse),
        "__reduce_ex__": refuse_pickle,
        "_weightwire_was": kind,
        "__module__": __name__,
    }
    return type(f"Offloaded{kind.__name__}", (kind,), members)


def _flat(args: Any) -> list[Any]:
    found: list[Any] = []
    for arg in args:
        found += _flat(arg) if isinstance(arg, (list, tuple)) else [arg]
    return found


@cache
def _looks() -> frozenset[Any]:
    """What may be asked of a tensor without its memory."""
    import torch

    properties = ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "is_meta")
    methods = ("size", "dim", "numel", "element_size", "stride", "is_floating_point", "is_complex", "type")
    getters = {getattr(torch.Tensor, name).__get__ for name in properties}
    return frozenset(getters | {getattr(torch.Tensor, name) for name in methods})
