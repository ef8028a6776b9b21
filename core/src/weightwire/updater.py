"""The trainer's end: ``push()`` makes a new version and sees to it that the workers get it."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weightwire import wire
from weightwire.endpoint import Endpoint, options_for, parse
from weightwire.errors import (
    ClosedError,
    PreflightError,
    PushError,
    RefusedError,
    UnknownWorkerError,
    WaitTimeout,
    WireError,
    WorkerLostError,
)
from weightwire.forks import Origin
from weightwire.observers import Observers
from weightwire.registry import open_backend, require
from weightwire.report import PushReport
from weightwire.roster import Failure, Roster, WorkerInfo
from weightwire.transport import NOW, Deadline, Joined, Left, Lost, SenderContext, Version
from weightwire.weights.names import decode_needs, preflight
from weightwire.weights.payload import Payload
from weightwire.weights.source import Source

if TYPE_CHECKING:
    from weightwire.transport import Sender
    from weightwire.weights.layout import Layout
    from weightwire.weights.names import Cast, Rename, Select

__all__ = ["WeightUpdater"]

logger = logging.getLogger(__name__)

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
        if start_version < 0:
            raise ValueError(f"start_version is {start_version}; it is the number of the last version, 0 for none")
        parsed = parse(endpoint)
        self._source = Source(weights, select=select, rename=rename, cast=cast)
        self._backend = open_backend(parsed)
        self._observers = Observers(observers)
        self._digest = digest == "on" or (digest == "auto" and "hosts" in self._backend.info.capabilities)
        self.timeout = timeout
        self._sender: Sender = self._backend.make_sender(
            parsed,
            options_for(parsed, self._backend.info),
            SenderContext(epoch=int(time.time() * 1000), deadline=Deadline.after(timeout), logger=logger),
        )
        self._origin = Origin(f"The updater of {self._sender.endpoint}")
        self._newest = Version(self._sender.epoch, start_version)  # the last number that was used up
        self._roster = Roster()
        self._ground = _Ground()
        self._checked: dict[tuple[str, int], tuple[Layout, bool, str]] = {}
        self._pushing = threading.Lock()
        self._listening = threading.RLock()
        self._closed = False
        self._finalizer = weakref.finalize(self, _abandon, self._sender, self._origin)

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
        """The workers that are there now, by name: version, state, host, last error."""
        self._check()
        self._listen(NOW)
        with self._listening:
            return {name: WorkerInfo(**_fields(info)) for name, info in self._roster.workers.items()}

    # -- push --------------------------------------------------------------------------------------------------------

    def push(
        self,
        weights: Any = None,
        *,
        wait: str = "staged",
        workers: Iterable[str] | None = None,
        partial: bool = False,
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
            timeout: seconds, in all.
            metadata: plain JSON data that travels along; ``receiver.metadata`` there.
            on_lost: ``"raise"`` a lost worker as :class:`~weightwire.WorkerLostError`, or ``"drop"`` it with a line
                in the report.
            allow_empty: let ``wait="applied"`` pass where no worker is there.

        Raises:
            PreflightError: the weights cannot be sent (nothing moved, no number used up).
            RefusedError, ApplyError, WorkerLostError, WaitTimeout: after the other workers have the version;
                ``.report`` tells of each. Also raised, once, for what went wrong after an earlier push returned.
            StorageFullError, UnknownWorkerError, CapabilityError, ClosedError, StaleUpdaterError.
        """
        self._check()
        _one_of("wait", wait, ("none", "staged", "applied"))
        _one_of("on_lost", on_lost, ("raise", "drop"))
        meta = wire.encode_metadata(metadata or {})
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        with self._pushing:
            self._listen(NOW)
            to = self._addressed(workers)
            if wait == "applied" and not allow_empty and not (self._roster.workers if to is None else to):
                raise PushError(
                    f"push(wait='applied') to {self.endpoint}: no worker is there. Wait for one with "
                    "wait_for_workers(), or say allow_empty=True."
                )
            self._observers.before_push(endpoint=self.endpoint, version=self.version + 1, workers=to)
            payload = self._encode(weights, to, partial, meta)
            waited = self._stage(payload, to, deadline)
            return self._settle(payload, waited, wait, deadline, on_lost)

    def _encode(self, weights: Any, to: frozenset[str] | None, partial: bool, metadata: bytes) -> Payload:
        """Extract, encode, preflight: everything that can be refused before a byte moves."""
        begun = time.perf_counter()
        state = self._source.extract(weights)
        extracted = time.perf_counter()
        base = self._ground.base_for(state.layout, to, self._roster.workers) if partial else None
        stamp = Version(self._newest.epoch, self._newest.number + 1)
        self._preflight(state.layout, stamp, to, partial)
        payload = Payload(state, stamp=stamp, base=base, metadata=metadata, digest=self._digest)
        payload.seconds.update(extract=extracted - begun, encode=time.perf_counter() - extracted)
        return payload

    def _preflight(self, layout: Layout, stamp: Version, to: frozenset[str] | None, partial: bool) -> None:
        """Hold the layout against what each worker said that it needs; refuse where nobody could take it."""
        refusing: dict[str, str] = {}
        names = self._roster.workers.keys() if to is None else to
        for name in names:
            info = self._roster.workers[name]
            if info.needs:
                key = (name, info.incarnation)
                known = self._checked.get(key)
                if known is None or known[0] is not layout or known[1] is not partial:
                    known = self._checked[key] = (layout, partial, _misfit(layout, info, subset=partial))
                if known[2]:
                    refusing[name] = known[2]
        if refusing and len(refusing) == len(names):
            told = "\n".join(f"worker {name!r}: {text}" for name, text in refusing.items())
            raise RefusedError(
                f"no worker can take version {stamp.number}; nothing was sent.\n{told}",
                version=stamp.number,
                worker=next(iter(refusing)),
                phase="encode",
            )
        for name, text in refusing.items():
            self._roster.refuse_here(name, stamp, text)

    def _stage(self, payload: Payload, to: frozenset[str] | None, deadline: Deadline) -> list[str]:
        """Hand the payload to the backend. The number is used up as soon as the backend has asked for the header."""
        begun, before = time.perf_counter(), sum(payload.seconds.values())
        try:
            self._sender.stage(payload, to, deadline)
        finally:
            if payload.announced:
                self._newest = payload.stamp
                self._ground.book(payload, to)
            inner = sum(payload.seconds.values()) - before  # phases that the backend has booked itself
            payload.seconds["stage"] = time.perf_counter() - begun - inner
        self._listen(NOW)
        return list(self._roster.workers if to is None else to)

    def _settle(self, payload: Payload, names: list[str], state: str, deadline: Deadline, on_lost: str) -> PushReport:
        """Wait as asked, write the report, and raise what has to be raised."""
        begun = time.perf_counter()
        if state != "none":
            self._wait(names, payload.stamp, state, deadline)
        payload.seconds["wait"] = time.perf_counter() - begun
        with self._listening:
            receipts = {name: self._roster.receipt(name, payload.stamp) for name in names}
            failures = self._roster.take_failures()
        report = PushReport(
            version=payload.stamp.number,
            run=payload.stamp.epoch,
            receipts=receipts,
            lost=tuple(dict.fromkeys(f.worker for f in failures if f.kind is WorkerLostError)),
            tensors=len(payload.layout.entries),
            nbytes=sum(payload.layout.sizes),
            seconds=dict(payload.seconds),
            errors=tuple(self._observers.take_errors()),
        )
        self._observers.after_push(endpoint=self.endpoint, report=report)
        _raise(failures, report, on_lost)
        return report

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

        Raises what :meth:`push` raises of workers; ``ValueError`` for a version that was never pushed.
        """
        self._check()
        _one_of("state", state, ("staged", "applied"))
        number = self.version if version is None else version
        if not 0 < number <= self.version:
            raise ValueError(f"version {number} was not pushed; the newest is {self.version}")
        begun = time.perf_counter()
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        self._listen(NOW)
        to = self._addressed(workers)
        stamp = Version(self.run, number)
        names = list(self._ground.addressed(stamp, self._roster.workers) if to is None else to)
        self._wait(names, stamp, state, deadline)
        with self._listening:
            receipts = {name: self._roster.receipt(name, stamp) for name in names}
            failures = self._roster.take_failures()
        report = PushReport(
            version=number,
            run=self.run,
            receipts=receipts,
            lost=tuple(dict.fromkeys(f.worker for f in failures if f.kind is WorkerLostError)),
            seconds={"wait": time.perf_counter() - begun},
            errors=tuple(self._observers.take_errors()),
        )
        _raise(failures, report, on_lost)
        return report

    def wait_for_workers(self, count: int, timeout: float | None = None) -> list[str]:
        """Wait until at least ``count`` workers have joined; their names. Raises :class:`~weightwire.WaitTimeout`."""
        self._check()
        seconds = self.timeout if timeout is None else timeout
        deadline = Deadline.after(seconds)
        self._listen(NOW)
        while len(self._roster.workers) < count:
            if deadline.expired:
                there = ", ".join(sorted(self._roster.workers)) or "nobody"
                raise WaitTimeout(
                    f"waited {seconds:.3g} s for {count} workers at {self.endpoint} to join; there: {there}",
                    phase="wait",
                )
            self._listen(deadline.sooner(SLICE))
        return sorted(self._roster.workers)

    def _wait(self, names: list[str], stamp: Version, state: str, deadline: Deadline) -> None:
        """Listen until nobody of ``names`` is pending, or the deadline; those who miss it are marked as stuck."""
        begun = time.monotonic()
        while pending := self._roster.pending(names, stamp, state):
            if self._closed:
                raise ClosedError(
                    f"the updater of {self.endpoint} was closed while somebody waited for {', '.join(pending)}"
                )
            if deadline.expired:
                with self._listening:
                    self._roster.time_out(pending, stamp, state, time.monotonic() - begun)
                return
            self._listen(deadline.sooner(SLICE))
        stuck = [name for name in names if name in self._roster.workers and self._roster.workers[name].stuck]
        if state == "applied" and stuck and len(stuck) == len(names):
            with self._listening:
                self._roster.time_out(stuck, stamp, state, 0.0)

    def _listen(self, deadline: Deadline) -> None:
        """Take the backend's events into the roster and tell the observers."""
        with self._listening:
            for event in self._sender.events(deadline):
                if isinstance(event, Joined) and event.have.stamp and event.have.stamp.epoch > self._newest.epoch:
                    # A worker has weights of a newer epoch than ours: this clock was set back since. Go beyond it.
                    self._newest = Version(event.have.stamp.epoch + 1, self._newest.number)
                self._roster.observe(event)
                if isinstance(event, Joined):
                    self._observers.worker_joined(
                        endpoint=self.endpoint, worker=event.worker, host=event.host, pid=event.pid
                    )
                elif isinstance(event, (Lost, Left)):
                    self._checked = {key: value for key, value in self._checked.items() if key[0] != event.worker}
                    reason = event.reason if isinstance(event, Lost) else ""
                    self._observers.worker_lost(endpoint=self.endpoint, worker=event.worker, reason=reason)

    def _addressed(self, workers: Iterable[str] | None) -> frozenset[str] | None:
        if workers is None:
            return None
        if isinstance(workers, str):
            raise TypeError(f"workers is the text {workers!r}; it takes a list of names: [{workers!r}]")
        names = frozenset(workers)
        unknown = sorted(names - self._roster.workers.keys())
        if unknown or not names:
            there = ", ".join(sorted(self._roster.workers)) or "nobody"
            asked = ", ".join(map(repr, unknown)) or "an empty list"
            raise UnknownWorkerError(f"workers names {asked}, not among those at {self.endpoint}: {there}")
        require(self._backend, "subset_workers")
        return names

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Let go what was accepted, say goodbye to the workers, free everything. Idempotent.

        Raises, once, what went wrong since the last call and was not told yet; everything is freed all the same.
        """
        failures = self._shut(timeout)
        report = PushReport(
            version=self.version, run=self.run, lost=tuple(f.worker for f in failures if f.kind is WorkerLostError)
        )
        _raise(failures, report, "raise")

    def _shut(self, timeout: float | None) -> list[Failure]:
        if self._closed or not self._origin.here:
            return []
        self._closed = True  # first, so that whoever waits in another thread stops
        with self._pushing, self._listening:
            self._finalizer.detach()
            try:
                self._listen(NOW)
            finally:
                self._sender.close(Deadline.after(min(self.timeout, 10.0) if timeout is None else timeout))
            return self._roster.take_failures()

    def __enter__(self) -> WeightUpdater:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        self._shut(None)  # an error is on its way already; what the roster still had was logged

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._roster.workers)} workers"
        return f"<WeightUpdater {self.endpoint} version {self.version}, {state}>"

    def _check(self) -> None:
        self._origin.check()
        if self._closed:
            raise ClosedError(f"the updater of {self.endpoint} is closed; make a new one to push")


class _Ground:
    """Which full version subsets lie on, for whom, and which names they must cover (design, section 7)."""

    def __init__(self) -> None:
        self.all: Version | None = None  # newest full version addressed to everybody
        self.some: dict[str, Version] = {}  # newer ones, addressed to some
        self.layouts: dict[Version, Layout] = {}
        self.covered: dict[Version, set[str]] = {}  # names of the subsets so far, by base
        self.to: dict[Version, frozenset[str]] = {}  # recent versions that were addressed to some

    def base_for(self, layout: Layout, to: frozenset[str] | None, workers: Mapping[str, WorkerInfo]) -> Version:
        """The base of a subset for these workers. Raises :class:`PreflightError` that says what to push instead."""
        bases = {self.some.get(name, self.all) for name in (workers if to is None else to)}
        if to is None:
            bases |= {self.all}
        if None in bases:
            raise PreflightError("push(partial=True) needs a full version to lie on: push a full one first")
        if len(bases) > 1:
            numbers = sorted(base.number for base in bases if base)
            raise PreflightError(
                f"push(partial=True) to workers whose last full versions differ ({numbers}): push a full one to all of "
                "them first"
            )
        (base,) = bases
        assert base is not None
        full = self.layouts[base]
        unknown = [name for name in layout.names if name not in full.index]
        if unknown:
            raise PreflightError(
                f"push(partial=True) brings names that full version {base.number} lacks: {_some(unknown)}; "
                "push a full one"
            )
        left_out = sorted(self.covered.get(base, set()) - layout.index.keys())
        if left_out:
            raise PreflightError(
                f"push(partial=True) leaves out names of earlier subsets on version {base.number}: {_some(left_out)}; "
                "include them, or push a full version"
            )
        return base

    def book(self, payload: Payload, to: frozenset[str] | None) -> None:
        """A version became visible."""
        stamp, layout = payload.stamp, payload.layout
        if payload.base is not None:
            self.covered.setdefault(payload.base, set()).update(layout.names)
        elif to is None:
            self.all, self.some, self.layouts, self.covered = stamp, {}, {stamp: layout}, {}
        else:
            self.some.update(dict.fromkeys(to, stamp))
            self.layouts[stamp] = layout
            live = {self.all, *self.some.values()}
            self.layouts = {base: kept for base, kept in self.layouts.items() if base in live}
            self.covered = {base: kept for base, kept in self.covered.items() if base in live}
        if to is not None:
            self.to[stamp] = to
            while len(self.to) > 1000:
                del self.to[next(iter(self.to))]

    def addressed(self, stamp: Version, workers: Mapping[str, WorkerInfo]) -> Iterable[str]:
        """Who of ``workers`` a version was meant for."""
        return self.to.get(stamp, workers) if stamp in self.to else workers


def _misfit(layout: Layout, info: WorkerInfo, *, subset: bool) -> str:
    """All that does not fit a worker, empty where it does. What it said may be nonsense, and is then left out."""
    try:
        needs = decode_needs(info.needs)
    except WireError as exc:
        logger.warning("worker %r said what it needs in a way that cannot be read: %s", info.name, exc)
        return ""
    difference = preflight(layout, needs, subset=subset) if needs else None
    return difference.message() if difference else ""


def _raise(failures: Sequence[Failure], report: PushReport, on_lost: str) -> None:
    """Raise the most serious failure, with all of them in its message."""
    told = [f for f in failures if on_lost == "raise" or f.kind is not WorkerLostError]
    if told:
        worst = told[0]
        text = "; ".join(str(failure) for failure in told)
        raise worst.kind(
            text,
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


def _fields(info: WorkerInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__dataclass_fields__}


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{option} is {value!r}; it is one of {', '.join(map(repr, choices))}")


def _some(names: Sequence[str], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
