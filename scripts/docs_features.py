"""The tables of features (docs/moving.md): which test proves each row, and where its source is shown.

The last column of a table names tests as pytest does (``tests/test_features.py::test_it``), each in a code span. A test
of the conformance kit is named where a backend runs it: ``plugins/ipc/tests/test_conformance.py::TestIpc::test_it``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from docs_generated import ROOT

__all__ = ["OPEN", "PAGE", "TABLES", "Row", "link", "page", "rows", "source_of"]

TABLES = ROOT / "docs" / "moving.md"
PAGE = "feature-tests.md"
NODE = re.compile(r"`([\w/.-]+\.py::[\w:]+)`")
OPEN = "not built yet"
"""What a row says in place of a test while what it promises is not there."""
SUITES = ROOT / "core" / "src" / "weightwire" / "testing" / "suites"


class Row(NamedTuple):
    table: str  # the heading above it
    feature: str
    tests: tuple[str, ...]
    open: bool


def rows(text: str | None = None) -> Iterator[Row]:
    """The rows of all tables whose last column is headed ``proved by``."""
    heading, inside = "", False
    for line in (TABLES.read_text() if text is None else text).splitlines():
        if line.startswith("#"):
            heading = line.strip("# ")
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if not line.startswith("|"):
            inside = False
        elif cells[-1] == "proved by":
            inside = True
        elif inside and not set(line) <= set("|-: "):
            yield Row(heading, cells[0], tuple(NODE.findall(cells[-1])), OPEN in cells[-1])


@cache
def _functions(path: Path) -> dict[str, str]:
    """Name (``Class::test`` or ``test``) -> source, of a file; a class stands for itself."""
    text = path.read_text()
    lines = text.splitlines()
    found: dict[str, str] = {}

    def add(node: ast.stmt, name: str) -> None:
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        found[name] = "\n".join(line[node.col_offset :] for line in lines[first : node.end_lineno])

    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            add(node, node.name)
        elif isinstance(node, ast.ClassDef):
            add(node, node.name)
            for inner in node.body:
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    add(inner, f"{node.name}::{inner.name}")
    return found


def source_of(node: str) -> str:
    """The source of a test. Raises ``LookupError`` where there is none of that name."""
    path, *names = node.split("::")
    file = ROOT / path
    if not file.is_file():
        raise LookupError(f"{node}: there is no file {path}")
    there = _functions(file)
    if "::".join(names) in there:
        return there["::".join(names)]
    if len(names) == 2 and "BackendSuite" in there.get(names[0], ""):
        for suite in sorted(SUITES.glob("*.py")):
            for name, text in _functions(suite).items():
                if name.endswith(f"::{names[1]}"):
                    return text
    raise LookupError(f"{node}: {path} has no such test")


def anchor(node: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", node.lower())


def link(text: str) -> str:
    """Make a link of each test in the tables, to where its source is shown."""
    return NODE.sub(lambda found: f"[`{found[1].rpartition('::')[2]}`]({PAGE}#{anchor(found[1])})", text)


def page() -> str:
    """A page with the source of every test that is named."""
    named = dict.fromkeys(node for row in rows() for node in row.tests)
    parts = [
        "# The tests behind the tables\n\n"
        "Each row of the tables in [Moving over](moving.md) names the tests that prove it. Here they are, as "
        "`make test` runs them, or `make soak` those that are marked so. A test of the conformance kit runs over every "
        "backend; one of them is named."
    ]
    for node in named:
        heading = f"## {node.rpartition('::')[2]} {{ #{anchor(node)} }}"
        parts.append(f"{heading}\n\n`{node}`\n\n```python\n{source_of(node)}\n```")
    return "\n\n".join(parts) + "\n"
