"""Every block of Python in the README is run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
SECONDS = 60.0

# What the quick start leaves to its reader: a policy, and a little to train it with and to act.
POLICY = "import torch\npolicy = torch.nn.Linear(4, 2)\n"
TRAINING = """
def train(policy, batch):
    with torch.no_grad():
        policy.weight.fill_(batch)
def three():
    updater.wait_for_workers(1)
    yield from (1.0, 2.0, 3.0)
batches = three()
"""
ACTING = """
def act(policy, version):
    assert (policy.weight == version).all()
    print(version, flush=True)
"""
THE_END = "assert report.version == 3\nupdater.close()\n"


def columns(block: str) -> tuple[str, str]:
    """The programs that stand side by side: the second begins where its first comment does."""
    first = block.splitlines()[0]
    at = first.index("# worker")
    left, right = zip(*((line[:at].rstrip(), line[at:]) for line in block.splitlines()))
    return "\n".join(left) + "\n", "\n".join(right) + "\n"


def start(program: str, job: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "WEIGHTWIRE_JOB": job}  # a place apart, whatever else runs on this machine
    pipe = subprocess.PIPE
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def run(*programs: str) -> list[str]:
    """What each of some programs prints that run at the same time; all of them have to end well."""
    job = uuid.uuid4().hex
    processes = [start(program, job) for program in programs]
    try:
        said = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    assert [(process.returncode, err) for process, (_, err) in zip(processes, said)] == [(0, "")] * len(programs)
    return [out for out, _ in said]


def is_quick_start(block: str) -> bool:
    return "# worker" in block.partition("\n")[0]


def test_the_quick_start() -> None:
    (block,) = filter(is_quick_start, BLOCKS)
    trainer, worker = columns(block)
    _, acted = run(POLICY + TRAINING + trainer + THE_END, POLICY + ACTING + worker)
    versions = list(map(int, acted.split()))
    assert versions == sorted(versions)
    assert versions[-1] == 3


@pytest.mark.parametrize("block", [block for block in BLOCKS if not is_quick_start(block)])
def test_a_block(block: str) -> None:
    run(block)
