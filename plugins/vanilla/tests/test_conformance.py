from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from weightwire import EndpointError, WeightReceiver, WeightUpdater
from weightwire.testing import BackendSuite
from weightwire.testing.states import counters
from weightwire_vanilla import ends


class TestVanilla(BackendSuite):
    endpoint = "vanilla"


def test_a_worker_needs_to_know_the_place() -> None:
    with pytest.raises(EndpointError, match=r"hand updater\.endpoint on"):
        WeightReceiver("vanilla", counters(0))


def test_a_place_that_is_given_up_while_somebody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    came, go = threading.Event(), threading.Event()

    class Places(dict[str, ends.Place]):
        def setdefault(self, *args: Any) -> ends.Place:
            place = super().setdefault(*args)
            if threading.current_thread() is not threading.main_thread() and not came.is_set():
                came.set()
                assert go.wait(60)
            return place

    monkeypatch.setattr(ends, "_places", Places())
    former, receivers = WeightUpdater("vanilla://here", counters(1)), []
    thread = threading.Thread(target=lambda: receivers.append(WeightReceiver("vanilla://here", counters(0))))
    thread.start()
    assert came.wait(60)
    former.close()
    go.set()
    thread.join(60)
    with WeightUpdater("vanilla://here", counters(2)) as updater, receivers[0] as receiver:
        updater.wait_for_workers(1, 10.0)
        updater.push()
        assert receiver.pull(10.0) == 1
    assert not ends._places


def test_a_forked_child_begins_anew() -> None:
    """Whoever was here before belongs to the parent, and so does a lock that a thread of the parent's had."""
    script = """
        import os, threading
        from weightwire import WeightReceiver, WeightUpdater
        from weightwire.testing.states import counters, seen
        from weightwire_vanilla import ends

        updater = WeightUpdater("vanilla://here", counters(1))
        receiver = WeightReceiver("vanilla://here", counters(0))
        held, over = threading.Event(), threading.Event()

        def hold():
            with next(iter(ends._places.values())).lock:
                held.set()
                over.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(60)
        child = os.fork()
        if not child:
            mine, its = WeightUpdater("vanilla://here", counters(2)), WeightReceiver("vanilla://here", counters(0))
            mine.push()
            os._exit(its.pull(10.0) != 1 or seen(its.weights) != 2)
        over.set()
        thread.join(60)
        assert os.waitpid(child, 0)[1] == 0
        updater.push()
        assert receiver.pull(10.0) == seen(receiver.weights) == 1
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
