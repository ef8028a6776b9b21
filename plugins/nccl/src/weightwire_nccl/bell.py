"""Wakes a thread that waits for sockets."""

from __future__ import annotations

import socket
from contextlib import suppress

__all__ = ["Bell"]


class Bell:
    """Rung by any thread; ``fileno()`` is readable from then on, until :meth:`hush`."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        for end in (self._near, self._far):
            end.setblocking(False)

    def fileno(self) -> int:
        return self._near.fileno()

    def ring(self) -> None:
        with suppress(OSError):  # it rings already; or it is closed
            self._far.send(b"!")

    def hush(self) -> None:
        with suppress(BlockingIOError):
            self._near.recv(4096)

    def close(self) -> None:
        self._near.close()
        self._far.close()

    def detach(self) -> tuple[int, int]:
        """The bare descriptors, for a forked child to close."""
        return self._near.detach(), self._far.detach()
