from __future__ import annotations

from weightwire.testing import BackendSuite


class TestNccl(BackendSuite):
    endpoint = "nccl"
