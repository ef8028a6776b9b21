"""How the commands write: foreign text that cannot steer a terminal, aligned columns, readable figures."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["ago", "aligned", "complain", "counted", "did_you_mean", "duration", "printable", "rate", "size"]


def printable(text: str) -> str:
    """Metadata, names and errors are foreign text: nothing in them may steer the terminal or break a table."""
    return "".join(c if c.isprintable() else " " for c in text)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines with the cells of each column below each other."""
    clean = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
    for row in clean:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def complain(message: str) -> None:
    """A line on standard error, where errors belong."""
    print("\n".join(map(printable, f"weightwire: {message}".splitlines())), file=sys.stderr)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What was probably meant, as the end of a sentence; empty where nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=2)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def counted(number: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds < 1e3 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.0f} us"


def size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def rate(bytes_per_second: float) -> str:
    return f"{size(bytes_per_second)}/s"


def ago(seconds: float) -> str:
    if seconds < 1:
        return "now"
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"
