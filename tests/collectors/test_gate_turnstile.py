"""The lock behind the gate: many visits or one writer, fair to both."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from weightwire.collectors.turnstile import Stuck, Turnstile, Visit
from weightwire.testing.workers import until
from weightwire.transport import NOW, Deadline

PATIENCE = 20.0


def opened() -> Turnstile:
    turnstile = Turnstile("nothing has come yet")
    turnstile.open()
    return turnstile


def soon() -> Deadline:
    return Deadline.after(PATIENCE)


def test_who_comes_before_it_is_opened_waits() -> None:
    turnstile, woken = Turnstile("nothing has come yet"), threading.Event()
    visit = Visit("one")
    assert not turnstile.enter(visit, "holder")
    assert not turnstile.enter(visit, "holder", woken.set)
    assert not woken.is_set()
    turnstile.open()
    assert woken.is_set()
    assert turnstile.inside().startswith("one (for ")


def test_the_writer_waits_until_the_last_has_left_and_lets_nobody_in_meanwhile() -> None:
    turnstile, first, second, late = opened(), Visit("first"), Visit("second"), Visit("late")
    assert turnstile.enter(first, 1)
    assert turnstile.enter(second, 2)
    with ThreadPoolExecutor(1) as pool:
        shut = pool.submit(turnstile.shut, "a version comes in", soon())
        until(lambda: turnstile.why, "it is shut")
        assert not turnstile.enter(late, 3, lambda: None)
        turnstile.leave(first, 1)
        assert not shut.done()
        assert turnstile.inside().startswith("second (for ")
        turnstile.leave(second, 2)
        shut.result(PATIENCE)
    assert turnstile.inside() == "nobody"
    turnstile.open()
    assert turnstile.inside().startswith("late (for ")


def test_who_queues_is_inside_before_the_writer_can_ask_again() -> None:
    turnstile, visit = opened(), Visit("queued")
    turnstile.shut("first", NOW)
    assert not turnstile.enter(visit, 1, lambda: None)
    turnstile.open()
    with pytest.raises(Stuck, match=r"^queued \(for "):
        turnstile.shut("second", NOW)


def test_a_writer_that_gives_up_lets_in_who_queues() -> None:
    turnstile, stuck, other = opened(), Visit("stuck"), Visit("other")
    assert turnstile.enter(stuck, 1)
    with ThreadPoolExecutor(1) as pool:
        shut = pool.submit(turnstile.shut, "a version comes in", Deadline.after(0.3))
        until(lambda: turnstile.why, "it is shut")
        assert not turnstile.enter(other, 2, lambda: None)
        with pytest.raises(Stuck) as caught:
            shut.result(PATIENCE)
    assert caught.value.visits == (stuck,)
    assert turnstile.why == ""
    assert other.holders
    assert not turnstile.wait_gone([stuck], NOW)
    turnstile.leave(stuck, 1)
    assert turnstile.wait_gone([stuck], NOW)  # whoever else is inside
    assert other.holders


def test_a_nested_hold_goes_in_though_it_is_shut_and_keeps_the_visit() -> None:
    turnstile, visit = opened(), Visit("outer")
    assert turnstile.enter(visit, "outer")
    with ThreadPoolExecutor(1) as pool:
        shut = pool.submit(turnstile.shut, "a version comes in", soon())
        until(lambda: turnstile.why, "it is shut")
        assert turnstile.join(visit, "inner")
        turnstile.leave(visit, "outer")
        turnstile.leave(visit, "outer")  # idempotent: the inner one still holds it
        assert not shut.done()
        turnstile.leave(visit, "inner")
        shut.result(PATIENCE)
    assert not turnstile.join(visit, "too late")


def test_what_a_finaliser_dropped_is_found() -> None:
    turnstile, visit = opened(), Visit("dropped")
    assert turnstile.enter(visit, 1)
    turnstile.dropped.append(1)
    turnstile.shut("a version comes in", NOW)
    assert turnstile.inside() == "nobody"


@pytest.mark.parametrize("leaving", ["queued", "refused"])
def test_who_leaves_the_queue_is_not_let_in(leaving: str) -> None:
    turnstile, visit, woken = Turnstile("nothing has come yet"), Visit("impatient"), threading.Event()
    assert not turnstile.enter(visit, 1, woken.set)
    if leaving == "queued":
        turnstile.leave(visit, 1)
    else:
        turnstile.turn_away(ValueError("no"))
        assert isinstance(visit.error, ValueError)
    assert woken.is_set() == (leaving == "refused")
    turnstile.open()
    assert turnstile.inside() == "nobody"


def test_who_cannot_be_woken_is_not_inside() -> None:
    def gone() -> None:
        raise RuntimeError("Event loop is closed")

    turnstile, woken = Turnstile("nothing has come yet"), threading.Event()
    wakes: list[Callable[[], object]] = [gone, woken.set]
    for n, wake in enumerate(wakes):
        assert not turnstile.enter(Visit(f"visit {n}"), n, wake)
    turnstile.open()
    assert woken.is_set()
    assert turnstile.inside().startswith("visit 1 (for ")


def test_refusals_hold_while_it_is_shut_and_endings_for_good() -> None:
    turnstile, refused, fine, over = Turnstile("nothing has come yet"), Visit("refused"), Visit("fine"), Visit("over")
    turnstile.turn_away(ValueError("unfit"))
    assert turnstile.enter(refused, 1)
    assert isinstance(refused.error, ValueError)
    turnstile.open()
    assert turnstile.enter(fine, 2)
    assert fine.error is None
    turnstile.turn_away(ValueError("does not matter while it is open"))
    turnstile.turn_away(KeyError("closed"), for_good=True)
    assert turnstile.enter(over, 3)
    assert isinstance(over.error, KeyError)
    with pytest.raises(KeyError):  # and the writer does not wait for those inside
        turnstile.shut("a version comes in", soon())


def test_an_error_names_the_eldest_and_counts_the_others() -> None:
    turnstile = opened()
    for n in range(11):
        assert turnstile.enter(Visit(f"thread {n}"), n)
    told = turnstile.inside()
    assert told.startswith("thread 0 (for ")
    assert told.endswith(" and 3 more")


def test_neither_side_starves() -> None:
    """Readers and a writer that never pause: all of them get on."""
    turnstile, over = opened(), threading.Event()
    value = [0, 0]
    counts = [0] * 4

    def read(me: int) -> None:
        while not over.is_set():
            visit, woken = Visit(f"reader {me}"), threading.Event()
            if not turnstile.enter(visit, me) and not turnstile.enter(visit, me, woken.set):
                assert woken.wait(PATIENCE)
            assert value[0] == value[1]
            counts[me] += 1
            turnstile.leave(visit, me)

    with ThreadPoolExecutor(len(counts)) as pool:
        readers = [pool.submit(read, me) for me in range(len(counts))]
        try:
            while min(counts) < 100 or value[0] < 300:
                turnstile.shut("a version comes in", soon())
                value[0] += 1
                value[1] += 1
                turnstile.open()
                assert not any(reader.done() for reader in readers)
        finally:
            over.set()
        for reader in readers:
            reader.result(PATIENCE)


def test_a_finaliser_that_comes_in_between_can_end_it() -> None:
    """It runs in whatever thread allocates, perhaps one that holds the lock."""
    turnstile, visit = Turnstile("nothing has come yet"), Visit("queued")
    assert not turnstile.enter(visit, 1, lambda: None)
    with ThreadPoolExecutor(1) as pool:

        def end() -> None:
            with turnstile.changed:
                turnstile.turn_away(KeyError("closed"), for_good=True)

        pool.submit(end).result(PATIENCE)
    assert isinstance(visit.error, KeyError)
