"""C1 to C4: what an update costs against size, against number of tensors, against workers; and what training pays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import states
import torch
from floors import flat_copy
from measure import Contender, Contest, Plan, interleave
from ray_actors import RayWeightwire, cluster
from workers import Weightwire
from works_local import in_process

from weightwire import WeightReceiver, WeightUpdater

__all__ = ["c1", "c2", "c3", "c4"]

GLOO = "nccl://127.0.0.1:0"


def vanilla(stack: ExitStack, module: torch.nn.Module, state: str) -> Contender:
    updater = stack.enter_context(WeightUpdater("vanilla", module))
    target = states.build(state)
    receiver = stack.enter_context(WeightReceiver(updater.endpoint, target))

    def push() -> None:
        updater.push()
        receiver.pull()

    return in_process(module, target, push)


def point(plan: Plan, bench: str, at: int, state: str, workers: int, backends: Sequence[str]) -> Contest:
    """One point of a curve: every backend, side by side, with crews of their own."""
    with ExitStack() as stack:
        module = states.build(state).requires_grad_(False)
        make: dict[str, Callable[[], Contender]] = {
            "ipc alias": lambda: Weightwire(stack, module, state, workers, "alias").until(),
            "ipc copy": lambda: Weightwire(stack, module, state, workers, "copy").until(),
            "nccl (Gloo) copy": lambda: Weightwire(stack, module, state, workers, "copy", GLOO).until(),
            "ray copy": lambda: RayWeightwire(stack, module, state, workers, "copy").until(),
            "vanilla copy": lambda: vanilla(stack, module, state),
            "one flat copy_": lambda: flat_copy(states.nbytes(module)),
        }
        # Among toys, one point is enough for ray, whose actors take seconds to start.
        names = [name for name in backends if not plan.quick or bench == "C1" or name != "ray copy"]
        contenders = {name: make[name]() for name in names}
        repeat, warmup = plan.repeat, plan.warmup(2)
        return interleave(bench, f"{at:,}", contenders, repeat=repeat, warmup=warmup, budget=20, at=float(at))


ALL = ("ipc alias", "ipc copy", "nccl (Gloo) copy", "ray copy", "vanilla copy", "one flat copy_")


def workers(plan: Plan) -> int:
    """Workers of the curves that do not count them."""
    return 1 if plan.quick else 2


def c1(plan: Plan) -> list[Contest]:
    """What an update costs against its size: 100 tensors, 2 workers."""
    sizes = [10_000] if plan.quick else [100_000, 1_000_000, 10_000_000, 100_000_000]
    with cluster(max(256 << 20, 4 * sizes[-1])):
        return [point(plan, "C1", size, states.evenly(100, size // 400), workers(plan), ALL) for size in sizes]


def c2(plan: Plan) -> list[Contest]:
    """What an update costs against the number of its tensors: 10 MB in all, 2 workers."""
    counts = [10] if plan.quick else [10, 100, 1_000, 10_000]
    numbers = 2_500 if plan.quick else 2_500_000
    with cluster(256 << 20):
        return [
            point(plan, "C2", count, states.evenly(count, numbers // count), workers(plan), ALL) for count in counts
        ]


def c3(plan: Plan) -> list[Contest]:
    """What an update costs against the number of workers: 105 MB."""
    counts = [1] if plan.quick else [1, 2, 4, 8]
    backends = ALL[:4]
    with cluster(max(256 << 20, 6 * states.nbytes(states.build(plan.state("medium"), fill=False)))):
        return [point(plan, "C3", count, plan.state("medium"), count, backends) for count in counts]


# -- what training pays ----------------------------------------------------------------------------------------------


@contextmanager
def demo(workers: int) -> Iterator[tuple[Any, Any, Any]]:
    """The demo's learner, updater and crew of processes that act, without its view and its end."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from cartpole_ppo import Learner
    from cartpole_trainer import Crew, part

    torch.manual_seed(0)
    learner = Learner()
    with WeightUpdater("ipc", learner.policy) as updater:
        crew = Crew(updater.endpoint, [f"worker-{index}" for index in range(workers)], 0)
        try:
            crew.start()
            yield learner, updater, crew
        finally:
            part(updater, crew)


def step(learner: Any, updater: Any, crew: Any, *, push: bool) -> None:
    """One turn of the demo's loop: a rollout of every worker, an update of the policy, and perhaps a push."""
    from cartpole_ppo import Rollout

    rollouts: list[Any] = []
    while len(rollouts) < max(1, crew.alive):
        if (rollout := crew.report().rollout) is not None:
            rollouts.append(rollout)
    learner.update(Rollout.join(rollouts), 0.5)
    if push:
        updater.push()


def c4(plan: Plan) -> list[Contest]:
    """What training pays: a step of the demo's trainer with a push after it, and without one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the demo has it
    try:
        with demo(plan.workers(2)) as (learner, updater, crew):
            updater.push()
            contenders = {
                name: Contender(partial(step, learner, updater, crew, push=push))
                for name, push in (("with a push", True), ("without", False))
            }
            work, warmup = "the demo, 2 workers", plan.warmup(5)
            timed = interleave("C4", work, contenders, repeat=plan.turns(10), warmup=warmup)
            rates = {name: [1 / seconds for seconds in series] for name, series in timed.series.items()}
            return [replace(timed, series=rates, unit="steps a second")]
    finally:
        torch.set_num_threads(threads)
