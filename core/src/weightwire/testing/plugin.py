"""A pytest plugin, loaded wherever Weightwire is installed: the kit's mark, and the seconds that each suite took.

It imports nothing heavy, and prints nothing unless a conformance suite has run.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_configure", "pytest_itemcollected", "pytest_terminal_summary"]

BUDGET = 150.0
"""Seconds that the suite of one backend should take at most, on two cores."""

PROPERTY = "weightwire suite"
"""What a case's reports carry (over process borders too, with pytest-xdist): the class that it belongs to."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the kit's mark, for test suites that know nothing of it."""
    if not any(line.startswith("soak:") for line in config.getini("markers")):
        config.addinivalue_line("markers", "soak: long, and random where the others are not (Weightwire's kit)")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the cases of suites."""
    base = sys.modules.get("weightwire.testing.suites.base")  # not there: nobody has a suite
    kind = getattr(item, "cls", None)
    if base is not None and isinstance(kind, type) and issubclass(kind, base.Cases):
        item.user_properties.append((PROPERTY, item.nodeid.removesuffix(f"::{item.name}")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each suite that has run: its seconds, its slowest case."""
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for reports in terminalreporter.stats.values():
        for report in reports:
            suite = dict(getattr(report, "user_properties", ())).get(PROPERTY)
            duration = getattr(report, "duration", None)  # a deselected case is listed too, and has none
            if isinstance(suite, str) and duration is not None:
                spent[suite][report.nodeid.removeprefix(f"{suite}::")] += duration
    if spent:
        terminalreporter.section("time budget of the conformance suites")
    for suite, cases in sorted(spent.items()):
        slowest = max(cases, key=lambda case: cases[case])
        terminalreporter.write_line(
            f"{suite}: {sum(cases.values()):.1f} s of {BUDGET:.0f} s in {len(cases)} cases; "
            f"slowest {slowest} {cases[slowest]:.1f} s"
        )
