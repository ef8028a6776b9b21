"""``weightwire top``: the updaters of this machine and their workers, from the status that each updater serves.

Touches no backend. In a terminal a live table; elsewhere one look as plain text, or as JSON.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weightwire import status
from weightwire.cli.text import ago, aligned, complain, counted, did_you_mean, duration, printable, rate, size
from weightwire.endpoint import parse
from weightwire.errors import EndpointError

if TYPE_CHECKING:
    from rich.console import Console, Group

__all__ = ["found", "run", "screen"]

WORKERS = ("WORKER", "HOST", "STATE", "VERSION", "LAG", "APPLIED IN", "NOTE")


def run(endpoint: str | None = None, *, as_json: bool, once: bool, every: float) -> int:
    """Show the updaters, or those of one endpoint; the status is 1 where there is none."""
    try:
        wanted = _place(endpoint) if endpoint else None
    except EndpointError as exc:
        complain(str(exc))
        return 2
    if not status.supported():
        complain("the status of updaters is served on Linux only")
        return 2
    updaters = found(wanted)
    if as_json:
        import json

        print(json.dumps(updaters, indent=2))
    elif not once and sys.stdout.isatty():
        _live(wanted, every)
    elif updaters:
        print("\n\n".join(_plain(updater) for updater in updaters))
    else:
        complain(_nobody(endpoint))
    return int(not updaters)


def _place(endpoint: str) -> tuple[str, str]:
    parsed = parse(endpoint)
    return parsed.backend, parsed.location


def found(wanted: tuple[str, str] | None = None) -> list[dict[str, Any]]:
    """What each updater says of itself, with ``pid`` and ``host`` of its process; and processes with a ``fault``."""
    updaters = []
    for document in status.ask():
        process = {"pid": document["pid"], "host": document.get("host", "")}
        if "fault" in document and wanted is None:
            updaters.append({**process, "fault": document["fault"]})
        for updater in document["updaters"]:
            here = _place(updater["endpoint"])
            if wanted is None or here == wanted or (not wanted[1] and here[0] == wanted[0]):
                age = document["time"] - updater["last_push"]["time"] if updater["last_push"] else None
                updaters.append({**process, **updater, "seconds_since_push": age})
    return updaters


def _nobody(endpoint: str | None) -> str:
    said = (
        "no updater on this machine (of this user). One is listed from its constructor to its close(), unless its "
        "process has WEIGHTWIRE_STATUS=off."
    )
    if endpoint:
        updaters = found()
        others = sorted({updater["endpoint"] for updater in updaters if "endpoint" in updater})
        there = f"there: {', '.join(others)}" if others else "there is none at all"
        said = f"no updater of {endpoint} on this machine (of this user); {there}.{did_you_mean(endpoint, others)}"
        for updater in updaters:
            if "fault" in updater:
                said += f" Process {updater['pid']} may have it: {updater['fault']}."
    if users := status.strangers():
        said += f" Others have updaters here (user id {', '.join(map(str, users))}), of which only they are told."
    return said


# -- what is shown of one --------------------------------------------------------------------------------------------


def _head(updater: dict[str, Any]) -> str:
    workers, pushing = counted(len(updater["workers"]), "worker"), "   pushing" if updater["pushing"] else ""
    return (
        f"{updater['endpoint']}   version {updater['version']}   {workers}   "
        f"{rate(updater['bytes_per_second'])}   process {updater['pid']}{pushing}"
    )


def _push(updater: dict[str, Any]) -> str:
    push = updater["last_push"]
    if push is None:
        return "no push yet"
    return (
        f"last push: version {push['version']}, {ago(updater['seconds_since_push'])}, "
        f"{counted(push['tensors'], 'tensor')}, {size(push['nbytes'])} in {duration(sum(push['seconds'].values()))}"
    )


def _phases(updater: dict[str, Any]) -> list[tuple[str, str]]:
    push = updater["last_push"] or {"seconds": {}}
    return [(phase, duration(seconds)) for phase, seconds in push["seconds"].items()]


def _rows(updater: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for worker in updater["workers"]:
        receipt = worker["receipt"]
        rows.append(
            (
                worker["name"],
                worker["host"],
                worker["state"],
                str(worker["version"] or "-"),
                "-" if worker["lag"] is None else str(worker["lag"]),
                duration(sum(receipt["seconds"].values())) if receipt else "-",
                worker["error"] or "; ".join(f"{key}: {value}" for key, value in worker["notes"].items()),
            )
        )
    return rows


def _losses(updater: dict[str, Any]) -> str:
    if not updater["losses"]:
        return ""
    last = updater["recent_losses"][-1]
    return f"losses: {updater['losses']}, the last one {last['worker']}: {last['reason'] or 'gone'}"


def _plain(updater: dict[str, Any]) -> str:
    if "fault" in updater:
        return f"process {updater['pid']}: {printable(updater['fault'])}"
    phases = "  ".join(f"{phase} {took}" for phase, took in _phases(updater))
    lines = [_head(updater), f"  {_push(updater)}" + (f": {phases}" if phases else "")]
    if updater["workers"]:
        lines += [f"  {line}" for line in aligned([WORKERS, *_rows(updater)])]
    if losses := _losses(updater):
        lines.append(f"  {losses}")
    return "\n".join(map(printable, lines))


# -- live ------------------------------------------------------------------------------------------------------------


def _live(wanted: tuple[str, str] | None, every: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        try:
            while True:
                live.update(screen(found(wanted), console), refresh=True)
                time.sleep(every)
        except KeyboardInterrupt:
            pass


def screen(updaters: Sequence[dict[str, Any]], console: Console) -> Group:
    """What a terminal shows: for each updater its workers, and where its last push spent the time."""
    from rich.console import Group
    from rich.text import Text

    count = counted(sum("endpoint" in updater for updater in updaters), "updater")
    told = Text(f"{time.strftime('%H:%M:%S')}   {count} on this machine   Ctrl-C ends", "dim")
    if not updaters:
        return Group(told, Text("none yet; waiting for one"))
    return Group(told, *(part for updater in updaters for part in _updater(updater)))


def _updater(updater: dict[str, Any]) -> list[Any]:
    from rich.table import Table
    from rich.text import Text

    if "fault" in updater:
        return [Text(""), Text(printable(f"process {updater['pid']}: {updater['fault']}"), "red")]
    rows = _rows(updater)
    columns = WORKERS if any(row[-1] for row in rows) else WORKERS[:-1]  # the last one is for what is wrong
    workers = Table()
    for column in columns:
        numbers = column in ("VERSION", "LAG", "APPLIED IN")
        workers.add_column(column.lower(), justify="right" if numbers else "left")
    for row in rows:
        cells = [Text(printable(cell)) for cell in row[: len(columns)]]
        cells[2].stylize({"acting": "green", "joined": "yellow"}.get(row[2], "red"))
        if row[4] not in ("0", "-"):
            cells[4].stylize("yellow")
        workers.add_row(*cells)
    phases = Table()
    for phase, _ in _phases(updater):
        phases.add_column(phase, justify="right")
    phases.add_row(*(took for _, took in _phases(updater)))
    parts: list[Any] = [Text(""), Text(printable(_head(updater)), "bold")]
    parts += [workers] if rows else []
    parts += [Text(_push(updater))] + ([phases] if _phases(updater) else [])
    if losses := _losses(updater):
        parts.append(Text(printable(losses), "red"))
    return parts
