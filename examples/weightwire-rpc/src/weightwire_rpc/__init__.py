"""``rpc``: over ``torch.distributed.rpc``, for programs that have an RPC group anyway. It pickles, and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from weightwire.hookspecs import BackendInfo, hookimpl

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.transport import Receiver, ReceiverContext, Sender, SenderContext

__all__ = ["Options"]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the endpoint.

    ``join``: ``host:port`` of the store of a dynamic RPC group, which a process that is in none yet joins.
    ``timeout``: seconds that one remote call, or joining a group, takes at most.
    """

    join: str = ""
    timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 60.0


@hookimpl
def weightwire_backend() -> BackendInfo:
    return BackendInfo(
        summary="over torch.distributed.rpc, which unpickles what any member of its group sends",
        capabilities=frozenset({"processes", "hosts", "late_join", "subset_workers"}),
        options=Options,
        pickles="own",
    )


@hookimpl
def weightwire_make_sender(endpoint: Endpoint, options: Any, context: SenderContext) -> Sender:
    from weightwire_rpc.sender import RpcSender

    return RpcSender(endpoint, options, context)


@hookimpl
def weightwire_make_receiver(endpoint: Endpoint, options: Any, context: ReceiverContext) -> Receiver:
    from weightwire_rpc.receiver import RpcReceiver

    return RpcReceiver(endpoint, options, context)
