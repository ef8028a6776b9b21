"""Memory that a worker uses without a copy: mapped once, used again as long as nobody has written to it."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import pytest
import torch

import weightwire_ipc.mapped
import weightwire_ipc.mapping
import weightwire_ipc.memory
from weightwire import WeightReceiver, WeightUpdater
from weightwire_ipc.mapping import HUGE, PAGE, Mapping
from weightwire_ipc.memory import allocate, memfd, unwritten

SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
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


def private(fd: int, size: int = 8 * PAGE) -> Mapping:
    return Mapping(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


kernel = tuple(map(int, os.uname().release.split(".")[:2]))
needs_scan = pytest.mark.skipif(kernel < (6, 7), reason="the kernel does not tell which pages were written")


@needs_scan
@pytest.mark.parametrize("page", [None, 0, 3, 7])
def test_a_written_page_is_found(file: int, page: int | None) -> None:
    mapping = private(file)
    array = mapping.array(0, mapping.size)
    assert array[0] == array[7 * PAGE] == ord("x")
    assert unwritten(mapping)
    os.pwrite(file, b"y", 0)  # by the trainer
    assert unwritten(mapping)
    assert array[0] == ord("y")
    if page is not None:
        array[page * PAGE] = 0
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
        monkeypatch.setattr(weightwire_ipc.mapped, "unwritten", lambda mapping: False)
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


# -- huge pages ------------------------------------------------------------------------------------------------------


def huge_bytes(mapping: Mapping) -> int:
    """Bytes of a mapping that are mapped in huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = int(line.split("-")[0], 16) == mapping.address
        elif inside and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


def thick(size: int) -> int:
    fd = memfd("weightwire-test")
    allocate(fd, size)
    return fd


@pytest.mark.parametrize("size", [HUGE - PAGE, HUGE, 40 * HUGE + PAGE])
def test_memory_files_have_huge_pages_wherever_they_have_room(size: int) -> None:
    fd = thick(size)
    try:
        ours = Mapping(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        ours.array(0, size)[:] = 7
        theirs = private(fd, size)
        array = theirs.array(PAGE, size)
        assert bool((array == 7).all())
        assert huge_bytes(ours) == huge_bytes(theirs)
        if size > 2 * HUGE > 2 * PAGE and kernel >= (6, 1) and "[deny]" not in SETTING.read_text():
            assert 0 < huge_bytes(ours) <= size - size % HUGE, "all, where memory is not in pieces"
        assert unwritten(theirs) or kernel < (6, 7)
        array[5] = 1  # in the middle of a huge page
        assert not unwritten(theirs)
        assert (int(array.sum()), int(ours.array(0, size).max())) == (7 * (size - PAGE) - 6, 7), "nobody else sees it"
        ours.array(0, size)[[PAGE, 2 * PAGE]] = 9
        assert (array[0], array[PAGE]) == (7, 9), "what one has not written to is the file's"
    finally:
        os.close(fd)


def test_memory_files_are_as_they_were_where_there_are_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weightwire_ipc.mapping, "_COLLAPSE", -1)
    fd = thick(3 * HUGE)
    assert os.fstat(fd).st_size == 3 * HUGE
    assert os.fstat(fd).st_blocks * 512 == 3 * HUGE, "all of it is had"
    assert not private(fd, 3 * HUGE).array(0, 3 * HUGE).any()
    os.close(fd)


def test_a_mapping_goes_with_the_last_array_over_it(file: int) -> None:
    mapping = private(file)
    address, array = f"{mapping.address:x}-", mapping.array(PAGE, 2 * PAGE)
    del mapping
    assert address in Path("/proc/self/maps").read_text()
    assert bytes(array[:2]) == b"xx"
    del array
    assert address not in Path("/proc/self/maps").read_text()
