"""A receiver in a thread of its own: new versions come in when nobody acts, whatever acts, and however often.

    receiver = GatedReceiver("ipc://policy", policy)

    def handle(request):                            async def handle(request):
        with receiver.acting() as version:              async with receiver.acting() as version:
            return policy(request), version                 return await infer(request), version

For an inference server, or any policy that several threads or tasks act with. Within the block the policy is of the
version that it gives, in all its tensors. Where one loop acts by itself, a plain
:class:`~weightwire.WeightReceiver` with a ``pull()`` before each step does the same without a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weightwire.collectors.gatekeeper import Ear, Gatekeeper, copied
from weightwire.collectors.turnstile import Visit
from weightwire.errors import WaitTimeout
from weightwire.receiver import WeightReceiver
from weightwire.transport import Deadline, bounded

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.transport import Version
    from weightwire.weights.names import Cast, Rename, Select
    from weightwire.weights.stream import Group

__all__ = ["Acting", "GatedReceiver"]

_visits: contextvars.ContextVar[tuple[Visit, ...]] = contextvars.ContextVar("weightwire_visits", default=())
"""The visits that this thread or task is within, of any receiver. Tasks that it starts inherit them."""


class GatedReceiver:
    """A :class:`~weightwire.WeightReceiver` in a thread of its own, and a gate between it and whoever acts.

    The arguments are those of :class:`~weightwire.WeightReceiver`, but for ``inline`` and ``guard``. ``timeout`` also
    bounds how long an update keeps new requests waiting for those who act, and how long a request waits at the gate.

    A version is verified, and made ready, while the policy acts. Then the gate is shut: who acts goes on to the end of
    the block, who comes waits; the version is committed, the ``on_applied`` hooks run, and the gate opens. Neither side
    starves the other: an update waits only for blocks that had begun before it, a request for one update at most.
    With ``stream`` the gate is shut from the first bucket to the last.

    Somebody who acts on beyond ``timeout`` keeps the update out, not the others: the error that names him is kept, and
    the update comes in when he has left. Errors of updates (as ``pull`` raises them) are kept until a version is
    applied: see :attr:`error`, :meth:`wait` and :meth:`acting`.

    May be used by any thread; ends with :meth:`close`, as a context manager, or with the last reference to it.
    """

    def __init__(
        self,
        endpoint: str | Mapping[str, Any] | Endpoint,
        weights: Any = None,
        *,
        worker: str | None = None,
        apply: str = "copy",
        select: Select = None,
        rename: Rename = None,
        cast: Cast = None,
        stream: bool = False,
        group: Group | None = None,
        observers: Sequence[Any] = (),
        timeout: float = 60.0,
    ) -> None:
        keeper = self._keeper = Gatekeeper(weights, bounded(timeout))
        own = [observers] if isinstance(observers, str) else observers
        keeper.receiver = WeightReceiver(
            endpoint,
            weights,
            worker=worker,
            apply=apply,
            select=select,
            rename=rename,
            cast=cast,
            stream=stream,
            group=group,
            observers=[*own, Ear(keeper)],
            guard=keeper,
            timeout=timeout,
        )
        self.endpoint, self.worker, self.timeout = keeper.receiver.endpoint, keeper.receiver.worker, keeper.timeout
        keeper.start(f"The gate of {self.worker!r} at {self.endpoint}")
        self._finalizer = weakref.finalize(self, _abandon, keeper)  # made after the receiver's: runs before it

    # -- what can be read --------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The number of the version that the policy acts with, 0 before the first. It stays within a block."""
        return self._keeper.receiver.version

    @property
    def stamp(self) -> Version | None:
        """Epoch and number of that version."""
        return self._keeper.receiver.stamp

    @property
    def run(self) -> int:
        """The epoch of the trainer that made that version, 0 before the first."""
        return self._keeper.receiver.run

    @property
    def metadata(self) -> dict[str, Any]:
        """What the trainer sent along with that version."""
        return self._keeper.receiver.metadata

    @property
    def weights(self) -> Any:
        """What is updated. To be touched within :meth:`acting` only."""
        return self._keeper.receiver.weights

    @property
    def ready(self) -> bool:
        """Whether a full version is applied."""
        return self._keeper.receiver.ready

    @property
    def connected(self) -> bool:
        """Whether the trainer is there, as of about a tenth of a second ago."""
        return self._keeper.receiver.connected

    @property
    def closed(self) -> bool:
        """Whether no more versions will come: this end was closed, or the trainer said so."""
        return self._keeper.closing or self._keeper.over

    @property
    def error(self) -> BaseException | None:
        """What went wrong with the last update, until one is applied."""
        kept = self._keeper.kept
        return None if kept is None else copied(kept.error)

    def on_applied(self, hook: Callable[[int], object]) -> Callable[[int], object]:
        """Have ``hook(version)`` called in the receiver's thread after each commit, while nobody acts (it may act
        itself). Works as a decorator."""
        return self._keeper.receiver.on_applied(hook)

    # -- acting ------------------------------------------------------------------------------------------------------

    def acting(self, timeout: float | None = None) -> Acting:
        """A block in which the policy stays what it is: ``with receiver.acting() as version:``, or ``async with`` in an
        event loop.

        Waits for the first version, and while an update comes in; ``timeout`` seconds at most. May be nested in one
        thread, in one task and in what that starts with ``asyncio.to_thread`` or ``create_task``. A thread started by
        hand waits like anybody else, so nobody may wait for it within a block.

        Raises:
            WaitTimeout: the time is up; says what was waited for, and who acts. UpdaterLostError: nor is there a
                version, and the trainer is gone.
            ClosedError: this end is closed, or the trainer closed before there was a version.
            PreflightError, ApplyError and what else ``pull`` raises: the policy is not ready, and the update that was
                to make it so went wrong.
        """
        return Acting(self._keeper, bounded(timeout, self.timeout))

    def wait(self, version: int = 1, timeout: float | None = None) -> int:
        """Wait until at least version number ``version`` is applied; the number that is.

        In an event loop: ``await asyncio.to_thread(receiver.wait, version)``.

        Raises:
            WaitTimeout, UpdaterLostError, ClosedError: it did not come.
            PreflightError, DigestError, ApplyError and what else ``pull`` raises: it, or a newer one, was not taken, or
                a hook failed. WaitTimeout also where somebody acts on and on; he is named.
        """
        seconds = bounded(timeout, self.timeout)
        keeper = self._keeper
        keeper.origin.check()
        _forbid_in_event_loop(f"await asyncio.to_thread(receiver.wait, {version})")
        deadline, changed = Deadline.after(seconds), keeper.gate.changed
        with changed:
            while not keeper.has(version):
                keeper.raise_for(version)
                if deadline.expired:
                    raise keeper.missed(seconds, f"version {version}")
                if keeper.thread is threading.current_thread():
                    raise RuntimeError(
                        f"{keeper.origin.what}: its own thread cannot wait for version {version}, which "
                        "it would have to bring in itself"
                    )
                changed.wait(deadline.remaining)
            return keeper.done

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Let nobody act any more, say goodbye to the trainer, and join the thread. Idempotent.

        Who acts goes on to the end of the block: the weights that were applied live on. From a hook it takes effect
        when the hooks have run.

        Raises:
            WaitTimeout: the thread is still within a hook, a callable target or the backend; it ends after that.
        """
        self._keeper.end(bounded(timeout, min(self.timeout, 10.0)))
        if not self._keeper.thread.is_alive():
            self._finalizer.detach()

    def __enter__(self) -> GatedReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise self._keeper.origin.refuse_copy()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "connected" if self.connected else "not connected"
        return f"<GatedReceiver {self.worker!r} of {self.endpoint}, version {self.version}, {state}>"


class Acting:
    """One block of :meth:`GatedReceiver.acting`; for one use."""

    __slots__ = ("__weakref__", "_hold", "_keeper", "_seconds", "_visit")

    def __init__(self, keeper: Gatekeeper, seconds: float) -> None:
        self._keeper = keeper
        self._seconds = seconds
        # Where a Ctrl-C comes just before `__exit__`, this object dies with the block open. The gate hears of that by
        # a call from C into C: in a `__del__`, the next Ctrl-C would be lost.
        self._hold: weakref.ref[Acting] | None = None
        self._visit: Visit | None = None

    def __enter__(self) -> int:
        try:
            visit = self._begin("thread", threading.current_thread())
            if visit is not None and not self._keeper.gate.enter(visit, self._hold):
                woken = threading.Event()
                if not self._keeper.gate.enter(visit, self._hold, woken.set) and not woken.wait(self._seconds):
                    raise self._keeper.late(self._seconds, visit.who)
            return self._inside(visit)
        except BaseException:  # Ctrl-C too
            self._end()
            raise

    async def __aenter__(self) -> int:
        try:
            visit = self._begin("task", asyncio.current_task())
            if visit is not None and not self._keeper.gate.enter(visit, self._hold):
                loop = asyncio.get_running_loop()
                woken = loop.create_future()
                if not self._keeper.gate.enter(visit, self._hold, lambda: loop.call_soon_threadsafe(_settle, woken)):
                    await asyncio.wait([woken], timeout=self._seconds)
                    if not woken.done():
                        raise self._keeper.late(self._seconds, visit.who)
            return self._inside(visit)
        except BaseException:  # the task was cancelled, say
            self._end()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._end()
        except BaseException:  # Ctrl-C in the middle of it
            self._end()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._end()

    def _begin(self, kind: str, who: Any) -> Visit | None:
        """The visit to make; ``None`` where this is within one, or in the receiver's own thread, which is alone."""
        keeper = self._keeper
        keeper.origin.check()
        if self._hold is not None:
            raise RuntimeError("this block was entered before: call acting() for each one")
        self._hold = weakref.ref(self, keeper.gate.dropped.append)
        if keeper.thread is threading.current_thread():
            return None
        for visit in _visits.get():
            if keeper.gate.join(visit, self._hold):
                self._visit = visit
                return None
        if kind == "thread":
            _forbid_in_event_loop("async with receiver.acting()")
        self._visit = Visit(f"{kind} {who.name if kind == 'thread' else who.get_name()!r}")
        return self._visit

    def _inside(self, visit: Visit | None) -> int:
        if visit is not None:
            if visit.error is not None:
                raise copied(visit.error)
            known = _visits.get()
            if visit not in known:
                _visits.set((*(one for one in known if one.holders), visit))
        return self._keeper.receiver.version

    def _end(self) -> None:
        visit = self._visit
        if visit is None or not self._keeper.origin.here:
            return
        self._keeper.gate.leave(visit, self._hold)
        self._visit = None
        if not visit.holders:
            _visits.set(tuple(one for one in _visits.get() if one.holders))


def _abandon(keeper: Gatekeeper) -> None:
    """At interpreter exit, or when a receiver is forgotten."""
    with contextlib.suppress(WaitTimeout):
        keeper.end(2.0)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _forbid_in_event_loop(instead: str) -> None:
    """A thread that runs an event loop must not wait: those who act may be tasks of that loop."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(f"this thread runs an event loop, which must not be kept waiting: {instead}")
