"""Measure everything side by side: ``python benchmarks/run.py --only B1,B3 --repeat 7 --out benchmarks/results``.

Exit status: 0, every bar was reached; 1, some were not, a peer failed, or something was not measured.
What is measured and why: see README.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from bars import judge
from measure import Contest, NoRoomError, Plan
from report import machine, print_table, write
from rich.console import Console
from works import WORKS, work


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(WORKS), metavar="B1,B3,...")
    parser.add_argument("--repeat", type=int, help="turns of each contender (default: 7; with --quick, 2)")
    parser.add_argument("--quick", action="store_true", help="toy sizes: shows that everything works, and no figures")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: benchmarks/results")
    args = parser.parse_args()
    if unknown := set(args.only) - WORKS.keys():
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(WORKS)}")
    if args.repeat is not None and args.repeat < 1:
        parser.error("--repeat is at least 1")
    if args.quick and args.out is None:
        parser.error("--quick measures toys: say --out DIR, so that they do not take the place of figures")
    return args


def one_cluster() -> AbstractContextManager[None]:
    """One Ray for all works: starting it takes longer than measuring toys."""
    from ray_actors import cluster

    return cluster(256 << 20)


def main() -> int:
    args = arguments()
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    torch.set_num_threads(2)
    facts = machine()  # the load before the run itself is what tells a quiet machine
    plan = Plan(args.repeat or (2 if args.quick else 7), args.quick)
    contests: list[Contest] = []
    missing: list[str] = []
    with one_cluster() if plan.quick else nullcontext():
        for name in args.only:
            begun = time.perf_counter()
            run = work(name)
            try:
                for contest in run(plan):
                    contests.append(contest)
            except NoRoomError as error:
                missing.append(str(error))
            console.print(f"{name}: {(run.__doc__ or '').splitlines()[0]} {time.perf_counter() - begun:.0f} s")
    verdicts = judge(contests)
    print_table(verdicts, console, toys=plan.quick)
    paths = write(args.out or Path(__file__).parent / "results", contests, verdicts, facts, missing, toys=plan.quick)
    missed = [verdict for verdict in verdicts if verdict.reached is False]
    failed = sorted({f"{c.bench}, {c.work}: {name}: {why}" for c in contests for name, why in c.failed.items()})
    for line in (*(f"PEER FAILED: {text}" for text in failed), *(f"NOT MEASURED: {text}" for text in missing)):
        console.print(line)
    if plan.quick:
        console.print(f"Toys were measured: the table says nothing. Written: {', '.join(map(str, paths))}")
        return 1 if failed else 0
    console.print(f"{len(missed) or 'None'} of the bars not reached. Written: {', '.join(map(str, paths))}")
    return 1 if missed or failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
