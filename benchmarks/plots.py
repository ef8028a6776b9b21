"""The plots of a run: results against their bars, all raw samples, and the curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bars import Verdict
from matplotlib.figure import Figure
from measure import Contest, Spread

__all__ = ["AXES", "TITLES", "plot_bars", "plot_curves", "plot_times"]

TO_MS = {"s": 1e3, "ms": 1.0, "us": 1e-3}
AXES = {"C1": "bytes", "C2": "tensors", "C3": "workers"}
TITLES = {
    "C1": "against size (100 tensors, 2 workers)",
    "C2": "against number of tensors (10 MB, 2 workers)",
    "C3": "against workers (200 tensors, 105 MB)",
}


def plot_bars(path: Path, verdicts: Sequence[Verdict]) -> None:
    """Each result as a part of what it may be: left of the line is reached."""
    held = [verdict for verdict in verdicts if verdict.bar.limit and verdict.result]
    figure = Figure(figsize=(11, 1 + 0.26 * len(held)), layout="constrained")
    axis = figure.subplots()
    for row, verdict in enumerate(held):
        low, median, high = parts(verdict)
        axis.barh(row, median, color="tab:green" if verdict.reached else "tab:red", alpha=0.7)
        axis.plot([low, high], [row, row], color="black", linewidth=1)
    bars = [verdict.bar for verdict in held]
    labels = [f"{b.bench}  {b.work}: {b.measured}" + (f" / {b.against}" if b.against else "") for b in bars]
    axis.set_yticks(range(len(held)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 4)
    axis.axvline(1.0, color="black", linestyle="--", linewidth=1)
    axis.set_xlabel("measured / bar (the line is the bar; whiskers are quartiles; what is longer than the plot is cut)")
    figure.savefig(path, dpi=120)


def parts(verdict: Verdict) -> list[float]:
    """Lower quartile, median and upper quartile of the result, as parts of the bar."""
    spread, limit = verdict.result, verdict.bar.limit
    assert spread
    assert limit
    values = (spread.low, spread.median, spread.high)
    return [limit / value if verdict.bar.how == "faster" else value / limit for value in values]


def plot_times(path: Path, contests: Sequence[Contest]) -> None:
    """All turns of all contests that measure time, one dot each."""
    timed = [contest for contest in contests if contest.unit in TO_MS and contest.at is None and contest.bench != "B5"]
    lines = [
        (f"{c.bench}  {c.work}: {name}", [TO_MS[c.unit] * value for value in samples])
        for c in timed
        for name, samples in c.series.items()
    ]
    figure = Figure(figsize=(11, 1 + 0.2 * max(len(lines), 1)), layout="constrained")
    axis = figure.subplots()
    for row, (_, samples) in enumerate(lines):
        axis.plot(samples, [row] * len(samples), "o", markersize=3, alpha=0.4)
    axis.set_yticks(range(len(lines)), [label for label, _ in lines], fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("milliseconds")
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)


def plot_curves(path: Path, contests: Sequence[Contest]) -> None:
    """What an update costs against size, tensors and workers; medians, with the quartiles as a band."""
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    for bench, axis in zip(AXES, figure.subplots(1, 3), strict=True):
        curve(axis, bench, [contest for contest in contests if contest.bench == bench])
    figure.savefig(path, dpi=120)


def curve(axis: Any, bench: str, points: Sequence[Contest]) -> None:
    for name in dict.fromkeys(name for point in points for name in point.series):
        there = [point for point in points if name in point.series]
        spreads = [Spread.of([TO_MS[point.unit] * value for value in point.series[name]]) for point in there]
        at = [point.at for point in there]
        axis.plot(at, [spread.median for spread in spreads], "o-", markersize=3, linewidth=1.2, label=name)
        axis.fill_between(at, [spread.low for spread in spreads], [spread.high for spread in spreads], alpha=0.15)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_title(TITLES[bench], fontsize=10)
    axis.set_xlabel(AXES[bench])
    axis.set_ylabel("milliseconds until applied")
    axis.grid(alpha=0.3)
    if points:
        axis.legend(fontsize=7)
