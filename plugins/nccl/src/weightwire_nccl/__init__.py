"""Weights between processes and hosts: NCCL on GPUs and Gloo on CPUs, in process groups of the plugin's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightwire.hookspecs import BackendInfo, hookimpl
from weightwire_nccl.options import NcclOptions

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.transport import Receiver, ReceiverContext, Sender, SenderContext

__all__ = ["NcclOptions", "weightwire_backend", "weightwire_make_receiver", "weightwire_make_sender"]


@hookimpl
def weightwire_backend() -> BackendInfo:
    """Claims; light enough to be called without torch."""
    return BackendInfo(
        summary="between processes and hosts, broadcast by NCCL (GPUs) or Gloo (CPUs)",
        capabilities=frozenset({"processes", "hosts", "alias", "late_join", "stream", "subset_workers", "cuda"}),
        options=NcclOptions,
        location="host:port",
    )


@hookimpl
def weightwire_make_sender(endpoint: Endpoint, options: NcclOptions, context: SenderContext) -> Sender:
    """Listen at the place. Raises ``EndpointInUseError`` where somebody else does."""
    from weightwire_nccl.sender import NcclSender

    return NcclSender(endpoint, options, context)


@hookimpl
def weightwire_make_receiver(endpoint: Endpoint, options: NcclOptions, context: ReceiverContext) -> Receiver:
    """Connects by itself, as soon as the trainer is there."""
    from weightwire_nccl.receiver import NcclReceiver

    return NcclReceiver(endpoint, options, context)
