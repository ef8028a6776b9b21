"""Weightwire moves the weights of a policy from the process that trains it to the processes that act with it.

    updater = WeightUpdater("ipc://policy", policy)      # in the trainer
    updater.push()

    receiver = WeightReceiver("ipc://policy", policy)    # in a worker, any process
    receiver.pull()

All public names are imported when first used: ``import weightwire`` imports neither torch nor a plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint, Size
    from weightwire.endpoint import parse as parse_endpoint
    from weightwire.errors import (
        AmbiguousBackendError,
        ApplyError,
        BackendLoadError,
        CapabilityError,
        ClosedError,
        DigestError,
        EndpointError,
        EndpointInUseError,
        IncompatibleBackendError,
        InvalidBackendError,
        OffloadedError,
        PreflightError,
        PushError,
        RefusedError,
        StaleUpdaterError,
        StorageFullError,
        UnknownBackendError,
        UnknownWorkerError,
        UpdaterLostError,
        WaitTimeout,
        WeightwireError,
        WireError,
        WorkerLostError,
    )
    from weightwire.hookspecs import BackendInfo, hookimpl
    from weightwire.receiver import WeightReceiver
    from weightwire.report import PushReport, Receipt
    from weightwire.roster import WorkerInfo
    from weightwire.transport import (
        Deadline,
        Delivery,
        Receiver,
        ReceiverContext,
        Sender,
        SenderContext,
        Version,
    )
    from weightwire.updater import WeightUpdater

    __version__: str

__all__ = [
    "AmbiguousBackendError",
    "ApplyError",
    "BackendInfo",
    "BackendLoadError",
    "CapabilityError",
    "ClosedError",
    "Deadline",
    "Delivery",
    "DigestError",
    "Endpoint",
    "EndpointError",
    "EndpointInUseError",
    "IncompatibleBackendError",
    "InvalidBackendError",
    "OffloadedError",
    "PreflightError",
    "PushError",
    "PushReport",
    "Receipt",
    "Receiver",
    "ReceiverContext",
    "RefusedError",
    "Sender",
    "SenderContext",
    "Size",
    "StaleUpdaterError",
    "StorageFullError",
    "UnknownBackendError",
    "UnknownWorkerError",
    "UpdaterLostError",
    "Version",
    "WaitTimeout",
    "WeightReceiver",
    "WeightUpdater",
    "WeightwireError",
    "WireError",
    "WorkerInfo",
    "WorkerLostError",
    "__version__",
    "hookimpl",
    "parse_endpoint",
]

# Where each name lives, unless in weightwire.errors.
_HOMES = {
    "Endpoint": "endpoint",
    "Size": "endpoint",
    "parse_endpoint": "endpoint",
    "BackendInfo": "hookspecs",
    "hookimpl": "hookspecs",
    "WeightReceiver": "receiver",
    "PushReport": "report",
    "Receipt": "report",
    "WorkerInfo": "roster",
    "Deadline": "transport",
    "Delivery": "transport",
    "Receiver": "transport",
    "ReceiverContext": "transport",
    "Sender": "transport",
    "SenderContext": "transport",
    "Version": "transport",
    "WeightUpdater": "updater",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("weightwire")
    else:
        from importlib import import_module

        module = import_module(f"{__name__}.{_HOMES.get(name, 'errors')}")
        value = getattr(module, "parse" if name == "parse_endpoint" else name)
    globals()[name] = value  # asked for once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
