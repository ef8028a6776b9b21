"""Nothing grows: file descriptors, threads, shared memory and resident memory stay flat."""

from __future__ import annotations

import pytest
import torch

from weightwire.errors import ApplyError, RefusedError
from weightwire.testing.body import Usage
from weightwire.testing.rig import Rig
from weightwire.testing.states import brittle, counters, fill
from weightwire.testing.suites.base import Cases
from weightwire.testing.workers import ProcessWorker, Worker
from weightwire.updater import WeightUpdater

__all__ = ["LeakCases"]

SIZE = 16384  # elements: 0.6 MB a version, so that 50 that leak are 30 MB
SLACK = 12 << 20
"""Bytes by which resident memory may wander without a leak."""


class LeakCases(Cases):
    def test_a_thousand_pushes_of_which_fifty_fail(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w", brittle, 0, 6, SIZE)
        updater.wait_for_workers(1)
        state = counters(0, 6, SIZE)
        for round_ in range(6):
            _nineteen_pushes_and_a_failure(updater, worker, state, round_)
        before = _usage(worker)
        for round_ in range(50):
            _nineteen_pushes_and_a_failure(updater, worker, state, round_)
        _flat(before, _usage(worker))

    def test_versions_that_nobody_takes(self, rig: Rig) -> None:
        """A worker that is there and never pulls costs what the newest versions take, however many there were."""
        updater = rig.updater()
        rig.worker("busy", counters, 0, 6, SIZE)
        updater.wait_for_workers(1)
        before: list[Usage] = []
        for version in range(1, 61):
            updater.push(counters(version, 6, SIZE))
            if version == 10:
                before.append(Usage.now())
        _flat(before, [Usage.now()])

    def test_opening_and_closing(self, rig: Rig) -> None:
        before: list[Usage] = []
        for round_ in range(33):
            endpoint = rig.make_endpoint()
            with rig.updater(endpoint=endpoint) as updater, rig.receiver(counters(0), endpoint=endpoint) as receiver:
                updater.push(counters(1))
                receiver.pull()
            del updater, receiver
            if round_ == 2:
                rig.forget()
                before.append(Usage.now())
        rig.forget()
        _flat(before, [Usage.now()])

    def test_workers_come_and_go(self, rig: Rig) -> None:
        updater = rig.updater()
        updater.push(counters(1, 6, SIZE))
        before: list[Usage] = []
        for round_ in range(23):
            worker = rig.worker(f"w{round_}", counters, 0, 6, SIZE)
            worker.pull()
            if isinstance(worker, ProcessWorker) and round_ % 2:
                worker.kill()
            worker.end()
            updater.push(counters(updater.version + 1, 6, SIZE), on_lost="drop")
            if round_ == 2:
                before.append(Usage.now())
        updater.push(counters(updater.version + 1, 6, SIZE), on_lost="drop")
        _flat(before, [Usage.now()])


def _nineteen_pushes_and_a_failure(
    updater: WeightUpdater, worker: Worker, state: dict[str, torch.Tensor], round_: int
) -> None:
    following = worker.follow(updater.version + 19)
    for _ in range(19):
        fill(state, updater.version + 1)
        updater.push(state, wait="applied")
    following.result()
    if round_ % 3 == 0:
        with pytest.raises(ZeroDivisionError):
            updater.push(lambda: 1 // 0)
    elif round_ % 3 == 1:
        with pytest.raises(RefusedError):
            updater.push({**state, "layer0.weight": torch.zeros(SIZE + 1)})
    else:
        worker.do("arm", "layer3.weight")
        pulling = worker.start("pull", 10.0)
        with pytest.raises(ApplyError):
            updater.push(state, wait="applied")
        with pytest.raises(ApplyError):
            pulling.result()
        worker.do("arm", None)


def _usage(worker: Worker) -> list[Usage]:
    return [Usage.now(), worker.usage()]


def _flat(before: list[Usage], after: list[Usage]) -> None:
    for was, now in zip(before, after):
        assert now.fds <= was.fds, f"file descriptors leak: {was} -> {now}"
        assert now.threads <= was.threads, f"threads leak: {was} -> {now}"
        assert now.shared <= was.shared, f"shared memory leaks: {was} -> {now}"
        assert now.rss <= was.rss + SLACK, f"resident memory leaks: {was} -> {now}"
