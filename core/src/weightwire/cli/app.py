"""The typer application. Each command lives in a module of its own, imported when the command runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

from weightwire.cli import COMMANDS
from weightwire.cli.text import complain, did_you_mean

__all__ = ["run"]

app = typer.Typer(
    name="weightwire",
    help="Weightwire moves the weights of a policy from the process that trains it to the processes that act with it.",
    epilog="Exit status: 0 fine, 1 what was checked is not as it should be, 2 wrong usage, 130 Ctrl-C. "
    "`weightwire COMMAND --help` says what that means for each, with examples.",
    no_args_is_help=True,
    rich_markup_mode=None,  # typer's rich help shows a flag as if it took a value: "--version <bool>"
    add_completion=False,
    pretty_exceptions_enable=False,
)
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit status."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        complain(
            f"there is no command {arguments[0]!r}.{did_you_mean(arguments[0], COMMANDS)}\n"
            f"Usage: weightwire COMMAND [ARGUMENTS]; the commands are {', '.join(COMMANDS)}. More: weightwire --help"
        )
        return 2
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


@app.command(short_help="List what is installed; --check opens it.")
def backends(
    named: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads it at run time
        typer.Argument(metavar="BACKEND", hidden=True),  # not among the arguments, which show a type of Python
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Open each backend in a process of its own; exit with 1 if one is broken.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """List the installed backends: name, distribution, version and summary. Imports none of them.

    With --check one or more can be named, by an installed name or as import:package.module: only these are opened then.

    \b
    Examples:
      weightwire backends
      weightwire backends --check
      weightwire backends --check ipc import:my_package.my_backend

    Exit status: 0 fine, 1 one of those checked is broken or unknown, 2 wrong usage.
    """
    from weightwire.cli.backends import run

    if named and not check:
        raise typer.BadParameter("backends are named to be checked: add --check")
    raise typer.Exit(run(named or (), check=check, as_json=json))


@app.command(short_help="Does each backend work here, how fast; which to choose.")
def doctor(
    endpoints: Annotated[Optional[list[str]], typer.Argument(metavar="ENDPOINT", hidden=True)] = None,  # noqa: UP045
    workers: Annotated[int, typer.Option(metavar="N", min=1, max=256, help="How many workers to try it with.")] = 2,
    json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Try each installed backend (or ENDPOINT...) here: does it work, why not, how fast, and which one to choose.

    Versions go to real worker processes and are verified there by digest, after every push. Takes some seconds a
    backend. Nothing is started for a backend: Ray needs a cluster that runs.

    \b
    Examples:
      weightwire doctor
      weightwire doctor ipc 'nccl?bucket=1MiB' --workers 8
      weightwire doctor 'ray?address=auto'
      weightwire doctor --json

    Exit status: 0 all that were named work (none named: at least one does), 1 not so, 2 wrong usage.
    """
    from weightwire.cli.doctor import run

    raise typer.Exit(run(endpoints or (), workers=workers, as_json=json))


@app.command(short_help="Every case that a backend has to pass.", context_settings=PASSED_ON)
def conformance(
    context: typer.Context,
    backend: Annotated[str, typer.Argument(help="An installed name, import:package.module, or an endpoint.")],
    soak: Annotated[bool, typer.Option("--soak", help="Long random histories too: minutes.")] = False,
) -> None:
    """Hold a backend against every case that one has to pass. All that follows is handed on to pytest.

    Modules of the current folder can be named. A case that needs a capability which the backend does not claim is
    skipped, with that as the reason (-rs). Where the plugin ships a suite of its own, because its places take more
    than a name, that one is run.

    \b
    Examples:
      weightwire conformance ipc
      weightwire conformance import:mine -x -k tensors
      weightwire conformance 'mine?allow_pickle=true' -rs --durations=5

    Exit status: 0 every case passed, 1 one failed, or the backend's own suite is broken; 2 the backend or an argument
    is not known, or no case was chosen; 130 Ctrl-C.
    """
    from weightwire.cli.conformance import run

    raise typer.Exit(run(backend, context.args, soak=soak))


@app.command(short_help="Write a complete backend plugin.")
def new(
    name: Annotated[str, typer.Argument(help="What comes before '://': lower-case letters, digits, hyphens.")],
    into: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FOLDER", help="Where to; new, or empty. Default: weightwire-NAME here."),
    ] = None,
) -> None:
    """Write a complete backend plugin, to be changed until it is your own.

    A pyproject.toml with the entry point, the module with both classes over a plain queue, the conformance test and a
    README. It passes `weightwire conformance NAME` as it is, once it is installed.

    \b
    Examples:
      weightwire new carrier
      weightwire new carrier --into ~/src/carrier

    Exit status: 0 written, 2 not, and then nothing is.
    """
    from weightwire.cli.new import run

    raise typer.Exit(run(name, into))


@app.command(short_help="Updaters and workers of this machine, live.")
def top(
    endpoint: Annotated[Optional[str], typer.Argument(metavar="ENDPOINT", hidden=True)] = None,  # noqa: UP045
    json: Annotated[bool, typer.Option("--json", help="Write JSON, once.")] = False,
    once: Annotated[
        bool, typer.Option("--once", help="One look as plain text, as where the output is no terminal.")
    ] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, max=60, help="From one look to the next.")] = 0.5,
) -> None:
    """Show the updaters of this machine (or those of ENDPOINT), live: workers, versions, lag, the last push, losses.

    Reads what each updater of yours says of itself, and touches no backend. A trainer that is to say nothing has
    WEIGHTWIRE_STATUS=off in its environment.

    \b
    Examples:
      weightwire top
      weightwire top ipc://policy
      weightwire top --json

    Exit status: 0 fine, 1 there is no such updater, 2 wrong usage.
    """
    from weightwire.cli.top import run

    raise typer.Exit(run(endpoint, as_json=json, once=once, every=every))


@app.command(short_help="Measure backends side by side, for your sizes.")
def bench(
    endpoints: Annotated[Optional[list[str]], typer.Argument(metavar="ENDPOINT", hidden=True)] = None,  # noqa: UP045
    size: Annotated[str, typer.Option(metavar="BYTES", help="Of all tensors: 64MB, 1GiB.")] = "10MB",
    tensors: Annotated[int, typer.Option(metavar="N", min=1, max=100_000, help="How many, equally large.")] = 20,
    workers: Annotated[int, typer.Option(metavar="N", min=1, max=256, help="How many, in processes of their own.")] = 2,
    apply: Annotated[str, typer.Option(metavar="copy|alias", help="How the workers apply.")] = "copy",
    against: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="torchrl", help="TorchRL's own schemes beside them."),
    ] = None,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="Turns of each that count.")] = 7,
    json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Measure ENDPOINT... (default: ipc) side by side, for sizes of yours: until every worker acts with a push.

    They take turns. All bytes of every worker are compared with the trainer's after each.

    \b
    Examples:
      weightwire bench ipc nccl --size 100MB --tensors 200 --workers 4
      weightwire bench ipc --apply alias --against torchrl --repeat 15

    Exit status: 0 all did the work, 1 one did not, 2 wrong usage.
    """
    from weightwire.cli.bench import run

    status = run(
        endpoints or ["ipc"],
        size_text=size,
        tensors=tensors,
        workers=workers,
        apply=apply,
        against=against or (),
        repeat=repeat,
        as_json=json,
    )
    raise typer.Exit(status)


@app.command(short_help="Learn CartPole over a backend.", context_settings=PASSED_ON, add_help_option=False)
def demo(context: typer.Context) -> None:
    """Learn CartPole with workers whose policies move only through Weightwire. `weightwire demo --help` has options.

    Needs gymnasium; --plot needs matplotlib. Exit status: 0 the goal was reached, 1 it was not, 2 an error, 130 Ctrl-C.
    """
    from importlib.util import find_spec

    if find_spec("gymnasium") is None:
        complain("the demo acts in environments of gymnasium, which is not installed: pip install gymnasium")
        raise typer.Exit(2)
    script = str(Path(__file__).with_name("cartpole") / "cartpole.py")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, script, *context.args])
