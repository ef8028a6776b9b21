from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from weightwire.testing import BackendSuite


class TestFile(BackendSuite):
    endpoint = "file"

    @pytest.fixture(autouse=True)
    def _folders(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="weightwire-file-") as self.folder:
            yield

    def make_endpoint(self) -> str:
        return f"file://{tempfile.mkdtemp(dir=self.folder)}"
