"""Learn CartPole with a trainer and several workers whose policies move only through Weightwire.

    python examples/cartpole.py
    python examples/cartpole.py --workers 4 --plot cartpole.png
    python examples/cartpole.py --backend vanilla        # the workers are threads of this process

This file is the command line. The trainer is in ``cartpole_trainer.py``, where Weightwire's part of it is three lines
(look for ``updater``), the worker in ``cartpole_worker.py`` (look for ``receiver``); ``cartpole_ppo.py`` is the
learning, ``cartpole_view.py`` the table, and ``cartpole_engine.py`` starts Ray where the backend is ``ray``.

Exit status: 0, the goal was reached; 1, it was not; 2, an error; 130, Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path

IMAGES = (".png", ".pdf", ".svg")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ipc", metavar="ENDPOINT", help="any endpoint (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="how many (default: %(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="to learn for, at most (default: %(default)s); counted from the first experience of a worker on, so that "
        "neither starting nor the greedy episodes at the end are in it",
    )
    parser.add_argument("--goal", type=float, default=400.0, help="mean greedy return to reach (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="IMAGE", help="draw return, lag and push time over the run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.workers < 1 or not args.seconds > 0:
        parser.error("at least one worker and a time above 0, please")
    if args.plot and (fault := unplottable(args.plot)):
        parser.error(f"--plot {args.plot}: {fault}")
    return args


def unplottable(path: Path) -> str:
    """Why no plot can be written there, known before a minute of learning is spent on it; empty where one can."""
    if path.suffix.lower() not in IMAGES:
        return f"the name of the image must end in one of {', '.join(IMAGES)}"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        return "it cannot be written"
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is needed: pip install matplotlib"
    return ""


def leave_at_once(*_: object) -> None:
    os.write(sys.stderr.fileno(), b"\nInterrupted.\n")
    os._exit(130)


def main() -> int:
    args = arguments()
    # The imports take seconds. Until they are done there is nothing to tidy up, and a KeyboardInterrupt may come out
    # of the depths of any of them, as any other error.
    signal.signal(signal.SIGINT, leave_at_once)
    from cartpole_trainer import run

    from weightwire import WeightwireError

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return run(args)
    except KeyboardInterrupt:
        print("\nInterrupted; the workers have ended.", file=sys.stderr, flush=True)
        if threading.active_count() > 1:
            # A worker that is a thread and has not joined is amid its imports, and cannot be ended: they would go on in
            # an interpreter that is being taken down, which aborts the process.
            os._exit(130)
        return 130
    except (WeightwireError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
