"""From a delivered payload to the worker's own object: a Module, TensorDict, mapping, callable, or a mapping made here.

``prepare`` does all that can fail and touches nothing. What it returns is for :func:`weightwire.weights.commit.commit`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from weightwire.calls import check_ran, check_runs
from weightwire.errors import PreflightError
from weightwire.weights.commit import Prepared, Step
from weightwire.weights.dtypes import dtype_name, needs_bit_copy, torch_dtype
from weightwire.weights.layout import view
from weightwire.weights.names import NameMap, Needs, match
from weightwire.weights.slots import bits, normal, overlaps_itself, put, quietly, same_bits
from weightwire.weights.walk import Guard, Signature, check_instance, is_state, signature

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.transport import Header, Version
    from weightwire.weights.layout import Entry, Layout
    from weightwire.weights.names import Cast, Rename, Select

__all__ = ["CallableTarget", "OwnedTarget", "OwnedWeights", "Target", "make_target"]


class Target(ABC):
    """What a receiver updates."""

    weights: Any
    """The object that is updated: the user's, or a mapping of the target's own."""
    keeps_views: bool = False
    """Whether views given to :meth:`prepare` may live on after the commit in hands that the target does not know."""

    @abstractmethod
    def needs(self) -> bytes:
        """What the trainer may check a payload against, encoded; empty where only :meth:`prepare` can tell."""

    @abstractmethod
    def prepare(self, header: Header, views: list[Tensor], *, writable: bool = True, on_host: bool = False) -> Prepared:
        """Make a payload ready to be committed. ``views``: a typed tensor for each entry of the header's layout;
        ``on_host``: all of them are known to be on the CPU.

        A full version and the subset on top of it may be prepared one after the other and committed as one.

        Raises :class:`~weightwire.PreflightError`, with all differences, where it does not fit; other errors (out of
        memory) have the tensor's name in their attribute ``tensor``. Nothing of the target is touched.
        """

    def admit(self, header: Header) -> Layout:
        """Whether a payload fits, before its first byte is there; the layout without what is not taken of it.

        Raises :class:`~weightwire.PreflightError`, with all differences, where it does not.
        """
        return header.layout

    def plain_memory(self, entry: Entry) -> Tensor | None:
        """Flat bytes of the target into which those of an admitted entry can be written as they are; ``None`` where
        there are none."""
        return None


def make_target(
    weights: Any = None, *, select: Select = None, rename: Rename = None, cast: Cast = None, apply: str = "copy"
) -> Target:
    """The target for what a user gave as ``weights``.

    ``apply="copy"`` writes into the tensors that are there; ``"alias"`` points them at the payload's memory. Raises
    :class:`~weightwire.PreflightError`, naming the tensors, for what can never be updated.
    """
    if apply not in ("copy", "alias"):
        raise ValueError(f"apply is {apply!r}; it is 'copy' or 'alias'")
    from weightwire.weights.state import StateTarget  # which is a Target itself

    names = NameMap(select, rename, cast)
    if names.scales:
        raise PreflightError(f"cast={cast!r}: scales are made on the trainer, where the updater is given such a cast")
    if weights is None:
        return OwnedTarget(names, alias=apply == "alias")
    check_instance(weights)
    if is_state(weights):
        return StateTarget(weights, names, alias=apply == "alias")
    if callable(weights):
        if getattr(weights, "__name__", "") in _READS and is_state(getattr(weights, "__self__", None)):
            raise PreflightError(
                f"the target is the method {weights.__qualname__}, which loads nothing: give the object that it "
                "belongs to, or its load_state_dict"
            )
        check_runs(weights, "the target")
        return CallableTarget(weights, names, alias=apply == "alias")
    raise PreflightError(
        "a target is a Module, a TensorDict, a mapping of names to tensors, a function that takes one, or None; "
        f"not a {type(weights).__qualname__}"
    )


_READS = ("state_dict", "parameters", "named_parameters", "buffers", "named_buffers")


# -- a callable, or nothing ------------------------------------------------------------------------------------------


class _Taken:
    """What is taken of a payload: names, views and the dtypes that they are to have."""

    def __init__(self, layout: Layout, names: NameMap) -> None:
        chosen = names.apply(list(layout.names))
        self.names = [name for _, name in chosen]
        self.positions = [position for position, _ in chosen]
        self.entries = [layout.entries[position] for position in self.positions]
        self.dtypes = [names.dtype(entry.name, entry.dtype) for entry in self.entries]
        self.nbytes = sum(layout.sizes[block] for block in {entry.block for entry in self.entries})

    def cast(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """Name -> view, or what it was cast to; ties stay ties."""
        made: dict[tuple[object, ...], Tensor] = {}
        tensors = {}
        for name, position, entry, dtype in zip(self.names, self.positions, self.entries, self.dtypes):
            tensor = normal(views[position].detach())
            if dtype != entry.dtype:
                key = (entry.block, entry.offset, entry.shape, entry.strides, entry.dtype, dtype)
                tensor = made.setdefault(key, tensor.to(torch_dtype(dtype)))
            tensors[name] = tensor
        return tensors


def _taken(header: Header, names: NameMap) -> _Taken:
    """Raises :class:`~weightwire.PreflightError` for a table of names that fits nothing of a full version."""
    if header.base is None:
        names.check_use(list(header.layout.names))
    return _Taken(header.layout, names)


class CallableTarget(Target):
    """Hands all named tensors to a function, in one call. When that raises, what it has done is unknown.

    They are the function's, to keep and to write to: copies, where others read the same memory. With ``alias`` they are
    the memory itself.
    """

    keeps_views = True

    def __init__(
        self, function: Callable[[Mapping[str, Tensor]], object], names: NameMap, *, alias: bool = False
    ) -> None:
        self.weights = function
        self._names = names
        self._alias = alias

    def needs(self) -> bytes:
        return b""

    def prepare(self, header: Header, views: list[Tensor], *, writable: bool = True, on_host: bool = False) -> Prepared:
        taken = _taken(header, self._names)
        if writable or self._alias:
            tensors = quietly(partial(taken.cast, views))
            return Prepared(tensors=len(tensors), nbytes=taken.nbytes, call=(self._call, tensors))
        tensors = quietly(partial(_own, header.layout, taken, views))
        read = list({view.device for view in views if not view.is_cpu})
        call = (self._call, tensors)
        return Prepared(tensors=len(tensors), nbytes=taken.nbytes, call=call, keep=views, streams=read)

    def _call(self, tensors: Mapping[str, Tensor]) -> None:
        check_ran(self.weights(tensors), "the target")


class OwnedWeights(Mapping[str, "Tensor"]):
    """A read-only mapping of names to tensors, which a receiver keeps for those who gave it nothing to update."""

    __slots__ = ("_tensors",)

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<OwnedWeights: {len(self)} tensors>"


class OwnedTarget(Target):
    """Updates a mapping of its own. With ``copy``, tensors stay the same objects until the layout changes."""

    weights: OwnedWeights

    def __init__(self, names: NameMap, *, alias: bool) -> None:
        self.weights = OwnedWeights()
        self._names = names
        self._alias = alias
        self._full: tuple[Version, dict[str, Tensor]] | None = None  # the newest full version that was prepared
        self._made: tuple[Layout, Signature, dict[str, Tensor]] | None = None
        self._guard = Guard()

    def needs(self) -> bytes:
        return b""

    def prepare(self, header: Header, views: list[Tensor], *, writable: bool = True, on_host: bool = False) -> Prepared:
        taken = _taken(header, self._names)
        find = self._whole if header.base is None else self._part
        tensors, steps = quietly(partial(find, header, taken, views))
        steps.append(partial(setattr, self.weights, "_tensors", tensors))
        return Prepared(tensors=len(taken.names), nbytes=taken.nbytes, steps=steps, keep=self.weights._tensors)

    def _whole(self, header: Header, taken: _Taken, views: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Step]]:
        made, steps = self._made, []
        if self._alias:
            tensors = taken.cast(views)
        elif made is not None and made[0] is header.layout and self._guard.unchanged(made[1], list(made[2].values())):
            tensors, steps = made[2], [_copy(made[2], taken, views)]
        else:
            tensors = _own(header.layout, taken, views)
            self._made = (header.layout, signature(list(tensors.values())), tensors)
        self._full = (header.stamp, tensors)
        return tensors, steps

    def _part(self, header: Header, taken: _Taken, views: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Step]]:
        known = self.weights._tensors
        if self._full is not None and self._full[0] == header.base:
            known = self._full[1]
        shapes = tuple(tuple(tensor.shape) for tensor in known.values())
        needs = Needs(tuple(known), tuple(dtype_name(tensor.dtype) for tensor in known.values()), shapes, self._names)
        difference = match(header.layout, needs, subset=True).difference
        if difference:
            raise PreflightError(difference.message())
        if self._alias:
            return {**known, **_with_ties(known, taken.cast(views))}, []
        # An expanded tensor cannot take what is no longer expanded.
        dense = [name for name, entry in zip(taken.names, taken.entries) if not entry.strides]
        known = {**known, **{name: _dense(known[name]) for name in dense if overlaps_itself(known[name])}}
        return known, [_copy(known, taken, views)]


def _with_ties(known: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is new, also under those names that are the same memory as one of these at present."""
    new = {_place(known[name]): tensor for name, tensor in fresh.items() if tensor.numel()}
    tied = {name: new[_place(tensor)] for name, tensor in known.items() if _place(tensor) in new}
    return {**tied, **fresh}


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _dense(tensor: Tensor) -> Tensor:
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _copy(into: Mapping[str, Tensor], taken: _Taken, views: Sequence[Tensor]) -> Step:
    """One fused copy of all that is taken, cast on the way. Expanded views follow what they are views of."""
    import torch

    moved = [
        (into[name].detach(), views[position])
        for name, position, entry in zip(taken.names, taken.positions, taken.entries)
        if not (entry.strides and overlaps_itself(into[name]))
    ]
    pairs = [(bits(t), bits(v)) if needs_bit_copy(t.dtype) else (t, v) for t, v in moved]
    return partial(torch._foreach_copy_, [t for t, _ in pairs], [v for _, v in pairs])


def _own(layout: Layout, taken: _Taken, views: Sequence[Tensor]) -> dict[str, Tensor]:
    """Copies in memory of their own, tied as the payload's tensors are."""
    import torch

    blocks: dict[int, Tensor] = {}
    tensors = {}
    for entry, position in zip(taken.entries, taken.positions):
        if entry.block not in blocks:
            size = layout.sizes[entry.block]
            blocks[entry.block] = torch.empty(size, dtype=torch.uint8, device=views[position].device)
        tensors[position] = view(entry, blocks[entry.block])
        if not overlaps_itself(tensors[position]):
            put(tensors[position], views[position])
    for position, tensor in tensors.items():  # an expanded view of another tensor has its values by now
        if overlaps_itself(tensor) and not same_bits(tensor, views[position]):
            tensors[position] = views[position].contiguous().clone()
    return taken.cast([tensors.get(position, value) for position, value in enumerate(views)])
