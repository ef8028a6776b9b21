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
from weightwire.errors import WeightwireError
from weightwire.testing.states import counters

STORE = 512 << 20
QUIET = {"log_to_driver": False, "configure_logging": False, "logging_level": "ERROR"}


@pytest.fixture(scope="session")
def nodes() -> Iterator[Cluster]:
    """A cluster of one node, to which this process is connected."""
    head = {"num_cpus": 4, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, **QUIET)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def cluster(nodes: Cluster) -> str:
    """Its address."""
    address: str = nodes.address
    return address


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
    return opened(WeightUpdater(place, timeout=20))


class Worker:
    """A worker in an actor: its methods are what the tests ask for."""

    def __init__(self, endpoint: str, name: str, tensors: int = 6, size: int = 512, **options: Any) -> None:
        self.policy = counters(0, tensors, size)
        self.receiver = WeightReceiver(endpoint, self.policy, worker=name, timeout=20, **options)

    def pull(self, timeout: float | None = None) -> int | None:
        return self.receiver.pull(timeout)

    def wait(self, version: int) -> int:
        return self.receiver.wait(version)

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


@pytest.fixture
def hire(cluster: str) -> Iterator[Callable[..., Any]]:
    """``hire(endpoint, name)``: a worker in an actor of its own, which ends with the test."""
    hired: list[Any] = []

    def hire(endpoint: str, name: str, *args: Any, actor: dict[str, Any] | None = None, **options: Any) -> Any:
        handle = ray.remote(Worker).options(**{"num_cpus": 0, **(actor or {})}).remote(endpoint, name, *args, **options)
        hired.append(handle)
        return handle

    yield hire
    for handle in hired:
        ray.kill(handle)
