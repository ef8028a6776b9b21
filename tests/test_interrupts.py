"""Ctrl-C at every moment at which Python looks at signals: where a function of ours begins, and where a function in C
returns. Whatever was interrupted can be called again, and what has begun to close can be closed."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import le
from types import FrameType
from typing import Any

import pytest

from weightwire import PreflightError, PushError, WeightReceiver, WeightUpdater
from weightwire.collectors.gate import GatedReceiver
from weightwire.testing.rig import took
from weightwire.testing.states import counters, seen
from weightwire.transport import Deadline

OURS = f"{os.sep}weightwire"
backends = pytest.mark.parametrize("backend", ["vanilla", "ipc"])


def interrupt(call: Callable[[], Any], moment: int) -> bool:
    """Call it, and raise KeyboardInterrupt at one of those moments, in this thread only; whether it came to that."""
    left = moment

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and OURS in frame.f_code.co_filename:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    def unraisable(lost: Any) -> None:
        if lost.exc_type is not KeyboardInterrupt:  # which came up in a destructor
            said(lost)

    before, said = sys.getprofile(), sys.unraisablehook
    try:
        sys.unraisablehook = unraisable
        sys.setprofile(profile)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
        sys.unraisablehook = said
    return left <= 0


def moments(call: Callable[[int], bool], most: int = 3000) -> Iterator[int]:
    """Each moment of what ``call(moment)`` interrupts, until it was not any more."""
    for moment in range(1, most):
        if not call(moment):
            assert moment > 10, "there were interrupts"
            return
        yield moment
    raise AssertionError(f"it went on for more than {most} moments")


def push(updater: WeightUpdater, number: int) -> int:
    """The number of a version that was pushed. What went wrong in one that was interrupted may be told by the next."""
    with suppress(PushError):
        return updater.push(counters(number), timeout=5.0).version
    return updater.push(counters(number), timeout=5.0).version


@backends
def test_push_pull_and_wait(backend: str) -> None:
    with WeightUpdater(backend, counters(1), timeout=20.0) as updater, WeightReceiver(updater.endpoint) as receiver:
        number = updater.push().version
        receiver.pull()

        def work() -> None:
            updater.push(counters(number + 1))
            receiver.pull()
            updater.wait()

        for _ in moments(lambda moment: interrupt(work, moment)):
            assert updater.version >= receiver.version >= number
            number = push(updater, updater.version + 1)
            assert receiver.pull(5.0) == number == receiver.version == seen(receiver.weights)
            assert updater.wait().receipts[receiver.worker].version == number


@backends
def test_a_subset_after_an_interrupted_push_lies_on_what_everybody_has(backend: str) -> None:
    part = {"layer0.weight": counters(1)["layer0.weight"]}
    with WeightUpdater(backend, counters(1), timeout=20.0) as updater, WeightReceiver(updater.endpoint) as receiver:
        updater.push()
        receiver.pull()
        for _ in moments(lambda moment: interrupt(lambda: updater.push(part, partial=True), moment)):
            with suppress(PushError, PreflightError):
                updater.push(part, partial=True)
            push(updater, updater.version + 1)
            assert receiver.pull(5.0) == updater.version
            assert updater.push(part, partial=True).version == receiver.pull(5.0)


@backends
def test_acting_under_a_gate(backend: str) -> None:
    with WeightUpdater(backend, counters(1), timeout=20.0) as updater, GatedReceiver(updater.endpoint) as gate:
        gate.wait(updater.push().version)

        def act() -> None:
            with gate.acting():
                pass

        for _ in moments(lambda moment: interrupt(act, moment)):
            assert gate.wait(push(updater, updater.version + 1), timeout=10.0) == updater.version


@backends
@pytest.mark.parametrize("end", ["updater", "receiver", "gate"])
def test_close(backend: str, end: str) -> None:
    def look() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def leaked() -> tuple[int, int] | None:
        """What is open beyond what was before; threads that were told to end may take a while."""
        deadline = Deadline.after(10.0)
        while not all(map(le, look(), before)):
            if deadline.expired:
                return look()
            gc.collect()
        return None

    def closed(moment: int) -> bool:
        """Open both ends, and close one, interrupted once; then everybody is to know."""
        updater = WeightUpdater(backend, counters(1), timeout=20.0)
        kind = GatedReceiver if end == "gate" else WeightReceiver
        receiver: Any = kind(updater.endpoint, counters(0), worker="w", timeout=20.0)
        updater.push()
        receiver.wait(1)
        ends: tuple[Any, Any] = (updater, receiver) if end == "updater" else (receiver, updater)
        hit = interrupt(ends[0].close, moment)
        with took(at_most=10.0):
            ends[0].close()
        if end == "updater":
            receiver.pull()
            assert receiver.closed
        else:
            assert updater.push(timeout=5.0).receipts.get("w") is None or not updater.workers
        with took(at_most=10.0):
            ends[1].close()
        return hit

    closed(10**9)
    before = look()
    for moment in moments(closed):
        assert leaked() is None, (moment, before)
