"""Casts to float8 with one scale a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weightwire import PreflightError, WeightReceiver, WeightUpdater
from weightwire.weights.scaled import SCALABLE, quantised, scale_of

BOUNDS = {  # relative to the element, and to the largest: half a step of a normal, and of a subnormal number
    "float8_e4m3fn": (2.0**-4, 2.0**-10 / 448),
    "float8_e4m3fnuz": (2.0**-4, 2.0**-11 / 240),
    "float8_e5m2": (2.0**-3, 2.0**-17 / 57344),
    "float8_e5m2fnuz": (2.0**-3, 2.0**-18 / 57344),
}


@pytest.mark.parametrize("dtype", SCALABLE)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-60, 60), spread=st.integers(0, 30))
def test_the_error_is_bounded(dtype: str, seed: int, exponent: int, spread: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    small = torch.randint(0, spread + 1, (257,), generator=generator)
    values = torch.randn(257, generator=generator) * 2.0 ** (exponent - small)
    scale = scale_of(values, dtype)
    back = quantised(values, scale, dtype).double() * scale.double()
    relative, absolute = BOUNDS[dtype]
    bound = torch.maximum(relative * values.abs().double(), absolute * values.abs().amax().double())
    # One float32 rounding more: of the division, and of the scale.
    assert ((back - values.double()).abs() <= bound * (1 + 2.0**-16) + 1e-300).all()


@pytest.mark.parametrize("dtype", SCALABLE)
def test_special_values(dtype: str) -> None:
    assert scale_of(torch.zeros(3), dtype) == 1
    assert scale_of(torch.zeros(0, 3), dtype) == 1
    values = torch.tensor([float("nan"), 1.0, -2.0])
    scale = scale_of(values, dtype)
    back = quantised(values, scale, dtype).float() * scale
    assert back[0].isnan()
    assert back[1:].tolist() == [1.0, -2.0]
    infinite = quantised(torch.tensor([float("inf"), 1.0]), torch.tensor(1.0), dtype).float()
    assert not infinite[0].isfinite()


def module() -> nn.Sequential:
    return nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(20), nn.Linear(20, 7, dtype=torch.bfloat16))


CAST = {"[02].weight": "float8_e4m3fn*scale", "1.*": "bfloat16"}


@pytest.mark.parametrize("backend", ["vanilla", "ipc"])
@pytest.mark.parametrize("digest", ["on", "off"])
def test_scales_travel_beside_their_weights(backend: str, digest: str) -> None:
    source = module()
    with (
        WeightUpdater(backend, source, cast=CAST, digest=digest) as updater,
        WeightReceiver(updater.endpoint) as receiver,
    ):
        for _ in range(3):
            report = updater.push()
            receiver.pull()
            got = receiver.weights
            assert report.tensors == 8
            assert report.nbytes == 600 + 140 + 2 * 4 + 20 * 4 + 2 * 20 * 2 + 7 * 2
            for name in ("0.weight", "2.weight"):
                weight = source.state_dict()[name]
                scale = scale_of(weight, "float8_e4m3fn")
                assert got[name].dtype == torch.float8_e4m3fn
                assert torch.equal(got[f"{name}_scale"], scale)
                assert torch.equal(got[name].float(), quantised(weight, scale, "float8_e4m3fn").float())
            assert got["1.weight"].dtype == torch.bfloat16
            assert torch.equal(got["0.bias"], source.state_dict()["0.bias"])
            with torch.no_grad():
                source[0].weight.mul_(-3.0)


def test_a_quantised_worker_holds_weight_and_scale_together() -> None:
    source = module()
    into = {
        "0.weight": torch.zeros(20, 30, dtype=torch.float8_e4m3fn),
        "0.weight_scale": torch.zeros(()),
    }
    with (
        WeightUpdater("vanilla", source, select="0.weight", cast="float8_e4m3fn*scale") as updater,
        WeightReceiver(updater.endpoint, into, stream=True, group=lambda name: name.removesuffix("_scale")) as receiver,
    ):
        updater.push()
        receiver.pull()
    weight = source.state_dict()["0.weight"]
    assert (into["0.weight"].float() * into["0.weight_scale"] - weight).abs().max() <= weight.abs().max() * 2.0**-4


def test_inline_and_tied() -> None:
    table = torch.randn(8, 4)
    policy: dict[str, Any] = {}
    for name in ("a", "b"):
        policy[name] = torch.zeros(8, 4, dtype=torch.float8_e5m2)
        policy[f"{name}_scale"] = torch.zeros(())
    with (
        WeightUpdater("vanilla", {"a": table, "b": table}, cast="float8_e5m2*scale") as updater,
        WeightReceiver(updater.endpoint, policy, inline=True),
    ):
        assert updater.push().nbytes == 32 + 4  # ties travel once
    assert torch.equal(policy["a"].float() * policy["a_scale"], policy["b"].float() * policy["b_scale"])
    assert float(policy["a_scale"]) > 0


def test_integers_are_left_alone() -> None:
    with WeightUpdater("vanilla", {"n": torch.arange(3), "w": torch.ones(2)}, cast="float8_e4m3fn*scale") as updater:
        assert updater.push().tensors == 3


@pytest.mark.parametrize(
    ("cast", "match"),
    [("float16*scale", "a scale goes with one of"), ({"w": "int8*scale"}, "a scale goes with one of")],
)
def test_scales_for_other_dtypes_are_refused(cast: Any, match: str) -> None:
    with pytest.raises(PreflightError, match=match):
        WeightUpdater("vanilla", {"w": torch.ones(2)}, cast=cast)


def test_a_scale_that_would_hide_a_tensor_is_refused() -> None:
    state = {"w": torch.ones(2), "w_scale": torch.ones(())}
    with (
        WeightUpdater("vanilla", state, cast={"w": "float8_e4m3fn*scale"}) as updater,
        pytest.raises(PreflightError, match="w_scale"),
    ):
        updater.push()


def test_receivers_make_no_scales() -> None:
    with pytest.raises(PreflightError, match="updater"):
        WeightReceiver("vanilla://x", {"w": torch.ones(2)}, cast="float8_e4m3fn*scale")


@pytest.mark.parametrize("value", [1e39, -1e300])
def test_numbers_beyond_float32_are_refused_by_name(value: float) -> None:
    state = {"fine": torch.ones(2), "huge": torch.tensor([1.0, value], dtype=torch.float64)}
    with WeightUpdater("ipc", state, cast="float8_e4m3fn*scale") as updater:
        with pytest.raises(PreflightError, match="'huge' holds numbers beyond float32"):
            updater.push()
        state["huge"][1] = float("inf")  # which is what it is, and counts for no scale
        assert updater.push().version == 1
