"""The demo over this backend, run as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from weightwire.transport import Deadline

DEMO = Path(__file__).parents[3] / "examples" / "cartpole.py"


def demo(*arguments: str, seconds: float) -> str:
    """What it prints; it has to succeed, and to leave nothing behind."""
    command = [sys.executable, str(DEMO), "--backend", "nccl", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as running:
        try:
            out, err = running.communicate(timeout=seconds)
        except BaseException:
            os.killpg(running.pid, signal.SIGKILL)
            raise
    assert (running.returncode, err) == (0, ""), out
    deadline = Deadline.after(10)
    with suppress(ProcessLookupError):
        while True:  # a helper of multiprocessing's ends a moment after the demo
            os.killpg(running.pid, 0)
            assert not deadline.expired, "it has left processes behind"
    return out


def test_workers_act_with_what_was_pushed() -> None:
    out = demo("--seconds", "1", "--goal", "1", seconds=90)
    assert "versions pushed to 2 workers over nccl://127.0.0.1:" in out


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_it_learns_what_the_default_does() -> None:
    assert "(goal 400)" in demo(seconds=240)
