"""``vanilla``: within one process; one owned copy a version, or straight into the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from weightwire.hookspecs import BackendInfo, hookimpl

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.transport import Receiver, ReceiverContext, Sender, SenderContext

__all__ = ["Options"]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the endpoint.

    ``keep``: a version that goes straight into the only, inline receiver is also kept, for receivers that come later.
    """

    keep: bool = False


@hookimpl
def weightwire_backend() -> BackendInfo:
    return BackendInfo(
        summary="within one process: one owned copy a version, or straight into the policy",
        capabilities=frozenset({"alias", "inline", "late_join", "sharded_target", "stream", "subset_workers"}),
        options=Options,
    )


@hookimpl
def weightwire_make_sender(endpoint: Endpoint, options: Any, context: SenderContext) -> Sender:
    from weightwire_vanilla.ends import VanillaSender

    return VanillaSender(endpoint, options, context)


@hookimpl
def weightwire_make_receiver(endpoint: Endpoint, options: Any, context: ReceiverContext) -> Receiver:
    from weightwire.endpoint import check_located

    check_located(endpoint)
    from weightwire_vanilla.ends import VanillaReceiver

    return VanillaReceiver(endpoint, context)
