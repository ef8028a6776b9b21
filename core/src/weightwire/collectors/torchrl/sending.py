"""The trainer's end of one model: an updater, and which of its workers TorchRL means by a number."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from weightwire.collectors.torchrl.host import as_one
from weightwire.errors import (
    ClosedError,
    PushError,
    UnknownWorkerError,
    WaitTimeout,
    WeightwireError,
    WorkerLostError,
)
from weightwire.hookspecs import hookimpl
from weightwire.transport import Deadline
from weightwire.updater import WeightUpdater

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.report import PushReport
    from weightwire.weights.names import Cast, Rename, Select

__all__ = ["Sending", "ids_of"]

logger = logging.getLogger(__name__)

STEP = 0.25
"""Seconds. Waits for workers are cut into steps, in case one leaves while another joins."""


class Sending:
    """Pushes for TorchRL.

    ``find`` says which workers, of names and process ids, are meant by an index. An index is *met* once one of them has
    joined: from then on, whether it is there is the updater's to tell.
    """

    def __init__(
        self,
        endpoint: str | Mapping[str, Any] | Endpoint,
        weights: Any,
        find: Callable[[int, Mapping[str, int]], list[str]],
        *,
        wait: str,
        timeout: float,
        hint: str,
        select: Select = None,
        rename: Rename = None,
        cast: Cast = None,
    ) -> None:
        if wait not in ("staged", "applied"):
            raise ValueError(f"wait is {wait!r}; it is 'staged' or 'applied'")
        self._joined = _Joined()
        self.updater = WeightUpdater(
            endpoint, weights, select=select, rename=rename, cast=cast, timeout=timeout, observers=[self._joined]
        )
        self.source = weights
        self._find = find
        self._wait = wait
        self._hint = hint  # what to do about a worker that never joins

    def begin(self) -> None:
        """Make the version with which workers begin, who are not there yet."""
        self._joined.pids.clear()
        self.updater.push(wait="none", on_lost="drop")  # lost are those of a collector that was here before

    def push(self, weights: Any, ids: Iterable[int] | None, *, count: int) -> PushReport:
        """One version to the workers ``ids``, or to all of ``count`` (0 where nobody knows how many there are to be),
        once each of them has been there; or one to each worker, where ``weights`` is a mapping from index to weights.
        """
        if weights is None and self.source is None:
            raise ValueError(
                f"the collector has no weights of its own for {self.updater.endpoint}: say which to push, "
                "update_policy_weights_(policy)"
            )
        if isinstance(weights, dict) and weights and all(isinstance(key, int) for key in weights):
            if ids is not None:
                raise ValueError("weights for each worker already say who gets them: leave out worker_ids")
            return self._push_each(weights, count)
        self._meet(range(count) if ids is None else ids, count)
        names = None if ids is None else self._names(ids)
        if names is None and self._joined.pids and not self.updater.workers:
            raise ClosedError(
                f"no worker is left at {self.updater.endpoint}: the collector has been shut down, or died"
            )
        return self.updater.push(weights, wait=self._wait, workers=names)

    def _push_each(self, weights: Mapping[int, Any], count: int) -> PushReport:
        """To each worker its own. Who is named is checked before anything is sent; then all are tried, and one error
        tells of those that failed."""
        self._meet(weights, count)
        self._names(weights)
        reports, failed = [], {}
        for worker, each in weights.items():
            try:
                reports.append(self.updater.push(each, wait=self._wait, workers=self._names([worker])))
            except WeightwireError as exc:
                failed[f"worker {worker}"] = exc
        if failed:
            raise as_one(
                failed, [f"worker {worker} was updated" for worker in weights if f"worker {worker}" not in failed]
            )
        return reports[-1]

    def close(self) -> None:
        """Say goodbye. That workers were ended with their collector is no failure; what else they had to say is
        logged."""
        try:
            self.updater.close()
        except WorkerLostError as exc:
            logger.debug("%s", exc)
        except PushError as exc:
            logger.warning("%s", exc)

    def versions(self) -> dict[str, int]:
        """Worker name -> number of the version that it has acknowledged as acting."""
        return {name: info.version for name, info in self.updater.workers.items()}

    def _names(self, ids: Iterable[int]) -> list[str]:
        workers = {name: info.pid for name, info in self.updater.workers.items()}
        names: list[str] = []
        for worker in ids:
            found = self._find(worker, workers)
            if not found:
                gone = "has left or was lost" if self._find(worker, self._joined.pids) else "is unknown"
                raise UnknownWorkerError(
                    f"worker_ids names {worker}, which {gone} at {self.updater.endpoint}; there: {_listed(workers)}"
                )
            names += found
        return names

    def _meet(self, expected: Iterable[int], count: int) -> None:
        """Wait until each has joined once: who is not there yet could not be waited for by a push."""
        deadline = Deadline.after(self.updater.timeout)
        strangers = set(expected)
        unknown = sorted(worker for worker in strangers if worker < 0 or (count and worker >= count))
        if unknown:
            there = f"0 to {count - 1}" if count else "counted from 0"
            raise UnknownWorkerError(f"worker_ids names {', '.join(map(str, unknown))}: the workers are {there}")
        while True:
            workers = self.updater.workers  # the updater listens
            strangers = {worker for worker in strangers if not self._find(worker, self._joined.pids)}
            if not strangers:
                return
            if deadline.expired:
                missing = ", ".join(map(str, sorted(strangers)))
                raise WaitTimeout(
                    f"waited {self.updater.timeout:.3g} s for worker {missing} to join {self.updater.endpoint}; there: "
                    f"{_listed(workers)}. Its process failed to start, or nothing there receives: {self._hint}",
                    phase="wait",
                    worker=missing,
                )
            with suppress(WaitTimeout):
                self.updater.wait_for_workers(len(workers) + 1, timeout=deadline.sooner(STEP).remaining)


class _Joined:
    """Hears of everybody who ever joined, those who are lost again included: name -> process id."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}

    @hookimpl
    def weightwire_worker_joined(self, worker: str, pid: int) -> None:
        self.pids[worker] = pid


def _listed(workers: Iterable[str]) -> str:
    return ", ".join(sorted(workers)) or "nobody"


def ids_of(worker_ids: Any, devices: Any) -> list[int] | None:
    """TorchRL's ``worker_ids``: an index, a device, or a list of either; ``devices`` are those of the workers."""
    if worker_ids is None:
        return None
    if not isinstance(worker_ids, (list, tuple, set, frozenset, range)):
        worker_ids = [worker_ids]
    ids: list[int] = []
    for item in worker_ids:
        if isinstance(item, int):
            ids.append(item)
            continue
        found = [n for n, device in enumerate(devices or ()) if device is not None and device == item]
        if not found:
            raise UnknownWorkerError(
                f"worker_ids names {item!r}; it takes indices of workers, or devices that they use"
            )
        ids += found
    if not ids:
        raise UnknownWorkerError("worker_ids names nobody; leave it out to update every worker")
    return ids
