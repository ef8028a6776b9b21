"""For all tests: the same Hypothesis examples in every run, and what each part of the tests costs."""

from __future__ import annotations

import os
from collections import defaultdict

import pytest
from hypothesis import settings

# No deadline an example: the machine may be busy, and pytest-timeout bounds each test.
settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("random", deadline=None, print_blob=True, max_examples=500)
settings.load_profile(os.environ.get("WEIGHTWIRE_HYPOTHESIS", "fixed"))

BUDGETS = {
    # `make test` runs two parts side by side, on two cores.
    "core/tests": 190,
    "plugins/vanilla/tests": 50,
    "plugins/nccl/tests": 180,
    "plugins/ray/tests": 310,
    "tests/collectors": 90,
    "plugins/ipc/tests": 190,
    "tests": 440,
}
"""Seconds that they may take: about eleven minutes for each part."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", action="store_true", help="print what each part of the tests took of its time")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--budget"):
        config.pluginmanager.register(_Budget())


class _Budget:
    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tests: defaultdict[str, int] = defaultdict(int)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        part = max((part for part in BUDGETS if report.nodeid.startswith(f"{part}/")), key=len, default="elsewhere")
        self.seconds[part] += report.duration
        self.tests[part] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time budget")
        for part, seconds in self.seconds.items():
            budget = BUDGETS.get(part, 0)
            over = "  OVER" if seconds > budget else ""
            terminalreporter.line(f"{part:24}{self.tests[part]:6} tests {seconds:8.1f} s of {budget} s{over}")
        total = f"{sum(self.tests.values()):6} tests {sum(self.seconds.values()):8.1f} s of {sum(BUDGETS.values())} s"
        terminalreporter.line(f"{'all':24}{total}")
