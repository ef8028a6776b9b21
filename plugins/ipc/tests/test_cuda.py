"""CUDA IPC between processes, on a machine that has it. Everything above the device is tested without one, in
test_device.py and by the conformance kit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightwire.testing import Rig
from weightwire.testing.states import counters, seen
from weightwire.testing.workers import until
from weightwire_ipc.cuda import CudaLayer
from weightwire_ipc.device import DeviceError

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here"),
]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SIZE = 300_000
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]


class Gpu:
    """A trainer on the first GPU, and workers on GPUs in processes of their own. Bytes are checked by their digest."""

    def __init__(self, rig: Rig, start: Path) -> None:
        self.rig, self.start = rig, start
        torch.save(counters(0, 6, SIZE), start)
        self.updater = rig.updater(digest="on", timeout=60.0)

    def worker(self, name: str, device: str = "cuda:0", **options: Any) -> Any:
        # The kit's processes cannot import this module: torch.load is what makes weights on a GPU there.
        return self.rig.victim(name, torch.load, str(self.start), device, **{"timeout": 60.0, **options})

    def push(self, version: int, **options: Any) -> None:
        state = {name: tensor.to("cuda:0") for name, tensor in counters(version, 6, SIZE).items()}
        self.updater.push(state, **options)
        for tensor in state.values():
            tensor.zero_()  # what was pushed is not read any more

    def note(self, name: str) -> str:
        until(lambda: "device" in self.updater.workers[name].notes, "what came of the probe")
        return str(self.updater.workers[name].notes["device"])

    @property
    def sender(self) -> Any:
        return self.updater._sender


@pytest.fixture
def gpu(private: Path, tmp_path: Path) -> Iterator[Gpu]:
    rig = Rig(lambda: "ipc://gpu", frozenset({"processes", "alias"}))
    yield Gpu(rig, tmp_path / "start.pt")
    rig.close()


@pytest.mark.parametrize("apply", ["copy", "alias"])
def test_from_process_to_process_on_one_gpu(gpu: Gpu, apply: str) -> None:
    worker = gpu.worker("w", apply=apply)
    gpu.updater.wait_for_workers(1)
    for version in range(1, 12):
        gpu.push(version)
        assert worker.pull(20.0) == worker.seen() == version
    assert "reads the memory of device" in gpu.note("w")
    assert not any(slot.where & 1 for slot in list(gpu.sender._slots.values())[1:]), "nothing went through the host"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bit_for_bit(gpu: Gpu, dtype: torch.dtype) -> None:
    worker = gpu.rig.victim("w", torch.nn.Linear, 4, 4, False, "cuda:0", timeout=60.0, cast="target")
    gpu.updater.wait_for_workers(1)
    for seed in range(3):
        torch.manual_seed(seed)
        weight = torch.randint(0, 2, (4, 4), device="cuda:0").to(dtype)
        gpu.updater.push({"weight": weight})
        assert worker.pull(20.0) == gpu.updater.version
        assert worker.do("contents")["weight"].data == weight.float().cpu().numpy().tobytes()


def test_two_workers_and_one_on_the_host(gpu: Gpu) -> None:
    workers = [gpu.worker("a"), gpu.worker("b", apply="alias"), gpu.worker("c", "cpu")]
    gpu.updater.wait_for_workers(3)
    for version in range(1, 10):
        gpu.push(version)
        assert [worker.pull(20.0) for worker in workers] == [worker.seen() for worker in workers] == [version] * 3
    assert "reads the memory" in gpu.note("a")
    assert "reads the memory" in gpu.note("b")
    assert "device" not in gpu.updater.workers["c"].notes


def test_kept_views_are_not_overwritten(gpu: Gpu) -> None:
    worker = gpu.worker("w", apply="alias")
    gpu.updater.wait_for_workers(1)
    gpu.push(1)
    worker.pull(20.0)
    worker.do("keep")
    before = worker.do("kept_contents")
    for version in range(2, 8):
        gpu.push(version)
        worker.pull(20.0)
    assert worker.do("kept_contents") == before
    assert len(gpu.sender._slots) <= 3


def test_a_killed_worker_costs_one_slot_at_most(gpu: Gpu) -> None:
    stays = gpu.worker("stays")
    for round_ in range(4):
        victim = gpu.worker(f"victim{round_}", apply="alias")
        gpu.updater.wait_for_workers(2)
        gpu.push(gpu.updater.version + 1)
        assert victim.pull(20.0) == stays.pull(20.0) == gpu.updater.version
        victim.kill()
        until(lambda: len(gpu.updater.workers) == 1, "the killed one is lost")
        gpu.push(gpu.updater.version + 1, on_lost="drop")
        assert stays.pull(20.0) == stays.seen() == gpu.updater.version
    assert len(gpu.sender._slots) <= 3
    free = torch.cuda.mem_get_info(0)[0]
    gpu.updater.close()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info(0)[0] > free, "no export of a dead one keeps the arenas"


def test_a_receiver_in_the_trainer_s_own_process_goes_through_the_host(gpu: Gpu) -> None:
    policy = {name: tensor.to("cuda:0") for name, tensor in counters(0, 6, SIZE).items()}
    receiver = gpu.rig.receiver(policy, worker="here", timeout=60.0)
    gpu.updater.wait_for_workers(1)
    for version in (1, 2, 3):
        gpu.push(version)
        assert receiver.pull(20.0) == seen(policy) == version
    assert "through the host" in gpu.note("here")


def test_expandable_segments_are_named_as_the_reason() -> None:
    layer = CudaLayer()
    device = layer.mine("cuda:0")
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        memory = layer.allocate(device, 64 << 20)
        with pytest.raises(DeviceError, match="expandable_segments"):
            layer.export(device, memory)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_pieces_have_storages_of_their_own_and_keep_their_owner() -> None:
    class Owner:
        pass

    import weakref

    layer, owner = CudaLayer(), Owner()
    memory = torch.arange(256, device="cuda:0").to(torch.uint8)
    gone = weakref.ref(owner)
    pieces = layer.pieces(memory, [(0, 64), (64, 10), (128, 0)], owner)
    assert [piece.tolist() for piece in pieces] == [list(range(64)), list(range(64, 74)), []]
    assert pieces[1].untyped_storage().nbytes() == 10
    assert pieces[1].data_ptr() == memory.data_ptr() + 64
    del owner
    assert gone() is not None
    pieces.clear()
    assert gone() is None


@two
@pytest.mark.parametrize("apply", ["copy", "alias"])
def test_a_worker_on_another_gpu(gpu: Gpu, apply: str) -> None:
    worker = gpu.worker("w", "cuda:1", apply=apply)
    gpu.updater.wait_for_workers(1)
    for version in range(1, 6):
        gpu.push(version)
        assert worker.pull(20.0) == worker.seen() == version
    peers = torch.cuda.can_device_access_peer(1, 0)
    assert gpu.note("w").startswith("reads the memory" if peers else "through the host")
