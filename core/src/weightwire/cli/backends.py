"""``weightwire backends``: what is installed, and with ``--check`` whether it (or what is named) opens."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

from weightwire.cli.text import aligned, printable
from weightwire.errors import WeightwireError
from weightwire.registry import BackendRecord, available, find, remedy

__all__ = ["open_in_child", "run"]

CHECK_SECONDS = 60.0
"""How long one plugin may take to import and describe itself."""

# The child resolves the plugin from the endpoint's text, on exactly the path on which it was discovered.
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from weightwire.cli.backends import open_in_child
sys.exit(open_in_child(sys.argv[2]))
"""


def run(named: Sequence[str] = (), *, check: bool, as_json: bool) -> int:
    """Print the backends, or only those named; the status is 1 if one of those checked is broken or unknown."""
    found = [_look_up(text) for text in named] if named else [(record, "") for record in available()]
    records = [record for record, _ in found]
    errors = [unknown or check_one(record) for record, unknown in found] if check else []
    if as_json:
        print(_json(records, errors if check else None))
    elif not records:
        print(f"No backends are installed. Try: {remedy('ipc')}")
    else:
        told = zip(found, errors)
        states = ["unknown" if unknown else "broken" if error else "ok" for (_, unknown), error in told]
        print(_table(records, states, errors))
    return int(any(errors))


def _table(records: Sequence[BackendRecord], states: Sequence[str], errors: Sequence[str]) -> str:
    rows = [["NAME", "DISTRIBUTION", "VERSION", "SUMMARY"]]
    rows += [[r.name, r.distribution, r.version, r.fault or r.summary] for r in records]
    for row, state in zip(rows, ["CHECK", *states] if states else ()):
        row.insert(3, state)
    lines = [*aligned(rows), *map(printable, filter(None, errors))]
    for name, times in Counter(record.name for record in records).items():
        if times > 1:
            lines.append(f"{name!r} is claimed by {times} distributions: write {name}@DISTRIBUTION to choose.")
    return "\n".join(lines)


def _json(records: Sequence[BackendRecord], errors: Sequence[str] | None) -> str:
    import json
    from dataclasses import asdict

    listed = [{key: value for key, value in asdict(record).items() if key != "kind"} for record in records]
    for entry, error in zip(listed, errors or (), strict=errors is not None):
        entry.update(ok=not error, error=error)
    return json.dumps(listed, indent=2)


def _look_up(text: str) -> tuple[BackendRecord, str]:
    """The backend that a name or an endpoint's text names, and why it cannot be found."""
    from weightwire.endpoint import parse

    try:
        return find(parse(text)), ""
    except WeightwireError as exc:
        return BackendRecord(text, "", "", "", ""), str(exc)


# -- check -------------------------------------------------------------------------------------------------------------


def check_one(record: BackendRecord) -> str:
    """Open one backend in a process of its own; the error, or nothing where it opens."""
    import json

    # Whether it may pickle is the user's to say where it is used; here it only has to open, which moves no byte.
    endpoint = record.name + (f"@{record.distribution}" if record.distribution else "") + "?allow_pickle=true"
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), endpoint]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHECK_SECONDS,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{record} did not open within {CHECK_SECONDS:g} s"
    if done.returncode == 0:
        return ""
    if done.returncode == 1 and done.stdout.strip():
        return done.stdout.strip()
    noise = done.stderr.strip().splitlines()[-1:]
    return f"{record}: its process ended with status {done.returncode}" + (f": {noise[0]}" if noise else "")


def open_in_child(endpoint: str) -> int:
    """Open the backend; what goes wrong is written to standard output, whatever the plugin itself prints elsewhere."""
    from weightwire.endpoint import parse
    from weightwire.registry import open_backend

    try:
        with contextlib.redirect_stdout(sys.stderr):
            open_backend(parse(endpoint))
    except WeightwireError as exc:
        print(exc)
        return 1
    return 0
