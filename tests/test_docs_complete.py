"""Nothing is left out of the documentation: every hook, option, error, public name and command is there as it is."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import weightwire
from weightwire import errors, hookspecs
from weightwire.cli import COMMANDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

sys.path.insert(0, str(ROOT / "scripts"))
from docs_generated import BACKENDS, expand, options, signature_of  # noqa: E402


def page(name: str) -> str:
    return (DOCS / name).read_text()


def plain(text: str) -> str:
    """Without blanks, line ends and the comma before a closing bracket: how a signature is folded is no matter."""
    return re.sub(r"\s+", "", text).replace(",)", ")")


def table(text: str) -> dict[str, list[str]]:
    """First cell, without code marks -> the other cells, of all tables of a text."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| `")]
    return {
        name.strip(" `"): [cell.strip().replace("\\|", "|") for cell in cells[1:]]
        for cells in rows
        for name in cells[0].split(",")
    }


HOOKS = [
    f"weightwire.hookspecs:{spec.__name__}.{name}"
    for spec in (hookspecs.BackendSpec, hookspecs.ObserverSpec)
    for name in vars(spec)
    if name.startswith("weightwire_")
]


def test_there_are_hooks() -> None:
    assert len(HOOKS) >= 8


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_its_signature(hook: str) -> None:
    assert plain(signature_of(hook)) in plain(page("plugins/hooks.md"))


def test_every_field_of_backend_info_has_its_type_and_default() -> None:
    rows = table(page("plugins/hooks.md"))
    for field in dataclasses.fields(hookspecs.BackendInfo):
        if field.default is not dataclasses.MISSING:
            default = f" = {field.default!r}".replace("'", '"')
            expected = f"`{field.type}{default}`"
        else:
            expected = f"`{field.type}`" + (", empty" if field.default_factory is frozenset else "")
        assert rows[field.name][0] == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_option_has_its_type_and_default(backend: str) -> None:
    rows = table(page(f"backends/{backend}.md").partition("## Options")[2].partition("\n## ")[0])
    expected = options(backend)
    assert {name: cells[:2] for name, cells in rows.items()} == {name: [kind, value] for name, kind, value in expected}
    assert all(cells[2] for cells in rows.values()), "each has a meaning"


def test_every_capability_is_explained() -> None:
    assert table(page("choosing.md")).keys() >= hookspecs.CAPABILITIES


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_has_its_cause_and_remedy(name: str) -> None:
    found = re.search(
        rf"^##+ {name} {{ #{name.lower()} }}\n(.*?)(?=^##|\Z)", page("errors.md"), re.DOTALL | re.MULTILINE
    )
    assert found, f"docs/errors.md has no heading '### {name} {{ #{name.lower()} }}'"
    cause, remedy = found[1].partition("**Remedy.**")[::2]
    assert len(cause.partition("**Cause.**")[2]) > 40
    assert len(remedy) > 20


def test_no_error_is_made_up() -> None:
    headings = re.findall(r"^##+ (\w+(?:Error|Timeout)) ", page("errors.md"), re.MULTILINE)
    assert sorted(headings) == sorted(errors.__all__)


def test_every_public_name_is_in_the_reference() -> None:
    text = page("reference.md")
    asked = {
        (module, name)
        for arguments in re.findall(r"<!-- generated: reference (.+) -->$", text, re.MULTILINE)
        for module, *names in [arguments.split()]
        for name in names
    }
    here = {name for module, name in asked if module == "weightwire"} | set(re.findall(r"`(\w+)`", text))
    assert set(weightwire.__all__) - set(errors.__all__) - {"__version__"} <= here
    transport = {name for module, name in asked if module in ("weightwire", "weightwire.transport")}
    from weightwire import transport as contract

    assert set(contract.__all__) - transport <= {"NOW", "PHASES", "Event"}


def test_every_environment_variable_is_described() -> None:
    sources = [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    read = {name for path in sources for name in re.findall(r"\bWEIGHTWIRE_[A-Z]+\b", path.read_text())}
    assert read
    assert read <= table(page("reference.md")).keys()


def test_every_command_is_described() -> None:
    assert sorted(re.findall(r"^## `weightwire (\w+)", page("cli.md"), re.MULTILINE)) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_described(command: str) -> None:
    typer = pytest.importorskip("typer.main")
    from weightwire.cli.app import app

    root: Any = typer.get_command(app)
    text = page("cli.md").partition(f"## `weightwire {command}")[2].partition("\n## ")[0]
    flags = [flag for parameter in root.commands[command].params for flag in parameter.opts if flag.startswith("--")]
    assert [flag for flag in flags if f"`{flag}" not in text and flag != "--help"] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    """mkdocs looks at those of the pages."""
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text()):
        assert target.startswith("https://") or (ROOT / target).is_file(), f"{name}: {target}"


@pytest.mark.parametrize("end", ["WeightUpdater", "WeightReceiver", "WeightUpdater.push"])
def test_every_argument_is_in_the_readme(end: str) -> None:
    calls = re.findall(rf"`{end.rpartition('.')[2]}\((.*?)\)`", (ROOT / "README.md").read_text(), re.DOTALL)
    named = re.findall(r"\w+(?==)|^\w+|(?<=, )\w+", max(calls, key=len).replace("\n", " "))
    assert set(re.findall(r"(\w+): ", signature_of(f"weightwire:{end}"))) <= set(named)


def test_pages_ask_only_for_what_can_be_generated() -> None:
    for path in DOCS.rglob("*.md"):
        assert "<!-- generated:" not in expand(path.read_text()), path
