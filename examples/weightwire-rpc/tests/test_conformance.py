from __future__ import annotations

from weightwire_rpc.conformance import Suite


class TestRpc(Suite):
    pass
