"""The gate in an event loop: tasks that act, wait, are cancelled, and loops that end."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from weightwire import ClosedError, WaitTimeout, WeightUpdater
from weightwire.collectors.gate import GatedReceiver
from weightwire.testing.states import counters, seen
from weightwire.testing.workers import until

PATIENCE = 20.0
T = TypeVar("T")


@pytest.fixture
def updater() -> Iterator[WeightUpdater]:
    with WeightUpdater("ipc://", timeout=PATIENCE) as updater:
        yield updater


@pytest.fixture
def receiver(updater: WeightUpdater) -> Iterator[GatedReceiver]:
    with GatedReceiver(updater.endpoint, counters(0), worker="server", timeout=PATIENCE) as receiver:
        updater.wait_for_workers(1)
        yield receiver


def push(updater: WeightUpdater, wait: str = "none") -> int:
    return updater.push(counters(updater.version + 1), wait=wait).version


def run(main: Coroutine[Any, Any, T]) -> T:
    """With a limit: a loop that hangs is a failure, with the name of what it hangs in."""
    return asyncio.run(asyncio.wait_for(main, PATIENCE))


def queued(receiver: GatedReceiver) -> int:
    return len(receiver._keeper.gate._queue)


def stranger(work: Coroutine[Any, Any, T], name: str = "stranger") -> asyncio.Task[T]:
    """A task that is not within the block it is started from, as a server's requests are not."""
    return contextvars.Context().run(asyncio.create_task, work, name=name)


async def shut(receiver: GatedReceiver) -> None:
    await asyncio.to_thread(until, lambda: receiver._keeper.gate.why.startswith("an update waits"), "the gate is shut")


def test_a_server_that_never_rests_and_a_trainer_that_never_rests(
    updater: WeightUpdater, receiver: GatedReceiver
) -> None:
    answers: list[int] = []
    over = threading.Event()

    async def handle() -> None:
        while not over.is_set():
            async with receiver.acting() as version:
                assert seen(receiver.weights) == version
                await asyncio.sleep(0)  # other requests, too, are in the middle of theirs
                assert seen(receiver.weights) == receiver.version == version
            answers.append(version)

    def train() -> None:
        try:
            while len(set(answers)) < 15 or len(answers) < 500:
                push(updater, wait="staged")
        finally:
            over.set()

    async def serve() -> None:
        await asyncio.gather(asyncio.to_thread(train), *(handle() for _ in range(8)))

    run(serve())
    assert answers == sorted(answers)


def test_tasks_wait_at_the_gate_without_holding_up_the_loop(updater: WeightUpdater, receiver: GatedReceiver) -> None:
    async def act() -> int:
        async with receiver.acting() as version:
            return version

    async def main() -> None:
        tasks = [asyncio.create_task(act(), name=f"early-{n}") for n in range(3)]
        while queued(receiver) < 3:
            await asyncio.sleep(0)
        await asyncio.to_thread(push, updater)
        assert await asyncio.gather(*tasks) == [1, 1, 1]
        async with receiver.acting():
            await asyncio.to_thread(push, updater)
            await shut(receiver)
            late = stranger(act())
            while queued(receiver) < 1:
                await asyncio.sleep(0)
            assert receiver.version == 1
        assert await late == 2

    run(main())


def test_a_task_that_is_cancelled_at_the_gate_leaves_nothing(updater: WeightUpdater, receiver: GatedReceiver) -> None:
    async def act() -> None:
        async with receiver.acting():
            pytest.fail("it was cancelled before")

    async def main() -> None:
        push(updater)
        async with receiver.acting():
            push(updater)
            await shut(receiver)
            task = stranger(act())
            while queued(receiver) < 1:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert queued(receiver) == 0
        assert await asyncio.to_thread(receiver.wait, 2) == 2

    run(main())
    assert receiver._keeper.gate.inside() == "nobody"


def test_a_task_that_is_cancelled_just_as_it_is_let_in_leaves_nothing(
    updater: WeightUpdater, receiver: GatedReceiver
) -> None:
    """The gate has opened and the loop has not run since: the task is inside, and is cancelled all the same."""

    async def act() -> None:
        async with receiver.acting():
            await asyncio.sleep(PATIENCE)

    async def main() -> None:
        task = asyncio.create_task(act(), name="late")
        while queued(receiver) < 1:
            await asyncio.sleep(0)
        push(updater)
        until(lambda: receiver._keeper.gate.inside().startswith("task 'late'"), "it is inside")  # blocks the loop
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert receiver._keeper.gate.inside() == "nobody"
    push(updater, wait="applied")


def test_a_task_that_is_cancelled_while_it_acts_ends_its_block(updater: WeightUpdater, receiver: GatedReceiver) -> None:
    async def act(inside: asyncio.Event) -> None:
        async with receiver.acting():
            inside.set()
            await asyncio.sleep(PATIENCE)

    async def main() -> None:
        push(updater)
        inside = asyncio.Event()
        task = asyncio.create_task(act(inside))
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(push, updater, "applied")

    run(main())


def test_a_loop_that_ends_with_tasks_at_the_gate(updater: WeightUpdater, receiver: GatedReceiver) -> None:
    async def act() -> None:
        async with receiver.acting():
            pytest.fail("there is no version")

    async def main() -> None:
        act.tasks = [asyncio.create_task(act()) for _ in range(3)]  # type: ignore[attr-defined]
        while queued(receiver) < 3:
            await asyncio.sleep(0)

    run(main())  # asyncio.run cancels what is left
    assert queued(receiver) == 0
    loop = asyncio.new_event_loop()  # one that is dropped as it is, with a task that was never cancelled
    task = loop.create_task(act())
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))
    assert queued(receiver) == 1
    loop.close()
    push(updater, wait="applied")
    push(updater, wait="applied")
    assert receiver._keeper.gate.inside() == "nobody"
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_blocks_nest_within_a_task_and_what_it_starts(updater: WeightUpdater, receiver: GatedReceiver) -> None:
    def infer() -> int:
        with receiver.acting(timeout=0.0) as version:
            return version

    async def child() -> int:
        async with receiver.acting(timeout=0.0) as version:
            return version

    async def main() -> None:
        push(updater)
        async with receiver.acting() as version:
            push(updater)
            await shut(receiver)
            async with receiver.acting(timeout=0.0) as inner:
                assert inner == version == 1
            with receiver.acting() as inner:  # nor does this one wait, so it may be in an event loop
                assert inner == 1
            assert await asyncio.to_thread(infer) == 1
            assert await asyncio.create_task(child()) == 1
        assert await asyncio.to_thread(receiver.wait, 2) == 2

    run(main())


def test_a_child_that_outlives_the_block_holds_it(updater: WeightUpdater, receiver: GatedReceiver) -> None:
    async def child(inside: asyncio.Event, go: asyncio.Event) -> int:
        async with receiver.acting() as version:
            inside.set()
            await go.wait()
            assert seen(receiver.weights) == version
        async with receiver.acting() as version:  # the first block is over, for all of them
            return version

    async def main() -> None:
        push(updater)
        inside, go = asyncio.Event(), asyncio.Event()
        async with receiver.acting():
            task = asyncio.create_task(child(inside, go))
            await inside.wait()
        push(updater)
        await shut(receiver)
        assert receiver.version == 1
        go.set()
        assert await task == 2

    run(main())


def test_a_loop_must_not_be_kept_waiting(updater: WeightUpdater, receiver: GatedReceiver) -> None:
    async def main() -> None:
        push(updater)
        with pytest.raises(RuntimeError, match=r"runs an event loop.*: async with receiver\.acting\(\)"):
            receiver.acting().__enter__()
        with pytest.raises(RuntimeError, match=r"await asyncio\.to_thread\(receiver\.wait, 3\)"):
            receiver.wait(3)
        async with receiver.acting() as version:
            assert version == 1

    run(main())


def test_waits_end(updater: WeightUpdater, receiver: GatedReceiver) -> None:
    async def act(timeout: float | None = None) -> None:
        async with receiver.acting(timeout):
            pass

    async def main() -> None:
        with pytest.raises(WaitTimeout, match=r"waited 0.05 s for a first version for task 'early' to act with"):
            await asyncio.create_task(act(0.05), name="early")
        push(updater)
        held = asyncio.Event()

        async def hold() -> None:
            async with receiver.acting():
                await held.wait()

        holding = asyncio.create_task(hold(), name="holder")
        await asyncio.to_thread(until, lambda: "holder" in receiver._keeper.gate.inside(), "it is inside")
        push(updater)
        await shut(receiver)
        with pytest.raises(WaitTimeout, match=r"task 'late' waited 0.05 s to act, but .*: task 'holder' \(for"):
            await asyncio.create_task(act(0.05), name="late")
        ended = asyncio.create_task(act())
        while queued(receiver) < 1:
            await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(receiver.close))
        with pytest.raises(ClosedError, match="was closed"):
            await ended
        held.set()
        await asyncio.gather(holding, closing)

    run(main())
