"""Who gets which version: late joiners, subsets, pushes to some workers, names."""

from __future__ import annotations

import pytest
import torch

from weightwire.errors import EndpointInUseError, PreflightError, PushError, UnknownWorkerError, WaitTimeout
from weightwire.testing.rig import Rig, took
from weightwire.testing.states import counters, seen
from weightwire.testing.suites.base import Cases, requires

__all__ = ["RosterCases"]


class RosterCases(Cases):
    @requires("late_join")
    def test_late_joiner_gets_the_newest(self, rig: Rig) -> None:
        updater, first = rig.updater(), rig.worker("first", counters, 0)
        for version in range(1, 6):
            updater.push(counters(version))
            first.pull(10.0)
        late = rig.worker("late", counters, 0)
        assert not late.look().ready
        assert late.look().version == 0
        late.do("hook")
        assert late.pull() == 5
        assert late.do("hooks") == [(5, 5)], "never an old one"
        assert late.look().ready
        updater.push(counters(6))
        assert [worker.pull(10.0) for worker in (first, late)] == [6, 6]

    @requires("late_join")
    def test_worker_comes_back_under_its_name(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        updater.push(counters(1))
        worker.pull(10.0)
        before = updater.workers["w"].incarnation
        worker.do("close")
        updater.push(counters(2))
        again = rig.worker("w", counters, 0)
        assert again.pull() == 2
        assert updater.wait(2).receipts["w"].state == "applied"
        assert updater.workers["w"].incarnation != before

    def test_second_live_worker_of_one_name(self, rig: Rig) -> None:
        updater = rig.updater()
        first = rig.worker("w", counters, 0)
        updater.push(counters(1))
        first.pull(10.0)
        with pytest.raises(EndpointInUseError, match="'w'"):
            rig.worker("w", counters, 0).pull(10.0)
        updater.push(counters(2))
        assert first.pull(10.0) == 2
        assert list(updater.workers) == ["w"]

    def test_subset_on_top_of_a_missed_full_version(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        updater.wait_for_workers(1)  # who comes in between has the full version alone for a moment
        updater.push(counters(1))
        part = {"layer1.weight": counters(2)["layer1.weight"]}
        updater.push(part, partial=True)
        assert worker.pull(10.0) == 2
        assert worker.look().ready
        contents = worker.do("contents")
        for name, tensor in counters(1).items():
            assert contents[name].data == (part.get(name, tensor)).numpy().tobytes()
        assert worker.look().version == 2

    def test_subsets_follow_each_other(self, rig: Rig) -> None:
        policy = counters(0)
        updater, receiver = rig.updater(), rig.receiver(policy)
        updater.push(counters(1))
        receiver.pull(10.0)
        one, two = (counters(2)["layer0.weight"], counters(3)["layer0.weight"])
        updater.push({"layer0.weight": one}, partial=True)
        assert receiver.pull(10.0) == 2
        updater.push({"layer0.weight": two, "layer2.weight": counters(3)["layer2.weight"]}, partial=True)
        assert receiver.pull(10.0) == 3
        assert [int(tensor[0]) for tensor in policy.values()] == [3, 1, 3, 1, 1, 1]
        updater.push(counters(4))
        assert receiver.pull(10.0) == seen(policy) == 4

    def test_subsets_that_say_what_to_push(self, rig: Rig) -> None:
        updater = rig.updater()
        full = counters(1)
        with pytest.raises(PreflightError, match="full"):
            updater.push({"layer0.weight": full["layer0.weight"]}, partial=True)
        assert updater.push(full).version == 1, "a refused push uses up no number"
        updater.push({"layer0.weight": full["layer0.weight"], "layer1.weight": full["layer1.weight"]}, partial=True)
        with pytest.raises(PreflightError, match=r"layer1\.weight.*full"):
            updater.push({"layer0.weight": full["layer0.weight"]}, partial=True)
        with pytest.raises(PreflightError, match="nobody"):
            updater.push({"layer0.weight": full["layer0.weight"], "nobody": torch.zeros(1)}, partial=True)
        assert updater.push(counters(3)).version == 3
        updater.push({"layer0.weight": full["layer0.weight"]}, partial=True)

    @requires("late_join")
    def test_late_joiner_takes_full_version_and_subset(self, rig: Rig) -> None:
        updater = rig.updater()
        updater.push(counters(1))
        updater.push({"layer4.weight": counters(2)["layer4.weight"]}, partial=True)
        receiver = rig.receiver(counters(0))
        assert receiver.pull() == 2
        assert [int(tensor[0]) for tensor in receiver.weights.values()] == [1, 1, 1, 1, 2, 1]

    @requires("subset_workers")
    def test_push_to_some_workers(self, rig: Rig) -> None:
        updater = rig.updater()
        a, b = rig.worker("a", counters, 0), rig.worker("b", counters, 0)
        updater.wait_for_workers(2)
        updater.push(counters(1))
        assert [worker.pull(10.0) for worker in (a, b)] == [1, 1]
        report = updater.push(counters(2), workers=["a"])
        assert set(report.receipts) == {"a"}
        assert a.pull(10.0) == 2
        following = a.follow(3)
        updater.push(counters(3), workers=["a"], wait="applied", timeout=10.0)
        following.result()
        assert b.pull(0.3) is None, "long enough for what should not come"
        assert b.seen() == 1
        with pytest.raises(UnknownWorkerError, match="nobody"):
            updater.push(counters(4), workers=["a", "nobody"])
        report = updater.push(counters(4))
        assert report.version == 4
        assert [worker.pull(10.0) for worker in (a, b)] == [4, 4]

    @requires("subset_workers", "late_join")
    def test_joiner_after_a_push_to_some(self, rig: Rig) -> None:
        updater, a = rig.updater(), rig.worker("a", counters, 0)
        updater.wait_for_workers(1)
        updater.push(counters(1))
        updater.push(counters(2), workers=["a"])
        late = rig.worker("late", counters, 0)
        assert late.pull() == late.seen() == 1
        assert a.pull(10.0) == a.seen() == 2

    def test_no_worker_at_all(self, rig: Rig) -> None:
        updater = rig.updater()
        assert updater.push(counters(1), wait="none").receipts == {}
        assert updater.push(counters(2)).receipts == {}
        with pytest.raises(PushError, match="no worker"):
            updater.push(counters(3), wait="applied")
        assert updater.push(counters(3), wait="applied", allow_empty=True).version == 3
        with took(at_most=3.0), pytest.raises(WaitTimeout, match="1 worker "):
            updater.wait_for_workers(1, timeout=0.2)
        receiver = rig.receiver(counters(0))
        assert receiver.pull() == 3

    def test_start_version(self, rig: Rig) -> None:
        updater, worker = rig.updater(start_version=41), rig.worker("w", counters, 0)
        assert updater.push(counters(42)).version == 42
        assert worker.pull() == 42

    def test_deadline_names_who_is_missing(self, rig: Rig) -> None:
        updater = rig.updater()
        rig.worker("idle", counters, 0)
        updater.wait_for_workers(1)
        with took(at_most=4.0), pytest.raises(WaitTimeout, match="idle") as caught:
            updater.push(counters(1), wait="applied", timeout=0.4)
        assert caught.value.report is not None
        assert caught.value.report.receipts["idle"].state == "stuck"
        assert updater.workers["idle"].state == "stuck"
