"""A :class:`torch.distributed.Store` whose every call has a deadline, and an error of its own when the store is lost.

torch waits for ever for a store whose process is stopped. So all calls are made in one thread, in the order in which
they were asked for.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

from weightwire.errors import PushError, WaitTimeout
from weightwire.transport import Deadline

__all__ = ["Desk", "Silence"]

GRACE = 2.0
"""Seconds beyond a call's deadline that the store has to say so."""
NEAR = 0.05
"""Seconds before the deadline at which a store, which counts in other units, may find it over."""


class Silence(Exception):
    """Nobody has said what was waited for; the store itself is there."""


class _Call(NamedTuple):
    run: Callable[[Any], Any]
    deadline: Deadline
    waits: bool  # for what somebody else is to say
    done: SimpleQueue[Any]


class Desk:
    def __init__(self, store: Any) -> None:
        self._store = store
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, run: Callable[[Any], Any], deadline: Deadline) -> Any:
        """``run(store)``. Raises, where the store is lost or does not answer, an error that says where it is."""
        return self._ask(run, deadline, waits=False)

    def _ask(self, run: Callable[[Any], Any], deadline: Deadline, *, waits: bool) -> Any:
        done = self._put(run, deadline, waits=waits)
        try:
            found = done.get(timeout=deadline.remaining + GRACE)
        except queue.Empty:
            raise WaitTimeout(
                f"{_place(self._store)}, through which the ranks of the trainer speak, did not answer: the process "
                "that hosts it (mostly rank 0) is stopped or cut off",
                phase="extract",
            ) from None
        if isinstance(found, Silence):
            raise found
        if isinstance(found, RuntimeError):
            raise PushError(
                f"{_place(self._store)}, through which the ranks of the trainer speak, is lost: the process that hosts "
                f"it (mostly rank 0) is gone; start the trainer again ({found})",
                phase="extract",
            ) from found
        if isinstance(found, BaseException):
            raise found
        return found

    def post(self, run: Callable[[Any], Any]) -> None:
        """``run(store)``, in its turn. Nobody hears of it where the store is gone."""
        self._put(run, Deadline.after(GRACE), waits=False)

    def read(self, key: str, deadline: Deadline) -> bytes:
        """The value of a key, when it is there. Raises what :meth:`ask` raises, and :class:`Silence`."""

        def run(store: Any) -> Any:
            store.wait([key], timedelta(seconds=max(deadline.remaining, 0.001)))
            return store.get(key)

        found: bytes = self._ask(run, deadline, waits=True)
        return found

    def _put(self, run: Callable[[Any], Any], deadline: Deadline, *, waits: bool) -> SimpleQueue[Any]:
        if self._thread is None:
            args = (self._store, self._calls)
            self._thread = threading.Thread(target=_serve, args=args, name="weightwire-desk", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._calls.put, None).atexit = False
        call = _Call(run, deadline, waits, SimpleQueue())
        self._calls.put(call)
        return call.done


def _serve(store: Any, calls: SimpleQueue[_Call | None]) -> None:
    import torch.distributed as dist

    while (call := calls.get()) is not None:
        try:
            found = call.run(store)
        except RuntimeError as exc:  # DistStoreError, or DistNetworkError; a wait that is over ends at its deadline
            over = call.waits and call.deadline.remaining < NEAR and not isinstance(exc, dist.DistNetworkError)
            call.done.put(Silence() if over else exc)
        except BaseException as exc:
            call.done.put(exc)
        else:
            call.done.put(found)
        del call


def _place(store: Any) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    kind = type(store).__name__
    if hasattr(store, "host"):
        return f"the {kind} at {store.host}:{store.port}"
    return f"the {kind} at {store.path}" if hasattr(store, "path") else f"the {kind}"
