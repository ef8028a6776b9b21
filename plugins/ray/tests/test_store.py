"""What lies in Ray's object store, and where."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import ray
import torch
from ray._private import state  # the figure that `ray status` shows has no public function
from ray.cluster_utils import Cluster

from weightwire import WeightReceiver, WeightUpdater
from weightwire.errors import BackendLoadError, DigestError, RefusedError, WorkerLostError
from weightwire.testing.rig import took
from weightwire.testing.states import counters, seen, snapshot
from weightwire.testing.workers import until
from weightwire.weights.digest import digest_of
from weightwire_ray.store import stretches_of

MB = 1 << 20
HERE = {"resources": {"node:__internal_head__": 0.001}}


def used() -> int:
    """Bytes of primary copies in the stores of all nodes."""
    nodes = ray.nodes()
    total = sum(node["Resources"].get("object_store_memory", 0) for node in nodes)
    free = sum(node.get("object_store_memory", 0) for node in state.available_resources_per_node().values())
    return int(total - free)


@pytest.mark.parametrize("apply", ["copy", pytest.param("alias", marks=pytest.mark.soak)])
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
@pytest.mark.timeout(600)
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
    updater = opened(WeightUpdater(f"{place}?bucket=1MiB", timeout=60))
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


@pytest.mark.parametrize(("option", "count"), [("", 4), ("?bucket=16MiB", 10)])
def test_a_large_version_is_a_few_objects(place: str, opened: Callable[[Any], Any], option: str, count: int) -> None:
    """Two for each of the hands that copy them: every one has its price in every process that is told of it."""
    updater = opened(WeightUpdater(f"{place}{option}", timeout=60))
    sent = {f"t{number}": torch.full((1 << 21,), float(number)) for number in range(20)}  # of 8 MiB each
    updater.push(sent)
    (item,) = updater._sender._shelf.kept()
    assert len(item.buckets) == count
    receiver = opened(WeightReceiver(place))
    receiver.pull()
    assert snapshot(receiver.weights) == snapshot(sent)


def test_a_thread_that_does_not_start_leaves_the_place_free(
    place: str, opened: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("weightwire-ray"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(BackendLoadError, match="new thread"):
        WeightUpdater(place, timeout=5)
    monkeypatch.undo()
    opened(WeightUpdater(place, timeout=5))


def test_bytes_that_leave_the_node_are_checked(
    place: str, opened: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``digest="auto"``; a worker of this node does not look at them again."""
    updater = opened(WeightUpdater(f"{place}?bucket=1MiB", timeout=60))
    near = opened(WeightReceiver(place, counters(0, 6, 1 << 17), worker="near"))
    far = opened(WeightReceiver(place, counters(0, 6, 1 << 17), worker="far"))
    far._receiver._engine.node = "elsewhere"
    updater.push(counters(1, 6, 1 << 17))
    assert [near.pull(30.0), far.pull(30.0)] == [1, 1]
    receipts = updater.wait(1).receipts
    state = list(counters(1, 6, 1 << 17).values())
    assert (receipts["near"].digest, receipts["far"].digest) == (
        "",
        digest_of(t.view(torch.uint8) for t in state).hex(),
    )
    monkeypatch.setattr("weightwire_ray.receiver.stretches_of", flipped)
    updater.push(counters(2, 6, 1 << 17))
    with pytest.raises(DigestError, match="version 2"):
        far.pull(30.0)
    assert (far.version, seen(far.weights)) == (1, 1)
    with pytest.raises(RefusedError, match="far"):
        updater.wait(2, workers=["far"])


def flipped(buckets: Any, layout: Any) -> Any:
    stretches = [stretch.copy() for stretch in stretches_of(buckets, layout)]
    stretches[-1][0] ^= 1
    return stretches


@pytest.mark.parametrize("asked", ["on", "off"])
def test_digests_are_for_all_or_for_nobody_where_that_was_asked_for(
    place: str, opened: Callable[[Any], Any], asked: str
) -> None:
    updater = opened(WeightUpdater(place, digest=asked, timeout=60))
    receivers = [opened(WeightReceiver(place, counters(0), worker=name)) for name in ("near", "far")]
    receivers[1]._receiver._engine.node = "elsewhere"
    updater.push(counters(1))
    assert [receiver.pull(30.0) for receiver in receivers] == [1, 1]
    receipts = updater.wait(1).receipts.values()
    assert [bool(receipt.digest) for receipt in receipts] == [asked == "on"] * 2


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
    near = hire(place, "near", 4, size, actor=HERE)
    updater.wait_for_workers(5, timeout=40)
    before = stored(far)
    updater.push(counters(1, 4, size))
    assert ray.get([worker.pull.remote(20.0) for worker in [*workers, near]], timeout=60) == [1] * 5
    moved = stored(far) - before
    print(f"{moved} bytes came to the other node for its four workers, of a payload of {nbytes}")
    assert nbytes <= moved < 1.5 * nbytes


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


@pytest.mark.soak
def test_a_node_is_lost(
    nodes: Cluster, place: str, updater: WeightUpdater, hire: Callable[..., Any], cluster: str
) -> None:
    node = nodes.add_node(num_cpus=1, object_store_memory=128 * MB, resources={"doomed": 2})
    try:
        doomed = [hire(place, name, actor={"resources": {"doomed": 1}}) for name in ("a", "b")]
        near = hire(place, "near", actor=HERE)
        updater.wait_for_workers(3)
        updater.push(counters(1))
        assert ray.get([worker.pull.remote(20.0) for worker in (*doomed, near)], timeout=60) == [1] * 3
    finally:
        nodes.remove_node(node, allow_graceful=False)
    following = near.follow.remote(2)
    with took(at_most=20.0), pytest.raises(WorkerLostError, match=r"'a'.*'b'|'b'.*'a'"):
        updater.push(counters(2), wait="applied", timeout=25.0)
    ray.get(following, timeout=60)
    assert set(updater.workers) == {"near"}
