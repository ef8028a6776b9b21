"""Every error a user can meet. Each says what was asked, what is there, and what to do.

All of them derive from :class:`WeightwireError` and, where Python has a fitting built-in, from that too, so that
``except ConnectionError`` or ``except ValueError`` keeps its usual meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightwire.report import PushReport

__all__ = [
    "AmbiguousBackendError",
    "ApplyError",
    "BackendLoadError",
    "CapabilityError",
    "ClosedError",
    "DigestError",
    "EndpointError",
    "EndpointInUseError",
    "IncompatibleBackendError",
    "InvalidBackendError",
    "OffloadedError",
    "PreflightError",
    "PushError",
    "RefusedError",
    "StaleUpdaterError",
    "StorageFullError",
    "UnknownBackendError",
    "UnknownWorkerError",
    "UpdaterLostError",
    "WaitTimeout",
    "WeightwireError",
    "WireError",
    "WorkerLostError",
]


class WeightwireError(Exception):
    """Base of every error that Weightwire raises on purpose."""


# -- endpoints and plugins -----------------------------------------------------------------------------------------


class EndpointError(WeightwireError, ValueError):
    """The endpoint text, or one of its options, cannot be understood."""


class EndpointInUseError(WeightwireError):
    """Another live updater holds this place, or another live worker has this name."""


class UnknownBackendError(WeightwireError, LookupError):
    """No installed distribution offers a backend (or an observer) of that name."""


class AmbiguousBackendError(WeightwireError):
    """Two or more distributions claim the same name; the message names all of them."""


class BackendLoadError(WeightwireError):
    """The plugin was found, but importing it failed: in itself, or in something that it needs."""


class IncompatibleBackendError(WeightwireError):
    """The plugin speaks an API number that this core does not."""


class InvalidBackendError(WeightwireError):
    """The plugin was imported but breaks the hook spec: a missing or misspelt hook, a wrong return value."""


class CapabilityError(WeightwireError):
    """The backend does not claim what was asked of it."""


# -- weights ---------------------------------------------------------------------------------------------------------


class PreflightError(WeightwireError, ValueError):
    """The payload does not fit the worker's policy, or cannot be made. Nothing was copied; all is listed."""


class DigestError(WeightwireError):
    """The bytes (or the header beside them) are not those that the trainer sent. Nothing was applied."""


class WireError(WeightwireError, ValueError):
    """A header or message from the wire is malformed, oversized or of another protocol."""


class OffloadedError(WeightwireError, RuntimeError):
    """A tensor was used while :class:`~weightwire.offload.Offload` has moved its memory away. Reload it first."""


class StorageFullError(WeightwireError):
    """There is no room for another version. Nothing was announced; the old version lives on."""


# -- pushing ---------------------------------------------------------------------------------------------------------


class PushError(WeightwireError):
    """At least one addressed worker did not take a version that was pushed.

    Attributes:
        report: the :class:`~weightwire.PushReport` of the push (or wait) that raises, with a receipt for each worker.
            ``None`` where the error is raised in the worker itself.
        version: the number of the version that failed.
        worker, phase, tensor: the first failure, as far as known.
    """

    def __init__(
        self,
        message: str,
        *,
        report: PushReport | None = None,
        version: int | None = None,
        worker: str | None = None,
        phase: str | None = None,
        tensor: str | None = None,
    ) -> None:
        super().__init__(message)
        self.report = report
        self.version = version
        self.worker = worker
        self.phase = phase
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        state = {k: getattr(self, k) for k in ("report", "version", "worker", "phase", "tensor")}
        return (type(self), self.args, state)


class RefusedError(PushError):
    """A worker refused the payload before anything of its policy was touched (names, shapes, dtypes, digest)."""


class ApplyError(PushError):
    """Applying failed in a worker: its target, or a hook that runs after commit, raised."""


class WorkerLostError(PushError):
    """A worker went away without saying goodbye. The others have the version."""


class WaitTimeout(PushError, TimeoutError):
    """A deadline passed; the message names who was waited for, in which phase, for how long."""


# -- ends ------------------------------------------------------------------------------------------------------------


class UnknownWorkerError(WeightwireError, LookupError):
    """``workers=[...]`` names somebody whom the updater does not know."""


class UpdaterLostError(WeightwireError, ConnectionError):
    """The trainer is gone without a goodbye and did not come back before the deadline."""


class ClosedError(WeightwireError):
    """This end was closed, or the trainer closed the stream while somebody waited, or the object crossed a fork."""


class StaleUpdaterError(WeightwireError):
    """Another updater with a newer epoch has taken this one's place; this one must not send any more."""
