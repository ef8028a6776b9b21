"""Every case that a backend has to pass: ``pytest``, or ``weightwire conformance mine``."""

from __future__ import annotations

from weightwire.testing import BackendSuite


class TestMine(BackendSuite):
    endpoint = "mine"
