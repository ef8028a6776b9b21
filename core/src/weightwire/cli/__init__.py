"""The ``weightwire`` command.

Listing the backends is to feel instant and must work without the ``cli`` extra, so it is dispatched before typer is
imported. Every other command is one of typer's, in :mod:`weightwire.cli.app`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["COMMANDS", "main"]

COMMANDS = ("backends", "doctor", "conformance", "new", "top", "bench", "demo")

USAGE = """\
usage: weightwire backends [--check [BACKEND...]] [--json]
       weightwire --version

  backends   list the installed backends; --check opens each, or those named, in a process of its own

Help and all other commands come with the extra: pip install "weightwire[cli]"
(in a checkout: pip install "./core[cli]")
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's) and give its exit status: 0 fine, 1 a check failed, 2 wrong usage,
    130 Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    named = [argument for argument in arguments[1:] if not argument.startswith("-")]
    flags = set(arguments[1:]).difference(named)
    if arguments[:1] == ["backends"] and flags <= {"--check", "--json"} and (not named or "--check" in flags):
        from weightwire.cli import backends

        return backends.run(named, check="--check" in flags, as_json="--json" in flags)
    if arguments == ["--version"]:
        import weightwire

        print(weightwire.__version__)
        return 0
    try:
        import typer  # noqa: F401
    except ImportError:
        helped = arguments in (["--help"], ["backends", "--help"])
        if arguments[:1] != ["backends"] and arguments[:1] in [[command] for command in COMMANDS]:
            print(f"{arguments[0]!r} needs the extra 'cli' of weightwire, which is not installed.\n", file=sys.stderr)
        print(USAGE, end="", file=sys.stdout if helped else sys.stderr)
        return 0 if helped else 2
    from weightwire.cli.app import run

    return run(arguments)
