"""A small right backend over a Unix socket, which can be made wrong in one way: ``import:planted://x?fault=unties``.

The fault stands in the endpoint, so that the kit's processes have it too. The ends are in ``planted_ends.py``, what is
wrong with each fault in ``planted_faults.py``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weightwire.hookspecs import BackendInfo, hookimpl
from weightwire.transport import Receiver, Sender


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fault: str = ""


CLAIMED = frozenset({"processes", "alias", "late_join", "subset_workers"})


@hookimpl
def weightwire_backend() -> BackendInfo:
    return BackendInfo(summary="for tests: over a Unix socket", capabilities=CLAIMED, options=Options)


@hookimpl
def weightwire_make_sender(endpoint: Any, options: Options, context: Any) -> Sender:
    from planted_faults import ends

    return ends(options.fault)[0](endpoint, context)


@hookimpl
def weightwire_make_receiver(endpoint: Any, options: Options, context: Any) -> Receiver:
    from planted_faults import ends

    return ends(options.fault)[1](endpoint, context)
