"""What a run leaves behind: a table in the terminal, the same in Markdown, all raw samples in JSON, and plots."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from bars import Verdict
from measure import Contest, Spread
from rich.console import Console
from rich.table import Table

__all__ = ["machine", "print_table", "write"]

TO_MS = {"s": 1e3, "ms": 1.0, "us": 1e-3}
HEAD = ("id", "work", "measured", "against", "result (quartiles)", "to reach", "")


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    facts = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    names = {"model name\t": "cpu"}
    return {
        **{label: facts.get(key, "unknown").strip() for key, label in names.items()},
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
        "versions": {
            dist.metadata["Name"]: dist.version
            for dist in metadata.distributions()
            if dist.metadata["Name"].startswith(("weightwire", "torch", "numpy", "msgspec", "ray", "tensordict"))
        },
    }


def rows(verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    return [
        (
            verdict.bar.bench,
            verdict.bar.work,
            f"{verdict.bar.measured}: {amount(verdict.measured.median, verdict.unit)}",
            f"{verdict.bar.against}: {amount(verdict.against.median, verdict.unit)}" if verdict.against else "",
            result(verdict),
            "" if verdict.bar.limit is None else f"at most {limit(verdict)}",
            {True: "reached", False: "NOT REACHED", None: "shown"}[verdict.reached],
        )
        for verdict in verdicts
    ]


def result(verdict: Verdict) -> str:
    unit = "times" if verdict.bar.how == "times" else verdict.unit
    spread: Spread = verdict.result
    return f"{amount(spread.median, unit)} ({amount(spread.low, unit)} to {amount(spread.high, unit)})"


def limit(verdict: Verdict) -> str:
    assert verdict.bar.limit is not None
    return f"{verdict.bar.limit:g} {verdict.bar.unit}" + (" more" if verdict.bar.how == "more" else "")


def amount(value: float, unit: str) -> str:
    if unit == "us" and value >= 1e3:  # a contest of many sizes
        value, unit = value / 1e6, "s"
    if unit == "s":
        scale, unit = (1.0, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "us")
        value *= scale
    return f"{value:.3g} {unit}"


def print_table(verdicts: Sequence[Verdict], console: Console) -> None:
    table = Table(title="benchmarks", title_justify="left")
    for column in HEAD:
        table.add_column(column)
    styles = {True: "green", False: "bold red", None: "dim"}
    for verdict, row in zip(verdicts, rows(verdicts), strict=True):
        table.add_row(*row[:-1], f"[{styles[verdict.reached]}]{row[-1]}[/]")
    console.print(table)


def markdown(verdicts: Sequence[Verdict], facts: dict[str, Any]) -> str:
    head = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    body = [f"| {' | '.join(row)} |" for row in rows(verdicts)]
    where = (
        f"Measured on {facts['cores']} cores of {facts['cpu']}, {facts['memory_gb']} GB, Linux {facts['kernel']}, "
        f"Python {facts['python']}, torch {torch.__version__}. Medians of interleaved turns, quartiles in brackets."
    )
    return "\n".join([*head, *body, "", where, ""])


def write(out: Path, contests: Sequence[Contest], verdicts: Sequence[Verdict], facts: dict[str, Any]) -> list[Path]:
    """Write ``latest.json``, ``latest.md``, ``bars.png`` and ``times.png`` into ``out``; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / name for name in ("latest.json", "latest.md", "bars.png", "times.png")]
    record = {
        "machine": facts,
        "contests": [asdict(contest) for contest in contests],
        "verdicts": [asdict(verdict) | {"reached": verdict.reached} for verdict in verdicts],
    }
    paths[0].write_text(json.dumps(record, indent=1) + "\n")
    paths[1].write_text(markdown(verdicts, facts))
    plot_bars(paths[2], verdicts)
    plot_times(paths[3], contests)
    return paths


def plot_bars(path: Path, verdicts: Sequence[Verdict]) -> None:
    """Each result as a part of what it may be: left of the line is reached."""
    from matplotlib.figure import Figure

    held = [verdict for verdict in verdicts if verdict.bar.limit]
    figure = Figure(figsize=(9, 1 + 0.3 * len(held)), layout="constrained")
    axis = figure.subplots()
    for row, verdict in enumerate(held):
        assert verdict.bar.limit
        low, median, high = (
            value / verdict.bar.limit for value in (verdict.result.low, verdict.result.median, verdict.result.high)
        )
        axis.barh(row, median, color="tab:green" if verdict.reached else "tab:red", alpha=0.7)
        axis.plot([low, high], [row, row], color="black", linewidth=1)
    bars = [verdict.bar for verdict in held]
    labels = [f"{b.bench}  {b.work}: {b.measured}" + (f" / {b.against}" if b.against else "") for b in bars]
    axis.set_yticks(range(len(held)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.axvline(1.0, color="black", linestyle="--", linewidth=1)
    axis.set_xlabel("measured / bar (the line is the bar; whiskers are quartiles)")
    figure.savefig(path, dpi=120)


def plot_times(path: Path, contests: Sequence[Contest]) -> None:
    """All turns of all contests that measure time, one dot each."""
    from matplotlib.figure import Figure

    timed = [contest for contest in contests if contest.unit in TO_MS and contest.bench != "B5"]
    lines = [
        (f"{c.bench}  {c.work}: {name}", [TO_MS[c.unit] * value for value in samples])
        for c in timed
        for name, samples in c.series.items()
    ]
    figure = Figure(figsize=(9, 1 + 0.25 * max(len(lines), 1)), layout="constrained")
    axis = figure.subplots()
    for row, (_, samples) in enumerate(lines):
        axis.plot(samples, [row] * len(samples), "o", markersize=3, alpha=0.4)
    axis.set_yticks(range(len(lines)), [label for label, _ in lines], fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("milliseconds")
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
