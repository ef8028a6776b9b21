"""A pytest plugin: after the run, the seconds that each conformance suite took.

Load it with ``-p weightwire.testing.plugin``, or ``pytest_plugins = ["weightwire.testing.plugin"]`` in
a ``conftest.py``.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_configure", "pytest_terminal_summary"]

BUDGET = 150.0
"""Seconds that the suite of one backend should take at most, on two cores."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the kit's mark, for test suites that know nothing of it."""
    if not any(line.startswith("soak:") for line in config.getini("markers")):
        config.addinivalue_line("markers", "soak: long, and random where the others are not")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each class of cases: its seconds, its slowest case."""
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for reports in terminalreporter.stats.values():
        for report in reports:
            nodeid, duration = getattr(report, "nodeid", ""), getattr(report, "duration", None)
            if duration is not None and nodeid.count("::") >= 2:
                place, name, case = nodeid.split("::", 2)
                spent[f"{place}::{name}"][case] += duration
    if spent:
        terminalreporter.section("time budget")
    for suite, cases in sorted(spent.items()):
        slowest = max(cases, key=lambda case: cases[case])
        terminalreporter.write_line(
            f"{suite}: {sum(cases.values()):.1f} s of {BUDGET:.0f} s in {len(cases)} cases; "
            f"slowest {slowest} {cases[slowest]:.1f} s"
        )
