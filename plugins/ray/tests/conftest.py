"""One small Ray cluster for all tests, and trainers and workers as its actors."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from weightwire import WeightReceiver, WeightUpdater
from weightwire.errors import UpdaterLostError, WaitTimeout, WeightwireError
from weightwire.testing.states import counters, seen
from weightwire_ray.conformance import STORE, cluster, nodes

__all__ = ["cluster", "nodes"]


@pytest.fixture(scope="module")
def far(nodes: Cluster) -> Iterator[Any]:
    """A second node, which the resource ``far`` leads to, until the end of the module."""
    node = nodes.add_node(num_cpus=2, object_store_memory=STORE // 2, resources={"far": 16})
    yield node
    nodes.remove_node(node)


@pytest.fixture
def place(cluster: str) -> str:
    """An endpoint that nobody uses yet."""
    return f"ray://test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def opened() -> Iterator[Callable[[Any], Any]]:
    """``opened(end)``: an end that is closed after the test."""
    ends: list[Any] = []

    def note(end: Any) -> Any:
        ends.append(end)
        return end

    yield note
    for end in reversed(ends):
        with contextlib.suppress(WeightwireError):  # what it still has to say is of no interest any more
            end.close(2.0)


@pytest.fixture
def updater(place: str, opened: Callable[[Any], Any]) -> WeightUpdater:
    return opened(WeightUpdater(place, timeout=60))


class Worker:
    """A worker in an actor: its methods are what the tests ask for."""

    def __init__(self, *place: Any, **options: Any) -> None:
        if place:  # so that it opens its receiver again when it is restarted
            self.open(*place, **options)

    def open(self, endpoint: str, name: str, tensors: int = 6, size: int = 512, **options: Any) -> None:
        self.policy = counters(0, tensors, size)
        self.receiver = WeightReceiver(endpoint, self.policy, worker=name, timeout=60, **options)

    def pull(self, timeout: float | None = None) -> int | None:
        return self.receiver.pull(timeout)

    def wait(self, version: int) -> int:
        return self.receiver.wait(version)

    def follow(self, until: int) -> int:
        """Look at the content again and again, until this version acts; how often."""
        looks = 0
        while self.receiver.version < until:
            with contextlib.suppress(WaitTimeout, UpdaterLostError):
                self.receiver.pull(1.0)
            assert seen(self.policy) == self.receiver.version
            looks += 1
        return looks

    def look(self) -> dict[str, Any]:
        r = self.receiver
        return {
            "ready": r.ready,
            "version": r.version,
            "run": r.run,
            "connected": r.connected,
            "closed": r.closed,
            "value": int(next(iter(self.policy.values()))[0]),
        }

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self.receiver.close()

    def die(self) -> None:
        os._exit(1)


@pytest.fixture(scope="session")
def idle(nodes: Cluster) -> Iterator[list[Any]]:
    """Actors that have no receiver at the moment: to start one takes seconds, most of them Ray's and torch's."""
    idle: list[Any] = []
    yield idle
    for handle in idle:
        ray.kill(handle)


@pytest.fixture
def hire(idle: list[Any]) -> Iterator[Callable[..., Any]]:
    """``hire(endpoint, name)``: a worker in an actor, which is an idle one unless ``actor`` has wishes."""
    hired: list[Any] = []
    fresh: list[Any] = []

    def hire(endpoint: str, name: str, *args: Any, actor: dict[str, Any] | None = None, **options: Any) -> Any:
        if actor is not None:
            handle = ray.remote(Worker).options(num_cpus=0, **actor).remote(endpoint, name, *args, **options)
            fresh.append(handle)
            return handle
        handle = idle.pop() if idle else ray.remote(Worker).options(num_cpus=0).remote()
        hired.append(handle)
        ray.get(handle.open.remote(endpoint, name, *args, **options), timeout=60)
        return handle

    yield hire
    for handle in hired:
        try:
            ray.get(handle.close.remote(), timeout=60)
            idle.append(handle)
        except ray.exceptions.RayError:  # it was to die in the test
            ray.kill(handle)
    for handle in fresh:
        ray.kill(handle)
