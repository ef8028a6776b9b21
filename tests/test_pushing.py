"""Pushes that are nested, interrupted, concurrent, or meet workers that come and go: over vanilla, with the order of
events forced by stepping in at the updater's own backend."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from weightwire import (
    ApplyError,
    ClosedError,
    PreflightError,
    PushError,
    RefusedError,
    StorageFullError,
    Version,
    WaitTimeout,
    WeightReceiver,
    WeightUpdater,
    hookimpl,
)
from weightwire import (
    receiver as receiver_module,
)
from weightwire import (
    updater as updater_module,
)
from weightwire.testing.rig import took
from weightwire.testing.states import counters, seen
from weightwire.transport import NOW, Applied, Have, Left

QUICK = 3.0
"""Seconds in which what must not hang is over, on a busy machine too; far less than the ends' own timeout."""


@pytest.fixture
def updater() -> Iterator[WeightUpdater]:
    up = WeightUpdater("vanilla", counters(1), timeout=20.0)
    yield up
    up._shut(None)  # late failures are the test's own business


def receiver_of(updater: WeightUpdater, weights: Any = None, **options: Any) -> WeightReceiver:
    return WeightReceiver(updater.endpoint, counters(0) if weights is None else weights, timeout=20.0, **options)


def one(version: int, name: str = "layer0.weight") -> dict[str, Tensor]:
    """A subset of :func:`counters`."""
    return {name: counters(version)[name]}


def in_thread(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def step_in(patch: pytest.MonkeyPatch, owner: Any, name: str, first: Callable[..., Any], *, times: int = 1) -> None:
    """Run ``first`` with the arguments of ``owner.name`` before it, the first ``times`` times."""
    real = getattr(owner, name)
    left = [times]

    def call(*args: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            first(*args, **options)
        return real(*args, **options)

    patch.setattr(owner, name, call)


def raises(error: type[BaseException]) -> Callable[..., None]:
    def call(*_: Any, **__: Any) -> None:
        raise error("forced")

    return call


def is_over(updater: WeightUpdater) -> bool:
    """Whether it is closed and its place is free."""
    with pytest.raises(ClosedError):
        updater.push()
    WeightUpdater(updater.endpoint).close()
    return True


# -- closing and pushing within a push ---------------------------------------------------------------------------------


class Before:
    """An observer that does something before each push."""

    def __init__(self) -> None:
        self.act: Callable[[], object] = lambda: None

    @hookimpl
    def weightwire_before_push(self) -> None:
        self.act()


@pytest.mark.parametrize("where", ["before_push", "extract", "stage", "events"])
@pytest.mark.parametrize("by", ["call", "signal"])
def test_close_within_a_push_takes_effect_after_it(where: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    observer = Before()
    updater = WeightUpdater("vanilla", timeout=20.0, observers=[observer])
    receiver = receiver_of(updater, worker="w")
    updater.wait_for_workers(1)
    before = signal.signal(signal.SIGUSR1, lambda *_: updater.close())
    try:

        def close(*_: Any) -> None:
            if by == "signal":
                signal.raise_signal(signal.SIGUSR1)
            else:
                updater.close()

        if where == "before_push":
            observer.act = close
        elif where != "extract":
            step_in(monkeypatch, updater._sender, where, close)
        with took(at_most=QUICK):
            report = updater.push((lambda: close() or counters(1)) if where == "extract" else counters(1))
    except ClosedError:
        assert where == "events", "all else comes after the push was let in"
        assert by
    else:
        assert report.receipts["w"].state == "staged"
        assert (receiver.pull(0.0), receiver.pull(0.0), receiver.closed) == (1, None, True)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert is_over(updater)
    receiver.close()


def test_close_in_an_inline_hook(updater: WeightUpdater) -> None:
    receiver = receiver_of(updater, worker="w", inline=True)
    receiver.on_applied(lambda _: updater.close())
    with took(at_most=QUICK):
        assert updater.push(wait="applied").receipts["w"].state == "applied"
    assert receiver.closed
    assert is_over(updater)


def test_close_in_a_signal_handler_ends_a_wait(updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = receiver_of(updater, worker="w")
    updater.push()
    before = signal.signal(signal.SIGUSR1, lambda *_: updater.close())
    try:
        step_in(
            monkeypatch,
            updater._sender,
            "events",
            lambda deadline: deadline.expired or signal.raise_signal(signal.SIGUSR1),
            times=2,
        )
        with took(at_most=QUICK), pytest.raises(ClosedError):
            updater.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert is_over(updater)
    assert receiver.pull() == 1


def test_close_by_another_thread_ends_a_push_that_waits(updater: WeightUpdater) -> None:
    receiver = receiver_of(updater, worker="w")
    caught: list[BaseException] = []

    def push() -> None:
        try:
            updater.push(wait="applied")
        except ClosedError as exc:
            caught.append(exc)

    thread = in_thread(push)
    assert receiver.pull(10.0) == 1
    thread.join(QUICK)
    thread = in_thread(push)
    while receiver._receiver.poll(receiver._have(), None) is None:  # until version 2 is there, and waited for
        assert thread.is_alive()
    with took(at_most=QUICK):
        updater.close()
        thread.join(QUICK)
    assert [type(exc) for exc in caught] == [ClosedError]
    assert is_over(updater)


def test_push_within_a_push_is_an_error(updater: WeightUpdater) -> None:
    caught: list[str] = []

    def push() -> dict[str, Tensor]:
        with pytest.raises(RuntimeError, match="middle of a push") as error:
            updater.push(counters(5))
        caught.append(str(error.value))
        return counters(1)

    assert updater.push(push).version == 1
    assert len(caught) == 1
    assert updater.push().version == 2


def test_push_in_an_observer_is_an_error_of_the_observer() -> None:
    observer = Before()
    with WeightUpdater("vanilla", counters(1), observers=[observer]) as updater:
        observer.act = updater.push
        with took(at_most=QUICK):
            report = updater.push()
        assert "middle of a push" in report.errors[0]
        assert (report.version, updater.version) == (1, 1)


def test_push_waits_for_another_threads_push_no_longer_than_asked(updater: WeightUpdater) -> None:
    within, go = threading.Event(), threading.Event()

    def slow() -> dict[str, Tensor]:
        within.set()
        assert go.wait(10)
        return counters(1)

    thread = in_thread(lambda: updater.push(slow))
    assert within.wait(10)
    try:
        with took(at_most=QUICK), pytest.raises(WaitTimeout, match="another thread"):
            updater.push(timeout=0.1)
    finally:
        go.set()
        thread.join(10)
    assert updater.version == 1
    assert updater.push().version == 2


# -- a stage that fails or is interrupted ------------------------------------------------------------------------------


def test_a_stage_that_fails_before_it_is_announced_books_nothing(
    updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, narrow = receiver_of(updater, worker="good"), receiver_of(updater, counters(0, 6, 3), worker="narrow")
    updater.wait_for_workers(2)
    step_in(monkeypatch, updater._sender, "stage", raises(StorageFullError))
    with pytest.raises(StorageFullError):
        updater.push()
    assert updater.version == 0
    assert {info.state for info in updater.workers.values()} == {"joined"}
    with pytest.raises(RefusedError, match="narrow") as caught:
        updater.push()
    assert caught.value.report is not None
    assert (caught.value.version, caught.value.report.receipts["good"].state) == (1, "staged")
    assert good.pull() == 1
    with pytest.raises(PreflightError):
        narrow.pull()
    assert updater.wait(1).receipts["narrow"].state == "refused", "it is told once"


def test_a_number_that_failed_is_free_for_weights_that_fit(
    updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = receiver_of(updater, one(0, "layer1.weight"), worker="wide", select="layer1*")
    narrow = receiver_of(updater, one(0), worker="narrow", select="layer0*")
    updater.wait_for_workers(2)
    step_in(monkeypatch, updater._sender, "stage", raises(StorageFullError))
    with pytest.raises(StorageFullError):
        updater.push({**counters(1), "layer0.weight": torch.zeros(3)})  # which narrow would refuse
    assert updater.push().version == 1
    assert [wide.pull(), narrow.pull()] == [1, 1]
    assert {receipt.state for receipt in updater.wait().receipts.values()} == {"applied"}


def test_subsets_need_a_full_version_after_an_interrupt_at_an_unknown_moment(
    updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = receiver_of(updater, worker="w")
    updater.push()
    receiver.pull()

    def interrupt(payload: Any, *_: Any) -> None:
        assert payload.header
        raise KeyboardInterrupt

    step_in(monkeypatch, updater._sender, "stage", interrupt)
    with pytest.raises(KeyboardInterrupt):
        updater.push(counters(2))
    assert updater.version == 2, "the number may have been seen"
    with pytest.raises(PreflightError, match="push a full one"):
        updater.push(one(3), partial=True)
    assert updater.push(counters(3)).version == 3
    assert updater.push(one(4), partial=True).version == 4
    assert receiver.pull() == 4


def test_an_interrupted_stage_does_not_forget_to_whom_older_versions_went(
    updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _b = receiver_of(updater, worker="a"), receiver_of(updater, worker="b")
    updater.wait_for_workers(2)
    updater.push(workers=["a"])
    assert a.pull() == 1
    step_in(monkeypatch, updater._sender, "stage", lambda payload, *_: payload.header and raises(KeyboardInterrupt)())
    with pytest.raises(KeyboardInterrupt):
        updater.push(counters(2))
    assert set(updater.wait(1, timeout=0.2).receipts) == {"a"}


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupted_close_can_be_called_again(
    updater: WeightUpdater, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = receiver_of(updater, worker="w")
    updater.push()
    receiver.pull()
    close = updater._sender.close

    def interrupt(*args: Any) -> None:
        if moment == "after":
            close(*args)
        raise KeyboardInterrupt

    step_in(monkeypatch, updater._sender, "close", interrupt)
    with pytest.raises(KeyboardInterrupt):
        updater.close()
    with took(at_most=QUICK):
        updater.close()
        updater.close()
    assert is_over(updater)
    assert receiver.pull() is None
    assert receiver.closed


def test_a_worker_that_applies_it_and_leaves_while_it_is_pushed_has_its_receipt(
    updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = receiver_of(updater, worker="w")
    updater.wait_for_workers(1)
    stage = updater._sender.stage

    def staged(*args: Any) -> None:
        stage(*args)
        receiver.pull()
        receiver.close()

    monkeypatch.setattr(updater._sender, "stage", staged)
    report = updater.push(wait="applied")
    assert {name: (done.state, done.version) for name, done in report.receipts.items()} == {"w": ("applied", 1)}
    assert updater.wait().receipts["w"].state == "applied"
    monkeypatch.setattr(updater._sender, "stage", stage)
    assert updater.push().receipts == {}


def test_a_refusal_that_was_told_is_not_told_again(updater: WeightUpdater) -> None:
    updater.push()
    bad = receiver_of(updater, {"other": torch.ones(1)}, worker="bad")
    with pytest.raises(PreflightError):
        bad.pull()
    with pytest.raises(RefusedError, match=r"none of the 1 worker that has joined \('bad'\) .*wait_for_workers\(\)"):
        updater.push()
    bad.close()
    assert updater.push().version == 2
    updater.close()


def test_an_error_of_an_earlier_version_says_that_this_one_was_sent(updater: WeightUpdater) -> None:
    updater.push()
    bad, good = receiver_of(updater, raises(ValueError), worker="bad"), receiver_of(updater, worker="good")
    with pytest.raises(ApplyError):
        bad.pull()
    with pytest.raises(ApplyError, match=r"(?s)version 1 in phase commit.*\(version 2 was sent\)"):
        updater.push()
    assert good.pull() == 2


# -- workers that come and go ------------------------------------------------------------------------------------------


def test_a_new_worker_under_an_old_name_stands_on_what_went_to_all(updater: WeightUpdater) -> None:
    with receiver_of(updater, worker="w") as old:
        updater.push()
        updater.push(counters(2), workers=["w"])
        updater.push(one(3), workers=["w"], partial=True)
        assert old.pull() == 3
    policy = counters(0)
    with receiver_of(updater, policy, worker="w") as new:
        assert new.pull() == seen(policy) == 1
        updater.push(one(4), workers=["w"], partial=True)
        assert new.pull() == 4
        assert [int(tensor[0]) for tensor in policy.values()] == [4, 1, 1, 1, 1, 1]


def test_a_new_worker_under_an_old_name_needs_a_full_version_where_none_went_to_all(updater: WeightUpdater) -> None:
    with receiver_of(updater, worker="w") as old:
        updater.wait_for_workers(1)
        updater.push(workers=["w"])
        assert old.pull() == 1
    with receiver_of(updater, worker="w") as new:
        updater.wait_for_workers(1)
        with pytest.raises(PreflightError, match="full"):
            updater.push(one(2), workers=["w"], partial=True)
        updater.push(counters(2), workers=["w"])
        updater.push(one(3), workers=["w"], partial=True)
        assert new.pull() == 3


def test_names_that_come_and_go_leave_nothing_behind(updater: WeightUpdater) -> None:
    updater.push()
    for number in range(300):
        size = 512 if number % 3 else 3  # every third one refuses
        with receiver_of(updater, counters(0, 6, size), worker=f"w{number}") as receiver:
            if number % 3:
                updater.push(counters(2), workers=[receiver.worker])
                updater.push(one(3), workers=[receiver.worker], partial=True)
                receiver.pull()
            else:
                with pytest.raises(RefusedError):
                    updater.push(counters(2), workers=[receiver.worker])
    assert updater.workers == {}
    ground, place = updater._ground, updater._sender._place
    assert (ground.some, len(ground.layouts), set(ground.covered)) == ({}, 1, set())
    assert (updater._checked, updater._roster._refused_here, updater._heard) == ({}, {}, [])
    assert (place.receivers, len(place.events), len(place.shelf.kept())) == ({}, 0, 1)


def test_a_worker_that_leaves_while_its_version_is_staged_holds_up_no_subset(
    updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays, goes = receiver_of(updater, worker="stays"), receiver_of(updater, worker="goes")
    updater.push()
    assert stays.pull() == 1

    def leave(*_: Any) -> None:
        goes.close()
        in_thread(lambda: updater.workers).join(10)  # another thread has it booked

    step_in(monkeypatch, updater._sender, "stage", leave)
    report = updater.push(counters(2), workers=["goes"])
    assert report.receipts["goes"].state == "left"
    assert updater.push(one(3), partial=True).version == 3
    assert stays.pull() == 3


def test_a_worker_seen_by_another_thread_during_the_preflight(
    updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, joined = receiver_of(updater, worker="first"), []
    updater.wait_for_workers(1)
    threads = []

    def join(*_: Any, **__: Any) -> None:
        joined.append(receiver_of(updater, worker="second"))
        threads.append(in_thread(lambda: updater.workers))
        threads[0].join(0.3)  # it may get through now, or only after the preflight

    step_in(monkeypatch, updater_module, "_misfit", join)
    assert updater.push().version == 1
    threads[0].join(10)
    assert [receiver.pull() for receiver in (first, *joined)] == [1, 1]
    assert set(updater.wait(1).receipts) == {"first", "second"}


def test_a_worker_that_goes_while_it_is_timed_out(updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch) -> None:
    _slow, goes = receiver_of(updater, worker="slow"), receiver_of(updater, worker="goes")
    updater.wait_for_workers(2)
    threads = []

    def leave(*_: Any) -> None:
        goes.close()
        threads.append(in_thread(lambda: updater.workers))
        threads[0].join(0.3)

    step_in(monkeypatch, updater._roster, "time_out", leave)
    with pytest.raises(WaitTimeout, match="slow"):
        updater.push(wait="applied", timeout=0.1)
    threads[0].join(10)
    assert set(updater.workers) == {"slow"}


def test_a_goodbye_is_no_loss(updater: WeightUpdater) -> None:
    receiver = receiver_of(updater, worker="w")
    updater.wait_for_workers(1)
    report = updater.push(lambda: receiver.close() or counters(1), workers=["w"], wait="applied")
    assert (report.receipts["w"].state, report.lost) == ("left", ())
    assert updater.push().receipts == {}


# -- vanilla's way straight into the only, inline policy ---------------------------------------------------------------


def test_who_comes_after_a_straight_push_gets_no_older_version(updater: WeightUpdater) -> None:
    policy = counters(0)
    with receiver_of(updater, policy, worker="here", inline=True):
        with receiver_of(updater, worker="other") as other:
            updater.push()  # kept, for the other
            assert other.pull() == 1
        assert updater.push(counters(2)).version == seen(policy) == 2
        with receiver_of(updater, worker="late") as late:
            assert late.pull(0.0) is None
            assert updater.workers["late"].state == "joined"
            updater.push(counters(3))
            assert late.pull() == seen(policy) == 3


def test_a_straight_push_to_one_leaves_others_what_went_to_all(updater: WeightUpdater) -> None:
    updater.push(counters(1))
    with receiver_of(updater, worker="a", inline=True) as inline:
        inline.pull()
        updater.push(counters(2), workers=["a"])
        assert (inline.version, seen(inline.weights)) == (2, 2)
        with receiver_of(updater, worker="b") as late:
            assert late.pull() == seen(late.weights) == 1


def test_a_subset_is_not_staged_for_who_lacks_its_base(updater: WeightUpdater) -> None:
    with receiver_of(updater, worker="here", inline=True):
        updater.push()
        with receiver_of(updater, worker="late") as late:
            with took(at_most=QUICK), pytest.raises(RefusedError, match=r"'late'.*push a full one"):
                updater.push(one(2), partial=True)
            assert late.pull(0.0) is None
            updater.push(counters(3))
            assert late.pull() == seen(late.weights) == 3


def test_a_late_inline_receiver_takes_a_subset_with_its_base(updater: WeightUpdater) -> None:
    with receiver_of(updater, worker="other"):
        updater.push(counters(1))
        with receiver_of(updater, worker="late", inline=True) as late:
            updater.push(one(2), partial=True)
            assert late.version == 2
            assert late.weights["layer0.weight"][0].item() == 2
            assert late.weights["layer1.weight"].flatten()[0].item() == 1


@pytest.mark.parametrize("options", ["", "?keep=true"])
def test_a_late_inline_receiver_takes_a_kept_version_by_pull(options: str) -> None:
    with WeightUpdater("vanilla" + options, counters(1), timeout=20.0) as updater:
        with receiver_of(updater, worker="first", inline=bool(options)):
            updater.push()
        policy = counters(0)
        with receiver_of(updater, policy, worker="late", inline=True) as late:
            assert late.pull() == seen(policy) == 1
            assert late.pull() is None
            updater.push(counters(2))
            assert late.version == seen(policy) == 2


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_a_worker_with_a_newer_epoch_takes_the_next_push(
    updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's clock was set back since the worker last heard of one."""
    with receiver_of(updater, worker="old"):
        updater.push()
        updater.push(counters(2))
    stamp = Version(updater.run + 1_000_000, 9)
    kept = receiver_module._State(Have(stamp, stamp, stamp), True)
    with monkeypatch.context() as patch:
        patch.setattr(receiver_module, "_State", lambda: kept)
        receiver = receiver_of(updater, policy := counters(9), worker="ahead")
    assert updater.workers["ahead"].version == 9
    assert receiver.pull(0.0) is None
    with pytest.raises(WaitTimeout, match="ahead"):
        updater.wait(2, timeout=0.1)  # what it has of another trainer does not count
    report = updater.push(counters(3))
    assert report.version == 3
    assert report.run == updater.run > stamp.epoch
    assert receiver.pull() == seen(policy) == 3
    for version in (1, 2, 3):
        report = updater.wait(version, timeout=5.0)
        assert report.receipts["ahead"].state == "applied"
        assert (report.version, report.run > stamp.epoch) == (version, version == 3)


def test_a_subset_lies_on_a_base_of_the_epoch_before(updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch) -> None:
    updater.push()
    stamp = Version(updater.run + 1_000_000, 9)
    kept = receiver_module._State(Have(stamp, stamp, stamp), True)
    with monkeypatch.context() as patch:
        patch.setattr(receiver_module, "_State", lambda: kept)
        receiver = receiver_of(updater, policy := counters(9), worker="ahead")
    updater.wait_for_workers(1)
    assert updater.push(one(2), partial=True).version == 2
    assert receiver.pull() == 2
    assert [int(tensor[0]) for tensor in policy.values()] == [2, 1, 1, 1, 1, 1]


def test_wait_for_what_a_stuck_worker_has(updater: WeightUpdater) -> None:
    receiver = receiver_of(updater, worker="w")
    updater.push()
    receiver.pull()
    with pytest.raises(WaitTimeout):
        updater.push(counters(2), wait="applied", timeout=0.1)
    assert updater.workers["w"].state == "stuck"
    with took(at_most=QUICK):
        assert updater.wait(1).receipts["w"].state == "applied"


def test_wait_where_nothing_was_pushed_or_nobody_is_there() -> None:
    with WeightUpdater("vanilla", counters(42), start_version=41) as updater:
        for version in (None, 41, 42):
            with pytest.raises(ValueError, match="not pushed"):
                updater.wait(version)
        updater.push()
        with pytest.raises(PushError, match="no worker"):
            updater.wait(state="applied")
        assert updater.wait(state="staged").receipts == {}
        with receiver_of(updater, worker="w") as receiver:
            receiver.pull()
            report = updater.wait()
            sent = sum(tensor.nbytes for tensor in counters(0).values())
            assert (report.version, report.tensors, report.nbytes) == (42, 6, sent)


@pytest.mark.parametrize("timeout", [-1.0, math.nan, math.inf, -math.inf])
def test_timeouts_are_numbers_of_seconds(updater: WeightUpdater, timeout: float) -> None:
    receiver = receiver_of(updater, worker="w")
    updater.push()
    receiver.pull()
    calls: list[Callable[[], Any]] = [
        lambda: WeightUpdater("vanilla", timeout=timeout),
        lambda: WeightReceiver("vanilla://x", timeout=timeout),
        lambda: updater.push(timeout=timeout),
        lambda: updater.wait(timeout=timeout),
        lambda: updater.wait_for_workers(1, timeout),
        lambda: receiver.pull(timeout),
        lambda: receiver.wait(1, timeout),
        lambda: receiver.close(timeout),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="timeout"):
            call()
    assert updater.version == 1, "no push was begun"


def test_no_timeout_is_the_ends_own(updater: WeightUpdater) -> None:
    receiver = receiver_of(updater, worker="w")
    assert updater.wait_for_workers(1, None) == ["w"]
    updater.push(timeout=None)
    assert receiver.pull(None) == 1
    updater.push(timeout=None)
    assert receiver.pull(None) == 2
    assert receiver.wait(2, None) == 2
    assert updater.wait(timeout=None).receipts["w"].state == "applied"
    receiver.close(None)
    updater.close(None)


def test_close_with_a_wrong_timeout_closes_nothing(updater: WeightUpdater) -> None:
    with pytest.raises(ValueError, match="timeout"):
        updater.close(-1.0)
    assert updater.push().version == 1


def test_close_pays_a_report_that_is_owed(updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = receiver_of(updater, worker="w")
    updater.push()
    step_in(monkeypatch, receiver._receiver, "report", raises(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        receiver.pull()
    assert receiver.version == 1, "the version is applied all the same"
    assert updater.workers["w"].version == 0
    receiver.close()
    assert [type(event) for event in updater._sender.events(NOW)] == [Applied, Left]


def test_a_hook_that_fails_in_push_is_told_by_that_push(updater: WeightUpdater) -> None:
    receiver = receiver_of(updater, worker="w", inline=True)
    receiver.on_applied(lambda _: raises(RuntimeError)())
    with pytest.raises(ApplyError, match="forced"):
        updater.push(wait="applied")
    assert receiver.version == 1
