"""The CUDA path. NCCL takes one member a GPU: with a single GPU it is tried in a group of the trainer alone, and two
ends on that GPU must find their way through Gloo."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weightwire.testing import Rig
from weightwire.testing.states import counters, seen
from weightwire.transport import Deadline, Version
from weightwire.weights.payload import Payload
from weightwire.weights.source import Source

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here"),
]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL takes one member a GPU")
Make = Callable[..., Rig]


def on(device: str, version: int, size: int = 10_000) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in counters(version, 6, size).items()}


def test_a_nccl_group_can_be_made_used_and_aborted() -> None:
    from weightwire_nccl.board import Board
    from weightwire_nccl.groups import NcclGroup
    from weightwire_nccl.works import Works

    group = NcclGroup(Board(lambda *_: None), "cuda:0", 0, 1, 20.0)
    data = torch.arange(1 << 20, device="cuda:0").to(torch.uint8)
    expected = data.clone()
    for algorithm in ("broadcast", "scatter_allgather"):
        works, deadline = Works(group, algorithm), Deadline.after(30)
        for _ in works.post(data):
            assert not deadline.expired
        while works:
            works.wait(0.05)
            assert not deadline.expired
    group.finish()
    assert torch.equal(data, expected)
    group.abort()


def test_the_payload_is_packed_on_the_device() -> None:
    from weightwire_nccl.pool import Pool
    from weightwire_nccl.source import Ring, Whole

    state = on("cuda:0", 7)
    payload = Payload(Source(state).extract(), stamp=Version(1, 1))
    whole = Whole(payload, 4096, Pool().take(payload.nbytes, "cuda:0"))
    packed = torch.cat([whole.bucket(number).cpu() for number in range(len(whole.ranges))])
    again = Payload(Source(state).extract(), stamp=Version(1, 2))
    ring = Ring(again, 4096, Pool(), "cuda:0")
    assert torch.equal(packed, torch.cat([ring.bucket(number).cpu() for number in range(len(ring.ranges))]))
    views = payload.layout.views(payload.layout.slice(packed))
    for name, view in zip(payload.layout.names, views):
        assert torch.equal(view, state[name].cpu())


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_two_ends_on_one_gpu(make_rig: Make, device: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    torch.cuda.init()
    rig = make_rig(f"?device={device}&bucket=64KiB")
    updater = rig.updater(timeout=60.0)
    policy = on("cuda:0", 0)
    receiver = rig.receiver(policy, endpoint=updater.endpoint)
    updater.wait_for_workers(1)
    for version in (1, 2, 3):
        updater.push(on("cuda:0", version))
        assert receiver.pull(20.0) == seen({k: v.cpu() for k, v in policy.items()}) == version
    assert ("share a GPU" in caplog.text) == (device == "auto")


def test_a_late_joiner_is_given_what_lies_on_the_device(make_rig: Make) -> None:
    rig = make_rig("?device=cuda:0")
    updater = rig.updater(on("cuda:0", 1), timeout=60.0)
    updater.push()
    policy = on("cuda:0", 0)
    receiver = rig.receiver(policy, endpoint=updater.endpoint)
    assert receiver.pull(20.0) == seen({k: v.cpu() for k, v in policy.items()}) == 1


@two
@pytest.mark.parametrize("algorithm", ["broadcast", "scatter_allgather"])
@pytest.mark.parametrize("apply", ["copy", "alias"])
def test_from_one_gpu_to_another(make_rig: Make, algorithm: str, apply: str) -> None:
    rig = make_rig(f"?bucket=64KiB&algorithm={algorithm}")
    updater = rig.updater(endpoint=f"nccl://127.0.0.1:0?bucket=64KiB&algorithm={algorithm}&device=cuda:0", timeout=60.0)
    place = updater.endpoint.replace("cuda:0", "cuda:1")
    policy = on("cuda:1", 0)
    receiver = rig.receiver(policy, endpoint=place, apply=apply)
    updater.wait_for_workers(1)
    for version in (1, 2, 3):
        updater.push(on("cuda:0", version))
        assert receiver.pull(20.0) == seen({k: v.cpu() for k, v in policy.items()}) == version
    assert {group.engine for group in updater._sender._crews.all()} == {"nccl"}  # type: ignore[attr-defined]


@two
def test_a_worker_that_dies_in_a_nccl_group(make_rig: Make) -> None:
    rig = make_rig("?device=cuda:0")
    updater = rig.updater(timeout=60.0)
    place = updater.endpoint.replace("cuda:0", "cuda:1")
    victim = rig.victim("victim", counters, 0, endpoint=place)
    updater.wait_for_workers(1)
    updater.push(on("cuda:0", 1))
    killing: Any = threading.Timer(0.05, victim.kill)
    killing.start()
    for version in range(2, 200):
        updater.push(on("cuda:0", version), on_lost="drop", timeout=20.0)
        if "victim" not in updater.workers:
            break
    killing.join()
    assert "victim" not in updater.workers
    again = rig.victim("again", counters, 0, endpoint=place)
    updater.wait_for_workers(1)
    updater.push(on("cuda:0", 500))
    assert again.pull(20.0) == updater.version
