"""B5, B8 and B10: what needs no worker processes, and what a worker does when there is nothing to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import states
import torch
from measure import PATIENCE, Contender, Contest, Plan, interleave
from ray_actors import RayWeightwire, cluster
from torchrl_peers import vanilla_updater
from workers import Weightwire, time_calls

from weightwire import WeightReceiver, WeightUpdater

__all__ = ["b5", "b8", "b10"]


def b5(plan: Plan) -> list[Contest]:
    """``pull()`` when there is nothing new, with every backend."""
    state = plan.state("small")
    module = states.build(state)
    contests = []
    with (
        WeightUpdater("vanilla", module) as updater,
        WeightReceiver(updater.endpoint, states.build(state)) as receiver,
    ):
        updater.push()
        receiver.pull()
        contests.append(micro("vanilla", [time_calls(receiver.pull) for _ in range(plan.repeat)]))
    for backend, endpoint in (("ipc", "ipc"), ("nccl", "nccl://127.0.0.1:0")):
        with ExitStack() as stack:
            local = Weightwire(stack, module, state, 1, "copy", endpoint)
            local.until().once()
            contests.append(micro(backend, local.crew.ask("call", "idles", plan.repeat)[0]))
    with ExitStack() as stack:
        stack.enter_context(cluster(256 << 20))
        actors = RayWeightwire(stack, module, state, 1, "copy")
        actors.until().once()
        contests.append(micro("ray", actors.crew.ask("idles", plan.repeat)[0]))
    return contests


def micro(work: str, seconds: list[float]) -> Contest:
    return Contest("B5", work, {"pull()": [1e6 * value for value in seconds]}, "us")


def b8(plan: Plan) -> list[Contest]:
    """vanilla, inline, against the copies that a user would write by hand, and TorchRL's updater."""
    contests = []
    for name, turns in (
        ("small", plan.turns(15)),
        ("medium", plan.repeat),
        ("large", plan.repeat),
        ("many", plan.repeat),
    ):
        with ExitStack() as stack:
            state = plan.state(name)
            module, target = states.build(state), states.build(state)
            updater = stack.enter_context(WeightUpdater("vanilla", module))
            stack.enter_context(WeightReceiver(updater.endpoint, target, inline=True))
            plain, loaded, updated = states.build(state), states.build(state), states.build(state)
            sources = [parameter.detach() for parameter in module.parameters()]
            targets = [parameter.detach() for parameter in plain.parameters()]
            peer = vanilla_updater(module, updated)
            contenders = {
                "vanilla inline": in_process(module, target, lambda u=updater: u.push(wait="applied")),
                "_foreach_copy_": in_process(module, plain, lambda s=sources, t=targets: torch._foreach_copy_(t, s)),
                "load_state_dict": in_process(
                    module, loaded, lambda m=module, t=loaded: t.load_state_dict(m.state_dict())
                ),
                "TorchRL Vanilla": in_process(module, updated, lambda p=peer: p.push_weights(), peer=True),
            }
            contests.append(interleave("B8", name, contenders, repeat=turns, warmup=1, scale=1e6, unit="us"))
    return contests


def in_process(
    source: torch.nn.Module, target: torch.nn.Module, copy: Callable[[], object], peer: bool = False
) -> Contender:
    """``copy`` brings ``source`` to ``target``; a look at every tensor of the target ends it."""
    look = states.Look(target)
    sentinel = 0.0

    def before() -> None:
        nonlocal sentinel
        sentinel += 1.0
        states.change(source, sentinel)
        look.before(sentinel)

    def run() -> None:
        copy()
        look(sentinel)

    def after() -> None:
        if states.digest(target) != states.digest(source):
            raise AssertionError("the target is not what the source is")

    return Contender(run, before, after, peer)


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


def b10(plan: Plan) -> list[Contest]:
    """What it costs to import, and to list the backends."""
    python = [sys.executable, "-c"]
    command = str(Path(sys.executable).with_name("weightwire"))
    contenders = {
        "import weightwire": Contender(lambda: run([*python, "import weightwire"])),
        "bare Python": Contender(lambda: run([*python, "pass"])),
        "weightwire backends": Contender(lambda: run([command, "backends"])),
    }
    times = interleave("B10", "start", contenders, repeat=plan.repeat, warmup=plan.warmup(3), scale=1e3, unit="ms")
    counted = {name: [float(run([*python, code + COUNT_HEAVY]))] for name, code in STARTS.items()}
    return [times, Contest("B10", "torch and ray imported", counted, "modules")]


def run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout
