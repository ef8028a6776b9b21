"""What a run leaves behind: a table in the terminal, the same in Markdown, and all raw samples in JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from bars import Verdict
from measure import Contest, Spread
from plots import AXES, TITLES, plot_bars, plot_curves, plot_times
from rich.console import Console
from rich.table import Table

__all__ = ["machine", "print_table", "write"]

HEAD = ("id", "work", "measured", "against", "result (quartiles)", "turns", "to reach", "")


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    facts = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    names = {"model name\t": "cpu"}
    return {
        **{label: facts.get(key, "unknown").strip() for key, label in names.items()},
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "load": os.getloadavg(),
        "versions": {
            dist.metadata["Name"]: dist.version
            for dist in metadata.distributions()
            if dist.metadata["Name"].startswith(("weightwire", "torch", "numpy", "msgspec", "ray", "tensordict"))
        },
    }


def rows(verdicts: Sequence[Verdict], *, toys: bool = False) -> list[tuple[str, ...]]:
    return [
        (
            verdict.bar.bench,
            verdict.bar.work,
            f"{verdict.bar.measured}: {amount(verdict.measured.median, verdict.unit)}",
            against(verdict),
            result(verdict),
            str(verdict.measured.turns),
            limit(verdict),
            "toy" if toys else word(verdict),
        )
        for verdict in verdicts
    ]


def word(verdict: Verdict) -> str:
    if verdict.failed:
        return "PEER FAILED"
    return {True: "reached", False: "NOT REACHED", None: "shown"}[verdict.reached]


def against(verdict: Verdict) -> str:
    if verdict.failed:
        return f"{verdict.bar.against}: failed"
    return f"{verdict.bar.against}: {amount(verdict.against.median, verdict.unit)}" if verdict.against else ""


def result(verdict: Verdict) -> str:
    spread = verdict.result
    if spread is None:
        return ""
    unit = {"times": "times", "faster": "times faster"}.get(verdict.bar.how, verdict.unit)
    return f"{number(spread.median, unit)} ({number(spread.low, unit)} to {number(spread.high, unit)}) {unit}"


def limit(verdict: Verdict) -> str:
    bar = verdict.bar
    if bar.limit is None:
        return ""
    least = "at least" if bar.how == "faster" else "at most"
    return f"{least} {bar.limit:g} {bar.unit}{' more' * (bar.how == 'more')}{' faster' * (bar.how == 'faster')}"


def number(value: float, unit: str) -> str:
    return f"{value:.4g}" if unit in ("us", "ms") else f"{value:.3g}"


def amount(value: float, unit: str) -> str:
    if unit == "us" and value >= 1e3:  # a contest of many sizes
        value, unit = value / 1e6, "s"
    if unit == "s":
        scale, unit = (1.0, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "us")
        value *= scale
    return f"{value:.3g} {unit}"


def print_table(verdicts: Sequence[Verdict], console: Console, *, toys: bool = False) -> None:
    table = Table(title="benchmarks", title_justify="left")
    for column in HEAD:
        table.add_column(column)
    styles = {"reached": "green", "NOT REACHED": "bold red", "PEER FAILED": "bold red", "shown": "dim", "toy": "dim"}
    for row in rows(verdicts, toys=toys):
        table.add_row(*row[:-1], f"[{styles[row[-1]]}]{row[-1]}[/]")
    console.print(table)


def markdown(
    contests: Sequence[Contest],
    verdicts: Sequence[Verdict],
    facts: dict[str, Any],
    missing: Sequence[str],
    *,
    toys: bool = False,
) -> str:
    parts = [TOYS] if toys else []
    parts.append(grid(HEAD, rows(verdicts, toys=toys)))
    parts += curve_tables(contests)
    failed = [f"- {c.bench}, {c.work}: {name}: {why}" for c in contests for name, why in c.failed.items()]
    if failed:
        parts.append("\n".join(["Peers that failed:", "", *failed]))
    if missing:
        parts.append("\n".join(["Not measured:", "", *(f"- {text}" for text in missing)]))
    parts.append(
        f"Measured on {facts['cores']} cores of {facts['cpu']}, {facts['memory_gb']} GB, Linux {facts['kernel']}, "
        f"Python {facts['python']}, torch {torch.__version__}, load {facts['load'][0]:.2f} at the start. "
        f"Medians of interleaved turns, quartiles in brackets."
    )
    return "\n\n".join(parts) + "\n"


TOYS = "**These are toys, measured to see that everything works. The table says nothing.**"


def grid(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in body)])


def curve_tables(contests: Sequence[Contest]) -> list[str]:
    """One table a curve: a row for each point, a column for each contender."""
    tables = []
    for bench, axis in AXES.items():
        points = [contest for contest in contests if contest.bench == bench]
        if points:
            names = list(dict.fromkeys(name for contest in points for name in contest.series))
            body = [
                [contest.work, *(amount(Spread.of(contest.series[name]).median, contest.unit) for name in names)]
                for contest in points
            ]
            tables.append(f"{bench}: {TITLES[bench]}\n\n{grid([axis, *names], body)}")
    return tables


def write(
    out: Path,
    contests: Sequence[Contest],
    verdicts: Sequence[Verdict],
    facts: dict[str, Any],
    missing: Sequence[str],
    *,
    toys: bool = False,
) -> list[Path]:
    """Write ``latest.json``, ``latest.md`` and the plots into ``out``; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / name for name in ("latest.json", "latest.md", "bars.png", "times.png", "curves.png")]
    record = {
        "machine": facts,
        "toys": toys,
        "missing": list(missing),
        "contests": [asdict(contest) for contest in contests],
        "verdicts": [asdict(verdict) | {"reached": verdict.reached} for verdict in verdicts],
    }
    paths[0].write_text(json.dumps(record, indent=1) + "\n")
    paths[1].write_text(markdown(contests, verdicts, facts, missing, toys=toys))
    plot_bars(paths[2], verdicts)
    plot_times(paths[3], contests)
    plot_curves(paths[4], contests)
    return paths
