"""Receivers for actors that know nothing of Weightwire, through ``__ray_call__``."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from weightwire.endpoint import options_for, parse
from weightwire.errors import (
    ApplyError,
    ClosedError,
    EndpointError,
    PreflightError,
    PushError,
    RefusedError,
    UpdaterLostError,
    WaitTimeout,
    WeightwireError,
    WorkerLostError,
)
from weightwire.hookspecs import hookimpl
from weightwire.report import PushReport, Receipt
from weightwire.transport import Deadline, Version
from weightwire_ray import weightwire_backend
from weightwire_ray.engine import Engine, Late, MailboxGone, NoMailbox, mailbox_name

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.receiver import WeightReceiver
    from weightwire_ray.options import RayOptions

__all__ = ["ATTRIBUTE", "attach", "pull"]

ATTRIBUTE = "_weightwire_receivers"
"""Where an actor's instance keeps what was attached to it: endpoint -> :class:`_Attached`."""
_MARGIN = 5.0
"""Seconds beyond its own deadline after which an actor that has not answered counts as stuck."""
_KINDS: dict[str, type[PushError]] = {
    "refused": RefusedError,
    "failed": ApplyError,
    "lost": WorkerLostError,
    "stuck": WaitTimeout,
}


# -- in the caller ---------------------------------------------------------------------------------------------------


def attach(
    actors: Sequence[Any],
    endpoint: str | Mapping[str, Any] | Endpoint,
    policy: str | None,
    *,
    workers: Sequence[str] | None,
    timeout: float,
    options: Mapping[str, Any],
) -> list[str]:
    """See :func:`weightwire_ray.attach`."""
    if workers is not None and len(workers) != len(actors):
        raise ValueError(f"{len(workers)} names for {len(actors)} actors")
    if "worker" in options:
        raise TypeError("a name is one worker's: give workers=[...], one for each actor")
    place = str(parse(endpoint))
    names: Sequence[str | None] = workers if workers is not None else [None] * len(actors)
    calls = [
        actor.__ray_call__.remote(_attach_here, place, policy, name, dict(options))
        for actor, name in zip(actors, names)
    ]
    deadline = Deadline.after(timeout)
    return [_attached(call, actor, deadline, timeout) for call, actor in zip(calls, actors)]


def _attached(call: Any, actor: Any, deadline: Deadline, timeout: float) -> str:
    try:
        name: str = ray.get(call, timeout=max(0.01, deadline.remaining))
    except GetTimeoutError:
        raise WaitTimeout(f"{actor} did not take a receiver in {timeout:.3g} s", worker=str(actor)) from None
    except RayActorError as exc:
        raise WorkerLostError(f"{actor} is dead: {exc}", worker=str(actor)) from exc
    except RayTaskError as exc:
        if isinstance(exc.cause, WeightwireError):
            raise exc.cause from exc
        raise
    return name


def pull(
    actors: Sequence[Any], *, endpoint: str | Mapping[str, Any] | Endpoint | None, timeout: float, raising: bool
) -> list[Receipt]:
    """See :func:`weightwire_ray.pull`."""
    place = None if endpoint is None else str(parse(endpoint))
    calls = [actor.__ray_call__.remote(_pull_here, place, timeout) for actor in actors]
    deadline = Deadline.after(timeout + _MARGIN)
    answers = [_answer(call, actor, deadline, timeout) for call, actor in zip(calls, actors)]
    receipts = [receipt for receipt, _ in answers]
    errors = [error for _, error in answers if error is not None]
    if raising and errors:
        raise errors[0]
    bad = sorted((r for r in receipts if r.state in _KINDS), key=lambda r: list(_KINDS).index(r.state))
    if raising and bad:
        worst, report = (
            bad[0],
            PushReport(version=max(r.version for r in receipts), run=0, receipts={r.worker: r for r in receipts}),
        )
        raise _KINDS[worst.state](
            "; ".join(f"worker {r.worker!r}, version {r.version}: {r.error}" for r in bad),
            report=report,
            version=worst.version,
            worker=worst.worker,
            phase=worst.phase or None,
            tensor=worst.tensor or None,
        )
    return receipts


def _answer(call: Any, actor: Any, deadline: Deadline, timeout: float) -> tuple[Receipt, Exception | None]:
    """An actor's receipt, and what it raised where that is not about a version: nothing is attached to it, say."""
    state, error, raised = "", "", None
    try:
        return msgspec.msgpack.decode(ray.get(call, timeout=max(0.01, deadline.remaining)), type=Receipt), None
    except GetTimeoutError:
        state, error = "stuck", f"no answer in {timeout:.3g} s"
    except RayActorError as exc:
        state, error = "lost", str(exc).partition("\n")[0]
    except RayTaskError as exc:
        raised = exc.cause if isinstance(exc.cause, WeightwireError) else exc
        state, error = "failed", str(raised)
    return Receipt(worker=str(actor), version=0, state=state, error=error, phase="wait"), raised


# -- in the actor ----------------------------------------------------------------------------------------------------


class _Notes:
    """An observer that keeps the newest receipt."""

    last: Receipt | None = None

    @hookimpl
    def weightwire_after_pull(self, receipt: Receipt) -> None:
        self.last = receipt


class _Attached(NamedTuple):
    receiver: WeightReceiver
    notes: _Notes
    turn: threading.Lock  # an actor may have many threads, and Ray takes any of them


def _attach_here(instance: Any, endpoint: str, policy: str | None, worker: str | None, options: dict[str, Any]) -> str:
    from weightwire.receiver import WeightReceiver

    weights = None if policy is None else _resolve(instance, policy)
    attached: dict[str, _Attached] = instance.__dict__.setdefault(ATTRIBUTE, {})
    old = attached.pop(endpoint, None)
    if old is not None:
        old.receiver.close(1.0)
    notes = _Notes()
    name = worker or f"{type(instance).__name__}-{ray.get_runtime_context().get_actor_id()}"
    options["observers"] = [*options.get("observers", ()), notes]
    receiver = WeightReceiver(endpoint, weights, worker=name, **options)
    attached[endpoint] = _Attached(receiver, notes, threading.Lock())
    return name


def _resolve(instance: Any, path: str) -> Any:
    """``"agent.policy"`` -> what is there; a part may be a key of a mapping."""
    found = instance
    for part in path.split("."):
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            raise PreflightError(
                f"policy={path!r} in an actor of class {type(instance).__name__}: {type(found).__name__} lacks {part!r}"
            )
    return found


def _pull_here(instance: Any, endpoint: str | None, timeout: float) -> bytes:
    attached: dict[str, _Attached] = instance.__dict__.get(ATTRIBUTE, {})
    places = list(attached) if endpoint is None else [place for place in attached if place == endpoint]
    if len(places) != 1:
        raise EndpointError(
            f"pull() of an actor of class {type(instance).__name__} that is attached to {len(places)} such places: "
            + (f"say which, endpoint=... of {places}" if places else "attach() it first; a restarted actor, anew")
        )
    (place,) = places
    receiver, notes, turn = attached[place]
    deadline = Deadline.after(timeout)
    if not turn.acquire(timeout=deadline.remaining):
        error = f"another thread of this actor has been pulling for {timeout:.3g} s"
        receipt = Receipt(worker=receiver.worker, version=receiver.version, state="stuck", error=error, phase="wait")
        return msgspec.msgpack.encode(receipt)
    try:
        receiver.hand_over()
        return msgspec.msgpack.encode(_pull(place, receiver, notes, deadline))
    finally:
        turn.release()


def _pull(endpoint: str, receiver: WeightReceiver, notes: _Notes, deadline: Deadline) -> Receipt:
    """Apply what the mailbox has for this worker now; what came of it."""
    target = _newest(endpoint, receiver.worker, deadline)
    try:
        if target is None and not receiver.ready:
            receiver.pull(max(deadline.remaining, 1e-9))
        while target is not None and (receiver.stamp is None or receiver.stamp < target):
            if notes.last is not None and notes.last.state in _KINDS and notes.last.version == target.number:
                return notes.last  # refused before, and nothing newer has come
            receiver.pull(max(deadline.remaining, 1e-9))
            if deadline.expired:
                raise WaitTimeout(f"version {target.number} did not come by the deadline")
    except (WaitTimeout, UpdaterLostError) as exc:
        return Receipt(worker=receiver.worker, version=receiver.version, state="stuck", error=str(exc), phase="wait")
    except ClosedError:
        if not receiver.ready:
            raise
    except WeightwireError as exc:
        if notes.last is None or notes.last.state not in _KINDS:
            raise
        return notes.last if notes.last.error else msgspec.structs.replace(notes.last, error=str(exc))
    if target is None and not receiver.closed and not receiver.connected:
        error = f"there is no trainer at {endpoint}; version {receiver.version} acts on"
        return Receipt(worker=receiver.worker, version=receiver.version, state="stuck", error=error, phase="wait")
    if notes.last is not None and notes.last.version == receiver.version:
        return notes.last
    return Receipt(worker=receiver.worker, version=receiver.version, state="applied")


def _newest(endpoint: str, worker: str, deadline: Deadline) -> Version | None:
    """The newest version that the mailbox has for this worker; ``None`` where there is none, or no mailbox."""
    parsed, options = parse(endpoint), _options(endpoint)
    engine = Engine(parsed, options, deadline)
    try:
        mailbox = engine.find_mailbox(mailbox_name(parsed.location), options.namespace)
        told = engine.ask(mailbox, "newest", worker, timeout=max(0.05, deadline.remaining))
    except (MailboxGone, NoMailbox, Late):
        return None
    return max((stamp for stamp in told if stamp is not None), default=None)


def _options(endpoint: str) -> RayOptions:
    parsed = parse(endpoint)
    options: RayOptions = options_for(parsed, weightwire_backend())
    return options
