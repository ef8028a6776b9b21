"""SIGKILL at random moments: readers keep whole versions that only go forward, and nothing foreign is touched."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightwire.testing import Rig
from weightwire.testing.states import counters
from weightwire.testing.workers import until

END = 1_000_000


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory of our own, with a file in it that is none of Weightwire's business."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "foreign.lock").write_text("not yours")
    return tmp_path


@pytest.fixture
def rig(run_directory: Path) -> Iterator[Rig]:
    rig = Rig(lambda: "ipc://kills", frozenset({"processes"}))
    yield rig
    rig.close()


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize("kills", [50, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_trainer_is_killed_at_random_moments(rig: Rig, run_directory: Path, kills: int) -> None:
    rng = random.Random(kills)
    readers = [rig.worker("copies", counters, 0), rig.worker("aliases", counters, 0, apply="alias")]
    following = [reader.follow(END + 1, timeout=850) for reader in readers]
    for _ in range(kills):
        trainer = rig.process("trainer")
        leading = trainer.start("lead", rig.endpoint)
        if rng.random() < 0.8:
            leading.result()
            trainer.start("push_on")
        doomed = os.times().elapsed + rng.uniform(0.0, 0.06)
        until(lambda moment=doomed: os.times().elapsed >= moment, "the moment")  # type: ignore[misc]
        trainer.kill()
        trainer.end()
    last = rig.updater(start_version=END)
    last.push(counters(END + 1))
    for reader in following:
        followed = reader.result(60)
        assert followed.versions[-1] == END + 1
        assert not followed.errors
        assert len(followed.versions) > 1, "some of the trainers that were killed were heard of"
    last.close()
    assert len(names(run_directory) - {"foreign.lock"}) <= 2


def lasting_shm() -> set[str]:
    """Names of shared memory, without those that any multiprocessing program next door makes and removes at once."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@pytest.mark.parametrize("kills", [50])
def test_everybody_is_killed(rig: Rig, run_directory: Path, kills: int) -> None:
    shm = lasting_shm()
    rng = random.Random(kills)
    for _ in range(kills):
        crew = [rig.process(name) for name in ("trainer", "a", "b")]
        trainer, *workers = crew
        trainer.do("lead", rig.endpoint)
        for worker in workers:
            worker.do("open", rig.endpoint, counters, 0, worker=worker.name)
            worker.start("follow", END)
        trainer.start("push_on")
        rng.shuffle(crew)
        doomed = os.times().elapsed + rng.uniform(0.0, 0.05)
        until(lambda moment=doomed: os.times().elapsed >= moment, "the moment")  # type: ignore[misc]
        for process in crew:
            process.kill()
        for process in crew:
            process.end()
        left = names(run_directory) - {"foreign.lock"}
        assert len(left) <= 2, "one socket and one lock file"
        assert len([name for name in left if (run_directory / name).is_socket()]) <= 1
    assert (run_directory / "foreign.lock").read_text() == "not yours"
    assert lasting_shm() <= shm
    updater = rig.updater()
    worker = rig.worker("w", counters, 0)
    updater.push(counters(1))
    assert worker.pull() == 1
