"""Every benchmark by its name: B1 to B11 are those of benchmarks.md, C1 to C4 are curves and what training pays."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

from measure import Contest, Plan

__all__ = ["WORKS", "work"]

# What takes most memory comes first, before the others have left traces of theirs in this process.
WORKS = {
    "B6": "engines", "B7": "engines",
    "B1": "ipc", "B2": "ipc", "B3": "ipc", "B4": "ipc", "B5": "local", "B8": "local",
    "B9": "ipc", "B10": "local", "B11": "ipc", "C1": "curves", "C2": "curves", "C3": "curves", "C4": "curves",
}  # fmt: skip
"""In which module ``works_*`` each one is, as a function of the same name in lower case."""


def work(name: str) -> Callable[[Plan], Iterable[Contest]]:
    """The function that runs a benchmark. Imports no more than that one needs."""
    function: Callable[[Plan], Iterable[Contest]] = getattr(
        importlib.import_module(f"works_{WORKS[name]}"), name.lower()
    )
    return function
