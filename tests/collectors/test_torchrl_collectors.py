"""Every kind of collector that TorchRL has, and what else takes a scheme or an updater, with real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch

from weightwire.collectors.torchrl import scheme, updater
from weightwire.errors import ClosedError, WaitTimeout, WorkerLostError

pytestmark = [
    pytest.mark.filterwarnings("ignore:::torchrl"),
    pytest.mark.filterwarnings("ignore:::tensordict"),
]

Make = Callable[..., Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- DistributedCollector, over nccl on Gloo ---------------------------------------------------------------------------


@pytest.fixture
def spread(make: Make, schemes: ModuleType, checks: Any) -> Callable[..., Any]:
    """``spread(scheme, policy, ...)``: a DistributedCollector of two workers."""
    if find_spec("weightwire_nccl") is None:
        pytest.skip("weightwire-nccl is not installed")

    def build(ours: Any, policy: Any, **options: Any) -> Any:
        options = {"collector_kwargs": checks.tracked, "sync": True, **options}
        return make(
            schemes.DistributedCollector,
            [schemes.still] * 2,
            policy,
            frames_per_batch=20,
            total_frames=10_000,
            backend="gloo",
            launcher="mp",
            tcp_port=free_port(),
            weight_sync_schemes={"policy": ours},
            **options,
        )

    return build


@pytest.mark.filterwarnings("ignore:::torch.distributed")
def test_each_worker_of_a_distributed_collector_is_updated(
    spread: Callable[..., Any], parts: ModuleType, checks: Any
) -> None:
    policy, ours = parts.Proof(1.0), scheme("nccl", timeout=30)
    collector = spread(ours, policy)
    batches = iter(collector)
    checks.acts(next(batches), (1.0, 1), (1.0, 1))
    parts.fill(policy, 2.0)
    checks.acts(next(batches), (1.0, 1), (1.0, 1))
    collector.update_policy_weights_()
    checks.acts(next(batches), (2.0, 2), (2.0, 2))
    for worker in (0, 1):
        collector.update_policy_weights_(parts.fill(policy, 3.0 + worker), worker_ids=worker)
        assert ours.workers[f"policy-{worker}"].staged.number == 3 + worker
    checks.acts(next(batches), (3.0, 3), (4.0, 4))
    assert ours.versions == {"policy-0": 3, "policy-1": 4}


@pytest.mark.filterwarnings("ignore:::torch.distributed")
def test_the_worker_that_delivered_a_batch_gets_the_update_that_follows(
    spread: Callable[..., Any], parts: ModuleType, checks: Any
) -> None:
    policy, ours = parts.Proof(1.0), scheme("nccl", timeout=30)
    batches = iter(spread(ours, policy, sync=False, update_after_each_batch=True))
    of: dict[float, list[float]] = {}
    for number in range(6):
        batch = next(batches)  # its worker was updated just before it is handed out
        assert ours.version == number + 2
        (pid,), (value,) = checks.seen(batch, "pid"), checks.seen(batch)
        of.setdefault(pid, []).append(value)
        parts.fill(policy, float(number + 2))
    assert sum(map(len, of.values())) == 6
    for values in of.values():
        assert values == sorted(values)
    given = {name: info.staged.number for name, info in ours.workers.items()}
    assert max(given.values()) == ours.version
    assert len(of) < 2 or min(given.values()) > 1


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:::torch.distributed")
def test_leaves_of_nested_collectors_connect_to_the_trainer(
    spread: Callable[..., Any], parts: ModuleType, checks: Any
) -> None:
    policy, ours = parts.Proof(1.0), scheme(f"nccl://127.0.0.1:{free_port()}", timeout=30)
    inner = [{**checks.tracked, "weight_sync_schemes": {"policy": ours.leaves(worker)}} for worker in range(2)]
    collector = spread(
        ours, policy, collector_class=parts.MultiSyncCollector, num_workers_per_collector=2, collector_kwargs=inner
    )
    batches = iter(collector)
    checks.acts(next(batches), *[(1.0, 1)] * 4)
    collector.update_policy_weights_(parts.fill(policy, 2.0))
    next(batches)  # was under way: TorchRL's inner collectors deliver one batch late
    next(batches)
    checks.acts(next(batches), *[(2.0, 2)] * 4)
    collector.update_policy_weights_(parts.fill(policy, 3.0), worker_ids=1)
    next(batches)
    next(batches)
    checks.acts(next(batches), (2.0, 2), (2.0, 2), (3.0, 3), (3.0, 3))
    assert ours.versions == {"policy-0.0": 2, "policy-0.1": 2, "policy-1.0": 3, "policy-1.1": 3}


def test_leaves_of_a_collector_within_a_worker(make: Make, schemes: ModuleType, checks: Any) -> None:
    """The same in small: no collector above, and the inner one in the trainer's process."""
    policy = schemes.Proof(1.0)
    ours = make(scheme, f"ipc://test-{os.getpid()}", timeout=20)
    ours.init_on_sender(model_id="policy", model=policy, num_workers=1)
    ours.connect()
    inner = make(
        schemes.MultiSyncCollector,
        [schemes.still] * 2,
        schemes.Proof(0.5),
        frames_per_batch=8,
        total_frames=-1,
        weight_sync_schemes={"policy": ours.leaves(0)},
        **checks.tracked,
    )
    batches = iter(inner)
    checks.acts(next(batches), (1.0, 1), (1.0, 1))
    ours.send(schemes.fill(policy, 2.0), worker_ids=0)
    checks.acts(next(batches), (2.0, 2), (2.0, 2))
    assert ours.versions == {"policy-0.0": 2, "policy-0.1": 2}
    with pytest.raises(ClosedError, match="no trainer's end"):
        inner.update_policy_weights_()
    inner._weight_sync_schemes = {}  # as where its user said nothing
    with pytest.raises(TypeError, match=r"collector_kwargs=.*leaves\(n\)"):
        scheme(ours.endpoint).init_on_receiver(model_id="policy", context=inner, worker_idx=0)


def test_a_nested_location_has_to_have_a_name(schemes: ModuleType) -> None:
    with pytest.raises(ValueError, match="named location"):
        scheme("ipc").leaves(0)


# -- one process -------------------------------------------------------------------------------------------------------


def test_a_collector_receives_from_a_trainer_elsewhere(make: Make, schemes: ModuleType, checks: Any) -> None:
    policy = schemes.Proof(1.0)
    trainer = make(updater, f"ipc://test-{os.getpid()}", policy)
    collector = make(
        schemes.Collector,
        schemes.still,
        schemes.Proof(0.5),
        frames_per_batch=4,
        total_frames=-1,
        weight_recv_schemes={"policy": make(scheme, trainer.endpoint)},
        worker_idx=0,
        **checks.tracked,
    )
    batches = iter(collector)
    checks.acts(next(batches), (1.0, 1))
    schemes.fill(policy, 2.0)
    trainer.update_weights()
    checks.acts(next(batches), (2.0, 2))
    assert trainer.versions == {"policy-0": 2}


def test_compiled_policies_are_updated_in_place(make: Make, schemes: ModuleType, checks: Any) -> None:
    policy, ours = schemes.Placed(1.0), scheme("ipc", timeout=60)
    collector = make(
        schemes.MultiSyncCollector,
        [schemes.still],
        policy,
        frames_per_batch=8,
        total_frames=-1,
        weight_sync_schemes={"policy": ours},
        compile_policy={"backend": "eager"},
        **checks.tracked,
    )
    batches = iter(collector)
    next(batches)  # warms up
    checks.acts(first := next(batches), (1.0, 1))
    for value in (2.0, 3.0):
        collector.update_policy_weights_(schemes.fill(policy, value))
        checks.acts(batch := next(batches), (value, int(value)))
        assert checks.seen(batch, "constant") == checks.seen(first, "constant")  # where the weights lie
    assert ours.versions == {"policy-0": 3}


def test_evaluator(make: Make, schemes: ModuleType) -> None:
    evaluators = pytest.importorskip("torchrl.collectors._evaluator", reason="this torchrl has no Evaluator")
    policy, ours = schemes.Proof(1.0), scheme("ipc", timeout=20)
    evaluator = make(
        evaluators.Evaluator,
        schemes.still,
        policy_factory=schemes.proof_for,
        num_trajectories=1,
        max_steps=5,
        weight_sync_schemes={"policy": ours},
        metrics_fn=schemes.low_and_high,
    )
    for value in (2.0, 3.0):
        result = evaluator.evaluate(schemes.fill(policy, value))
        assert (result["eval/low"], result["eval/high"]) == (value, value)
    assert ours.versions == {"policy-0": 2}
    assert evaluator.trigger_eval(schemes.fill(policy, 4.0)) in (True, None)
    assert evaluator.wait(60)["eval/low"] == 4.0


def test_inference_server_fed_by_the_trainers_hook(make: Make, schemes: ModuleType) -> None:
    servers = pytest.importorskip("torchrl.modules.inference_server", reason="this torchrl has no InferenceServer")
    from torchrl.trainers import UpdateWeights

    policy = schemes.Proof(1.0)
    trainer = make(updater, f"ipc://test-{os.getpid()}", policy)
    update = UpdateWeights(sender=trainer)
    model = schemes.Proof(0.5)
    sync = make(scheme, trainer.endpoint)
    server = make(servers.InferenceServer, model, transport="auto", max_batch_size=2, weight_sync=sync)
    server.start()
    client = server.client()
    for number in range(2, 6):
        schemes.fill(policy, float(number))
        update()
        for _ in range(2):
            reply = client(schemes.TensorDict({"observation": torch.zeros(1)}))
            assert (reply["low"].item(), reply["high"].item()) == (number, number)
            assert reply["policy_version"].item() == number
    assert trainer.versions == {"policy-0": 5}


# -- weight_updater ----------------------------------------------------------------------------------------------------


def test_updater_under_processes(make: Make, parts: ModuleType, checks: Any) -> None:
    policy = parts.Proof(1.0)
    ours = make(updater, "ipc", policy, timeout=20)
    collector = make(
        parts.MultiSyncCollector,
        [parts.still] * 2,
        policy,
        frames_per_batch=8,
        total_frames=-1,
        weight_updater=ours,
        **checks.tracked,
    )
    batches = iter(collector)
    parts.fill(policy, 2.0)
    checks.acts(next(batches), (1.0, 1), (1.0, 1))
    collector.update_policy_weights_()
    checks.acts(next(batches), (2.0, 2), (2.0, 2))
    collector.update_policy_weights_(parts.TensorDict.from_module(parts.Proof(7.0)).data, worker_ids=[1])
    checks.acts(next(batches), (2.0, 2), (7.0, 3))
    assert policy.layers[0].weight.unique().tolist() == [2.0]
    assert {info.pid: ours.versions[name] for name, info in ours.workers.items()} == {
        collector.procs[0].pid: 2,
        collector.procs[1].pid: 3,
    }
    os.kill(collector.procs[0].pid, signal.SIGKILL)
    collector.procs[0].join(10)
    with pytest.raises(WorkerLostError, match=str(collector.procs[0].pid)):
        collector.update_policy_weights_()
    ours.close()
    assert not policy._forward_pre_hooks


def test_updater_with_factories(make: Make, parts: ModuleType, checks: Any) -> None:
    policy = parts.Proof(3.0)
    ours = make(updater, "ipc", timeout=20)
    collector = make(
        parts.MultiSyncCollector,
        [parts.still] * 2,
        policy_factory=[ours.receiving(parts.proof)] * 2,
        frames_per_batch=8,
        total_frames=-1,
        weight_updater=ours,
    )
    batches = iter(collector)
    assert checks.seen(next(batches)) == [0.5]
    collector.update_policy_weights_(policy)
    assert checks.seen(next(batches)) == [3.0]
    with pytest.raises(ValueError, match="say which to push"):
        collector.update_policy_weights_()


def test_updater_under_processes_that_do_not_receive(make: Make, parts: ModuleType) -> None:
    ours = make(updater, "ipc", timeout=0.5)
    collector = make(
        parts.MultiSyncCollector,
        [parts.still],
        policy_factory=[parts.proof],
        frames_per_batch=8,
        total_frames=-1,
        weight_updater=ours,
    )
    with pytest.raises(WaitTimeout, match=r"worker 0.*updater.receiving"):
        collector.update_policy_weights_(parts.Proof(3.0))


def test_updater_in_one_process(make: Make, parts: ModuleType, checks: Any) -> None:
    policy = parts.Proof(1.0)
    ours = make(updater, "vanilla", policy)
    collector = make(
        parts.Collector, parts.still, policy, frames_per_batch=4, total_frames=-1, weight_updater=ours, **checks.tracked
    )
    batches = iter(collector)
    parts.fill(policy, 2.0)
    checks.acts(next(batches), (1.0, 1))
    collector.update_policy_weights_()
    parts.fill(policy, 3.0)
    checks.acts(next(batches), (2.0, 2))
    assert policy.layers[0].weight.unique().tolist() == [3.0]
    ours.close()
    assert not collector.policy._forward_pre_hooks


def test_updater_of_an_llm_collector(make: Make, parts: ModuleType, checks: Any) -> None:
    if not hasattr(parts, "LLMCollector"):
        pytest.skip("this torchrl has no LLMCollector, or not what it needs")
    policy, acting = parts.Proof(1.0), parts.Proof(0.5)
    ours = make(updater, "ipc", policy)
    collector = make(
        parts.LLMCollector,
        parts.Still(),
        policy=acting,
        dialog_turns_per_batch=4,
        total_dialog_turns=100,
        weight_updater=ours,
        track_policy_version=True,
    )
    batches = iter(collector)
    for number in (1, 2, 3):
        batch = next(batches)
        assert checks.seen(batch) == [number]
        assert batch["next", "policy_version"].unique().tolist() == [number]
        collector.update_policy_weights_(parts.fill(policy, number + 1.0))
    assert acting.layers[0].weight.unique().tolist() == [3.0]


def test_nothing_heavy_is_imported_before_it_is_asked_for() -> None:
    code = "import sys, weightwire.collectors.torchrl as t; assert not {'torch', 'torchrl', 'ray'} & set(sys.modules)"
    process = multiprocessing.get_context("spawn").Process(target=exec, args=(code,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
