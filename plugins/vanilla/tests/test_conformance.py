from __future__ import annotations

from weightwire.testing import BackendSuite


class TestVanilla(BackendSuite):
    endpoint = "vanilla"
