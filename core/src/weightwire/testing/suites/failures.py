"""Workers and trainers that are killed, stopped or forked: the others pay nothing but a bounded delay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from weightwire.errors import ClosedError, UpdaterLostError, WaitTimeout, WorkerLostError
from weightwire.testing.rig import Rig, took
from weightwire.testing.states import counters
from weightwire.testing.suites.base import Cases, requires
from weightwire.testing.workers import Following, ProcessWorker, until
from weightwire.updater import WeightUpdater

__all__ = ["FailureCases"]


def crew(rig: Rig, *names: str) -> list[ProcessWorker]:
    return [rig.victim(name, counters, 0) for name in names]


class FailureCases(Cases):
    @requires("processes")
    @pytest.mark.parametrize("forked", [False, True], ids=["", "with a forked child"])
    @pytest.mark.parametrize("when", ["before", "during", "after"])
    def test_worker_is_killed(self, rig: Rig, when: str, forked: bool) -> None:
        updater = rig.updater()
        victim, *others = crew(rig, "victim", "b", "c")
        updater.wait_for_workers(3)
        updater.push(counters(1))
        assert victim.pull(10.0) == 1
        if forked:
            victim.fork()
        following = [worker.follow(2) for worker in others]
        with took(at_most=6.0), pytest.raises(WorkerLostError, match="victim") as caught:
            _push_and_kill(updater, victim, when)
        assert caught.value.worker == "victim"
        report = caught.value.report
        assert report is not None
        assert report.lost == ("victim",)
        assert [follower.result().versions[-1] for follower in following] == [2, 2], "the others got that version"
        assert {report.receipts[name].state for name in ("b", "c")} <= {"applied", "staged"}
        assert set(updater.workers) == {"b", "c"}
        following = [worker.follow(3) for worker in others]
        with took(at_most=2.0):
            report = updater.push(counters(3), wait="applied")
        assert report.lost == (), "it is told once"
        for follower in following:
            follower.result()
        again = rig.worker("victim", counters, 0)
        assert again.pull() == again.seen() == 3

    @requires("processes")
    def test_lost_worker_may_be_dropped(self, rig: Rig) -> None:
        updater = rig.updater()
        victim, other = crew(rig, "victim", "other")
        updater.wait_for_workers(2)
        updater.push(counters(1))
        following = other.follow(2)
        victim.kill()
        report = updater.push(counters(2), wait="applied", on_lost="drop", timeout=6.0)
        following.result()
        assert report.receipts["other"].state == "applied"
        assert report.lost == ("victim",)
        assert set(updater.workers) == {"other"}

    @requires("processes")
    def test_worker_is_stopped(self, rig: Rig) -> None:
        updater = rig.updater()
        stopped, other = crew(rig, "stopped", "other")
        updater.wait_for_workers(2)
        updater.push(counters(1))
        assert [worker.pull(10.0) for worker in (stopped, other)] == [1, 1]
        stopped.stop()
        following = other.follow(2)
        with took(at_most=4.0), pytest.raises(WaitTimeout, match="stopped") as caught:
            updater.push(counters(2), wait="applied", timeout=1.0)
        assert following.result().versions == [2]
        assert caught.value.report is not None
        assert caught.value.report.receipts["other"].state == "applied"
        following = other.follow(30)
        waited = []
        for version in range(3, 31):
            report = updater.push(counters(version), wait="applied", timeout=10.0)
            states = {name: receipt.state for name, receipt in report.receipts.items()}
            assert states == {"other": "applied", "stopped": "stuck"}
            waited.append(report.seconds["wait"])
        assert min(waited) < 0.9, "it is known as stuck, and is not waited for"
        following.result()
        assert updater.workers["stopped"].state == "stuck"
        stopped.cont()
        assert stopped.pull(10.0) == stopped.seen() == 30
        until(lambda: updater.workers["stopped"].state == "acting", "it has spoken, and is waited for again", 10)
        assert updater.wait(30, timeout=10.0).receipts["stopped"].state == "applied"

    @requires("processes")
    def test_worker_is_stopped_while_it_pulls(self, rig: Rig) -> None:
        updater = rig.updater()
        (worker,) = crew(rig, "w")
        updater.wait_for_workers(1)
        following = worker.follow(201)
        for version in range(1, 201):
            if version % 20 == 0:
                worker.stop()
                with took(at_most=2.0):
                    updater.push(counters(version), wait="none")
                worker.cont()
            else:
                updater.push(counters(version), wait="none")
        updater.push(counters(201), timeout=10.0)
        following.result()

    @requires("processes")
    def test_stopped_then_killed(self, rig: Rig) -> None:
        updater = rig.updater()
        stopped, other = crew(rig, "stopped", "other")
        updater.wait_for_workers(2)
        stopped.stop()
        for version in range(1, 11):
            updater.push(counters(version), wait="none", timeout=2.0)
        stopped.kill()
        following = other.follow(11)
        with took(at_most=5.0), pytest.raises(WorkerLostError, match="stopped"):
            updater.push(counters(11), wait="applied", timeout=4.0)
        following.result()

    @requires("processes")
    def test_trainer_is_killed(self, rig: Rig) -> None:
        trainer = rig.process("trainer")
        _, run = trainer.do("lead", rig.endpoint)
        workers = crew(rig, "a", "b")
        trainer.do("wait_for_workers", 2, 10.0)
        trainer.do("push")
        assert [worker.pull() for worker in workers] == [1, 1]
        trainer.fork()
        trainer.kill()
        for worker in workers:
            until(lambda w=worker: w.pull() is None and not w.look().connected, "the worker learns of it", 10)  # type: ignore[misc]
            assert worker.seen() == 1, "it acts on"
            with took(at_most=4.0), pytest.raises(UpdaterLostError):
                worker.do("wait", 2, 0.3)
            assert not worker.look().closed
        updater = rig.updater()
        assert updater.run > run
        late = rig.worker("late", counters, 0)
        updater.push(counters(1))
        assert [worker.pull(10.0) for worker in (*workers, late)] == [1, 1, 1]
        assert {worker.look().run for worker in workers} == {updater.run}
        assert set(updater.workers) == {"a", "b", "late"}

    @requires("processes")
    def test_staged_needs_no_trainer(self, rig: Rig) -> None:
        """What counts as staged is with the worker, whatever becomes of the trainer."""
        trainer = rig.process("trainer")
        trainer.do("lead", rig.endpoint)
        (worker,) = crew(rig, "w")
        trainer.do("wait_for_workers", 1, 10.0)
        report = trainer.do("push", wait="staged")
        assert report.receipts["w"].state == "staged"
        trainer.kill()
        assert worker.pull(5.0) == worker.seen() == 1

    @requires("processes")
    def test_trainer_is_killed_while_pushing(self, rig: Rig) -> None:
        readers = crew(rig, "a", "b")
        following = [worker.follow(1_000_001, timeout=60) for worker in readers]
        for round_ in range(6):
            trainer = rig.process(f"trainer{round_}")
            trainer.do("lead", rig.endpoint)
            trainer.do("wait_for_workers", 1, 10.0)
            trainer.start("push_on")
            before = readers_cpu(readers)
            until(lambda mark=before: readers_cpu(readers) > mark, "the readers read", 10)  # type: ignore[misc]
            trainer.kill()
        last = rig.updater(start_version=1_000_000)
        last.push(counters(1_000_001))
        for follower in following:
            assert follower.result(70).versions[-1] == 1_000_001

    @requires("processes")
    def test_trainer_forks_and_the_child_ends(self, rig: Rig) -> None:
        trainer = rig.process("trainer")
        trainer.do("lead", rig.endpoint)
        (worker,) = crew(rig, "w")
        trainer.do("wait_for_workers", 1, 10.0)
        trainer.do("push")
        worker.pull(10.0)
        assert trainer.do("fork_and_exit") == 0
        trainer.do("push")
        assert worker.pull(10.0) == 2
        late = rig.worker("late", counters, 0)
        assert late.pull() == 2, "the place is still there for newcomers"
        assert worker.do("fork_and_exit") == 0
        trainer.do("push")
        assert [w.pull(10.0) for w in (worker, late)] == [3, 3]
        following = worker.follow(4), late.follow(4)
        report = trainer.do("push", wait="applied")
        assert {receipt.state for receipt in report.receipts.values()} == {"applied"}
        for follower in following:
            follower.result()

    @requires("processes")
    def test_ends_are_of_no_use_in_a_forked_child(self, rig: Rig) -> None:
        trainer = rig.process("trainer")
        trainer.do("lead", rig.endpoint)
        (worker,) = crew(rig, "w")
        trainer.do("push")
        worker.pull(10.0)
        assert trainer.do("fork_and_use") == ClosedError.__name__
        assert worker.do("fork_and_use") == ClosedError.__name__
        trainer.do("push")
        assert worker.pull(10.0) == 2

    @requires("processes")
    def test_half_of_the_workers_die_again_and_again(self, rig: Rig) -> None:
        updater = rig.updater()
        steady = rig.worker("steady", counters, 0)
        updater.wait_for_workers(1)
        for round_ in range(8):
            (mortal,) = crew(rig, "mortal")
            updater.wait_for_workers(2)
            reading: list[Following] = [steady.follow(updater.version + 5), mortal.follow(10_000)]
            for push in range(5):
                if push == round_ % 5:
                    mortal.kill()
                updater.push(counters(updater.version + 1), on_lost="drop", timeout=5.0)
            reading[0].result()
            until(lambda: "mortal" not in updater.workers, "the loss is seen", 10)
            updater.push(counters(updater.version + 1), on_lost="drop")
            steady.pull(10.0)


def readers_cpu(readers: list[ProcessWorker]) -> float:
    """Seconds that the readers have computed: a sign of life that asks nothing of them."""
    return sum(sum(reader.process.cpu_times()[:2]) for reader in readers)


def _push_and_kill(updater: WeightUpdater, victim: ProcessWorker, when: str) -> None:
    def source(kill: Callable[[], None] | None) -> dict[str, Tensor]:
        if kill:
            kill()
        return counters(2)

    options: dict[str, Any] = {"wait": "applied", "timeout": 5.0}
    if when == "before":
        victim.kill()
        updater.push(counters(2), **options)
    elif when == "during":
        updater.push(lambda: source(victim.kill), **options)
    else:
        updater.push(counters(2))
        victim.kill()
        updater.wait(2, timeout=5.0)
