from __future__ import annotations

import subprocess
import sys
import textwrap

from weightwire.testing import BackendSuite


class TestVanilla(BackendSuite):
    endpoint = "vanilla"


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
            with ends._lock:
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
