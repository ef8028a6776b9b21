"""The command line, mostly in the test's own process; what must not be imported is shown in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weightwire
from weightwire.cli import COMMANDS, backends, main

FakeDist = Callable[..., Path]

GOOD = """
from weightwire import BackendInfo, hookimpl
print("noise of a plugin")
@hookimpl
def weightwire_backend(): return BackendInfo(summary="good", pickles="own")
@hookimpl
def weightwire_make_sender(): ...
@hookimpl
def weightwire_make_receiver(): ...
"""


@pytest.fixture
def only_fakes(fake_dist: FakeDist, monkeypatch: pytest.MonkeyPatch) -> FakeDist:
    """Show nothing but the fake distributions of the test."""
    found = backends.available
    names: set[str] = set()
    monkeypatch.setattr(backends, "available", lambda: [r for r in found() if r.distribution in names])

    def make(name: str, *args: Any, **kwargs: Any) -> Path:
        names.add(name)
        return fake_dist(name, *args, **kwargs)

    return make


def test_backends_lists_what_is_installed(only_fakes: FakeDist, capsys: pytest.CaptureFixture[str]) -> None:
    only_fakes("weightwire-one", {"one": "cli_one"}, version="1.5", cli_one="raise RuntimeError")
    only_fakes("weightwire-another", {"another": "cli_another"})
    assert main(["backends"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "NAME     DISTRIBUTION        VERSION  SUMMARY",
        "another  weightwire-another  1.0      fake weightwire-another",
        "one      weightwire-one      1.5      fake weightwire-one",
    ]
    assert "cli_one" not in sys.modules


def test_backends_as_json(only_fakes: FakeDist, capsys: pytest.CaptureFixture[str]) -> None:
    only_fakes("weightwire-one", {"one": "cli_json"}, cli_json="")
    assert main(["backends", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "name": "one",
            "distribution": "weightwire-one",
            "version": "1.0",
            "summary": "fake weightwire-one",
            "value": "cli_json",
            "fault": "",
        }
    ]


def test_no_backends(only_fakes: FakeDist, capsys: pytest.CaptureFixture[str]) -> None:
    del only_fakes
    assert main(["backends"]) == 0
    assert "pip install weightwire-ipc" in capsys.readouterr().out


def test_conflicts_and_foreign_text(only_fakes: FakeDist, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "Metadata-Version: 2.1\nName: twin-a\nVersion: 1\nSummary: clear\x1b[2Jscreen\n"
    only_fakes("twin-a", {"twin": "cli_twin"}, metadata=evil)
    only_fakes("twin-b", {"twin": "cli_twin"})
    assert main(["backends"]) == 0
    out = capsys.readouterr().out
    assert "'twin' is claimed by 2 distributions: write twin@DISTRIBUTION to choose." in out
    assert "clear [2Jscreen" in out
    assert "\x1b" not in out


def test_check_opens_each(only_fakes: FakeDist, capfd: pytest.CaptureFixture[str]) -> None:
    only_fakes("weightwire-fine", {"fine": "cli_fine"}, cli_fine=GOOD)
    assert main(["backends", "--check"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "NAME  DISTRIBUTION     VERSION  CHECK  SUMMARY",
        "fine  weightwire-fine  1.0      ok     fake weightwire-fine",
    ]
    assert "cli_fine" not in sys.modules


def test_check_tells_what_is_broken(only_fakes: FakeDist, capfd: pytest.CaptureFixture[str]) -> None:
    only_fakes("weightwire-fine", {"fine": "cli_fine2"}, cli_fine2=GOOD)
    only_fakes("weightwire-bad", {"bad": "cli_bad"}, cli_bad="import no_such_dependency")
    only_fakes("weightwire-dead", {"dead": "cli_dead"}, cli_dead="import os; os._exit(7)")
    assert main(["backends", "--check", "--json"]) == 1
    checked = {entry["name"]: (entry["ok"], entry["error"]) for entry in json.loads(capfd.readouterr().out)}
    assert checked["fine"] == (True, "")
    assert checked["dead"] == (False, "backend 'dead' (weightwire-dead 1.0): its process ended with status 7")
    assert not checked["bad"][0]
    assert "needs the module 'no_such_dependency'" in checked["bad"][1]
    assert main(["backends", "--check"]) == 1
    out = capfd.readouterr().out
    assert "bad   weightwire-bad   1.0      broken" in out
    assert "(weightwire-dead 1.0): its process ended with status 7" in out


def test_check_of_some(only_fakes: FakeDist, capfd: pytest.CaptureFixture[str]) -> None:
    only_fakes("weightwire-some", {"some": "cli_some"}, cli_some=GOOD, cli_plain=GOOD, cli_faulty="def")
    only_fakes("weightwire-other", {"other": "cli_other"}, cli_other="raise RuntimeError")
    assert main(["backends", "--check", "some", "import:cli_plain"]) == 0
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == ["NAME", "some", "import:cli_plain"]
    assert main(["backends", "some", "import:cli_faulty", "nowhere", "--check", "--json"]) == 1
    errors = [entry["error"] for entry in json.loads(capfd.readouterr().out)]
    assert errors[0] == ""
    assert "SyntaxError" in errors[1]
    assert "sys.path" not in errors[1]
    assert errors[2].startswith("no backend 'nowhere' is installed.")
    assert main(["backends", "some", "import:cli_faulty", "nowhere", "--check"]) == 1
    lines = capfd.readouterr().out.splitlines()[1:4]
    assert [line.split()[-1] for line in lines[1:]] == ["broken", "unknown"]


def test_check_is_bounded(
    only_fakes: FakeDist, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "CHECK_SECONDS", 0.5)
    only_fakes("weightwire-slow", {"slow": "cli_slow"}, cli_slow="import threading; threading.Event().wait()")
    assert main(["backends", "--check"]) == 1
    assert "did not open within 0.5 s" in capfd.readouterr().out


@pytest.mark.parametrize("command", [["--help"], ["backends", "--help"], ["--version"], []])
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == (0 if command else 2)
    said = "".join(capsys.readouterr())
    assert (weightwire.__version__ if command == ["--version"] else "backends") in said
    assert "<bool>" not in said


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"demo"}))  # whose help is the demo's own
def test_every_command_has_examples_and_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"\n    weightwire {command}" in said
    assert "Exit status: 0 " in said
    assert main(["--help"]) == 0
    listed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(f"  {command} "))
    assert "..." not in listed  # a first line that fits


def test_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docter"]) == 2
    assert "there is no command 'docter'. Did you mean 'doctor'?" in capsys.readouterr().err
    assert main(["xyzzy"]) == 2
    said = capsys.readouterr().err
    assert "Did you mean" not in said
    assert all(command in said for command in COMMANDS)
    for command in ("doctor", "bench", "conformance"):
        assert main([command, "vanila"]) == 2
        assert "Did you mean 'vanilla'?" in capsys.readouterr().err


STARTED = """
import sys, time
from weightwire.cli import main
status = main(sys.argv[1:])
heavy = [name for name in ("torch", "numpy", "ray", "weightwire_ipc", "weightwire_vanilla") if name in sys.modules]
print(status, heavy, time.process_time(), file=sys.stderr)
"""


@pytest.mark.parametrize("command", [["--help"], ["backends"], ["doctor", "--help"], ["top", "--help"], ["xyzzy"]])
def test_it_starts_at_once(command: list[str]) -> None:
    """Seconds of the processor, as this one may be busy: the interpreter's own start is among them."""
    spent = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", STARTED, *command], capture_output=True, text=True, timeout=60)
        status, heavy, seconds = done.stderr.splitlines()[-1].rsplit(" ", 2)
        assert (status, heavy) == ("2" if command == ["xyzzy"] else "0", "[]")
        spent.append(float(seconds))
    assert min(spent) < 0.25


@pytest.mark.parametrize("command", [["backend"], ["backends", "--chek"], ["backends", "extra"], ["--nonsense"]])
def test_wrong_usage(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage" in captured.err


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["backends"], 0),
        (["--version"], 0),
        (["--help"], 0),
        (["backends", "--help"], 0),
        (["doctor"], 2),
        (["backends", "--chek"], 2),
    ],
)
def test_without_the_cli_extra(command: list[str], status: int) -> None:
    script = "import sys; sys.modules['typer'] = None; from weightwire.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status
    if command not in (["backends"], ["--version"]):
        assert 'pip install "weightwire[cli]"' in (done.stderr if status else done.stdout)
    assert ("'doctor' needs the extra 'cli'" in done.stderr) is (command == ["doctor"])


def test_python_dash_m(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weightwire", "backends"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert done.stdout.startswith("NAME")
