"""What lies in Ray's object store, and where."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import ray
import torch
from ray._private import state  # the figure that `ray status` shows has no public function

from weightwire import WeightReceiver, WeightUpdater
from weightwire.testing.states import counters, snapshot
from weightwire.testing.workers import until
from weightwire.weights.arrays import array_of, tensor_of

MB = 1 << 20


def used() -> int:
    """Bytes of primary copies in the stores of all nodes."""
    nodes = ray.nodes()
    total = sum(node["Resources"].get("object_store_memory", 0) for node in nodes)
    free = sum(node.get("object_store_memory", 0) for node in state.available_resources_per_node().values())
    return int(total - free)


@pytest.mark.parametrize("apply", ["copy", "alias"])
def test_the_store_stays_flat(place: str, updater: WeightUpdater, hire: Callable[..., Any], apply: str) -> None:
    """40 pushes of 25 MB: 1 GB in a store of half a GB, without spilling."""
    size = 1_000_000
    workers = [hire(place, f"w{i}", 4, size, apply=apply) for i in range(2)]
    updater.wait_for_workers(2)
    before, most = used(), 0
    for version in range(1, 41):
        updater.push(counters(version, 4, size))
        ray.get([worker.wait.remote(version) for worker in workers], timeout=30)
        most = max(most, used() - before)
    nbytes = sum(tensor.nbytes for tensor in counters(0, 4, size).values())
    assert most <= 6 * nbytes, "the figure lags behind, by some tenths of a second"
    until(lambda: used() - before <= 1.5 * nbytes, "only the newest version is left")
    updater.close()
    until(lambda: used() <= before, "nothing is left")


@pytest.mark.soak
def test_two_hundred_pushes_of_a_hundred_megabytes_to_four_actors(place: str, updater: WeightUpdater) -> None:
    state_ = {f"t{i}": torch.full((2_500_000,), 0.0) for i in range(10)}
    workers = [Owning.remote(place, f"w{i}") for i in range(4)]
    updater.wait_for_workers(4)
    before, seen = used(), []
    for version in range(1, 201):
        for tensor in state_.values():
            tensor.fill_(version)
        updater.push(state_)
        assert ray.get([worker.wait.remote(version) for worker in workers], timeout=60) == [float(version)] * 4
        seen.append(used() - before)
    assert max(seen[100:]) <= max(seen[:100])
    assert max(seen) <= 400 * MB
    for worker in workers:
        ray.kill(worker)


@ray.remote(num_cpus=0)
class Owning:
    """A worker whose receiver owns its weights."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.receiver = WeightReceiver(endpoint, worker=name, timeout=60)

    def wait(self, version: int) -> float:
        self.receiver.wait(version)
        (value,) = {float(tensor[0]) for tensor in self.receiver.weights.values()}
        return value


def test_large_states_go_in_several_buckets(place: str, opened: Callable[[Any], Any]) -> None:
    updater = opened(WeightUpdater(f"{place}?bucket=1MiB", timeout=20))
    receiver = opened(WeightReceiver(place))
    sent = {
        "large": torch.randn(3, 1 << 19),
        **{f"small{i}": torch.randn(1000) for i in range(600)},
        "bf16": torch.randn(777).bfloat16(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
    }
    updater.push(sent)
    receiver.pull()
    assert snapshot(receiver.weights) == snapshot(sent)


def test_memory_lives_as_long_as_the_tensors_over_it(place: str, updater: WeightUpdater) -> None:
    receiver = WeightReceiver(f"{place}?alias=force", apply="alias")
    updater.push({"a": torch.full((5 * MB,), 1.0)})
    receiver.pull()
    kept = receiver.weights["a"]
    assert kept.untyped_storage().nbytes() == kept.nbytes
    receiver.close()
    for version in range(2, 30):
        updater.push({"a": torch.full((5 * MB,), float(version))})
    assert (kept == 1).all()


# -- two nodes -------------------------------------------------------------------------------------------------------


def test_each_node_receives_a_version_once(
    far: Any, place: str, updater: WeightUpdater, hire: Callable[..., Any]
) -> None:
    """Four workers of another node: its store maps the payload once."""
    size = 2_000_000
    nbytes = sum(tensor.nbytes for tensor in counters(0, 4, size).values())
    workers = [hire(place, f"far{i}", 4, size, actor={"resources": {"far": 1}}, apply="alias") for i in range(4)]
    near = hire(place, "near", 4, size)
    updater.wait_for_workers(5, timeout=40)
    before = stored(far)
    updater.push(counters(1, 4, size))
    assert ray.get([worker.pull.remote(20.0) for worker in [*workers, near]], timeout=60) == [1] * 5
    moved = stored(far) - before
    assert nbytes <= moved < 1.5 * nbytes, f"{moved} bytes for a payload of {nbytes}"


def stored(node: Any) -> int:
    """Bytes of shared memory that a node's raylet, which is its store, has written to."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return sum(m.rss for m in raylet.memory_maps() if "plasma" in m.path or m.path.startswith("/dev/shm"))


def test_an_actor_of_another_node_dies(far: Any, place: str, updater: WeightUpdater, hire: Callable[..., Any]) -> None:
    victim = hire(place, "victim", actor={"resources": {"far": 1}})
    updater.wait_for_workers(1, timeout=40)
    updater.push(counters(1))
    assert ray.get(victim.pull.remote(20.0), timeout=30) == 1
    victim.die.remote()
    begun = time.monotonic()
    until(lambda: "victim" not in updater.workers, "the loss is seen")
    assert time.monotonic() - begun < 5


# -- memory ----------------------------------------------------------------------------------------------------------


def test_arrays_leave_a_tensors_storage_as_it_is() -> None:
    tensor = torch.arange(10, dtype=torch.uint8)
    array = array_of(tensor)
    assert array.tolist() == tensor.tolist()
    del array
    tensor.untyped_storage().resize_(0)


def test_read_only_arrays_become_tensors_without_a_warning() -> None:
    array = array_of(torch.arange(10, dtype=torch.uint8)).copy()
    array.flags.writeable = False
    tensor = tensor_of(array)
    del array
    assert tensor.tolist() == list(range(10))
    assert tensor_of(array_of(torch.empty(0, dtype=torch.uint8))).numel() == 0
