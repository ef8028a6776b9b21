"""LoRA: adapters alone on a base that is there, and merged weights without touching the trainer's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weightwire import PreflightError, WeightReceiver, WeightUpdater
from weightwire.offload import Offload


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


@pytest.mark.parametrize(
    "select",
    [
        lambda: lambda name: "lora_" in name,  # another one each time
        lambda: {"*lora_*", "!*lora_B*"},
        lambda: "*lora_*",
    ],
)
def test_what_selects_the_same_keeps_its_layout(select: Any) -> None:
    with WeightUpdater("vanilla", adapted()) as updater:
        plans = {id(updater._source.extract(select=select()).plan) for _ in range(3)}
        assert len(plans) == 1
        assert all("lora_" in name for name in updater._source.extract(select=select()).layout.names)


def test_a_predicate_is_asked_each_time() -> None:
    wanted = {"3.bias"}
    with WeightUpdater("vanilla", adapted()) as updater:
        assert list(updater._source.extract(select=lambda name: name in wanted).layout.names) == ["3.bias"]
        wanted.add("3.weight")
        assert set(updater._source.extract(select=lambda name: name in wanted).layout.names) == wanted


def test_what_selects_nothing_that_is_known_is_said() -> None:
    with WeightUpdater("vanilla", adapted()) as updater:
        with pytest.raises(PreflightError, match="select=7: globs"):
            updater.push(select=7)  # type: ignore[arg-type]
        with pytest.raises(PreflightError, match="selects none"):
            updater.push(select={"nothing"})


def test_the_plan_of_merged_weights_is_made_once() -> None:
    module = adapted()
    with WeightUpdater("vanilla", module) as updater:
        first = updater._source.extract(merge=True)
        updater._source.extract()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += 1.0
        again = updater._source.extract(merge=True)
        assert again.plan is first.plan
        weight = again.tensors[list(again.layout.names).index("0.weight")]
        assert torch.equal(weight.full_tensor(), expected(module)["0.weight"])  # type: ignore[attr-defined]
        module[2].weight = nn.Parameter(torch.randn(4, 5))  # type: ignore[index, union-attr]
        assert updater._source.extract(merge=True).layout is first.layout
        module[2] = Lone(5, 6)  # type: ignore[index]
        assert updater._source.extract(merge=True).layout is not first.layout


class Saved(nn.Module):
    """A module that is trained as a whole, as PEFT wraps it for ``modules_to_save``."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict({name: nn.Linear(4, 3) for name in ("other", "default")})
        self.active_adapters = ["default"]


def test_modules_that_are_trained_as_a_whole_stand_for_themselves() -> None:
    module, policy = adapted(), plain()
    want = expected(module)
    saved = module[3] = Saved(module[3])  # type: ignore[index]
    with WeightUpdater("vanilla", module) as updater, WeightReceiver(updater.endpoint, policy) as receiver:
        for name in ("default", "other"):
            saved.active_adapters = [name]
            updater.push(merge=True)
            receiver.pull()
            trained: Any = saved.modules_to_save[name]
            want |= {"3.weight": trained.weight, "3.bias": trained.bias}
            assert all(torch.equal(tensor, want[name]) for name, tensor in policy.state_dict().items())
        saved.active_adapters = []  # switched off
        updater.push(merge=True)
        receiver.pull()
        assert torch.equal(policy[3].weight, saved.original_module.weight)  # type: ignore[index, union-attr]
        names = set(updater._source.extract(select=["*lora_*", "*modules_to_save*"]).layout.names)
        assert {name for name in names if name.startswith("3.")} == {
            f"3.modules_to_save.{adapter}.{part}" for adapter in ("other", "default") for part in ("weight", "bias")
        }


def test_a_wrapper_that_is_not_known_is_refused_by_name() -> None:
    module = adapted()
    del (saved := Saved(module[3])).modules_to_save  # type: ignore[index]
    module[3] = saved  # type: ignore[index]
    with WeightUpdater("vanilla", module) as updater, pytest.raises(PreflightError, match="'3' is a Saved"):
        updater.push(merge=True)


@pytest.mark.parametrize("weights", [plain(), {"a": torch.zeros(2)}])
def test_nothing_to_merge_is_said(weights: Any) -> None:
    with WeightUpdater("vanilla", weights) as updater, pytest.raises(PreflightError, match="lora_A"):
        updater.push(merge=True)


def test_adapters_are_found_behind_data_parallel() -> None:
    module, policy = adapted(), plain()
    with (
        WeightUpdater("vanilla", nn.DataParallel(module)) as updater,
        WeightReceiver(updater.endpoint, policy) as receiver,
    ):
        updater.push(merge=True)
        receiver.pull()
    want = expected(module)
    assert all(torch.equal(tensor, want[name]) for name, tensor in policy.state_dict().items())


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


def merge(module: nn.Module) -> dict[str, torch.Tensor]:
    with WeightUpdater("vanilla", module) as updater, WeightReceiver(updater.endpoint) as receiver:
        updater.push(merge=True)
        receiver.pull()
        return dict(receiver.weights)


def refusal(module: nn.Module) -> str:
    with pytest.raises(PreflightError) as caught:
        merge(module)
    return str(caught.value)


def test_a_layer_under_two_names_is_merged_under_both_and_sent_once() -> None:
    lone = Lone(4, 4)
    sent = merge(nn.ModuleDict({"a": lone, "b": nn.Sequential(nn.ReLU(), lone)}))
    assert list(sent) == ["a.weight", "a.bias", "b.1.weight", "b.1.bias"]
    assert torch.equal(sent["a.weight"], lone.weight + lone.lora_B @ lone.lora_A * 2.0)
    assert sent["a.weight"].data_ptr() == sent["b.1.weight"].data_ptr()


def test_the_plan_sees_that_two_names_are_no_longer_one_layer() -> None:
    lone, other = Lone(4, 4), Lone(4, 4)
    module = nn.ModuleDict({"a": lone, "b": lone})
    with WeightUpdater("vanilla", module) as updater, WeightReceiver(updater.endpoint) as receiver:
        for second in (lone, other):
            module["b"] = second
            updater.push(merge=True)
            receiver.pull()
            assert torch.equal(receiver.weights["b.weight"], second.weight + second.lora_B @ second.lora_A * 2.0)


def test_weights_that_are_tied_to_a_merged_one_are_refused_by_name() -> None:
    module = nn.Sequential(Lone(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    assert "'0.weight' and '1.weight' are tied" in refusal(module)
    module = nn.Sequential(Lone(4, 4), Lone(4, 4))
    module[1].weight = module[0].weight
    assert "'0.weight' and '1.weight' are tied" in refusal(module)
    module[0].merged = module[1].merged = True  # type: ignore[assignment]
    assert torch.equal(merge(module)["1.weight"], module[0].weight)


@pytest.mark.parametrize(("half", "adapters"), [(torch.float16, torch.float32), (torch.float32, torch.float64)])
def test_adapters_of_another_dtype_are_rounded_once(half: torch.dtype, adapters: torch.dtype) -> None:
    module = nn.Sequential(Lone(32, 32))
    module[0].weight.data = module[0].weight.data.to(half)
    for part in ("lora_A", "lora_B"):
        setattr(module[0], part, nn.Parameter(getattr(module[0], part).detach().to(adapters)))
    with torch.no_grad():
        want = module[0].weight.clone()
        want += module[0].lora_B @ module[0].lora_A * 2.0
    sent = merge(module)["0.weight"]
    assert sent.dtype is half
    assert torch.equal(sent, want)


def spoilt(**attributes: Any) -> nn.Module:
    module = nn.Sequential(Lone(4, 4))
    for name, value in attributes.items():
        setattr(module[0], name, value)
    return module


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"scaling": None}, "scaling of '0' is None"),
        ({"scaling": {"default": 1.0}}, "scaling of '0'"),
        ({"lora_A": nn.Parameter(torch.ones(2, 4, device="meta"))}, "'0.lora_A' is on the meta device"),
        ({"lora_A": nn.Parameter(torch.ones(2, 4, dtype=torch.float64))}, "adapters of '0' cannot be added"),
        ({"lora_magnitude_vector": nn.Parameter(torch.ones(4))}, "'0' has lora_magnitude_vector"),
        (
            {"weight": nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)},
            "weight of '0' is torch.int8",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(attributes: dict[str, Any], match: str) -> None:
    assert match in refusal(spoilt(**attributes))


def test_what_is_offloaded_or_hidden_is_refused_by_name() -> None:
    module = nn.Sequential(Lone(4, 4), nn.Linear(4, 4))
    away = Offload(module)
    away.all()
    assert "'0' is offloaded" in refusal(module)
    away.reload()
    module[1]._save_to_state_dict = None  # type: ignore[assignment]  # of the class, not of the object, is asked
    assert len(merge(module)) == 4

    class Scaled(nn.Linear):
        def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            destination[prefix + "scale"] = torch.ones(1)

    module[1] = Scaled(4, 4)
    assert "1.scale: state that only state_dict() knows" in refusal(module)
