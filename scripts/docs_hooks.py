"""What mkdocs calls while it builds the documentation (``hooks:`` in mkdocs.yml)."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import docs_features
import docs_generated

OUTSIDE = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=\"(?:https?:)?//[^\"]*\"", re.IGNORECASE)
"""What a browser would load from elsewhere. Links that a reader may follow are not among them."""

CELLS = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
"""Code in tables with a bar in it. Other readers of Markdown want that escaped; mkdocs would show the backslash."""


def on_files(files: Files, config: Any) -> Files:
    """Add the plots of the last benchmark run, and a page with the source of every test that a feature's row names."""
    for plot in sorted(docs_generated.RESULTS.glob("*.png")):
        files.append(File.generated(config, f"images/benchmarks/{plot.name}", abs_src_path=str(plot)))
    files.append(File.generated(config, docs_features.PAGE, content=docs_features.page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in what is generated; make links of the tests in the tables of features."""
    try:
        text = docs_generated.expand(markdown)
    except Exception as exc:
        raise PluginError(f"{page.file.src_uri}: {type(exc).__name__}: {exc}") from exc
    if page.file.src_uri == docs_features.TABLES.name:
        text = docs_features.link(text)
    return CELLS.sub(lambda found: found[0].replace("\\|", "|"), text)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that could not be read offline."""
    if found := OUTSIDE.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {found[0]}")
    return output
