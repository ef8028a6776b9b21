"""State that only ``state_dict`` knows is named and refused, on both sides, or left out by the user's own word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from weightwire.errors import PreflightError
from weightwire.weights.hidden import hidden
from weightwire.weights.source import Source
from weightwire.weights.target import make_target


class Scaled(nn.Module):
    """An int8 weight, whose scale is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
        self.scale = torch.rand(2)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale


class Packed(nn.Module):
    """All of it is packed into something that is no tensor."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "packed"] = (b"int8", b"scales")


class Renaming(nn.Linear):
    """Gives its own weight under a second name."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "kernel"] = self.weight if keep_vars else self.weight.detach()


class Counting(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {**state, "count": torch.ones(1)}


class Foreign(nn.Linear):
    """A ``state_dict`` of another form altogether."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"w": self.weight.detach().clone()}


class Broken(nn.Linear):
    def _save_to_state_dict(self, *_: Any) -> None:
        raise OSError("no such disk")


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({prefix + "added": 1}))
    return model


def names(state: Any) -> list[str]:
    return [name for name, _ in hidden(state)]


def test_what_is_hidden() -> None:
    assert names(nn.Sequential(nn.Linear(2, 2), Scaled())) == ["1.scale"]
    assert names({"policy": nn.DataParallel(Scaled()), "mean": torch.ones(1)}) == ["policy.scale"]
    assert names(nn.ModuleDict({"x": Packed()})) == ["x.packed"]
    assert names(Counting(2, 2)) == ["count"]
    assert names(hooked()) == ["added"]
    ((name, what),) = hidden(nn.ModuleDict({"x": Broken(2, 2)}))
    assert name == "x.*"
    assert "no such disk" in str(what)


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning", "ignore:.*deprecated:DeprecationWarning")
def test_quantised_layers_of_torch() -> None:
    assert "_packed_params._packed_params" in names(torch.ao.nn.quantized.dynamic.Linear(2, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
        lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.DataParallel(nn.Linear(2, 2)),
        lambda: Renaming(2, 2),
        lambda: Foreign(2, 2),
    ],
)
def test_nothing_is_hidden(make: Any) -> None:
    module = make()
    assert names(module) == []
    assert names({"a": module}) == []
    Source(module).extract()
    make_target(module)


@pytest.mark.parametrize(
    ("make", "name"), [(Scaled, "x.scale"), (Packed, "x.packed"), (lambda: Counting(2, 2), "count")]
)
def test_both_sides_refuse_it_by_name(make: Any, name: str) -> None:
    module = make() if name == "count" else nn.ModuleDict({"x": make()})
    for refuse in (lambda: Source(module).extract(), lambda: make_target(module)):
        with pytest.raises(PreflightError, match=f"{name}: state that only state_dict"):
            refuse()


def test_what_is_not_selected_is_left_alone() -> None:
    module = nn.ModuleDict({"x": Scaled(), "y": nn.Linear(2, 2)})
    assert list(Source(module, select=["!*scale"]).extract().layout.names) == ["x.weight", "y.weight", "y.bias"]
    assert list(Source(module).extract(select="y.*").layout.names) == ["y.weight", "y.bias"]
    make_target(module, select=["!x.scale"])
    with pytest.raises(PreflightError, match=r"x\.scale"):
        make_target(module, select=["!y.*"])


def test_it_is_noticed_when_a_layer_is_replaced() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    source = Source(module)
    source.extract()
    module[0] = Scaled()
    with pytest.raises(PreflightError, match=r"0\.scale"):
        source.extract()


def test_state_dict_itself_sends_it() -> None:
    sender, receiver = Scaled(), Scaled()
    tensors: dict[str, Tensor] = dict(zip(("weight", "scale"), Source(sender.state_dict).extract().tensors))
    assert torch.equal(tensors["scale"], sender.scale)
    assert not torch.equal(sender.scale, receiver.scale)
