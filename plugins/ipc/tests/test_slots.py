"""Which slot is written next: pure, without memory."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import resource
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import StorageFullError
from weightwire_ipc import memory
from weightwire_ipc.options import IpcOptions
from weightwire_ipc.slots import Need, Plan, Shape, Slot, choose_slot

LARGE, SMALL = Need(10 << 20, 1000), Need(1000, 1000)


def slot(number: int, need: Need = LARGE) -> Any:
    return SimpleNamespace(number=number, shape=Shape.of(need))


def test_a_shape_is_whole_pages_and_holds_its_need() -> None:
    shape = Shape.of(Need(0, 5000))
    assert shape.start % memory.PAGE == 0
    assert shape.size - shape.start == memory.PAGE, "an empty payload has a page, too"
    assert shape.holds(Need(memory.PAGE, 5000))
    assert not shape.holds(Need(memory.PAGE + 1, 5000))
    assert not shape.holds(Need(0, 50_000))


def test_two_slots_take_turns() -> None:
    a, b = slot(0), slot(1)
    assert choose_slot(LARGE, [], [], 2, 4) == Plan(make=True)
    assert choose_slot(LARGE, [], [a], 2, 4) == Plan(make=True)
    assert choose_slot(LARGE, [b], [a], 2, 4) == Plan(use=b)
    assert choose_slot(LARGE, [a], [b], 2, 4) == Plan(use=a)


def test_grows_for_a_worker_that_holds_on_and_waits_at_the_limit() -> None:
    held = [slot(n) for n in range(4)]
    assert choose_slot(LARGE, [], held[:2], 2, 4) == Plan(make=True, patient=True)
    assert choose_slot(LARGE, [], held, 2, 4) == Plan()


def test_a_slot_that_is_too_small_is_replaced_before_memory_grows() -> None:
    small, full = slot(0, SMALL), slot(1)
    assert choose_slot(LARGE, [small], [full], 2, 4) == Plan(make=True, instead=small)


def test_a_small_version_does_not_take_a_large_slot_unless_nothing_else_is_left() -> None:
    a, b = slot(0), slot(1)
    assert choose_slot(SMALL, [a], [b], 2, 4) == Plan(make=True), "nothing of its size is leased: no patience"
    assert choose_slot(SMALL, [a], [b], 2, 2) == Plan(make=True, instead=a)


@given(
    free=st.lists(st.sampled_from([SMALL, LARGE]), max_size=4),
    busy=st.lists(st.sampled_from([SMALL, LARGE]), max_size=4),
    need=st.sampled_from([SMALL, LARGE]),
    keep=st.integers(2, 4),
    most=st.integers(4, 6),
)
def test_a_plan_keeps_the_limit_and_never_touches_what_is_in_use(
    free: list[Need], busy: list[Need], need: Need, keep: int, most: int
) -> None:
    open_to_use = [slot(n, size) for n, size in enumerate(free)]
    in_use = [slot(100 + n, size) for n, size in enumerate(busy)]
    plan = choose_slot(need, open_to_use, in_use, keep, most)
    assert plan.use is None or plan.use in open_to_use
    assert plan.use is None or plan.use.shape.holds(need)
    assert plan.instead is None or plan.instead in open_to_use
    assert not (plan.make and plan.use)
    after = len(free) + len(busy) + plan.make - (plan.instead is not None)
    assert after <= max(most, len(free) + len(busy))
    assert plan.use or plan.make or not free, "waits only where nothing is free"


def test_options() -> None:
    assert IpcOptions().most(1) == 4
    assert IpcOptions().most(8) == 10
    assert IpcOptions(slots=6).most(1) == 6
    assert IpcOptions(max_slots=2).most(8) == 2
    with pytest.raises(ValueError, match="max_slots=2 is less than slots=3"):
        IpcOptions(slots=3, max_slots=2)


def test_no_room_is_an_error_with_the_sizes_before_anything_is_written() -> None:
    fd = memory.memfd("weightwire-test")
    with pytest.raises(StorageFullError, match=r"needs 1,073,741,824\.0 MiB .* only .* MiB are free"):
        memory.allocate(fd, 1 << 50)
    assert memory.os.fstat(fd).st_size == 0
    memory.os.close(fd)


@pytest.mark.parametrize("left", [-1, 0])  # the memory has two for a moment; one more was there to list them
def test_no_descriptor_left_is_an_error_that_says_so_and_costs_none(left: int) -> None:
    open_now = os.listdir("/proc/self/fd")
    lowest = next(n for n in itertools.count() if str(n) not in open_now)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, limits[1]))
    try:
        with pytest.raises(
            StorageFullError,
            match=r"none left \(Too many open files\): this process may have \d+\. Raise the limit \(ulimit -n\)",
        ):
            Slot(1, SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert os.listdir("/proc/self/fd") == open_now
    Slot(1, SMALL).close()


def test_sealed_memory_cannot_be_cut_grown_written_or_mapped_for_writing() -> None:
    fd = memory.memfd("weightwire-test")
    memory.allocate(fd, memory.PAGE)
    ours = memory.map_shared(fd, memory.PAGE)
    fd = memory.seal(fd)
    ours.array(0, memory.PAGE)[0] = 7
    peer = memory.reopen(fd, memory.os.O_RDWR)
    try:
        for act in (
            lambda: memory.os.ftruncate(peer, 0),
            lambda: memory.os.ftruncate(peer, 2 * memory.PAGE),
            lambda: memory.os.pwrite(peer, b"x", 0),
            lambda: mmap.mmap(peer, memory.PAGE),
        ):
            with pytest.raises(OSError, match="Operation not permitted") as caught:
                act()
            assert caught.value.errno == errno.EPERM
        assert memory.os.pread(peer, 1, 0) == b"\x07"
        memory.check_sealed(peer, memory.PAGE)
    finally:
        memory.os.close(peer)
        memory.os.close(fd)


def test_memory_that_could_be_cut_is_refused() -> None:
    fd = memory.memfd("weightwire-test")
    memory.allocate(fd, memory.PAGE)
    with pytest.raises(memory.WireError, match="sealed"):
        memory.check_sealed(fd, memory.PAGE)
    memory.os.close(fd)
