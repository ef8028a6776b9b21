"""Either any number of visits are inside, or one version comes in: a lock for many readers and one writer.

It is fair to both sides. While the writer waits for those inside to leave, newcomers queue, so that a steady stream of
them cannot keep it out; and when it is through, all who queue are inside before it can ask again, so that it cannot
keep them out either. A visit waits for one version at most.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

from weightwire.transport import Deadline

__all__ = ["Stuck", "Turnstile", "Visit"]

SLICE = 0.05
"""Seconds. The writer looks at least this often for visits that were dropped where a notice could not be given."""
TOLD = 8
"""How many visits an error names."""


class Visit:
    """One stay inside, perhaps nested: it lasts until the last of its ``holders`` has left."""

    __slots__ = ("error", "holders", "since", "wake", "who")

    def __init__(self, who: str) -> None:
        self.who = who  # "thread 'MainThread'"
        self.since = time.monotonic()
        self.holders: set[object] = set()  # empty: it is queued, or over
        self.wake: Callable[[], object] | None = None
        self.error: BaseException | None = None  # why it was turned away

    def __str__(self) -> str:
        return f"{self.who} (for {time.monotonic() - self.since:.3g} s)"


class Stuck(Exception):
    """Raised by :meth:`Turnstile.shut`: these did not leave in time."""

    def __init__(self, visits: Collection[Visit]) -> None:
        super().__init__(names(visits))
        self.visits = visits


class Turnstile:
    """Shut when made; the writer opens it.

    Attributes:
        changed: a condition over the lock of everything here, for what the owner keeps beside it.
        why: why it is shut, for errors; empty while it is open.
        refusal: who comes while it is shut is turned away with this, where it is set.
        ended: who comes is turned away with this, whether it is shut or not.
        dropped: holders that are no more: ``append`` may be called by anybody, anywhere, also by the finaliser that
            interrupts a thread which holds the lock.
    """

    def __init__(self, why: str) -> None:
        self._lock = threading.RLock()  # a finaliser that ends it may come in while we hold it
        self._left = threading.Condition(self._lock)  # for the writer, who is one
        self.changed = threading.Condition(self._lock)
        self.why = why
        self.refusal: BaseException | None = None
        self.ended: BaseException | None = None
        self._inside: dict[Visit, None] = {}
        self._queue: dict[Visit, object] = {}  # and who will hold it
        self.dropped: deque[object] = deque()

    # -- visits ------------------------------------------------------------------------------------------------------

    def enter(self, visit: Visit, holder: object, wake: Callable[[], object] | None = None) -> bool:
        """Go in. Where that is not possible at once: queue, where ``wake`` is given, which is called, by another
        thread, when the visit is inside or ``visit.error`` says why it will not be. Raises that where it is known now.
        """
        with self._lock:
            error = self.ended or (self.refusal if self.why else None)
            if error is not None:
                visit.error = error
                return True
            if self.why:
                if wake is not None:
                    visit.wake = wake
                    self._queue[visit] = holder
                return False
            self._inside[visit] = None
            visit.holders.add(holder)
            return True

    def join(self, visit: Visit, holder: object) -> bool:
        """Hold a visit that is inside, whether the turnstile is shut or not; false where it is over."""
        with self._lock:
            if visit not in self._inside:
                return False
            visit.holders.add(holder)
            return True

    def leave(self, visit: Visit, holder: object) -> None:
        """End one hold on a visit, or its place in the queue. Idempotent."""
        with self._lock:
            self._leave(visit, holder)

    def _leave(self, visit: Visit, holder: object) -> None:
        self._queue.pop(visit, None)
        visit.holders.discard(holder)
        if not visit.holders and visit in self._inside:
            del self._inside[visit]
            self._left.notify()

    # -- the writer --------------------------------------------------------------------------------------------------

    def shut(self, why: str, deadline: Deadline) -> None:
        """Let nobody in any more, and wait until everybody has left.

        Raises :class:`Stuck` at the deadline, or what :attr:`ended` says; it is as it was then.
        """
        before = self.why
        try:
            with self._lock:
                self.why = why
                while self._occupied():
                    if self.ended is not None:
                        raise copy.copy(self.ended)
                    if deadline.expired:
                        raise Stuck(tuple(self._inside))
                    self._left.wait(deadline.sooner(SLICE).remaining)
        except BaseException:
            if before:
                self.why = before
            else:
                self.open()
            raise

    def open(self) -> None:
        """Let in who queues, and whoever comes."""
        with self._lock:
            self.why, self.refusal = "", None
            for visit, holder in self._queue.items():
                self._inside[visit] = None
                visit.holders.add(holder)
            self._wake_all()

    def turn_away(self, error: BaseException, *, for_good: bool = False) -> None:
        """Let those who queue go with an error, and whoever comes while it is shut, or ``for_good``."""
        with self._lock:
            if for_good:
                self.ended = error
            elif not self.why:
                return
            self.refusal = error
            for visit in self._queue:
                visit.error = error
            self._wake_all()
            self._left.notify()
            self.changed.notify_all()

    def wait_gone(self, visits: Collection[Visit], deadline: Deadline) -> bool:
        """Wait, open or shut, until these visits are over; false at the deadline."""
        with self._lock:
            while self._occupied() and not self._inside.keys().isdisjoint(visits):
                if deadline.expired or self.ended is not None:
                    return False
                self._left.wait(deadline.sooner(SLICE).remaining)
        return True

    def inside(self) -> str:
        """Who is inside, in words."""
        with self._lock:
            return names(tuple(self._inside))

    def _occupied(self) -> bool:
        while self.dropped:
            holder = self.dropped.popleft()
            for visit in [visit for visit in self._inside if any(one is holder for one in visit.holders)]:
                self._leave(visit, holder)
        return bool(self._inside)

    def _wake_all(self) -> None:
        """Empty the queue. Who cannot be woken, because its event loop has ended, is not inside."""
        queue, self._queue = self._queue, {}
        for visit, holder in queue.items():
            assert visit.wake is not None
            try:
                visit.wake()
            except RuntimeError:
                self._leave(visit, holder)


def names(visits: Collection[Visit]) -> str:
    told = [str(visit) for visit in sorted(visits, key=lambda visit: visit.since)]
    more = f" and {len(told) - TOLD} more" if len(told) > TOLD else ""
    return ", ".join(told[:TOLD]) + more or "nobody"
