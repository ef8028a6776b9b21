"""Where the time of a bar that is short goes: ``python benchmarks/breakdown.py --out benchmarks/results``.

Push and pull of the small state (B3, B8) and, aliased, of the medium one (B2, B4) in one process, step by step, in CPU
time of the thread: what another process adds to it is the waking of sleepers and caches that are cold. Each step is
timed around the calls of the real thing, hot (again and again) and cold (after a sweep over more memory than the caches
hold). Then pushes over ray and nccl (B6, B7), beside what the engines take for the same bytes
(``breakdown_engines.py``). Writes ``profile.md``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import states
import torch
from breakdown_engines import engines

import weightwire.receiver
from weightwire import WeightReceiver, WeightUpdater

TURNS, WARM = 200, 30
COMMITS = {"copy": "the fused copy", "alias": "point the tensors at their new memory"}
WORKS = (
    ("vanilla", "small", "copy"),
    ("ipc", "small", "copy"),
    ("vanilla", "medium", "copy"),
    ("ipc", "medium", "alias"),
)


class Steps:
    """CPU seconds of the calls of some methods, by step, in each turn."""

    def __init__(self) -> None:
        self.turns: list[dict[str, float]] = []

    def time(self, owner: Any, method: str, step: str) -> None:
        call = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            begun = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                self.book(step, time.thread_time() - begun)

        setattr(owner, method, timed)

    def book(self, step: str, seconds: float) -> None:
        turn = self.turns[-1]
        turn[step] = turn.get(step, 0.0) + seconds

    def run(self, step: str, call: Callable[[], object]) -> None:
        begun = time.thread_time()
        call()
        self.book(step, time.thread_time() - begun)

    def medians(self) -> dict[str, float]:
        names = dict.fromkeys(name for turn in self.turns for name in turn)
        return {name: statistics.median(turn.get(name, 0.0) for turn in self.turns) for name in names}


def profile(backend: str, state: str, apply: str, *, cold: bool) -> dict[str, float]:
    """Seconds by step of a push, and of a pull where the receiver is not in the trainer's thread."""
    sweep = torch.zeros(64 * 2**20, dtype=torch.uint8)
    steps = Steps()
    inline = backend == "vanilla"
    with ExitStack() as stack:
        module, target = states.build(state), states.build(state)
        updater = stack.enter_context(WeightUpdater(backend, module))
        receiver = stack.enter_context(WeightReceiver(updater.endpoint, target, apply=apply, inline=inline))
        commit = weightwire.receiver.commit
        stack.callback(setattr, weightwire.receiver, "commit", commit)
        steps.time(updater._source, "extract", "push: extract (walk the module, see that nothing has changed)")
        steps.time(updater, "_encode", "push: encode (preflight, header)")
        steps.time(updater._sender, "stage", "push: stage (all of the backend, packing in it)")
        steps.time(updater, "_listen", "push: listen (events of the workers)")
        steps.time(receiver._receiver, "poll", "pull: poll (news, header, lease)")
        steps.time(receiver, "_prepare", "pull: prepare (walk the policy, see that nothing has changed)")
        steps.time(weightwire.receiver, "commit", f"pull: commit ({COMMITS[apply]})")
        steps.time(receiver._receiver, "report", "pull: report")
        if apply == "alias":
            steps.time(receiver._receiver._loans, "settle", "pull: settle (see that nobody uses the former memory)")
        for turn in range(TURNS + WARM):
            if turn == WARM:
                steps.turns.clear()
            steps.turns.append({})
            if cold:
                sweep.add_(1)
            steps.run("push, in all", partial(updater.push, wait="none"))
            if not inline:
                steps.run("pull, in all", receiver.pull)
    return steps.medians()


def table() -> str:
    lines = [
        "Microseconds of CPU in the thread, medians. `push: stage` of `vanilla` has the pull within it.",
        "",
        "| backend, state | step | hot | cold |",
        "|---|---|---|---|",
    ]
    for backend, state, apply in WORKS:
        hot, cold = (profile(backend, state, apply, cold=cold) for cold in (False, True))
        work = f"{backend}, {state}" + ", alias" * (apply == "alias")
        for step in sorted(hot, key=lambda name: ("in all" not in name, -cold[name])):
            lines.append(f"| {work} | {step} | {1e6 * hot[step]:.1f} | {1e6 * cold[step]:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    ends = table()
    torch.set_num_threads(2)  # as in the benchmarks
    (args.out / "profile.md").write_text(f"{ends}\n{engines()}")
    print((args.out / "profile.md").read_text())


if __name__ == "__main__":
    main()
