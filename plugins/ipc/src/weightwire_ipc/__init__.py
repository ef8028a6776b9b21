"""Weights between the processes of one Linux machine: written once into sealed shared memory, for all workers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from weightwire.errors import CapabilityError, WeightwireError
from weightwire.hookspecs import BackendInfo, hookimpl
from weightwire_ipc.options import IpcOptions

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.transport import Receiver, ReceiverContext, Sender, SenderContext

__all__ = ["IpcOptions", "weightwire_backend", "weightwire_make_receiver", "weightwire_make_sender"]


@hookimpl
def weightwire_backend() -> BackendInfo:
    """Claims; light enough to be called without torch."""
    return BackendInfo(
        summary="between processes of one Linux machine, through sealed shared memory",
        capabilities=frozenset({"processes", "alias", "late_join", "sharded_target", "stream", "subset_workers"}),
        options=IpcOptions,
    )


@hookimpl
def weightwire_make_sender(endpoint: Endpoint, options: IpcOptions, context: SenderContext) -> Sender:
    """Claim the place and listen there.

    Raises ``EndpointInUseError`` where another live updater has it, and ``WeightwireError`` where the system gives no
    more files or memory.
    """
    _check_platform()
    from weightwire_ipc.cuda import CudaLayer
    from weightwire_ipc.memory import out_of_files
    from weightwire_ipc.sender import IpcSender

    try:
        return IpcSender(endpoint, options, context, CudaLayer() if options.device == "auto" else None)
    except OSError as exc:
        short = out_of_files(f"endpoint {str(endpoint)!r}", exc)
        raise short or WeightwireError(f"endpoint {str(endpoint)!r} cannot be opened: {exc}") from exc


@hookimpl
def weightwire_make_receiver(endpoint: Endpoint, options: IpcOptions, context: ReceiverContext) -> Receiver:
    """Connects at once where an updater is there, and else when it is polled. Never waits for one."""
    _check_platform()
    from weightwire.endpoint import check_located

    check_located(endpoint)
    from weightwire_ipc.cuda import CudaLayer
    from weightwire_ipc.receiver import IpcReceiver

    on_gpu = options.device == "auto" and context.device.startswith("cuda")
    return IpcReceiver(endpoint.location, context, CudaLayer() if on_gpu else None)


def _check_platform() -> None:
    if sys.platform != "linux":
        raise CapabilityError(
            f"the backend 'ipc' needs Linux (sealed memfd, kernel-held leases); this is {sys.platform}. "
            "'vanilla' works here within one process."
        )
