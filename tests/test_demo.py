"""The demo, run as a user runs it. That it learns CartPole in full is what `make demo` shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

DEMO = Path(__file__).parents[1] / "examples" / "cartpole.py"
LIMIT = 90.0  # seconds that any run here may take


def start(*arguments: str) -> subprocess.Popen[str]:
    """The demo in a process group of its own, as a shell starts it."""
    command = [sys.executable, "-u", str(DEMO), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def finish(demo: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr; whatever happens, nothing of the demo is left running."""
    try:
        out, err = demo.communicate(timeout=LIMIT)
        return demo.returncode, out, err
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
            demo.wait(10)


@pytest.mark.parametrize("backend", ["ipc", "vanilla"])
def test_workers_act_with_what_was_pushed(backend: str, tmp_path: Path) -> None:
    plot = tmp_path / "run.png"
    status, out, err = finish(start("--backend", backend, "--seconds", "1", "--goal", "1", "--plot", str(plot)))
    assert (status, err) == (0, "")
    assert "Reached: mean return" in out
    assert "versions pushed to 2 workers" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_goal_that_is_not_reached_is_a_failure() -> None:
    # No episode of CartPole-v1 returns more than 500.
    status, out, err = finish(start("--seconds", "1", "--goal", "501"))
    assert (status, err) == (1, "")
    assert "NOT reached: mean return" in out


@pytest.mark.parametrize("moment", ["starting", "version"])
@pytest.mark.parametrize("backend", ["ipc", "vanilla"])
def test_ctrl_c_ends_cleanly(backend: str, moment: str) -> None:
    demo = start("--backend", backend)
    assert demo.stdout is not None
    for line in demo.stdout:
        if moment in line:
            break
    children = psutil.Process(demo.pid).children(recursive=True)
    os.killpg(demo.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    status, _, err = finish(demo)
    assert status == 130
    assert err.strip() == "Interrupted; the workers have ended."
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_an_unknown_backend_is_told_in_a_line() -> None:
    status, _, err = finish(start("--backend", "carrier-pigeon"))
    assert status == 2
    assert err.startswith("UnknownBackendError: ")
    assert "Traceback" not in err
