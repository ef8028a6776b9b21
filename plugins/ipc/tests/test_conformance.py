from __future__ import annotations

from weightwire.testing import BackendSuite


class TestIpc(BackendSuite):
    endpoint = "ipc"
