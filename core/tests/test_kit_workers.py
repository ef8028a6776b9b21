from __future__ import annotations

import os
import signal

import psutil
import pytest

from weightwire.testing.body import Usage
from weightwire.testing.rig import interrupted, took
from weightwire.testing.workers import LocalWorker, ProcessWorker, Worker, WorkerGone, until


@pytest.mark.parametrize("kind", [LocalWorker, ProcessWorker])
def test_orders_and_answers(kind: type[Worker]) -> None:
    worker = kind("w")
    try:
        assert (worker.do("pid") == os.getpid()) == (kind is LocalWorker)
        assert isinstance(worker.usage(), Usage)
        with pytest.raises(AssertionError, match="opened no receiver"):
            worker.pull()
        with pytest.raises(AttributeError):
            worker.do("no_such_order")
        assert isinstance(worker.usage(), Usage), "an error is an answer, not the end"
    finally:
        worker.end()
        worker.end()


def test_kill_stop_and_cont() -> None:
    worker = ProcessWorker("w")
    worker.stop()
    pending = worker.start("pid")
    with pytest.raises(AssertionError, match="did not answer"):
        pending.result(0.05)
    worker.cont()
    assert worker.process.status() != psutil.STATUS_STOPPED
    worker.kill()
    with pytest.raises(WorkerGone):
        worker.do("pid")
    worker.end()


def test_a_stopped_worker_is_ended() -> None:
    worker = ProcessWorker("w")
    worker.stop()
    with took(at_most=8.0):
        worker.end()
    assert not psutil.pid_exists(worker.pid)


def test_a_forked_child_outlives_its_worker_until_the_end() -> None:
    worker = ProcessWorker("w")
    child = psutil.Process(worker.fork())
    worker.kill()
    assert child.is_running()
    worker.end()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child is gone")


def test_environment_reaches_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ProcessWorker("first")  # the fork server runs from here on at the latest
    monkeypatch.setenv("WEIGHTWIRE_JOB", "late news")
    second = ProcessWorker("second")
    try:
        assert second.do("environment", "WEIGHTWIRE_JOB") == "late news"
        assert first.do("environment", "WEIGHTWIRE_JOB") != "late news"
    finally:
        first.end()
        second.end()


def test_interrupted() -> None:
    with took(at_most=2.0):
        assert interrupted(signal.pause, after=0.05)
    assert not interrupted(lambda: None, after=10.0)
