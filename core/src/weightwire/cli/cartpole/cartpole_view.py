"""What a person sees of the demo: a live table in a terminal, lines elsewhere, and a plot."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from cartpole_worker import Report

    from weightwire import PushReport

RECENT = 50  # episodes, of all workers, whose mean counts
LINE_EVERY = 1.0  # seconds, where the output is no terminal


@dataclass
class Standing:
    """What is known of one worker from its reports."""

    version: int = 0
    steps: int = 0
    lost: bool = False
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=25))


@dataclass
class Moment:
    """One push: when (seconds since the first experience), the mean return by then, the largest lag (versions), and how
    long it took (seconds)."""

    at: float
    mean_return: float
    lag: int
    push: float


class View:
    """Keeps the books of a run and shows them. A context manager, so that the terminal is left as it was found."""

    def __init__(self, endpoint: str, workers: list[str]) -> None:
        self.endpoint = endpoint
        self.console = Console(highlight=False)
        self.standings = {name: Standing() for name in workers}
        self.returns: deque[float] = deque([0.0] * RECENT, maxlen=RECENT)
        self.history: list[Moment] = []
        self.pushes: list[float] = []  # seconds
        self.nbytes = 0
        self._begun = 0.0  # when the first report came in
        self._line_at = 0.0
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> View:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    @property
    def mean_return(self) -> float:
        """Of the latest episodes of all workers; those still to come count as 0."""
        return sum(self.returns) / RECENT

    def reported(self, report: Report) -> None:
        """A worker's report has come in."""
        self._begun = self._begun or time.perf_counter()
        standing = self.standings[report.worker]
        standing.version = report.version
        if report.rollout:
            standing.steps += report.rollout.action.size
            standing.returns.extend(report.returns)
            self.returns.extend(report.returns)

    def say(self, line: str) -> None:
        """Print a line, above the table where there is one."""
        self.console.print(line, soft_wrap=True)

    def pushed(self, report: PushReport) -> None:
        """A version has been pushed after an update: a point of the plot."""
        self._count(report)
        lags = [report.version - s.version for s in self.standings.values() if s.version and not s.lost]
        at = time.perf_counter() - self._begun
        self.history.append(Moment(at, self.mean_return, max(lags, default=0), self.pushes[-1]))
        if not self._live and at >= self._line_at:
            self._line_at = at + LINE_EVERY
            self.say(self._line(report))

    def finished(self, report: PushReport) -> None:
        """The last version has been pushed: the one before it once more, with the order to play."""
        self._count(report)

    def _count(self, report: PushReport) -> None:
        for name in report.lost:
            self.standings[name].lost = True
        self.pushes.append(sum(report.seconds.values()))
        self.nbytes += report.nbytes
        if self._live:
            self._live.update(Group(self._workers(report.version), self._push(report)), refresh=True)

    def _workers(self, version: int) -> Table:
        title = f"{self.endpoint}   version {version}   return {self.mean_return:.0f}"
        table = Table(title=title, title_justify="left")
        for column in ("worker", "version", "lag", "return", "steps"):
            table.add_column(column, justify="left" if column == "worker" else "right", min_width=8)
        for name, standing in self.standings.items():
            mean = f"{np.mean(standing.returns):.0f}" if standing.returns else "-"
            lag = "lost" if standing.lost else str(version - standing.version) if standing.version else "-"
            table.add_row(name, str(standing.version or "-"), lag, mean, f"{standing.steps:,}")
        return table

    def _push(self, report: PushReport) -> Table:
        table = Table(title=f"last push, {report.nbytes:,} bytes, microseconds", title_justify="left")
        for phase in report.seconds:
            table.add_column(phase, justify="right")
        table.add_row(*(f"{seconds * 1e6:.0f}" for seconds in report.seconds.values()))
        return table

    def _line(self, report: PushReport) -> str:
        moment = self.history[-1]
        acting = ", ".join(f"{name} {'lost' if s.lost else f'v{s.version}'}" for name, s in self.standings.items())
        return (
            f"{moment.at:5.1f} s  version {report.version:4d}  return {moment.mean_return:5.1f}  "
            f"push {moment.push * 1e3:.2f} ms  acting: {acting}"
        )

    def plot(self, path: Path) -> None:
        """Return, lag and push time over the run, as an image."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        at = [moment.at for moment in self.history]
        panels = {
            "mean return\n(latest episodes)": [moment.mean_return for moment in self.history],
            "largest lag\n(versions)": [moment.lag for moment in self.history],
            "push\n(milliseconds)": [moment.push * 1e3 for moment in self.history],
        }
        figure, axes = pyplot.subplots(len(panels), 1, sharex=True, figsize=(8, 7), constrained_layout=True)
        for axis, (label, values) in zip(axes, panels.items(), strict=True):
            axis.plot(at, values, linewidth=1.2)
            axis.set_ylabel(label)
            axis.set_ylim(bottom=0)
            axis.set_xlim(left=0)
            axis.grid(alpha=0.3)
        axes[-1].set_xlabel("seconds since the first experience")
        figure.suptitle(f"CartPole over {self.endpoint}, {len(self.standings)} workers")
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
