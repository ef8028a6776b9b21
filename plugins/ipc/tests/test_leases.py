"""Kernel-held leases, with two open file descriptions in one process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from weightwire_ipc.leases import Lease, ReadLeases, WriteLocks


@pytest.fixture
def locks() -> Iterator[WriteLocks]:
    locks = WriteLocks()
    yield locks
    locks.close()


def test_a_reader_keeps_the_writer_out_until_its_last_hold_ends(locks: WriteLocks) -> None:
    reader = ReadLeases(locks.shared, lane=3)
    first, second = reader.take(5), reader.take(5)
    assert first is not None
    assert second is not None
    assert not locks.take(5)
    assert locks.take(4), "another slot is not concerned"
    locks.drop(4)
    first.release()
    first.release()
    assert not locks.take(5)
    second.release()
    assert locks.take(5)
    assert reader.take(5) is None, "the writer keeps readers out"
    locks.drop(5)
    again = reader.take(5)
    assert again is not None
    again.release()
    reader.close()


def test_holders_are_told_by_lane(locks: WriteLocks) -> None:
    readers = [ReadLeases(locks.shared, lane) for lane in (1, 2, 70_000)]
    leases = [reader.take(9) for reader in readers]
    assert locks.holders(9) == [1, 2, 70_000]
    assert locks.holders(8) == []
    for lease in leases:
        assert lease is not None
        lease.release()
    assert locks.holders(9) == []
    for reader in readers:
        reader.close()


def test_a_forgotten_lease_ends(locks: WriteLocks) -> None:
    reader = ReadLeases(locks.shared, 0)
    lease = reader.take(1)
    assert lease is not None
    del lease
    gc.collect()
    assert locks.take(1)
    reader.close()


def test_closing_waits_for_the_last_hold(locks: WriteLocks) -> None:
    reader = ReadLeases(locks.shared, 0)
    lease = reader.take(1)
    assert isinstance(lease, Lease)
    reader.close()
    assert not locks.take(1)
    lease.release()
    assert locks.take(1)
    assert reader.take(1) is None


def test_a_forked_child_does_not_keep_a_lease_alive(locks: WriteLocks) -> None:
    reader = ReadLeases(locks.shared, 0)
    lease = reader.take(1)
    assert lease is not None
    to_child, to_parent = os.pipe(), os.pipe()
    child = os.fork()
    if not child:  # lives on until the parent closes its pipe
        os.close(to_child[1])
        os.write(to_parent[1], b"!")
        os.read(to_child[0], 1)
        os._exit(0)
    os.close(to_child[0])
    assert os.read(to_parent[0], 1) == b"!"
    assert not locks.take(1), "the child closed its descriptor, not the parent's lock"
    os.close(reader._fd)  # what the kernel does when the holder dies
    reader._fd = -1
    assert locks.take(1)
    os.close(to_child[1])
    assert os.waitpid(child, 0)[1] == 0
    for fd in to_parent:
        os.close(fd)
