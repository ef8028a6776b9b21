"""The typer application. Each command lives in a module of its own, imported when the command runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

__all__ = ["run"]

app = typer.Typer(
    name="weightwire",
    help="Weightwire moves the weights of a policy from the process that trains it to the processes that act with it.",
    epilog="Exit status: 0 fine, 1 a check failed, 2 wrong usage.",
    no_args_is_help=True,
    rich_markup_mode=None,  # typer's rich help shows a flag as if it took a value: "--version <bool>"
    add_completion=False,
    pretty_exceptions_enable=False,
)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit status."""
    try:
        app(args=list(arguments), prog_name="weightwire")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    return 0


def _version(wanted: bool) -> None:
    if wanted:
        import weightwire

        typer.echo(weightwire.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # A callback keeps typer from collapsing the application into its only command.
    del version


@app.command()
def backends(
    named: Annotated[
        list[str] | None,
        typer.Argument(metavar="BACKEND", hidden=True),  # not among the arguments, which show a type of Python
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Open each backend in a process of its own; exit with 1 if one is broken.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """List the installed backends: name, distribution, version and summary. Imports none of them.

    With --check one or more can be named, by an installed name or as import:package.module: only these are opened then.
    """
    from weightwire.cli.backends import run

    if named and not check:
        raise typer.BadParameter("backends are named to be checked: add --check")
    raise typer.Exit(run(named or (), check=check, as_json=json))
