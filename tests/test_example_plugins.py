"""The example plugins are distributions of their own: their tests run as a third party's would.

A run has the plugin's source and its metadata on its path, and nothing else of this repository's. The whole
conformance kit over each is a soak test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
QUICK = {
    "weightwire-file": "test_folder or all_dtypes or tied_modules or late_joiner or lost_worker or second_live",
    "weightwire-rpc": "test_static_group or all_dtypes or late_joiner or own_pickles or subsets_follow or second_live",
}
"""Which tests of each run in every ``make test``, in pytest's words."""


def installed(example: str, folder: Path) -> Path:
    """Metadata as an installer would write them, beside the sources where they are."""
    text = (ROOT / "examples" / example / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.*)"$', text, re.MULTILINE)
    section = re.search(r'^\[project\.entry-points\."(.*)"\]\n((?:\w+ = ".*"\n)+)', text, re.MULTILINE)
    assert version
    assert section
    info = folder / f"{example.replace('-', '_')}-{version[1]}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {example}\nVersion: {version[1]}\n")
    (info / "entry_points.txt").write_text(f"[{section[1]}]\n" + section[2].replace('"', ""))
    return folder


def run_tests(example: str, paths: list[Path], *arguments: str, timeout: float) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"examples/{example}/tests", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    return said


@pytest.mark.timeout(200)
@pytest.mark.parametrize("example", QUICK)
def test_its_own_tests_and_some_of_the_kit(example: str, tmp_path: Path) -> None:
    paths = [ROOT / "examples" / example / "src", installed(example, tmp_path)]
    said = run_tests(example, paths, "-m", "not soak", "-k", QUICK[example], timeout=190)
    assert " passed" in said


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("example", QUICK)
def test_the_whole_kit_over_the_installed_wheel(example: str, tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="builds the wheel without the network")
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(site), str(ROOT / "examples" / example)], timeout=120, check=True)
    run_tests(example, [site], timeout=1400)


def test_nothing_of_the_project_knows_them() -> None:
    source = [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    names = [example.replace("-", "_") for example in QUICK]
    assert len(source) > 50
    assert not [path for path in source if any(name in path.read_text() for name in names)]
