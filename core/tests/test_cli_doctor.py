"""`weightwire doctor` and `weightwire bench`: real trials in real processes, and backends that fail in every way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from weightwire.cli import bench, doctor, main, peers, trial
from weightwire.cli.new import TEMPLATE
from weightwire.cli.trial import Trial, TrialError

SOURCE = (TEMPLATE / "src" / "weightwire_mine" / "__init__.py").read_text()
FAULTS = {
    "fine": lambda source: source,
    # One byte of what it delivers is another, not among those that are looked at within the clock.
    "tampering": lambda source: source.replace("item = Item(", "memory[5] ^= 1; item = Item(", 1),
    "crashing": lambda source: source.replace("self._closed = False\n", "import os; os._exit(7)\n", 1),
    "hanging": lambda source: source.replace("self._closed = False\n", "threading.Event().wait()\n", 1),
    "needy": lambda source: "import no_such_dependency\n" + source.replace("from __future__ import annotations\n", ""),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few turns of small states, as these tests are not about figures."""
    monkeypatch.setattr(doctor, "TURNS", 2)
    monkeypatch.setattr(doctor, "LARGE_TURNS", 1)
    monkeypatch.setattr(doctor, "LARGE", (4, 400_000))


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """`plant("crashing")`: the endpoint of a backend with that fault, which our processes can import."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def plant(fault: str) -> str:
        tmp_path.joinpath(f"doctor_{fault}.py").write_text(FAULTS[fault](SOURCE))
        return f"import:doctor_{fault}"

    return plant


def test_between_processes_and_within_one(plant: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "ipc", plant("fine"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    ipc, fine = answer["backends"]
    assert (ipc["endpoint"], ipc["works"], ipc["processes"], ipc["workers"]) == ("ipc", True, True, 2)
    assert (fine["works"], fine["processes"]) == (True, False)
    for found in (ipc, fine):
        assert 0 < found["seconds"] < 60
        assert found["bytes_per_second"] > 0
    choice = answer["advice"]
    assert choice["2 workers in other processes of this machine"].startswith("ipc (")
    assert choice["policies in the trainer's own process"].startswith(fine["endpoint"])
    assert re.match("none of these(; nccl|: pip install weightwire-)", choice["workers on several nodes"])


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("tampering", "the bytes of worker 0, 1 are not those that the trainer pushed"),
        ("crashing", "its process ended during 'open' (exit status 7)"),
        ("needy", "needs the module 'no_such_dependency'"),
    ],
)
def test_why_one_does_not_work(
    fault: str, told: str, plant: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = plant(fault)
    assert main(["doctor", endpoint]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"{endpoint} no " in said
    assert told in said
    assert "What to choose" not in said, "there is no choice"


def test_one_that_hangs_is_ended(plant: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Trial(plant("fine"), tensors=2, nbytes=800, workers=1) as fine:  # the fork server is up, whatever that took
        fine.open()
    monkeypatch.setattr(trial, "OPENING", 1.0)
    monkeypatch.setattr(trial, "FAREWELL", 0.5)
    before = children()
    with Trial(plant("hanging"), tensors=2, nbytes=800, workers=1) as hanging, pytest.raises(TrialError, match="hangs"):
        hanging.open()
    assert children() == before


def test_ctrl_c_ends_it_at_once(plant: Callable[[str], str]) -> None:
    """Amid a command that never ends: as a terminal sends it, to every process of the group."""
    plant("hanging")
    code = "import sys; from weightwire.cli import main; sys.exit(main(['doctor', 'import:doctor_hanging']))"
    script = Path(sys.path[0], "interrupted.py")
    script.write_text(f"if __name__ == '__main__':\n    print('go', flush=True)\n    {code}\n")
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        family = psutil.Process(process.pid)
        deadline = time.monotonic() + 60
        while not (
            hanging := [c for c in family.children(recursive=True) if c.num_threads() > 1 and c.ppid() != process.pid]
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        everybody = family.children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        begun = time.monotonic()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert time.monotonic() - begun < 10.0
    _, alive = psutil.wait_procs(everybody, timeout=20)
    assert not alive, hanging


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_nobody_stays_when_it_is_killed(tmp_path: Path) -> None:
    """A doctor that is killed amid its work: trainer and workers of the trial end by themselves."""
    script = tmp_path / "killed.py"
    script.write_text(
        "from weightwire.cli.trial import Trial\n"
        "if __name__ == '__main__':\n"
        "    trial = Trial('ipc', tensors=2, nbytes=800, workers=2)\n"
        "    trial.open()\n"
        "    print('open', flush=True)\n"
        "    input()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, str(script)], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    for child in alive:
        child.kill()
    assert not alive


def test_one_that_works_is_enough_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {
        "good": doctor.Finding("good", True, "", 2, True, ("hosts",), 1e-3, 1e9),
        "bad": doctor.Finding("bad", False, "no\x1b"),
    }
    monkeypatch.setattr(doctor, "examine", lambda text, workers: found[text])
    monkeypatch.setattr(doctor, "available", lambda: [_Record(name) for name in ("bad", "good")])
    assert doctor.run([], workers=2, as_json=False) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "workers on several nodes:                      good" in said
    monkeypatch.setattr(doctor, "available", lambda: [_Record("bad")])
    assert doctor.run([], workers=2, as_json=False) == 1
    monkeypatch.setattr(doctor, "available", list)
    assert doctor.run([], workers=2, as_json=False) == 1
    assert "pip install weightwire-ipc" in capsys.readouterr().err


class _Record:
    def __init__(self, name: str) -> None:
        self.name = name


# -- bench -----------------------------------------------------------------------------------------------------------


def measured(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    command = ["bench", *arguments, "--size", "80kB", "--tensors", "4", "--workers", "2", "--repeat", "3", "--json"]
    assert main(command) == status
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_side_by_side(plant: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    answer = measured(capsys, "ipc", plant("fine"), plant("tampering"), status=1)
    assert (answer["tensors"], answer["nbytes"], answer["workers"]) == (4, 80_000, 2)
    ipc, fine, tampering = answer["contenders"]
    for good in (ipc, fine):
        assert good["fault"] == ""
        assert len(good["seconds"]) == 3
        assert good["median"] > 0
        assert good["nbytes"] == 80_000
        assert "stage" in good["phases"]
    assert "the bytes of worker 0, 1 are not those" in tampering["fault"]
    assert tampering["median"] is None


@pytest.mark.soak  # torchrl takes its time to be imported, in each of its processes
@pytest.mark.skipif(not peers.available(), reason="torchrl is not installed")
def test_against_torchrl(capsys: pytest.CaptureFixture[str]) -> None:
    answer = measured(capsys, "ipc", "--against", "torchrl")
    assert [contender["name"] for contender in answer["contenders"]] == ["ipc", *peers.NAMES]
    assert all(contender["median"] > 0 for contender in answer["contenders"])


def test_the_table() -> None:
    good = bench.Contender("good", "copy", workers=2, processes=True, nbytes=1000, seconds=[1e-3, 2e-3, 3e-3])
    slow = bench.Contender("slow", "copy", workers=2, nbytes=1000, seconds=[1e-2])
    bad = bench.Contender("bad", "copy", fault="it \x1b hangs")
    lines = bench._lines([good, slow, bad], {"nbytes": 1000, "tensors": 4, "workers": 2})
    assert lines[2].split("  ")[0] == ""
    assert lines[3].split() == [
        "good",
        "2",
        "ms",
        "1.5",
        "ms",
        "to",
        "2.5",
        "ms",
        "500",
        "kB/s",
        "1",
        "times",
        "2",
        "processes",
    ]
    assert "5 times" in lines[4]
    assert lines[5].split()[:2] == ["bad", "failed"]
    assert "bad: it   hangs" in lines


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--size", "10 potatoes"], "is no size"),
        (["--size", "10B"], "80 bytes at least"),
        (["--apply", "alas"], "it is copy or alias"),
        (["--against", "torchrll"], "Did you mean 'torchrl'?"),
        (["ipcc"], "Did you mean 'ipc'?"),
    ],
)
def test_wrong_usage(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_peer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert main(["bench", "--against", "torchrl"]) == 2
    assert "torchrl is not installed" in capsys.readouterr().err


# -- demo ------------------------------------------------------------------------------------------------------------


def test_the_demo_is_the_one_of_the_examples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: run.append([path, *command]))
    assert main(["demo", "--backend", "vanilla", "--help"]) == 0
    ((python, *command),) = run
    assert python == command[0] == sys.executable
    assert Path(command[1]).is_file()
    assert command[2:] == ["--backend", "vanilla", "--help"]
    assert "cartpole_trainer" in Path(command[1]).read_text()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert "pip install gymnasium" in capsys.readouterr().err
