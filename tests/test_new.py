"""`weightwire new NAME`: what it writes passes the conformance suite as soon as it is installed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from weightwire.cli import main, new

NAME = "carrier-pigeon"
FILES = ["README.md", "pyproject.toml", "src/weightwire_carrier_pigeon/__init__.py", "tests/test_conformance.py"]


def contents(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.timeout(400)  # a whole suite, and an environment of its own, on a machine that may be busy
def test_it_passes_as_it_is(tmp_path: Path, environment: Callable[[Path], Path]) -> None:
    """From an empty folder to a green suite, as the tutorial has it, in an environment of its own."""
    python = environment(tmp_path / "env")
    run(python, "-m", "weightwire", "new", NAME, cwd=tmp_path)
    plugin = tmp_path / f"weightwire-{NAME}"
    assert contents(plugin) == FILES
    # What the build needs is there already: nothing is fetched.
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", ".", cwd=plugin)
    said = run(python, "-m", "weightwire", "backends", "--check", NAME, cwd=tmp_path)
    assert said.splitlines()[1].split()[:4] == [NAME, f"weightwire-{NAME}", "0.1.0", "ok"]
    suite = run(python, "-m", "weightwire", "conformance", NAME, "-q", cwd=tmp_path)
    assert " passed" in suite
    assert " failed" not in suite
    # Its own test is the same suite, and is found where its author would run it.
    found = run(python, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", cwd=plugin)
    assert "tests/test_conformance.py::TestCarrierPigeon::" in found


def run(python: Path, *arguments: str, cwd: Path) -> str:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([python, *arguments], cwd=cwd, env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_no_trace_of_the_template_is_left() -> None:
    written = dict(new.files("x9"))
    assert "src/weightwire_x9/__init__.py" in written
    for path, text in written.items():
        assert "mine" not in (path + text).replace("determine", "").lower(), path
        if path.endswith(".py"):
            compile(text, path, "exec")
    assert 'x9 = "weightwire_x9"' in written["pyproject.toml"]
    assert "class X9Sender(Sender)" in written["src/weightwire_x9/__init__.py"]


def test_another_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sub"
    folder.mkdir(mode=0o755)
    assert main(["new", "other", "--into", "sub"]) == 0
    assert "weightwire conformance other" in capsys.readouterr().out
    assert len(contents(folder)) == len(FILES)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~new._umask()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("My_Backend", "for example 'my-backend'"),
        ("weightwire-carrier", "for example 'carrier'"),
        ("../evil", "for example 'evil'"),
        ("a--b", "for example 'a-b'"),
        ("9lives", "cannot be the name"),
        ("", "cannot be the name"),
        ("x" * 41, "at most 40"),
        ("vanilla", "Weightwire's own"),
        ("core", "Weightwire's own"),
    ],
)
def test_names_that_cannot_be(name: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "--", name]) == 2
    assert hint in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = tmp_path / "site" / "weightwire_taken-2.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: weightwire-taken\nVersion: 2\n")
    info.joinpath("entry_points.txt").write_text("[weightwire.backends]\ntaken = taken\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert main(["new", "taken"]) == 2
    assert "installed already (weightwire-taken 2)" in capsys.readouterr().err


def test_what_is_there_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, fault in (("full", "is not empty"), ("file", "is no folder"), ("link", "is no folder")):
        path = tmp_path / folder
        if folder == "full":
            path.mkdir()
            path.joinpath("kept").write_text("kept")
        elif folder == "file":
            path.write_text("kept")
        else:
            path.symlink_to(tmp_path)
        assert main(["new", "other", "--into", folder]) == 2
        assert fault in capsys.readouterr().err
    assert main(["new", "other", "--into", "no/such/place"]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert contents(tmp_path / "full") == ["kept"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "link"]


def test_nothing_is_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str) -> object:
        yield "one", "written"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(new, "files", broken)
    assert main(["new", "other"]) == 2
    assert "nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_demo_of_the_command_line_is_that_of_the_examples() -> None:
    """`weightwire demo` has it in the package; the folder of the examples shows the very same files."""
    root = Path(__file__).parents[1]
    packaged = sorted((root / "core/src/weightwire/cli/cartpole").glob("*.py"))
    assert packaged
    for path in packaged:
        assert (root / "examples" / path.name).resolve() == path
