"""``weightwire doctor``: for each backend whether it works here, how fast, and which one to choose.

A backend works if versions went round, in real processes where it reaches any, and every worker's bytes had the digest
of the trainer's. Each is tried in processes of its own: one that hangs or crashes is told of, and harms no other.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from weightwire.cli.text import aligned, complain, counted, duration, printable, rate, size
from weightwire.cli.trial import Trial, TrialError
from weightwire.endpoint import parse
from weightwire.errors import WeightwireError
from weightwire.registry import available, find, remedy

__all__ = ["Finding", "advice", "examine", "lines", "run"]

SMALL = (20, 170_000)
"""Tensors and bytes of the policy whose latency is measured: a small one."""
LARGE = (16, 64_000_000)
"""Of the one whose bytes a second are."""
TURNS, LARGE_TURNS = 15, 5
MARGIN = 110
"""Columns; longer explanations are wrapped."""


class Finding(NamedTuple):
    """What was found of one backend. Seconds are those of the quickest push until all workers acted with it: what the
    place can do, whatever else it did meanwhile."""

    endpoint: str
    works: bool
    reason: str = ""  # why it does not
    workers: int = 0
    processes: bool = False
    capabilities: tuple[str, ...] = ()
    seconds: float = 0.0
    bytes_per_second: float = 0.0  # of a large state, counted once however many workers there are
    notes: dict[str, Any] = {}  # noqa: RUF012 - of a NamedTuple, and never changed


def run(endpoints: Sequence[str], *, workers: int, as_json: bool) -> int:
    """Examine the backends that are named, else all that are installed.

    The status: 0, all that were named work (or, where none is named, at least one does); 1, not so; 2, wrong usage.
    """
    try:
        for text in endpoints:
            find(parse(text))
    except WeightwireError as exc:
        complain(str(exc))
        return 2
    chosen = list(endpoints) or [record.name for record in available()]
    if not chosen:
        complain(f"no backends are installed. Try: {remedy('ipc')}")
        return 1
    findings, busy = [], _busy()
    with _progress(as_json) as step:
        for text in chosen:
            step(text)
            findings.append(examine(text, workers))
    told = advice(findings, workers) if any(finding.works for finding in findings) else {}
    if as_json:
        import json

        print(json.dumps({"backends": [finding._asdict() for finding in findings], "advice": told}, indent=2))
    else:
        print("\n".join(lines(findings, told) + ([busy] if told and busy else [])))
    good = [finding.works for finding in findings]
    return int(not (all(good) if endpoints else any(good)))


def examine(text: str, workers: int) -> Finding:
    """Try one backend. Never raises because of it."""
    try:
        with Trial(text, tensors=SMALL[0], nbytes=SMALL[1], workers=workers) as trial:
            opened = trial.open()
            trial.turn()  # the first has memory to get and connections to make
            small = min(trial.turn()["seconds"] for _ in range(TURNS))
        with Trial(text, tensors=LARGE[0], nbytes=LARGE[1], workers=workers) as trial:
            nbytes = trial.open()["nbytes"]
            trial.turn()
            large = min(trial.turn()["seconds"] for _ in range(LARGE_TURNS))
    except TrialError as exc:
        reason = str(exc) if exc.kind.endswith(("Error", "Hung", "Died", "Timeout")) else f"{exc.kind}: {exc}"
        return Finding(text, False, reason)
    return Finding(
        text,
        True,
        "",
        workers,
        opened["processes"],
        tuple(opened["capabilities"]),
        small,
        nbytes / large,
        opened["notes"],
    )


def advice(findings: Sequence[Finding], workers: int) -> dict[str, str]:
    """What to choose for which place of the workers: an endpoint and why, or what is missing."""
    works = [finding for finding in findings if finding.works]

    def best(fit: Callable[[Finding], bool], key: Callable[[Finding], float]) -> Finding | None:
        return min(filter(fit, works), key=key, default=None)

    inside = best(lambda f: "inline" in f.capabilities or not f.processes, lambda f: f.seconds)
    local = best(lambda f: f.processes, lambda f: (SMALL[1] + LARGE[1] / 10) / max(f.bytes_per_second, 1) + f.seconds)
    nodes = [f for f in works if "hosts" in f.capabilities]
    return {
        "policies in the trainer's own process": _choice(inside, "vanilla"),
        f"{counted(workers, 'worker')} in other processes of this machine": _choice(local, "ipc"),
        "workers on several nodes": " or ".join(f.endpoint for f in nodes) or _none("nccl", "ray"),
    }


def _choice(finding: Finding | None, ours: str) -> str:
    if finding is None:
        return _none(ours)
    return f"{finding.endpoint} ({duration(finding.seconds)} a small push, {rate(finding.bytes_per_second)})"


def _none(*ours: str) -> str:
    """What to say where none of what was tried is fit; ``ours``: what would be."""
    installed = {record.name for record in available()}
    absent = [remedy(name) for name in ours if name not in installed]
    return "none of these" + (f": {' or '.join(absent)}" if absent else f"; {' or '.join(ours)} would be")


def _busy() -> str:
    """A warning where others use the machine; empty where not."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"The machine is busy (load {load:.1f}, cores {cores}): the figures say little." if load > cores else ""


def lines(findings: Sequence[Finding], told: dict[str, str]) -> list[str]:
    """The report as plain text."""
    rows = [("BACKEND", "WORKS", "SMALL PUSH", "LARGE PUSHES", "WORKERS")]
    for finding in findings:
        if finding.works:
            where = "processes" if finding.processes else "in the trainer's process"
            speed = (duration(finding.seconds), rate(finding.bytes_per_second))
            rows.append((finding.endpoint, "yes", *speed, f"{finding.workers} {where}"))
        else:
            rows.append((finding.endpoint, "no", "-", "-", "-"))
    text = list(aligned(rows))
    told_of = [f"{finding.endpoint}: {finding.reason}" for finding in findings if not finding.works]
    for finding in findings:
        for worker, notes in finding.notes.items():
            told_of += [f"{finding.endpoint}, {worker}: {key}: {value}" for key, value in notes.items()]
    text += [""] if told_of else []
    for line in told_of:
        text += textwrap.wrap(printable(line), MARGIN, subsequent_indent="    ")
    if not told:
        return text
    text += ["", "What to choose"]
    text += [f"  {line}" for line in aligned([(f"{place}:", choice) for place, choice in told.items()])]
    small, large = (f"{tensors} tensors of {size(nbytes)} in all" for tensors, nbytes in (SMALL, LARGE))
    text += ["", f"Small: {small}; large: {large}, counted once for all workers."]
    text += [
        "The quickest of some pushes, until every worker acted with it and had been looked at; after each push all"
    ]
    text += ["bytes of every worker had the trainer's digest."]
    return text


class _progress:
    """What is being tried, on standard error, where somebody looks."""

    def __init__(self, silent: bool) -> None:
        self._shows = sys.stderr.isatty() and not silent
        self._last = 0

    def __enter__(self) -> Callable[[str], None]:
        return self._step

    def _step(self, text: str) -> None:
        if self._shows:
            line = f"trying {printable(text)} ..."
            print(f"\r{line:<{self._last}}", end="", file=sys.stderr, flush=True)
            self._last = len(line)

    def __exit__(self, *_: object) -> None:
        if self._shows:
            print(f"\r{'':<{self._last}}\r", end="", file=sys.stderr, flush=True)
