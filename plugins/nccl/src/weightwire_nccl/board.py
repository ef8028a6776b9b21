"""The keys that the members of one group set and read while they find each other.

Each member has a copy of all keys of its generation; whoever sets one tells the others over the control socket. So a
read is local, and one that waits can be ended at once when the generation is given up. Pure;
:mod:`weightwire_nccl.store` is the face that torch sees.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

__all__ = ["Board", "BrokenBoard"]

SLICE = 0.05
"""Seconds after which a wait looks whether it has to go on, at the latest."""
MOST, LARGEST, ROOM = 1 << 12, 1 << 16, 8 << 20
"""Keys, and bytes of one and of all: far more than an engine needs, and no way to fill the trainer's memory."""


class BrokenBoard(RuntimeError):
    """The generation was given up, or a key did not come in time."""


class Board:
    """Keys of one generation.

    Args:
        publish: tells the other members of a key.
        add: adds to a number where all members do it, and returns the sum. ``None``: that is here.
        pump: reads the control socket for about so many seconds. The thread that made the board is the one that reads
            it, so while *it* waits for a key it has to; other threads only wait. ``None``: another thread reads.
    """

    def __init__(
        self,
        publish: Callable[[str, bytes], None],
        add: Callable[[str, int], int] | None = None,
        pump: Callable[[float], None] | None = None,
    ) -> None:
        self._publish = publish
        self._add = add
        self._pump = pump
        self._thread = threading.get_ident()
        self._values: dict[str, bytes] = {}
        self._sums: dict[str, int] = {}
        self._taken = 0
        self._lock = threading.RLock()  # "with" a Condition is Python code: Ctrl-C in it would leave it locked
        self._changed = threading.Condition(self._lock)
        self._broken = ""

    def set(self, key: str, value: bytes) -> None:
        """Set a key here and everywhere."""
        self.learn(key, value)
        self._publish(key, value)

    def learn(self, key: str, value: bytes) -> None:
        """Another member has set a key."""
        size = len(key) + len(value)
        if size > LARGEST or self._taken + size > ROOM or len(self._values) >= MOST:
            raise BrokenBoard(f"key {key[:100]!r} of {len(value)} bytes is more than an engine needs")
        with self._lock:
            self._taken += size
            self._values[key] = value
            self._changed.notify_all()

    def has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to the number that all members share under this key; the sum."""
        if self._add is not None:
            return self._add(key, amount)
        if len(key) > LARGEST or len(self._sums) >= MOST:
            raise BrokenBoard(f"sum {key[:100]!r} is one more than an engine needs")
        with self._lock:
            self._sums[key] = self._sums.get(key, 0) + amount
            return self._sums[key]

    def get(self, key: str, timeout: float) -> bytes:
        """The value, waiting for it up to ``timeout`` seconds. Raises :class:`BrokenBoard`."""
        self.wait([key], timeout)
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: float) -> None:
        """Wait until all keys are there. Raises :class:`BrokenBoard`."""
        self.wait_until(lambda: self.has(keys), f"key {', '.join(keys)}", timeout)

    def wait_until(self, there: Callable[[], bool], what: str, timeout: float) -> None:
        """Wait for something that the control socket brings. Raises :class:`BrokenBoard`."""
        until = time.monotonic() + timeout
        while not there():
            self.check()
            if time.monotonic() > until:
                raise BrokenBoard(f"{what} did not come in {timeout:.3g} s")
            if self._pump is not None and threading.get_ident() == self._thread:
                self._pump(SLICE)
                continue
            with self._lock:
                if not there() and not self._broken:
                    self._changed.wait(SLICE)

    def check(self) -> None:
        """Raise :class:`BrokenBoard` where the generation was given up."""
        if self._broken:
            raise BrokenBoard(self._broken)

    def end(self, why: str) -> None:
        """Give the generation up: whoever waits stops."""
        with self._lock:
            self._broken = self._broken or why
            self._changed.notify_all()
