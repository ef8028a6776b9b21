"""The examples, run as a user runs them. What each shows, it checks itself, and says so with its exit status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLES = Path(__file__).parents[1] / "examples"
LIMIT = 100.0  # seconds that any run here may take


def run(*command: str, **environment: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a run of Python."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def numbers(text: str, pattern: str) -> list[int]:
    found = re.search(pattern, text)
    assert found, text
    return [int(group) for group in found.groups()]


@pytest.mark.parametrize("gate", ["with", "without"])
def test_an_inference_server_answers_with_whole_versions(gate: str) -> None:
    options = ["--seconds", "1", "--clients", "3", *(["--without-gate"] if gate == "without" else [])]
    status, out, err = run("-W", "error", str(EXAMPLES / "inference_server.py"), *options)
    answers, clients, versions, mixed = numbers(out, r"(\d+) answers to (\d) clients from (\d+) versions.*; (\d+) of a")
    assert clients == 3
    assert "Traceback" not in err
    assert answers > 20
    assert versions > 5
    assert (status, mixed > 0) == ((0, False) if gate == "with" else (1, True))  # without it, the clients notice


def test_normaliser_and_policy_are_of_one_version() -> None:
    status, out, err = run("-W", "error", str(EXAMPLES / "gymnasium_normaliser.py"), "--seconds", "2")
    assert status == 0, err
    assert "Traceback" not in err
    checked, differing, shown, mixes = numbers(out, r"(\d+) steps of \d+ versions .*: (\d+) differ; .* (\d+) of (\d+)")
    assert checked > 100
    assert differing == 0
    assert shown == mixes > 100  # a mix would have been seen


def test_the_prometheus_observer_passes_its_tests(tmp_path: Path) -> None:
    """Installed as far as Python can tell: its folder, and what its wheel would say of it, are on the path."""
    home = EXAMPLES / "weightwire-prometheus"
    project = tomllib.loads(home.joinpath("pyproject.toml").read_text())["project"]
    info = tmp_path / f"weightwire_prometheus-{project['version']}.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    info.joinpath("entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {module}\n" for name, module in points.items())
            for group, points in project["entry-points"].items()
        )
    )
    path = os.pathsep.join([str(home / "src"), str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    # With an empty configuration: none of this repository's, as in a repository of its own.
    empty = tmp_path / "pytest.ini"
    empty.write_text("[pytest]\n")
    options = ["-m", "pytest", "-q", "-W", "error", "-c", str(empty), "-p", "no:cacheprovider", str(home / "tests")]
    status, out, err = run(*options, PYTHONPATH=path)
    assert status == 0, out + err
    assert re.search(r"^[1-9]\d* passed in ", out, re.MULTILINE), out  # and none was skipped
