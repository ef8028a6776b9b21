"""Descriptors that a forked child must not keep: a socket, or a lock, would live on in it after its holder has died."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from typing import Any, ClassVar

__all__ = ["forbid", "give_up", "keep"]


class _Registry:
    """The one piece of module state: everything in this process that owns such descriptors."""

    owners: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()


def forbid(owner: Any) -> None:
    """Have ``owner.in_child()`` called in every forked child. It may only close descriptors: no locks, no waiting."""
    _Registry.owners.add(owner)


def give_up(*fds: int) -> None:
    """Close descriptors in the child; the parent's stay as they are."""
    for fd in fds:
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def keep(*things: object) -> None:
    """Never free these: their destructors would wait for threads that are not in the child."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _after_fork() -> None:
    for owner in list(_Registry.owners):
        with contextlib.suppress(Exception):
            owner.in_child()


os.register_at_fork(after_in_child=_after_fork)
