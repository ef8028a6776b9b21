"""Capabilities that nobody asks for by a word, and what they come to: other hosts, sharded targets, GPUs.

Without a second machine, ``hosts`` can only be tried in part: what a worker elsewhere does not share is taken away.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from weightwire.endpoint import parse
from weightwire.testing.rig import TIMEOUT, Rig
from weightwire.testing.shards import RANKS, half, halves, whole
from weightwire.testing.states import counters, snapshot
from weightwire.testing.suites.base import Cases, requires

__all__ = ["ClaimCases"]


def on_device(device: str, version: int) -> dict[str, Tensor]:
    """Counters that take 64 MiB of this device."""
    return {name: tensor.to(device) for name, tensor in counters(version, 1, 16 << 20).items()}


class ClaimCases(Cases):
    @requires("processes", "hosts")
    def test_worker_elsewhere(self, rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The directories for sockets and temporary files are not the same, as on another host."""
        here, there = tmp_path / "here", tmp_path / "there"
        for place in (here, there):
            place.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(here))
        updater = rig.updater()
        if self.info().location == "host:port":
            host, _, port = parse(updater.endpoint).location.rpartition(":")
            assert host.strip("[]") not in ("", "*", "0.0.0.0", "::"), (
                f"{updater.endpoint} leads nowhere from elsewhere"
            )
            assert int(port) > 0
        worker = rig.process("w")
        worker.do("move", str(there))
        worker.do("open", rig.endpoint, counters, 0, worker="w", timeout=TIMEOUT)
        updater.push(counters(1))
        assert worker.pull() == worker.seen() == 1

    def test_sharded_target(self, rig: Rig, tmp_path: Path) -> None:
        """Two ranks hold a half of each tensor. Where it is claimed, neither takes memory for more than its half."""
        ranks = [rig.process(f"rank{rank}") for rank in range(RANKS)]
        opened = [
            ranks[rank].start("open", rig.endpoint, halves, rank, str(tmp_path / "meet"), worker=f"w{rank}")
            for rank in range(RANKS)
        ]
        for pending in opened:
            pending.result()
        if "processes" in rig.capabilities:
            before = [process.usage().rss for process in ranks]
            rig.updater().push(whole(1))
        else:  # each has a trainer of its own, whose memory does not count
            for process in ranks:
                process.do("lead", rig.endpoint)
                process.do("push_made", whole, 1)
            before = [process.usage().rss for process in ranks]
        size = sum(tensor.nbytes for tensor in whole(1).values())
        for rank, process in enumerate(ranks):
            assert process.pull() == 1
            taken = process.usage().rss - before[rank]
            assert process.do("shards") == snapshot(half(rank, 1))
            if "sharded_target" in rig.capabilities:
                assert taken < size / RANKS, f"rank {rank} took {taken} bytes for a half of {size}"

    def test_from_device_to_device(self, rig: Rig) -> None:
        """Where ``cuda`` is claimed, what a version takes is on the devices, and not on the host as well."""
        if torch.cuda.device_count() < 2:
            pytest.skip("takes two CUDA devices; there are fewer here")
        updater = rig.updater()
        worker = rig.worker("w", on_device, "cuda:1", 0)
        for version in (1, 2):  # the first connects, and gets what is kept
            state = on_device("cuda:0", version)
            before = worker.usage()
            updater.push(state)
            assert worker.pull() == worker.seen() == version
        taken, size = worker.usage().rss - before.rss, sum(tensor.nbytes for tensor in state.values())
        if "cuda" in rig.capabilities:
            assert taken < size / 2, f"the worker took {taken} bytes of the host for {size}"
