"""`weightwire conformance`: from an empty folder, over a module, an installed name, an endpoint with options."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weightwire import parse_endpoint
from weightwire.cli import conformance, main
from weightwire.cli.new import TEMPLATE

SOURCE = (TEMPLATE / "src" / "weightwire_mine" / "__init__.py").read_text()
QUICK = ["-q", "-p", "no:randomly", "-k", "late_joiner or unknown_options"]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: a run of pytest within one is a test of pytest's."""
    command = [sys.executable, "-m", "weightwire", "conformance", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


def test_a_module_in_an_empty_folder(tmp_path: Path) -> None:
    tmp_path.joinpath("here.py").write_text(SOURCE)
    tmp_path.joinpath("pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")  # not ours to read
    done = run(tmp_path, "import:here", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_conformance.py::TestHere" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["here.py", "pytest.ini"]


def test_a_fault_is_found_and_named(tmp_path: Path) -> None:
    tmp_path.joinpath("faulty.py").write_text(SOURCE.replace("self.offer(item)", "pass", 1))  # nothing for joiners
    done = run(tmp_path, "import:faulty", *QUICK, "-x")
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "late_joiner" in done.stdout


def test_options_and_pickles(tmp_path: Path) -> None:
    pickling = SOURCE.replace('summary="', 'pickles="own", summary="')
    tmp_path.joinpath("pickling.py").write_text(pickling)
    refused = run(tmp_path, "import:pickling", *QUICK)
    assert refused.returncode == 2
    assert "allow_pickle=true" in refused.stderr
    done = run(tmp_path, "import:pickling?allow_pickle=true", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr


SUITE = """
import pytest

from weightwire.testing import BackendSuite


@pytest.fixture(scope="session")
def word():
    return "right"


class Suite(BackendSuite):
    endpoint = "installed"  # under a name that it has not here
    options = {"allow_pickle": True, "word": "wrong"}

    @pytest.fixture(autouse=True)
    def _told(self, word):
        self.word = word

    def make_location(self):
        return f"{self.word}-{id(self)}"
"""


def package(folder: Path, suite: str) -> None:
    """A plugin that takes one kind of location only, needs an option, and ships a suite that knows both."""
    options = """\
class Options(msgspec.Struct):
    word: str


"""
    choosy = (
        SOURCE.replace("# The hooks:", options + "# The hooks:", 1)
        .replace('summary="', 'pickles="own", options=Options, summary="', 1)
        .replace(
            "    return MineSender(",
            '    assert endpoint.location[:5] == options.word == "right"\n    return MineSender(',
        )
    )
    folder.joinpath("choosy").mkdir()
    folder.joinpath("choosy", "__init__.py").write_text(choosy)
    folder.joinpath("choosy", "conformance.py").write_text(suite)


def test_a_suite_that_the_plugin_ships(tmp_path: Path) -> None:
    package(tmp_path, SUITE.replace("wrong", "right"))
    done = run(tmp_path, "import:choosy", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_conformance.py::TestChoosy" in done.stdout


def test_options_of_the_command_line_come_before_those_of_the_suite(tmp_path: Path) -> None:
    package(tmp_path, SUITE)
    assert run(tmp_path, "import:choosy", *QUICK).returncode == 1
    done = run(tmp_path, "import:choosy?word=right", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_a_broken_suite_says(tmp_path: Path) -> None:
    package(tmp_path, "Suit = 1")
    done = run(tmp_path, "import:choosy", *QUICK)
    assert done.returncode == 1
    assert "cannot import name 'Suite' from 'choosy.conformance'" in done.stdout


def test_ctrl_c_is_told_from_a_failure(tmp_path: Path) -> None:
    case = "    def test_unknown_options_are_errors(self):\n        raise KeyboardInterrupt\n"
    package(tmp_path, SUITE + case)
    assert run(tmp_path, "import:choosy", "-q", "-k", "unknown_options").returncode == 130


def test_no_case_was_chosen(tmp_path: Path) -> None:
    tmp_path.joinpath("here.py").write_text(SOURCE)
    assert run(tmp_path, "import:here", "-q", "-k", "nonsense").returncode == 2


def test_what_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    assert main(["conformance", "import:nowhere_at_all"]) == 2
    assert "nowhere_at_all" in capsys.readouterr().err
    find: Callable[[str], object] = conformance.find_spec
    monkeypatch.setattr(conformance, "find_spec", lambda name: None if name == "hypothesis" else find(name))
    assert main(["conformance", "vanilla"]) == 2
    assert (
        'hypothesis not installed; it runs with pytest and a few more packages: pip install "weightwire[testing]"'
        in (capsys.readouterr().err)
    )


@pytest.mark.parametrize(
    ("text", "endpoint", "options"),
    [
        ("ipc", "'ipc'", "{}"),
        ("ipc@weightwire-ipc?slots=3", "'ipc@weightwire-ipc'", "{'slots': '3'}"),
        ("nccl://127.0.0.1:5000?keep=true", "'nccl://127.0.0.1:5000'", "{'keep': 'true'}"),
    ],
)
def test_what_the_suite_is_told(text: str, endpoint: str, options: str) -> None:
    source = conformance.suite_of(parse_endpoint(text))
    assert f"endpoint = {endpoint}\n" in source
    assert f"options = {{**Suite.options, **{options}}}\n" in source
    compile(source, "suite", "exec")
