"""The options that a ``ray`` endpoint takes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from weightwire.endpoint import Size

__all__ = ["RayOptions"]


class RayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``ray://...?namespace=...``.

    Attributes:
        namespace: Ray's namespace in which the mailbox actor has its name; the same on both sides.
        address: a running cluster to connect to where this process has not called ``ray.init()``, as in
            ``address=auto``. Never starts one. Empty: an error there.
        bucket: bytes of one object in Ray's store, at most; tensors are gathered up to a quarter of the version, or up
            to that many. One that is larger is an object of its own.
        alias: what ``apply="alias"`` may point at the store's memory, to which a write kills the process:
            ``"careful"``, no policy in training mode or with parameters that require grad; ``"force"``, any.
    """

    namespace: Annotated[str, msgspec.Meta(min_length=1)] = "weightwire"
    address: str = ""
    bucket: Annotated[Size, msgspec.Meta(ge=1 << 16)] = 256 << 20
    alias: Literal["careful", "force"] = "careful"
