"""What the documentation does not type but takes from the code and from measurements.

A page asks for it with a line of its own, ``*Filled in by `make docs`.* <!-- generated: capabilities -->``, or with
arguments, ``... <!-- generated: source core/src/weightwire/transport.py choose -->``. :func:`expand` puts the text in
the place of the line; the tests read pages through it too, so that generated code is run like any other.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

__all__ = ["BACKENDS", "ROOT", "expand", "options", "signature_of"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BACKENDS = ("vanilla", "ipc", "ray", "nccl")
MARKER = re.compile(r"^\*Filled in by `make docs`\.\* <!-- generated: (.+?) -->$", re.MULTILINE)


def expand(text: str) -> str:
    """A page's Markdown, complete. Raises ``KeyError`` for a generator that there is not, ``ValueError`` where a line
    that asks is not as above."""

    def fill(found: re.Match[str]) -> str:
        name, *arguments = found[1].split()
        return GENERATORS[name](*arguments)

    page = MARKER.sub(fill, text)
    if "<!-- generated:" in page:
        raise ValueError(f"not filled in: {page[page.index('<!-- generated:') :].splitlines()[0]}")
    return page


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# -- from the plugins --------------------------------------------------------------------------------------------------


def capabilities() -> str:
    """What each backend says of itself: a row a capability, a column a backend."""
    from weightwire.endpoint import parse
    from weightwire.hookspecs import CAPABILITIES
    from weightwire.registry import open_backend

    infos = {name: open_backend(parse(name)).info for name in BACKENDS}
    rows = [["summary", *(info.summary for info in infos.values())]]
    rows += [
        [f"`{name}`", *("yes" if name in info.capabilities else "" for info in infos.values())]
        for name in sorted(CAPABILITIES)
    ]
    rows.append(["pickles", *(f"`{info.pickles}`" for info in infos.values())])
    rows.append(["location", *(info.location for info in infos.values())])
    return table(["", *(f"[`{name}`](backends/{name}.md)" for name in BACKENDS)], rows)


def options(backend: str) -> list[tuple[str, str, str]]:
    """Name, type and default of each option of a backend, as the pages write them."""
    import msgspec

    from weightwire.endpoint import parse
    from weightwire.registry import open_backend

    kind = open_backend(parse(backend)).info.options
    fields = msgspec.structs.fields(kind) if kind is not None else ()
    return [(field.encode_name, _kind(field.type), _default(field.default)) for field in fields]


def _kind(annotation: Any) -> str:
    from weightwire.endpoint import Size

    size = get_args(Size)[1]
    parts, metas = [annotation], []
    while parts[-1] is not None and (get_origin(parts[-1]) is Annotated or type(None) in get_args(parts[-1])):
        inner, *rest = (part for part in get_args(parts[-1]) if part is not type(None))
        metas += rest
        parts.append(inner)
    plain = parts[-1]
    if get_origin(plain) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(plain))
    names = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text"}
    words = ["size" if size in metas else names[plain]]
    words += [f"at least {meta.ge}" for meta in metas if getattr(meta, "ge", None) is not None]
    words += [f"like `{meta.pattern}`" for meta in metas if getattr(meta, "pattern", None)]
    words += ["not empty" for meta in metas if getattr(meta, "min_length", None)]
    return ", ".join(words)


def _default(value: Any) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value >= 1 << 10 and value % (1 << 10) == 0:
        return f"`{value >> 20}MiB`" if value % (1 << 20) == 0 else f"`{value >> 10}KiB`"
    return f"`{value}`"


# -- from the benchmarks -----------------------------------------------------------------------------------------------


def figures() -> str:
    """The verdicts of the last run that name a backend, shortened: what was measured, and against what."""
    rows = []
    for verdict in json.loads((RESULTS / "latest.json").read_text())["verdicts"]:
        bar = verdict["bar"]
        if {bar["measured"].split()[0], bar["work"].split()[0]}.isdisjoint(BACKENDS) or bar["bench"] == "B9":
            continue
        mine, other = verdict["measured"]["median"], verdict["against"]
        against = f"{bar['against']}: {_amount(other['median'], verdict['unit'])}" if other else ""
        ratio = f"{mine / other['median']:.3g}" if other else ""
        rows.append([bar["bench"], bar["work"], bar["measured"], _amount(mine, verdict["unit"]), against, ratio])
    return table(["", "work", "measured", "median", "against", "ratio"], rows)


def benchmarks() -> str:
    """The table as the run wrote it."""
    return (RESULTS / "latest.md").read_text().strip()


def profile() -> str:
    """Where the time of the small state goes, as `make bench` measured it."""
    return (RESULTS / "profile.md").read_text().strip()


def plots() -> str:
    """The plots that the run drew, whichever they are."""
    told = {
        "bars": "Each result as a part of what it may be: left of the line is reached",
        "times": "Every turn of every contender, one dot each",
        "curves": "What an update costs against size, number of tensors, and workers",
    }
    names = sorted(path.stem for path in RESULTS.glob("*.png"))
    return "\n\n".join(f"![{told.get(name, name)}](images/benchmarks/{name}.png)" for name in names)


def _amount(value: float, unit: str) -> str:
    scales = {"s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")), "us": ((1e6, "s"), (1e3, "ms"), (1.0, "us"))}
    for scale, name in scales.get(unit, ((1.0, unit),)):
        if value >= scale:
            return f"{value / scale:.3g} {name}"
    return f"{value:.3g} {unit}"


# -- from the code -----------------------------------------------------------------------------------------------------


def source(path: str, *names: str) -> str:
    """A block with the functions, classes and methods of a file that are named."""
    text = (ROOT / path).read_text()
    body = "\n\n\n".join(cut(text, name) for name in names)
    return f"```py\n{body}\n```"


def file(path: str, title: str) -> str:
    """A block with a file of the repository, under the name that a reader gives it."""
    language = {".py": "python", ".toml": "toml"}.get(Path(path).suffix, "text")
    body = (ROOT / path).read_text().strip("\n")
    return f'```{language} title="{title}"\n{body}\n```'


def cut(text: str, name: str) -> str:
    """The source of a function, or of a class or its method (``Class.method``), with the comments above it."""
    nodes: list[Any] = ast.parse(text).body
    for part in name.split("."):
        node = next(n for n in nodes if getattr(n, "name", "") == part)
        nodes = node.body
    lines = text.splitlines()
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    return textwrap.dedent("\n".join(lines[first : node.end_lineno]))


def signature_of(target: str) -> str:
    """``push(weights: Any = None, *, wait: str = 'staged') -> PushReport`` of ``weightwire:WeightUpdater.push``."""
    module, _, path = target.partition(":")
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    asked = inspect.signature(found)
    parts, named = [], False
    for parameter in asked.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            parts.append("*")
        named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        default = "" if parameter.default is parameter.empty else f" = {_value(parameter.default)}"
        text = f"{parameter.name}: {_annotation(parameter.annotation)}".removesuffix(": ")
        stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (parameter.kind is parameter.VAR_KEYWORD)
        parts.append(stars + text + default)
    gives = "" if isinstance(found, type) or asked.return_annotation is asked.empty else asked.return_annotation
    arrow = f" -> {_annotation(gives)}" if gives != "" else ""
    line = f"{path.rpartition('.')[2]}({', '.join(parts)}){arrow}"
    if len(line) <= 100:
        return line
    inner = "".join(f"    {part},\n" for part in parts)  # one a line
    return f"{path.rpartition('.')[2]}(\n{inner}){arrow}"


def _annotation(given: Any) -> str:
    if given is inspect.Parameter.empty:
        return ""
    text = getattr(given, "__forward_arg__", None) or (given if isinstance(given, str) else "")
    text = text or inspect.formatannotation(given)
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text)  # without modules


def _value(default: Any) -> str:
    if isinstance(default, (str, bytes)):
        return re.sub(r"^(b?)'(.*)'$", r'\1"\2"', repr(default))
    return repr(default) if default is None or isinstance(default, (bool, int, float, tuple)) else "..."


def reference(module: str, *names: str) -> str:
    """Signature and docstring of the public names of a module, or of those that are named."""
    home = import_module(module)
    return "\n\n".join(_described(f"{module}:{name}", getattr(home, name)) for name in names or home.__all__)


def _described(target: str, found: Any, level: int = 3) -> str:
    name = target.partition(":")[2]
    anchor = name.lower().replace(".", "-")
    parts = [f"{'#' * level} `{name}` {{ #{anchor} }}"]
    if callable(found):
        parts.append(f"```py\n{signature_of(target)}\n```")
    if found.__doc__:
        parts.append(prose(inspect.cleandoc(found.__doc__)))
    if isinstance(found, type):
        for member, value in vars(found).items():
            if member.startswith("_") or not (inspect.isfunction(value) or isinstance(value, (property, classmethod))):
                continue
            if isinstance(value, property):
                parts.append(f"{'#' * (level + 1)} `{name}.{member}`")
                parts.append(prose(inspect.cleandoc(value.__doc__ or "")))
            else:
                parts.append(_described(f"{target}.{member}", getattr(found, member), level + 1))
    return "\n\n".join(part for part in parts if part)


def prose(docstring: str) -> str:
    """A docstring as Markdown: roles and double backticks become code, sections become lists."""
    text = re.sub(r":[a-z]+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", docstring).replace("``", "`")
    out: list[str] = []
    section = False
    for line in text.splitlines():
        if re.fullmatch(r"(Args|Attributes|Raises|Returns):", line):
            section = True
            out += [f"**{line[:-1]}**", ""]
        elif section and re.match(r"    [\w, ]+: ", line):
            head, _, rest = line.strip().partition(": ")
            out.append(f"* `{head}`: {rest}")
        elif section and line.startswith("    "):
            out.append(f"  {line.strip()}")
        else:
            section = section and not line
            out.append(line)
    return "\n".join(out)


GENERATORS: dict[str, Callable[..., str]] = {
    "capabilities": capabilities,
    "figures": figures,
    "benchmarks": benchmarks,
    "profile": profile,
    "file": file,
    "source": source,
    "plots": plots,
    "reference": reference,
}
