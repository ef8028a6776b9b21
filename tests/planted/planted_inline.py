"""The same backend for policies of the trainer's own process only: it claims no processes."""

from __future__ import annotations

from planted import Options, weightwire_make_receiver, weightwire_make_sender

from weightwire.hookspecs import BackendInfo, hookimpl

__all__ = ["weightwire_backend", "weightwire_make_receiver", "weightwire_make_sender"]


@hookimpl
def weightwire_backend() -> BackendInfo:
    return BackendInfo(summary="for tests: in one process", capabilities=frozenset({"late_join"}), options=Options)
