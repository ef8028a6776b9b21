"""The conformance kit: a suite of tests that any backend runs, and the parts that it is made of.

All that the author of a backend writes::

    from weightwire.testing import BackendSuite

    class TestMine(BackendSuite):
        endpoint = "mine"

Needs the extra ``weightwire[testing]``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightwire.testing.rig import Rig
    from weightwire.testing.suite import BackendSuite

__all__ = ["BackendSuite", "Rig"]

_HOMES = {"BackendSuite": "weightwire.testing.suite", "Rig": "weightwire.testing.rig"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "BackendSuite":
        import pytest

        # The suites are test modules in all but their names: let pytest explain their assertions too.
        pytest.register_assert_rewrite("weightwire.testing.suites")
    return getattr(import_module(_HOMES[name]), name)
