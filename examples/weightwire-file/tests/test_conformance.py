from __future__ import annotations

from weightwire_file.conformance import Suite


class TestFile(Suite):
    pass
