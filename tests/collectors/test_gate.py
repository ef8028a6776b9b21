"""The gated receiver with threads that act, a trainer that pushes, and everything that goes wrong between them."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from weightwire import (
    ApplyError,
    ClosedError,
    EndpointInUseError,
    PreflightError,
    PushError,
    RefusedError,
    UpdaterLostError,
    WaitTimeout,
    WeightReceiver,
    WeightUpdater,
    hookimpl,
)
from weightwire.collectors.gate import GatedReceiver
from weightwire.testing.rig import interrupted
from weightwire.testing.states import counters, seen
from weightwire.testing.workers import until

PATIENCE = 20.0
BACKENDS = ["vanilla://", "ipc://"]


@pytest.fixture(params=BACKENDS)
def updater(request: pytest.FixtureRequest) -> Iterator[WeightUpdater]:
    up = WeightUpdater(request.param, timeout=PATIENCE)
    yield up
    up._shut(None)  # late failures are the test's own business


@pytest.fixture
def gated() -> Iterator[Callable[..., GatedReceiver]]:
    """Makes gated receivers, and closes them."""
    made: list[GatedReceiver] = []

    def make(updater: WeightUpdater | str, weights: Any = None, **options: Any) -> GatedReceiver:
        place = updater if isinstance(updater, str) else updater.endpoint
        made.append(GatedReceiver(place, weights, **{"timeout": PATIENCE, "worker": "gated", **options}))
        if not isinstance(updater, str):
            updater.wait_for_workers(1)
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8, thread_name_prefix="actor") as pool:
        yield pool


def push(updater: WeightUpdater, **options: Any) -> int:
    return updater.push(counters(updater.version + 1), **options).version


def push_on(updater: WeightUpdater) -> None:
    """Push, and do not mind what went wrong with this version or the one before."""
    with contextlib.suppress(PushError):
        push(updater, wait="none")


class Held:
    """A thread that acts until it is told to stop."""

    def __init__(self, pool: ThreadPoolExecutor, receiver: GatedReceiver) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self.version: Future[tuple[int, int]] = pool.submit(self._act, receiver)
        assert self.inside.wait(PATIENCE)

    def _act(self, receiver: GatedReceiver) -> tuple[int, int]:
        with receiver.acting() as version:
            self.inside.set()
            assert self.go.wait(PATIENCE)
            assert receiver.version == version
            return version, seen(receiver.weights)

    def end(self) -> tuple[int, int]:
        self.go.set()
        return self.version.result(PATIENCE)


def all_of(state: dict[str, torch.Tensor]) -> set[int]:
    """The values in a state, as ``seen`` has them, but quick."""
    return {int(value) for tensor in state.values() for value in (tensor.min(), tensor.max())}


def shut(receiver: GatedReceiver) -> None:
    """Wait until an update waits for those who act."""
    until(lambda: receiver._keeper.gate.why.startswith("an update waits"), "the gate is shut")


# -- one version a block ---------------------------------------------------------------------------------------------


def test_a_block_gives_the_version_that_acts(updater: WeightUpdater, gated: Any) -> None:
    weights = counters(0)
    receiver = gated(updater, weights)
    assert (receiver.version, receiver.ready, receiver.run, receiver.stamp) == (0, False, 0, None)
    push(updater, metadata={"step": 3})
    with receiver.acting() as version:
        assert version == 1
        assert seen(weights) == 1
        assert receiver.weights is weights
        assert (receiver.version, receiver.ready, receiver.run) == (1, True, updater.run)
        assert receiver.stamp == (updater.run, 1)
        assert receiver.metadata == {"step": 3}
        assert receiver.connected
        assert not receiver.closed
    assert "version 1, connected" in repr(receiver)


def test_who_comes_before_the_first_version_waits_for_it(updater: WeightUpdater, gated: Any, pool: Any) -> None:
    receiver = gated(updater)

    def act() -> tuple[int, int]:
        with receiver.acting() as version:
            return version, seen(receiver.weights)

    acts = [pool.submit(act) for _ in range(4)]
    until(lambda: len(receiver._keeper.gate._queue) == 4, "all wait")
    push(updater)
    assert {act.result(PATIENCE) for act in acts} == {(1, 1)}


def test_an_update_waits_for_a_block_and_the_next_block_for_the_update(
    updater: WeightUpdater, gated: Any, pool: Any
) -> None:
    receiver = gated(updater, counters(0))
    push(updater)
    receiver.wait()
    first = Held(pool, receiver)
    push(updater, wait="none")
    shut(receiver)
    late = pool.submit(lambda: Held(pool, receiver).end())
    until(lambda: receiver._keeper.gate._queue, "the next one waits")
    assert receiver.version == 1
    assert first.end() == (1, 1)
    assert late.result(PATIENCE) == (2, 2)
    assert receiver.wait(2) == 2
    waited = updater.wait(2).receipts["gated"].seconds
    assert waited["wait"] > 0  # the time at the gate has its name
    assert {"verify", "wait", "commit"} <= waited.keys()


@pytest.mark.parametrize("apply", ["copy", "alias", "stream"])
@pytest.mark.parametrize(  # small ones are copied out of shared memory even where aliased
    ("place", "size"), [("ipc://", 512), ("ipc://", 300_000), ("nccl://127.0.0.1:0", 20_000)]
)
def test_no_block_ever_sees_a_mix(apply: str, place: str, size: int, gated: Any, pool: Any) -> None:
    """Threads that act all the time, and a trainer that pushes all the time: neither starves the other."""
    over, tensors = threading.Event(), 4
    counts, versions = [0] * 4, set()
    with WeightUpdater(place, counters(0, tensors, size), timeout=PATIENCE) as updater:
        options = {"stream": True} if apply == "stream" else {"apply": apply}
        receiver = gated(updater, counters(0, tensors, size), **options)

        def act(me: int) -> None:
            while not over.is_set():
                with receiver.acting() as version:
                    assert all_of(receiver.weights) == {version}
                    versions.add(version)
                    assert receiver.version == version
                    assert all_of(receiver.weights) == {version}
                counts[me] += 1

        acts = [pool.submit(act, me) for me in range(len(counts))]
        try:
            while (len(versions) < 20 or min(counts) < 30) and not any(act.done() for act in acts):
                updater.push(counters(updater.version + 1, tensors, size))
        finally:
            over.set()
        for act in acts:
            act.result(PATIENCE)
        assert receiver.wait(updater.version) == updater.version


def test_blocks_nest_while_an_update_waits(updater: WeightUpdater, gated: Any) -> None:
    receiver = gated(updater, counters(0))
    push(updater)
    with receiver.acting() as outer:
        push(updater, wait="none")
        shut(receiver)
        with receiver.acting(timeout=0.0) as inner, receiver.acting(timeout=0.0) as innermost:
            assert outer == inner == innermost == 1
        assert receiver.version == 1
    assert receiver.wait(2) == 2


def test_a_block_may_end_in_another_thread_and_holds_as_long_as_the_last(
    updater: WeightUpdater, gated: Any, pool: Any
) -> None:
    receiver = gated(updater, counters(0))
    push(updater)
    with contextlib.ExitStack() as outer, contextlib.ExitStack() as inner:
        outer.enter_context(receiver.acting())
        inner.enter_context(receiver.acting())
        push(updater, wait="none")
        shut(receiver)
        pool.submit(outer.close).result(PATIENCE)
        assert receiver.version == 1
        pool.submit(inner.close).result(PATIENCE)
        assert receiver.wait(2) == 2


def test_an_exception_ends_the_block(updater: WeightUpdater, gated: Any) -> None:
    receiver = gated(updater, counters(0))
    push(updater)
    with pytest.raises(ZeroDivisionError), receiver.acting(), receiver.acting():
        _ = 1 / 0
    push(updater, wait="applied")
    assert receiver.wait(2) == 2


def test_a_block_is_for_one_use(updater: WeightUpdater, gated: Any) -> None:
    receiver = gated(updater)
    push(updater)
    block = receiver.acting()
    with block, pytest.raises(RuntimeError, match=r"call acting\(\) for each one"):
        block.__enter__()
    with pytest.raises(RuntimeError, match=r"call acting\(\) for each one"):
        block.__enter__()
    push(updater, wait="applied")


def test_two_receivers_have_gates_of_their_own(updater: WeightUpdater, gated: Any) -> None:
    one, two = gated(updater, worker="one"), gated(updater, worker="two")
    push(updater, wait="applied")
    with one.acting():
        push(updater, wait="none")
        assert two.wait(2) == 2
        with two.acting() as version:
            assert version == 2
        assert one.version == 1
    assert one.wait(2) == 2


def test_ctrl_c_leaves_no_block_behind(updater: WeightUpdater, gated: Any) -> None:
    receiver = gated(updater, counters(0))
    push(updater, wait="applied")

    def act_for_ever() -> None:
        while True:
            with receiver.acting(), receiver.acting():
                pass

    gc.collect()
    gc.disable()  # Hypothesis hears of collections in a callback of Python code, in which a Ctrl-C is lost
    try:
        for n in range(40):
            assert interrupted(act_for_ever, after=0.002 + n * 1e-5)
    finally:
        gc.enable()
    push(updater, wait="applied")
    assert receiver._keeper.gate.inside() == "nobody"


# -- waits that end --------------------------------------------------------------------------------------------------


def test_without_a_trainer_the_wait_is_bounded_and_says_so(gated: Any) -> None:
    receiver = gated("ipc://nobody-is-there", timeout=0.2)
    with pytest.raises(WaitTimeout, match=r"gated.*waited 0.2 s for a first version for thread '.*' to act"):
        receiver.acting().__enter__()
    with pytest.raises(WaitTimeout, match=r"waited 0.05 s for version 1: there is no trainer"):
        receiver.wait(timeout=0.05)
    assert receiver.error is None


def test_with_a_trainer_that_has_pushed_nothing(updater: WeightUpdater, gated: Any) -> None:
    receiver = gated(updater, timeout=0.3)
    until(lambda: receiver.connected, "they met")
    with pytest.raises(WaitTimeout, match="the trainer is there, but has pushed none"):
        receiver.acting().__enter__()
    push(updater, wait="applied")
    with pytest.raises(
        WaitTimeout, match=r"waited 0.05 s for version 2: the trainer is there, version 1 is the newest"
    ):
        receiver.wait(2, timeout=0.05)


def test_who_acts_on_and_on_is_named_and_holds_up_only_the_update(
    updater: WeightUpdater, gated: Any, pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = gated(updater, counters(0), timeout=1.0)
    push(updater, wait="applied")
    stuck = Held(pool, receiver)
    push(updater, wait="none")
    shut(receiver)
    with pytest.raises(WaitTimeout, match=r"waited 0.05 s to act, but an update waits .*: thread 'actor_0' \(for"):
        receiver.acting(timeout=0.05).__enter__()
    with receiver.acting(timeout=PATIENCE) as version:  # the update gives up before
        assert version == 1
    with pytest.raises(WaitTimeout, match=r"an update waited 1 s for those who act: thread 'actor_0' \(for"):
        receiver.wait(2)
    assert isinstance(receiver.error, WaitTimeout)
    assert receiver.error.worker == "gated"
    for _ in range(3):  # nobody is kept waiting any more
        with receiver.acting(timeout=0.0) as version:
            assert version == 1
    push(updater, wait="none")
    assert stuck.end() == (1, 1)
    until(lambda: receiver.version == 3, "the newest has come in")
    assert receiver.wait(3) == 3
    assert receiver.error is None
    assert [record.levelno for record in caplog.records if "went wrong" in record.message] == [logging.WARNING]


def test_waiting_is_for_numbers(updater: WeightUpdater, gated: Any, pool: Any) -> None:
    receiver = gated(updater)
    waits = [pool.submit(receiver.wait, version) for version in (1, 3, 2)]
    for _ in range(3):
        push(updater, wait="applied")
    assert [wait.result(PATIENCE) >= version for wait, version in zip(waits, (1, 3, 2))] == [True] * 3
    assert receiver.wait(2) == 3


def test_the_log_says_once_that_nobody_is_there(
    gated: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightwire.collectors.gatekeeper.SILENCE", 0.1)
    receiver = gated("ipc://nobody-is-there")
    until(lambda: caplog.records, "something is said")
    assert "has heard nothing for 0.1 s" in caplog.text
    assert "nobody-is-there" in caplog.text
    with pytest.raises(WaitTimeout):
        receiver.wait(timeout=0.4)
    assert len(caplog.records) == 1


# -- errors of updates -----------------------------------------------------------------------------------------------


def test_a_version_that_does_not_fit_is_told_to_whoever_waits_for_it(
    updater: WeightUpdater, gated: Any, pool: Any
) -> None:
    # With a callable the trainer does not know what the worker takes, and so the worker finds out.
    receiver = gated(updater, counters(0), select=lambda name: True)
    push(updater, wait="applied")
    later, soon = pool.submit(receiver.wait, 3), pool.submit(receiver.wait, 2)
    with contextlib.suppress(RefusedError):
        updater.push({"layer0.weight": torch.zeros(3)}, wait="none")
    with pytest.raises(PreflightError, match=r"layer0\.weight"):
        soon.result(PATIENCE)
    assert isinstance(receiver.error, PreflightError)
    with receiver.acting() as version:  # the old version acts on
        assert (version, seen(receiver.weights)) == (1, 1)
    with pytest.raises(PreflightError):  # it is kept
        receiver.wait(2)
    assert not later.done()  # which waits for another one
    push_on(updater)
    assert later.result(PATIENCE) == 3
    assert receiver.wait(2) == 3
    assert receiver.error is None


def test_before_the_first_version_whoever_wants_to_act_is_told_what_went_wrong(gated: Any, pool: Any) -> None:
    fails = threading.Event()
    fails.set()

    def target(tensors: Any) -> None:
        if fails.is_set():
            raise ValueError("not today")

    with contextlib.ExitStack() as stack:
        updater = WeightUpdater("ipc://")
        stack.callback(updater._shut, None)
        receiver = gated(updater, target)
        early = pool.submit(receiver.acting().__enter__)
        until(lambda: receiver._keeper.gate._queue, "somebody waits")
        push_on(updater)
        with pytest.raises(ApplyError, match="could not apply version 1 in phase commit: ValueError: not today"):
            early.result(PATIENCE)
        with pytest.raises(ApplyError, match="not today"):
            receiver.acting().__enter__()
        with pytest.raises(ApplyError, match="not today") as caught:
            receiver.wait()
        assert isinstance(caught.value.__cause__, ValueError)
        assert caught.value.phase == "commit"
        fails.clear()
        push_on(updater)
        assert receiver.wait(2) == 2
        fails.set()
        push_on(updater)  # a callable that raised has ruined what there was
        with pytest.raises(ApplyError, match="not today"):
            receiver.wait(3)
        assert not receiver.ready
        with pytest.raises(ApplyError, match="not today"):
            receiver.acting().__enter__()
        fails.clear()
        push_on(updater)
        assert receiver.wait(4) == 4
        with receiver.acting() as version:
            assert version == 4


def test_each_who_waits_gets_an_error_of_his_own_that_holds_no_memory(gated: Any) -> None:
    alive: list[weakref.ref[Any]] = []

    def target(tensors: dict[str, torch.Tensor]) -> None:
        alive.extend(map(weakref.ref, tensors.values()))
        raise ValueError("not today")

    updater = WeightUpdater("ipc://")
    receiver = gated(updater, target)
    push_on(updater)
    errors = []
    for _ in range(2):
        with pytest.raises(ApplyError) as caught:
            receiver.wait()
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    updater._shut(None)
    receiver.close()
    gc.collect()
    assert alive
    assert not any(reference() is not None for reference in alive)


def test_a_hook_that_fails_is_told_but_the_policy_acts(updater: WeightUpdater, gated: Any) -> None:
    receiver = gated(updater, counters(0))
    fails = threading.Event()

    @receiver.on_applied
    def hook(version: int) -> None:
        if fails.is_set():
            raise SystemExit("a hook that wants to exit") if version == 3 else OSError("the disk is full")

    push(updater, wait="applied")
    fails.set()
    push_on(updater)
    with pytest.raises(ApplyError, match=r"acts with version 2, but hook .*hook raised OSError: the disk is full"):
        receiver.wait(2)
    with receiver.acting() as version:
        assert (version, seen(receiver.weights)) == (2, 2)
    push_on(updater)
    until(lambda: receiver.version == 3, "the next one came")
    with pytest.raises(SystemExit):
        receiver.wait(3)
    fails.clear()
    push_on(updater)
    assert receiver.wait(4) == 4


def test_a_name_that_is_taken_is_an_error_until_it_is_free(gated: Any) -> None:
    with WeightUpdater("ipc://", counters(1)) as updater:
        with WeightReceiver(updater.endpoint, worker="gated") as other:
            updater.push()
            assert other.pull() == 1
            receiver = gated(updater)
            with pytest.raises(EndpointInUseError, match="gated"):
                receiver.wait()
            with pytest.raises(EndpointInUseError, match="gated"):
                receiver.acting().__enter__()
        until(lambda: receiver.version == 1, "the name is free")
        assert receiver.wait() == 1
        assert receiver.error is None


# -- hooks, observers ------------------------------------------------------------------------------------------------


def test_hooks_run_while_nobody_acts_and_may_act_themselves(updater: WeightUpdater, gated: Any, pool: Any) -> None:
    receiver = gated(updater, counters(0))
    looked: list[tuple[int, int, int]] = []
    refused: list[str] = []

    @receiver.on_applied
    def look(version: int) -> None:
        with receiver.acting(timeout=0.0) as inner:
            looked.append((version, inner, seen(receiver.weights)))
        with pytest.raises(WaitTimeout, match="an update is being applied"):
            pool.submit(lambda: receiver.acting(timeout=0.01).__enter__()).result(PATIENCE)
        try:
            receiver.wait(version + 1)
        except RuntimeError as exc:
            refused.append(str(exc))

    push(updater, wait="applied")
    push(updater, wait="applied")
    assert looked == [(1, 1, 1), (2, 2, 2)]
    assert "its own thread cannot wait for version 2" in refused[0]


def test_observers_hear_as_ever(updater: WeightUpdater, gated: Any) -> None:
    heard: list[tuple[int, str]] = []

    class Observer:
        @hookimpl
        def weightwire_after_pull(self, receipt: Any) -> None:
            heard.append((receipt.version, receipt.state))

    receiver = gated(updater, observers=[Observer()])
    push(updater, wait="applied")
    receiver.wait()
    assert heard == [(1, "applied")]


# -- ends ------------------------------------------------------------------------------------------------------------


def test_close_lets_who_acts_finish_and_nobody_begin(updater: WeightUpdater, gated: Any, pool: Any) -> None:
    receiver = gated(updater, counters(0))
    push(updater, wait="applied")
    held = Held(pool, receiver)
    push(updater, wait="none")
    shut(receiver)
    waiting, queued = pool.submit(receiver.wait, 2), pool.submit(receiver.acting().__enter__)
    until(lambda: receiver._keeper.gate._queue, "somebody is at the gate")
    receiver.close()
    receiver.close()
    assert receiver.closed
    assert not receiver._keeper.thread.is_alive()
    for future in (waiting, queued):
        with pytest.raises(ClosedError, match=r"gated.*was closed"):
            future.result(PATIENCE)
    with pytest.raises(ClosedError):
        receiver.acting().__enter__()
    with pytest.raises(ClosedError):
        receiver.wait(2)
    assert receiver.wait(1) == 1
    assert held.end() == (1, 1)
    assert "closed" in repr(receiver)


def test_close_from_a_hook_takes_effect_after_it(updater: WeightUpdater, gated: Any) -> None:
    receiver = gated(updater, counters(0))
    receiver.on_applied(lambda _: receiver.close())
    push(updater, wait="none")
    receiver._keeper.thread.join(PATIENCE)
    assert not receiver._keeper.thread.is_alive()
    assert (receiver.version, seen(receiver.weights)) == (1, 1)


def test_close_says_what_it_waits_for(updater: WeightUpdater, gated: Any) -> None:
    receiver = gated(updater, counters(0))
    begun, go = threading.Event(), threading.Event()

    @receiver.on_applied
    def dawdle(version: int) -> None:
        begun.set()
        assert go.wait(PATIENCE)

    push(updater, wait="none")
    assert begun.wait(PATIENCE)
    with pytest.raises(WaitTimeout, match=r"has not ended in 0.1 s: an update is being applied; it will when the hook"):
        receiver.close(0.1)
    go.set()
    receiver.close()
    assert not receiver._keeper.thread.is_alive()


def test_the_goodbye_of_the_trainer(updater: WeightUpdater, gated: Any, pool: Any) -> None:
    early, receiver = gated(updater, worker="early", select=["none*"]), gated(updater, counters(0))
    waiting, queued = pool.submit(receiver.wait, 9), pool.submit(early.acting().__enter__)
    with contextlib.suppress(Exception):
        push(updater, wait="applied")
    assert receiver.wait() == 1
    updater._shut(None)
    with pytest.raises(ClosedError, match="the trainer has closed"):
        waiting.result(PATIENCE)
    with pytest.raises((ClosedError, PreflightError)):
        queued.result(PATIENCE)
    until(lambda: receiver.closed, "it has heard of it")
    with receiver.acting() as version:  # what was applied lives on
        assert (version, seen(receiver.weights)) == (1, 1)


def test_the_goodbye_of_a_trainer_that_never_pushed(updater: WeightUpdater, gated: Any, pool: Any) -> None:
    receiver = gated(updater)
    queued = pool.submit(receiver.acting().__enter__)
    until(lambda: receiver._keeper.gate._queue, "somebody waits")
    updater.close()
    with pytest.raises(ClosedError, match="the trainer has closed; no version will come"):
        queued.result(PATIENCE)
    with pytest.raises(ClosedError, match="no version will come"):
        receiver.acting().__enter__()


def test_a_receiver_that_is_forgotten_ends(updater: WeightUpdater) -> None:
    receiver = GatedReceiver(updater.endpoint, worker="forgotten")
    updater.wait_for_workers(1)
    push(updater, wait="applied")
    thread = receiver._keeper.thread
    assert list(updater.workers) == ["forgotten"]
    del receiver
    gc.collect()
    assert not thread.is_alive()
    until(lambda: not updater.workers, "it has said goodbye")


def test_a_constructor_that_fails_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="apply is 'sideways'"):
        GatedReceiver("ipc://x", apply="sideways")
    with pytest.raises(ValueError, match="timeout is -1"):
        GatedReceiver("ipc://x", timeout=-1)
    assert threading.active_count() == before


def test_a_trainer_that_is_lost_and_another_that_takes_over(gated: Any) -> None:
    """The updater is abandoned without a goodbye: another one in its place goes on."""
    from weightwire.testing.workers import ProcessWorker

    trainer = ProcessWorker("trainer")
    successor = ProcessWorker("successor")
    try:
        place, run = trainer.do("lead", "ipc://gate-takeover", timeout=PATIENCE)
        receiver = gated(place, counters(0))
        for _ in range(3):
            trainer.do("push", wait="staged")
        assert receiver.wait(1) <= 3
        trainer.kill()
        until(lambda: not receiver.connected, "the loss is noticed")
        with pytest.raises(UpdaterLostError, match=r"waited 0.1 s for version 9: the trainer is lost"):
            receiver.wait(9, timeout=0.1)
        with receiver.acting() as version:
            assert seen(receiver.weights) == version
        _, newer = successor.do("lead", "ipc://gate-takeover", timeout=PATIENCE)
        assert newer > run
        successor.do("wait_for_workers", 1, PATIENCE)
        successor.do("push", wait="applied")
        until(lambda: receiver.run == newer, "the successor's version acts")
        with receiver.acting() as version:
            assert (version, seen(receiver.weights)) == (1, 1)
    finally:
        trainer.end()
        successor.end()


# -- the seam in the plain receiver ----------------------------------------------------------------------------------


def test_a_lock_guards_a_plain_receiver(updater: WeightUpdater) -> None:
    lock, held = threading.Lock(), []
    with WeightReceiver(updater.endpoint, counters(0), guard=lock, worker="plain") as receiver:
        receiver.on_applied(lambda _: held.append(lock.locked()))
        push(updater)
        assert receiver.pull() == 1
        assert held == [True]
        assert not lock.locked()


def test_what_a_guard_raises_touches_nothing_and_the_version_comes_again(updater: WeightUpdater) -> None:
    class Guard:
        fails = True

        def __enter__(self) -> None:
            if self.fails:
                raise TimeoutError("busy")

        def __exit__(self, *_: object) -> None: ...

    guard = Guard()
    with WeightReceiver(updater.endpoint, counters(0), guard=guard, worker="plain") as receiver:
        push(updater)
        for _ in range(3):
            with pytest.raises(TimeoutError, match="busy"):
                receiver.pull()
        assert (receiver.version, receiver.ready, seen(receiver.weights)) == (0, False, 0)
        guard.fails = False
        assert receiver.pull() == 1
        assert updater.wait(1).receipts["plain"].state == "applied"


@pytest.mark.parametrize("where", ["hook", "signal handler"])
def test_a_pull_within_a_pull_is_refused_and_harms_nobody(updater: WeightUpdater, where: str) -> None:
    refused: list[str] = []
    with WeightReceiver(updater.endpoint, counters(0), worker="plain", timeout=PATIENCE) as receiver:

        def pull(*_: Any) -> None:
            try:
                receiver.pull()
            except RuntimeError as exc:
                refused.append(str(exc))

        if where == "hook":
            receiver.on_applied(pull)
        before = signal.signal(signal.SIGALRM, pull if where == "signal handler" else signal.SIG_DFL)
        try:
            deadline = time.monotonic() + PATIENCE
            while len(refused) < 20:
                assert time.monotonic() < deadline
                push(updater)
                if where == "signal handler":
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + updater.version % 20))
                receiver.pull()
                assert receiver.version == updater.version == seen(receiver.weights)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert all("is in the middle of a pull of this thread" in text for text in refused)
        push(updater)
        assert receiver.pull() == updater.version


def test_an_inline_receiver_has_no_guard() -> None:
    with WeightUpdater("vanilla") as updater, pytest.raises(ValueError, match="waits for no guard"):
        WeightReceiver(updater.endpoint, counters(0), inline=True, guard=threading.Lock())
