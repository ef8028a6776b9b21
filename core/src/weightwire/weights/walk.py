"""From a user's object to named leaves, cheaply enough to be done before every push and pull.

:func:`walk` collects leaves and a *trace*, from which :func:`names_of` makes their names: while traces are equal, names
are, and no string is made. While the :func:`signature` of tensors is equal, so is all that is derived from where they
lie and how they look. Neither a trace nor a signature keeps a tensor alive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, compress, repeat
from operator import attrgetter, getitem, is_, methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

from weightwire.errors import PreflightError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

__all__ = [
    "Guard",
    "Signature",
    "Trail",
    "Walk",
    "check_instance",
    "is_data_parallel",
    "is_dtensor",
    "is_state",
    "leaves",
    "names_of",
    "not_weights",
    "signature",
    "walk",
]

OPEN, CLOSE = object(), object()  # in a trace: OPEN, key (None: the level adds nothing to names), ..., CLOSE


class Walk(NamedTuple):
    """Keys and levels in the order in which they were met, and one leaf for each key that is no level, and its class.

    A :class:`Trail` gives the same ``trace`` and ``types`` objects while they stay equal.
    """

    trace: list[Any]
    leaves: list[Any]
    types: list[type]


def walk(state: Any, places: list[tuple[Any, Any]] | None = None) -> Walk:
    """The leaves of a Module, a TensorDict or a mapping, nested to any depth.

    Of a Module: parameters, persistent buffers and extra state, the names of ``state_dict`` but without its hooks; for
    extra state the leaf is the bound ``get_extra_state``, so that only who wants it pays for it. Of a mapping: whatever
    is not a level itself, of any type: the caller refuses what it cannot use.

    ``places``, where given, gets the container and key of each leaf.
    """
    import torch

    walker = _Walker(places, torch.nn.Module.get_extra_state)
    try:
        if isinstance(state, torch.nn.Module):
            walker.module(state)
        elif is_state(state):
            walker.mapping(state)
        else:
            raise not_weights(state)
    except RecursionError:
        raise PreflightError("the weights are nested too deeply, or contain themselves") from None
    return Walk(walker.trace, walker.leaves, list(map(type, walker.leaves)))


def not_weights(value: Any) -> PreflightError:
    """What to raise of a value that can be no weights."""
    return PreflightError(
        "weights are a Module, a TensorDict, a mapping with names as keys, or a function that returns one of these; "
        f"not a {type(value).__qualname__}"
    )


def check_instance(weights: Any) -> None:
    """Raise :class:`~weightwire.PreflightError` for a class: to call it would make another policy each time."""
    if isinstance(weights, type):
        raise PreflightError(f"the weights are the class {weights.__qualname__}; an instance of it is wanted")


def leaves(state: Any) -> list[tuple[str, Any]]:
    """Name and leaf of all that :func:`walk` finds."""
    found = walk(state)
    return list(zip(names_of(found.trace), found.leaves))


def names_of(trace: Sequence[Any]) -> list[str]:
    """The dotted name of each leaf. Raises :class:`~weightwire.PreflightError` for a key that cannot be in a name."""
    names: list[str] = []
    prefixes = [""]
    tokens = iter(trace)
    for token in tokens:
        if token is OPEN:
            key = next(tokens)
            prefixes.append(prefixes[-1] if key is None else f"{prefixes[-1]}{_checked(key, prefixes[-1])}.")
        elif token is CLOSE:
            prefixes.pop()
        else:
            names.append(prefixes[-1] + _checked(token, prefixes[-1]))
    return names


def is_state(value: Any) -> bool:
    """Whether a value is a level of a state (Module, TensorDict, mapping) and not a leaf."""
    import torch

    if isinstance(value, (torch.nn.Module, Mapping)):
        return True
    tensordict = sys.modules.get("tensordict")
    if tensordict is None:
        return False
    return bool(tensordict.is_tensor_collection(value) and not tensordict.is_non_tensor(value))


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor, found out without importing what it comes from."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


class Trail:
    """Walks one state again and again, much faster while no Module in it has gained, lost or renamed anything.

    A walk that finds its way as before gives the *same* trace and types. Only for a state that its user holds anyway:
    the Modules under it are kept.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._tree: _Tree | None = None

    def walk(self) -> Walk:
        """What :func:`walk` gives: the leaves as they are now."""
        found = self._tree.walk() if self._tree is not None else None
        if found is not None:
            return found
        found = walk(self._state)
        self._tree = _Tree.of(self._state, found) if len(found.trace) >= _WORTHWHILE else None
        return found


class _Tree:
    """The Modules under one, and how their dictionaries looked. Looking again is a few calls into C for all of them.

    Each call goes over no more objects than it must: of a large module they are not in the CPU's cache.
    """

    def __init__(self, root: Module, found: Walk) -> None:
        self._found = found._replace(leaves=[])  # keeps no tensor alive
        modules = list(_unfolded(root))
        self._insides = list(map(vars, modules))
        self._parameters = list(map(getitem, self._insides, _PARAMETERS))
        owners: list[dict[str, Any]] = [owner for module in modules for owner in (module._parameters, module._buffers)]
        levels = [module._modules for module in modules]
        # As many keys as there were, and a value under each of them: then they are the same keys.
        self._empty = [table for table in (*owners, *levels) if not table]
        self._full = [table for table in (*owners, *levels) if table]
        self._sizes = list(map(len, self._full))
        self._owners, self._keys = _pairs(owners)
        self._levels, self._names = _pairs([level for level in levels if len(level) <= _LONG])
        self._children = list(map(getitem, self._levels, self._names))
        # To go along a long one costs less than to look up every key of it.
        self._long = [level for level in levels if len(level) > _LONG]
        self._long_names = list(chain.from_iterable(self._long))
        self._long_children = list(chain.from_iterable(map(_VALUES, self._long)))
        self._hidden = [module._non_persistent_buffers_set for module in modules if module._buffers]
        self._hidden_keys = list(map(set, self._hidden))
        self._types = list(map(type, map(getitem, self._owners, self._keys)))  # among them, whether they are None
        taken = [
            value is not None and not (owner is module._buffers and key in module._non_persistent_buffers_set)
            for module in modules
            for owner in (module._parameters, module._buffers)
            for key, value in owner.items()
        ]
        self._taken = None if all(taken) else taken

    @classmethod
    def of(cls, state: Any, found: Walk) -> _Tree | None:
        """``None`` for what is no tree of Modules with nothing but tensors: that is walked in full each time."""
        import torch

        if not isinstance(state, torch.nn.Module) or "_extra_state" in found.trace:
            return None
        return cls(state, found) if all("_parameters" in vars(module) for module in _unfolded(state)) else None

    def walk(self) -> Walk | None:
        """The leaves as they are now, or ``None`` where anything but the leaves themselves is not as it was."""
        try:
            if not (
                all(map(is_, map(getitem, self._levels, self._names), self._children))
                and list(chain.from_iterable(self._long)) == self._long_names
                and all(map(is_, chain.from_iterable(map(_VALUES, self._long)), self._long_children))
                and all(map(is_, map(getitem, self._insides, _PARAMETERS), self._parameters))
                and not any(self._empty)
                and list(map(len, self._full)) == self._sizes
                and self._hidden == self._hidden_keys
            ):
                return None
            values = list(map(getitem, self._owners, self._keys))
        except (AttributeError, KeyError):
            return None
        if list(map(type, values)) != self._types:
            return None
        if self._taken is not None:
            values = list(compress(values, self._taken))
        return Walk(self._found.trace, values, self._found.types)


_WORTHWHILE = 30
"""Tokens in a trace from which on a trail is faster than a walk."""
_LONG = 6
"""Children of a Module from which on they are gone through in their order."""
_VALUES = methodcaller("values")
_PARAMETERS = repeat("_parameters")  # replaced as a whole, or gone, where a Module was taken apart


def _pairs(tables: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Each table as often as it has keys, and the keys."""
    return [table for table in tables for _ in table], list(chain.from_iterable(tables))


def _unfolded(module: Module) -> Iterator[Module]:
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _unfolded(child)


class _Walker:
    """One walk. Written for speed: the loops run before every push."""

    __slots__ = ("leaves", "no_extra", "places", "trace")

    def __init__(self, places: list[tuple[Any, Any]] | None, no_extra: Callable[..., Any]) -> None:
        self.trace: list[Any] = []
        self.leaves: list[Any] = []
        self.places = places
        self.no_extra = no_extra

    def module(self, module: Module) -> None:
        trace, leaves, places = self.trace, self.leaves, self.places
        parameters = module._parameters
        if parameters:
            for key, value in parameters.items():
                if value is not None:
                    trace.append(key)
                    leaves.append(value)
                    if places is not None:
                        places.append((parameters, key))
        buffers = module._buffers
        if buffers:
            hidden = module._non_persistent_buffers_set
            for key, buffer in buffers.items():
                if buffer is not None and key not in hidden:
                    trace.append(key)
                    leaves.append(buffer)
                    if places is not None:
                        places.append((buffers, key))
        if type(module).get_extra_state is not self.no_extra:
            trace.append("_extra_state")
            leaves.append(module.get_extra_state)
            if places is not None:
                places.append((module, "_extra_state"))
        children = module._modules
        if children:
            unseen = "module" in children and is_data_parallel(module)
            for name, child in children.items():
                if child is not None:
                    trace += (OPEN, None if unseen else name)
                    self.module(child)
                    trace.append(CLOSE)

    def mapping(self, mapping: Mapping[Any, Any]) -> None:
        import numpy as np
        import torch

        trace, leaves, places = self.trace, self.leaves, self.places
        for key, value in mapping.items() if isinstance(mapping, dict) else self.items(mapping):
            if not isinstance(value, (torch.Tensor, np.ndarray)) and is_state(value):
                trace += (OPEN, key)
                if isinstance(value, torch.nn.Module):
                    self.module(value)
                else:
                    self.mapping(value)
                trace.append(CLOSE)
                continue
            trace.append(key)
            leaves.append(value)
            if places is not None:
                places.append((mapping, key))

    def items(self, mapping: Any) -> list[tuple[Any, Any]]:
        """Also of a TensorDict, which may be a stack of different ones that has no tensors as a whole."""
        try:
            return list(mapping.items())
        except RuntimeError as exc:
            name = names_of([*self.trace, "?"])[-1][:-2]
            what = f"{name!r}" if name else "the weights"
            raise PreflightError(
                f"{what}: a {type(mapping).__qualname__} of which no tensors can be had ({exc}): "
                "give its parts one by one, as a mapping"
            ) from exc


def is_data_parallel(module: Module) -> bool:
    """Whether a Module wraps another one in a level that adds nothing to names."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    return isinstance(module, (DataParallel, DistributedDataParallel))


def _checked(key: Any, prefix: str) -> str:
    if not isinstance(key, str):
        where = f" (in {prefix.removesuffix('.')!r})" if prefix else ""
        raise PreflightError(f"the key {key!r}{where} is a {type(key).__qualname__}: names are str")
    if not key or "\0" in key:
        raise PreflightError(f"the key {key!r} under {prefix!r} is empty or holds a NUL")
    return key


class Signature(NamedTuple):
    """All that names do not say of tensors: column by column, since that is the fastest to make and to compare."""

    addresses: list[int]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    flags: list[tuple[bool, bool, bool]]


def signature(tensors: Sequence[Tensor], *, strides: bool = True) -> Signature:
    """The geometry of plain tensors (strided, with memory of their own), and whether they are conjugate or negative
    views, or inference tensors. Others may raise ``RuntimeError``.

    ``strides=False`` leaves strides and flags out, for those who read tensors that overlap no other: whatever their
    order, a copy is the same.
    """
    import torch

    tensor = torch.Tensor
    with torch._C.DisableTorchFunctionSubclass():
        return Signature(
            list(map(tensor.data_ptr, tensors)),
            list(map(_DTYPE, tensors)),
            list(map(_SHAPE, tensors)),
            list(map(tensor.stride, tensors)) if strides else [],
            list(zip(*(map(flag, tensors) for flag in (tensor.is_conj, tensor.is_neg, tensor.is_inference))))
            if strides
            else [],
        )


_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")  # a little faster than the descriptors


class Guard:
    """Asks again and again whether tensors still have a signature: in two calls into C, once it has seen them."""

    def __init__(self) -> None:
        # A check, and the strides of the signature that it is for: whoever changes those makes another list of them.
        self._made: tuple[object, Callable[..., bool] | None] = (None, None)

    def unchanged(self, known: Signature, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors have this signature: lie where they lay, and look as they looked."""
        import torch

        strides, check = self._made
        made = strides is known.strides
        try:
            with torch._C.DisableTorchFunctionSubclass():
                if list(map(torch.Tensor.data_ptr, tensors)) != known.addresses:
                    return False
                if made and check is not None and check(*tensors):
                    return True
                if signature(tensors, strides=bool(known.strides)) != known:
                    return False
                if not made or check is not None:  # which is stricter, on requires_grad and some modes: make another
                    self._made = (known.strides, _checker(tensors))
                return True
        except RuntimeError:  # no longer plain: whoever looks closer can name it
            return False


def _checker(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """One call into C that tells whether tensors have the same classes, dtypes, devices, shapes and strides as these.

    It is what torch.compile guards its inputs with; it takes no tensor twice, and keeps none alive.
    """
    guards = _tensor_guards()
    return guards(tensors) if guards is not None and len(set(map(id, tensors))) == len(tensors) else None


@cache
def _tensor_guards() -> Callable[[Sequence[Tensor]], Callable[..., bool]] | None:
    """``None`` where this torch has no such guards, or others: they are not part of its public interface."""
    import torch

    def make(tensors: Sequence[Tensor]) -> Callable[..., bool]:
        guards: Any = torch._C._dynamo.guards.TensorGuards
        sizes, strides = ([list(of(tensor)) for tensor in tensors] for of in (_SHAPE, torch.Tensor.stride))
        check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check

    one = torch.zeros(2, 2, device="cpu")
    others = (one.t(), one[:1], one[0], one.view(torch.int32), torch.nn.Parameter(one), None)
    try:
        check = make([one])
        good = check(one) and check(one.clone()) and not any(map(check, others))
    except Exception:
        return None
    return make if good else None
