"""Objects that own sockets, locks or threads belong to the process that made them.

:class:`Origin` tells whether we are still in it; :func:`forbid` has a forked child let go of descriptors that it must
not keep: a socket, or a lock, would live on in it after its holder has died.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from typing import Any, ClassVar

from weightwire.errors import ClosedError

__all__ = ["Origin", "forbid", "give_up", "keep"]


class _State:
    """The module state: how often we were forked, and everything in this process that owns such descriptors."""

    forks: ClassVar[int] = 0
    owners: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()


def forbid(owner: Any) -> None:
    """Have ``owner.in_child()`` called in every forked child. It may only close descriptors: no locks, no waiting.

    Where it has a ``before_fork``, that is called in the parent before.
    """
    _State.owners.add(owner)


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
    _State.forks += 1
    for owner in list(_State.owners):
        with contextlib.suppress(Exception):
            owner.in_child()


def _before_fork() -> None:
    for owner in list(_State.owners):
        with contextlib.suppress(Exception):
            getattr(owner, "before_fork", _nothing)()


def _nothing() -> None: ...


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


class Origin:
    """Remembers the process in which it was made. Asking costs an attribute look-up and no system call."""

    __slots__ = ("_count", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self._count = _State.forks

    @property
    def here(self) -> bool:
        return self._count == _State.forks

    def refuse_copy(self) -> TypeError:
        """What to raise where the object is to be pickled or copied."""
        return TypeError(
            f"{self.what} cannot be pickled or copied: its sockets, locks and threads are of this process. Hand on the "
            "text of its .endpoint, and make a new one there"
        )

    def check(self) -> None:
        """Raise :class:`~weightwire.ClosedError` in a forked child."""
        if self._count != _State.forks:
            raise ClosedError(
                f"{self.what} was made in another process, of which this one is a fork: its sockets and locks stayed "
                "there. Make a new one here."
            )
