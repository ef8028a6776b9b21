"""What a user installs: wheels and sdists build and pass `twine check`, and in an empty environment with the core and
one plugin from wheels the README's quick start runs as it stands there."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[1]
PACKAGES = ("core", "plugins/vanilla", "plugins/ipc", "plugins/ray", "plugins/nccl")
LONG = 600.0  # seconds that building, or installing torch, may take
PROGRAM = 120.0

TRAINER = """
import torch
policy = torch.nn.Linear(4, 2)
def train(policy, batch):
    with torch.no_grad():
        policy.weight.fill_(batch)
def three():
    updater.wait_for_workers(1)
    yield from (1.0, 2.0, 3.0)
batches = three()
{quick_start}
assert report.version == 3
updater.close()
"""
WORKER = """
import torch
policy = torch.nn.Linear(4, 2)
def act(policy, version):
    assert (policy.weight == version).all()
    print(version, flush=True)
{quick_start}
"""


def run(*command: object, limit: float = LONG, cwd: Path = ROOT) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=limit, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of each package; each wheel is built from its sdist."""
    out = tmp_path_factory.mktemp("dist")
    for package in PACKAGES:
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT / package)
    return out


def test_wheels_and_sdists_pass_twine_check(built: Path) -> None:
    files = sorted(built.iterdir())
    assert len([file for file in files if file.suffix == ".whl"]) == len(PACKAGES)
    assert len([file for file in files if file.name.endswith(".tar.gz")]) == len(PACKAGES)
    said = run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *files)
    assert said.count("PASSED") == 2 * len(PACKAGES)


@pytest.mark.parametrize("backend", ["ipc", "vanilla", "nccl", "ray"])
def test_the_quick_start_runs_from_wheels_in_an_empty_environment(built: Path, tmp_path: Path, backend: str) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    wheels = [next(built.glob(f"{name}-0*.whl")) for name in ("weightwire", f"weightwire_{backend}")]
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", "torch")
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *wheels)
    quick_start, first_try = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    listed = run(tmp_path / "venv" / "bin" / "weightwire", "backends", "--json", cwd=tmp_path)
    assert f'"{backend}"' in listed
    if backend == "vanilla":
        assert "version 2" in run(python, "-c", first_try, limit=PROGRAM, cwd=tmp_path)
        return
    with _place(backend) as endpoint:
        trainer, worker = (side.replace("ipc://policy", endpoint) for side in _columns(quick_start))
        assert trainer != worker
        programs = [TRAINER.format(quick_start=trainer), WORKER.format(quick_start=worker)]
        processes = [
            subprocess.Popen([str(python), "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
            for program in programs
        ]
        try:
            said = [process.communicate(timeout=PROGRAM)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0, 0]
        assert said[1].split()[-1] == "3"


def _columns(block: str) -> tuple[str, str]:
    """The programs that stand side by side in the README."""
    at = block.splitlines()[0].index("# worker")
    lines = block.splitlines()
    return "\n".join(line[:at].rstrip() for line in lines), "\n".join(line[at:] for line in lines)


@contextmanager
def _place(backend: str) -> Iterator[str]:
    """An endpoint for the quick start in place of its own."""
    if backend == "ipc":
        yield f"ipc://policy-{uuid.uuid4().hex[:8]}"
    elif backend == "nccl":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        yield f"nccl://127.0.0.1:{port}"
    else:
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        try:
            yield f"ray://policy?address={cluster.address}"
        finally:
            cluster.shutdown()
