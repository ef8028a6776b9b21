"""From a user's object to live tensors and the layout under which they are sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from weightwire.calls import check_ran, check_runs
from weightwire.errors import PreflightError, WireError
from weightwire.weights.dtypes import DTYPES, dtype_name
from weightwire.weights.guarded import is_guarded, stand_in
from weightwire.weights.hidden import Hidden, hidden
from weightwire.weights.layout import extent
from weightwire.weights.lora import is_deferred, made_of, merged
from weightwire.weights.names import SHOWN, NameMap, canonical, canonical_all
from weightwire.weights.plan import Plan, make_plan
from weightwire.weights.scaled import scaled_name
from weightwire.weights.slots import has_memory
from weightwire.weights.walk import (
    Guard,
    Signature,
    Trail,
    Walk,
    check_instance,
    is_dtensor,
    is_state,
    names_of,
    not_weights,
    signature,
    walk,
)

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.weights.layout import Layout
    from weightwire.weights.names import Cast, Rename, Select

__all__ = ["Source", "State"]


class State(NamedTuple):
    """What is sent: the caller's own tensors, not yet read, in the order of the layout's entries."""

    plan: Plan
    tensors: list[Tensor]

    @property
    def layout(self) -> Layout:
        return self.plan.layout


class Source:
    """Reads weights: a Module, TensorDict, nested mapping of tensors, arrays or Modules, a function that returns one.

    Looking again at a state that has not changed (same names, same tensors in the same places) costs about half a
    microsecond a tensor and gives the same ``Layout`` object. No tensor is kept alive in between.
    """

    def __init__(
        self,
        weights: Any = None,
        *,
        select: Select = None,
        rename: Rename = None,
        cast: Cast = None,
        sharded: bool = False,
    ) -> None:
        """``sharded``: tensors that are spread over ranks can be gathered while they are sent."""
        self._weights = weights
        self._calls = callable(weights) and not is_state(weights)  # the function that returns them
        if self._calls:
            check_instance(weights)
            check_runs(weights, "the source")
        elif weights is not None and not is_state(weights):
            raise not_weights(weights)
        self._sharded = sharded
        self._options = (select, rename, cast)
        self._narrowed: dict[Any, Source] = {}
        self._trail = Trail(weights)
        self._map = NameMap(select, rename, cast)
        if self._map.follows_target:
            raise PreflightError(f"cast={cast!r}: 'target' is what a worker's policy has: WeightReceiver takes it")
        self._known: list[_Known] = []  # newest first

    def extract(self, weights: Any = None, *, select: Select = None, merge: bool = False) -> State:
        """The state of ``weights``, or of those that the source was made with; of that only what ``select`` takes, and
        with LoRA adapters added to the weights where ``merge`` says so.

        Raises :class:`~weightwire.PreflightError`, naming the tensors, for what cannot be sent.
        """
        import torch

        mine = weights is None
        calls = self._calls if mine else callable(weights) and not is_state(weights)
        if mine:
            weights = self._weights
        if calls:
            mine, weights = False, weights()
            check_ran(weights, "the source")
        if merge:
            with torch.no_grad():
                mine, weights = False, merged(weights)
        found = self._trail.walk() if mine else walk(weights)
        source = self if select is None else self._narrow(select, found)
        for known in source._known:
            tensors = known.look(found)
            if tensors is not None:
                return State(known.plan, tensors)
        beside = hidden(weights)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return source._build(found, beside, whole=mine and source is self)

    def _narrow(self, select: Select, found: Walk) -> Source:
        """A source that takes less: the same one for the same patterns, or for a predicate that takes the same."""
        mine, more = self._map, NameMap(select)
        selects: Callable[[str], bool] = more.selects
        if callable(more.select):  # often a lambda, which is another one each time, and may see something else, too
            chosen = frozenset(filter(selects, canonical_all(names_of(found.trace))))
            selects, key = chosen.__contains__, chosen
        else:
            key = frozenset(more.select or ())
        known = self._narrowed.get((callable(more.select), key))
        if known is None:

            def both(name: str) -> bool:
                return mine.selects(name) and selects(name)

            both.__qualname__ = repr(select)  # how errors show it
            _, rename, cast = self._options
            while len(self._narrowed) > _KEPT:
                del self._narrowed[next(iter(self._narrowed))]
            known = Source(select=both, rename=rename, cast=cast, sharded=self._sharded)
            self._narrowed[callable(more.select), key] = known
        return known

    def _build(self, found: Walk, beside: Sequence[tuple[str, Hidden]], *, whole: bool) -> State:
        trace, leaves, _ = found
        names = names_of(trace)
        if whole:
            self._map.check_use(names)
        beside = [(name, leaf) for name, leaf in beside if self._map.selects(canonical(name))]
        if not names and not beside:
            raise PreflightError("the weights are empty: there is not a single tensor in them")
        chosen = self._map.apply(names)
        positions = [position for position, _ in chosen]
        taken = [(names[position], leaves[position]) for position in positions]
        tensors = _tensors([*taken, *beside], sharded=self._sharded)
        sent = [name for _, name in chosen]
        dtypes = [self._map.dtype(names[p], dtype_name(tensor.dtype)) for p, tensor in zip(positions, tensors)]
        scaled: list[str] = []
        if self._map.scales:
            columns = self._with_scales(names, sent, positions, tensors, dtypes)
            sent, positions, tensors, dtypes, scaled = columns
        plan = make_plan(sent, tensors, dtypes, scaled)
        for known in self._known:  # the same in other memory: what was derived from the old objects stays good
            if known.plan.layout == plan.layout:
                plan.layout = known.plan.layout
                plan = known.plan if known.plan.same_as(plan) else plan
        try:
            _ = plan.layout.wire  # refuses what no backend could send: names with line breaks, a hundred dimensions
        except WireError as exc:
            raise PreflightError(f"these weights cannot be sent: {exc}") from exc
        others = [known for known in self._known if known.plan is not plan and known.trace != trace]
        self._known = [_Known(plan, found, positions, tensors), *others[:_KEPT]]
        return State(plan, tensors)

    def _with_scales(
        self, names: list[str], sent: list[str], positions: list[int], tensors: list[Tensor], dtypes: list[str]
    ) -> tuple[list[str], list[int], list[Tensor], list[str], list[str]]:
        """The columns of a plan, with a scale behind each tensor that is cast with one."""
        columns: Any = ([], [], [], [], [])
        for name, position, tensor, dtype in zip(sent, positions, tensors, dtypes):
            scaled = self._map.scaled(names[position], dtype_name(tensor.dtype))
            rows = [(name, position, tensor, dtype, scaled)]
            if scaled:
                rows.append((scaled_name(name), position, tensor, "float32", scaled))
            for column, values in zip(columns, zip(*rows)):
                column.extend(values)
        twice = [name for name, count in Counter(columns[0]).items() if count > 1]
        if twice:
            raise PreflightError(f"cast: the scale of a tensor would be called {twice[0]!r}, as another tensor is")
        found: tuple[list[str], list[int], list[Tensor], list[str], list[str]] = columns
        return found


_KEPT = 3
"""How many layouts a source remembers beside the newest: of subsets, or of other objects that are pushed in turn."""


class _Known:
    """A state as it was when its plan was made, without its tensors."""

    def __init__(self, plan: Plan, found: Walk, positions: list[int], tensors: list[Tensor]) -> None:
        self.plan = plan
        self.trace, leaves, self._types = found
        self._positions = None if positions == list(range(len(leaves))) else positions
        self._odd = [n for n, position in enumerate(positions) if not _is_tensor(leaves[position])]
        self._sharded = [n for n, tensor in enumerate(tensors) if is_dtensor(tensor)]
        self._deferred = [n for n, tensor in enumerate(tensors) if is_deferred(tensor)]
        self._specs = _specs(tensors, self._sharded)
        self._bits = _bits(tensors, plan.tied)
        self._signature: Signature = signature(self._local(tensors), strides=bool(plan.tied))
        self._guard = Guard()

    def look(self, found: Walk) -> list[Tensor] | None:
        """The tensors, where this plan is good for them."""
        trace, leaves, types = found
        if (trace is not self.trace and trace != self.trace) or (types is not self._types and types != self._types):
            return None
        self.trace, self._types = trace, types  # which compare faster with themselves, next time
        tensors = leaves if self._positions is None else [leaves[position] for position in self._positions]
        if self._odd:
            tensors = list(tensors)
            for n in self._odd:
                tensor = _tensor(tensors[n])
                if isinstance(tensor, str):  # what is wrong with it; whoever builds anew can name it
                    return None
                tensors[n] = tensor
        local = self._local(tensors)
        if not self._guard.unchanged(self._signature, local) and not self._moved(local):
            return None
        if self._bits and _bits(tensors, self.plan.tied) != self._bits:
            return None
        return None if self._sharded and _specs(tensors, self._sharded) != self._specs else tensors

    def _moved(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors look as they did, and lie apart elsewhere: what a function makes anew for each push."""
        import torch

        try:
            found = signature(tensors, strides=False)
            strides = list(map(torch.Tensor.stride, tensors))
        except RuntimeError:
            return False
        if self.plan.tied or found[1:] != self._signature[1:] or not all(map(has_memory, tensors)):
            return False
        if {tensor.device for tensor in tensors if tensor.device.type != "cpu"} != self.plan.devices:
            return False
        spans = sorted(
            (tensor.get_device(), address, address + extent(shape, stride) * dtype.itemsize)
            for tensor, address, dtype, shape, stride in zip(tensors, *found[:3], strides)
            if 0 not in shape
        )
        if any(one[0] == two[0] and two[1] < one[2] for one, two in pairwise(spans)):
            return False
        self._signature = self._signature._replace(addresses=found.addresses)
        return True

    def _local(self, tensors: list[Tensor]) -> list[Tensor]:
        """Tensors that have memory, from which the others are made."""
        if not self._sharded and not self._deferred:
            return tensors
        tensors = list(tensors)
        for n in self._sharded:
            tensors[n] = tensors[n]._local_tensor  # type: ignore[attr-defined]
        for n in self._deferred:
            tensors[n] = made_of(tensors[n])
        return tensors


def _specs(tensors: Sequence[Any], sharded: Iterable[int]) -> list[Any]:
    return [(tensors[n].shape, tensors[n].device_mesh, tensors[n].placements) for n in sharded]


def _bits(tensors: Sequence[Tensor], positions: Iterable[int]) -> list[tuple[bool, bool]]:
    """Conjugate and negative views have the geometry of what they are views of, and other values."""
    return [(tensors[n].is_conj(), tensors[n].is_neg()) for n in positions]


def _is_tensor(leaf: Any) -> bool:
    """Whether a leaf is the tensor that is read."""
    import torch

    return isinstance(leaf, torch.Tensor) and not is_guarded(leaf)


# -- leaves ------------------------------------------------------------------------------------------------------------


def _tensors(leaves: Sequence[tuple[str, Any]], *, sharded: bool) -> list[Tensor]:
    """A tensor for each leaf, or an error that names all that cannot be sent."""
    tensors: list[Tensor] = []
    faults: list[str] = []
    for name, leaf in leaves:
        found = _tensor(leaf)
        fault = found if isinstance(found, str) else _fault(found, sharded=sharded)
        if fault:
            faults.append(f"  {name}: {fault}")
        elif not isinstance(found, str):
            tensors.append(found)
    if faults:
        more = [f"  and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        raise PreflightError("\n".join(["these weights cannot be sent:", *faults[:SHOWN], *more]))
    return tensors


def _tensor(leaf: Any) -> Tensor | str:
    """The leaf as a tensor that shares its memory, or what is wrong with it."""
    import numpy as np
    import torch

    if isinstance(leaf, torch.Tensor):
        return stand_in(leaf) if is_guarded(leaf) else leaf
    if isinstance(leaf, np.ndarray):
        return _from_numpy(leaf)
    if getattr(leaf, "__name__", "") == "get_extra_state" and callable(leaf):
        state = leaf()
        kind = type(state).__qualname__
        return state if isinstance(state, torch.Tensor) else f"extra state that is no tensor but a {kind}: {_LEAVE_OUT}"
    if isinstance(leaf, Hidden):
        return f"{leaf}: {_LEAVE_OUT}; where it is tensors, weights=policy.state_dict sends them"
    if isinstance(leaf, (bool, int, float, complex, np.generic)):
        return f"a {type(leaf).__qualname__}, not a tensor: torch.tensor(x) makes one of it"
    return f"a {type(leaf).__qualname__}, not a tensor: {_LEAVE_OUT}"


_LEAVE_OUT = 'select=["!name"] leaves a tensor out'


def _from_numpy(array: Any) -> Tensor | str:
    import numpy as np
    import torch

    name = array.dtype.name
    if isinstance(array, np.ma.MaskedArray):
        return "a masked array, whose mask would be lost"
    if not array.dtype.isnative:
        return f"{name} in foreign byte order: x.astype(x.dtype.newbyteorder('=')) brings it into this machine's"
    if name not in DTYPES:
        return f"an array of dtype {array.dtype}, which is none of torch's"
    if not array.flags.aligned or any(s < 0 or s % array.itemsize for s in array.strides):
        array = array.copy()  # torch cannot look at it
    if not array.flags.writeable:
        array = np.asarray(_Readable(array))
    if array.dtype.kind == "V":  # bfloat16 and the float8 kinds, as ml_dtypes registers them with NumPy
        bits = array.view(f"u{array.itemsize}")
        return torch.from_numpy(bits).view(getattr(torch, name))
    return torch.from_numpy(array)


class _Readable:
    """A read-only array, seen without its flag: torch has no read-only tensors and warns, but nothing here writes."""

    def __init__(self, array: Any) -> None:
        self._array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__: Mapping[str, Any] = {**array.__array_interface__, "data": (address, False)}


def _fault(tensor: Tensor, *, sharded: bool) -> str:
    """Why a tensor cannot be sent; empty where it can."""
    import torch
    from torch.nn.parameter import is_lazy

    dtype = dtype_name(tensor.dtype)
    if is_lazy(tensor):
        return "not initialised yet: run its lazy module once"
    if tensor.is_meta:
        return "on the meta device, without values: to_empty() and load them first"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized or dtype not in DTYPES:
        return f"of dtype {dtype}, which does not travel"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}: x.to_dense() can be sent"
    if is_deferred(tensor):
        return ""
    if is_dtensor(tensor):
        return _sharding_fault(tensor, sharded=sharded)
    kind = type(tensor).__qualname__
    return "" if has_memory(tensor) else f"a {kind} without memory under it (offloaded, or made of others?)"


def _sharding_fault(tensor: Any, *, sharded: bool) -> str:
    spread = tensor.device_mesh.size() > 1 and not all(placement.is_replicate() for placement in tensor.placements)
    if sharded or not spread:
        return "" if has_memory(tensor._local_tensor) else "a DTensor without memory under it"
    return (
        f"a DTensor spread over {tensor.device_mesh.size()} ranks, of which nobody knew when the updater was made: "
        "make the updater with the sharded module itself, on every rank"
    )
