"""What a gated receiver leaves behind: forks, the end of the interpreter, many versions."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from textwrap import dedent
from typing import Any

import pytest

from weightwire import ClosedError, WeightUpdater
from weightwire.collectors.gate import GatedReceiver
from weightwire.testing.body import Usage
from weightwire.testing.states import counters, seen
from weightwire.testing.workers import until

PATIENCE = 20.0


def in_a_child(check: object) -> int:
    """Fork, call ``check`` in the child, and give its exit status: 0 where nothing was raised."""
    with warnings.catch_warnings():  # newer Pythons warn of forks with threads, which is what is tried here
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            check()  # type: ignore[operator]
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


@pytest.mark.parametrize("apply", ["copy", "alias"])
def test_a_fork_has_whole_weights_and_a_receiver_that_says_what_it_is(apply: str) -> None:
    """Again and again in the middle of updates; and once within a block that the child leaves as well."""
    size = 300_000
    with WeightUpdater("ipc://", timeout=PATIENCE) as updater:
        receiver = GatedReceiver(updater.endpoint, counters(0, 4, size), apply=apply, timeout=PATIENCE)
        over = threading.Event()

        def train() -> None:
            while not over.is_set():
                updater.push(counters(updater.version + 1, 4, size))

        def values(receiver: GatedReceiver) -> list[Any]:
            arrays = [tensor.numpy() for tensor in receiver.weights.values()]
            return [value for array in arrays for value in (array.min(), array.max())]

        def check() -> None:
            # Not with torch, whose own threads are not in the child.
            assert {int(value) for value in values(receiver)} == {receiver.version}
            with pytest.raises(ClosedError, match="is a fork"):
                receiver.acting().__enter__()
            with pytest.raises(ClosedError, match="is a fork"):
                receiver.wait()
            receiver.close()

        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            receiver.wait()
            for _ in range(10):
                assert in_a_child(check) == 0
            block = receiver.acting()
            block.__enter__()
            assert in_a_child(lambda: block.__exit__(None, None, None)) == 0
            block.__exit__(None, None, None)
        finally:
            over.set()
            trainer.join(PATIENCE)
        assert receiver.wait(updater.version) == updater.version  # nothing of the parent's was closed
        receiver.close()


def test_a_fork_from_a_hook() -> None:
    with WeightUpdater("ipc://", timeout=PATIENCE) as updater:
        receiver = GatedReceiver(updater.endpoint, counters(0), timeout=PATIENCE)
        statuses: list[int] = []
        receiver.on_applied(lambda _: statuses.append(in_a_child(lambda: seen(receiver.weights))))
        updater.wait_for_workers(1)
        updater.push(counters(1), wait="applied")
        assert receiver.wait() == 1
        assert statuses == [0]
        receiver.close()


def test_the_interpreter_ends_without_close() -> None:
    """With a receiver whose policy is acted with while an update waits, and others that have met nobody."""
    script = """
        import contextlib, threading
        from weightwire import ClosedError, WeightUpdater
        from weightwire.collectors.gate import GatedReceiver
        from weightwire.testing.states import counters
        nobodys = GatedReceiver("ipc://gate-nobody", counters(0))
        updater = WeightUpdater("ipc://", counters(1))
        receiver = GatedReceiver(updater.endpoint, counters(0))
        updater.wait_for_workers(1)
        updater.push(wait="applied")
        receiver.acting().__enter__()
        block = receiver.acting()
        block.__enter__()
        updater.push()
        def wait(what, *args):
            with contextlib.suppress(ClosedError):
                what(*args)
        for wanted in (receiver, nobodys):
            threading.Thread(target=wait, args=(wanted.wait, 9), daemon=True).start()
        threading.Thread(target=wait, args=(nobodys.acting().__enter__,), daemon=True).start()
        print("end", flush=True)
    """
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)], capture_output=True, text=True, timeout=PATIENCE * 2, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
    assert time.monotonic() - begun < PATIENCE


def test_nothing_grows() -> None:
    """Over many versions and many receivers: descriptors, threads, memory that is shared."""
    with WeightUpdater("ipc://", timeout=PATIENCE) as updater:

        def live(versions: int) -> None:
            with GatedReceiver(updater.endpoint, counters(0), worker="one", timeout=PATIENCE) as receiver:
                updater.wait_for_workers(1)
                for _ in range(versions):
                    updater.push(counters(updater.version + 1), wait="applied")
                    with receiver.acting() as version:
                        assert version == updater.version
            until(lambda: not updater.workers, "it has left")

        live(20)
        before = Usage.now()
        live(300)
        for _ in range(10):
            live(1)
        after = Usage.now()
    assert after.fds <= before.fds
    assert after.threads <= before.threads
    assert after.shared <= before.shared
    assert after.rss - before.rss < 8 << 20
