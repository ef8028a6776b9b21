"""Measure everything side by side: ``python benchmarks/run.py --only B1,B3 --repeat 7 --out benchmarks/results``.

Exit status: 0, every bar was reached; 1, some were not. What is measured and why: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from bars import judge
from measure import Contest
from report import machine, print_table, write
from rich.console import Console
from works import WORKS


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(WORKS), metavar="B1,B3,...")
    parser.add_argument("--repeat", type=int, default=7, help="turns of each contender (default: 7)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args()
    if unknown := set(args.only) - WORKS.keys():
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(WORKS)}")
    return args


def main() -> int:
    args = arguments()
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    torch.set_num_threads(2)
    facts = machine()  # the load before the run itself is what tells a quiet machine
    contests: list[Contest] = []
    for name in args.only:
        begun = time.perf_counter()
        contests += WORKS[name](args.repeat)
        console.print(f"{name}: {WORKS[name].__doc__.splitlines()[0]} {time.perf_counter() - begun:.0f} s")
    verdicts = judge(contests)
    print_table(verdicts, console)
    paths = write(args.out, contests, verdicts, facts)
    missed = [verdict for verdict in verdicts if verdict.reached is False]
    console.print(f"{len(missed) or 'None'} of the bars not reached. Written: {', '.join(map(str, paths))}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
