"""What users of TorchRL's updaters and of RLightning's weight buffer have, and keep.

The tables are in docs/moving.md; each row names the tests that prove it. Rows that other tests prove already are not
tested again here. The last tests of this file hold the tables and the tests together.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

from weightwire import PushReport, WaitTimeout, WeightReceiver, WeightUpdater, hookimpl
from weightwire.testing import Rig
from weightwire.testing.states import counters, seen
from weightwire.transport import PHASES

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import docs_features

Opened = Callable[..., Any]


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Ends of this process and workers in others, over ipc."""
    rig = Rig(lambda: f"ipc://features-{uuid.uuid4().hex[:12]}", frozenset({"processes"}))
    try:
        yield rig
    finally:
        rig.close()


@pytest.fixture
def updater_of() -> Iterator[Callable[..., WeightUpdater]]:
    made: list[WeightUpdater] = []

    def make(weights: Any = None, endpoint: str = "vanilla", **options: Any) -> WeightUpdater:
        made.append(WeightUpdater(endpoint, weights, timeout=10.0, **options))
        return made[-1]

    yield make
    for updater in made:
        updater.close()


@pytest.fixture
def receiver_of() -> Iterator[Callable[..., WeightReceiver]]:
    made: list[WeightReceiver] = []

    def make(updater: WeightUpdater, weights: Any = None, **options: Any) -> WeightReceiver:
        made.append(WeightReceiver(updater.endpoint, weights, timeout=10.0, **options))
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()


def devices() -> list[Any]:
    """The CPU, and whatever accelerators torch knows; those that are not here are skipped with a reason."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return ["cpu"] + [
        pytest.param(
            name,
            marks=[
                pytest.mark.skipif(not here, reason=f"there is no {name} device"),
                *([pytest.mark.cuda] if name == "cuda" else []),
            ],
        )
        for name, here in there.items()
    ]


# -- TorchRL's updaters ------------------------------------------------------------------------------------------------


def test_torchrl_one_base_class_to_extend(updater_of: Opened, receiver_of: Opened) -> None:
    """Fetch the weights, map them, list the workers: a callable, `select`, `rename`, `cast`, and `updater.workers`."""
    state = {"actor.w": torch.full((2,), 1.5), "critic.w": torch.zeros(2)}
    fetched: list[int] = []

    def fetch() -> Mapping[str, Tensor]:
        fetched.append(len(fetched))
        return state

    updater = updater_of(fetch, select="actor.*", rename={"actor.": "policy."}, cast=torch.float64)
    target = {"policy.w": torch.zeros(2, dtype=torch.float64)}
    receiver = receiver_of(updater, target, worker="collector-0")
    for version in (1, 2):
        state["actor.w"] += 1
        updater.push()
        assert receiver.pull() == version
    assert fetched == [0, 1]
    assert target["policy.w"].tolist() == [3.5, 3.5]
    assert list(updater.workers) == ["collector-0"]


@pytest.mark.parametrize("device", devices())
def test_torchrl_vanilla_updater(device: str, updater_of: Opened, receiver_of: Opened) -> None:
    """The same process, perhaps another device: a copy, which training does not reach before the next push."""
    trained, acting = nn.Linear(4, 2, device=device), nn.Linear(4, 2)
    updater = updater_of(trained)
    receiver = receiver_of(updater, acting)
    updater.push()
    receiver.pull()
    before = trained.weight.detach().cpu().clone()
    with torch.no_grad():
        trained.weight.zero_()
    assert torch.equal(acting.weight, before)


def test_torchrl_multiprocess_updater(rig: Rig) -> None:
    updater = rig.updater(counters(7))
    workers = [rig.worker(name, counters, 0) for name in ("collector-0", "collector-1")]
    updater.wait_for_workers(2)
    updater.push()
    assert [worker.pull() for worker in workers] == [1, 1]
    assert [worker.seen() for worker in workers] == [7, 7]
    assert updater.wait().receipts["collector-1"].state == "applied"


@pytest.mark.parametrize("endpoint", ["vanilla", "ipc"])
@pytest.mark.parametrize("device", devices())
def test_torchrl_weights_that_cannot_be_shared_over_a_pipe(
    device: str, endpoint: str, updater_of: Opened, receiver_of: Opened
) -> None:
    """No backend asks that the trainer's memory can be shared: it is read, and neither moved nor handed out."""
    trained = nn.Linear(512, 512, device=device)
    place = trained.weight.data_ptr()
    updater = updater_of(trained, endpoint)
    receiver = receiver_of(updater, apply="alias")
    updater.push()
    receiver.pull()
    assert torch.equal(receiver.weights["weight"], trained.weight.detach().cpu())
    assert trained.weight.data_ptr() == place
    assert device != "cpu" or not trained.weight.is_shared()
    assert receiver.weights["weight"].data_ptr() != place


@pytest.mark.parametrize("device", devices())
def test_torchrl_push_to_some_workers(device: str, updater_of: Opened, receiver_of: Opened) -> None:
    updater = updater_of(trained := nn.Linear(4, 2))
    policies = {"a": nn.Linear(4, 2, device=device), "b": nn.Linear(4, 2)}
    receivers = {name: receiver_of(updater, policy, worker=name) for name, policy in policies.items()}
    before = policies["b"].weight.detach().clone()
    report = updater.push(workers=["a"])
    assert list(report.receipts) == ["a"]
    assert (receivers["a"].pull(), receivers["b"].pull(0.0)) == (1, None)
    assert policies["a"].weight.device.type == device
    assert torch.equal(policies["a"].weight.cpu(), trained.weight)
    assert torch.equal(policies["b"].weight, before)
    assert updater.push().version == 2
    assert [receiver.pull() for receiver in receivers.values()] == [2, 2]


def test_torchrl_post_hooks(updater_of: Opened, receiver_of: Opened) -> None:
    heard: list[str] = []

    class Observer:
        @hookimpl
        def weightwire_after_push(self, report: PushReport) -> None:
            heard.append(f"pushed {report.version}")

    updater = updater_of(counters(1), observers=[Observer()])
    receiver = receiver_of(updater)
    receiver.on_applied(lambda version: heard.append(f"applied {version}"))
    updater.push()
    receiver.pull()
    assert heard == ["pushed 1", "applied 1"]


def test_torchrl_workers_that_ask_for_weights(updater_of: Opened, receiver_of: Opened) -> None:
    """The worker pulls when it likes and takes the newest; the trainer waits only where it asks to."""
    state = counters(1)
    updater = updater_of(state)
    receiver = receiver_of(updater, policy := counters(0), worker="w")
    for version in (1, 2, 3):
        state.update(counters(version))
        assert updater.push(wait="none").version == version
    with pytest.raises(WaitTimeout, match="'w'"):
        updater.wait(timeout=0.05)
    assert receiver.pull() == seen(policy) == 3
    assert updater.wait(3).receipts["w"].state == "applied"


def test_torchrl_several_models(updater_of: Opened, receiver_of: Opened) -> None:
    """Policy, critic and an observation normaliser as named parts under one version."""
    models = {"policy": nn.Linear(4, 2), "critic": nn.Linear(4, 1), "mean": torch.ones(4)}
    acting = {"policy": nn.Linear(4, 2), "critic": nn.Linear(4, 1), "mean": torch.zeros(4)}
    updater = updater_of(models)
    receiver = receiver_of(updater, acting)
    alone = receiver_of(updater, policy := nn.Linear(4, 2), select="policy.*", rename={"policy.": ""})
    updater.push()
    assert (receiver.pull(), alone.pull()) == (1, 1)
    assert torch.equal(acting["mean"], models["mean"])
    assert torch.equal(acting["critic"].weight, models["critic"].weight)
    assert torch.equal(policy.weight, models["policy"].weight)


def test_torchrl_policy_version_on_collected_data(updater_of: Opened, receiver_of: Opened) -> None:
    state = counters(0)
    updater = updater_of(state)
    receiver = receiver_of(updater, policy := counters(-1))
    batches = []
    for version in (1, 2, 3):
        state.update(counters(version))
        updater.push()
        receiver.pull()
        batches.append({"content": seen(policy), "policy_version": receiver.version})
    assert all(batch["content"] == batch["policy_version"] for batch in batches)


# -- RLightning's weight buffer ----------------------------------------------------------------------------------------


def test_rlightning_strategies(updater_of: Opened, receiver_of: Opened) -> None:
    """None: aliased, without a copy. Double: an old version stays while the next is written. Shared: one for all."""
    state = counters(1)
    updater = updater_of(state)
    one, two = (receiver_of(updater, apply="alias") for _ in range(2))
    updater.push()
    one.pull()
    two.pull()
    held = dict(one.weights)
    assert all(one.weights[name].data_ptr() == two.weights[name].data_ptr() for name in state)
    state.update(counters(2))
    updater.push()
    two.pull()
    assert (seen(held), seen(two.weights)) == (1, 2)


def test_rlightning_local_hand_over(updater_of: Opened, receiver_of: Opened) -> None:
    """Always a copy, unless alias is asked for; and an alias is never of the trainer's own memory."""
    trained = nn.Linear(4, 2)
    updater = updater_of(trained)
    copied, aliased = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False).eval()
    own = copied.weight.data_ptr()
    for policy, apply in ((copied, "copy"), (aliased, "alias")):
        receiver = receiver_of(updater, policy, apply=apply)
        updater.push()
        receiver.pull()
        assert torch.equal(policy.weight, trained.weight)
        assert policy.weight.data_ptr() != trained.weight.data_ptr()
    assert copied.weight.data_ptr() == own
    assert aliased.weight.data_ptr() != own


def test_rlightning_numpy_states(updater_of: Opened, receiver_of: Opened) -> None:
    source = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(2**53 + 1)}
    target = {"w": np.zeros((2, 3), np.float32), "n": np.array(0)}
    updater = updater_of(source)
    receiver = receiver_of(updater, target)
    updater.push()
    receiver.pull()
    assert all(np.array_equal(target[name], source[name]) for name in source)
    assert {name: array.dtype for name, array in target.items()} == {n: a.dtype for n, a in source.items()}


def test_rlightning_nested_states(updater_of: Opened, receiver_of: Opened) -> None:
    """Module, then parameter; any depth."""
    updater = updater_of({"actor": {"0": {"weight": torch.ones(2)}}, "critic": {"weight": torch.zeros(1)}})
    receiver = receiver_of(
        updater, nested := {"actor": {"0": {"weight": torch.zeros(2)}}, "critic.weight": torch.ones(1)}
    )
    updater.push()
    receiver.pull()
    assert nested["actor"]["0"]["weight"].tolist() == [1.0, 1.0]
    assert nested["critic.weight"].tolist() == [0.0]


def test_rlightning_consistency_check(updater_of: Opened, receiver_of: Opened) -> None:
    """Exact, where norms are not: two states of one norm have different digests, and equal ones have the same."""
    state = {"w": torch.tensor([3.0, 4.0])}
    updater = updater_of(state, digest="on")
    receiver = receiver_of(updater, worker="w")

    def digest() -> str:
        updater.push()
        receiver.pull()
        return str(updater.wait().receipts["w"].digest)

    first = digest()
    assert first == digest()
    state["w"] = torch.tensor([4.0, 3.0])
    assert digest() not in ("", first)


def test_rlightning_timings(updater_of: Opened, receiver_of: Opened) -> None:
    updater = updater_of(counters(1))
    receiver = receiver_of(updater, counters(0), worker="w")
    report = updater.push()
    receiver.pull()
    receipt = updater.wait().receipts["w"]
    assert {"extract", "encode", "stage", "wait"} <= set(report.seconds) <= set(PHASES)
    assert {"verify", "commit"} <= set(receipt.seconds) <= set(PHASES)
    assert 0.9 * psutil.Process().memory_info().rss < report.memory["host"] < psutil.virtual_memory().total
    assert "peak host" in str(report)
    assert report.nbytes == receipt.nbytes == sum(tensor.nbytes for tensor in counters(1).values())


def test_rlightning_wait_for_update_done(rig: Rig) -> None:
    updater = rig.updater(counters(5))
    worker = rig.worker("w", counters, 0)
    updater.wait_for_workers(1)
    version = updater.push(wait="staged").version
    with pytest.raises(WaitTimeout, match="not applied"):
        updater.wait(version, state="applied", timeout=0.05)
    assert worker.pull() == 1
    assert updater.wait(version, state="applied", timeout=10.0).receipts["w"].state == "applied"


# -- the tables and the tests ------------------------------------------------------------------------------------------

ROWS = list(docs_features.rows())


def test_there_are_two_tables() -> None:
    tables = [row.table for row in ROWS]
    assert len(set(tables)) == 2
    assert (tables.count("From TorchRL's updaters"), tables.count("From RLightning's weight buffer")) == (13, 15)


def test_nothing_is_open() -> None:
    assert [row.feature for row in ROWS if row.open] == []


@pytest.mark.parametrize("row", ROWS, ids=[row.feature[:40] for row in ROWS])
def test_each_row_names_tests_that_exist(row: docs_features.Row) -> None:
    assert row.tests or row.open, f"{row.feature}: no test is named, and it does not say {docs_features.OPEN!r}"
    for node in row.tests:
        assert "def test_" in docs_features.source_of(node)


def test_each_test_is_named_by_a_row() -> None:
    named = {node for row in ROWS for node in row.tests}
    mine = [name for name in globals() if name.startswith(("test_torchrl_", "test_rlightning_"))]
    assert mine
    assert {f"tests/test_features.py::{name}" for name in mine} <= named
