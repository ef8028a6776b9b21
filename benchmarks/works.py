"""The benchmarks of benchmarks.md, each a function that returns its contests. Other peers join as contenders."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import states
import torch
from floors import bare_crew, flat_copy
from measure import Contender, Contest, interleave
from workers import PATIENCE, Crew, WeightwireEnd, pss, time_calls, weightwire_crew

from weightwire import WeightReceiver, WeightUpdater

__all__ = ["WORKS"]

QUICK = 15  # small works take this many times as many turns


def b1(repeat: int) -> list[Contest]:
    """ipc, large, 4 workers, against one flat copy of the same bytes."""
    with ExitStack() as stack:
        module = states.build("large")
        contenders = {
            "ipc alias": weightwire_crew(stack, module, "large", 4, "alias"),
            "ipc copy": weightwire_crew(stack, module, "large", 4, "copy"),
            "copy_, 2 threads": flat_copy(states.nbytes(module)),
        }
        return [interleave("B1", "large, 4 workers", contenders, repeat=repeat)]


def b3(repeat: int) -> list[Contest]:
    """ipc, small, against the bare floor."""
    contests = []
    for workers in (1, 4):
        with ExitStack() as stack:
            module = states.build("small")
            contenders = {
                "ipc alias": weightwire_crew(stack, module, "small", workers, "alias"),
                "ipc copy": weightwire_crew(stack, module, "small", workers, "copy"),
                "bare floor": bare_crew(stack, module, "small", workers),
            }
            work = f"small, {workers} worker{'s' * (workers > 1)}"
            contests.append(interleave("B3", work, contenders, repeat=repeat * QUICK, warmup=20))
    return contests


def b4(repeat: int) -> list[Contest]:
    """ipc at many workers, against itself at one."""
    contests = []
    for state, workers in (("large", 8), ("medium", 16)):
        for apply in ("alias", "copy"):
            with ExitStack() as stack:
                module = states.build(state)
                contenders = {
                    f"ipc {apply}, {count}": weightwire_crew(stack, module, state, count, apply)
                    for count in (workers, 1)
                }
                contests.append(interleave("B4", f"{state}, {workers} workers, {apply}", contenders, repeat=repeat))
    return contests


def b5(repeat: int) -> list[Contest]:
    """``pull()`` when there is nothing new."""
    contests = []
    module = states.build("small")
    with (
        WeightUpdater("vanilla", module) as updater,
        WeightReceiver(updater.endpoint, states.build("small")) as receiver,
    ):
        updater.push()
        receiver.pull()
        contests.append(micro("B5", "vanilla", [time_calls(receiver.pull) for _ in range(repeat)]))
    with ExitStack() as stack:
        updater = stack.enter_context(WeightUpdater("ipc", module))
        crew = Crew(1, "small", WeightwireEnd)
        stack.callback(crew.close)
        crew.ask("open", updater.endpoint, "copy")
        states.change(module, 1.0)
        crew.take(1.0)
        updater.push(wait="applied", timeout=PATIENCE)
        crew.answers()
        (seconds,) = crew.ask("idle", repeat)
        contests.append(micro("B5", "ipc", seconds))
    return contests


def micro(bench: str, work: str, seconds: list[float]) -> Contest:
    return Contest(bench, work, {"pull()": [1e6 * value for value in seconds]}, "us")


def b8(repeat: int) -> list[Contest]:
    """vanilla, inline, against the copies that a user would write by hand."""
    contests = []
    for state, turns in (("small", repeat * QUICK), ("medium", repeat), ("large", repeat), ("many", repeat)):
        with ExitStack() as stack:
            module = states.build(state)
            updater = stack.enter_context(WeightUpdater("vanilla", module))
            target = states.build(state)
            stack.enter_context(WeightReceiver(updater.endpoint, target, inline=True))
            plain, loaded = states.build(state), states.build(state)
            sources = [parameter.detach() for parameter in module.parameters()]
            targets = [parameter.detach() for parameter in plain.parameters()]
            contenders = {
                "vanilla inline": in_process(module, target, lambda u=updater: u.push(wait="applied")),
                "_foreach_copy_": in_process(module, plain, lambda s=sources, t=targets: torch._foreach_copy_(t, s)),
                "load_state_dict": in_process(
                    module, loaded, lambda m=module, t=loaded: t.load_state_dict(m.state_dict())
                ),
            }
            contests.append(interleave("B8", state, contenders, repeat=turns, warmup=1, scale=1e6, unit="us"))
    return contests


def in_process(source: torch.nn.Module, target: torch.nn.Module, copy: Callable[[], object]) -> Contender:
    """``copy`` brings ``source`` to ``target``; a look at every tensor of the target ends it."""
    look = states.Look(target)
    sentinel = 0.0

    def before() -> None:
        nonlocal sentinel
        sentinel += 1.0
        states.change(source, sentinel)

    def run() -> None:
        copy()
        look(sentinel)

    def after() -> None:
        if states.digest(target) != states.digest(source):
            raise AssertionError("the target is not what the source is")

    return Contender(run, before, after)


def b9(repeat: int) -> list[Contest]:
    """Memory of trainer and workers together, beyond what they had before updater and receivers were made.

    Twice: with policies in the workers that have weights of their own before, as policies do, which give that memory
    back when the delivered memory takes its place; and with policies that were built but not written to, so that
    nothing is set off against what Weightwire takes.
    """
    return [*_b9(repeat, "large", fill=True), *_b9(repeat, "large, untouched policies", fill=False)]


def _b9(repeat: int, work: str, *, fill: bool) -> list[Contest]:
    workers, slots = 8, 2
    with ExitStack() as stack:
        module = states.build("large")
        crew = Crew(workers, "large", WeightwireEnd)
        stack.callback(crew.close)
        if fill:
            crew.ask("fill")
        before = pss() + sum(crew.ask("memory"))
        updater = stack.enter_context(WeightUpdater(f"ipc?slots={slots}", module, timeout=PATIENCE))

        def growth(first: int, count: int) -> list[float]:
            """Open the ends of workers ``first`` to ``count``; copies of the model in use after each of some pushes."""
            crew.ask("open", updater.endpoint, "alias", first=first, last=count)
            copies = []
            for turn in range(repeat + slots):
                sentinel = float(updater.version + 1)
                states.change(module, sentinel)
                crew.take(sentinel, last=count)
                updater.push(wait="applied")
                crew.answers(last=count)
                if turn >= slots:
                    copies.append((pss() + sum(crew.ask("memory")) - before) / states.nbytes(module))
            return copies

        alone, all_of_them = growth(0, 1), growth(1, workers)
        added = [100 * (many - one) / (workers - 1) for one, many in zip(alone, all_of_them, strict=True)]
    return [
        Contest("B9", f"{work}, {workers} workers, alias, in all", {"ipc": all_of_them}, "copies"),
        Contest("B9", f"{work}, alias, each further worker", {"ipc": added}, "% of a copy"),
    ]


STARTS = {
    "import weightwire": "import weightwire",
    "weightwire backends": """
import contextlib, sys
from weightwire.cli import main
sys.argv = ["weightwire", "backends"]
with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
    main()
""",
}
COUNT_HEAVY = "\nimport sys; print(sum(name in sys.modules for name in ('torch', 'ray')))"


def b10(repeat: int) -> list[Contest]:
    """What it costs to import, and to list the backends."""
    python = [sys.executable, "-c"]
    command = str(Path(sys.executable).with_name("weightwire"))
    contenders = {
        "import weightwire": Contender(lambda: run([*python, "import weightwire"])),
        "bare Python": Contender(lambda: run([*python, "pass"])),
        "weightwire backends": Contender(lambda: run([command, "backends"])),
    }
    times = interleave("B10", "start", contenders, repeat=repeat, scale=1e3, unit="ms")
    counted = {name: [float(run([*python, code + COUNT_HEAVY]))] for name, code in STARTS.items()}
    return [times, Contest("B10", "torch and ray imported", counted, "modules")]


def run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout


def b11(repeat: int) -> list[Contest]:
    """ipc, many: push and pull, for each tensor."""
    with ExitStack() as stack:
        module = states.build("many")
        scale = 1e6 / len(list(module.parameters()))
        contenders = {f"ipc {apply}": weightwire_crew(stack, module, "many", 1, apply) for apply in ("alias", "copy")}
        return [interleave("B11", "many, 1 worker", contenders, repeat=repeat, scale=scale, unit="us")]


WORKS: dict[str, Callable[[int], list[Contest]]] = {
    "B1": b1, "B3": b3, "B4": b4, "B5": b5, "B8": b8, "B9": b9, "B10": b10, "B11": b11,
}  # fmt: skip
