"""A worker under orders: ``pull`` on a line of its input, the version that it acts with on a line of its output.

python worker.py ENDPOINT NAME [brittle]
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from weightwire import ApplyError, WeightReceiver


def fail(tensors: Any) -> None:
    raise RuntimeError("a target that takes nothing")


def main(endpoint: str, name: str, kind: str = "") -> None:
    target = fail if kind == "brittle" else None
    with WeightReceiver(endpoint, target, worker=name, observers=["prometheus"], timeout=30.0) as receiver:
        for _ in sys.stdin:
            with contextlib.suppress(ApplyError):
                receiver.pull()
            print(receiver.version, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
