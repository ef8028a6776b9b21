"""Real pushes to real worker processes over ipc, and what a scrape says of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import prometheus_client
import psutil
import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from weightwire_prometheus import PORT, Prometheus

from weightwire import ApplyError, WeightUpdater, WorkerLostError

WORKER = Path(__file__).with_name("worker.py")
PATIENCE = 30.0
STATE = {"weight": torch.ones(1000), "bias": torch.ones(10)}
NBYTES = 4 * 1010


class Worker:
    def __init__(self, endpoint: str, *args: str, **environment: str) -> None:
        command = [sys.executable, str(WORKER), endpoint, *args]
        pipe, variables = subprocess.PIPE, {**os.environ, **environment}
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=variables)

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()

    def pull(self) -> int:
        self.say("pull")
        return int(self.hear())

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    """Starts workers, and ends them."""
    workers: list[Worker] = []

    def start(*args: str, **environment: str) -> Worker:
        workers.append(Worker(*args, **environment))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()


class Scrape:
    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        samples = [sample for family in families for sample in family.samples]
        self.values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.values.get((f"weightwire_{name}", frozenset(labels.items())))


def scrape(port: int | None) -> Scrape:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
        return Scrape(answer.read().decode())


def listening(pid: int) -> set[str]:
    """The addresses on which a process listens."""
    found = [connection for connection in psutil.net_connections("inet") if connection.pid == pid]
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_scrape_tells_of_pushes_workers_and_losses(start: Callable[..., Worker]) -> None:
    observer = Prometheus(CollectorRegistry(), port=0)
    with WeightUpdater("ipc://", STATE, observers=[observer], timeout=PATIENCE) as updater:
        place = updater.endpoint
        quick, slow = start(place, "quick"), start(place, "slow")
        updater.wait_for_workers(2)
        for _ in range(3):
            updater.push()
            assert quick.pull() == updater.version
            if updater.version == 1:
                assert slow.pull() == 1
        seen = scrape(observer.port)
        assert seen("pushes_total", endpoint=place) == 3
        assert seen("pushed_bytes_total", endpoint=place) == 3 * NBYTES
        assert seen("version", endpoint=place) == 3
        assert seen("workers", endpoint=place) == seen("worker_joins_total", endpoint=place) == 2
        assert seen("worker_losses_total", endpoint=place) == 0
        for worker, version in (("quick", 3), ("slow", 1)):
            assert seen("worker_version", endpoint=place, worker=worker) == version
            assert seen("worker_staged_version", endpoint=place, worker=worker) == 3
            assert seen("worker_lag_versions", endpoint=place, worker=worker) == 3 - version
        for phase in ("extract", "encode", "stage", "notify", "wait"):
            assert seen("push_seconds_count", endpoint=place, phase=phase) == 3
            took = seen("push_seconds_sum", endpoint=place, phase=phase)
            assert took is not None
            assert 0 < took < PATIENCE
        slow.process.kill()
        slow.process.wait()
        with pytest.raises(WorkerLostError, match="slow"):
            updater.wait(3, timeout=PATIENCE)
        updater.push()
        seen = scrape(observer.port)
        assert seen("worker_losses_total", endpoint=place) == 1
        assert seen("workers", endpoint=place) == 1
        assert seen("worker_version", endpoint=place, worker="slow") is None  # and not its last one for ever
        assert seen("worker_lag_versions", endpoint=place, worker="quick") == 1
    assert listening(os.getpid()) == {"127.0.0.1"}
    observer.close()
    observer.close()
    assert not listening(os.getpid())


def test_by_its_name_it_listens_only_where_the_environment_says_so(start: Callable[..., Worker]) -> None:
    port = free_port()
    with WeightUpdater("ipc://", STATE, observers=["prometheus"], timeout=PATIENCE) as updater:
        place = updater.endpoint
        told, quiet = start(place, "told", **{PORT: str(port)}), start(place, "quiet")
        updater.wait_for_workers(2)
        updater.push()
        assert told.pull() == quiet.pull() == 1
        mine = Scrape(prometheus_client.generate_latest().decode())
        assert mine("pushes_total", endpoint=place) == 1
        assert mine("worker_version", endpoint=place, worker="told") == 1
        seen = scrape(port)
        assert seen("acting_version", endpoint=place, worker="told") == 1
        assert seen("pulls_total", endpoint=place, worker="told", state="applied") == 1
        assert seen("pull_seconds_count", endpoint=place, phase="commit") == 1
        assert seen("pushes_total", endpoint=place) is None
        assert listening(told.process.pid) == {"127.0.0.1"}
        assert not listening(quiet.process.pid)


def test_a_worker_that_does_not_take_a_version(start: Callable[..., Worker]) -> None:
    registry = CollectorRegistry()
    observer = Prometheus(registry)
    assert observer.port is None
    with WeightUpdater("ipc://", STATE, observers=[observer], timeout=PATIENCE) as updater:
        brittle = start(updater.endpoint, "brittle", "brittle")
        updater.wait_for_workers(1)
        brittle.say("pull")
        with pytest.raises(ApplyError, match="a target that takes nothing"):
            updater.push(wait="applied")
        assert brittle.hear() == "0"
        labels = {"endpoint": updater.endpoint, "worker": "brittle"}
        seen = Scrape(prometheus_client.generate_latest(registry).decode())
        assert seen("worker_failures_total", **labels, state="failed") == 1
        assert seen("worker_state", **labels, state="refusing") == 1
        assert seen("worker_state", **labels, state="acting") == 0
        assert seen("worker_version", **labels) == 0
        assert seen("worker_lag_versions", **labels) is None  # it acts with none


def test_a_port_that_is_taken_is_an_error_of_who_chose_the_observer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment = {**os.environ, PORT: str(taken.getsockname()[1])}
        command = [sys.executable, str(WORKER), "ipc://nowhere", "worker"]
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    assert done.returncode == 1
    assert "BackendLoadError" in done.stderr
    assert "Address already in use" in done.stderr


def test_one_registry_takes_one_observer() -> None:
    registry = CollectorRegistry()
    Prometheus(registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Prometheus(registry)
