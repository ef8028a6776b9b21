"""The options that an ``nccl`` endpoint takes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from weightwire.endpoint import Size

__all__ = ["NcclOptions"]


class NcclOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``nccl://host:port?bucket=32MiB&...``. Each end reads those that concern it.

    Attributes:
        device: where this end keeps its buffers. ``auto``: the current CUDA device where this process has used CUDA
            before the end is made, else the CPU. ``cuda:1`` names a device by its index.
        bucket: bytes that travel at once, at most.
        staging: ``thread``: a thread of the receiver's takes part in the broadcasts; ``inline``: ``pull`` does, so
            that a push needs pulls at the same time.
        keep: whether the trainer keeps a packed copy of the newest version for workers that join, or fall behind.
        algorithm: ``broadcast`` is a tree from the trainer; ``scatter_allgather`` lets many receivers share the work.
        interface: the network interface for the engines' data sockets; default: the address of the control socket.
        token_file: a file with the secret that both ends must know; default: the variable ``WEIGHTWIRE_TOKEN``.
    """

    device: Annotated[str, msgspec.Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    bucket: Annotated[Size, msgspec.Meta(ge=4096)] = 32 << 20
    staging: Literal["thread", "inline"] = "thread"
    keep: bool = True
    algorithm: Literal["broadcast", "scatter_allgather"] = "broadcast"
    interface: str = ""
    token_file: str = ""
