"""The example learns what it says that it learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 600
"""Seconds. On two idle cores the longest of these takes about 20."""

pytestmark = pytest.mark.timeout(PATIENCE + 20)


@pytest.fixture(params=["ipc", pytest.param("ray", marks=pytest.mark.soak)])
def endpoint(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    for package in ("torchrl", "gymnasium", f"weightwire_{name}", *(["ray"] if name == "ray" else [])):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if find_spec("torchrl.weight_update") is None:
        pytest.skip("this torchrl has no weight sync schemes (they came with 0.11)")
    return name


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_ppo_learns(endpoint: str) -> None:
    done = run("examples/torchrl_ppo.py", "--endpoint", endpoint)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    reached = re.search(r"reached a mean return of ([\d.]+) after \d+ frames", done.stdout)
    newest = re.search(r"newest version (\d+); the workers act with (.*)", done.stdout)
    assert reached is not None
    assert newest is not None
    assert float(reached[1]) >= 150
    versions = [int(number) for number in re.findall(r": (\d+)", newest[2])]
    assert len(versions) == 2
    assert 5 < min(versions) <= max(versions) <= int(newest[1])


@pytest.mark.soak
def test_ppo_says_where_it_did_not_learn(endpoint: str) -> None:
    done = run("examples/torchrl_ppo.py", "--endpoint", endpoint, "--frames", 1024)
    assert done.returncode == 1, done.stdout + done.stderr[-3000:]
    assert "150 were to be reached" in done.stderr
