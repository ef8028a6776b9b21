"""From a payload into a Module, TensorDict, mapping, callable, or a mapping of the receiver's own."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import MemoryMappedTensor, TensorDict, TensorDictParams, lazy_stack
from torch import Tensor, nn

from weightwire import WeightReceiver, WeightUpdater
from weightwire.errors import PreflightError
from weightwire.testing import strategies
from weightwire.testing.states import (
    ARRANGEMENTS,
    Brittle,
    Tied,
    arrange,
    bits,
    brittle,
    counters,
    makeable,
    random_bits,
    seen,
    snapshot,
    special_values,
    tie_groups,
)
from weightwire.transport import Header, Version
from weightwire.weights.commit import Prepared, commit
from weightwire.weights.layout import Layout
from weightwire.weights.names import decode_needs, preflight
from weightwire.weights.payload import Payload
from weightwire.weights.source import Source
from weightwire.weights.target import OwnedWeights, Target, make_target

MODES = ("copy", "alias")
both = pytest.mark.parametrize("apply", MODES)


class Trainer:
    """Packs states, each into memory of its own, as a backend would."""

    def __init__(self, **options: Any) -> None:
        self.source = Source(**options)
        self.number = 0
        self.full: Version | None = None

    def ship(self, state: Any, *, partial: bool = False) -> tuple[Header, list[Tensor]]:
        self.number += 1
        stamp = Version(1, self.number)
        payload = Payload(self.source.extract(state), stamp=stamp, base=self.full if partial else None)
        self.full = self.full if partial else stamp
        buffer = torch.zeros(payload.nbytes, dtype=torch.uint8)
        payload.pack(buffer)
        layout = payload.layout
        blocks = [block.clone() for block in layout.slice(buffer)]
        return payload.header, layout.views(blocks)


def bring(target: Target, state: Any, trainer: Trainer | None = None, **options: Any) -> Prepared:
    """One version, from a state into a target."""
    prepared = target.prepare(*(trainer or Trainer()).ship(state), **options)
    commit([prepared])
    assert not prepared.ruined
    return prepared


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module[1].running_mean.normal_()
    module[1].num_batches_tracked.fill_(seed + 2**53 + 1)
    return module


def state_of(weights: Any) -> dict[str, Tensor]:
    return dict(weights.state_dict(keep_vars=True) if isinstance(weights, nn.Module) else weights)


# -- kinds of targets --------------------------------------------------------------------------------------------------


@both
def test_module(apply: str) -> None:
    source, policy = net(1), net(2)
    objects = {name: id(tensor) for name, tensor in state_of(policy).items()}
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    grads = [parameter.grad for parameter in policy.parameters()]
    target, trainer = make_target(policy, apply=apply), Trainer()
    for _ in range(3):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.add_(1)
        prepared = bring(target, source, trainer)
        assert snapshot(state_of(policy)) == snapshot(state_of(source))
    assert prepared.tensors == 9
    assert prepared.nbytes == sum(tensor.nbytes for tensor in state_of(source).values())
    assert {name: id(tensor) for name, tensor in state_of(policy).items()} == objects
    assert [parameter.grad for parameter in policy.parameters()] == grads
    assert all(parameter.requires_grad for parameter in policy.parameters())
    policy(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(policy[0].weight, source[0].weight), "the optimizer still has the policy's own parameters"


def test_copy_keeps_storage_strides_and_counts_versions() -> None:
    policy = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    before = (policy.weight.data_ptr(), policy.weight.stride(), policy.weight._version)
    source = nn.Conv2d(2, 3, 3)
    target = make_target(policy)
    bring(target, source)
    assert (policy.weight.data_ptr(), policy.weight.stride()) == before[:2]
    assert policy.weight._version > before[2], "autograd is to notice"
    assert torch.equal(policy.weight, source.weight)


def test_alias_points_at_the_payload() -> None:
    policy, trainer = net(), Trainer()
    target = make_target(policy, apply="alias")
    header, views = trainer.ship(net(1))
    commit([target.prepare(header, views)])
    assert [tensor.data_ptr() for tensor in state_of(policy).values()] == [view.data_ptr() for view in views]


def test_buffers_that_the_module_writes_are_not_pointed_at_read_only_memory() -> None:
    policy, trainer = net(), Trainer()
    target = make_target({"net": policy}, apply="alias")
    header, views = trainer.ship({"net": net(1)})
    commit([target.prepare(header, views, writable=False)])
    shared = {view.data_ptr() for view in views}
    assert all(parameter.data_ptr() in shared for parameter in policy.parameters())
    assert not any(buffer.data_ptr() in shared for buffer in policy.buffers())
    assert snapshot(state_of(policy)) == snapshot(state_of(net(1)))


@both
def test_buffers_of_all_kinds(apply: str) -> None:
    class Normaliser(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.register_buffer("mean", torch.full((2,), value))
            self.register_buffer("scratch", torch.full((2,), value), persistent=False)
            self.register_buffer("nothing", None)
            self.register_parameter("none", None)

    policy = Normaliser(0.0)
    bring(make_target(policy, apply=apply), Normaliser(1.0))
    assert (policy.mean.tolist(), policy.scratch.tolist()) == ([1, 1], [0, 0])


@both
def test_nested_mapping(apply: str) -> None:
    weights = {"a": {"b": torch.zeros(2), "n": np.zeros(3)}, "net": net(0), "td": TensorDict({"x": torch.zeros(1)}, [])}
    tensor = weights["a"]["b"]  # type: ignore[index]
    source = {"a": {"b": torch.ones(2), "n": np.ones(3)}, "net": net(1), "td": TensorDict({"x": torch.ones(1)}, [])}
    target = make_target(weights, apply=apply)
    for _ in range(2):
        bring(target, source)
    assert weights["a"]["b"] is tensor  # type: ignore[index]
    assert tensor.tolist() == [1, 1]
    assert weights["a"]["n"].tolist() == [1, 1, 1]  # type: ignore[index]
    assert snapshot(state_of(weights["net"])) == snapshot(state_of(net(1)))
    assert weights["td"]["x"].tolist() == [1]  # type: ignore[index]


@both
@pytest.mark.parametrize("locked", [False, True])
def test_tensordict(apply: str, locked: bool) -> None:
    weights = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(3, dtype=torch.bfloat16)}}, [])
    if locked:
        weights.lock_()
    inner = weights["n", "b"]
    source = {"a": torch.ones(2), "n": {"b": torch.ones(3, dtype=torch.bfloat16)}}
    bring(make_target(weights, apply=apply), source)
    assert weights["n", "b"] is inner
    assert weights["a"].tolist() == [1, 1]
    assert inner.tolist() == [1, 1, 1]


@both
def test_tensordict_params(apply: str) -> None:
    weights = TensorDictParams(TensorDict({"a": torch.zeros(2)}, []))
    bring(make_target(weights, apply=apply), {"a": torch.ones(2)})
    assert weights["a"].tolist() == [1, 1]
    assert isinstance(weights["a"], nn.Parameter)


def test_what_is_made_anew_at_each_look_is_refused() -> None:
    stacked = lazy_stack([TensorDict({"a": torch.zeros(2)}, []) for _ in range(2)])
    with pytest.raises(PreflightError, match="a: made anew"):
        make_target(stacked)


@both
@pytest.mark.parametrize("dtype", ["float32", "uint16", "complex64", "bool", "float16"])
def test_numpy(apply: str, dtype: str) -> None:
    arrays = {"whole": np.zeros((2, 3), dtype), "none": np.zeros((0, 3), dtype), "one": np.zeros((), dtype)}
    arrays["back"] = np.zeros((4, 3), dtype)[::-1, ::2]
    before = dict(arrays)
    source = {name: random_bits(dtype, array.shape, 1).numpy() for name, array in arrays.items()}
    target = make_target(arrays, apply=apply)
    for _ in range(2):
        bring(target, source)
    for name, array in arrays.items():
        assert (array.dtype, array.tobytes()) == (source[name].dtype, source[name].tobytes())
        assert (array is before[name]) == (apply == "copy")


def test_aliased_arrays_are_read_only_where_the_memory_is() -> None:
    arrays = {"a": np.zeros(3)}
    target = make_target(arrays, apply="alias")
    bring(target, {"a": np.ones(3)}, writable=False)
    assert not arrays["a"].flags.writeable
    bring(target, {"a": np.full(3, 2.0)}, writable=True)
    assert arrays["a"].flags.writeable
    assert arrays["a"].tolist() == [2, 2, 2]


def test_read_only_mapping_of_arrays_is_written_in_place() -> None:
    array = np.zeros(3)
    bring(make_target(MappingProxyType({"a": array}), apply="alias"), {"a": np.ones(3)})
    assert array.tolist() == [1, 1, 1]


@both
def test_extra_state(apply: str) -> None:
    class Scaled(nn.Linear):
        scale: Tensor

        def get_extra_state(self) -> Tensor:
            return self.scale

        def set_extra_state(self, state: Tensor) -> None:
            if state[0] < 0:
                raise ValueError("negative")
            self.scale = state

    policy, source = Scaled(2, 2), Scaled(2, 2)
    policy.scale, source.scale = torch.zeros(1), torch.ones(1)
    target = make_target(policy, apply=apply)
    prepared = bring(target, source)
    assert prepared.tensors == 3
    assert policy.scale.tolist() == [1]
    before = snapshot(dict(policy.named_parameters()))
    source.scale.fill_(-1)
    with torch.no_grad():
        source.weight.fill_(7)
    bad = target.prepare(*Trainer().ship(source))
    with pytest.raises(ValueError, match="negative") as caught:
        commit([bad])
    assert caught.value.tensor == "_extra_state"  # type: ignore[attr-defined]
    assert (policy.scale.tolist(), snapshot(dict(policy.named_parameters()))) == ([1], before)
    assert not bad.ruined


def test_extra_state_that_is_no_tensor() -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> object:
            return {"a": 1}

        def set_extra_state(self, state: object) -> None:
            raise AssertionError("never")

    with pytest.raises(PreflightError, match="_extra_state: extra state that is no tensor but a dict"):
        make_target(Odd(2, 2))
    policy = Odd(2, 2)
    bring(make_target(policy, select="!*_extra_state"), dict(nn.Linear(2, 2).named_parameters()))


@pytest.mark.parametrize(
    ("weights", "fault"),
    [
        ({"w": torch.zeros(2, device="meta")}, "w: on the meta device"),
        ({"a": nn.LazyLinear(2)}, "a.weight: not initialised"),
        ({"w": torch.zeros(2).to_sparse()}, "w: of layout torch.sparse_coo"),
        ({"w": 3.0}, r"w: a float, not a tensor: torch\.tensor"),
        ({"w": "text"}, "w: a str"),
        ({"w": np.zeros(2, ">f4")}, "w: .*byte order"),
        ({"w": np.array([None])}, "w: an array of dtype object"),
        ({"w": np.broadcast_to(np.zeros(1), 3)}, "w: a read-only array"),
        ({"w": np.float32(1)}, "w: a float32, not a tensor"),
        ({1: torch.zeros(2)}, "names are str"),
        ({}, "no tensors"),
        (nn.Identity(), "no tensors"),
        (3, "a target is"),
        (torch.zeros(3), "a target is"),
    ],
)
def test_targets_that_can_never_be_updated(weights: Any, fault: str) -> None:
    with pytest.raises(PreflightError, match=fault):
        make_target(weights)


def test_apply_is_copy_or_alias() -> None:
    with pytest.raises(ValueError, match="aliased"):
        make_target(None, apply="aliased")


# -- values ------------------------------------------------------------------------------------------------------------


def empty_like(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: random_bits(bits(tensor).dtype, tensor.shape, 99) for name, tensor in state.items()}


@both
def test_every_dtype(apply: str) -> None:
    state = {name: random_bits(name, (3, 5), seed) for seed, name in enumerate(makeable())}
    weights = empty_like(state)
    target = make_target(weights, apply=apply)
    for _ in range(2):
        bring(target, state)
        assert snapshot(weights) == snapshot(state)


@both
def test_special_values(apply: str) -> None:
    state = special_values()
    weights = empty_like(state)
    bring(make_target(weights, apply=apply), state)
    assert snapshot(weights) == snapshot(state)


@both
@pytest.mark.parametrize("shape", [(), (1,), (0, 8), (8, 0), (2, 3, 4, 5)])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_targets_in_any_arrangement(apply: str, arrangement: str, shape: tuple[int, ...]) -> None:
    state = {"w": random_bits("float32", shape, 1), "v": random_bits("int16", shape, 2)}
    weights = {name: arrange(bits(tensor).dtype, shape, arrangement, 3) for name, tensor in state.items()}
    before = {name: (id(tensor), tensor.data_ptr()) for name, tensor in weights.items()}
    target = make_target(weights, apply=apply)
    for _ in range(2):
        bring(target, state)
        assert snapshot(weights) == snapshot(state)
    assert all(id(tensor) == before[name][0] for name, tensor in weights.items())
    if apply == "copy" and arrangement != "expanded":
        assert all(tensor.data_ptr() == before[name][1] for name, tensor in weights.items())


def duplicate(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy with the same ties."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        return copy.deepcopy(state)


@given(strategies.states(), st.sampled_from(MODES), st.booleans())
def test_any_state_into_its_like(state: dict[str, Tensor], apply: str, owned: bool) -> None:
    weights = None if owned else duplicate(state)
    for tensor in (weights or {}).values():
        if tensor.numel():
            tensor.untyped_storage().fill_(0)
    ties = tie_groups(weights or {})
    target = make_target(weights, apply=apply)
    for _ in range(2):
        bring(target, state)
        found = dict(target.weights)
        assert snapshot(found) == snapshot(state)
        if not owned:
            assert tie_groups(found) >= ties or apply == "alias"


@given(strategies.states(ties=False), strategies.states(), st.sampled_from(MODES))
def test_a_state_that_does_not_fit_changes_nothing(
    one: dict[str, Tensor], other: dict[str, Tensor], apply: str
) -> None:
    weights = duplicate(one)
    before = snapshot(weights)
    target = make_target(weights, apply=apply)
    header, views = Trainer().ship(other)
    fits = {name: bits(t)[:2] for name, t in one.items()} == {name: bits(t)[:2] for name, t in other.items()}
    try:
        target.prepare(header, views)
    except PreflightError:
        assert not fits
    else:
        assert fits
    assert snapshot(weights) == before


def test_conjugate_and_negative_views_are_written_in_place() -> None:
    base = torch.zeros(2, dtype=torch.complex64)
    weights = {"c": base.conj(), "i": torch.zeros(2, dtype=torch.complex64).conj().imag}
    for apply in MODES:
        state = {"c": torch.tensor([1 + 2j, 3j]), "i": torch.tensor([1.0, -2.0])}
        bring(make_target(weights, apply=apply), state)
        assert torch.equal(weights["c"], state["c"])
        assert torch.equal(weights["i"], state["i"])
    assert torch.equal(base, torch.tensor([1 - 2j, -3j]))


# -- names, shapes, casts ----------------------------------------------------------------------------------------------


@both
def test_what_does_not_fit_is_refused_before_anything_moves(apply: str) -> None:
    policy = net()
    before = snapshot(state_of(policy))
    pointers = [tensor.data_ptr() for tensor in state_of(policy).values()]
    target = make_target(policy, apply=apply)
    wrong = {"0.weight": torch.ones(4), "0.bias": torch.ones(4, dtype=torch.float64), "more": torch.ones(1)}
    with pytest.raises(PreflightError) as caught:
        target.prepare(*Trainer().ship(wrong))
    for part in ("7 missing", "unexpected in the payload: more", "shape of 0.weight", "dtype of 0.bias"):
        assert part in str(caught.value)
    assert snapshot(state_of(policy)) == before
    assert [tensor.data_ptr() for tensor in state_of(policy).values()] == pointers
    needs = decode_needs(target.needs())
    assert needs is not None
    layout = Source(wrong).extract().layout
    assert preflight(layout, needs).message() == str(caught.value), "the trainer finds the same"


@both
def test_wrappers_on_the_workers_side(apply: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._checkpoint_wrapped_module = inner

    inner = net()
    wrapped = torch.compile(nn.DataParallel(Checkpointed(inner)), backend="eager")
    bring(make_target(wrapped, apply=apply), net(1))
    assert snapshot(state_of(inner)) == snapshot(state_of(net(1)))
    bring(make_target(inner, apply=apply), {f"module.{name}": t for name, t in state_of(net(2)).items()})
    assert snapshot(state_of(inner)) == snapshot(state_of(net(2)))


@both
def test_select_and_rename(apply: str) -> None:
    weights = {"w": torch.zeros(2), "other": torch.zeros(1)}
    target = make_target(weights, apply=apply, select=["actor.*", "!*.b"], rename={"actor.": ""})
    with pytest.raises(PreflightError, match="1 missing from the payload: other"):
        target.prepare(*Trainer().ship({"actor.w": torch.ones(2), "actor.b": torch.ones(1), "critic.w": torch.ones(9)}))
    target = make_target(weights, apply=apply, select="actor.w", rename={"actor.": ""})
    prepared = bring(target, {"actor.w": torch.ones(2), "critic.w": torch.ones(9)})
    assert (prepared.tensors, prepared.nbytes) == (1, 8)
    assert weights["w"].tolist() == [1, 1]
    assert weights["other"].tolist() == [0]


@both
@pytest.mark.parametrize("cast", ["target", torch.bfloat16, {"w": "bfloat16", "n": "int32"}])
def test_casts_are_asked_for(apply: str, cast: Any) -> None:
    n = torch.int64 if cast is torch.bfloat16 else torch.int32
    weights = {"w": torch.zeros(2, dtype=torch.bfloat16), "n": torch.zeros(2, dtype=n)}
    state = {"w": torch.tensor([1.0, 1 / 3]), "n": torch.tensor([5, -7])}
    with pytest.raises(PreflightError, match="dtype of w"):
        make_target(weights, apply=apply).prepare(*Trainer().ship(state))
    target = make_target(weights, apply=apply, cast=cast)
    for _ in range(2):
        bring(target, state)
    assert torch.equal(weights["w"], state["w"].bfloat16())
    assert weights["n"].tolist() == [5, -7]


# -- ties --------------------------------------------------------------------------------------------------------------


@both
def test_ties_stay_ties(apply: str) -> None:
    source, policy = Tied(1), Tied(2)
    ties = tie_groups(state_of(policy))
    target, trainer = make_target(policy, apply=apply), Trainer()
    for _ in range(3):
        bring(target, source, trainer)
        assert snapshot(state_of(policy)) == snapshot(state_of(source))
        assert tie_groups(state_of(policy)) == ties
        assert policy.embed.weight is policy.head.weight
    policy.mean.fill_(5)
    assert policy.tail.tolist() == [5.0] * 32


def test_ties_are_copied_once() -> None:
    from weightwire.weights.state import StateTarget

    policy = Tied()
    target = make_target(policy)
    assert isinstance(target, StateTarget)
    prepared = target.prepare(*Trainer().ship(Tied(1)))
    (copies,) = (step for step in prepared.steps if step.func is torch._foreach_copy_)
    assert sum(tensor.nbytes for tensor in copies.args[0]) == policy.embed.weight.nbytes + policy.mean.nbytes
    assert prepared.tensors == 4


@both
def test_a_tied_target_takes_an_untied_payload_that_agrees(apply: str) -> None:
    policy = Tied()
    agreeing = {name: tensor.detach().clone() + 1 for name, tensor in state_of(policy).items()}
    target = make_target(policy, apply=apply)
    for _ in range(2):
        bring(target, agreeing)
    assert snapshot(state_of(policy)) == snapshot(agreeing)
    assert tie_groups(state_of(policy)) == tie_groups(state_of(Tied()))
    before = snapshot(state_of(policy))
    agreeing["head.weight"][0, 0] += 1
    with pytest.raises(PreflightError, match=r"(embed|head)\.weight.*(embed|head)\.weight.*different values"):
        target.prepare(*Trainer().ship(agreeing))
    assert snapshot(state_of(policy)) == before
    agreeing["head.weight"][0, 0] -= 1
    agreeing["tail"][3] += 1
    with pytest.raises(PreflightError, match="share memory"):
        target.prepare(*Trainer().ship(agreeing))


@both
def test_separate_parameters_over_one_storage_stay_tied(apply: str) -> None:
    memory = torch.zeros(6)
    policy = nn.ParameterDict({"a": nn.Parameter(memory.view(2, 3)), "b": nn.Parameter(memory.view(2, 3))})
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0).view(2, 3)}
    bring(make_target(policy, apply=apply), state)
    bring(make_target(policy, apply=apply, select="a"), {"a": torch.ones(2, 3)})
    assert policy["b"].detach().eq(1).all(), "the tie brings the other one along"
    assert policy["a"].data_ptr() == policy["b"].data_ptr()


@both
def test_a_cast_keeps_ties(apply: str) -> None:
    weights = {"a": torch.zeros(4, dtype=torch.float16)}
    weights["b"] = weights["a"].view(4)
    values = torch.arange(4.0)
    target = make_target(weights, apply=apply, cast="target")
    for state in ({"a": values, "b": values}, {"a": values + 1, "b": values + 1}):
        bring(target, state)
        assert weights["a"].data_ptr() == weights["b"].data_ptr()
        assert torch.equal(weights["b"], state["b"].half())


def test_untied_targets_stay_untied_whatever_the_payload_ties() -> None:
    shared = torch.ones(3)
    weights = {"a": torch.zeros(3), "b": torch.zeros(3)}
    target = make_target(weights, apply="alias")
    bring(target, {"a": shared, "b": shared})
    assert tie_groups(weights) == set()
    bring(target, {"a": torch.full((3,), 2.0), "b": torch.full((3,), 3.0)})
    assert (weights["a"].tolist(), weights["b"].tolist()) == ([2] * 3, [3] * 3)


@both
def test_overlapping_views_of_which_one_is_sent(apply: str) -> None:
    weights = {"all": torch.arange(6.0)}
    weights["part"] = weights["all"][2:4]
    target = make_target(weights, apply=apply)
    trainer = Trainer()
    bring(target, {"all": torch.full((6,), 7.0), "part": torch.full((2,), 7.0)}, trainer)
    commit([target.prepare(*trainer.ship({"part": torch.ones(2)}, partial=True))])
    assert weights["all"].tolist() == [7, 7, 1, 1, 7, 7]
    assert tie_groups(weights) == {frozenset({"all", "part"})}
    full = target.prepare(*trainer.ship({"all": torch.full((6,), 8.0), "part": torch.full((2,), 8.0)}))
    subset = target.prepare(*trainer.ship({"part": torch.ones(2)}, partial=True))
    commit([full, subset])
    assert weights["all"].tolist() == [8, 8, 1, 1, 8, 8]


def test_an_expanded_view_of_a_parameter_follows_it() -> None:
    def make(value: float) -> dict[str, Tensor]:
        row = torch.full((3,), value)
        return {"row": row, "rows": row.expand(4, 3)}

    for apply in MODES:
        weights = make(0)
        bring(make_target(weights, apply=apply), make(2))
        assert weights["rows"].eq(2).all()
        weights["row"].fill_(3)
        assert weights["rows"].eq(3).all(), "still a view of it"


# -- targets that change -----------------------------------------------------------------------------------------------


@both
def test_every_change_of_the_target_is_noticed(apply: str) -> None:
    policy, trainer = net(), Trainer()
    target = make_target(policy, apply=apply)

    def check(seed: int) -> None:
        bring(target, net(seed), trainer)
        assert snapshot(state_of(policy)) == snapshot(state_of(net(seed)))

    check(1)
    policy[0].weight.data = torch.zeros(4, 3)
    check(2)
    policy[0].weight = nn.Parameter(torch.zeros(4, 3))
    check(3)
    policy[0] = nn.Linear(3, 4)
    check(4)
    policy[1].running_mean = torch.zeros(4)
    check(5)
    policy[0].weight.data = torch.zeros(3, 4).t()
    check(6)
    policy.double()
    with pytest.raises(PreflightError, match=r"dtype of 0\.weight"):
        target.prepare(*trainer.ship(net(7)))
    policy.float()
    check(8)
    policy.add_module("more", nn.Linear(1, 1))
    with pytest.raises(PreflightError, match=r"missing from the payload: more\.weight"):
        target.prepare(*trainer.ship(net(9)))
    del policy.more
    check(10)


def test_arrays_that_were_replaced_are_noticed() -> None:
    arrays = {"a": np.zeros(3)}
    target = make_target(arrays)
    bring(target, {"a": np.ones(3)})
    first, arrays["a"] = arrays["a"], np.zeros(3)
    bring(target, {"a": np.full(3, 2.0)})
    assert (first.tolist(), arrays["a"].tolist()) == ([1, 1, 1], [2, 2, 2])


@both
def test_hot_path_looks_but_does_not_plan(apply: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightwire.weights import state

    policy, trainer = net(), Trainer()
    target = make_target(policy, apply=apply)
    bring(target, net(1), trainer)
    plans: list[object] = []
    monkeypatch.setattr(state, "make_fit", lambda *args, **kwargs: plans.append(args))
    bring(target, net(2), trainer)
    bring(target, net(3), trainer)
    assert not plans
    assert snapshot(state_of(policy)) == snapshot(state_of(net(3)))


# -- modes of torch ----------------------------------------------------------------------------------------------------


@both
def test_pull_in_inference_mode_leaves_a_policy_that_trains(apply: str) -> None:
    policy = nn.Linear(3, 2)
    with torch.inference_mode():
        for cast in (None, "target"):
            bring(make_target(policy, apply=apply, cast=cast), nn.Linear(3, 2))
    assert not policy.weight.is_inference()
    policy(torch.ones(1, 3)).sum().backward()
    assert policy.weight.grad is not None


@both
def test_owned_weights_take_part_in_autograd_wherever_they_were_pulled(apply: str) -> None:
    target = make_target(None, apply=apply)
    with torch.inference_mode():
        bring(target, {"w": torch.ones(3)})
    leaf = torch.ones(3, requires_grad=True)
    (leaf * target.weights["w"]).sum().backward()
    assert leaf.grad is not None


@both
def test_inference_tensors_are_targets(apply: str) -> None:
    with torch.inference_mode():
        weights = {"w": torch.zeros(3)}
    bring(make_target(weights, apply=apply), {"w": torch.ones(3)})
    assert weights["w"].tolist() == [1, 1, 1]
    assert torch.is_grad_enabled()


@both
def test_a_default_device_changes_nothing(apply: str) -> None:
    weights = {"w": torch.zeros(3), "rows": torch.zeros(1, 3).expand(2, 3), "h": torch.zeros(2, dtype=torch.float16)}
    state = {"w": torch.ones(3), "rows": torch.ones(2, 3), "h": torch.ones(2)}
    header, views = Trainer().ship(state)
    with torch.device("meta"):
        commit([make_target(weights, apply=apply, cast="target").prepare(header, views)])
    assert all(tensor.eq(1).all() for tensor in weights.values())


def test_live_tensors_that_require_grad_leave_no_graph() -> None:
    source, policy = nn.Linear(2, 2), nn.Linear(2, 2)
    header, _ = Trainer().ship(source)
    commit([make_target(policy).prepare(header, [source.weight, source.bias])])
    assert policy.weight.is_leaf
    assert torch.equal(policy.weight, source.weight)


# -- targets that fail -------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("plain", [False, True])
def test_a_target_that_raises_at_any_tensor_keeps_the_old_version(apply: str, plain: bool) -> None:
    weights = brittle(1)
    if plain:  # some plain tensors among them
        weights = {name: t if i % 2 else t.as_subclass(Tensor) for i, (name, t) in enumerate(weights.items())}
    target, trainer = make_target(weights, apply=apply), Trainer()
    version = 1
    for name, tensor in weights.items():
        if not isinstance(tensor, Brittle):
            continue
        before, tensor.fails = snapshot({n: t.as_subclass(Tensor) for n, t in weights.items()}), True
        prepared = target.prepare(*trainer.ship(counters(version + 1)))
        with pytest.raises(RuntimeError, match="brittle") as caught:
            commit([prepared])
        assert caught.value.tensor == name  # type: ignore[attr-defined]
        assert not prepared.ruined
        assert snapshot({n: t.as_subclass(Tensor) for n, t in weights.items()}) == before
        tensor.fails, version = False, version + 1
        bring(target, counters(version), trainer)
        assert seen(weights) == version


class Picky(UserDict[str, Any]):
    """A mapping whose setter may refuse."""

    refuses: str | None = None

    def __setitem__(self, key: str, value: Any) -> None:
        if key == self.refuses:
            raise RuntimeError("not this one")
        super().__setitem__(key, value)


def test_a_setter_that_raises_at_any_array_keeps_the_old_version() -> None:
    weights = Picky({f"a{i}": np.full(3, 1.0) for i in range(4)})
    target = make_target(weights, apply="alias")
    state = {f"a{i}": np.full(3, 2.0) for i in range(4)}
    for name in state:
        weights.refuses = name
        prepared = target.prepare(*Trainer().ship(state))
        with pytest.raises(RuntimeError, match="not this one") as caught:
            commit([prepared])
        assert caught.value.tensor == name  # type: ignore[attr-defined]
        assert not prepared.ruined
        assert all(array.tolist() == [1, 1, 1] for array in weights.values())
    weights.refuses = None
    bring(target, state)
    assert all(array.tolist() == [2, 2, 2] for array in weights.values())


@both
def test_a_subset_that_fails_takes_its_full_version_back(apply: str) -> None:
    weights = brittle(1)
    target, trainer = make_target(weights, apply=apply), Trainer()
    state = counters(2)
    full = target.prepare(*trainer.ship(state))
    name = list(state)[-1]
    subset = target.prepare(*trainer.ship({name: torch.full_like(state[name], 3)}, partial=True))
    weights[name].fails = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="brittle"):
        commit([full, subset])
    assert seen(weights) == 1
    weights[name].fails = False  # type: ignore[attr-defined]
    commit([full, subset])
    assert int(weights[name][0]) == 3
    assert seen({n: t for n, t in weights.items() if n != name}) == 2


# -- subsets -----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_subsets(apply: str, owned: bool, at_once: bool) -> None:
    weights = None if owned else counters(0)
    target, trainer = make_target(weights, apply=apply), Trainer()
    name = "layer3.weight"
    for version in (1, 11, 21):
        state = counters(version)
        chain = [target.prepare(*trainer.ship(state))]
        if not at_once:
            commit([chain.pop()])
        for _ in range(1 if at_once else 3):
            state[name] = state[name] + 1
            chain = [*chain, target.prepare(*trainer.ship({name: state[name]}, partial=True))]
            commit(chain)
            for prepared in chain:
                prepared.done()
            chain = []
            assert snapshot(dict(target.weights)) == snapshot(state)
    with pytest.raises(PreflightError, match="unexpected"):
        target.prepare(*trainer.ship({"other": torch.ones(1)}, partial=True))


# -- callables and owned mappings --------------------------------------------------------------------------------------


def test_callable_gets_all_tensors_at_once() -> None:
    calls: list[Mapping[str, Tensor]] = []
    target = make_target(calls.append, select="!b", rename={"": "p."}, cast="float16")
    assert target.keeps_views
    assert target.needs() == b""
    prepared = bring(target, {"a": torch.ones(2), "b": torch.ones(1), "n": torch.tensor(3)})
    assert [sorted(call) for call in calls] == [["p.a", "p.n"]]
    assert calls[0]["p.a"].dtype == torch.float16
    assert calls[0]["p.n"].dtype == torch.int64
    assert prepared.tensors == 2
    with pytest.raises(PreflightError, match="selects none"):
        make_target(calls.append, select="x").prepare(*Trainer().ship({"a": torch.ones(1)}))


def test_owned_weights_are_a_read_only_mapping() -> None:
    target = make_target(None)
    assert isinstance(target.weights, OwnedWeights)
    assert len(target.weights) == 0
    bring(target, {"a": torch.ones(2), "n": {"b": np.zeros(3)}})
    assert list(target.weights) == ["a", "n.b"]
    assert not hasattr(target.weights, "__setitem__")
    assert "2 tensors" in repr(target.weights)


def test_owned_tensors_stay_the_same_objects_until_the_layout_changes() -> None:
    target, trainer = make_target(None), Trainer()
    bring(target, Tied(1), trainer)
    first = dict(target.weights)
    bring(target, Tied(2), trainer)
    assert all(target.weights[name] is tensor for name, tensor in first.items())
    assert snapshot(first) == snapshot(state_of(Tied(2)))
    assert tie_groups(first) == tie_groups(state_of(Tied()))
    bring(target, net(), trainer)
    assert snapshot(dict(target.weights)) == snapshot(state_of(net()))
    assert snapshot(first) == snapshot(state_of(Tied(2))), "what somebody kept is not touched"


@both
def test_owned_memory_is_the_targets_own_with_copy_only(apply: str) -> None:
    target = make_target(None, apply=apply)
    header, views = Trainer().ship({"a": torch.ones(2)})
    commit([target.prepare(header, views)])
    assert (target.weights["a"].data_ptr() == views[0].data_ptr()) == (apply == "alias")


def test_owned_casts_keep_ties() -> None:
    for apply in MODES:
        target = make_target(None, apply=apply, cast="float16", select="!mean")
        bring(target, Tied())
        assert tie_groups(dict(target.weights)) == {frozenset({"embed.weight", "head.weight"})}
        assert target.weights["tail"].dtype == torch.float16


# -- lifetimes ---------------------------------------------------------------------------------------------------------


def _leased(layout: Layout, values: list[Tensor], ended: Callable[[], object]) -> list[Tensor]:
    """Views over memory whose death is noted, as a backend's leases are."""
    array = np.zeros(layout.nbytes, np.uint8)
    views = layout.views(layout.slice(torch.from_numpy(array)))
    weakref.finalize(array, ended)
    for view, value in zip(views, values):
        view.copy_(value)
    return views


@pytest.mark.parametrize("make", [lambda: net(), lambda: state_of(net()), lambda: None])
def test_a_lease_ends_when_the_next_version_is_done(make: Callable[[], Any]) -> None:
    target, trainer = make_target(make(), apply="alias"), Trainer()
    ended: list[int] = []
    for version in range(1, 4):
        header, values = trainer.ship(net(version))
        views = _leased(header.layout, values, lambda version=version: ended.append(version))  # type: ignore[misc]
        prepared = target.prepare(header, views)
        del views, values
        commit([prepared])
        assert version - 1 not in ended, "no finaliser runs within the commit"
        prepared.done()
        del prepared
        gc.collect()
        assert ended == list(range(1, version))


def test_copies_keep_nothing_of_the_payload() -> None:
    policy = net()
    target = make_target(policy)
    ended: list[int] = []
    header, values = Trainer().ship(net(1))
    views = _leased(header.layout, values, lambda: ended.append(1))
    prepared = target.prepare(header, views)
    commit([prepared])
    prepared.done()
    del views
    gc.collect()
    assert ended == [1]


def test_iterating_a_mapping_that_computes_its_values_is_refused() -> None:
    class Computed(Mapping[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            return torch.zeros(2)

        def __iter__(self) -> Iterator[str]:
            return iter(["a"])

        def __len__(self) -> int:
            return 1

    with pytest.raises(PreflightError, match="made anew"):
        make_target(Computed())


@pytest.mark.parametrize("shape", [(), (3,)])
def test_an_expanded_view_in_a_mapping_of_the_receivers_own_follows_its_tensor(shape: tuple[int, ...]) -> None:
    with WeightUpdater("vanilla") as updater, WeightReceiver(updater.endpoint) as receiver:
        for value in (1.0, 2.0, 3.0):
            base = torch.full(shape, value)
            updater.push({"a": base.expand(2, *shape), "b": base})
            receiver.pull()
            assert torch.equal(receiver.weights["a"], base.expand(2, *shape))
            assert torch.equal(receiver.weights["b"], base)


# -- memory that is not the target's alone, or not there ---------------------------------------------------------------


def in_inference_mode(make: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return make()


@both
@pytest.mark.parametrize("tied", [False, True])
def test_tensors_made_in_inference_mode_stay_usable(apply: str, tied: bool) -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).eval().requires_grad_(False)
        if tied:
            module[2].weight = module[0].weight
        return module

    policy, trainer = in_inference_mode(make), Trainer()
    target = make_target(policy, apply=apply)
    for number in range(3):
        source = make().requires_grad_(False)
        source[0].weight.fill_(number)
        source[2].weight.fill_(number)
        header, views = trainer.ship({**source.state_dict(), "2.weight": source[2].weight.clone()})
        commit([target.prepare(header, views)])
        assert snapshot(state_of(policy)) == snapshot(source.state_dict())
        assert (policy[0].weight.data_ptr() == views[list(header.layout.names).index("0.weight")].data_ptr()) == (
            apply == "alias" and not tied
        )
        for tensor in policy.state_dict().values():
            assert tensor.is_inference()
            tensor.reshape(-1)[:1]
            with torch.inference_mode():
                tensor.add_(0)
        with torch.inference_mode():
            policy(torch.ones(3, 2))


@both
def test_an_expanded_tensor_made_in_inference_mode(apply: str) -> None:
    policy = {"a": in_inference_mode(lambda: torch.zeros(1, 2).expand(2, 2))}
    target, trainer = make_target(policy, apply=apply), Trainer()
    for number in range(2):
        bring(target, {"a": torch.arange(4.0).view(2, 2) + number}, trainer)
        assert policy["a"].view(-1).tolist() == [0.0 + number, 1.0 + number, 2.0 + number, 3.0 + number]


def conjugates() -> dict[str, Tensor]:
    weight = torch.zeros(2, dtype=torch.complex64)
    return {"a": weight, "b": weight.conj()}


def negatives() -> dict[str, Tensor]:
    view = torch.zeros(2, dtype=torch.complex64).conj().imag
    return {"a": view, "b": view}


TURNED, REAL = torch.tensor([1 + 2j, 3 - 4j]), torch.tensor([1.0, 2.0])


@both
@pytest.mark.parametrize(
    ("make", "a", "b", "wrong"),
    [
        (conjugates, TURNED, TURNED.conj().resolve_conj(), (TURNED + 1, TURNED.clone(), TURNED)),  # the last is tied
        (negatives, REAL, REAL.clone(), (REAL + 1, -REAL)),
    ],
)
def test_conjugate_and_negative_views_take_no_contradiction(
    make: Callable[[], dict[str, Tensor]], a: Tensor, b: Tensor, wrong: tuple[Tensor, ...], apply: str
) -> None:
    policy = make()
    target, before = make_target(policy, apply=apply), snapshot(policy)
    for other in wrong:
        with pytest.raises(PreflightError, match="share memory in the target, but have different values"):
            target.prepare(*Trainer().ship({"a": a, "b": other}))
    assert snapshot(policy) == before
    bring(target, {"a": a, "b": b})
    assert torch.equal(policy["a"], a)
    assert torch.equal(policy["b"], b)
    assert policy["a"].data_ptr() == policy["b"].data_ptr()


def mapped(path: Any) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """Kind, a tensor or array, and what somebody else sees of it."""
    for kind, tensor in ("shared", torch.zeros(3).share_memory_()), ("handle", MemoryMappedTensor(torch.zeros(3))):
        yield kind, tensor, torch.from_numpy(tensor.numpy()).clone  # which stays where it is
    tensordict = TensorDict({"a": torch.zeros(3)}, []).memmap(str(path / "td"))
    yield "memmap", tensordict["a"], lambda: TensorDict.load_memmap(str(path / "td"))["a"]
    file = torch.from_file(str(path / "file"), shared=True, size=3, dtype=torch.float32)
    yield "file", file, lambda: torch.from_file(str(path / "file"), shared=False, size=3, dtype=torch.float32)
    array = np.memmap(path / "array", np.float32, "w+", shape=3)
    seen_array = lambda: torch.from_numpy(np.fromfile(path / "array", np.float32))  # noqa: E731
    yield "np.memmap", array, seen_array
    plain = np.memmap(path / "plain", np.float32, "w+", shape=4)
    yield "view", np.asarray(plain)[1:], lambda: torch.from_numpy(np.fromfile(path / "plain", np.float32)[1:])
    matrix = np.zeros((1, 3), np.float32).view(np.matrix)
    yield "matrix", matrix, lambda: torch.from_numpy(np.array(matrix))


@both
def test_memory_that_others_rely_on_is_written_to_where_it_is(apply: str, tmp_path: Any) -> None:
    for kind, leaf, others_see in mapped(tmp_path):
        policy, trainer = {"a": leaf, "b": np.zeros(2, np.float32)}, Trainer()
        target = make_target(policy, apply=apply)
        for number in range(1, 3):
            bring(target, {"a": torch.full(tuple(leaf.shape), float(number)), "b": torch.ones(2)}, trainer)
            assert policy["a"] is leaf, kind
            assert others_see().unique().tolist() == [number], kind


def test_plain_arrays_go_on_pointing_at_what_arrives() -> None:
    policy, trainer = {"a": np.zeros(3, np.float32)}, Trainer()
    target = make_target(policy, apply="alias")
    for _ in range(3):
        header, views = trainer.ship({"a": torch.ones(3)})
        commit([target.prepare(header, views)])
        assert policy["a"].ctypes.data == views[0].data_ptr()
        make_target(policy, apply="alias")  # nor does another one take it for somebody else's


def test_shared_memory_in_which_elements_overlap_is_refused(tmp_path: Any) -> None:
    tensor = torch.zeros(1, 2).share_memory_().expand(2, 2)
    array = np.lib.stride_tricks.as_strided(np.memmap(tmp_path / "a", np.float32, "w+", shape=2), (2, 2), (0, 4))
    for leaf in tensor, array:
        with pytest.raises(PreflightError, match="a: over memory that others share"):
            make_target({"a": leaf})


@both
@pytest.mark.parametrize("size", [0, 8])
def test_a_storage_that_is_too_small_is_refused_by_name(apply: str, size: int) -> None:
    policy = nn.Linear(4, 4)
    policy.weight.untyped_storage().resize_(size)
    with pytest.raises(PreflightError, match="weight: without memory under it"):
        make_target(policy, apply=apply)
    policy, trainer = nn.Linear(4, 4), Trainer()
    target = make_target(policy, apply=apply)
    bring(target, nn.Linear(4, 4), trainer)
    policy.weight.untyped_storage().resize_(size)
    with pytest.raises(PreflightError, match="weight: without memory under it"):
        bring(target, nn.Linear(4, 4), trainer)
    with pytest.raises(PreflightError, match="weight: without memory under it"):
        target.admit(trainer.ship(nn.Linear(4, 4))[0])


@pytest.mark.parametrize("where", [{}, {"p": {"q": 0}}])
def test_stacks_of_unlike_tensordicts_are_refused_by_name(where: dict[str, Any]) -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(2 + number)}, []) for number in range(2)])
    state: Any = {"p": {"q": stack}} if where else stack
    for refuse in (lambda: make_target(state), lambda: Source(state).extract()):
        with pytest.raises(PreflightError, match="'p.q': a LazyStacked" if where else "the weights: a LazyStacked"):
            refuse()


@pytest.mark.parametrize("writable", [False, True])
def test_a_function_is_handed_memory_of_its_own(writable: bool) -> None:
    given: dict[str, Tensor] = {}
    shared = torch.ones(4)
    for apply in MODES:
        target = make_target(given.update, apply=apply)
        header, views = Trainer().ship({"a": shared, "b": shared, "c": torch.ones(1, 2).expand(2, 2)})
        commit([target.prepare(header, views, writable=writable)])
        own = not writable and apply == "copy"
        assert (given["a"].data_ptr() != views[0].data_ptr()) == own
        assert given["a"].data_ptr() == given["b"].data_ptr(), "tied they stay"
        given["a"].fill_(-1)
        assert views[0].eq(1).all() == own


# -- leaves that are made anew over the memory that was there ----------------------------------------------------------


def over(memory: Any, how: str) -> Tensor:
    """Another tensor at the same place, of the same geometry, through which the memory looks otherwise."""
    if how == "inference":
        with torch.inference_mode():
            return torch.from_numpy(memory)
    whole = torch.from_numpy(memory)
    return {"conj": whole.conj, "neg": lambda: whole.conj().imag}[how]()


@pytest.mark.parametrize("mode", [None, "cpu"])
@pytest.mark.parametrize("how", ["inference", "conj", "neg"])
def test_a_leaf_that_looks_at_its_memory_otherwise(how: str, mode: str | None) -> None:
    memory = np.zeros(3, np.float32 if how == "inference" else np.complex64)
    first = torch.from_numpy(memory)
    weights = {"a": first.imag if how == "neg" else first, "b": torch.zeros(2)}
    value = 2 - 3j if how == "conj" else 5.0
    sent = {"a": torch.full_like(weights["a"], value), "b": torch.ones(2)}
    target, trainer = make_target(weights), Trainer()
    for _ in range(2):
        bring(target, sent, trainer)
    weights["a"] = over(memory, how)
    assert weights["a"].data_ptr() == (first.imag if how == "neg" else first).data_ptr()
    with torch.device(mode) if mode else nullcontext():
        bring(target, sent, trainer)
        bring(target, sent, trainer)
    assert torch.equal(weights["a"].resolve_conj().resolve_neg(), sent["a"])
    assert torch.equal(weights["b"], sent["b"])


@pytest.mark.parametrize("name", ["state_dict", "named_parameters"])
def test_a_method_that_only_reads_is_no_target(name: str) -> None:
    with pytest.raises(PreflightError, match=rf"{name}, which loads nothing: give the object"):
        make_target(getattr(net(), name))


def test_a_class_is_no_target() -> None:
    with pytest.raises(PreflightError, match="the class Linear; an instance of it is wanted"):
        make_target(nn.Linear)
