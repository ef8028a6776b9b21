"""LoRA: adapters alone on a base that is there, and merged weights without touching the trainer's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weightwire import PreflightError, WeightReceiver, WeightUpdater


class Adapted(nn.Module):
    """A layer as PEFT makes it: a base layer, adapters by name, and what they add up to."""

    def __init__(self, base: nn.Linear, rank: int = 2, scaling: float = 0.5) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": scaling}
        self.merged = False
        self.active_adapters = ["default"]

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        delta = self.lora_B[adapter].weight @ self.lora_A[adapter].weight
        assert isinstance(delta, torch.Tensor)
        return delta * self.scaling[adapter]


class Lone(nn.Linear):
    """A layer as loralib makes it: adapters beside a weight of its own."""

    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        self.lora_A = nn.Parameter(torch.randn(2, size[0]))
        self.lora_B = nn.Parameter(torch.randn(size[1], 2))
        self.scaling = 2.0


def adapted() -> nn.Module:
    return nn.Sequential(Adapted(nn.Linear(6, 5)), nn.ReLU(), Lone(5, 4), nn.Linear(4, 3))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Linear(4, 3))


def expected(module: Any) -> dict[str, torch.Tensor]:
    first, lone, last = module[0], module[2], module[3]
    with torch.no_grad():
        return {
            "0.weight": first.base_layer.weight + first.get_delta_weight("default"),
            "0.bias": first.base_layer.bias,
            "2.weight": lone.weight + lone.lora_B @ lone.lora_A * 2.0,
            "2.bias": lone.bias,
            "3.weight": last.weight,
            "3.bias": last.bias,
        }


@pytest.mark.parametrize("backend", ["vanilla", "ipc"])
@pytest.mark.parametrize("digest", ["on", "off"])
def test_merged_weights_arrive_and_the_trainers_stay(backend: str, digest: str) -> None:
    module, policy = adapted(), plain()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with (
        WeightUpdater(backend, module, digest=digest) as updater,
        WeightReceiver(updater.endpoint, policy) as receiver,
    ):
        for _ in range(2):
            updater.push(merge=True)
            receiver.pull()
            wanted = expected(module)
            assert policy.state_dict().keys() == wanted.keys()
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in policy.state_dict().items())
            with torch.no_grad():
                module[0].lora_B["default"].weight.add_(1.0)  # type: ignore[index, union-attr]
    before["0.lora_B.default.weight"] += 1.0
    before["0.lora_B.default.weight"] += 1.0
    after = module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_inline_merge() -> None:
    module, policy = adapted(), plain()
    with WeightUpdater("vanilla", module) as updater, WeightReceiver(updater.endpoint, policy, inline=True):
        updater.push(merge=True)
    wanted = expected(module)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in policy.state_dict().items())


def test_adapters_alone_on_a_base() -> None:
    module, policy = adapted(), adapted()
    with WeightUpdater("ipc", module) as updater, WeightReceiver(updater.endpoint, policy) as receiver:
        with pytest.raises(PreflightError, match="full"):
            updater.push(select="*lora_*", partial=True)
        full = updater.push()
        receiver.pull()
        base = policy.state_dict()["0.base_layer.weight"].clone()
        for step in range(1, 4):
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    parameter.add_(float(step) if "lora_" in name else 100.0)
            report = updater.push(select="*lora_*", partial=True)
            assert report.tensors == 4
            assert report.nbytes < full.nbytes
            receiver.pull()
            for name, tensor in policy.state_dict().items():
                mine = module.state_dict()[name]
                assert torch.equal(tensor, mine) == ("lora_" in name), name
        assert torch.equal(policy.state_dict()["0.base_layer.weight"], base)


def test_select_is_within_what_the_updater_selects() -> None:
    with WeightUpdater("vanilla", adapted(), select="0.*") as updater:
        assert updater.push(select="*weight").tensors == 3
        assert updater.push().tensors == 4
        assert updater.push(select=["*lora_*", "!*lora_B*"]).tensors == 1
        with pytest.raises(PreflightError, match=r"3\.\*"):
            updater.push(select="3.*")


def test_one_select_keeps_its_layout() -> None:
    with WeightUpdater("vanilla", adapted()) as updater:
        layouts = {id(updater._source.extract(select=["*lora_*"]).layout) for _ in range(3)}
        assert len(layouts) == 1


@pytest.mark.parametrize("weights", [plain(), {"a": torch.zeros(2)}])
def test_nothing_to_merge_is_said(weights: Any) -> None:
    with WeightUpdater("vanilla", weights) as updater, pytest.raises(PreflightError, match="lora_A"):
        updater.push(merge=True)


def test_adapters_that_are_no_sum_are_refused_by_name() -> None:
    module = adapted()
    module[0].use_dora = {"default": True}  # type: ignore[index, union-attr]
    with WeightUpdater("vanilla", module) as updater, pytest.raises(PreflightError, match="'0' has use_dora"):
        updater.push(merge=True)


def test_what_is_merged_already_is_sent_as_it_is() -> None:
    module, policy = adapted(), plain()
    module[0].merged = True  # type: ignore[index, union-attr]
    with WeightUpdater("vanilla", module) as updater, WeightReceiver(updater.endpoint, policy) as receiver:
        updater.push(merge=True)
        receiver.pull()
    assert torch.equal(policy.state_dict()["0.weight"], module.state_dict()["0.base_layer.weight"])
