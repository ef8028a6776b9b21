"""Leases that the kernel keeps: locks on bytes of a file that holds nothing.

Each worker has a lane, each slot a row: a worker that reads a slot holds a shared lock on byte ``(slot, lane)``; the
trainer takes an exclusive lock on the slot's whole row before it rewrites it. The locks belong to open file
descriptions (``F_OFD_SETLK``), so they end when their holder dies, however it dies. For that each side opens the file
anew: a descriptor that came over a socket shares the sender's description. And nobody maps the file: a mapping would
keep the description alive in a forked child.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import weakref

from weightwire.forks import forbid, give_up
from weightwire_ipc.memory import memfd, reopen

__all__ = ["Lease", "ReadLeases", "WriteLocks"]

LANES = 1 << 32
_GETLK, _SETLK = 36, 37  # F_OFD_GETLK, F_OFD_SETLK; fcntl lacks the names
_FLOCK = struct.Struct("hhqqi4x")


def _set(fd: int, kind: int, start: int, length: int) -> bool:
    """Take or drop a lock without waiting; False where somebody else's is in the way."""
    try:
        fcntl.fcntl(fd, _SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


class WriteLocks:
    """The trainer's side. ``shared`` is the descriptor to hand out: read-only, and never locked through."""

    def __init__(self) -> None:
        self._fd, self.shared = memfd("weightwire-leases"), -1
        try:
            self.shared = reopen(self._fd, os.O_RDONLY)
        except BaseException:
            self.close()
            raise

    def take(self, slot: int) -> bool:
        """Lock a slot against every reader; False where one has a lease."""
        return _set(self._fd, fcntl.F_WRLCK, slot * LANES, LANES)

    def drop(self, slot: int) -> None:
        """Let readers in again."""
        _set(self._fd, fcntl.F_UNLCK, slot * LANES, LANES)

    def holders(self, slot: int) -> list[int]:
        """Lanes of those who have a lease on a slot."""
        lanes: list[int] = []
        start, end = slot * LANES, (slot + 1) * LANES
        while start < end:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
            kind, _, found, _, _ = _FLOCK.unpack(fcntl.fcntl(self._fd, _GETLK, asked))
            if kind == fcntl.F_UNLCK:
                break
            lanes.append(found - slot * LANES)
            start = found + 1
        return lanes

    def close(self) -> None:
        """Close both descriptors. Idempotent, also where Ctrl-C came up in between."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        fd, self.shared = self.shared, -1
        if fd >= 0:
            os.close(fd)

    def detach(self) -> tuple[int, ...]:
        """The bare descriptors, for a forked child to close."""
        fds = tuple(fd for fd in (self._fd, self.shared) if fd >= 0)
        self._fd = self.shared = -1
        return fds


class Lease:
    """One hold on one slot. It ends with :meth:`release`, or when the object is forgotten."""

    __slots__ = ("__weakref__", "_leases", "_slot")

    def __init__(self, leases: ReadLeases, slot: int) -> None:
        self._leases: ReadLeases | None = leases
        self._slot = slot

    @property
    def ended(self) -> bool:
        return self._leases is None

    def release(self) -> None:
        """Idempotent; may be called from any thread and from a finalizer."""
        leases = getattr(self, "_leases", None)  # not there where its making was interrupted
        self._leases = None
        if leases is not None:
            leases.sweep(self._slot)

    __del__ = release


class ReadLeases:
    """A worker's side: any number of holds on a slot, one kernel lock for all of them.

    What an interrupt breaks off, in here or in a finalizer where Python only prints it, the next :meth:`sweep` ends:
    a slot stays in ``_holds`` until its kernel lock has gone, and a hold counts for as long as its lease lives and
    has not ended.
    """

    def __init__(self, fd: int, lane: int) -> None:
        """``fd`` may be shared with others; it is opened anew and stays the caller's."""
        self._fd = reopen(fd, os.O_RDONLY)
        self._lane = lane
        self._holds: dict[int, dict[int, weakref.ref[Lease]]] = {}  # slot -> its leases, by identity
        self._closing = False
        # Reentrant: the garbage collector may end a lease while this thread is in here.
        self._lock = threading.RLock()
        forbid(self)

    def take(self, slot: int) -> Lease | None:
        """A hold on a slot, or ``None`` where the trainer is writing it."""
        lease = Lease(self, slot)
        with self._lock:
            if self._fd < 0:
                return None
            self._holds.setdefault(slot, {})[id(lease)] = weakref.ref(lease)
            taken = _set(self._fd, fcntl.F_RDLCK, slot * LANES + self._lane, 1)
        if not taken:
            lease.release()
            return None
        return lease

    def sweep(self, slot: int | None = None) -> None:
        """Let go of a slot, or of all, as far as no living lease holds it."""
        if self._fd < 0:  # closed, or this is a forked child: the lock may be held by a thread that is not here
            return
        with self._lock:
            for number in list(self._holds) if slot is None else (slot,):
                holds = self._holds.get(number)
                if holds is None or self._fd < 0:
                    continue
                for hold, reference in list(holds.items()):
                    lease = reference()
                    if lease is None or lease.ended:
                        del holds[hold]
                if not holds:
                    _set(self._fd, fcntl.F_UNLCK, number * LANES + self._lane, 1)
                    self._holds.pop(number, None)
            self._close_if_done()

    def close(self) -> None:
        """Close the descriptor as soon as the last hold has ended. Idempotent."""
        with self._lock:
            self._closing = True
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self._closing and not self._holds and self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def in_child(self) -> None:
        """In a forked child: let go of the locks, which are the parent's."""
        fd, self._fd = self._fd, -1
        give_up(fd)
