"""The target that is a Module, TensorDict or mapping: its tensors and arrays are updated where they are."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from weightwire.errors import PreflightError
from weightwire.weights.commit import Prepared, Risky, Step
from weightwire.weights.dtypes import dtype_name, needs_bit_copy
from weightwire.weights.fit import Fit, Route, make_fit, sharing
from weightwire.weights.guarded import is_guarded
from weightwire.weights.hidden import hidden
from weightwire.weights.layout import Layout
from weightwire.weights.names import SHOWN, NameMap, Needs, canonical_all, encode_needs, match, name_fault
from weightwire.weights.slots import (
    ARRAY,
    EXTRA,
    PLAIN,
    Slot,
    as_array,
    bits,
    like,
    make_slot,
    quietly,
    raw_of,
    same_bits,
)
from weightwire.weights.target import Target
from weightwire.weights.walk import Guard, Signature, Trail, Walk, is_dtensor, is_state, names_of, signature, walk

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from weightwire.transport import Header, Version
    from weightwire.weights.layout import Entry

__all__ = ["StateTarget"]

Place = tuple[Any, Any]  # container and key
Use = tuple[bool, bool, "list[int] | None"]
"""What a fit depends on beside layout and target: whether the payload is a subset, whether its memory may be written
to, and the views' devices, where it is not known that they are all on the CPU."""


class StateTarget(Target):
    """Updates the tensors and arrays of a Module, TensorDict or mapping, nested as may be.

    Looking at a target that is as it was left costs about half a microsecond a tensor; all else is worked out only when
    the target or the payload's layout has changed.
    """

    def __init__(self, weights: Any, names: NameMap, *, alias: bool) -> None:
        self.weights = weights
        self._names = names
        self._alias = alias
        self._coming: _Coming | None = None
        self._admitted: dict[str, Slot] = {}  # name in the payload -> where it goes, for one that is poured
        self._trail = Trail(weights)
        self._seen, _ = quietly(partial(_survey, weights, names, alias=alias))

    def needs(self) -> bytes:
        return encode_needs(self._seen.needs)

    def prepare(self, header: Header, views: list[Tensor], *, writable: bool = True, on_host: bool = False) -> Prepared:
        import torch

        devices = None if on_host else list(map(torch.Tensor.get_device, views))
        use = (header.base is not None, writable, devices)
        places: list[Place] = []
        found = walk(self.weights, places) if self._seen.special else self._trail.walk()
        fit = self._seen.fit(header.layout, use) if self._seen.holds(found) else None
        if fit is None:
            fit = quietly(partial(self._make_fit, header.layout, use, views))
            found = walk(self.weights, places := [])
        if fit.plain and not self._alias:  # what nearly every target is, without the detour
            return Prepared(
                tensors=fit.tensors,
                nbytes=fit.nbytes,
                steps=[partial(torch._foreach_copy_, fit.into, views)],
                inference=fit.inference,
                streams=fit.streams,
            )
        coming = self._coming if header.base is not None else None
        if coming is not None and not (coming.stamp == header.base and coming.before is self._seen.look):
            coming = None  # it has been committed, or given up
        known = coming.tensors if coming else {}
        work = _Work(self._seen, fit, views, found.leaves, places, writable, known, alias=self._alias)
        prepared = work.prepared()
        self._coming = None
        if header.base is None and work.moved:
            self._coming = _Coming(header.stamp, self._seen.look, work.moved)
        return prepared

    def admit(self, header: Header) -> Layout:
        seen, slots = quietly(partial(_survey, self.weights, self._names, alias=self._alias))
        pairs, difference = match(header.layout, seen.needs, subset=header.base is not None)
        if difference:
            raise PreflightError(difference.message())
        entries = header.layout.entries
        shared = {leaf for group in sharing(slots) for leaf in group}
        leaves = {entries[entry].name: seen.leaf_of[need] for entry, need in pairs}
        self._admitted = {name: slots[leaf] for name, leaf in leaves.items() if leaf not in shared}
        return Layout(tuple(entry for entry in entries if entry.name in leaves), header.layout.sizes)

    def plain_memory(self, entry: Entry) -> Tensor | None:
        slot = self._admitted.get(entry.name)
        raw = None if slot is None or slot.kind != PLAIN else slot.raw
        if raw is None or dtype_name(raw.dtype) != entry.dtype or entry.strides or entry.offset:
            return None
        if not raw.is_contiguous() or raw.is_inference():
            return None
        return quietly(partial(_flat, raw))

    def _make_fit(self, layout: Layout, use: Use, views: Sequence[Tensor]) -> Fit:
        """Look closely at the target, and work out how the payload goes into it."""
        subset, writable, _ = use
        self._trail = Trail(self.weights)  # which may have kept to another order of the same names
        seen, slots = _survey(self.weights, self._names, alias=self._alias)
        if seen.look == self._seen.look and seen.trace == self._seen.trace and seen.types == self._seen.types:
            seen = self._seen
        pairs, difference = match(layout, seen.needs, subset=subset)
        if difference:
            raise PreflightError(difference.message())
        self._seen = seen
        buffers = set() if writable else {id(module._buffers) for module in _modules(self.weights)}
        leaves = [(entry, seen.leaf_of[need]) for entry, need in pairs]
        fit = make_fit(
            layout, leaves, slots, views, alias=self._alias, private=lambda slot: id(slot.place[0]) in buffers
        )
        seen.keep(layout, use, fit)
        return fit


def _flat(raw: Tensor) -> Tensor:
    import torch

    return bits(raw).as_strided((raw.numel(),), (1,), raw.storage_offset()).view(torch.uint8)


class _Coming(NamedTuple):
    """The new memory that a full version that was prepared will bring: for the subset that may be prepared on top."""

    stamp: Version
    before: _Look
    tensors: Mapping[int, Tensor]


def _modules(state: Any) -> Iterator[Module]:
    import torch

    if isinstance(state, torch.nn.Module):
        yield from state.modules()
    elif is_state(state):
        for value in state.values():
            yield from _modules(value)


# -- how the target looks --------------------------------------------------------------------------------------------


class _Look(NamedTuple):
    """Everything by which a change of the target shows that names and types do not show."""

    tensors: Signature
    arrays: list[tuple[Any, ...]]
    others: list[tuple[Any, ...]]


class _Seen:
    """A target as it looked, and the fits that are good as long as it looks so."""

    def __init__(self, found: Walk, slots: Mapping[int, Slot], names: NameMap) -> None:
        self.trace = found.trace
        self.types = found.types
        self.plain = [leaf for leaf, slot in slots.items() if slot.kind == PLAIN]
        self.arrays = [leaf for leaf, slot in slots.items() if slot.kind == ARRAY]
        self.others = [leaf for leaf, slot in slots.items() if slot.kind not in (PLAIN, ARRAY)]
        self.special = bool(self.arrays or self.others)
        self.columns = {leaf: column for column, leaf in enumerate(self.plain)}
        self.leaf_of = list(slots)
        self.needs = Needs(
            tuple(canonical_all([slot.name for slot in slots.values()])),
            tuple(slot.dtype for slot in slots.values()),
            tuple(slot.shape for slot in slots.values()),
            names,
        )
        self.look = _Look(signature(self._tensors(found.leaves)), *self._rest(found.leaves))
        self._guard = Guard()
        self._fits: dict[int, tuple[Layout, Use, Fit]] = {}

    def holds(self, found: Walk) -> bool:
        """Whether the target still looks as it did."""
        trace, leaves, types = found
        if (trace is not self.trace and trace != self.trace) or (types is not self.types and types != self.types):
            return False
        self.trace, self.types = trace, types  # which compare faster with themselves, next time
        if self.special and self._rest(leaves) != self.look[1:]:
            return False
        return self._guard.unchanged(self.look.tensors, self._tensors(leaves))

    def _tensors(self, leaves: list[Any]) -> list[Any]:
        return leaves if len(self.plain) == len(leaves) else [leaves[leaf] for leaf in self.plain]

    def _rest(self, leaves: list[Any]) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """What is no plain tensor: the facts of arrays, and of others."""
        arrays = [leaves[leaf] for leaf in self.arrays]
        return (
            [(id(array), array.shape, array.strides, array.dtype) for array in arrays],
            [_facts(leaves[leaf]) for leaf in self.others],
        )

    def after(
        self, tensors: Mapping[int, Tensor], strides: Sequence[tuple[int, ...]], arrays: Mapping[int, Any]
    ) -> _Look:
        """How the target will look when these leaves have moved."""
        import torch

        old = self.look.tensors
        look = old._replace(addresses=list(old.addresses), strides=list(old.strides))
        for leaf, address, stride in zip(tensors, map(torch.Tensor.data_ptr, tensors.values()), strides):
            column = self.columns[leaf]
            look.addresses[column] = address
            look.strides[column] = stride
        if look.strides == old.strides:
            look = look._replace(strides=old.strides)  # the same list: what was made for it stays good
        facts = list(self.look.arrays)
        for place, leaf in enumerate(self.arrays if arrays else ()):
            if leaf in arrays:
                array = arrays[leaf]
                facts[place] = (id(array), array.shape, array.strides, array.dtype)
        return _Look(look, facts, self.look.others)

    def fit(self, layout: Layout, use: Use) -> Fit | None:
        known = self._fits.get(id(layout))
        return known[2] if known is not None and known[0] is layout and known[1] == use else None

    def keep(self, layout: Layout, use: Use, fit: Fit) -> None:
        if len(self._fits) >= _KEPT:
            self._fits.clear()
        self._fits[id(layout)] = (layout, use, fit)


_KEPT = 64
"""How many layouts a target remembers its fit to: full versions and subsets that are pushed in turn, and the pieces of
one that is poured."""


def _facts(leaf: Any) -> tuple[Any, ...]:
    import torch

    value = leaf if isinstance(leaf, torch.Tensor) else leaf()
    if not isinstance(value, torch.Tensor):
        return (type(value),)
    facts = (type(value), value.dtype, tuple(value.shape), value.device)
    if not is_dtensor(value):
        return facts
    local = value._local_tensor  # type: ignore[attr-defined]
    spec = (value.device_mesh, value.placements)  # type: ignore[attr-defined]
    return (*facts, *spec, local.data_ptr(), tuple(local.shape), local.stride())


def _survey(weights: Any, names: NameMap, *, alias: bool) -> tuple[_Seen, dict[int, Slot]]:
    """Look closely at a target. Raises :class:`~weightwire.PreflightError`, naming what cannot be updated."""
    places: list[Place] = []
    found = walk(weights, places)
    again = walk(weights)
    slots: dict[int, Slot] = {}
    faults: list[str] = []
    for leaf, name in enumerate(names_of(found.trace)):
        value = found.leaves[leaf]
        slot = make_slot(name, value, places[leaf], replace=alias)
        if isinstance(slot, Slot) and slot.kind != EXTRA and again.leaves[leaf] is not value:
            slot = "made anew each time that it is looked at, so that what is written into it is lost"
        if fault := name_fault(name):
            slot = fault
        if isinstance(slot, Slot):
            slots[leaf] = slot
        elif not names.excuses(name):
            faults.append(f"  {name if name.isprintable() else ascii(name)}: {slot}")
    if not any(map(is_guarded, found.leaves)):  # which could not be read
        faults += [
            f'  {name}: {what}: select=["!name"] leaves it as it is; a function can take all tensors and load them'
            for name, what in hidden(weights)
            if not names.excuses(name)
        ]
    if faults:
        more = [f"  and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        raise PreflightError("\n".join(["the target has what cannot be updated:", *faults[:SHOWN], *more]))
    if not slots:
        raise PreflightError("the target has no tensors; without a target the receiver makes a mapping of its own")
    return _Seen(found, slots, names), slots


# -- one payload -----------------------------------------------------------------------------------------------------


class _Work:
    """Makes one payload ready: all that can fail."""

    def __init__(
        self,
        seen: _Seen,
        fit: Fit,
        views: Sequence[Tensor],
        leaves: Sequence[Any],
        places: Sequence[Place],
        writable: bool,
        coming: Mapping[int, Tensor],
        *,
        alias: bool,
    ) -> None:
        self.seen, self.fit, self.views, self.leaves, self.places = seen, fit, views, leaves, places
        self.writable, self.alias = writable, alias
        self.coming = coming
        self.moved: dict[int, Tensor] = {}
        self.replaced: dict[int, Any] = {}
        self.steps: list[Step] = []
        self.risky: list[Risky] = []

    def prepared(self) -> Prepared:
        import torch

        fit, tensor = self.fit, torch.Tensor
        values = list(self.views) if fit.whole else list(map(self.views.__getitem__, fit.copied))
        fresh = list(map(self.views.__getitem__, fit.swapped))
        if fit.special or any(map(tensor.is_inference, fresh)):
            quietly(partial(self._special, values, fresh))
        self.moved = dict(zip(fit.moving, fresh)) | self.moved
        if values:
            self.steps.append(partial(torch._foreach_copy_, fit.into, values))
        old: list[Any] = [self.leaves[leaf] for leaf in self.replaced]
        if self.moved:
            setter = tensor.data.__set__  # type: ignore[attr-defined]
            moving = list(map(self.leaves.__getitem__, self.moved))
            old += map(tensor.untyped_storage, moving)
            self.steps.append(partial(deque, map(setter, moving, self.moved.values()), 0))
        if self.moved or self.replaced:
            if fit.strides is None:
                fit.strides = list(map(tensor.stride, self.moved.values()))
            look = self.seen.after(self.moved, fit.strides, self.replaced)
            self.steps.append(partial(setattr, self.seen, "look", look))
            if not self.alias:  # what could not be written to and was replaced can be, from now on
                self.steps.append(partial(dict.clear, self.seen._fits))
        return Prepared(
            tensors=fit.tensors,
            nbytes=fit.nbytes,
            steps=self.steps,
            risky=self.risky,
            inference=fit.inference,
            keep=old,
            streams=fit.streams,
        )

    def _special(self, values: list[Tensor], fresh: list[Tensor]) -> None:
        """What few targets need: casts, other devices, memory shared in ways of their own, arrays, the user's code."""
        _adapt(values, self.fit.adapted_copies)
        _adapt(fresh, self.fit.adapted_swaps)
        fresh[:] = map(like, fresh, map(self.leaves.__getitem__, self.fit.moving))
        for tie in self.fit.ties:
            for leaf, tensor in tie.solve(self.views, self._now):
                if leaf in self.seen.columns:
                    self.moved[leaf] = like(tensor, self.leaves[leaf])
                else:
                    self._place(leaf, tensor, writable=True)
        for route in self.fit.places:
            with _naming(route):
                value = self.views[route.view]
                if route.adapt:
                    self._place(route.leaf, route.adapt(value), writable=True)
                else:
                    self._place(route.leaf, value.detach(), writable=self.writable)
        for route in self.fit.odd:
            with _naming(route):
                self.risky.append(self._odd(route))

    def _now(self, leaf: int) -> Tensor:
        """The values of a leaf as they will be when this payload is committed."""
        if leaf in self.coming:
            return self.coming[leaf]
        if leaf in self.seen.columns:
            raw = raw_of(self.leaves[leaf])
        else:
            slot = make_slot("", self.leaves[leaf], self.places[leaf], replace=True)
            raw = slot.raw if isinstance(slot, Slot) else None
        assert raw is not None
        return raw

    def _place(self, leaf: int, tensor: Tensor, *, writable: bool) -> None:
        container, key = self.places[leaf]
        old = self.leaves[leaf]
        new = self.replaced[leaf] = as_array(tensor, old, writable=writable)
        setter = type(container).__setitem__
        if setter is dict.__setitem__ or setter is OrderedDict.__setitem__:
            self.steps.append(partial(setter, container, key, new))
        else:
            back = partial(_put_back, container, key, old)
            self.risky.append(Risky(str(key), partial(setter, container, key, new), mend=back))

    def _odd(self, route: Route) -> Risky:
        import torch

        assert route.adapt is not None
        value, leaf = route.adapt(self.views[route.view]), self.leaves[route.leaf]
        if not isinstance(leaf, torch.Tensor):  # the bound get_extra_state
            module, old = leaf.__self__, leaf()
            old = old.detach().clone()
            return Risky(route.name, partial(module.set_extra_state, value), mend=partial(_restate, module, old))
        raw = raw_of(leaf)
        do = partial(leaf.copy_, value)
        if raw is None:  # it has no memory of its own that could be copied
            return Risky(route.name, do, mend=partial(_rewrite, leaf, leaf.detach().clone()))
        raw = bits(raw) if needs_bit_copy(raw.dtype) else raw
        return Risky(route.name, do, restore=partial(torch.Tensor.copy_, raw, raw.clone()))


def _adapt(values: list[Tensor], routes: Sequence[tuple[int, Route]]) -> None:
    for place, route in routes:
        assert route.adapt is not None
        with _naming(route):
            values[place] = route.adapt(values[place])


@contextmanager
def _naming(route: Route) -> Iterator[None]:
    """Put the tensor's name on whatever goes wrong with it."""
    try:
        yield
    except Exception as exc:
        with suppress(AttributeError):
            exc.tensor = route.name  # type: ignore[attr-defined]
        raise


# -- steps that run code of the user's -------------------------------------------------------------------------------


def _rewrite(leaf: Tensor, old: Tensor) -> None:
    import torch

    with torch.no_grad():
        leaf.copy_(old)


def _restate(module: Module, old: Tensor) -> None:
    now = module.get_extra_state()
    if now.dtype != old.dtype or now.shape != old.shape or not same_bits(now, old):
        module.set_extra_state(old)


def _put_back(container: Any, key: Any, old: Any) -> None:
    if container[key] is not old:
        container[key] = old
