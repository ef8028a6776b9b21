from __future__ import annotations

import pytest

from weightwire import ApplyError, RefusedError, Version, WaitTimeout, WorkerLostError
from weightwire.roster import Roster
from weightwire.transport import Applied, Have, Joined, Left, Lost, Noted, Refused, Staged

V1, V2, V3 = (Version(7, number) for number in (1, 2, 3))


def roster_with(*names: str) -> Roster:
    roster = Roster()
    roster.epochs.add(7)
    for name in names:
        roster.observe(Joined(worker=name, incarnation=1, host="h", pid=5))
    return roster


def refused(worker: str, stamp: Version, kind: str = "refused", phase: str = "verify") -> Refused:
    return Refused(worker=worker, incarnation=1, stamp=stamp, kind=kind, phase=phase, error="no", tensor="w")


def test_states_follow_the_events() -> None:
    roster = roster_with("a")
    assert roster.workers["a"].state == "joined"
    assert roster.pending(["a"], V1, "staged") == ["a"]
    roster.observe(Staged(worker="a", incarnation=1, stamp=V1))
    assert roster.pending(["a"], V1, "staged") == []
    assert roster.pending(["a"], V1, "applied") == ["a"]
    roster.observe(Applied(worker="a", incarnation=1, stamp=V1, tensors=2, nbytes=8, seconds={"commit": 0.5}))
    assert roster.pending(["a"], V1, "applied") == []
    receipt = roster.receipt("a", V1)
    assert (receipt.state, receipt.tensors, receipt.nbytes, receipt.seconds) == ("applied", 2, 8, {"commit": 0.5})


def test_notes_of_a_backend_stand_beside_the_others() -> None:
    roster = Roster()
    roster.observe(Joined(worker="a", incarnation=2, notes={"stream": "piece by piece", "device": "?"}))
    roster.observe(Noted(worker="a", incarnation=2, notes={"device": "through the host"}))
    roster.observe(Noted(worker="a", incarnation=1, notes={"device": "of one that is gone"}))
    assert roster.workers["a"].notes == {"stream": "piece by piece", "device": "through the host"}
    assert not roster.failures


def test_a_newer_version_counts_for_an_older_one() -> None:
    roster = roster_with("a")
    roster.observe(Applied(worker="a", incarnation=1, stamp=V3))
    assert roster.pending(["a"], V2, "applied") == []


def test_versions_never_go_back() -> None:
    roster = roster_with("a")
    roster.observe(Applied(worker="a", incarnation=1, stamp=V3))
    roster.observe(Applied(worker="a", incarnation=1, stamp=V2))
    assert roster.workers["a"].version == 3


def test_events_of_a_former_incarnation_are_dropped() -> None:
    roster = roster_with("a")
    roster.observe(Joined(worker="a", incarnation=2))
    roster.observe(Applied(worker="a", incarnation=1, stamp=V1))
    roster.observe(Lost(worker="a", incarnation=1, reason="late news"))
    assert roster.workers["a"].version == 0
    assert not roster.failures


def test_a_rejoiner_is_acting_with_what_it_kept() -> None:
    roster = Roster()
    roster.observe(Joined(worker="a", incarnation=1, have=Have(V3, V2, V2)))
    assert roster.workers["a"].version == 2  # version 3 was refused there


def test_the_most_serious_failure_comes_first_and_each_is_told_once() -> None:
    roster = roster_with("a", "b", "c", "d")
    roster.time_out(["a"], V1, "applied", 1.0)
    roster.observe(Lost(worker="b", incarnation=1, reason="killed"))
    roster.observe(refused("c", V1, kind="apply", phase="commit"))
    roster.observe(refused("d", V1))
    failures = roster.take_failures()
    assert [f.kind for f in failures] == [RefusedError, ApplyError, WorkerLostError, WaitTimeout]
    assert all(f.worker in str(f) and f.phase for f in failures)
    assert "'w'" in str(failures[0])
    assert roster.take_failures() == []


def test_a_lost_worker_leaves_and_one_that_says_goodbye_is_no_failure() -> None:
    roster = roster_with("a", "b")
    roster.observe(Lost(worker="a", incarnation=1, reason="killed"))
    roster.observe(Left(worker="b", incarnation=1))
    assert not roster.workers
    assert roster.receipt("a", V1).state == "lost"
    assert roster.receipt("b", V1).state == "left"
    assert [f.worker for f in roster.take_failures()] == ["a"]


def test_a_stuck_worker_is_not_waited_for_until_it_speaks() -> None:
    roster = roster_with("a")
    roster.time_out(["a"], V1, "applied", 2.0)
    assert roster.workers["a"].state == "stuck"
    assert roster.pending(["a"], V2, "applied") == []
    assert roster.receipt("a", V2).state == "stuck"
    roster.observe(Applied(worker="a", incarnation=1, stamp=V1))
    assert roster.pending(["a"], V2, "applied") == ["a"]


@pytest.mark.parametrize(("kind", "state"), [("refused", "refused"), ("apply", "failed")])
def test_a_refusal_ends_the_wait_and_a_newer_version_heals_it(kind: str, state: str) -> None:
    roster = roster_with("a")
    roster.observe(Applied(worker="a", incarnation=1, stamp=V1))
    roster.observe(refused("a", V2, kind=kind))
    assert roster.pending(["a"], V2, "applied") == []
    receipt = roster.receipt("a", V2)
    assert (receipt.state, receipt.error, receipt.phase, receipt.tensor) == (state, "no", "verify", "w")
    assert (roster.workers["a"].state, roster.workers["a"].version) == ("refusing", 1)
    roster.observe(Applied(worker="a", incarnation=1, stamp=V3))
    assert roster.workers["a"].state == "acting"


def test_what_the_trainers_preflight_said_is_not_said_again_by_the_worker() -> None:
    roster = roster_with("a")
    roster.refuse_here("a", V1, "wrong shape")
    assert len(roster.take_failures()) == 1
    roster.observe(refused("a", V1))
    assert roster.take_failures() == []
    roster.observe(refused("a", V2))
    assert len(roster.take_failures()) == 1


def test_what_the_trainers_preflight_said_is_no_sign_of_life() -> None:
    roster = roster_with("a")
    roster.workers["a"].stuck = True
    roster.refuse_here("a", V1, "wrong shape")
    assert roster.workers["a"].stuck
    roster.observe(refused("a", V1))
    assert not roster.workers["a"].stuck


@pytest.mark.parametrize(
    "order",
    [
        (1, 2, 3),
        (1, 3),
        (3,),
        (2, 1, 3),
        (3, 2, 1),
    ],
)
def test_refusals_that_come_in_any_order_are_told_once(order: tuple[int, ...]) -> None:
    roster = roster_with("a")
    for stamp in (V1, V2, V3):
        roster.refuse_here("a", stamp, "wrong shape")
    assert [failure.version for failure in roster.take_failures()] == [1, 2, 3]
    for number in order:
        roster.observe(refused("a", Version(7, number)))
    assert roster.take_failures() == []
    assert roster.receipt("a", V3).state == "refused"


def test_an_old_refusal_does_not_hide_a_newer_one() -> None:
    roster = roster_with("a")
    roster.observe(refused("a", V3, kind="apply", phase="commit"))
    roster.observe(refused("a", V1))
    assert (roster.receipt("a", V3).state, roster.receipt("a", V3).phase) == ("failed", "commit")
    assert {failure.version for failure in roster.take_failures()} == {1, 3}


def test_what_was_refused_here_is_forgotten_with_the_worker() -> None:
    roster = roster_with("a", "b")
    for name in ("a", "b", "gone"):
        roster.refuse_here(name, V1, "wrong shape")
    assert {failure.worker for failure in roster.take_failures()} == {"a", "b"}
    roster.observe(Left(worker="a", incarnation=1))
    roster.observe(Joined(worker="b", incarnation=2))
    assert roster._refused_here == {}
    roster.observe(Refused(worker="b", incarnation=2, stamp=V1, kind="refused", phase="verify", error="no"))
    assert len(roster.take_failures()) == 1, "the new one's own word"


def test_what_a_worker_has_of_another_trainer_does_not_count() -> None:
    roster = roster_with()
    ahead = Version(9, 5)
    roster.observe(Joined(worker="a", incarnation=1, have=Have(ahead, ahead, ahead)))
    assert roster.workers["a"].version == 5
    assert roster.pending(["a"], V1, "staged") == roster.pending(["a"], V1, "applied") == ["a"]
    roster.epochs.add(10)
    stamp = Version(10, 2)
    roster.observe(Applied(worker="a", incarnation=1, stamp=stamp))
    assert roster.pending(["a"], stamp, "applied") == roster.pending(["a"], V1, "applied") == []


def test_a_stuck_worker_counts_for_what_it_has() -> None:
    roster = roster_with("a")
    roster.observe(Applied(worker="a", incarnation=1, stamp=V1))
    roster.time_out(["a"], V2, "applied", 1.0)
    assert roster.receipt("a", V1).state == "applied"
    assert (roster.stuck(["a"], V1), roster.stuck(["a"], V2)) == ([], ["a"])


def test_a_loss_that_was_told_is_still_a_loss() -> None:
    roster = roster_with("a")
    roster.observe(Lost(worker="a", incarnation=1, reason="killed"))
    roster.take_failures()  # by one of two threads that wait
    assert roster.receipt("a", V1).state == "lost"


def test_a_goodbye_after_a_loss_of_that_name_is_a_goodbye() -> None:
    roster = roster_with("a")
    roster.observe(Lost(worker="a", incarnation=1, reason="killed"))
    roster.observe(Joined(worker="a", incarnation=2))
    roster.observe(Left(worker="a", incarnation=2))
    assert roster.receipt("a", V1).state == "left"
    assert [failure.kind for failure in roster.take_failures()] == [WorkerLostError]


def test_a_hook_that_failed_is_told_beside_an_applied_version() -> None:
    roster = roster_with("a")
    roster.observe(Applied(worker="a", incarnation=1, stamp=V1, error="hook h raised"))
    assert roster.receipt("a", V1).state == "applied"
    (failure,) = roster.take_failures()
    assert (failure.kind, failure.phase) == (ApplyError, "after-hooks")


def test_what_a_worker_said_of_a_version_outlives_its_goodbye() -> None:
    roster = roster_with("done", "idle", "bad", "killed")
    for name in ("done", "killed"):
        roster.observe(Applied(worker=name, incarnation=1, stamp=V2, tensors=3, nbytes=12))
    roster.observe(refused("bad", V2))
    for name in ("done", "idle", "bad"):
        roster.observe(Left(worker=name, incarnation=1))
    roster.observe(Lost(worker="killed", incarnation=1, reason="gone"))
    names = ["done", "idle", "bad", "killed"]
    assert [roster.receipt(name, V2).state for name in names] == ["applied", "left", "refused", "lost"]
    assert (roster.receipt("done", V2).tensors, roster.receipt("bad", V2).error) == (3, "no")
    assert roster.receipt("done", V3).state == "left"
    assert roster.took(names, V1) == roster.took(names, V2) == ["done"]
    assert roster.pending(names, V2, "applied") == []
    roster.observe(Joined(worker="done", incarnation=2))
    assert roster.receipt("done", V2).state == "sent", "it is another one of that name"


def test_what_is_told_twice_counts_once() -> None:
    """An interrupt may leave open whether a report was sent, or booked."""
    roster = roster_with("a", "b")
    failed = Applied(worker="a", incarnation=1, stamp=V1, error="a hook failed")
    assert [roster.observe(event) for event in (failed, failed)] == [True, True]
    assert [roster.observe(refused("b", V1)) for _ in range(2)] == [True, True]
    assert [failure.worker for failure in roster.take_failures()] == ["b", "a"]
    left = Left(worker="a", incarnation=1)
    lost = Lost(worker="a", incarnation=1, reason="its connection broke")
    assert [roster.observe(event) for event in (left, left, lost)] == [True, False, False]
    assert not roster.failures
