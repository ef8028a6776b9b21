"""Locks that the kernel (or the file server) holds for a process and drops when it dies.

They are ``flock`` locks, which local file systems, NFS (as byte-range locks on the server), CephFS and Lustre (mounted
with ``flock``) keep across machines. Whoever holds one may remove the file, so a lock counts only while its file still
has its name.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from weightwire.errors import EndpointError

__all__ = ["held", "take"]

PATIENCE = 0.2
"""Seconds. Others may hold a lock for a moment, only to see whether it is free."""


def take(path: Path, *, shared: bool = False, create: bool = False, patience: float = PATIENCE) -> int | None:
    """Lock the file of this name; its descriptor, or ``None`` where somebody else keeps it.

    Raises ``FileNotFoundError`` where there is none, and :class:`~weightwire.EndpointError` where this file system has
    no locks.
    """
    flags = os.O_CLOEXEC | (os.O_RDONLY if shared else os.O_RDWR) | (os.O_CREAT if create else 0)
    deadline = time.monotonic() + patience
    while True:
        fd = os.open(path, flags, 0o600)
        try:
            if _locked(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, path) and _is_at(fd, path):
                kept, fd = fd, -1
                return kept
        finally:
            if fd >= 0:
                os.close(fd)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)


def held(path: Path) -> bool:
    """Whether somebody holds the lock of this name."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _locked(fd, fcntl.LOCK_SH, path)
    finally:
        os.close(fd)


def _locked(fd: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:  # ENOLCK, ENOTSUP: mounted without locks
        raise EndpointError(
            f"{path} cannot be locked ({exc.strerror}): this folder's file system needs working flock() locks; for "
            "Lustre, mount it with the option flock, for NFS, run its lock service or use NFS 4"
        ) from exc
    return True


def _is_at(fd: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False
