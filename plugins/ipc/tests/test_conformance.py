from __future__ import annotations

from typing import ClassVar

from weightwire.testing import BackendSuite


class TestIpc(BackendSuite):
    endpoint = "ipc"


class TestIpcOnADevice(BackendSuite):
    """All over again with payloads on a device that is none; conftest.py says which of it is left to the soak."""

    endpoint = "import:weightwire_ipc.fake"
    options: ClassVar = {"together": "true"}
