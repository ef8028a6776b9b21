"""Beside torch.distributed as the user has it: default groups, torchrun, ranks in the environment, spawn."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT = 60
"""Seconds that a script may take."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[object]:
    """Write a script and run it with some launcher; its output."""

    def run(script: str, *launcher: str, **environment: str) -> str:
        file = tmp_path / "script.py"
        file.write_text(textwrap.dedent(script))
        done = subprocess.run(
            [sys.executable, *launcher, str(file)],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def test_beside_a_trainer_of_two_ranks(run) -> None:  # type: ignore[no-untyped-def]
    """Rank 0 sends; the default group is the trainer's own, and works before, between and after. Started by torchrun,
    with another hash seed a rank, whose names must come in one order all the same."""
    out = run(
        """
        import multiprocessing, os, torch, torch.distributed as dist
        from weightwire import WeightReceiver, WeightUpdater

        def act(endpoint, pipe):
            receiver = WeightReceiver(endpoint, {"w": torch.zeros(10000), "b": torch.zeros(3)}, timeout=30)
            for _ in range(3):
                pipe.send((receiver.pull(30), receiver.weights["w"].sum().item()))
            receiver.close()

        if __name__ == "__main__":
            dist.init_process_group("gloo")
            rank, before = dist.get_rank(), dist.group.WORLD
            updater = worker = None
            if rank == 0:
                updater = WeightUpdater("nccl://127.0.0.1:0?bucket=16KiB", timeout=30)
                pipe, theirs = multiprocessing.Pipe()
                worker = multiprocessing.get_context("spawn").Process(target=act, args=(updater.endpoint, theirs))
                worker.start()
                updater.wait_for_workers(1)
            for step in range(1, 4):
                total = torch.ones(10000)
                dist.all_reduce(total)
                assert total.sum() == 20000
                if updater:
                    names = set(["w", "b"])
                    updater.push({name: total[: 10000 if name == "w" else 3] * step for name in names}, wait="applied")
                    print(pipe.recv(), flush=True)
                dist.barrier()
            if updater:
                updater.close()
                worker.join(20)
                assert worker.exitcode == 0
            assert dist.group.WORLD is before and dist.get_world_size() == 2
            del before  # a Gloo group that outlives the interpreter aborts the process, whoever made it
            dist.destroy_process_group()
        """,
        *TORCHRUN,
    )
    assert out.split("\n")[:3] == ["(1, 20000.0)", "(2, 40000.0)", "(3, 60000.0)"]


def test_trainer_and_worker_are_ranks_of_torchrun(run) -> None:  # type: ignore[no-untyped-def]
    """Each process's place in our groups has nothing to do with RANK; no default group is made."""
    out = run(
        """
        import os, sys, time, torch, torch.distributed as dist
        from pathlib import Path
        from weightwire import WeightReceiver, WeightUpdater
        told = Path(__file__).with_name("endpoint")
        policy = {"w": torch.zeros(1000)}
        if os.environ["RANK"] == "1":  # not 0: the trainer
            updater = WeightUpdater("nccl://127.0.0.1:0", {"w": torch.arange(1000.0)}, timeout=30)
            told.with_suffix(".new").write_text(updater.endpoint)
            told.with_suffix(".new").rename(told)
            updater.wait_for_workers(1)
            updater.push(wait="applied")
            updater.close()
        else:
            until = time.monotonic() + 30
            while not told.exists() and time.monotonic() < until:
                time.sleep(0.01)
            receiver = WeightReceiver(told.read_text(), policy, timeout=30)
            assert receiver.pull() == 1
            assert torch.equal(policy["w"], torch.arange(1000.0))
            receiver.close()
            print("applied")
        assert not dist.is_initialized()
        """,
        *TORCHRUN,
    )
    assert "applied" in out


def test_by_hand_in_two_shells() -> None:
    """Two programs that share nothing but the text of the endpoint; the worker is started first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"nccl://127.0.0.1:{probe.getsockname()[1]}"
    trainer = f"""
        import torch, weightwire
        with weightwire.WeightUpdater({place!r}, {{"w": torch.arange(1000.0)}}) as updater:
            updater.wait_for_workers(1)
            updater.push(wait="applied")
    """
    worker = f"""
        import torch, weightwire
        with weightwire.WeightReceiver({place!r}, {{"w": torch.zeros(1000)}}) as receiver:
            print(receiver.pull(), receiver.weights["w"].sum().item())
    """
    shells = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
        for script in (worker, trainer)
    ]
    try:
        said = [shell.communicate(timeout=LIMIT)[0] for shell in shells]
    finally:
        for shell in shells:
            shell.kill()
            shell.wait()
    assert [shell.returncode for shell in shells] == [0, 0]
    assert said[0].split() == ["1", "499500.0"]


def test_ranks_in_the_environment_mean_nothing(run) -> None:  # type: ignore[no-untyped-def]
    """By hand, with what a launcher left behind."""
    out = run(
        """
        import torch, torch.distributed as dist
        from weightwire import WeightReceiver, WeightUpdater
        with WeightUpdater("nccl://127.0.0.1:0", {"w": torch.ones(5)}) as updater:
            with WeightReceiver(updater.endpoint, {"w": torch.zeros(5)}) as receiver:
                updater.wait_for_workers(1)
                updater.push()
                print(receiver.pull(10.0), receiver.weights["w"].sum().item(), dist.is_initialized())
        """,
        RANK="3",
        WORLD_SIZE="7",
        LOCAL_RANK="3",
        MASTER_ADDR="198.51.100.1",
        MASTER_PORT="1",
        GLOO_SOCKET_IFNAME="no-such-interface",
    )
    assert out.split() == ["1", "5.0", "False"]


def test_only_what_is_used_is_imported(run) -> None:  # type: ignore[no-untyped-def]
    out = run(
        """
        import sys
        import weightwire_nccl
        weightwire_nccl.weightwire_backend()
        print("torch" in sys.modules, "ray" in sys.modules)
        from weightwire import WeightUpdater
        WeightUpdater("nccl://127.0.0.1:0", {}).close()
        print("torch" in sys.modules, "ray" in sys.modules)
        """
    )
    assert out.split() == ["False", "False", "True", "False"]
