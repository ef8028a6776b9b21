"""How a payload of one layout goes into a target as it looks now: worked out once, used for every version after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from weightwire.errors import PreflightError
from weightwire.weights.dtypes import dtype_name, needs_bit_copy, torch_dtype
from weightwire.weights.layout import Entry, Layout, dense_strides, extent, view
from weightwire.weights.slots import ARRAY, PLAIN, SHARD, Slot, bits, overlaps_itself, put, same_bits

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Fit", "Member", "Route", "Tie", "make_fit", "sharing"]

Adapter = Callable[["Tensor"], "Tensor"]


class Route(NamedTuple):
    """Entry ``view`` of the payload goes to leaf ``leaf`` of the target, through ``adapt`` where that is set."""

    name: str
    view: int
    leaf: int
    adapt: Adapter | None = None


class Fit:
    """The routes of a payload's entries into a target.

    The views at ``copied`` end in the tensors ``into``, all in one fused copy; those at ``swapped`` become the memory
    of the leaves ``moving``; ``places`` put another array into a mapping; ``odd`` ones go one by one, through code of
    the user's. ``ties`` check, or move together, what shares memory.
    """

    def __init__(
        self,
        ways: Mapping[str, Sequence[Route]],
        into: list[Tensor],
        ties: Sequence[Tie],
        *,
        views: int,
        tensors: int,
        nbytes: int,
        inference: bool,
        inferring: bool,
        streams: Sequence[torch.device],
    ) -> None:
        copies, swaps, self.places, self.odd = (ways[way] for way in (COPY, SWAP, PLACE, CODE))
        self.into = into
        self.ties = ties
        self.tensors = tensors
        self.nbytes = nbytes
        self.streams = streams  # devices that the payload's memory is read on
        self.inference = inference  # whether inference tensors are written to
        self.copied = [route.view for route in copies]
        self.whole = self.copied == list(range(views))  # whether that is all views, in order
        self.swapped = [route.view for route in swaps]
        self.moving = [route.leaf for route in swaps]
        self.adapted_copies = [(n, route) for n, route in enumerate(copies) if route.adapt]
        self.adapted_swaps = [(n, route) for n, route in enumerate(swaps) if route.adapt]
        self.strides: list[tuple[int, ...]] | None = None  # of what moves, once they are known: it is always the same
        self.special = bool(self.adapted_copies or self.adapted_swaps or self.places or self.odd or ties or inferring)
        self.plain = self.whole and not (self.special or swaps)  # nothing but one fused copy of all views


COPY, SWAP, PLACE, CODE = "copy", "swap", "place", "code"


def make_fit(
    layout: Layout,
    pairs: Sequence[tuple[int, int]],
    slots: Mapping[int, Slot],
    views: Sequence[Tensor],
    *,
    alias: bool,
    private: Callable[[Slot], bool],
) -> Fit:
    """Work out the fit of ``pairs`` (entry, leaf), which :func:`~weightwire.weights.names.match` has found to agree.

    ``views`` show dtypes and devices; they are not kept. ``private(slot)``: whether a slot may not point at the
    payload's own memory although ``alias`` asks for that.
    """
    fitter = _Fitter(layout.entries, pairs, slots, views, alias=alias, private=private)
    fitter.settle_ties()
    fitter.drop_followers()
    fitter.keep_apart()
    ways: dict[str, list[Route]] = {COPY: [], SWAP: [], PLACE: [], CODE: []}
    for way, route in fitter.routes.values():
        ways[way].append(route)
    into = [_into(slots[route.leaf]) for route in ways[COPY]]
    nbytes = sum(layout.sizes[block] for block in {layout.entries[entry].block for entry, _ in pairs})
    streams = list({view.device for view in views if view.device.type != "cpu"})
    written = [*into, *(slots[route.leaf].value for route in ways[CODE])]
    return Fit(
        ways,
        into,
        fitter.ties,
        views=len(views),
        tensors=len(pairs),
        nbytes=nbytes,
        inference=any(tensor.is_inference() for tensor in written),
        inferring=any(slots[route.leaf].value.is_inference() for route in ways[SWAP]),
        streams=streams,
    )


def _into(slot: Slot) -> Tensor:
    assert slot.raw is not None
    return bits(slot.raw) if needs_bit_copy(slot.raw.dtype) else slot.raw


class _Fitter:
    def __init__(
        self,
        entries: Sequence[Entry],
        pairs: Sequence[tuple[int, int]],
        slots: Mapping[int, Slot],
        views: Sequence[Tensor],
        *,
        alias: bool,
        private: Callable[[Slot], bool],
    ) -> None:
        self.entries = entries
        self.slots = slots
        self.views = views
        self.entry_of = {leaf: entries[entry] for entry, leaf in pairs}
        self.ties: list[Tie] = []
        self.routes: dict[int, tuple[str, Route]] = {}
        for entry, leaf in pairs:
            slot = slots[leaf]
            way, adapt = _way(slot, views[entry], alias=alias, private=private(slot))
            self.routes[leaf] = (way, Route(slot.name, entry, leaf, adapt))

    # -- memory that several tensors of the target share -------------------------------------------------------------

    def settle_ties(self) -> None:
        """See to it that tensors which share memory in the target still do so afterwards."""
        for group in sharing(self.slots):
            matched = [leaf for leaf in group if leaf in self.routes]
            if not matched:
                continue
            alike = all(self._tied_alike(matched[0], leaf) for leaf in matched[1:])
            moves = self.routes[matched[0]][0] in (SWAP, PLACE) and all(
                _replaceable(self.slots[leaf]) for leaf in group
            )
            if not moves:
                self._keep_in_place(matched)
                if alike:
                    self._copy_once(matched)
                else:
                    self._tie(group, replace=False)
            elif alike and self._move_alike(group, matched):
                continue
            else:
                self._tie(group, replace=True)
                for leaf in matched:
                    del self.routes[leaf]

    def _keep_in_place(self, leaves: Sequence[int]) -> None:
        """One that cannot move keeps the others where they are."""
        for leaf in leaves:
            way, route = self.routes[leaf]
            if way in (SWAP, PLACE):
                way, adapt = _way(self.slots[leaf], self.views[route.view], alias=False, private=False)
                self.routes[leaf] = (way, route._replace(adapt=adapt))

    def _copy_once(self, leaves: Sequence[int]) -> None:
        """Leave out what lies within another one that is copied anyway."""
        spans = [span for leaf in leaves if (span := _span(leaf, self.slots[leaf])) and self.routes[leaf][0] == COPY]
        kept: list[_Span] = []
        for span in sorted(spans, key=lambda span: span.start - span.stop):
            if any(other.start <= span.start and span.stop <= other.stop for other in kept):
                del self.routes[span.leaf]
            elif self.slots[span.leaf].value.nbytes == span.stop - span.start:  # without gaps
                kept.append(span)

    def _move_alike(self, group: Sequence[int], matched: Sequence[int]) -> bool:
        """Point all at the payload's memory, which is shared in the same way; false where that is not possible."""
        way, route = self.routes[matched[0]]
        others = [leaf for leaf in group if leaf not in self.routes]
        if any(self.routes[leaf][1].adapt for leaf in matched):
            return False
        if not all(_geometry(self.slots[leaf]) == _geometry(self.slots[matched[0]]) for leaf in others):
            return False
        for leaf in others:
            slot = self.slots[leaf]
            way = SWAP if slot.kind == PLAIN else PLACE
            self.routes[leaf] = (way, route._replace(name=slot.name, leaf=leaf))
        return True

    def _tied_alike(self, one: int, other: int) -> bool:
        """Whether the payload ties two entries as the target does its two tensors."""
        a, b = self.entry_of[one], self.entry_of[other]
        if a.block != b.block or _flags(self.slots[one]) != _flags(self.slots[other]):
            return False
        if _geometry(self.slots[one]) == _geometry(self.slots[other]):
            return a.offset == b.offset and a.dtype == b.dtype and _strides(a) == _strides(b)
        mine, its = self.slots[one].raw, self.slots[other].raw
        assert mine is not None
        assert its is not None
        apart = mine.data_ptr() - its.data_ptr()
        return apart == a.offset - b.offset and _looks_like(mine, a) and _looks_like(its, b)

    def _tie(self, group: Sequence[int], *, replace: bool) -> None:
        raws = [(leaf, raw) for leaf in group if (raw := self.slots[leaf].raw) is not None]
        base = min(raw.data_ptr() for _, raw in raws) // 64 * 64
        members = []
        for leaf, raw in raws:
            slot = self.slots[leaf]
            view = self.routes[leaf][1].view if leaf in self.routes else None
            place = (raw.data_ptr() - base, raw.dtype, tuple(raw.shape), raw.stride(), slot.flips, _flags(slot))
            members.append(Member(slot.name, leaf, view, *place))
        self.ties.append(Tie(tuple(members), raws[0][1].device, replace))

    def drop_followers(self) -> None:
        """Leave out tensors that overlap themselves (expanded views, say) within one that is copied: they follow it."""
        spans = [(leaf, _span(leaf, self.slots[leaf])) for leaf, (way, _) in self.routes.items() if way == COPY]
        for leaf in [leaf for leaf, (way, _) in self.routes.items() if way in (SWAP, PLACE)]:
            raw = self.slots[leaf].raw
            assert raw is not None
            start, device = raw.data_ptr(), str(raw.device)
            stop = start + extent(raw.shape, raw.stride()) * raw.element_size()
            if any(
                span is not None
                and (span.device == device and span.start <= start and stop <= span.stop)
                and self._tied_alike(other, leaf)
                for other, span in spans
            ):
                del self.routes[leaf]

    def keep_apart(self) -> None:
        """Give copies to tensors that pointing at the payload's memory would tie, and that are not tied in the target.

        Else a later payload without the tie would find two tensors with one memory and different values.
        """
        group_of = {leaf: group[0] for group in sharing(self.slots) for leaf in group}
        owner: dict[int, int] = {}
        for leaf, (way, route) in self.routes.items():
            slot = self.slots[leaf]
            if way not in (SWAP, PLACE) or route.adapt is not None or slot.raw is None or overlaps_itself(slot.raw):
                continue
            group = group_of.get(leaf, leaf)
            if owner.setdefault(self.entries[route.view].block, group) != group:
                _, adapt = _way(slot, self.views[route.view], alias=True, private=True)
                self.routes[leaf] = (way, route._replace(adapt=adapt))


def _way(slot: Slot, view: Tensor, *, alias: bool, private: bool) -> tuple[str, Adapter | None]:
    """How a view gets into its slot, and what has to be done with it before."""
    raw = slot.raw
    if slot.kind == SHARD:
        assert raw is not None
        return COPY, partial(_part, part=slot.part, dtype=raw.dtype, device=raw.device)
    if raw is None or slot.kind not in (PLAIN, ARRAY):
        return CODE, partial(_converted, dtype=slot.value.dtype, device=slot.value.device)
    elsewhere = raw.device != view.device
    convert = partial(_converted, dtype=raw.dtype, device=raw.device)
    if _replaceable(slot) and (alias or overlaps_itself(raw)):
        needed = elsewhere or private or not alias or raw.dtype != view.dtype
        return SWAP if slot.kind == PLAIN else PLACE, convert if needed else None
    if needs_bit_copy(raw.dtype):
        return COPY, partial(_as_bits, device=raw.device, flips=slot.flips)
    return COPY, partial(convert, flips=slot.flips) if elsewhere or slot.flips else None  # a copy can cast by itself


def _replaceable(slot: Slot) -> bool:
    """Whether the slot can be given other memory."""
    if slot.fixed:
        return False
    if slot.kind == ARRAY:
        return isinstance(slot.place[0], MutableMapping)
    return slot.kind == PLAIN


def _converted(view: Tensor, *, dtype: torch.dtype, device: torch.device, flips: tuple[int, ...] = ()) -> Tensor:
    if needs_bit_copy(dtype):
        return _as_bits(view, device=device, flips=flips).clone().view(dtype)
    return _flipped(view, flips).to(device=device, dtype=dtype, copy=True)


def _part(view: Tensor, *, part: tuple[slice, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a rank holds of the whole: a view, of which nothing else is read."""
    piece = view[part] if part else view
    return bits(piece).to(device) if needs_bit_copy(dtype) else piece.to(device)


def _as_bits(view: Tensor, *, device: torch.device, flips: tuple[int, ...]) -> Tensor:
    return _flipped(bits(view).to(device), flips)


def _flipped(view: Tensor, flips: tuple[int, ...]) -> Tensor:
    if dtype_name(view.dtype) in _NEVER_FLIPPED:
        return bits(view).flip(flips).view(view.dtype) if flips else view
    return view.flip(flips) if flips else view


_NEVER_FLIPPED = ("uint16", "uint32", "uint64")
"""Dtypes that torch's flip does not know."""


def _geometry(slot: Slot) -> tuple[object, ...]:
    assert slot.raw is not None
    return slot.raw.data_ptr(), slot.raw.dtype, slot.raw.shape, slot.raw.stride(), slot.flips


def _flags(slot: Slot) -> tuple[bool, bool]:
    """Whether a tensor is a view of the conjugate, or the negative, of what lies there."""
    assert slot.raw is not None
    return slot.raw.is_conj(), slot.raw.is_neg()


def _strides(entry: Entry) -> tuple[int, ...]:
    return entry.strides or dense_strides(entry.shape)


def _looks_like(raw: Tensor, entry: Entry) -> bool:
    strides = zip(raw.stride(), _strides(entry), raw.shape)
    return raw.dtype == torch_dtype(entry.dtype) and all(a == b for a, b, size in strides if size != 1)


class _Span(NamedTuple):
    device: str
    start: int
    stop: int
    leaf: int


def _span(leaf: int, slot: Slot) -> _Span | None:
    raw = slot.raw
    if raw is None or not raw.numel() or overlaps_itself(raw) or raw.data_ptr() % raw.element_size():
        return None
    start = raw.data_ptr()
    return _Span(str(raw.device), start, start + extent(raw.shape, raw.stride()) * raw.element_size(), leaf)


def sharing(slots: Mapping[int, Slot]) -> Iterator[list[int]]:
    """Leaves whose memory overlaps, in groups, without those that overlap themselves: they are no place to write to."""
    group: list[int] = []
    device, stop = "", 0
    for span in sorted(span for span in (_span(leaf, slot) for leaf, slot in slots.items()) if span is not None):
        if span.device == device and span.start < stop:
            group.append(span.leaf)
            stop = max(stop, span.stop)
            continue
        if len(group) > 1:
            yield group
        group, device, stop = [span.leaf], span.device, span.stop
    if len(group) > 1:
        yield group


class Member(NamedTuple):
    """A tensor within memory that several of a target's share. ``view`` is ``None`` where the payload lacks it."""

    name: str
    leaf: int
    view: int | None
    offset: int  # bytes from the start of the shared memory
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    flips: tuple[int, ...]
    flags: tuple[bool, bool]

    @property
    def stop(self) -> int:
        """Bytes from the start of the shared memory to behind the member."""
        return self.offset + extent(self.shape, self.strides) * self.dtype.itemsize

    def over(self, memory: Tensor) -> Tensor:
        """The member's like, over other memory."""
        import torch

        tensor = view(Entry("", dtype_name(self.dtype), self.shape, 0, self.offset, self.strides), memory)
        conjugate, negative = self.flags
        tensor = torch.conj(tensor) if conjugate else tensor
        return torch._neg_view(tensor) if negative else tensor

    def value(self, views: Sequence[Tensor], device: torch.device) -> Tensor | None:
        """What the payload brings for it, in its dtype."""
        if self.view is None:
            return None
        return _converted(views[self.view], dtype=self.dtype, device=device, flips=self.flips)


class Tie(NamedTuple):
    """Tensors of a target that share memory, where the payload does not say that its own do so in the same way."""

    members: tuple[Member, ...]
    device: torch.device
    replace: bool  # whether they are to move to memory of their own, or only the values are to be compared

    def solve(self, views: Sequence[Tensor], now: Callable[[int], Tensor]) -> list[tuple[int, Tensor]]:
        """Leaves and new memory for all members, with what the payload brings, else ``now(leaf)``; if ``replace``.

        Raises :class:`~weightwire.PreflightError` where the payload's values contradict each other.
        """
        import torch

        memory = torch.empty(max(member.stop for member in self.members), dtype=torch.uint8, device=self.device)
        fresh = [member.over(memory) for member in self.members]
        values = [member.value(views, self.device) for member in self.members]
        if self.replace:
            for member, tensor in zip(self.members, fresh):
                put(tensor, now(member.leaf))
        for tensor, value in zip(fresh, values):
            if value is not None:
                put(tensor, value)
        for member, tensor, value in zip(self.members, fresh, values):
            if value is not None and not same_bits(tensor, value):
                raise self._contradiction(member)
        return [(member.leaf, tensor) for member, tensor in zip(self.members, fresh)] if self.replace else []

    def _contradiction(self, member: Member) -> PreflightError:
        other = next(
            m
            for m in reversed(self.members)
            if m is not member and m.view is not None and m.offset < member.stop and member.offset < m.stop
        )
        error = PreflightError(
            f"{member.name!r} and {other.name!r} share memory in the target, but have different values in the payload"
        )
        error.tensor = member.name  # type: ignore[attr-defined]
        return error
