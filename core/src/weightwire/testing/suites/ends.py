"""Closing, exiting and taking over: in any order, without a hang, and everybody knows that it is over."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from weightwire.errors import ClosedError, EndpointInUseError, PushError, WeightwireError
from weightwire.receiver import WeightReceiver
from weightwire.testing.rig import Rig, took
from weightwire.testing.states import counters, seen, snapshot
from weightwire.testing.suites.base import Cases, requires
from weightwire.testing.workers import until
from weightwire.updater import WeightUpdater

__all__ = ["EndCases"]


class EndCases(Cases):
    @pytest.mark.parametrize("unread", [False, True], ids=["read", "unread"])
    @pytest.mark.parametrize("order", ["updater", "receiver", "updater twice", "receiver twice"])
    def test_close_in_every_order(self, rig: Rig, order: str, unread: bool) -> None:
        updater, receiver = rig.updater(), rig.receiver(counters(0), worker="w")
        updater.push(counters(1))
        if not unread:
            receiver.pull(10.0)
        twice = range(2 if "twice" in order else 1)
        ends: list[WeightUpdater | WeightReceiver] = (
            [updater, receiver] if order.startswith("updater") else [receiver, updater]
        )
        with took(at_most=5.0):
            for end in ends:
                for _ in twice:
                    end.close()
        assert receiver.closed
        assert receiver.pull() is None
        with pytest.raises(ClosedError):
            receiver.pull(0.1)
        with pytest.raises(ClosedError):
            updater.push(counters(2))
        assert seen(receiver.weights) == (0 if unread else 1), "what was applied lives on"

    def test_worker_learns_that_the_trainer_closed(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        updater.push(counters(1))
        worker.pull(10.0)
        updater.close()

        def over() -> bool:
            assert worker.pull() is None
            return worker.look().closed

        until(over, "the worker learns that it is over", 10)
        with pytest.raises(ClosedError):
            worker.do("wait", 2, 5.0)
        assert worker.seen() == 1

    def test_versions_accepted_before_close_arrive(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        updater.wait_for_workers(1)
        following = worker.follow(1)
        updater.push(counters(1), wait="none")
        updater.close()
        assert following.result().versions == [1]

    def test_what_was_staged_outlives_close(self, rig: Rig) -> None:
        """Also in a worker that looks only when everything is over."""
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        updater.wait_for_workers(1)
        updater.push(counters(1))
        updater.close()
        assert worker.pull(10.0) == worker.seen() == 1
        until(lambda: worker.pull() is None and worker.look().closed, "the worker learns that it is over", 10)

    def test_close_during_waits(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        updater.push(counters(1))
        worker.pull(10.0)
        waiting = worker.start("wait", 5, 20.0)
        with took(at_most=8.0):
            updater.close()
            with pytest.raises(ClosedError):
                waiting.result()

    def test_worker_says_goodbye(self, rig: Rig) -> None:
        updater = rig.updater()
        leaver, stayer = rig.worker("leaver", counters, 0), rig.worker("stayer", counters, 0)
        updater.wait_for_workers(2)
        updater.push(counters(1))
        leaver.do("close")
        following = stayer.follow(2)
        report = updater.push(counters(2), wait="applied", timeout=10.0)
        following.result()
        assert report.lost == ()
        assert report.receipts["stayer"].state == "applied"
        assert set(updater.workers) == {"stayer"}

    def test_goodbye_while_the_trainer_waits(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        updater.push(counters(1))
        closing = worker.start("close")
        with took(at_most=5.0):
            report = updater.push(counters(2), wait="applied", timeout=10.0, allow_empty=True)
        closing.result()
        assert report.lost == ()

    def test_second_updater_on_one_place(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        updater.push(counters(1))
        with took(at_most=10.0), pytest.raises(EndpointInUseError):
            rig.updater()
        assert worker.pull(10.0) == 1
        updater.push(counters(2))
        assert worker.pull(10.0) == worker.seen() == 2

    @requires("processes")
    def test_second_updater_in_another_process(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        with pytest.raises(EndpointInUseError):
            rig.process("rival").do("lead", rig.endpoint)
        updater.push(counters(1))
        assert worker.pull(10.0) == 1

    def test_next_updater_has_a_newer_epoch(self, rig: Rig) -> None:
        runs = []
        for _ in range(3):
            updater, receiver = rig.updater(), rig.receiver(counters(0))
            updater.push(counters(1))
            assert receiver.pull() == 1
            assert receiver.run == updater.run
            runs.append(updater.run)
            receiver.close()
            updater.close()
        assert runs == sorted(set(runs))

    def test_two_jobs_use_one_name(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        ends = []
        for job, version in (("job-a", 10), ("job-b", 20)):
            monkeypatch.setenv("WEIGHTWIRE_JOB", job)
            try:
                ends.append((rig.updater(), rig.worker(f"w-{job}", counters, 0), version))
            except EndpointInUseError:
                assert len(ends) == 1, "only the second job may be turned away"
        for updater, _, version in ends:
            updater.push(counters(version))
        for _, worker, version in ends:
            worker.pull(10.0)
            assert worker.seen() == version

    @pytest.mark.parametrize("ends", ["trainer", "worker", "both", "both, by sys.exit"])
    def test_interpreter_exit(self, rig: Rig, ends: str) -> None:
        script = f"""
            import sys
            from weightwire.receiver import WeightReceiver
            from weightwire.updater import WeightUpdater
            from weightwire.testing.states import counters
            place = {rig.endpoint!r}
            if {ends!r} != "worker":
                updater = WeightUpdater(place, timeout=5.0)
                updater.push(counters(1))
            if {ends!r} != "trainer":
                receiver = WeightReceiver(place, counters(0), timeout=5.0)
                if {ends!r} != "worker":
                    receiver.pull()
                    updater.push(counters(2))
            if {ends!r}.endswith("sys.exit"):
                sys.exit(7)
        """
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert run.stderr == ""
        assert run.returncode == (7 if "sys.exit" in ends else 0)
        assert rig.updater().push(counters(1)).version == 1, "the place is free again"

    def test_forgotten_ends_let_go(self, rig: Rig) -> None:
        updater, receiver = rig.updater(), rig.receiver(counters(0), worker="w")
        updater.push(counters(1))
        receiver.pull(10.0)
        weights = receiver.weights
        del updater, receiver
        rig.forget()
        again = rig.updater()
        late = rig.receiver(counters(0), worker="w")
        again.push(counters(2))
        assert late.pull() == again.version
        assert seen(late.weights) == 2
        assert snapshot(weights) == snapshot(counters(1)), "what was applied lives on"

    def test_context_managers(self, rig: Rig) -> None:
        with rig.updater() as updater, rig.receiver(counters(0)) as receiver:
            updater.push(counters(1))
            assert receiver.pull() == 1
        assert receiver.closed
        with pytest.raises(WeightwireError):
            updater.push(counters(2))

    def test_late_failure_is_told_once(self, rig: Rig) -> None:
        updater, receiver = rig.updater(), rig.receiver(_raising, worker="w")
        updater.push(counters(1))
        with pytest.raises(PushError):
            receiver.pull(10.0)
        with pytest.raises(PushError, match="always raises"):
            updater.push(counters(2))
        with pytest.raises(PushError):
            receiver.pull(10.0)
        with pytest.raises(PushError, match="always raises"):
            updater.wait(timeout=10.0)
        updater.close()


def _raising(state: object) -> None:
    raise ValueError("this target always raises")
