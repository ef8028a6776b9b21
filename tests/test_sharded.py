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
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import weightwire
from weightwire import WeightReceiver, WeightUpdater, gathering
from weightwire.offload import Offload

PATIENCE = 60.0

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


SIDE, LAYERS = 1448, 12
"""Twelve tensors of 8 MB: a quarter of a bucket each."""


def large(size: int) -> nn.Module:
    module = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
    return fully_shard(module, mesh=init_device_mesh("cpu", (size,)))


def huge(size: int) -> nn.Module:
    """One tensor of 256 MB: eight buckets."""
    module = nn.Sequential(nn.Linear(8192, 8192, bias=False))
    return fully_shard(module, mesh=init_device_mesh("cpu", (size,)))


def rows(size: int) -> nn.Module:
    """One tensor of eight rows of 64 bytes."""
    return fully_shard(nn.Linear(16, 8, bias=False), mesh=init_device_mesh("cpu", (size,)))


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
                parameter.to_local().copy_(part_of(whole, mesh, placements))
            else:
                parameter.copy_(whole)


def part_of(whole: torch.Tensor, mesh: Any, placements: Any) -> torch.Tensor:
    """What this rank holds of a tensor. Nobody is asked."""
    if any(isinstance(placement, Partial) for placement in placements):
        return whole / mesh.size()
    if any(hasattr(placement, "split_factor") for placement in placements):  # FSDP2 over tensor parallelism
        placements = [Shard(placement.dim) for placement in placements]
        inner = distribute_tensor(whole, mesh["tp"], placements[1:], src_data_rank=None).to_local()
        return distribute_tensor(inner, mesh["dp"], placements[:1], src_data_rank=None).to_local()
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


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


def replicated_rows(size: int) -> nn.Module:
    """Two copies of everything, each sharded over two ranks."""
    module = Net()
    return fully_shard(module, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "dp")))


def fsdp_over_tp(size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    module = Net()
    module = parallelize_module(module, mesh["tp"], {"first": ColwiseParallel(), "fourth": RowwiseParallel()})
    return fully_shard(module, mesh=mesh["dp"])


def sums(size: int) -> nn.Module:
    """What nobody holds in boxes: parts that are yet to be added up."""
    module = columns(size)
    whole = module.third.weight.detach()
    part = DTensor.from_local(whole / size, init_device_mesh("cpu", (size,)), [Partial()], run_check=False)
    module.third.weight = nn.Parameter(part)
    return module


def wrong(module: nn.Module, value: float) -> list[str]:
    """Names of tensors whose part on this rank is not what the whole says."""
    other = Net()
    fill(other, value)
    names = []
    for (name, tensor), whole in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        if isinstance(tensor, DTensor):
            whole = part_of(whole, tensor.device_mesh, tensor.placements)
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
    """Bytes by which own memory grew at the most during the first push, seen every millisecond."""
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


def stop_at(bucket: int, sign: int) -> None:
    """This rank ends, or is stopped, when it is to deliver its part of a bucket: all have said that they are there."""
    deliver, delivered = gathering.Shards.deliver, [0]

    def patched(*args: Any) -> None:
        delivered[0] += 1
        if delivered[0] == bucket:
            os.kill(os.getpid(), sign)
        deliver(*args)

    gathering.Shards.deliver = patched  # type: ignore[method-assign]


def ahead(updater: WeightUpdater) -> list[tuple[str, int]]:
    """What happens, one after the other, while a sender reads eight buckets: it goes on with the next one only when
    the one after that has come, unasked."""
    begun, come, done = [0], [0], threading.Condition()
    collect = gathering.Shards.collect
    events: list[tuple[str, int]] = []

    def patched(*args: Any) -> Any:
        begun[0] += 1
        found = collect(*args)
        with done:
            come[0] += 1
            done.notify_all()
        return found

    def stage(payload: Any, to: Any, deadline: Any) -> None:
        out = torch.empty(64, dtype=torch.uint8)
        for number, (start, stop) in enumerate(payload.buckets(64)):
            payload.pack(out, start, stop)
            with done:
                wanted = min(number + 2, 8)
                assert done.wait_for(lambda: come[0] >= wanted, 30), f"after {number}, {come[0]} have come"  # noqa: B023
            events.append(("read", number))
            events.append(("begun", begun[0]))
        assert payload.header

    gathering.Shards.collect = patched  # type: ignore[method-assign]
    updater._sender.stage = stage  # type: ignore[method-assign]
    updater.push()
    return events


class Counted:
    """A store that counts what is asked of it."""

    def __init__(self, store: Any) -> None:
        self.store, self.calls = store, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self.store, name)


def join(where: str, rank: int, size: int) -> None:
    if where.startswith("tcp:"):
        store = dist.TCPStore("127.0.0.1", int(where[4:]), is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=size)


def rank_main(pipe: Connection, rank: int, size: int, store: str, make: Callable[[int], nn.Module]) -> None:
    torch.set_num_threads(1)
    join(store, rank, size)
    module = make(size)
    fill(module, 0.0)
    updater: WeightUpdater | None = None
    while True:
        command, *args = pipe.recv()
        try:
            if command == "open":
                endpoint, timeout, *options = args
                updater = WeightUpdater(endpoint, module, timeout=timeout, **(options[0] if options else {}))
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
                    answer = (type(exc).__name__, str(exc), getattr(exc, "phase", None), took, updater.version)
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
            elif command == "cut":  # pieces of so many bytes
                gathering.MOST = args[0]
                answer = None
            elif command == "stop":
                stop_at(*args)
                answer = None
            elif command == "ahead":
                assert updater is not None
                answer = ahead(updater) if rank == 0 else updater.push()
            elif command == "count":
                assert updater is not None
                assert updater._ranks is not None
                desk = updater._ranks._desk
                counted = desk._store = Counted(desk._store)
                desk._calls.put(None)  # the thread has the old one
                desk._thread = None
                updater.push()
                answer = counted.calls
            elif command == "close":
                assert updater is not None
                updater.close()
                answer = None
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
    def __init__(self, size: int, make: Callable[[int], nn.Module], store: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "weightwire.receiver"])
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=rank_main, args=(there, rank, size, store, make), daemon=True)
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

    def make(size: int, module: Callable[[int], nn.Module], store: str = "") -> Trainer:
        made.append(Trainer(size, module, store or str(tmp_path / f"store{len(made)}")))
        return made[-1]

    yield make
    for trainer in made:
        trainer.end()


def assert_exact(receiver: WeightReceiver, value: float) -> None:
    state = expected(value)
    assert receiver.weights.keys() == state.keys()
    for name, tensor in receiver.weights.items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize(
    ("make", "size", "cut"),
    [
        (fsdp, 2, 0),
        (fsdp, 2, 24),  # bytes of a piece: one row, or less
        pytest.param(tensor_parallel, 2, 0, marks=pytest.mark.soak),
        pytest.param(columns, 2, 24, marks=pytest.mark.soak),
        (sums, 2, 24),  # and columns
        pytest.param(fsdp, 3, 40, marks=pytest.mark.soak),
        pytest.param(replicated_rows, 4, 24, marks=pytest.mark.soak),
        (fsdp_over_tp, 4, 24),
    ],
)
def test_ranks_send_whole_tensors_to_two_workers(trainers: Any, make: Any, size: int, cut: int) -> None:
    trainer = trainers(size, make)
    if cut:
        trainer.ask("cut", cut)
    endpoints = trainer.ask("open", "ipc", PATIENCE)
    assert len(set(endpoints)) == 1
    with (
        WeightReceiver(endpoints[0], worker="copies", timeout=PATIENCE) as one,
        WeightReceiver(endpoints[0], worker="aliases", apply="alias", timeout=PATIENCE) as two,
    ):
        assert trainer.ask("workers", 2) == [["aliases", "copies"]] * size
        for number in range(1, 4):
            told = trainer.ask("push", float(number), {})
            assert told == [(number, {"copies": "staged", "aliases": "staged"}, told[0][2])] * size
            for receiver in (one, two):
                assert receiver.pull() == number
                assert_exact(receiver, float(number))


def test_shards_are_cast_and_scaled_as_whole_tensors_are(trainers: Any) -> None:
    trainer = trainers(2, fsdp)
    trainer.ask("cut", 24)
    for cast in ("bfloat16", "float8_e4m3fn*scale"):
        endpoint, _ = trainer.ask("open", "ipc", PATIENCE, {"cast": cast, "digest": "on"})
        plain = Net()
        fill(plain, 1.0)  # the largest magnitude is in the last piece, and held by the other rank
        with (
            WeightUpdater("ipc", plain, cast=cast) as other,
            WeightReceiver(other.endpoint, timeout=PATIENCE) as want,
            WeightReceiver(endpoint, timeout=PATIENCE) as got,
        ):
            other.push()
            trainer.ask("push", 1.0, {})
            assert want.pull() == got.pull() == 1
            assert got.weights.keys() == want.weights.keys()
            for name, tensor in got.weights.items():
                assert tensor.dtype == want.weights[name].dtype
                assert torch.equal(tensor.flatten().view(torch.uint8), want.weights[name].flatten().view(torch.uint8))
        trainer.ask("close")


def test_what_comes_next_is_gathered_while_a_bucket_is_sent_and_no_more(trainers: Any) -> None:
    trainer = trainers(2, rows)
    trainer.ask("cut", 64)
    trainer.ask("open", "ipc", PATIENCE)
    events, _ = trainer.ask("ahead")
    assert events == [event for n in range(8) for event in (("read", n), ("begun", min(n + 2, 8)))]


def test_how_often_the_store_is_asked_has_nothing_to_do_with_how_many_tensors_there_are(trainers: Any) -> None:
    """Net has eight sharded tensors, and a push two words that are answered."""
    trainer = trainers(2, fsdp)
    trainer.ask("open", "ipc", PATIENCE)
    trainer.ask("push", 1.0, {})
    first, second = trainer.ask("count")
    assert first <= 3 * 3 + 3 * 2  # said and read (wait, get), one outcome; deleted
    assert second <= 3 * 2 + 2 * 3  # read; answered


# -- a rank that is late, stopped, gone --------------------------------------------------------------------------------


def store_main(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.poll(None)


@pytest.fixture
def hosted() -> Iterator[tuple[Any, str]]:
    """A store in a process of its own, and where it is."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=store_main, args=(there,), daemon=True)
    process.start()
    assert here.poll(PATIENCE)
    yield process, f"tcp:{here.recv()}"
    process.kill()
    process.join(10)
    here.close()
    there.close()


@pytest.fixture(params=["ipc", "ray"])
def place(request: pytest.FixtureRequest) -> str:
    """Where two workers take what a sharded trainer pushes."""
    if request.param == "ray":
        return f"ray?address={request.getfixturevalue('ray_cluster')}"
    return "ipc"


@pytest.fixture
def two_workers() -> Iterator[Callable[[str], list[WeightReceiver]]]:
    made: list[WeightReceiver] = []

    def make(endpoint: str) -> list[WeightReceiver]:
        made.extend(WeightReceiver(endpoint, worker=f"w{n}", timeout=PATIENCE) for n in range(2))
        return made

    yield make
    for receiver in made:
        receiver.close()


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.soak), "when its part is due"])
def test_a_rank_that_is_stopped_is_named_and_all_are_in_step_again(
    trainers: Any, place: str, two_workers: Any, hosted: Any, when: str
) -> None:
    trainer = trainers(2, fsdp, hosted[1])  # who is stopped could hold the lock of a store in a file
    trainer.ask("cut", 64)
    (endpoint, _) = trainer.ask("open", place, PATIENCE)
    workers = two_workers(endpoint)
    trainer.ask("push", 1.0, {})
    assert [worker.wait(1) for worker in workers] == [1, 1]
    if when == "before":
        os.kill(trainer.processes[1].pid, signal.SIGSTOP)
    else:
        trainer.tell("stop", 2, signal.SIGSTOP, ranks=[1])
        trainer.answers([1])
    trainer.tell("push", 2.0, {"timeout": 2.0})
    ((kind, text, phase, took, version),) = trainer.answers([0])
    assert (kind, phase, version) == ("WaitTimeout", "extract", 1)
    assert "rank 1 of the trainer" in text
    assert took < 10
    for worker in workers:
        assert worker.pull(0.0) is None
        assert_exact(worker, 1.0)
    os.kill(trainer.processes[1].pid, signal.SIGCONT)
    assert trainer.answers([1])[0][:2] == (kind, text)
    first, second = trainer.ask("push", 3.0, {})
    assert first == second
    for worker in workers:
        assert worker.wait(first[0]) == first[0]
        assert_exact(worker, 3.0)


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


@pytest.mark.parametrize("when", ["before", pytest.param("when its part is due", marks=pytest.mark.soak)])
def test_a_dead_rank_is_named_and_the_old_version_acts(trainers: Any, place: str, two_workers: Any, when: str) -> None:
    trainer = trainers(2, fsdp)
    trainer.ask("cut", 64)
    (endpoint, _) = trainer.ask("open", place, PATIENCE)
    workers = two_workers(endpoint)
    trainer.ask("push", 1.0, {})
    assert [worker.wait(1) for worker in workers] == [1, 1]
    if when == "before":
        trainer.processes[1].kill()
        trainer.processes[1].join(10)
        trainer.tell("push", 2.0, {"timeout": 2.0}, ranks=[0])
    else:
        trainer.tell("stop", 2, signal.SIGKILL, ranks=[1])
        trainer.answers([1])
        trainer.tell("push", 2.0, {"timeout": 2.0})
    ((kind, text, phase, took, version),) = trainer.answers([0])
    assert kind == "WaitTimeout" if when == "before" else kind in ("WaitTimeout", "PushError")
    assert "rank 1 of the trainer" in text
    assert (phase, version) == ("extract", 1)
    assert took < 10
    for worker in workers:
        assert worker.pull(0.0) is None
        assert_exact(worker, 1.0)


# -- the store through which the ranks speak ---------------------------------------------------------------------------


def test_a_store_that_is_lost_is_told_from_a_rank_that_is_silent(trainers: Any, hosted: Any) -> None:
    process, place = hosted
    trainer = trainers(2, columns, place)
    trainer.ask("open", "ipc", PATIENCE)
    trainer.ask("push", 1.0, {})
    process.kill()
    process.join(10)
    for kind, text, phase, took, version in trainer.ask("push", 2.0, {"timeout": 20.0}):
        assert (kind, phase, version) == ("PushError", "extract", 1)
        assert f"TCPStore at 127.0.0.1:{place[4:]}" in text
        assert "is lost" in text
        assert took < 10


def test_a_store_that_is_stopped_leaves_nobody_waiting(trainers: Any, hosted: Any) -> None:
    process, place = hosted
    trainer = trainers(2, columns, place)
    (endpoint, _) = trainer.ask("open", "ipc", PATIENCE)
    with WeightReceiver(endpoint, timeout=PATIENCE) as receiver:
        trainer.ask("push", 1.0, {})
        os.kill(process.pid, signal.SIGSTOP)
        for kind, text, phase, took, version in trainer.ask("push", 2.0, {"timeout": 1.0}):
            assert (kind, phase, version) == ("WaitTimeout", "extract", 1)
            assert f"TCPStore at 127.0.0.1:{place[4:]}" in text
            assert took < 12
        os.kill(process.pid, signal.SIGCONT)
        first, second = trainer.ask("push", 3.0, {})
        assert first == second
        receiver.wait(first[0])
        assert_exact(receiver, 3.0)


def test_when_the_first_rank_has_closed_the_others_know_it_at_once(trainers: Any) -> None:
    trainer = trainers(2, columns)
    trainer.ask("open", "ipc", PATIENCE)
    trainer.ask("push", 1.0, {})
    trainer.tell("close", ranks=[0])
    trainer.answers([0])
    for _ in range(2):
        trainer.tell("push", 2.0, {}, ranks=[1])
        ((kind, text, _, took, version),) = trainer.answers([1])
        assert (kind, version) == ("ClosedError", 1)
        assert "rank 0 of the trainer" in text
        assert took < 10 < PATIENCE
    trainer.tell("close", ranks=[1])
    trainer.answers([1])


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
        pytest.param("ipc", columns, "copy", marks=pytest.mark.soak),
        pytest.param("ray", fsdp, "copy", marks=pytest.mark.soak),
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


@pytest.mark.parametrize(
    ("backend", "make", "buckets"),
    [
        pytest.param("ipc", large, 2, marks=pytest.mark.soak),
        ("ipc", huge, 2),
        pytest.param("nccl?keep=false", huge, 2 + 4, marks=pytest.mark.soak),  # and the four that it sends from
        pytest.param("ray", huge, 2 * 2, marks=pytest.mark.soak),  # whose buckets are twice as large
    ],
)
def test_no_more_than_two_buckets_are_held_beside_the_shards(
    trainers: Any, request: pytest.FixtureRequest, backend: str, make: Any, buckets: int
) -> None:
    if backend == "ray":
        backend += f"?address={request.getfixturevalue('ray_cluster')}"
    trainer = trainers(2, make)
    (endpoint, _) = trainer.ask("open", backend, PATIENCE)
    with WeightReceiver(endpoint, timeout=PATIENCE) as receiver:
        trainer.ask("workers", 1)
        first, second = trainer.ask("peak")
        receiver.wait(1)
        last = list(receiver.weights.values())[-1]
    assert first < buckets * 32 * 2**20 < last.numel() * 4 * len(receiver.weights)
    assert second < 32 * 2**20  # what it sends
    assert last.flatten()[-1] == 100 * (len(receiver.weights) - 1) + last.numel() - 1


@pytest.mark.parametrize("to", [pytest.param("cpu", marks=pytest.mark.soak), "disk"])
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
