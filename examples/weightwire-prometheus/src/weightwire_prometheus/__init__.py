"""Weightwire's pushes, workers and losses as Prometheus metrics.

    updater = WeightUpdater("ipc://policy", policy, observers=["prometheus"])

The metrics are in ``prometheus_client.REGISTRY``, beside whatever else the process exports there. Nothing listens
unless it is asked to: by ``WEIGHTWIRE_PROMETHEUS_PORT=9400`` in the environment of a process that uses the observer by
its name, or by ``Prometheus(port=9400)``; and then on the loopback interface only.

An observer is a module with hooks, or an object with hooks. This is both: :class:`Prometheus` is the observer, and the
functions at the end of the module, which the entry point names, hand on to one of it for the whole process.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weightwire import PushReport, hookimpl, status
from weightwire.report import Receipt

__all__ = ["PORT", "Prometheus"]

PORT = "WEIGHTWIRE_PROMETHEUS_PORT"
"""The environment variable with the port to serve on, for who uses the observer by its name."""
LOOPBACK = "127.0.0.1"
SECONDS = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 60.0)
"""Bounds of the histograms: from a small push between two processes to a large model across a network."""
STATES = ("joined", "acting", "refusing", "stuck")
"""As in ``weightwire.WorkerInfo.state``."""
PATIENCE = 0.5
"""Seconds that a scrape waits for what the updaters of this process say of their workers."""


class Prometheus:
    """The observer.

    Args:
        registry: where the metrics go. Two observers with one registry are a ``ValueError``, as two metrics of one name
            are: give the same object to several updaters instead. Each metric has the label ``endpoint``.
        port: serve the registry on this port of the loopback interface; 0: a free one. ``None``: serve nothing.

    Attributes:
        port: the port that is served on.
    """

    def __init__(self, registry: CollectorRegistry = prometheus_client.REGISTRY, *, port: int | None = None) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"weightwire_{name}", text, ("endpoint", *labels), registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            labels = ("endpoint", "phase")
            return Histogram(f"weightwire_{name}_seconds", text, labels, buckets=SECONDS, registry=registry)

        # Where the trainer is.
        self.pushes = counter("pushes", "Versions that were pushed")
        self.bytes = counter("pushed_bytes", "Bytes that were pushed, once for all workers")
        self.push_seconds = seconds("push", "What a push took, by phase")
        self.version = Gauge(
            "weightwire_version", "The newest version that was pushed", ("endpoint",), registry=registry
        )
        # What fails later is in `weightwire_worker_state`, and in `weightwire_pulls_total` of the worker itself.
        self.failures = counter("worker_failures", "Versions that a push saw a worker fail to take", "worker", "state")
        self.losses = counter("worker_losses", "Workers that went without a goodbye")
        self.joins = counter("worker_joins", "Workers that joined, or came back")
        registry.register(_Workers(self))
        # Where a worker is.
        self.pulls = counter("pulls", "Versions that were pulled, by what became of them", "worker", "state")
        self.pull_seconds = seconds("pull", "What a pull took, by phase")
        self.acting = Gauge(
            "weightwire_acting_version",
            "The version that this process acts with",
            ("endpoint", "worker"),
            registry=registry,
        )
        self.there: defaultdict[str, set[str]] = defaultdict(set)  # endpoint -> workers, as the hooks have told
        self._server = None if port is None else prometheus_client.start_http_server(port, LOOPBACK, registry)
        self.port = None if self._server is None else self._server[0].server_port

    def close(self) -> None:
        """Stop serving. Idempotent; the registry stays as it is."""
        server, self._server = self._server, None
        if server is not None:
            server[0].shutdown()
            server[0].server_close()
            server[1].join()

    @hookimpl
    def weightwire_worker_joined(self, endpoint: str, worker: str) -> None:
        self.joins.labels(endpoint).inc()
        self.losses.labels(endpoint).inc(0)  # there from the beginning: rate() misses the first of a new series
        self.there[endpoint].add(worker)

    @hookimpl
    def weightwire_worker_lost(self, endpoint: str, worker: str, reason: str) -> None:
        if reason:
            self.losses.labels(endpoint).inc()
        self.there[endpoint].discard(worker)

    @hookimpl
    def weightwire_after_push(self, endpoint: str, report: PushReport) -> None:
        self.pushes.labels(endpoint).inc()
        self.bytes.labels(endpoint).inc(report.nbytes)
        self.version.labels(endpoint).set(report.version)
        for phase, took in report.seconds.items():
            self.push_seconds.labels(endpoint, phase).observe(took)
        for worker, receipt in report.receipts.items():
            if receipt.state in ("refused", "failed", "stuck"):
                self.failures.labels(endpoint, worker, receipt.state).inc()

    @hookimpl
    def weightwire_after_pull(self, endpoint: str, receipt: Receipt) -> None:
        self.pulls.labels(endpoint, receipt.worker, receipt.state).inc()
        if receipt.state == "applied":
            self.acting.labels(endpoint, receipt.worker).set(receipt.version)
        for phase, took in receipt.seconds.items():
            self.pull_seconds.labels(endpoint, phase).observe(took)


class _Workers(Collector):
    """What each worker has *now*, which no hook can say: asked for at each scrape, of the core's status.

    A worker that has left is not in it any more; where the core serves no status (not on Linux, or switched off), there
    is only the number of workers.
    """

    def __init__(self, observer: Prometheus) -> None:
        self._observer = observer

    def describe(self) -> list[Metric]:
        """For the registry, which would otherwise scrape us to learn our names."""
        return list(self._families().values())

    def collect(self) -> Iterator[Metric]:
        families = self._families()
        there = {endpoint: len(workers) for endpoint, workers in list(self._observer.there.items())}
        for updater in _status_of_this_process():
            endpoint = updater["endpoint"]
            if endpoint not in there:
                continue  # nobody has asked us to observe that one
            there[endpoint] = len(updater["workers"])
            for worker in updater["workers"]:
                labels = (endpoint, worker["name"])
                families["version"].add_metric(labels, worker["version"])
                families["staged"].add_metric(labels, worker["staged"])
                for state in STATES:
                    families["state"].add_metric((*labels, state), float(worker["state"] == state))
                if worker["lag"] is not None:
                    families["lag"].add_metric(labels, worker["lag"])
        for endpoint, count in there.items():
            families["workers"].add_metric((endpoint,), count)
        yield from families.values()

    def _families(self) -> dict[str, GaugeMetricFamily]:
        def family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"weightwire_{name}", text, labels=("endpoint", *labels))

        return {
            "workers": family("workers", "Workers that are there"),
            "version": family("worker_version", "The version that a worker acts with", "worker"),
            "staged": family("worker_staged_version", "The newest version that a worker could act with", "worker"),
            "state": family("worker_state", "1 for the state that a worker is in", "worker", "state"),
            "lag": family("worker_lag_versions", "How many versions a worker is behind", "worker"),
        }


def _status_of_this_process() -> list[dict[str, Any]]:
    if not status.supported():
        return []
    documents = [document for document in status.ask(PATIENCE) if document["pid"] == os.getpid()]
    return [updater for document in documents for updater in document["updaters"]]


# -- the observer that is installed under the name "prometheus" ------------------------------------------------------


class _Shared:
    """One for all updaters and receivers of this process: a metric can be in a registry only once."""

    lock = threading.Lock()
    observer: Prometheus | None = None


def shared() -> Prometheus:
    """The observer behind the name, made when it is first needed."""
    with _Shared.lock:
        if _Shared.observer is None:
            port = os.environ.get(PORT)
            _Shared.observer = Prometheus(port=int(port) if port else None)
        return _Shared.observer


@hookimpl
def weightwire_worker_joined(endpoint: str, worker: str) -> None:
    shared().weightwire_worker_joined(endpoint, worker)


@hookimpl
def weightwire_worker_lost(endpoint: str, worker: str, reason: str) -> None:
    shared().weightwire_worker_lost(endpoint, worker, reason)


@hookimpl
def weightwire_after_push(endpoint: str, report: PushReport) -> None:
    shared().weightwire_after_push(endpoint, report)


@hookimpl
def weightwire_after_pull(endpoint: str, receipt: Receipt) -> None:
    shared().weightwire_after_pull(endpoint, receipt)


if os.environ.get(PORT):
    shared()  # now, so that a port that is taken is an error of whoever chose the observer
