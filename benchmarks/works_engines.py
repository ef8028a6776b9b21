"""B6 and B7: ray and nccl, against the engines that they use, used raw, and TorchRL's schemes over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import states
from group_crew import group_crew
from measure import Contest, Plan, interleave
from ray_actors import RayWeightwire, cluster
from ray_peers import actor_crew

__all__ = ["b6", "b7"]


def b6(plan: Plan) -> list[Contest]:
    """ray, large, 4 actors: against one raw put, against putting the state_dict, and against TorchRL's scheme."""
    work = "large, 4 actors, alias"
    plan.need(f"B6, {work}", 21.5)
    state, workers = plan.state("large"), plan.workers(4)
    module = states.build(state).requires_grad_(False)
    with ExitStack() as stack:
        stack.enter_context(cluster(max(256 << 20, 6 * states.nbytes(module))))
        contenders = {
            "ray alias": RayWeightwire(stack, module, state, workers, "alias").until(),
            **actor_crew(stack, module, state, workers),
        }
        return [interleave("B6", work, contenders, repeat=plan.repeat, warmup=plan.warmup(1), budget=150)]


def b7(plan: Plan) -> Iterator[Contest]:
    """nccl over Gloo: against pack, one flat broadcast and unpack, and against TorchRL's scheme."""
    for name, workers, gigabytes in (("medium", 1, 1.5), ("medium", 4, 3), ("large", 1, 7.5), ("large", 4, 17.5)):
        work = f"{name}, {workers} worker{'s' * (workers > 1)}"
        plan.need(f"B7, {work}", gigabytes)
        with ExitStack() as stack:
            contenders = group_crew(stack, plan.state(name), plan.workers(workers))
            yield interleave("B7", work, contenders, repeat=plan.repeat, warmup=plan.warmup(1))
