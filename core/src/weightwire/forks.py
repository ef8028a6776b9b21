"""Objects that own sockets, locks or threads belong to the process that made them; this tells whether we are still in
it."""

from __future__ import annotations

import os

from weightwire.errors import ClosedError

__all__ = ["Origin"]


class _Count:
    value = 0


def _after_fork() -> None:
    _Count.value += 1


os.register_at_fork(after_in_child=_after_fork)


class Origin:
    """Remembers the process in which it was made. Asking costs an attribute look-up and no system call."""

    __slots__ = ("_count", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self._count = _Count.value

    @property
    def here(self) -> bool:
        return self._count == _Count.value

    def check(self) -> None:
        """Raise :class:`~weightwire.ClosedError` in a forked child."""
        if self._count != _Count.value:
            raise ClosedError(
                f"{self.what} was made in another process, of which this one is a fork: its sockets and locks stayed "
                "there. Make a new one here."
            )
