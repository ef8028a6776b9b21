"""The benchmarks, run once with toys: every work is done, in full, by us and by every peer; every bar is judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrl", reason="the benchmarks' peers need torchrl: pip install '.[bench]'")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
IMAGES = ("bars.png", "times.png", "curves.png")


def run(*arguments: str, limit: float) -> tuple[int, str]:
    """Exit status and output; whatever happens, nothing of the run is left."""
    command = [sys.executable, str(BENCHMARKS / "run.py"), *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        return (process.communicate(timeout=limit)[0], process.returncode)[::-1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=10)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where a quick run of everything left its files, and what it wrote."""
    out = tmp_path_factory.mktemp("benchmarks")
    status, said = run("--quick", "--out", str(out), limit=900)
    assert status == 0, said
    record: dict[str, Any] = json.loads((out / "latest.json").read_text())
    return out, record


# A hundred processes.
@pytest.mark.soak
def test_every_bar_of_the_law_finds_what_it_is_about(ran: tuple[Path, dict[str, Any]]) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from bars import BARS
    finally:
        sys.path.remove(str(BENCHMARKS))
    judged = [
        (v["bar"]["bench"], v["bar"]["work"], v["bar"]["measured"], v["bar"]["against"]) for v in ran[1]["verdicts"]
    ]
    assert judged == [(bar.bench, bar.work, bar.measured, bar.against) for bar in BARS]
    assert {bench for bench, *_ in judged} >= {f"B{number}" for number in range(1, 12)}


@pytest.mark.soak
def test_every_contender_has_done_its_turns(ran: tuple[Path, dict[str, Any]]) -> None:
    contests = ran[1]["contests"]
    assert {contest["bench"] for contest in contests} >= {"C1", "C2", "C3", "C4"}
    assert not [contest["failed"] for contest in contests if contest["failed"]]
    assert all(samples for contest in contests for samples in contest["series"].values())


@pytest.mark.soak
def test_a_run_of_toys_says_so_and_draws_everything(ran: tuple[Path, dict[str, Any]]) -> None:
    out, record = ran
    assert record["toys"]
    table = (out / "latest.md").read_text()
    assert "toys" in table
    assert "reached" not in table.lower()
    assert all((out / image).read_bytes().startswith(b"\x89PNG") for image in IMAGES)


def test_some_works_with_toys(tmp_path: Path) -> None:
    """What needs neither an engine nor many workers; all of them are in the soak."""
    status, said = run("--quick", "--only", "B3,B8,B10,B11", "--out", str(tmp_path), limit=110)
    assert status == 0, said
    contests = json.loads((tmp_path / "latest.json").read_text())["contests"]
    assert {contest["bench"] for contest in contests} == {"B3", "B8", "B10", "B11"}
    assert not [contest["failed"] for contest in contests if contest["failed"]]


def test_toys_do_not_take_the_place_of_figures() -> None:
    status, said = run("--quick", limit=60)
    assert status == 2
    assert "--out" in said
