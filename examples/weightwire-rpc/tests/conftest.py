from __future__ import annotations

from weightwire_rpc.conformance import group

__all__ = ["group"]
