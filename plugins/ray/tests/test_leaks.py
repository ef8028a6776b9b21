"""Nothing grows: counted without Ray's shared memory, of which more and more pages are touched as it goes round."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import ray

from weightwire import WeightReceiver, WeightUpdater
from weightwire.testing.states import counters, fill

SIZE = 16384  # elements: 0.6 MB a version
SLACK = 6 << 20


class Usage(NamedTuple):
    """What a process holds: descriptors, threads of Python's, bytes of memory of its own."""

    fds: int
    threads: int
    private: int

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        process = psutil.Process()
        memory = process.memory_info()
        return cls(process.num_fds(), threading.active_count(), memory.rss - memory.shared)

    def flat(self, before: Usage) -> bool:
        return self.fds <= before.fds and self.threads <= before.threads and self.private <= before.private + SLACK


def follow(receiver: WeightReceiver, until: int) -> None:
    while receiver.version < until:
        receiver.pull(5.0)


@ray.remote(num_cpus=0)
class Follower:
    def __init__(self, endpoint: str) -> None:
        self.receiver = WeightReceiver(endpoint, counters(0, 6, SIZE), worker="w", timeout=30)

    def follow(self, until: int) -> None:
        follow(self.receiver, until)

    def usage(self) -> Usage:
        return Usage.now()


def test_a_thousand_pushes(place: str, updater: WeightUpdater) -> None:
    worker = Follower.remote(place)
    updater.wait_for_workers(1)
    state = counters(0, 6, SIZE)
    before: list[Usage] = []
    for round_ in range(55):
        following = worker.follow.remote(updater.version + 20)
        for _ in range(20):
            fill(state, updater.version + 1)
            updater.push(state, wait="applied")
        ray.get(following, timeout=30)
        if round_ == 4:
            before = [Usage.now(), ray.get(worker.usage.remote())]
    after = [Usage.now(), ray.get(worker.usage.remote())]
    assert all(now.flat(was) for now, was in zip(after, before)), (before, after)
    ray.kill(worker)


def test_workers_that_come_and_go(place: str, updater: WeightUpdater, opened: Callable[[Any], Any]) -> None:
    state = counters(0, 6, SIZE)
    before = Usage.now()
    for round_ in range(60):
        fill(state, updater.version + 1)
        updater.push(state)
        with WeightReceiver(place, counters(0, 6, SIZE), worker=f"w{round_}") as receiver:
            receiver.pull()
        if round_ == 10:
            before = Usage.now()
    assert Usage.now().flat(before), (before, Usage.now())
