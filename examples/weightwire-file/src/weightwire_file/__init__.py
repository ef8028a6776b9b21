"""``file``: versions as files in a folder, for a trainer and workers that share nothing but a disk."""

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

    ``keep``: how many of the newest versions stay in the folder, beside those that a worker may still ask for.
    ``sync``: have each version on the disk itself before it counts, so that it outlives a power cut.
    ``interval``: seconds between two looks at the folder, at most, while an end waits.
    """

    keep: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    sync: bool = True
    interval: Annotated[float, msgspec.Meta(gt=0, le=10)] = 0.02


@hookimpl
def weightwire_backend() -> BackendInfo:
    return BackendInfo(
        summary="files in a shared folder: safetensors, leased, fenced by epoch",
        capabilities=frozenset({"processes", "hosts", "alias", "late_join", "subset_workers"}),
        options=Options,
        location="absolute folder",
    )


@hookimpl
def weightwire_make_sender(endpoint: Endpoint, options: Any, context: SenderContext) -> Sender:
    from weightwire_file.sender import FileSender

    return FileSender(endpoint, options, context)


@hookimpl
def weightwire_make_receiver(endpoint: Endpoint, options: Any, context: ReceiverContext) -> Receiver:
    from weightwire_file.receiver import FileReceiver

    return FileReceiver(endpoint, options, context)
