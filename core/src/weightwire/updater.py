"""The trainer's end: ``push()`` makes a new version and sees to it that the workers get it."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial as bind  # `partial` is a word of push()
from itertools import chain
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

from weightwire import status, wire
from weightwire.endpoint import Endpoint, in_order, options_for, parse
from weightwire.errors import (
    ClosedError,
    PushError,
    RefusedError,
    UnknownWorkerError,
    WaitTimeout,
    WireError,
    WorkerLostError,
)
from weightwire.forks import Origin
from weightwire.ground import Ground
from weightwire.observers import Observers
from weightwire.ranks import Follower, Outcome, Ranks
from weightwire.registry import open_backend, require
from weightwire.report import PushReport, Receipt, peak_memory
from weightwire.roster import Failure, Roster, WorkerInfo
from weightwire.transport import NOW, Deadline, Joined, Left, Lost, SenderContext, Version, bounded, whole
from weightwire.weights.names import decode_needs, preflight
from weightwire.weights.payload import Payload
from weightwire.weights.source import Source

if TYPE_CHECKING:
    import torch

    from weightwire.transport import Event, Sender
    from weightwire.weights.layout import Layout
    from weightwire.weights.names import Cast, Rename, Select
    from weightwire.weights.source import State

__all__ = ["WeightUpdater"]

logger = logging.getLogger(__name__)

_STATES, _ON_LOST = ("staged", "applied"), ("raise", "drop")
_WAITS = ("none", *_STATES)
SLICE = 0.05
"""Seconds. Waits are cut into slices so that another thread may push, and Ctrl-C is heard, in between."""


class WeightUpdater:
    """Sends the weights of a policy to its workers.

    Args:
        endpoint: which backend, where, with what options: ``"ipc://policy?slots=3"``, or the same as a mapping. An
            empty location is a unique one: hand :attr:`endpoint` on to the workers.
        weights: a Module, TensorDict, nested mapping of tensors, arrays or Modules, or a callable that returns one of
            these; read anew by each :meth:`push`. May be left out where every push brings its own.
        select: globs on names (``"!glob"`` excludes), or a predicate. What is not selected does not travel.
        rename: ``{"old": "new"}``, ``{"prefix.": "other."}`` or a callable; applied after ``select``.
        cast: a dtype for all floating tensors, or ``{glob: dtype}``; applied while packing.
        observers: names of installed observer plugins, or plugin objects.
        start_version: the number that a resumed run has reached; the first push is one more.
        digest: ``"on"``: an xxh3-128 of the bytes travels along and is checked before commit; ``"auto"``: where the
            backend leaves the host; ``"off"``.
        timeout: seconds that every wait of this object takes at most, unless told otherwise.

    Where ``weights`` are sharded over ranks (DTensors: FSDP2, tensor parallelism), every rank makes the updater and
    calls ``push``, ``wait`` and ``wait_for_workers`` alike. The first rank sends; tensors are gathered one by one as
    they are sent; all ranks return the same report or raise the same error. ``workers`` is empty on the others.

    Raises:
        EndpointError, UnknownBackendError and the other registry errors; EndpointInUseError where another live updater
        has the place. The constructor waits for no worker.
    """

    def __init__(
        self,
        endpoint: str | Mapping[str, Any] | Endpoint,
        weights: Any = None,
        *,
        select: Select = None,
        rename: Rename = None,
        cast: Cast = None,
        observers: Sequence[Any] = (),
        start_version: int = 0,
        digest: str = "auto",
        timeout: float = 60.0,
    ) -> None:
        if digest not in ("auto", "on", "off"):
            raise ValueError(f"digest is {digest!r}; it is one of 'auto', 'on', 'off'")
        if not isinstance(start_version, int) or not 0 <= start_version < 2**53:  # type: ignore[redundant-expr]
            raise ValueError(f"start_version is {start_version!r}; it is the number of the last version, 0 for none")
        parsed = parse(in_order(endpoint, weights))
        self.timeout = bounded(timeout)
        self._ranks = Ranks.of(weights, self.timeout)
        self._source = Source(weights, select=select, rename=rename, cast=cast, sharded=self._ranks is not None)
        self._backend = open_backend(parsed)
        self._observers = Observers(observers)
        self._observed = bool(self._observers)
        context = SenderContext(
            epoch=int(time.time() * 1000), digest=digest, deadline=Deadline.after(self.timeout), logger=logger
        )
        options = options_for(parsed, self._backend.info)
        make = bind(self._backend.make_sender, parsed, options, context)
        self._sender: Sender = make() if self._ranks is None else self._ranks.open(make)
        away = "hosts" in self._backend.info.capabilities and not self._sender.digests
        self._digest = digest == "on" or (digest == "auto" and away)
        self._origin = Origin(f"The updater of {self._sender.endpoint}")
        self._newest = Version(self._sender.epoch, start_version)  # the last number that was used up
        self._epochs = [
            (start_version, self._sender.epoch)
        ]  # from which number on which epoch is ours: one, but for set-back clocks
        self._floor = 0  # the epoch that the next version must have at least
        self._roster = Roster()
        self._roster.epochs.add(self._sender.epoch)
        self._ground = Ground()
        self._known = True  # who has the newest version: a stage that was interrupted leaves that open
        self._checked: dict[tuple[str, int], tuple[Layout, bool, str]] = {}
        self._welcome: tuple[Layout | None, bool] = (None, False)  # what no worker that is there refuses
        self._turn = _Turn(self._origin.what)
        self._step = _Turn(self._origin.what)  # of a sharded trainer's ranks: their calls are in step one by one
        self._ear = threading.Lock()  # held by the thread that listens to the backend
        self._books = threading.RLock()  # guards roster and ground
        self._booked = threading.Condition(self._books)
        self._hoping = 0  # threads that wait for something to be booked
        self._heard: list[Event] = []
        self._sent: tuple[Version | None, list[str]] = (None, [])  # the newest version, and who was to get it
        self._size = (0, 0, 0)  # number, tensors and bytes of the newest version
        self._closed = False
        self._over = False
        self._finalizer = weakref.finalize(self, _abandon, self._sender, self._origin)
        self._pulse = status.Pulse()
        if not isinstance(self._sender, Follower):  # of a sharded trainer's ranks, the first speaks for all
            status.announce(self)

    # -- what can be read --------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The complete endpoint, for workers. Carries no secret."""
        return self._sender.endpoint

    @property
    def version(self) -> int:
        """The number of the newest version; ``start_version`` before the first push."""
        return self._newest.number

    @property
    def run(self) -> int:
        """The epoch: new for each updater, in milliseconds since 1970 where the clock allows."""
        return self._newest.epoch

    @property
    def workers(self) -> dict[str, WorkerInfo]:
        """The workers that are there now, by name: a :class:`~weightwire.WorkerInfo` with version, state, last
        error."""
        self._check()
        self._listen(NOW)
        with self._books:
            return {name: dataclasses.replace(info) for name, info in self._roster.workers.items()}

    # -- push --------------------------------------------------------------------------------------------------------

    def push(
        self,
        weights: Any = None,
        *,
        wait: str = "staged",
        workers: Iterable[str] | None = None,
        partial: bool = False,
        select: Select = None,
        merge: bool = False,
        timeout: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        on_lost: str = "raise",
        allow_empty: bool = False,
    ) -> PushReport:
        """Make a new version and give it to the workers. When it returns or raises, your tensors are no longer read.

        Args:
            weights: what to send instead of the updater's own weights.
            wait: until when to wait: ``"none"``, ``"staged"`` (every worker can apply it without the trainer) or
                ``"applied"`` (every worker acts with it).
            workers: names of those who get it; ``None``: all, and whoever joins later.
            partial: only some names, on top of the last full version.
            select: of what the updater selects, only this: ``push(select="*lora_*", partial=True)`` sends adapters.
            merge: add LoRA adapters to the weights, and send what ``merge_and_unload`` would leave, under its names;
                your tensors are left alone, and merged ones are made one by one.
            timeout: seconds, in all.
            metadata: plain JSON data that travels along; ``receiver.metadata`` there.
            on_lost: ``"raise"`` a lost worker as :class:`~weightwire.WorkerLostError`, or ``"drop"`` it with a line in
                the report.
            allow_empty: let ``wait="applied"`` pass where no worker is there.

        Raises:
            PreflightError: the weights cannot be sent (nothing moved, no number used up).
            RefusedError, ApplyError, WorkerLostError, WaitTimeout: after the other workers have the version;
                ``.report`` tells of each. Where no worker that is there could take it, RefusedError comes before
                anything is sent. Also raised, once, for what went wrong after an earlier push returned. A worker that
                missed a deadline is named by WaitTimeout once, and stands as ``stuck`` in reports until it speaks
                again.
            StorageFullError, UnknownWorkerError, CapabilityError, ClosedError, StaleUpdaterError.
        """
        asked = (weights, wait, workers, partial, timeout, metadata, on_lost, allow_empty, select, merge)
        if self._ranks is None:
            return self._push(*asked)
        state = bind(self._source.extract, weights, select=select, merge=merge)
        return self._together("push", timeout, bind(self._push, *asked), state)

    def _push(
        self,
        weights: Any,
        wait: str,
        workers: Iterable[str] | None,
        partial: bool,
        timeout: float | None,
        metadata: Mapping[str, Any] | None,
        on_lost: str,
        allow_empty: bool,
        select: Select,
        merge: bool,
    ) -> PushReport:
        self._check()
        if wait not in _WAITS or on_lost not in _ON_LOST:
            raise _no_choice(wait=(wait, _WAITS), on_lost=(on_lost, _ON_LOST))
        meta = b"{}" if metadata is None else wire.encode_metadata(metadata)
        deadline = Deadline.after(self.timeout if timeout is None else bounded(timeout))
        try:
            self._turn.take(deadline)
            if self._closed:  # meanwhile
                self._check()
            self._listen(NOW)
            to = None if workers is None else self._addressed(workers)
            if wait == "applied" and not (allow_empty or self._roster.workers):
                raise self._nobody("push(wait='applied')")
            if self._observed:
                self._observers.before_push(endpoint=self.endpoint, version=self.version + 1, workers=to)
            begun = time.perf_counter()
            state = self._source.extract(weights, select=select, merge=merge)
            payload, refusing = self._encode(state, to, partial, meta, begun)
            names = self._stage(payload, to, refusing, deadline)
            return self._settle(payload, names, wait, deadline, on_lost)
        finally:
            self._turn.give()
            if self._closed:  # by a hook, a signal handler or another thread, which did not wait for us
                self._shut(None)

    def _together(
        self, kind: str, timeout: float | None, lead: Callable[[], PushReport], state: Callable[[], State] | None = None
    ) -> PushReport:
        """What every rank of a sharded trainer calls alike: the first does it, all have its report or its error."""
        assert self._ranks is not None
        self._check()

        def outcome() -> Outcome:
            report = lead()
            return Outcome(version=self.version, run=self.run, report=report)

        seconds = bounded(timeout, self.timeout)
        try:
            self._step.take(Deadline.after(seconds))
            found = self._ranks.together(kind, seconds, outcome, lambda: self._newest, state, self._learn)
        finally:
            self._step.give()
        assert found.report is not None
        return found.report

    def _learn(self, newest: Version) -> None:
        """On the ranks that follow."""
        self._newest = newest

    def _encode(
        self, state: State, to: frozenset[str] | None, partial: bool, metadata: bytes, begun: float
    ) -> tuple[Payload, dict[str, str]]:
        """Encode, preflight: what else can be refused before a byte moves. Also, who will refuse it. The extracting
        began at ``begun``."""
        extracted = time.perf_counter()
        layout = state.plan.layout
        with self._books:
            if self._floor > self._newest.epoch:
                self._newest = Version(self._floor, self._newest.number)
                self._epochs.append((self._newest.number + 1, self._floor))
                self._roster.epochs.add(self._floor)
            if not self._known:
                self._ground.lose()
                self._known = True
            base = self._ground.base_for(layout, to) if partial else None
            stamp = Version(self._newest.epoch, self._newest.number + 1)
            known = self._welcome[0] is layout and self._welcome[1] is partial
            refusing = {} if known else self._preflight(layout, stamp, to, partial)
        gather = None if self._ranks is None else self._ranks.pieces
        payload = Payload(state, stamp=stamp, base=base, metadata=metadata, digest=self._digest, gather=gather)
        payload.seconds["extract"] = extracted - begun
        payload.seconds["encode"] = time.perf_counter() - extracted
        return payload, refusing

    def _preflight(self, layout: Layout, stamp: Version, to: frozenset[str] | None, partial: bool) -> dict[str, str]:
        """Hold the layout against what each worker said that it needs; raises where nobody could take it."""
        refusing: dict[str, str] = {}
        workers = self._roster.workers
        names = [name for name in workers if to is None or name in to]
        for name in names:
            info = workers[name]
            if info.needs:
                key = (name, info.incarnation)
                known = self._checked.get(key)
                if known is None or known[0] is not layout or known[1] is not partial:
                    known = self._checked[key] = (layout, partial, _misfit(layout, info, subset=partial))
                if known[2]:
                    refusing[name] = known[2]
        if refusing and len(refusing) == len(names):
            told = "\n".join(f"worker {name!r}: {text}" for name, text in refusing.items())
            for late in self._roster.take_failures():  # the same of an earlier version is no news
                if late.kind is not RefusedError or late.worker not in refusing:
                    told += f"\n{late}"
            joined = (
                f"the {len(names)} worker{'s' * (len(names) > 1)} that {'have' if len(names) > 1 else 'has'} joined"
            )
            who = ", ".join(map(repr, names[:10])) + ", ..." * (len(names) > 10)
            receipts = {
                name: Receipt(worker=name, version=stamp.number, state="refused", error=text, phase="encode")
                for name, text in refusing.items()
            }
            raise RefusedError(
                f"none of {joined if to is None else 'those addressed'} ({who}) can take version {stamp.number}; "
                f"nothing was sent. If others are still to come, call wait_for_workers() first.\n{told}",
                report=PushReport(version=stamp.number, run=stamp.epoch, receipts=receipts),
                version=stamp.number,
                worker=next(iter(refusing)),
                phase="encode",
            )
        if not refusing and to is None:
            self._welcome = (layout, partial)
        return refusing

    def _stage(
        self, payload: Payload, to: frozenset[str] | None, refusing: Mapping[str, str], deadline: Deadline
    ) -> list[str]:
        """Hand the payload to the backend; who has to take it. The number is used up as soon as the backend asked for
        the header."""
        begun, before = time.perf_counter(), sum(payload.seconds.values())
        done = self._known = False
        with self._books:
            addressed = list(self._roster.workers if to is None else to)  # some may have left when it is staged
        try:
            self._sender.stage(payload, to, deadline)
            done = True
        finally:
            with self._books:
                if payload.announced:
                    self._newest = payload.stamp
                    self._ground.book(payload.stamp, payload.base, payload.layout, to, self._roster.workers)
                    for name, text in refusing.items():
                        self._roster.refuse_here(name, payload.stamp, text)
                self._known = done or not payload.announced
            inner = sum(payload.seconds.values()) - before  # phases that the backend has booked itself
            payload.seconds["stage"] = time.perf_counter() - begun - inner
            payload.close()
        self._listen(NOW)
        with self._books:
            if to is None and len(self._roster.workers.keys() | addressed) > len(addressed):  # who has just come
                addressed += [name for name in self._roster.workers if name not in addressed]
            self._sent = (payload.stamp, addressed)
        return addressed

    def _settle(self, payload: Payload, names: list[str], state: str, deadline: Deadline, on_lost: str) -> PushReport:
        """Wait as asked, write the report, and raise what has to be raised."""
        begun = time.perf_counter()
        if state != "none":
            self._wait(names, payload.stamp, state, deadline)
        payload.seconds["wait"] = time.perf_counter() - begun
        self._size = (payload.stamp.number, len(payload.layout.entries), payload.layout.used)
        report, failures = self._report(names, payload.stamp, dict(payload.seconds), payload.devices)
        try:
            self._pulse.pushed(report)
            if self._observed:
                self._observers.after_push(endpoint=self.endpoint, report=report)
        except BaseException:  # Ctrl-C, in an observer: they are still to be told
            with self._books:
                self._roster.failures[:0] = failures
            raise
        if failures:
            _raise(failures, report, on_lost, f" (version {report.version} was sent)")
        return report

    def _report(
        self,
        names: Iterable[str],
        stamp: Version,
        seconds: dict[str, float],
        devices: Iterable[torch.device] = (),
    ) -> tuple[PushReport, list[Failure]]:
        """What became of a version so far, and the failures that the caller has to be told of."""
        with self._books:
            receipts = {name: self._roster.receipt(name, stamp) for name in names}
            failures = self._roster.take_failures()
        number, tensors, nbytes = self._size
        lost = tuple(dict.fromkeys(f.worker for f in failures if f.kind is WorkerLostError)) if failures else ()
        report = PushReport(
            version=stamp.number,
            run=stamp.epoch,
            receipts=receipts,
            lost=lost,
            tensors=tensors if number == stamp.number else 0,
            nbytes=nbytes if number == stamp.number else 0,
            seconds=seconds,
            errors=tuple(self._observers.take_errors()) if self._observers.errors else (),
            memory=peak_memory(devices),
        )
        return report, failures

    # -- wait --------------------------------------------------------------------------------------------------------

    def wait(
        self,
        version: int | None = None,
        *,
        state: str = "applied",
        workers: Iterable[str] | None = None,
        timeout: float | None = None,
        on_lost: str = "raise",
    ) -> PushReport:
        """Wait until the workers have ``version`` (the newest, where none is given) or a newer one in ``state``.

        Raises what :meth:`push` raises of workers; ``ValueError`` for a version that this updater has not pushed.
        """
        if self._ranks is None:
            return self._wait_until(version, state, workers, timeout, on_lost)
        return self._together("wait", timeout, bind(self._wait_until, version, state, workers, timeout, on_lost))

    def _wait_until(
        self, version: int | None, state: str, workers: Iterable[str] | None, timeout: float | None, on_lost: str
    ) -> PushReport:
        self._check()
        if state not in _STATES or on_lost not in _ON_LOST:
            raise _no_choice(state=(state, _STATES), on_lost=(on_lost, _ON_LOST))
        begun = time.perf_counter()
        deadline = Deadline.after(bounded(timeout, self.timeout))
        stamp = self._stamp_of(self.version if version is None else whole(version, "version"))
        self._listen(NOW)
        to = None if workers is None else self._addressed(workers)
        with self._books:
            names = self._ground.addressed(stamp, self._roster.workers) if to is None else list(to)
            if to is None and self._sent[0] == stamp:
                names += self._roster.took(self._sent[1], stamp)
        if state == "applied" and not (names or self._roster.workers):
            raise self._nobody("wait(state='applied')")
        self._wait(names, stamp, state, deadline)
        report, failures = self._report(names, stamp, {"wait": time.perf_counter() - begun})
        _raise(failures, report, on_lost)
        return report

    def wait_for_workers(self, count: int, timeout: float | None = None) -> list[str]:
        """Wait until at least ``count`` workers have joined; their names. Raises :class:`~weightwire.WaitTimeout`."""
        if self._ranks is None:
            return self._await_workers(count, timeout)
        lead, seconds = bind(self._await_workers, count, timeout), bounded(timeout, self.timeout)
        try:
            self._step.take(Deadline.after(seconds))
            return self._ranks.together(
                "wait_for_workers",
                seconds,
                lambda: Outcome(version=self.version, run=self.run, names=lead()),
                lambda: self._newest,
            ).names
        finally:
            self._step.give()

    def _await_workers(self, count: int, timeout: float | None) -> list[str]:
        self._check()
        count, seconds = whole(count, "count"), bounded(timeout, self.timeout)
        deadline = Deadline.after(seconds)
        self._listen(NOW)
        while True:
            with self._books:
                there = sorted(self._roster.workers)
            if len(there) >= count:
                return there
            self._check()
            if deadline.expired:
                raise WaitTimeout(
                    f"waited {seconds:.3g} s for {count} worker{'s' * (count != 1)} at {self.endpoint} to join; there: "
                    f"{', '.join(there) or 'nobody'}",
                    phase="wait",
                )
            self._listen(deadline.sooner(SLICE))

    def _wait(self, names: list[str], stamp: Version, state: str, deadline: Deadline) -> None:
        """Listen until nobody of ``names`` is pending, or the deadline; those who miss it are marked as stuck."""
        begun = time.monotonic()
        while True:
            with self._books:
                pending = self._roster.pending(names, stamp, state)
                if not pending and state == "applied":
                    stuck = self._roster.stuck(names, stamp)
                    if stuck and len(stuck) == len(names):  # nobody was waited for, and nobody has it
                        self._roster.time_out(stuck, stamp, state, 0.0)
                if pending and deadline.expired:
                    self._roster.time_out(pending, stamp, state, time.monotonic() - begun)
                    pending = []
            if not pending:
                return
            if self._closed:
                raise ClosedError(
                    f"the updater of {self.endpoint} was closed while somebody waited for {', '.join(pending)}"
                )
            self._listen(deadline.sooner(SLICE))

    def _listen(self, deadline: Deadline) -> None:
        """Have the backend's events booked, by this thread or by one that listens already; waits until the deadline.

        Python may raise what a signal handler raises (Ctrl-C) whenever a call returns; so what a call gives and must
        not be lost is stored by the same call into C that makes it.
        """
        mine: list[bool] = []
        try:
            mine.extend(map(self._ear.acquire, (False,)))
            if not mine[0]:
                with self._books:  # if it was a glance that had the ear, it has not any more
                    mine[:] = map(self._ear.acquire, (False,))
            if mine[0]:
                if self._heard:  # by a glance, so that there is something to be booked at once
                    deadline = NOW
                self._heard.extend(chain.from_iterable(map(self._sender.events, (deadline,))))
                if self._heard:
                    self._book()
            elif not deadline.expired:
                with self._books:
                    self._hoping += 1
                    try:
                        self._booked.wait(deadline.sooner(SLICE).remaining)
                    finally:
                        self._hoping -= 1
        finally:
            if mine and mine[0]:
                self._ear.release()

    def _glance(self) -> tuple[list[WorkerInfo], list[Event], set[int], bool]:
        """For the status, from its thread: the workers as they are booked, what was heard and is not booked yet, our
        epochs, and whether a push is going on. Observers hear of it in the thread that pushes next."""
        with self._books:
            if not self._closed and self._ear.acquire(False):
                try:
                    with suppress(Exception):  # the next listener meets it, too
                        self._heard.extend(self._sender.events(NOW))
                finally:
                    self._ear.release()
            infos = [dataclasses.replace(info) for info in self._roster.workers.values()]
            return infos, list(self._heard), set(self._roster.epochs), self._turn.busy

    def _book(self) -> None:
        """Take what was heard into the roster, and tell the observers."""
        with self._books:
            while self._heard:
                event = self._heard[0]
                counts = self._roster.observe(event)
                moved = counts and isinstance(event, (Joined, Lost, Left))  # somebody came or went
                if moved:
                    self._turn_over(event)
                del self._heard[0]
                if moved:
                    self._tell(event)
            if self._hoping:
                self._booked.notify_all()

    def _turn_over(self, event: Event) -> None:
        if isinstance(event, Joined) and event.have.stamp and event.have.stamp.epoch > self._newest.epoch:
            # A worker has weights of a newer epoch than ours: this clock was set back since. Go beyond it.
            self._floor = max(self._floor, event.have.stamp.epoch + 1)
        self._checked = {key: value for key, value in self._checked.items() if key[0] != event.worker}
        self._welcome = (None, False)
        self._ground.forget(event.worker)

    def _tell(self, event: Event) -> None:
        if isinstance(event, Joined):
            self._observers.worker_joined(endpoint=self.endpoint, worker=event.worker, host=event.host, pid=event.pid)
        elif isinstance(event, (Lost, Left)):
            reason = event.reason if isinstance(event, Lost) else ""
            if isinstance(event, Lost):
                self._pulse.lose(event)
            self._observers.worker_lost(endpoint=self.endpoint, worker=event.worker, reason=reason)

    def _stamp_of(self, number: int) -> Version:
        first = self._epochs[0][0]
        if not first < number <= self.version:
            newest = f"the newest is {self.version}" if self.version > first else "it has pushed none yet"
            raise ValueError(f"version {number} was not pushed by this updater; {newest}")
        return Version(max(epoch for start, epoch in self._epochs if start <= number), number)

    def _nobody(self, call: str) -> PushError:
        return PushError(
            f"{call} at {self.endpoint}: no worker is there. Wait for one with wait_for_workers(), or push with "
            "allow_empty=True."
        )

    def _addressed(self, workers: Iterable[str]) -> frozenset[str]:
        if isinstance(workers, str):
            raise TypeError(f"workers is the text {workers!r}; it takes a list of names: [{workers!r}]")
        if not isinstance(workers, Iterable):
            raise TypeError(f"workers is {workers!r:.200}; it takes a list of names")
        names = frozenset(workers)
        with self._books:
            there = sorted(self._roster.workers)
        unknown = sorted(map(repr, names.difference(there)))
        if unknown or not names:
            raise UnknownWorkerError(
                f"workers names {', '.join(unknown) or 'nobody'}, where a worker at {self.endpoint} is wanted; there: "
                f"{', '.join(there) or 'nobody'}"
            )
        require(self._backend, "subset_workers")
        return names

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Let go what was accepted, say goodbye to the workers, free everything. Idempotent. The goodbye is final:
        receivers are ``closed`` then, and a later updater at this place meets new ones only.

        Raises, once, what went wrong since the last call and was not told yet; everything is freed all the same.
        Within a push of the same thread (a hook, a signal handler) it takes effect when that push has ended, which
        waits for nobody from then on; what is to be told then, a second call tells.
        """
        self._shut(timeout)
        if self._turn.mine or not self._origin.here:
            return
        with self._books:
            failures = self._roster.take_failures()
        lost = tuple(dict.fromkeys(failure.worker for failure in failures if failure.kind is WorkerLostError))
        _raise(failures, PushReport(version=self.version, run=self.run, lost=lost), "raise")

    def _shut(self, timeout: float | None) -> None:
        if self._over or not self._origin.here:
            return
        deadline = Deadline.after(bounded(timeout, min(self.timeout, 10.0)))
        self._closed = True  # first, so that whoever waits in another thread stops
        if self._turn.mine:
            return
        try:
            self._turn.take(deadline)
            if not self._over:
                status.withdraw(self)
                with suppress(ClosedError):
                    self._listen(NOW)
                self._sender.close(deadline)
                if self._ranks is not None:
                    self._ranks.close()
                self._over = True
                self._finalizer.detach()
        finally:
            self._turn.give()

    def __enter__(self) -> WeightUpdater:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        self._shut(None)  # an error is on its way already; what the roster still had was logged

    def __reduce__(self) -> str:
        raise self._origin.refuse_copy()

    def __repr__(self) -> str:
        count = len(self._roster.workers)
        state = "closed" if self._closed else f"{count} worker{'s' * (count != 1)}"
        return f"<WeightUpdater {self.endpoint} version {self.version}, {state}>"

    def _check(self) -> None:
        self._origin.check()
        if self._closed:
            raise ClosedError(f"the updater of {self.endpoint} is closed; make a new one to push")


class _Turn:
    """Pushes come one at a time; waiting for one's turn is bounded, and Ctrl-C never leaves it taken.

    Who has the turn is a thread and the frame that took it, written down and wiped out by one call into C each. Where
    Ctrl-C comes up just before it is given back, that frame has ended: whoever is next sees it, and takes over.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._held: dict[str, tuple[int, FrameType]] = {}  # one entry, or none
        self._bell = threading.Lock()  # open: it was given back since somebody looked
        self._mending = threading.RLock()

    @property
    def mine(self) -> bool:
        """Whether a frame below this one, in this thread, has the turn."""
        held = self._holder()
        return held is not None and held[0] == get_ident()

    @property
    def busy(self) -> bool:
        return self._holder() is not None

    def take(self, deadline: Deadline) -> None:
        """Wait for the turn; :meth:`give` in the same function ends it, whether this has returned, raised or was
        interrupted."""
        ours = (get_ident(), sys._getframe(1))
        while self._held.setdefault("turn", ours) is not ours:
            held = self._holder()
            if held is not None and held[0] == ours[0]:
                raise RuntimeError(
                    f"{self._what} is in the middle of a push of this thread; one cannot be within another"
                )
            if held is not None and deadline.expired:
                raise WaitTimeout(f"{self._what} is still busy with a push of another thread", phase="wait")
            if held is not None:
                self._bell.acquire(timeout=deadline.sooner(SLICE).remaining)

    def give(self) -> None:
        held = self._held.get("turn")
        if held is not None and held[1] is sys._getframe(1):
            self._held.clear()
            if self._bell.locked():
                with suppress(RuntimeError):  # somebody else was faster
                    self._bell.release()

    def _holder(self) -> tuple[int, FrameType] | None:
        """Who has the turn; one whose frame has ended has it no longer."""
        if not self._held:
            return None
        with self._mending:
            held = self._held.get("turn")
            if held is None:
                return None
            frame = sys._current_frames().get(held[0])
            while frame is not None and frame is not held[1]:
                frame = frame.f_back
            if frame is not None:
                return held
            if self._held.get("turn") is held:  # and not given back meanwhile, as it should be
                self._held.clear()
            return None


def _misfit(layout: Layout, info: WorkerInfo, *, subset: bool) -> str:
    """All that does not fit a worker, empty where it does. What it said may be nonsense, and is then left out."""
    try:
        needs = decode_needs(info.needs)
    except WireError as exc:
        logger.warning("worker %r said what it needs in a way that cannot be read: %s", info.name, exc)
        return ""
    difference = preflight(layout, needs, subset=subset) if needs else None
    return difference.message() if difference else ""


def _raise(failures: Sequence[Failure], report: PushReport, on_lost: str, sent: str = "") -> None:
    """Raise the most serious failure, with all of them in its message."""
    told = [f for f in failures if on_lost == "raise" or f.kind is not WorkerLostError]
    if told:
        worst = told[0]
        text = "; ".join(str(failure) for failure in told)
        if worst.kind is WorkerLostError:
            text += '; to go on without lost workers, push(on_lost="drop")'
        raise worst.kind(
            text + sent,
            report=report,
            version=worst.version,
            worker=worst.worker,
            phase=worst.phase,
            tensor=worst.tensor or None,
        )


def _abandon(sender: Sender, origin: Origin) -> None:
    """At interpreter exit, or when an updater is forgotten: say goodbye, but not from a forked child."""
    if origin.here:
        try:
            sender.close(Deadline.after(2.0))
        except Exception:
            logger.debug("closing %s failed", sender.endpoint, exc_info=True)
        status.withdraw()


def _no_choice(**options: tuple[object, tuple[str, ...]]) -> ValueError:
    """What is to be raised where one of these options is none of its choices."""
    option, value, choices = next((name, *asked) for name, asked in options.items() if asked[0] not in asked[1])
    return ValueError(f"{option} is {value!r}; it is one of {', '.join(map(repr, choices))}")
