"""Memory that a worker uses without a copy: mapped once, used again as long as nobody has written to it."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

import weightwire_ipc.memory
import weightwire_ipc.receiver
from weightwire import WeightReceiver, WeightUpdater
from weightwire_ipc.memory import PAGE, unwritten

NUMBERS = 1 << 19  # more bytes than are copied in any case


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((NUMBERS,), value), "b": torch.full((3,), value)}


@pytest.fixture
def file() -> int:
    fd = os.memfd_create("weightwire-test")
    os.ftruncate(fd, 8 * PAGE)
    os.pwrite(fd, b"x" * 8 * PAGE, 0)
    yield fd
    os.close(fd)


def private(fd: int) -> mmap.mmap:
    return mmap.mmap(fd, 8 * PAGE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


needs_scan = pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 7),
    reason="the kernel does not tell which pages were written",
)


@needs_scan
@pytest.mark.parametrize("page", [None, 0, 3, 7])
def test_a_written_page_is_found(file: int, page: int | None) -> None:
    mapping = private(file)
    assert mapping[0] == mapping[7 * PAGE] == ord("x")
    assert unwritten(mapping)
    os.pwrite(file, b"y", 0)  # by the trainer
    assert unwritten(mapping)
    assert mapping[0] == ord("y")
    if page is not None:
        mapping[page * PAGE] = 0
        assert not unwritten(mapping)


def test_nothing_is_taken_for_unwritten_where_the_kernel_does_not_say(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weightwire_ipc.memory, "_PAGEMAP_SCAN", 0)
    assert not unwritten(private(file))


@pytest.mark.parametrize("kernel_says", [pytest.param(True, marks=needs_scan), False])
@pytest.mark.parametrize("write", [True, False])
def test_what_a_worker_writes_is_gone_with_the_version(
    write: bool, kernel_says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel_says:
        monkeypatch.setattr(weightwire_ipc.receiver, "unwritten", lambda mapping: False)
    target = state(0.0)
    places: list[int] = []
    with (
        WeightUpdater("ipc") as updater,
        WeightReceiver(updater.endpoint, target, apply="alias") as receiver,
    ):
        for number in range(1, 7):
            updater.push(state(float(number)))
            receiver.pull()
            assert all(bool((tensor == number).all()) for tensor in target.values())
            places.append(target["w"].data_ptr())
            if write:
                target["w"][number * 1000] = -1.0
                target["b"] += 1.0
    again = places[2:] == places[:-2]
    assert again or write or not kernel_says  # two slots in turn, each mapped once
    assert float(target["b"][0]) == 6.0 + write


@needs_scan
def test_a_view_that_lives_on_keeps_its_values() -> None:
    target = state(0.0)
    with (
        WeightUpdater("ipc?max_slots=8") as updater,
        WeightReceiver(updater.endpoint, target, apply="alias") as receiver,
    ):
        kept = []
        for number in range(1, 6):
            updater.push(state(float(number)))
            receiver.pull()
            kept.append(target["w"][:10].detach())
        assert [float(view.sum()) for view in kept] == [10.0, 20.0, 30.0, 40.0, 50.0]
        del kept[::2]
        for number in range(6, 12):
            updater.push(state(float(number)))
            receiver.pull()
            assert [float(view.sum()) for view in kept] == [20.0, 40.0]
            assert bool((target["w"] == number).all())
