"""A worker's end: ``pull()`` applies the newest version, whole, at a moment that the worker chooses."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, _GeneratorContextManager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from weightwire import wire
from weightwire.calls import check_ran, check_runs
from weightwire.endpoint import Endpoint, in_order, options_for, parse
from weightwire.errors import (
    ApplyError,
    ClosedError,
    DigestError,
    PreflightError,
    UpdaterLostError,
    WaitTimeout,
    WeightwireError,
    WireError,
)
from weightwire.forks import Origin
from weightwire.observers import Observers
from weightwire.registry import open_backend, require
from weightwire.report import Receipt
from weightwire.transport import Applied, Deadline, Have, Joined, ReceiverContext, Refused, Version, bounded, whole
from weightwire.weights.commit import commit
from weightwire.weights.digest import digest_of
from weightwire.weights.stream import StreamPlan, pour
from weightwire.weights.target import make_target

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.transport import Delivery, Header, Receiver
    from weightwire.weights.commit import Prepared
    from weightwire.weights.layout import Layout
    from weightwire.weights.names import Cast, Rename, Select
    from weightwire.weights.stream import Group

__all__ = ["WeightReceiver"]

logger = logging.getLogger(__name__)

SILENCE = 5.0
"""Seconds of waiting for a trainer after which a line in the log says where it is looked for."""

_counter = itertools.count()
T = TypeVar("T")
_TENSORS, _NBYTES = attrgetter("tensors"), attrgetter("nbytes")


class _State(NamedTuple):
    """All that changes with a version; swapped in one step with the weights themselves."""

    have: Have = Have()
    ready: bool = False
    metadata: bytes = b"{}"
    event: Applied | None = None  # of which the trainer is told

    @property
    def stamp(self) -> Version | None:
        return self.have.acting


class WeightReceiver:
    """Brings the weights that a trainer pushes into a policy of this process.

    Args:
        endpoint: as the updater has it (``updater.endpoint``).
        weights: what to update: a Module, TensorDict, mapping of tensors or arrays, a callable that is handed all named
            tensors at once, to keep and to write to, or ``None``: :attr:`weights` is then a mapping that the receiver
            owns.
        worker: the worker's name; two live ones of one name are refused. Default: host, pid and a counter.
        apply: ``"copy"`` in place (storage and strides stay: right for compiled policies and CUDA graphs) or
            ``"alias"``: the policy's tensors point at the delivered memory, without a copy, where the backend claims
            it.
        select, rename, cast: as in the updater, on the names that arrive; ``cast="target"`` takes what the policy has.
        inline: apply within the trainer's ``push``, for policies in its own thread (backends that claim it).
        stream: apply bucket by bucket, in bounded memory (backends that claim it): *not* all or nothing. Names, shapes
            and dtypes are checked before the first byte. Where it fails halfway the policy is a mixture: ``pull``
            raises, :attr:`ready` is false, :attr:`version` 0, and a Module raises when it is called, until the next
            full version is applied. A function is handed the tensors of one bucket after the other; ``on_applied`` is
            called once, at the end.
        group: with ``stream``, a function of a tensor's name: tensors for which it returns the same (and not ``None``)
            are applied together, such as a weight and its scale, or the parts of what the worker fuses.
        observers: names of installed observer plugins, or plugin objects.
        guard: a context manager that can be entered again and again, such as a lock: it is held from the commit of each
            version to the end of the ``on_applied`` hooks, so that whoever acts under it acts with one version. What
            raises on entering, ``pull`` raises: nothing was touched, and the next pull is given the version again.
        timeout: seconds that every wait of this object takes at most, unless told otherwise.

    A receiver belongs to the first thread that pulls. The constructor does not wait for the trainer.
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
        inline: bool = False,
        stream: bool = False,
        group: Group | None = None,
        observers: Sequence[Any] = (),
        guard: AbstractContextManager[Any] | None = None,
        timeout: float = 60.0,
    ) -> None:
        if apply not in ("copy", "alias"):
            raise ValueError(f"apply is {apply!r}; it is 'copy' or 'alias'")
        parsed = parse(in_order(endpoint, weights))
        backend = open_backend(parsed)
        for asked, capability in ((apply == "alias", "alias"), (inline, "inline"), (stream, "stream")):
            if asked:
                require(backend, capability)
        if stream and (apply == "alias" or inline or weights is None):
            raise ValueError(
                "stream=True copies into weights that are there, within pull(): it takes weights, and neither "
                "apply='alias' nor inline=True"
            )
        if group is not None and not stream:
            raise ValueError("group says what is applied together of a version that comes in pieces: add stream=True")
        if group is not None:
            check_runs(group, "group")
        if guard is not None:
            _check_guard(guard)
        if inline and guard is not None:
            raise ValueError("inline=True applies within the trainer's push, which waits for no guard")
        self.endpoint = str(parsed)
        self.worker = _checked_name(worker) or f"{socket.gethostname()}-{os.getpid()}-{next(_counter)}"
        self.timeout = bounded(timeout)
        self._origin = Origin(f"The receiver {self.worker!r} of {self.endpoint}")
        self._incarnation = time.time_ns()
        self._target = make_target(weights, select=select, rename=rename, cast=cast, apply=apply)
        self._observers = Observers(observers)
        self._observed = bool(self._observers)
        self._hooks: list[Callable[[int], object]] = []
        self._guarded = guard is not None
        self._guard: AbstractContextManager[Any] = threading.RLock() if guard is None else guard  # a nullcontext in C
        self._state = _State()
        self._told: Applied | None = None  # the last event that the trainer was told of
        self._views: weakref.WeakKeyDictionary[Any, tuple[Layout, list[Tensor]]] = weakref.WeakKeyDictionary()
        self._inline = inline
        self._stream = stream
        self._group = group
        self._plan: StreamPlan | None = None
        self._seal = _Seal(weights)
        self._thread: int | None = None  # the one that pulls
        self._idle = 0  # the same, while it is not within a pull
        self._met = False  # whether the trainer was ever there
        self._closed = self._over = False
        # A target that keeps what it is handed needs memory that lives on: the backend's, or else copies of its own.
        lasting = apply == "alias" or self._target.keeps_views
        self._private = lasting and "alias" not in backend.info.capabilities
        context = ReceiverContext(
            joined=Joined(
                worker=self.worker,
                incarnation=self._incarnation,
                host=socket.gethostname(),
                pid=os.getpid(),
                needs=self._target.needs(),
                notes={"stream": "applies bucket by bucket, not all or nothing"} if stream else {},
            ),
            have=_weakly(self._have, Have()),
            apply="alias" if lasting and not self._private else "copy",
            stream=stream,
            trained=_trained(weights),
            steady=apply == "alias" and weights is not None and not self._target.keeps_views,
            device=_device(weights),
            deliver=_weakly(self._deliver, None) if inline else None,
            deadline=Deadline.after(self.timeout),
            logger=logger,
        )
        self._receiver: Receiver = backend.make_receiver(parsed, options_for(parsed, backend.info), context)
        self._finalizer = weakref.finalize(self, _abandon, self._receiver, self._origin)

    # -- what can be read --------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The number of the version that the policy acts with, 0 before the first."""
        return self._state.stamp.number if self._state.stamp else 0

    @property
    def stamp(self) -> Version | None:
        """Epoch and number of the version that the policy acts with."""
        return self._state.stamp

    @property
    def run(self) -> int:
        """The epoch of the trainer that made that version, 0 before the first."""
        return self._state.stamp.epoch if self._state.stamp else 0

    @property
    def ready(self) -> bool:
        """Whether a full version is applied."""
        return self._state.ready

    @property
    def connected(self) -> bool:
        """Whether the trainer is there, as of the last pull."""
        return self._receiver.connected

    @property
    def closed(self) -> bool:
        """Whether this end was closed, or the trainer has said that no more will come."""
        return self._closed or self._receiver.closed

    @property
    def metadata(self) -> dict[str, Any]:
        """What the trainer sent along with the version that is applied."""
        return wire.decode_metadata(self._state.metadata)

    @property
    def weights(self) -> Any:
        """What is updated: the object that was given, or the receiver's own mapping of names to tensors."""
        return self._target.weights

    def on_applied(self, hook: Callable[[int], object]) -> Callable[[int], object]:
        """Have ``hook(version)`` called in this thread after each commit, once a version. Works as a decorator."""
        if not callable(hook):
            raise TypeError(f"on_applied takes a function of the version's number, not {hook!r}")
        check_runs(hook, "the hook")
        self._hooks.append(hook)
        return hook

    def hand_over(self) -> None:
        """Let the thread that pulls next be the one that this receiver belongs to: for callers who see to it themselves
        that never two of them use it at once."""
        self._thread, self._idle = None, 0

    # -- pull --------------------------------------------------------------------------------------------------------

    def pull(self, timeout: float | None = None) -> int | None:
        """Apply the newest version, if there is one that the policy does not have; its number, else ``None``.

        ``timeout=None`` waits, up to the receiver's own timeout, until the first full version is applied, and does not
        wait afterwards; it ends with ``None`` where the trainer has closed. ``0.0`` never waits. Any other number
        waits that many seconds for something new.

        Raises:
            PreflightError, DigestError, ApplyError: the version was not taken; the old one acts on, whole (unless
                :attr:`ready` says otherwise), and the trainer has been told. Raised once a version.
            ApplyError in phase ``after-hooks``: the version is applied, but a hook raised.
            WaitTimeout: a waiting pull got no first version. UpdaterLostError: nor did it, and the trainer is gone.
            ClosedError: a pull with a timeout, and no more will come. EndpointInUseError: another worker has this name.
        """
        me = threading.get_ident()
        if self._idle != me or not self._origin.here:
            self._claim()
        try:
            self._idle = 0
            state = self._state
            if state.event is not self._told and state.event is not None:
                self._pay(state.event)
            if timeout is None and not (state.ready or self._inline):
                return self._wait_for_news(self.timeout, closed_is_news=True)
            if timeout:
                return self._wait_for_news(bounded(timeout))
            if self._closed:
                return None
            first = self._receiver.poll(state.have, None)
            return None if first is None else self._take(first)
        finally:
            self._idle = me

    def wait(self, version: int = 1, timeout: float | None = None) -> int:
        """Pull until at least version number ``version`` is applied; the number that is. Raises as a waiting pull
        does."""
        version, seconds = whole(version, "version"), bounded(timeout, self.timeout)
        deadline = Deadline.after(seconds)
        while self.version < version or not self.ready:
            try:
                self.pull(max(deadline.remaining, 1e-9))
            except (WaitTimeout, UpdaterLostError):  # which know only of what was left of the time
                raise self._timed_out(seconds, f"version {version}") from None
            if deadline.expired and not (self.version >= version and self.ready):
                raise self._timed_out(seconds, f"version {version}")
        return self.version

    def _wait_for_news(self, seconds: float, *, closed_is_news: bool = False) -> int | None:
        deadline = Deadline.after(seconds)
        silence = deadline.sooner(SILENCE)
        while True:
            if self.closed and closed_is_news:
                return None
            if self.closed:
                raise ClosedError(
                    f"{self._origin.what} waits for {'news' if self.ready else 'its first version'}, but no more will "
                    "come: " + ("the receiver was closed" if self._closed else "the trainer has closed")
                )
            first = self._receiver.poll(self._state.have, deadline if silence.expired else silence)
            self._met |= self._receiver.connected
            number = None if first is None else self._take(first)
            if number is not None:
                return number
            if deadline.expired and not self.closed:
                if self.ready and self._receiver.connected:
                    return None
                raise self._timed_out(seconds, "news" if self.ready else "its first version")
            if silence.expired and not self._receiver.connected and not deadline.expired:
                silence = deadline
                logger.warning(
                    "%s finds no trainer: %s; it waits up to %.3g s",
                    self._origin.what,
                    self._receiver.whereabouts,
                    seconds,
                )

    def _timed_out(self, seconds: float, what: str) -> WeightwireError:
        text = f"{self._origin.what} waited {seconds:.3g} s for {what}"
        if self._receiver.connected:
            newest = f"version {self.version} is the newest" if self.ready else "but has pushed none that it can take"
            return WaitTimeout(f"{text}: the trainer is there, {newest}", phase="wait", worker=self.worker)
        where = self._receiver.whereabouts
        if self._met:
            return UpdaterLostError(f"{text}: the trainer is lost{where and '; ' + where}")
        return WaitTimeout(
            f"{text}: there is no trainer at {self.endpoint}{where and '; ' + where}", phase="wait", worker=self.worker
        )

    # -- one version -------------------------------------------------------------------------------------------------

    def _take(self, first: Delivery) -> int | None:
        """Apply what was polled: a full version, a subset, or a full version with the subset that lies on it."""
        self._met = True
        chain = [first]
        try:
            if self._stream:
                return self._pour(first)
            if not first.alone:
                self._complete(chain)
            return self._apply(chain) if chain else None
        finally:
            for delivery in chain:
                delivery.release()

    def _complete(self, chain: list[Delivery]) -> None:
        """A full version may be only the base of a subset that is newer: look once more, and keep what belongs
        together."""
        have = self._state.have
        while chain[-1].header.base is None and not chain[-1].alone:
            stamp = chain[-1].header.stamp
            more = self._receiver.poll(Have(max(stamp, have.stamp or stamp), stamp, have.acting), None)
            if more is None:
                break
            if more.header.base != stamp:
                chain.pop().release()
            chain.append(more)
        newest = chain[-1].header
        if have.stamp is not None and newest.stamp <= have.stamp:  # a base whose subset is gone again
            chain.pop().release()

    def _apply(self, chain: list[Delivery]) -> int:
        prepared: list[Prepared] = []
        hidden: BaseException | None = None  # by the guard's __exit__
        try:
            event = self._verify_all(chain, prepared)
            begun = time.perf_counter()
            with self._guard:
                try:
                    if self._guarded:
                        event.seconds["wait"] = time.perf_counter() - begun
                    self._commit(event, chain[-1].header, prepared)
                    failed = self._call_hooks(event) if self._hooks else []
                except BaseException as exc:
                    hidden = exc
                    raise
            if hidden is not None:
                raise hidden
            self._after(event, failed)
        finally:  # last: to give large old tensors back takes a while, for which the trainer need not wait
            hidden = None  # which holds this frame
            for done in prepared:
                done.done()
        return event.stamp.number

    def _pour(self, delivery: Delivery) -> int | None:
        """Apply a version as its bytes come. From the first of them on the policy is a mixture, until the last."""
        header, old = delivery.header, self._state
        begun = time.perf_counter()
        try:
            base = self._check_header(delivery, old.have.base)
            layout = self._target.admit(header)
            if self._plan is None or self._plan.layout != layout:
                self._plan = StreamPlan(layout, self._group)
            buckets = iter(delivery.buckets())
            first = list(itertools.islice(buckets, 1))  # before it is there, nothing has to be given up for it
        except UpdaterLostError:  # it, or something newer, may come again
            return None
        except Exception as exc:
            raise self._refuse(header.stamp, "verify", exc, ruined=False) from exc
        verified, touched = time.perf_counter(), False
        hidden: BaseException | None = None  # by the guard's __exit__
        try:
            with self._guard:
                try:
                    touched = True
                    self._state = old._replace(have=Have(old.have.stamp, None, None), ready=False)
                    poured = pour(header, itertools.chain(first, buckets), self._target, self._plan)
                    event = Applied(
                        worker=self.worker,
                        incarnation=self._incarnation,
                        stamp=header.stamp,
                        digest=header.digest.hex(),
                        tensors=poured.tensors,
                        nbytes=poured.nbytes,
                        seconds={"verify": verified - begun, "commit": time.perf_counter() - verified},
                    )
                    self._seal.open()
                    applied = _State(Have(header.stamp, base, header.stamp), True, header.metadata, event)
                    self._state, touched = applied, False  # whole: what a hook is interrupted by is no mixture
                    failed = self._call_hooks(event) if self._hooks else []
                except BaseException as exc:
                    hidden = exc
                    raise
            if hidden is not None:
                raise hidden
        except BaseException as exc:
            if touched:
                self._spoil(header, exc)
            if touched and isinstance(exc, UpdaterLostError):  # the trainer may come again, and so may the version
                return None
            if touched and isinstance(exc, Exception):
                known = isinstance(exc, WeightwireError)
                error = ApplyError(str(exc), tensor=getattr(exc, "tensor", None)) if known else exc
                told = self._refuse(header.stamp, "commit", error, ruined=True)
                raise (DigestError(str(told)) if isinstance(exc, DigestError) else told) from exc
            raise
        finally:
            hidden = None  # which holds this frame
        self._after(event, failed)
        return event.stamp.number

    def _spoil(self, header: Header, exc: BaseException) -> None:
        text = (
            f"the policy of worker {self.worker!r} is a mixture: version {header.stamp.number} ended halfway "
            f"({type(exc).__name__}: {exc}); it is unusable until the next full version is applied"
        )
        logger.warning("%s", text)
        self._seal.close(text)

    def _verify_all(self, chain: list[Delivery], prepared: list[Prepared]) -> Applied:
        """Verify and prepare; what will be told of the version. Raises what ``pull`` raises where it is not taken."""
        header, begun = chain[-1].header, time.perf_counter()
        try:
            base = self._state.have.base
            for delivery in chain:
                base = self._check_header(delivery, base)
                if delivery.header.digest:
                    _check_digest(delivery)
                prepared.append(self._prepare(delivery))
            return Applied(
                worker=self.worker,
                incarnation=self._incarnation,
                stamp=header.stamp,
                digest=header.digest.hex() if header.digest else "",
                tensors=sum(map(_TENSORS, prepared)),
                nbytes=sum(map(_NBYTES, prepared)),
                seconds={"verify": time.perf_counter() - begun},
            )
        except Exception as exc:
            raise self._refuse(header.stamp, "verify", exc, ruined=False) from exc

    def _commit(self, event: Applied, header: Header, prepared: list[Prepared]) -> None:
        """The moment at which the policy changes; raises what ``pull`` raises where it does not."""
        begun = time.perf_counter()
        event.seconds["commit"] = 0.0  # told with the version, so it must be there before it is known
        have = Have(header.stamp, header.base or header.stamp, header.stamp)
        state = _State(have, True, header.metadata, event)
        try:
            commit(prepared, then=partial(setattr, self, "_state", state))
            event.seconds["commit"] = time.perf_counter() - begun
        except Exception as exc:
            if self._state is state:  # a signal handler's, when all was done: the next pull tells the trainer
                raise
            raise self._refuse(header.stamp, "commit", exc, ruined=any(done.ruined for done in prepared)) from exc
        except BaseException as exc:  # Ctrl-C: nothing was taken, unless it hit a callable target
            if any(done.ruined for done in prepared):
                self._refuse(header.stamp, "commit", RuntimeError(f"interrupted by {type(exc).__name__}"), ruined=True)
            raise

    def _check_header(self, delivery: Delivery, base: Version | None) -> Version:
        """Check what can be checked before the first byte is used; the full version that the policy will stand on."""
        if delivery.fault is not None:
            raise delivery.fault
        header = delivery.header
        if header.encoding != "plain":
            raise WireError(
                f"version {header.stamp.number} is encoded as {header.encoding!r}; this worker knows only 'plain'"
            )
        if header.base is not None and header.base != base:
            raise PreflightError(
                f"version {header.stamp.number} is a subset on full version {header.base.number}, which this worker "
                "does not have: push a full one"
            )
        return header.base or header.stamp

    def _prepare(self, delivery: Delivery) -> Prepared:
        layout, memory = delivery.header.layout, delivery.memory
        if self._private:
            views = layout.views([block.clone() for block in delivery.tensors()])
        elif memory is None:
            views = delivery.views()
        else:
            known = self._views.get(memory)
            if known is None or known[0] is not layout:
                known = self._views[memory] = (layout, delivery.views())
            views = known[1]
        writable = delivery.writable or self._private
        return self._target.prepare(delivery.header, views, writable=writable, on_host=delivery.on_host)

    def _call_hooks(self, event: Applied) -> list[tuple[str, Exception]]:
        """Those that failed, and how."""
        failed: list[tuple[str, Exception]] = []
        begun = time.perf_counter()
        for hook in self._hooks:
            try:
                check_ran(hook(event.stamp.number), "it")
            except Exception as exc:
                failed.append((getattr(hook, "__qualname__", repr(hook)), exc))
        event.seconds["after-hooks"] = time.perf_counter() - begun
        return failed

    def _after(self, event: Applied, failed: list[tuple[str, Exception]]) -> None:
        """Report, observers: the version is applied, whatever happens here."""
        error = ""
        if failed:
            error = "; ".join(f"hook {name} raised {type(exc).__name__}: {exc}" for name, exc in failed)
            event = msgspec.structs.replace(event, error=error)
            self._state = self._state._replace(event=event)  # should an interrupt leave it to the next pull to tell
        self._pay(event)
        if self._observed:
            self._observe(event.stamp, "applied", event, error, "after-hooks" if error else "")
        if failed:
            raise ApplyError(
                f"worker {self.worker!r} acts with version {event.stamp.number}, but {error}",
                version=event.stamp.number,
                worker=self.worker,
                phase="after-hooks",
            ) from failed[0][1]

    def _pay(self, event: Applied) -> None:
        self._receiver.report(event)
        self._told = self._state.event

    def _refuse(self, stamp: Version, phase: str, exc: Exception, *, ruined: bool) -> WeightwireError:
        """Remember and report that a version was not taken; the error that ``pull`` raises of it."""
        have = self._state.have
        have = Have(stamp, None if ruined else have.base, have.acting)
        self._state = self._state._replace(have=have, ready=self._state.ready and not ruined)
        tensor = getattr(exc, "tensor", None) or ""
        told = isinstance(exc, WeightwireError) and not isinstance(exc, ApplyError)
        text = str(exc) if told else f"{type(exc).__name__}: {exc}"
        event = Refused(
            worker=self.worker,
            incarnation=self._incarnation,
            stamp=stamp,
            kind="refused" if told else "apply",
            phase=phase,
            error=text,
            tensor=tensor,
        )
        self._receiver.report(event)
        if self._observed:
            self._observe(stamp, "refused" if told else "failed", None, text, phase, tensor)
        if told:
            return exc  # type: ignore[return-value]
        where = f", tensor {tensor!r}" if tensor else ""
        left = "its policy is unusable until the next full version" if ruined else f"version {self.version} acts on"
        return ApplyError(
            f"worker {self.worker!r} could not apply version {stamp.number} in phase {phase}{where}: {text}; {left}",
            version=stamp.number,
            worker=self.worker,
            phase=phase,
            tensor=tensor or None,
        )

    def _observe(
        self, stamp: Version, state: str, done: Applied | None, error: str, phase: str, tensor: str = ""
    ) -> None:
        facts: dict[str, Any] = {}
        if done is not None:
            facts = {"tensors": done.tensors, "nbytes": done.nbytes, "seconds": done.seconds, "digest": done.digest}
        receipt = Receipt(
            worker=self.worker, version=stamp.number, state=state, error=error, phase=phase, tensor=tensor, **facts
        )
        self._observers.after_pull(endpoint=self.endpoint, receipt=receipt)

    def _have(self) -> Have:
        return self._state.have

    def _deliver(self, delivery: Delivery) -> None:
        """Inline: called within the trainer's ``push``. What goes wrong is reported, as from any other worker."""
        try:
            self._apply([delivery])
        except WeightwireError as exc:
            logger.warning("inline receiver %r: %s", self.worker, exc)
        finally:
            delivery.release()

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Say goodbye and free everything. Idempotent; the weights that were applied live on."""
        if self._over or not self._origin.here:
            return
        deadline = Deadline.after(bounded(timeout, min(self.timeout, 10.0)))
        self._closed = True
        self._views.clear()
        if self._state.event is not self._told and self._state.event is not None:
            self._pay(self._state.event)
        self._receiver.close(deadline)
        self._over = True
        self._finalizer.detach()

    def __enter__(self) -> WeightReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise self._origin.refuse_copy()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "connected" if self.connected else "not connected"
        return f"<WeightReceiver {self.worker!r} of {self.endpoint}, version {self.version}, {state}>"

    def _claim(self) -> None:
        self._origin.check()
        me = threading.get_ident()
        if self._thread == me and not self._idle:
            raise RuntimeError(
                f"{self._origin.what} is in the middle of a pull of this thread; one (in a hook, say, or a signal "
                "handler) cannot be within another"
            )
        if self._thread not in (None, me):
            raise RuntimeError(
                f"{self._origin.what} belongs to thread {self._thread}, which pulled first; this is thread "
                f"{me}. Make a receiver for each thread, or share one: weightwire.collectors.gate.GatedReceiver, "
                "which pulls by itself (act within `with receiver.acting():`)."
            )
        self._thread = self._idle = me


class _Seal:
    """Keeps a Module that is a mixture of two versions from being called."""

    def __init__(self, weights: Any) -> None:
        self._weights = weights
        self._handle: Any = None

    def close(self, text: str) -> None:
        import torch

        self.open()
        if isinstance(self._weights, torch.nn.Module):

            def refuse(*_: Any) -> None:
                raise ApplyError(text, phase="commit")

            self._handle = self._weights.register_forward_pre_hook(refuse)

    def open(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()


def _check_digest(delivery: Delivery) -> None:
    header, found = delivery.header, digest_of(delivery.tensors())
    if found != header.digest:
        raise DigestError(
            f"the bytes of version {header.stamp.number} have digest {found.hex()}, but the trainer sent "
            f"{header.digest.hex()}"
        )


def _weakly(method: Any, gone: T) -> Callable[..., T]:
    """A bound method for the backend that does not keep a forgotten receiver alive."""
    reference = weakref.ref(method.__self__)  # not a WeakMethod, which is Python code
    function: Callable[..., T] = method.__func__

    def call(*args: Any) -> T:
        owner = reference()
        return gone if owner is None else function(owner, *args)

    return call


def _trained(weights: Any) -> str:
    """Why this target is likely to be written to in place by its user: where it is a Module that is trained."""
    import torch

    if not isinstance(weights, torch.nn.Module):
        return ""
    if weights.training:
        return "it is in training mode"
    name = next((name for name, parameter in weights.named_parameters() if parameter.requires_grad), None)
    return "" if name is None else f"its parameter {name!r} requires grad"


def _device(weights: Any) -> str:
    import torch

    first: torch.Tensor | None
    if isinstance(weights, torch.nn.Module):
        first = next(weights.parameters(), None)
    else:
        values = weights.values() if isinstance(weights, Mapping) else ()
        first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    return "cpu" if first is None else str(first.device)


def _check_guard(guard: Any) -> None:
    if isinstance(guard, _GeneratorContextManager):
        raise TypeError(
            f"guard={guard!r} can be entered once only; it is a context manager for each version, such as a lock"
        )
    if not (hasattr(type(guard), "__enter__") and hasattr(type(guard), "__exit__")):
        raise TypeError(f"guard={guard!r} is no context manager: an instance with __enter__ and __exit__ is wanted")


def _checked_name(worker: str | None) -> str | None:
    if worker is not None and not (isinstance(worker, str) and 0 < len(worker) <= 255 and worker.isprintable()):  # type: ignore[redundant-expr]
        raise ValueError(f"a worker's name is 1 to 255 printable characters, not {worker!r:.300}")
    return worker


def _abandon(receiver: Receiver, origin: Origin) -> None:
    """At interpreter exit, or when a receiver is forgotten: say goodbye, but not from a forked child."""
    if origin.here:
        try:
            receiver.close(Deadline.after(1.0))
        except Exception:
            logger.debug("closing a receiver failed", exc_info=True)
