"""Who is there, what each worker has, and which failures nobody has heard of yet. Pure: events in, answers out."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from weightwire.errors import ApplyError, PushError, RefusedError, WaitTimeout, WorkerLostError
from weightwire.report import Receipt
from weightwire.transport import Applied, Event, Have, Joined, Left, Lost, Noted, Refused, Staged, Version

__all__ = ["Failure", "Roster", "WorkerInfo"]

logger = logging.getLogger(__name__)

REMEMBERED = 1000
"""How much is remembered of workers that are gone, and of versions that nobody looks at."""
SERIOUSNESS: tuple[type[PushError], ...] = (RefusedError, ApplyError, WorkerLostError, WaitTimeout)
"""The most serious of a mixed failure is raised."""


@dataclass(kw_only=True)
class WorkerInfo:
    """What the trainer knows of one worker; ``updater.workers`` hands out copies.

    Attributes:
        name, incarnation, host, pid: who it is. A restarted worker is a new incarnation of its name.
        version: the number that it acts with, 0 before its first.
        stamp, staged: the newest versions that it has applied, and could apply.
        stuck: it missed a deadline and has not spoken since.
        error: its last failure, until it applies something newer.
        notes: what its backend has to say, such as why it fell back to another path.
    """

    name: str
    incarnation: int = 0
    host: str = ""
    pid: int = 0
    have: Have = field(default_factory=Have, repr=False)
    stamp: Version | None = None
    staged: Version | None = None
    stuck: bool = False
    error: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    needs: bytes = field(default=b"", repr=False)
    applied: Applied | None = field(default=None, repr=False)
    refused: Refused | None = field(default=None, repr=False)

    @property
    def version(self) -> int:
        return self.stamp.number if self.stamp else 0

    @property
    def state(self) -> str:
        """``joined`` (no version yet), ``acting``, ``refusing`` (its newest version failed) or ``stuck``."""
        if self.stuck:
            return "stuck"
        if self.error:
            return "refusing"
        return "acting" if self.stamp else "joined"


@dataclass(frozen=True)
class Failure:
    """Something that the caller of ``push``, ``wait`` or ``close`` has to hear of, once."""

    kind: type[PushError]
    worker: str
    version: int
    error: str
    phase: str = ""
    tensor: str = ""

    def __str__(self) -> str:
        where = f" in phase {self.phase}" if self.phase else ""
        what = f", tensor {self.tensor!r}" if self.tensor and self.tensor not in self.error else ""
        return f"worker {self.worker!r}, version {self.version}{where}{what}: {self.error}"


class Roster:
    """Workers by name, and the failures that are still to be told."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerInfo] = {}
        self.failures: list[Failure] = []
        self.epochs: set[int] = set()  # those of this updater: what a worker has of others' does not count
        self._refused_here: dict[str, set[Version]] = {}  # told already, by the trainer's own preflight
        self._gone: dict[str, tuple[str, WorkerInfo]] = {}  # why, empty after a goodbye; and how it stood then

    # -- events ------------------------------------------------------------------------------------------------------

    def observe(self, event: Event) -> bool:
        """Take one event; whether it counts. Those of an incarnation that is gone do not."""
        if isinstance(event, Joined):
            self._join(event)
            return True
        worker = self.workers.get(event.worker)
        if worker is None or worker.incarnation != event.incarnation:
            return False
        if isinstance(event, Applied):
            self._applied(worker, event)
            return True
        if isinstance(event, (Lost, Left)):
            del self.workers[event.worker]
            self._refused_here.pop(event.worker, None)
            self._gone[event.worker] = (event.reason or "lost" if isinstance(event, Lost) else "", worker)
            while len(self._gone) > REMEMBERED:
                del self._gone[next(iter(self._gone))]
            if isinstance(event, Lost):
                newest = worker.staged or worker.stamp
                number = newest.number if newest else 0
                self._fail(Failure(WorkerLostError, worker.name, number, f"lost: {event.reason}", "wait"))
            return True
        if isinstance(event, Staged):  # said by the backend, or by a thread of the worker's that needs no policy
            worker.staged = max(worker.staged or event.stamp, event.stamp)
            return True
        if isinstance(event, Noted):
            worker.notes = {**worker.notes, **event.notes}
            return True
        worker.stuck = False
        self._refused(worker, event)
        return True

    def _join(self, event: Joined) -> None:
        self._refused_here.pop(event.worker, None)
        self._gone.pop(event.worker, None)
        self.workers[event.worker] = WorkerInfo(
            name=event.worker,
            incarnation=event.incarnation,
            host=event.host,
            pid=event.pid,
            have=event.have,
            stamp=event.have.acting,
            staged=event.have.acting,
            notes=dict(event.notes),
            needs=event.needs,
        )

    def _applied(self, worker: WorkerInfo, event: Applied) -> None:
        worker.stuck = False
        worker.staged = max(worker.staged or event.stamp, event.stamp)
        if event == worker.applied:  # told twice, since an interrupt left open whether it had been
            return
        if worker.stamp is None or event.stamp >= worker.stamp or worker.stamp.epoch not in self.epochs:
            worker.stamp, worker.applied, worker.error = event.stamp, event, event.error
        if event.error:
            self._fail(Failure(ApplyError, worker.name, event.stamp.number, event.error, "after-hooks"))

    def _refused(self, worker: WorkerInfo, event: Refused) -> None:
        if event == worker.refused:  # told twice
            return
        if worker.refused is None or event.stamp >= worker.refused.stamp:
            worker.refused, worker.error = event, event.error
        told = self._refused_here.get(worker.name, set())
        if event.stamp in told:
            told.discard(event.stamp)
            return
        kind = ApplyError if event.kind == "apply" else RefusedError
        self._fail(Failure(kind, worker.name, event.stamp.number, event.error, event.phase, event.tensor))

    def refuse_here(self, worker: str, stamp: Version, error: str, tensor: str = "") -> None:
        """Book what the trainer's own preflight found, so that the worker's later word on it is not told again."""
        info = self.workers.get(worker)
        if info is None:  # it has left meanwhile
            return
        refused = Refused(
            worker=worker,
            incarnation=info.incarnation,
            stamp=stamp,
            kind="refused",
            phase="encode",
            error=error,
            tensor=tensor,
        )
        self._refused(info, refused)  # which is no sign of life
        told = self._refused_here.setdefault(worker, set())
        told.add(stamp)
        while len(told) > REMEMBERED:  # of versions that the worker never looked at
            told.remove(min(told))

    def _fail(self, failure: Failure) -> None:
        logger.info("%s", failure)  # whoever calls next is told by an exception
        self.failures.append(failure)

    # -- answers -----------------------------------------------------------------------------------------------------

    def pending(self, names: Iterable[str], stamp: Version, state: str) -> list[str]:
        """Who of ``names`` is still to be waited for, until it has ``stamp`` (or a newer one) in ``state``."""
        before = _BEFORE[state]
        return [name for name in names if self._state(name, stamp) in before]

    def took(self, names: Iterable[str], stamp: Version) -> list[str]:
        """Who of ``names`` has applied ``stamp`` (or a newer one) and has left since."""
        return [name for name in names if name not in self.workers and self._state(name, stamp) == "applied"]

    def _state(self, name: str, stamp: Version) -> str:
        worker = self.workers.get(name)
        if worker is None:
            why, gone = self._gone.get(name, ("", None))
            # What it said of the version before its goodbye stands.
            state = "left" if gone is None else self._standing(gone, stamp)
            return "lost" if why else state if state in _SAID else "left"
        return self._standing(worker, stamp)

    def _standing(self, worker: WorkerInfo, stamp: Version) -> str:
        if worker.stamp is not None and worker.stamp >= stamp and worker.stamp.epoch in self.epochs:
            return "applied"
        if worker.refused is not None and worker.refused.stamp >= stamp:
            return "failed" if worker.refused.kind == "apply" else "refused"
        if worker.stuck:
            return "stuck"
        staged = worker.staged is not None and worker.staged >= stamp and worker.staged.epoch in self.epochs
        return "staged" if staged else "sent"

    def stuck(self, names: Iterable[str], stamp: Version) -> list[str]:
        """Who of ``names`` does not have ``stamp`` and is not waited for."""
        workers = self.workers
        stuck = [name for name in names if name in workers and workers[name].stuck]
        return [name for name in stuck if self._state(name, stamp) == "stuck"]

    def receipt(self, name: str, stamp: Version) -> Receipt:
        """What is known of one worker and one version."""
        state = self._state(name, stamp)
        why, gone = self._gone.get(name, ("", None))
        worker = self.workers.get(name, gone)
        if worker is None or state in ("lost", "left"):
            return Receipt(worker=name, version=stamp.number, state=state, error=why)
        if state == "applied" and worker.applied is not None:
            done = worker.applied
            return Receipt(
                worker=name,
                version=done.stamp.number,
                state=state,
                tensors=done.tensors,
                nbytes=done.nbytes,
                seconds=dict(done.seconds),
                digest=done.digest,
                error=done.error,
                phase="after-hooks" if done.error else "",
            )
        if state in ("refused", "failed") and worker.refused is not None:
            bad = worker.refused
            return Receipt(
                worker=name, version=stamp.number, state=state, error=bad.error, phase=bad.phase, tensor=bad.tensor
            )
        return Receipt(worker=name, version=stamp.number, state=state)

    def time_out(self, names: Iterable[str], stamp: Version, state: str, seconds: float) -> None:
        """Mark those who missed a deadline as stuck. They are not waited for again until they speak."""
        for name in names:
            worker = self.workers[name]
            last = f"it last applied version {worker.version}" if worker.stamp else "it has applied no version yet"
            if state == "applied" and not worker.stamp:
                last += ": a worker does so when it calls pull()"
            if worker.stuck:  # and nobody else was there to be waited for
                last += "; it missed an earlier deadline and is not waited for until it speaks, and nobody else has it"
            worker.stuck = True
            self._fail(
                Failure(
                    WaitTimeout,
                    name,
                    stamp.number,
                    f"not {state} after {seconds:.3g} s; {last}",
                    "wait",
                )
            )

    def take_failures(self) -> list[Failure]:
        """Everything still to be told, the most serious first; it is forgotten here."""
        if not self.failures:
            return []
        failures, self.failures = self.failures, []
        return sorted(failures, key=lambda failure: SERIOUSNESS.index(failure.kind))


_SAID = ("applied", "refused", "failed")
_BEFORE = {"staged": ("sent",), "applied": ("sent", "staged")}
