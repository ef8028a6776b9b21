"""Where the time of a push over ray and nccl goes (B6, B7), beside the raw engine's price for the same bytes: phases of
the trainer and of the workers, parts of ``stage``, and the CPU time of every process. For ``breakdown.py``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import psutil
import ray
import states
import torch
from floors import views, walk
from group_crew import group_crew
from measure import FEWEST, PATIENCE, Contender, NoRoomError, Plan
from ray_actors import RayWeightwire, cluster

from weightwire.report import PushReport
from weightwire.weights.payload import Payload

__all__ = ["engines"]

TURNS, WARM = 15, 2
BUDGET = 40.0
"""Seconds of one work, after which no turn is begun any more, except for the first few."""
Processes = Mapping[str, Sequence[psutil.Process]]
CORES = len(psutil.Process().cpu_affinity())


@dataclass
class Turn:
    """Seconds: of the whole, by step, and of CPU by kind of process."""

    wall: float
    steps: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)


def cpu_of(processes: Processes) -> dict[str, float]:
    return {kind: sum(sum(process.cpu_times()[:2]) for process in some) for kind, some in processes.items()}


class Inside:
    """Wall seconds of the calls of some methods within the push, from now on."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.steps: dict[str, float] = {}

    def time(self, owner: Any, method: str, step: str) -> None:
        call = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.steps[step] = self.steps.get(step, 0.0) + time.perf_counter() - begun

        setattr(owner, method, timed)
        self._stack.callback(setattr, owner, method, call)


def take_turn(contender: Contender, processes: Processes, inside: Inside) -> Turn:
    """One turn; what a push reports of itself and of its workers is among the steps."""
    contender.before()
    inside.steps = {}
    before, begun = cpu_of(processes), time.perf_counter()
    result = contender.run()
    turn = Turn(time.perf_counter() - begun)
    turn.cpu = {kind: seconds - before[kind] for kind, seconds in cpu_of(processes).items()}
    if isinstance(result, PushReport):
        turn.steps = {f"trainer: {phase}": seconds for phase, seconds in result.seconds.items()}
        turn.steps |= inside.steps
        for phase in ("verify", "commit", "after-hooks"):
            each = [receipt.seconds.get(phase, 0.0) for receipt in result.receipts.values()]
            turn.steps[f"a worker: {phase}"] = statistics.median(each)
    contender.after()
    return turn


def rows(work: str, contenders: Mapping[str, Contender], processes: Processes, inside: Inside) -> Iterator[str]:
    """Lines of the table. Contenders take turns; the first is ours, the others are floors without Weightwire."""
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    started = time.perf_counter()
    for number in range(-WARM, TURNS):
        if number >= FEWEST and time.perf_counter() - started > BUDGET:
            break
        for name, contender in contenders.items():
            turn = take_turn(contender, processes, inside)
            if number >= 0:
                turns[name].append(turn)
    mine = next(iter(contenders))
    for name, taken in turns.items():
        wall = statistics.median(turn.wall for turn in taken)
        cpu = {kind: statistics.mean(turn.cpu[kind] for turn in taken) for kind in processes}
        times = statistics.median(ours.wall / turn.wall for ours, turn in zip(turns[mine], taken, strict=True))
        spent = " + ".join(f"{1e3 * seconds:.0f} {kind}" for kind, seconds in cpu.items() if seconds >= 5e-4)
        used = statistics.mean(sum(turn.cpu.values()) / turn.wall for turn in taken) / CORES
        ratio = "" if name == mine else f"; the push takes {times:.2f} times that"
        yield f"| {work} | **{name}**{ratio} | {1e3 * wall:.1f} | {spent} | {max(0.0, 1 - used):.0%} |"
        for step in dict.fromkeys(step for turn in taken for step in turn.steps):
            seconds = statistics.median(turn.steps.get(step, 0.0) for turn in taken)
            if seconds >= 5e-5:
                yield f"| {work} | {step} | {1e3 * seconds:.1f} | | |"


# -- ray ---------------------------------------------------------------------------------------------------------------


def ray_processes() -> Processes:
    """This one and those of its Ray, by kind."""
    found: dict[str, list[psutil.Process]] = {
        "trainer": [psutil.Process()],
        "mailbox": [],
        "actors": [],
        "Ray's own": [],
    }
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        kind = "mailbox" if title.startswith("ray::Mailbox") else "actors" if title.startswith("ray::") else "Ray's own"
        found[kind].append(process)
    return found


def ray_rows(state: str, workers: int) -> Iterator[str]:
    from weightwire_ray.sender import RaySender

    module = states.build(state).requires_grad_(False)
    size = states.nbytes(module)
    flat = np.ones(size, np.uint8)
    with ExitStack() as stack:
        stack.enter_context(cluster(max(256 << 20, 4 * size)))
        ours = RayWeightwire(stack, module, state, workers, "alias")
        inside = Inside(stack)
        inside.time(RaySender, "_put_all", "in stage: the copy into the store")
        kept: list[Any] = []

        def put() -> None:
            kept.append(ray.put(flat))

        def put_tensors() -> None:
            kept.append(ray.put([tensor.numpy() for tensor in walk(module)]))

        def put_and_get() -> None:
            put()
            got = [
                actor.__ray_call__.remote(lambda _, refs: ray.get(refs[0]).nbytes, kept) for actor in ours.crew.actors
            ]
            if ray.get(got, timeout=PATIENCE) != [size] * workers:
                raise AssertionError("an actor did not get what was put")

        contenders = {
            "push over ray, aliased, until applied": ours.until(),
            "raw ray.put of as many bytes, one flat NumPy array (in huge pages)": Contender(put, after=kept.clear),
            "raw ray.put of the tensors where they lie": Contender(put_tensors, after=kept.clear),
            "raw ray.put, and a call of each actor that gets it": Contender(put_and_get, after=kept.clear),
        }
        yield from rows(f"{state}, {workers} actors", contenders, ray_processes(), inside)


# -- nccl --------------------------------------------------------------------------------------------------------------


def nccl_rows(state: str, workers: int) -> Iterator[str]:
    from weightwire_nccl.rounds import Rounds
    from weightwire_nccl.works import Works

    with ExitStack() as stack:
        before = psutil.Process().children(recursive=True)
        every = group_crew(stack, state, workers)
        children = [child for child in psutil.Process().children(recursive=True) if child not in before]
        inside = Inside(stack)
        inside.time(Payload, "pack", "in stage: packing")
        inside.time(Rounds, "_muster", "in stage: the plan, until all are awake (the first bucket is packed meanwhile)")
        inside.time(Works, "wait", "in stage: waiting for Gloo")
        inside.time(Rounds, "_confirm", "in stage: until all have all bytes")
        contenders = {
            "push over nccl (Gloo), until applied": every["nccl applied"],
            "pack, one flat broadcast, unpack": every["pack, broadcast, unpack"],
            "the flat broadcast alone": every["raw broadcast"],
            "the packing alone": packing(state),
        }
        names = f"{state}, {workers} worker{'s' * (workers > 1)}"
        yield from rows(names, contenders, {"trainer": [psutil.Process()], "workers": children}, inside)


def packing(state: str) -> Contender:
    tensors = walk(states.build(state))
    flat = views(torch.zeros(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8), tensors)
    return Contender(partial(torch._foreach_copy_, flat, tensors))


# -- all of it ---------------------------------------------------------------------------------------------------------

TEXT = f"""### A push over an engine

Milliseconds: medians, contenders take turns. Those in bold are whole turns. The first of each work is the push; the
others have no Weightwire in them: they are the engine's own price for the same bytes. CPU is that of a whole turn, on
average, of all processes of a kind together. Idle is the share of the {CORES} cores that none of these processes used:
they waited for a wake-up, a reply or each other, or somebody else had the core. Lines "in stage" are parts of the
trainer's `stage`. Workers receive while the trainer is in `stage`; they verify, commit and look while it is in `wait`.

| work | step | ms | CPU ms | idle |
|---|---|---|---|---|
"""
WORKS = (
    (ray_rows, "large", 4, 9.0),
    (nccl_rows, "medium", 1, 1.5),
    (nccl_rows, "medium", 4, 3.0),
    (nccl_rows, "large", 1, 9.0),
)
"""What makes the lines, for which state and how many workers, and the gigabytes of memory that it takes."""


def engines() -> str:
    """The text and the table, in Markdown."""
    lines: list[str] = []
    for make, state, workers, gigabytes in WORKS:
        try:
            Plan().need(f"{state} with {workers}", gigabytes)
            lines += make(state, workers)
        except NoRoomError as error:
            lines.append(f"| {state} | not measured: {error} | | | |")
    return TEXT + "\n".join(lines) + "\n"
