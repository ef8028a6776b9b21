"""B1 to B4, B9 and B11: ipc, against the floor, TorchRL's process collectors and itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import states
from floors import bare_crew, flat_copy
from measure import PATIENCE, Contender, Contest, Plan, interleave
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from torchrl_peers import scheme_crew
from workers import Crew, Weightwire, WeightwireEnd, pss

from weightwire import WeightUpdater

__all__ = ["b1", "b2", "b3", "b4", "b9", "b11"]


def both(stack: ExitStack, plan: Plan, state: str, workers: int) -> dict[str, Contender]:
    """ipc, aliased and copied."""
    module = states.build(plan.state(state))
    return {
        f"ipc {apply}": Weightwire(stack, module, plan.state(state), plan.workers(workers), apply).until()
        for apply in ("alias", "copy")
    }


def schemes(stack: ExitStack, plan: Plan, state: str, workers: int) -> dict[str, Contender]:
    """What TorchRL's process collectors do: the default, and the one for policies that cannot be shared."""
    kinds = {"TorchRL SharedMem": SharedMemWeightSyncScheme, "TorchRL MultiProcess": MultiProcessWeightSyncScheme}
    return {name: scheme_crew(stack, plan.state(state), plan.workers(workers), kind()) for name, kind in kinds.items()}


def b1(plan: Plan) -> list[Contest]:
    """ipc, large, 4 workers, against one flat copy of the same bytes."""
    with ExitStack() as stack:
        size = states.nbytes(states.build(plan.state("large"), fill=False))
        contenders = {**both(stack, plan, "large", 4), "copy_, 2 threads": flat_copy(size)}
        return [interleave("B1", "large, 4 workers", contenders, repeat=plan.repeat, warmup=plan.warmup(3))]


def b2(plan: Plan) -> Iterator[Contest]:
    """ipc, 4 workers, against TorchRL's schemes of the process collectors."""
    for state, gigabytes in (("medium", 3), ("large", 16)):
        work = f"{state}, 4 workers"
        plan.need(f"B2, {work}", gigabytes)
        with ExitStack() as stack:
            contenders = {**both(stack, plan, state, 4), **schemes(stack, plan, state, 4)}
            yield interleave("B2", work, contenders, repeat=plan.repeat, warmup=plan.warmup(2))


def b3(plan: Plan) -> list[Contest]:
    """ipc, small, against the bare floor and TorchRL's schemes."""
    contests = []
    for workers in (1, 4):
        with ExitStack() as stack:
            state = plan.state("small")
            contenders = {
                **both(stack, plan, "small", workers),
                "bare floor": bare_crew(stack, states.build(state), state, plan.workers(workers)),
                **schemes(stack, plan, "small", workers),
            }
            work = f"small, {workers} worker{'s' * (workers > 1)}"
            turns = plan.turns(15)
            contests.append(interleave("B3", work, contenders, repeat=turns, warmup=plan.warmup(20)))
    return contests


def b4(plan: Plan) -> list[Contest]:
    """ipc at many workers, against itself at one; and the bare floor likewise: what the processes alone cost."""
    contests = []
    for state, workers in (("large", 8), ("medium", 16)):
        for apply in ("alias", "copy"):
            plan.need("B4", 16)
            with ExitStack() as stack:
                module = states.build(plan.state(state))
                contenders = {
                    f"ipc {apply}, {count}": Weightwire(
                        stack, module, plan.state(state), plan.workers(count), apply
                    ).until()
                    for count in (workers, 1)
                }
                for count in (workers, 1) if apply == "alias" else ():
                    contenders[f"bare floor, {count}"] = bare_crew(
                        stack, module, plan.state(state), plan.workers(count), apply
                    )
                work = f"{state}, {workers} workers, {apply}"
                contests.append(interleave("B4", work, contenders, repeat=plan.repeat, warmup=plan.warmup(3)))
    return contests


def b9(plan: Plan) -> list[Contest]:
    """Memory of trainer and workers together, beyond what they had before updater and receivers were made.

    Twice: with policies in the workers that have weights of their own before, as policies do, which give that memory
    back when the delivered memory takes its place; and with policies that were built but not written to, so that
    nothing is set off against what Weightwire takes.
    """
    return [*_b9(plan, "large", fill=True), *_b9(plan, "large, untouched policies", fill=False)]


def _b9(plan: Plan, work: str, *, fill: bool) -> list[Contest]:
    workers, slots = plan.workers(8), 2
    with ExitStack() as stack:
        module = states.build(plan.state("large"))
        crew = Crew(workers, plan.state("large"), WeightwireEnd)
        stack.callback(crew.close)
        if fill:
            crew.ask("fill")
        before = pss() + sum(crew.ask("memory"))
        updater = stack.enter_context(WeightUpdater(f"ipc?slots={slots}", module, timeout=PATIENCE))

        def growth(first: int, count: int) -> list[float]:
            """Open the ends of workers ``first`` to ``count``; copies of the model in use after each of some pushes."""
            crew.ask("open", updater.endpoint, "alias", first=first, last=count)
            copies = []
            for turn in range(plan.repeat + slots):
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
        Contest("B9", f"{work}, 8 workers, alias, in all", {"ipc": all_of_them}, "copies"),
        Contest("B9", f"{work}, alias, each further worker", {"ipc": added}, "% of a copy"),
    ]


def b11(plan: Plan) -> list[Contest]:
    """ipc, many: push and pull, for each tensor."""
    with ExitStack() as stack:
        tensors = len(list(states.build(plan.state("many"), fill=False).parameters()))
        contenders = both(stack, plan, "many", 1)
        turns, warmup = plan.repeat, plan.warmup(3)
        return [
            interleave("B11", "many, 1 worker", contenders, repeat=turns, warmup=warmup, scale=1e6 / tensors, unit="us")
        ]
