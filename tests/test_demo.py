"""The demo, run as a user runs it. That it learns CartPole in full is what `make demo` shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from weightwire import WorkerLostError
from weightwire.testing import Rig
from weightwire.testing.states import counters

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
    assert "20 greedy episodes with version" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_goal_that_is_not_reached_is_a_failure() -> None:
    # No episode of CartPole-v1 returns more than 500.
    status, out, err = finish(start("--seconds", "1", "--goal", "501"))
    assert (status, err) == (1, "")
    assert "NOT reached: mean return" in out


def until_it_says(demo: subprocess.Popen[str], word: str) -> list[psutil.Process]:
    """Read what the demo prints up to a word; the processes that it has by then."""
    assert demo.stdout is not None
    assert any(word in line for line in demo.stdout)
    return psutil.Process(demo.pid).children(recursive=True)


@pytest.mark.parametrize("moment", ["starting", "version"])
@pytest.mark.parametrize("backend", ["ipc", "vanilla"])
def test_ctrl_c_ends_cleanly(backend: str, moment: str) -> None:
    demo = start("--backend", backend)
    children = until_it_says(demo, moment)
    os.killpg(demo.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    begun = time.monotonic()
    status, _, err = finish(demo)
    assert status == 130
    assert err.strip() == "Interrupted; the workers have ended."
    assert time.monotonic() - begun < 8.0  # one or two, where nothing else runs
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_ctrl_c_during_the_imports() -> None:
    demo = start()
    process, deadline = psutil.Process(demo.pid), time.monotonic() + LIMIT
    while not any("torch" in area.path for area in process.memory_maps()):
        assert time.monotonic() < deadline
    os.killpg(demo.pid, signal.SIGINT)
    status, out, err = finish(demo)
    assert (status, out, err.strip()) == (130, "", "Interrupted.")


def test_workers_leave_when_the_trainer_is_killed() -> None:
    demo = start()
    children = until_it_says(demo, "starting")
    demo.kill()
    _, _, err = finish(demo)
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=30)  # they may have torch to import before they can look
    for child in alive:
        child.kill()
    assert not alive


def test_a_worker_lost_after_the_last_push_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEMO.parent))
    from cartpole_trainer import Crew, part

    ended = []
    monkeypatch.setattr(Crew, "end", lambda self, joined: ended.append(sorted(joined)))
    rig = Rig(lambda: f"ipc://demo-{os.getpid()}", frozenset({"processes"}))
    try:
        for parting in (False, True):  # once without the demo, to see that there is something to drop
            updater = rig.updater(counters(1))
            victim = rig.victim(f"victim-{parting}", counters, 0)
            updater.wait_for_workers(1)
            updater.push()
            victim.kill()
            if parting:
                part(updater, Crew(updater.endpoint, [], 0))
            else:
                with pytest.raises(WorkerLostError):
                    updater.close()
    finally:
        rig.close()
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("plot", "fault"), [("no/such/folder.png", "there is no folder"), ("plot.xyz", "must end in one of .png")]
)
def test_a_plot_that_cannot_be_is_refused_beforehand(plot: str, fault: str, tmp_path: Path) -> None:
    status, out, err = finish(start("--plot", str(tmp_path / plot)))
    assert (status, out) == (2, "")
    assert fault in err


def test_an_unknown_backend_is_told_in_a_line() -> None:
    status, _, err = finish(start("--backend", "carrier-pigeon"))
    assert status == 2
    assert err.startswith("UnknownBackendError: ")
    assert "Traceback" not in err
