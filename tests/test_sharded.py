"""Trainers whose weights are sharded over ranks: real ranks on Gloo, real workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import weightwire
from weightwire import WeightReceiver, WeightUpdater
from weightwire.offload import Offload

PATIENCE = 60.0

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


SIDE, LAYERS = 1448, 12
"""Twelve tensors of 8 MB: a quarter of a bucket each."""


def large(size: int) -> nn.Module:
    module = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
    return fully_shard(module, mesh=init_device_mesh("cpu", (size,)))


class Net(nn.Module):
    """Uneven over two ranks, one tensor with fewer rows than ranks, a tie, a buffer that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 1)
        self.third = nn.Linear(1, 7)
        self.fourth = nn.Linear(7, 5)
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fourth(self.third(self.second(self.first(x))))
        return out


def fill(module: nn.Module, value: float) -> None:
    """The same values whatever the sharding: each element says which it is."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            whole = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape) + 100 * number + value
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                shard = distribute_tensor(whole, mesh, placements, src_data_rank=None)  # which asks nobody
                parameter.to_local().copy_(shard.to_local())
            else:
                parameter.copy_(whole)


def expected(value: float) -> dict[str, torch.Tensor]:
    module = Net()
    fill(module, value)
    return module.state_dict()


def fsdp(size: int) -> nn.Module:
    module = Net()
    for child in module.children():
        fully_shard(child, mesh=init_device_mesh("cpu", (size,)))
    return fully_shard(module, mesh=init_device_mesh("cpu", (size,)))


def tensor_parallel(size: int) -> nn.Module:
    plan = {"first": ColwiseParallel(), "fourth": RowwiseParallel()}
    return parallelize_module(Net(), init_device_mesh("cpu", (size,)), plan)


def columns(size: int) -> nn.Module:
    module = Net()
    mesh = init_device_mesh("cpu", (size,))
    for child in (module.first, module.fourth):
        child.weight = nn.Parameter(distribute_tensor(child.weight.detach(), mesh, [Shard(1)]))
    return module


def wrong(module: nn.Module, value: float) -> list[str]:
    """Names of tensors whose part on this rank is not what the whole says."""
    other = Net()
    fill(other, value)
    names = []
    for (name, tensor), whole in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
            tensor = tensor.to_local()
        if not torch.equal(tensor, whole):
            names.append(name)
    return names


# -- a rank, which does what it is told over a pipe ------------------------------------------------------------------


def anonymous() -> int:
    """Bytes of this process's own memory, without what is shared (ipc's slots)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel reports no RssAnon")


def peak_of(push: Callable[[], object]) -> int:
    """Bytes by which own memory grew at the most during a push, seen every millisecond."""
    push()  # what is allocated once
    over = threading.Event()
    before, seen = anonymous(), [0]

    def watch() -> None:
        while not over.wait(0.001):
            seen.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    push()
    over.set()
    watcher.join()
    return max(seen) - before


def rank_main(pipe: Connection, rank: int, size: int, store: str, make: Callable[[int], nn.Module]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    module = make(size)
    fill(module, 0.0)
    updater: WeightUpdater | None = None
    while True:
        command, *args = pipe.recv()
        try:
            if command == "open":
                endpoint, timeout = args
                updater = WeightUpdater(endpoint, module, timeout=timeout)
                answer: Any = updater.endpoint
            elif command == "push":
                value, options = args
                assert updater is not None
                if value is not None:
                    fill(module, value)
                begun = time.monotonic()
                try:
                    report = updater.push(**options)
                except weightwire.WeightwireError as exc:
                    took = time.monotonic() - begun
                    answer = (type(exc).__name__, str(exc), getattr(exc, "tensor", None), took, updater.version)
                else:
                    answer = (report.version, {name: r.state for name, r in report.receipts.items()}, report.nbytes)
            elif command == "workers":
                assert updater is not None
                answer = updater.wait_for_workers(*args)
            elif command == "receive":
                endpoint, apply = args
                receiver = WeightReceiver(endpoint, module, worker=f"rank{rank}", apply=apply, timeout=PATIENCE)
                answer = None
            elif command == "pull":
                receiver.wait(args[0])
                answer = wrong(module, args[1])
            elif command == "offload":
                offload = Offload(module, to=args[0])
                offload.all()
                try:
                    module(torch.zeros(2, 5))
                except weightwire.OffloadedError as exc:
                    answer = str(exc)
            elif command == "reload":
                offload.reload()
                answer = wrong(module, args[0])
                module(torch.zeros(2, 5))
            elif command == "peak":
                answer = peak_of(updater.push)
            elif command == "drop":  # one tensor less than the other ranks have
                del module.third
                answer = None
            else:
                if updater is not None:
                    updater.close()
                pipe.send("bye")
                break
        except Exception as exc:
            answer = exc
        pipe.send(answer)
    os._exit(0)  # destroying a group of which somebody is gone may take for ever


class Trainer:
    def __init__(self, size: int, make: Callable[[int], nn.Module], store: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "weightwire.receiver"])
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=rank_main, args=(there, rank, size, str(store), make), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def tell(self, *command: Any, ranks: list[int] | None = None) -> None:
        for rank in range(len(self.pipes)) if ranks is None else ranks:
            self.pipes[rank].send(command)

    def answers(self, ranks: list[int] | None = None) -> list[Any]:
        found = []
        for rank in range(len(self.pipes)) if ranks is None else ranks:
            assert self.pipes[rank].poll(PATIENCE), f"rank {rank} is silent"
            answer = self.pipes[rank].recv()
            if isinstance(answer, Exception):
                raise answer
            found.append(answer)
        return found

    def ask(self, *command: Any) -> list[Any]:
        self.tell(*command)
        return self.answers()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        for pipe in self.pipes:
            pipe.close()


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(size: int, module: Callable[[int], nn.Module]) -> Trainer:
        made.append(Trainer(size, module, tmp_path / f"store{len(made)}"))
        return made[-1]

    yield make
    for trainer in made:
        trainer.end()


def assert_exact(receiver: WeightReceiver, value: float) -> None:
    state = expected(value)
    assert receiver.weights.keys() == state.keys()
    for name, tensor in receiver.weights.items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("make", [fsdp, tensor_parallel, columns])
def test_two_ranks_send_whole_tensors_to_two_workers(trainers: Any, make: Any) -> None:
    trainer = trainers(2, make)
    endpoints = trainer.ask("open", "ipc", PATIENCE)
    assert endpoints[0] == endpoints[1]
    with (
        WeightReceiver(endpoints[0], worker="copies", timeout=PATIENCE) as one,
        WeightReceiver(endpoints[0], worker="aliases", apply="alias", timeout=PATIENCE) as two,
    ):
        assert trainer.ask("workers", 2) == [["aliases", "copies"]] * 2
        for number in range(1, 4):
            first, second = trainer.ask("push", float(number), {})
            assert first == second == (number, {"copies": "staged", "aliases": "staged"}, first[2])
            for receiver in (one, two):
                assert receiver.pull() == number
                assert_exact(receiver, float(number))
        partial = trainer.ask("push", 9.0, {"timeout": 5.0})
        assert partial[0][0] == 4


def test_a_rank_that_is_stopped_is_named_and_all_are_in_step_again(trainers: Any) -> None:
    trainer = trainers(2, columns)
    (endpoint, _) = trainer.ask("open", "ipc", PATIENCE)
    with WeightReceiver(endpoint, timeout=PATIENCE) as receiver:
        trainer.ask("push", 1.0, {})
        assert receiver.pull() == 1
        os.kill(trainer.processes[1].pid, signal.SIGSTOP)
        trainer.tell("push", 2.0, {"timeout": 1.0})
        ((kind, text, _, took, version),) = trainer.answers([0])
        assert (kind, version) == ("WaitTimeout", 1)
        assert "rank 1 of the trainer" in text
        assert took < 10
        os.kill(trainer.processes[1].pid, signal.SIGCONT)
        assert trainer.answers([1])[0][:2] == (kind, text)
        first, second = trainer.ask("push", 3.0, {})
        assert first == second
        assert receiver.pull() == first[0]
        assert_exact(receiver, 3.0)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_does_not_come_is_named(trainers: Any, late: int) -> None:
    trainer = trainers(2, columns)
    (endpoint, _) = trainer.ask("open", "ipc", PATIENCE)
    there = 1 - late
    with WeightReceiver(endpoint, timeout=PATIENCE) as receiver:
        trainer.ask("push", 1.0, {})
        assert receiver.pull() == 1
        trainer.tell("push", 2.0, {"timeout": 1.0}, ranks=[there])
        ((kind, text, _, took, version),) = trainer.answers([there])
        assert (kind, version) == ("WaitTimeout", 1)
        assert f"rank {late} of the trainer" in text
        assert took < 10
        assert receiver.pull() is None
        trainer.tell("push", 2.0, {"timeout": 1.0}, ranks=[late])
        ((kind, text, _, took, version),) = trainer.answers([late])
        assert (kind, version) == ("WaitTimeout", 1)
        assert took < 10
        first, second = trainer.ask("push", 3.0, {})
        assert first == second
        assert receiver.pull() == first[0]
        assert_exact(receiver, 3.0)


def test_a_dead_rank_is_named_and_the_old_version_acts(trainers: Any) -> None:
    trainer = trainers(2, columns)
    (endpoint, _) = trainer.ask("open", "ipc", PATIENCE)
    with WeightReceiver(endpoint, timeout=PATIENCE) as receiver:
        trainer.ask("push", 1.0, {})
        assert receiver.pull() == 1
        trainer.processes[1].kill()
        trainer.processes[1].join(10)
        trainer.tell("push", 2.0, {"timeout": 2.0}, ranks=[0])
        ((kind, text, _, took, version),) = trainer.answers([0])
        assert kind == "WaitTimeout"
        assert "rank 1 of the trainer" in text
        assert took < 10
        assert version == 1
        assert receiver.pull() is None
        assert_exact(receiver, 1.0)


def test_ranks_that_differ_are_told_so(trainers: Any) -> None:
    trainer = trainers(2, columns)
    trainer.ask("open", "ipc", PATIENCE)
    trainer.tell("drop", ranks=[1])
    trainer.answers([1])
    answers = trainer.ask("push", 1.0, {})
    assert {answer[0] for answer in answers} == {"PreflightError"}
    assert all("rank 1" in answer[1] and "fourth.weight" in answer[1] for answer in answers)
    assert {answer[4] for answer in answers} == {0}


def test_what_a_worker_refuses_is_raised_on_every_rank(trainers: Any) -> None:
    trainer = trainers(2, columns)
    (endpoint, _) = trainer.ask("open", "ipc", PATIENCE)
    with WeightReceiver(endpoint, {"something.else": torch.zeros(2)}, worker="w", timeout=PATIENCE):
        trainer.ask("workers", 1)
        answers = trainer.ask("push", 1.0, {})
        assert [answer[0] for answer in answers] == ["RefusedError"] * 2
        assert answers[0][1] == answers[1][1]
        assert "something.else" in answers[0][1]


def test_an_endpoint_that_is_in_use_is_an_error_on_every_rank(trainers: Any) -> None:
    trainer = trainers(2, columns)
    with WeightUpdater("ipc") as other:
        trainer.tell("open", other.endpoint, PATIENCE)
        for rank in (0, 1):
            with pytest.raises(weightwire.EndpointInUseError):
                trainer.answers([rank])


@pytest.mark.parametrize(
    ("backend", "make", "apply"),
    [
        ("ipc", fsdp, "copy"),
        ("ipc", tensor_parallel, "alias"),
        ("ipc", columns, "copy"),
        ("ray", fsdp, "copy"),
        ("ray", columns, "copy"),
    ],
)
def test_workers_that_are_sharded_take_their_parts(
    trainers: Any, request: pytest.FixtureRequest, backend: str, make: Any, apply: str
) -> None:
    options = f"?address={request.getfixturevalue('ray_cluster')}" if backend == "ray" else ""
    workers = trainers(2, make)
    module = Net()
    with WeightUpdater(f"{backend}{options}", module, timeout=PATIENCE) as updater:
        workers.ask("receive", updater.endpoint, apply)
        for number in range(1, 4):
            fill(module, float(number))
            updater.push()
            assert workers.ask("pull", number, float(number)) == [[], []]
        module.second = nn.Linear(8, 1)
        with pytest.raises(weightwire.RefusedError, match=r"second\.weight"):
            updater.push()


@pytest.mark.parametrize("backend", ["ipc"])
def test_no_more_than_two_buckets_are_held_beside_the_shards(trainers: Any, backend: str) -> None:
    trainer = trainers(2, large)
    (endpoint, _) = trainer.ask("open", backend, PATIENCE)
    with WeightReceiver(endpoint, timeout=PATIENCE):
        peaks = trainer.ask("peak")
    whole = LAYERS * SIDE * SIDE * 4
    assert max(peaks) < 2 * 32 * 2**20 < whole


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_offloaded_shards_are_sent_from_their_backup(trainers: Any, to: str) -> None:
    trainer = trainers(2, fsdp)
    (endpoint, _) = trainer.ask("open", "ipc", PATIENCE)
    with WeightReceiver(endpoint, timeout=PATIENCE) as receiver:
        trainer.ask("push", 1.0, {})
        said = trainer.ask("offload", to)
        assert all("offloaded" in text for text in said)
        pushed = trainer.ask("push", None, {})
        assert pushed[0] == pushed[1]
        assert receiver.wait(pushed[0][0]) == 2
        assert_exact(receiver, 1.0)
        assert trainer.ask("reload", 1.0) == [[], []]
        trainer.ask("push", 3.0, {})
        receiver.wait(3)
        assert_exact(receiver, 3.0)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[str]:
    import ray
    from ray.cluster_utils import Cluster

    if ray.is_initialized():  # another module's, which lives on
        yield ray.get_runtime_context().gcs_address
        return
    head = {"num_cpus": 3, "object_store_memory": 512 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False, logging_level="ERROR")
    try:
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_two_ranks_send_to_two_ray_workers(trainers: Any, ray_cluster: str) -> None:
    import ray

    class Worker:
        def __init__(self, endpoint: str) -> None:
            self.receiver = WeightReceiver(endpoint, timeout=60.0)

        def pull(self, version: int) -> dict[str, Any]:
            self.receiver.wait(version)
            return {name: tensor.numpy().copy() for name, tensor in self.receiver.weights.items()}

    trainer = trainers(2, fsdp)
    endpoints = trainer.ask("open", f"ray?address={ray_cluster}", PATIENCE)
    assert endpoints[0] == endpoints[1]
    actor = ray.remote(num_cpus=0)(Worker)
    workers = [actor.remote(endpoints[0]) for _ in range(2)]
    assert len(trainer.ask("workers", 2)[1]) == 2
    for number in (1, 2):
        first, second = trainer.ask("push", float(number), {})
        assert first == second
        state = expected(float(number))
        for got in ray.get([worker.pull.remote(number) for worker in workers], timeout=PATIENCE):
            assert got.keys() == state.keys()
            assert all(numpy.array_equal(got[name], state[name].numpy()) for name in state)
