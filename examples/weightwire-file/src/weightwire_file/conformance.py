"""The conformance kit over ``file``: each case has a folder of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from weightwire.testing import BackendSuite

__all__ = ["Suite"]


class Suite(BackendSuite):
    endpoint = "file"

    @pytest.fixture(autouse=True)
    def _folders(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="weightwire-file-") as self.folder:
            yield

    def make_location(self) -> str:
        return tempfile.mkdtemp(dir=self.folder)
