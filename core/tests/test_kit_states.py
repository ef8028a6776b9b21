from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from weightwire.testing import strategies
from weightwire.testing.states import (
    ARRANGEMENTS,
    Bits,
    Tied,
    arrange,
    bits,
    brittle,
    counters,
    fill,
    makeable,
    random_bits,
    seen,
    snapshot,
    special_values,
    tie_groups,
)


def test_bits_see_signs_and_payloads() -> None:
    assert bits(torch.tensor(0.0)) != bits(torch.tensor(-0.0))
    nans = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    assert bits(nans[0]) != bits(nans[1])
    assert bits(torch.zeros(0, 8)) != bits(torch.zeros(8, 0))
    assert bits(torch.zeros(2, dtype=torch.uint16)) != bits(torch.zeros(2, dtype=torch.bfloat16))


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arrangements_are_what_they_say(arrangement: str) -> None:
    tensor = arrange("int16", (2, 3, 4, 5), arrangement)
    assert tensor.shape == (2, 3, 4, 5)
    assert bits(tensor) == Bits(
        "int16", (2, 3, 4, 5), tensor.clone(memory_format=torch.contiguous_format).numpy().tobytes()
    )
    dense = tensor.is_contiguous() and tensor.storage_offset() == 0
    assert dense == (arrangement == "dense")


def test_every_common_dtype_can_be_made() -> None:
    assert {"float64", "bfloat16", "float8_e4m3fn", "complex64", "bool", "int8", "uint16", "uint64"} <= set(makeable())
    for name in makeable():
        for shape in ((), (0, 3), (3, 2)):
            tensor = random_bits(name, shape)
            assert tuple(tensor.shape) == shape
            bits(tensor)


def test_special_values_are_special() -> None:
    values = special_values()
    assert values["float32"].isnan().sum() == 3
    assert values["float64"].isinf().sum() == 2
    assert values["int64"][0] == 2**53 + 1


def test_a_mix_is_seen() -> None:
    state = counters(3)
    assert seen(state) == 3
    fill(state, 4)
    assert seen(state) == 4
    state["layer5.weight"][-1] = 3
    with pytest.raises(AssertionError, match="mix"):
        seen(state)


def test_tie_groups() -> None:
    base = torch.arange(20.0)
    state = {
        "all": base,
        "head": base[:5],
        "tail": base[10:],
        "odd": base[6:9:2],
        "own": torch.zeros(3),
        "none": base[:0],
    }
    assert tie_groups(state) == {frozenset({"all", "head", "tail", "odd"})}
    assert tie_groups({"head": base[:5], "tail": base[10:]}) == set()
    assert len(tie_groups(Tied().state_dict())) == 2


def test_brittle_tensors_break_when_armed() -> None:
    state = brittle(1)
    victim = state["layer2.weight"]
    victim.copy_(torch.ones(512))
    victim.fails = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="brittle"):
        victim.copy_(torch.zeros(512))
    with pytest.raises(RuntimeError, match="brittle"):
        torch._foreach_copy_([state["layer1.weight"], victim], [torch.zeros(512), torch.zeros(512)])
    with pytest.raises(RuntimeError, match="brittle"):
        victim.data = torch.zeros(512)
    assert int(victim.detach()[0]) == 1


@settings(max_examples=50, deadline=None, database=None)
@given(strategies.states())
def test_strategies_make_states(state: dict[str, Tensor]) -> None:
    assert state
    assert snapshot(state) == snapshot(state)
    assert all(name and "\0" not in name for name in state)
