"""What goes wrong in TorchRL's own schemes does not in ours: real collectors, real processes, over ipc."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from weightwire.collectors.torchrl import scheme
from weightwire.errors import (
    ClosedError,
    PreflightError,
    RefusedError,
    UnknownWorkerError,
    WaitTimeout,
    WorkerLostError,
)
from weightwire.testing.rig import took

pytestmark = [
    pytest.mark.filterwarnings("ignore:::torchrl"),
    pytest.mark.filterwarnings("ignore:::tensordict"),
]

Make = Callable[..., Any]


@pytest.fixture
def gather(make: Make, schemes: ModuleType, checks: Any) -> Callable[..., Any]:
    """``gather(scheme, policy)``: two processes that collect in step, their batches, and the scheme."""

    def build(
        policy: nn.Module | None, ours: Any = None, *, env: Any = None, models: Any = None, **options: Any
    ) -> Any:
        ours = scheme("ipc", timeout=20) if ours is None else ours
        options = {"frames_per_batch": 8, **checks.tracked, **options}
        collector = make(
            schemes.MultiSyncCollector,
            [env or schemes.still] * 2,
            policy,
            total_frames=-1,
            weight_sync_schemes={"policy": ours, **(models or {})},
            **options,
        )
        return collector, iter(collector), ours

    return build


# -- 1, 2, 13: whose memory it is --------------------------------------------------------------------------------------


def test_training_reaches_no_worker_before_the_update(
    gather: Callable[..., Any], parts: ModuleType, checks: Any
) -> None:
    policy = parts.Proof(1.0)
    collector, batches, ours = gather(policy)
    checks.acts(next(batches), (1.0, 1), (1.0, 1))
    parts.fill(policy, 2.0)
    checks.acts(next(batches), (1.0, 1), (1.0, 1))
    assert not any(tensor.is_shared() for tensor in policy.parameters())
    collector.update_policy_weights_()
    parts.fill(policy, 3.0)
    checks.acts(next(batches), (2.0, 2), (2.0, 2))
    assert set(ours.versions.values()) == {2}
    assert collector.policy_version == (2 if checks.versioned else None)


def test_a_collector_in_the_trainers_process_acts_with_what_was_pushed(
    make: Make, parts: ModuleType, checks: Any, schemes: ModuleType
) -> None:
    policy = parts.Proof(1.0)
    collector = make(
        parts.Collector,
        parts.still,
        policy,
        frames_per_batch=4,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme("ipc")},
        **checks.tracked,
    )
    batches = iter(collector)
    parts.fill(policy, 2.0)
    checks.acts(next(batches), (1.0, 1))
    collector.update_policy_weights_()
    parts.fill(policy, 3.0)
    checks.acts(next(batches), (2.0, 2))
    assert policy.layers[0].weight.unique().tolist() == [3.0]  # what was trained after the update is not undone


@pytest.mark.parametrize("form", ["module", "tensordict", "state_dict"])
def test_explicit_weights_change_neither_the_trainer_nor_other_workers(
    gather: Callable[..., Any], parts: ModuleType, checks: Any, form: str
) -> None:
    policy, average = parts.Proof(1.0), parts.Proof(5.0)
    collector, batches, ours = gather(policy)
    next(batches)
    weights = {"module": average, "state_dict": average.state_dict()}.get(
        form, parts.TensorDict.from_module(average).data
    )
    collector.update_policy_weights_(weights, worker_ids=[0])
    checks.acts(next(batches), (1.0, 1), (5.0, 2))
    assert ours.versions == {"policy-0": 2, "policy-1": 1}
    assert policy.layers[0].weight.unique().tolist() == [1.0]
    with pytest.raises(UnknownWorkerError, match="0 to 1"):
        collector.update_policy_weights_(worker_ids=[2])


# -- 3: several models -------------------------------------------------------------------------------------------------


def test_several_models_end_as_one(gather: Callable[..., Any], parts: ModuleType, checks: Any) -> None:
    policy, critic = parts.Proof(1.0), parts.fill(nn.Linear(1, 1), 10.0)
    ours, beside = scheme("ipc", timeout=20), scheme("ipc", timeout=20)
    collector, batches, _ = gather(policy, ours, env=parts.judged, models={"env.critic": beside})
    assert checks.seen(next(batches), "observation") == [0.0]
    collector.update_policy_weights_(weights_dict={"policy": parts.fill(policy, 2.0), "env.critic": critic})
    next(batches)  # begins with the observation of the step before
    batch = next(batches)
    assert (checks.seen(batch), checks.seen(batch, "observation")) == ([2.0], [10.0])
    collector.update_policy_weights_(parts.fill(critic, 20.0), model_id="env.critic")
    next(batches)
    batch = next(batches)
    assert (checks.seen(batch), checks.seen(batch, "observation")) == ([2.0], [20.0])
    assert (ours.version, beside.version) == (2, 2)

    with pytest.raises(RefusedError, match=r"(?s)'env.critic' failed.*bias.*'policy' is at version 3"):
        collector.update_policy_weights_(
            weights_dict={"env.critic": nn.Linear(3, 3), "policy": parts.fill(policy, 3.0)}
        )
    next(batches)
    batch = next(batches)
    assert (checks.seen(batch), checks.seen(batch, "observation")) == ([3.0], [20.0])
    with pytest.raises(KeyError, match="Nothing was sent"):
        collector.update_policy_weights_(weights_dict={"policy": policy, "nobody": policy})
    assert ours.version == 3


# -- 4: mixed versions -------------------------------------------------------------------------------------------------


def test_no_frame_is_a_mix_of_versions(make: Make, parts: ModuleType, checks: Any, schemes: ModuleType) -> None:
    policy = parts.Proof(1.0)
    ours = scheme("ipc", timeout=30)
    collector = make(
        parts.MultiAsyncCollector,
        [parts.still] * 2,
        policy,
        frames_per_batch=250,
        total_frames=-1,
        weight_sync_schemes={"policy": ours},
        **checks.tracked,
    )
    over, errors = threading.Event(), []

    def train() -> None:
        try:
            while not over.is_set():
                collector.update_policy_weights_(parts.fill(policy, float(ours.version + 1)))
        except Exception as exc:
            errors.append(exc)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        frames, versions = 0, set()
        for batch in collector:
            low, high = batch["low"].flatten(), batch["high"].flatten()
            assert torch.equal(low, high)
            if checks.versioned:
                assert low.long().tolist() == batch["next", "policy_version"].flatten().tolist()
            versions.update(low.tolist())
            frames += batch.numel()
            if frames >= 10_000:
                break
    finally:
        over.set()
        trainer.join(30)
    assert not errors
    assert len(versions) > 100


# -- 5: workers that die or stand still --------------------------------------------------------------------------------

SLACK = 2.0
"""Seconds beyond a deadline, for a machine that has other things to do."""


def test_a_killed_worker_is_named_and_the_other_has_the_version(
    gather: Callable[..., Any], parts: ModuleType, checks: Any
) -> None:
    policy = parts.Proof(1.0)
    collector, batches, ours = gather(policy, scheme("ipc", timeout=5))
    next(batches)
    collector.procs[1].kill()
    collector.procs[1].join(10)
    with took(at_most=5.0 + SLACK), pytest.raises(WorkerLostError, match="policy-1") as caught:
        collector.update_policy_weights_(parts.fill(policy, 2.0))
    assert caught.value.report.receipts["policy-0"].state == "staged"
    assert list(ours.workers) == ["policy-0"]
    with pytest.raises(UnknownWorkerError, match="has left or was lost"):
        collector.update_policy_weights_(worker_ids=1)
    collector.update_policy_weights_(worker_ids=0)


def test_a_stopped_worker_delays_an_update_by_its_deadline_at_most(
    gather: Callable[..., Any], parts: ModuleType, checks: Any
) -> None:
    policy = parts.Proof(1.0)
    collector, batches, ours = gather(policy, scheme("ipc", timeout=2, wait="applied"))
    next(batches)
    pid = collector.procs[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with took(at_most=2.0 + SLACK), pytest.raises(WaitTimeout, match="policy-0"):
            collector.update_policy_weights_(parts.fill(policy, 2.0))
    finally:
        os.kill(pid, signal.SIGCONT)
    checks.acts(next(batches), (2.0, 2), (2.0, 2))
    assert ours.versions == {"policy-0": 2, "policy-1": 2}


# -- 6, 7: weights that do not fit -------------------------------------------------------------------------------------


def test_a_worker_that_cannot_take_it_is_named_at_once(
    gather: Callable[..., Any], parts: ModuleType, checks: Any
) -> None:
    collector, batches, _ = gather(None, policy_factory=[parts.proof, parts.wide_proof])
    assert checks.seen(next(batches)) == [0.5]  # their own weights, before any update
    with took(at_most=20.0 / 2), pytest.raises(RefusedError, match=r"(?s)policy-1.*layers"):  # half of its deadline
        collector.update_policy_weights_(parts.Proof(2.0))
    assert checks.seen(next(batches)) == [0.5, 2.0]


def broken(state: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    name = "layers.0.bias"
    if how == "broadcast":
        return {**state, name: torch.ones(1)}
    if how == "int":
        return {**state, name: torch.ones(64, dtype=torch.int64)}
    if how == "double":
        return {**state, name: torch.ones(64, dtype=torch.float64)}
    if how == "transposed":
        return {**state, "layers.0.weight": torch.ones(32, 128)}
    if how == "missing":
        return {key: value for key, value in state.items() if key != name}
    return {} if how == "empty" else {**state, "unknown": torch.ones(1)}


def test_what_does_not_fit_is_refused_and_nothing_changes(
    gather: Callable[..., Any], parts: ModuleType, checks: Any
) -> None:
    policy = parts.Proof(1.0)
    collector, batches, ours = gather(policy)
    for how in ("broadcast", "int", "double", "transposed", "missing", "unknown", "empty"):
        said = {"missing": "layers.0.bias", "unknown": "unknown", "empty": "empty"}.get(how, "layers.0")
        with pytest.raises((RefusedError, PreflightError), match=said):
            collector.update_policy_weights_(broken(parts.Proof(9.0).state_dict(), how))
    assert ours.version == 1
    checks.acts(next(batches), (1.0, 1), (1.0, 1))
    collector.update_policy_weights_(parts.Proof(2.0).state_dict())
    checks.acts(next(batches), (2.0, 2), (2.0, 2))


def test_lazy_parameters_are_refused_by_name(make: Make, parts: ModuleType, checks: Any, schemes: ModuleType) -> None:
    policy = parts.lazy()
    with pytest.raises(PreflightError, match=r"weight.*(lazy|uninitiali[sz]ed|Uninitialized)"):
        make(
            parts.MultiSyncCollector,
            [parts.still],
            policy,
            frames_per_batch=4,
            total_frames=-1,
            weight_sync_schemes={"policy": scheme("ipc")},
        )


# -- 11: one scheme, its beginning and its end -------------------------------------------------------------------------


def test_a_scheme_serves_one_collector_after_another(
    gather: Callable[..., Any], parts: ModuleType, checks: Any
) -> None:
    policy, ours = parts.Proof(1.0), scheme("ipc", timeout=20)
    collector, batches, _ = gather(policy, ours)
    next(batches)
    with pytest.raises(RuntimeError, match="serves a collector already"):
        gather(policy, ours)
    with pytest.raises(RuntimeError, match="serves a collector already"):
        ours.connect()
    collector.update_policy_weights_(parts.fill(policy, 2.0))
    checks.acts(next(batches), (2.0, 2), (2.0, 2))
    collector.shutdown()
    begun = time.monotonic()
    with pytest.raises(ClosedError, match="shut down"):
        collector.update_policy_weights_()
    assert time.monotonic() - begun < 5

    collector, batches, _ = gather(policy, ours)
    checks.acts(next(batches), (2.0, 3), (2.0, 3))
    collector.update_policy_weights_(parts.fill(policy, 4.0))
    checks.acts(next(batches), (4.0, 4), (4.0, 4))
    collector.shutdown()
    collector, batches, _ = gather(parts.Proof(5.0), ours)  # another policy: another trainer's end
    checks.acts(next(batches), (5.0, 1), (5.0, 1))
    ours.shutdown()
    with pytest.raises(ClosedError):
        ours.send()


def test_a_scheme_is_one_models_in_one_live_collector(
    make: Make, parts: ModuleType, checks: Any, schemes: ModuleType
) -> None:
    def gather(policy: Any, /, **models: Any) -> Any:
        return make(
            parts.Collector, parts.still, policy, frames_per_batch=4, total_frames=-1, weight_sync_schemes=models
        )

    policy, ours = parts.Proof(1.0), scheme("vanilla")
    with pytest.raises(RuntimeError, match=r"one scheme for the models 'policy' and 'env'.*make a scheme for each"):
        gather(policy, policy=ours, env=ours)
    collector = gather(policy, policy=ours)
    with pytest.raises(RuntimeError, match=r"serves a collector already.*make another scheme"):
        gather(parts.Proof(9.0), policy=ours)
    collector.update_policy_weights_(parts.fill(policy, 2.0))  # the first is served as before
    assert checks.seen(next(iter(collector))) == [2.0]
    collector.shutdown()
    second = gather(parts.fill(policy, 3.0), policy=ours)
    second.update_policy_weights_(parts.fill(policy, 4.0))
    assert checks.seen(next(iter(second))) == [4.0]
    with pytest.raises(TypeError, match=r"model 'policy' of this .* is no Module but .*RandomPolicy"):
        gather(None, policy=scheme("vanilla"))


def test_who_and_what_is_named_is_checked_before_anything_is_sent(
    make: Make, parts: ModuleType, checks: Any, schemes: ModuleType
) -> None:
    policy, ours = parts.Proof(1.0), scheme("vanilla")
    collector = make(
        parts.Collector, parts.still, policy, frames_per_batch=4, total_frames=-1, weight_sync_schemes={"policy": ours}
    )
    for unknown in ({0: parts.Proof(5.0), 1: parts.Proof(6.0)}, {-1: parts.Proof(5.0)}):
        with took(at_most=10.0), pytest.raises(UnknownWorkerError, match="the workers are 0 to 0"):
            collector.update_policy_weights_(unknown)
    with pytest.raises(ValueError, match="the text 'critic', and the collector has no model of that name"):
        collector.update_policy_weights_("critic")
    assert (ours.version, checks.seen(next(iter(collector)))) == (1, [1.0])
    collector.update_policy_weights_({0: parts.Proof(5.0)})
    assert checks.seen(next(iter(collector))) == [5.0]


def test_weights_for_each_worker_are_all_tried(gather: Callable[..., Any], parts: ModuleType, checks: Any) -> None:
    collector, batches, _ = gather(parts.Proof(1.0))
    with pytest.raises(RefusedError, match=r"(?s)worker 0 failed: RefusedError.*worker 1 was updated"):
        collector.update_policy_weights_({0: nn.Linear(3, 3), 1: parts.Proof(2.0)})
    assert checks.seen(next(batches)) == [1.0, 2.0]


def test_a_late_word_of_an_old_version_does_not_pass_for_a_new_one(
    gather: Callable[..., Any], parts: ModuleType, checks: Any
) -> None:
    policy = parts.Proof(1.0)
    collector, batches, ours = gather(policy, scheme("ipc", timeout=0.5, wait="applied"))
    next(batches)
    for value in (2.0, 3.0):  # nobody collects meanwhile, so nobody can have it applied
        with pytest.raises(WaitTimeout, match=r"policy-[01]"):
            collector.update_policy_weights_(parts.fill(policy, value))
    checks.acts(next(batches), (3.0, 3), (3.0, 3))
    assert ours.versions == {"policy-0": 3, "policy-1": 3}


# -- 12: ties, wrappers, extra state, buffers that do not travel -------------------------------------------------------


def test_ties_and_buffers_survive_and_wrappers_are_seen_through(
    gather: Callable[..., Any], parts: ModuleType, checks: Any
) -> None:
    policy = parts.Proof(1.0)
    collector, batches, ours = gather(policy)
    report = ours.send(parts.fill(policy, 2.0))
    assert report.nbytes < 1.05 * sum(tensor.nbytes for tensor in {*policy.parameters(), *policy.norm.buffers()})
    parallel = nn.ModuleDict({"module": parts.Proof(3.0)})  # names as wrappers make them
    compiled = nn.ModuleDict({"_orig_mod": parts.Proof(4.0)})
    for weights, value in ((None, 2.0), (compiled, 4.0), (parallel, 3.0)):
        collector.update_policy_weights_(weights)
        batch = next(batches)
        assert (checks.seen(batch), checks.seen(batch, "constant"), checks.seen(batch, "tied")) == (
            [value],
            [10.0],
            [1.0],
        )


def test_extra_state_of_child_modules_arrives(gather: Callable[..., Any], parts: ModuleType, checks: Any) -> None:
    policy = parts.Counting(1.0)
    collector, batches, _ = gather(policy)
    policy.counter.count = torch.tensor(7.0)
    collector.update_policy_weights_()
    assert checks.seen(next(batches), "constant") == [7.0]


# -- more --------------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_workers_that_start_slowly_are_waited_for(gather: Callable[..., Any], parts: ModuleType, checks: Any) -> None:
    _, batches, _ = gather(parts.Proof(1.0), env=parts.slow_start)
    checks.acts(next(batches), (1.0, 1), (1.0, 1))
