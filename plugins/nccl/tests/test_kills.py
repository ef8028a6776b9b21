"""Workers that are killed or stopped in the middle of a push: the others get the version, and the error says who."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weightwire.errors import WaitTimeout, WorkerLostError
from weightwire.testing import Rig
from weightwire.testing.rig import took
from weightwire.testing.states import counters
from weightwire.testing.workers import ProcessWorker
from weightwire.updater import WeightUpdater
from weightwire_nccl import rounds
from weightwire_nccl.source import Ring, Whole

SIZE = 400_000
"""Elements of each of six tensors: 14.4 MB, in buckets of 256 KiB."""
BUCKETS = 60
OPTIONS = "?bucket=256KiB"
Make = Callable[..., Rig]


class At:
    """Do something to a worker when a certain bucket is about to be sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bucket, self.act = -1, lambda: None
        for kind in (Whole, Ring):
            monkeypatch.setattr(kind, "bucket", self._wrapped(kind.bucket))

    def _wrapped(self, bucket: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(source: Any, number: int) -> Any:
            if number == self.bucket:
                self.bucket = -1
                self.act()
            return bucket(source, number)

        return wrapped


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> At:
    return At(monkeypatch)


def crew(rig: Rig, updater: WeightUpdater, *names: str) -> list[ProcessWorker]:
    found = [rig.victim(name, counters, 0, 6, SIZE, endpoint=updater.endpoint) for name in names]
    updater.wait_for_workers(len(updater.workers) if not names else len(names))
    return found


def killed(rig: Rig, updater: WeightUpdater, at: At, workers: dict[str, ProcessWorker], name: str, bucket: int) -> None:
    """Kill one in the middle of a push; the others must have that version, and the next."""
    version = updater.version + 1
    at.bucket, at.act = bucket, workers[name].kill
    with took(at_most=8.0), pytest.raises(WorkerLostError, match=name) as caught:
        updater.push(counters(version, 6, SIZE), timeout=8.0)
    assert at.bucket == -1, "it was killed"
    assert caught.value.worker == name
    del workers[name]
    with took(at_most=5.0):  # nothing of a group that failed is garbage: to destroy it would take the rest of its 8 s
        gc.collect()
    assert [worker.pull(10.0) for worker in workers.values()] == [version] * len(workers)
    assert {worker.seen() for worker in workers.values()} == {version}, "whole"
    with took(at_most=4.0):
        updater.push(counters(version + 1, 6, SIZE), timeout=8.0)
    assert [worker.pull(10.0) for worker in workers.values()] == [version + 1] * len(workers)


@pytest.mark.parametrize("keep", ["true", "false"])
@pytest.mark.parametrize("bucket", [0, 1, 40, BUCKETS - 1])
def test_killed_at_a_bucket(make_rig: Make, at: At, bucket: int, keep: str) -> None:
    rig = make_rig(f"{OPTIONS}&keep={keep}")
    updater = rig.updater()
    workers = dict(zip("abc", crew(rig, updater, *"abc")))
    updater.push(counters(1, 6, SIZE))
    killed(rig, updater, at, workers, "b", bucket)


@pytest.mark.parametrize("bucket", [0, 30])
def test_killed_while_workers_pass_on_parts(make_rig: Make, at: At, bucket: int) -> None:
    rig = make_rig(f"{OPTIONS}&algorithm=scatter_allgather")
    updater = rig.updater()
    workers = dict(zip("abc", crew(rig, updater, *"abc")))
    updater.push(counters(1, 6, SIZE))
    killed(rig, updater, at, workers, "c", bucket)


def stopped(updater: WeightUpdater, at: At, workers: dict[str, ProcessWorker], name: str, bucket: int) -> None:
    """Stop one in the middle of a push; the others must have that version, and the one that was stopped the next."""
    version = updater.version + 1
    others = [worker for other, worker in workers.items() if other != name]
    at.bucket, at.act = bucket, workers[name].stop
    following = [worker.follow(version) for worker in others]
    with took(at_most=9.0), pytest.raises(WaitTimeout, match=name) as caught:
        updater.push(counters(version, 6, SIZE), timeout=6.0)
    assert at.bucket == -1, "it was stopped"
    assert caught.value.worker == name
    assert [follower.result().versions[-1] for follower in following] == [version] * len(others)
    workers[name].cont()
    updater.push(counters(version + 1, 6, SIZE), timeout=10.0)
    assert [worker.pull(10.0) for worker in others] == [version + 1] * len(others)
    workers[name].do("wait", version + 1, 10.0)
    assert {worker.seen() for worker in workers.values()} == {version + 1}


@pytest.mark.parametrize("bucket", [0, 30])
def test_stopped_at_a_bucket(make_rig: Make, at: At, bucket: int) -> None:
    rig = make_rig(OPTIONS)
    updater = rig.updater()
    workers = dict(zip("abc", crew(rig, updater, *"abc")))
    updater.push(counters(1, 6, SIZE))
    stopped(updater, at, workers, "a", bucket)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_forty_kills(make_rig: Make, at: At) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, rig = random.Random(seed), make_rig(OPTIONS)
    updater = rig.updater()
    workers = dict(zip("abc", crew(rig, updater, *"abc")))
    updater.push(counters(1, 6, SIZE))
    for round_ in range(40):
        killed(rig, updater, at, workers, rng.choice(sorted(workers)), rng.randrange(BUCKETS))
        name = f"w{round_}"
        workers[name] = rig.victim(name, counters, 0, 6, SIZE, endpoint=updater.endpoint)
        assert workers[name].pull(10.0) == updater.version
        updater.wait_for_workers(3)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_twenty_stops(make_rig: Make, at: At) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, rig = random.Random(seed), make_rig(OPTIONS)
    updater = rig.updater()
    workers = dict(zip("abc", crew(rig, updater, *"abc")))
    updater.push(counters(1, 6, SIZE))
    for _ in range(20):
        stopped(updater, at, workers, rng.choice("abc"), rng.randrange(BUCKETS))


def test_stopped_before_a_push_costs_little(make_rig: Make) -> None:
    rig = make_rig(OPTIONS)
    updater = rig.updater()
    workers = dict(zip("ab", crew(rig, updater, *"ab")))
    updater.push(counters(1, 6, SIZE))
    workers["a"].stop()
    with took(at_most=rounds.READY + 2.0):
        updater.push(counters(2, 6, SIZE), wait="none")
    workers["b"].do("wait", 2, 10.0)
    with took(at_most=2.0):  # it is known to be silent
        updater.push(counters(3, 6, SIZE), wait="none")
    os.kill(workers["a"].pid, signal.SIGCONT)
    workers["a"].do("wait", 3, 10.0)
    assert workers["a"].seen() == 3


def test_a_source_that_fails_halfway_leaves_the_group_of_no_use(make_rig: Make, at: At) -> None:
    rig = make_rig(OPTIONS)
    updater = rig.updater()
    workers = crew(rig, updater, *"ab")
    updater.push(counters(1, 6, SIZE))

    def fail() -> None:
        raise torch.OutOfMemoryError("a gather failed")

    at.bucket, at.act = 20, fail
    with pytest.raises(torch.OutOfMemoryError, match="a gather failed"):
        updater.push(counters(2, 6, SIZE))
    assert updater.version == 1, "nothing was announced"
    assert updater.push(counters(2, 6, SIZE)).version == 2
    assert [worker.pull(10.0) for worker in workers] == [2, 2]
