"""``weightwire bench ENDPOINT...``: backends side by side, and TorchRL's own schemes beside them, for sizes of yours.

Contenders take turns (A, B, A, B, ...), so that whatever else the machine does meets all of them alike. One that fails,
hangs, or delivers other bytes is told of, and takes no more turns.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightwire.cli import peers, trial
from weightwire.cli.text import aligned, complain, did_you_mean, duration, printable, rate, size
from weightwire.cli.trial import Trial, TrialError
from weightwire.endpoint import parse, parse_size
from weightwire.errors import WeightwireError
from weightwire.registry import find

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Contender", "run"]

AGAINST = ("torchrl",)
WARMUP = 2


@dataclass
class Contender:
    """Who takes turns, and what came of them."""

    name: str
    apply: str
    trial: Trial | None = None
    fault: str = ""
    workers: int = 0
    processes: bool = False
    nbytes: int = 0
    seconds: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)

    def open(self, stack: ExitStack, state: dict[str, int]) -> None:
        try:
            self.trial = stack.enter_context(Trial(self.name, apply=self.apply, **state))
            opened = self.trial.open()
            self.workers, self.processes, self.nbytes = state["workers"], opened["processes"], opened["nbytes"]
        except TrialError as exc:
            self.fault = str(exc)

    def turn(self, counts: bool) -> None:
        if self.fault or self.trial is None:
            return
        try:
            answer = self.trial.turn()
        except TrialError as exc:
            self.fault = str(exc)
            return
        if counts:
            self.seconds.append(answer["seconds"])
            for phase, seconds in answer["phases"].items():
                self.phases.setdefault(phase, []).append(seconds)

    def facts(self) -> dict[str, Any]:
        medians = {phase: statistics.median(seconds) for phase, seconds in self.phases.items()}
        good = bool(self.seconds) and not self.fault
        median = statistics.median(self.seconds) if good else None
        facts = {"name": self.name, "apply": self.apply, "fault": self.fault, "workers": self.workers}
        return {**facts, "nbytes": self.nbytes, "median": median, "seconds": self.seconds, "phases": medians}


def run(
    endpoints: Sequence[str],
    *,
    size_text: str,
    tensors: int,
    workers: int,
    apply: str,
    against: Sequence[str],
    repeat: int,
    as_json: bool,
) -> int:
    """Measure and print.

    The status: 0, all did the work; 1, one did not; 2, wrong usage, or a peer is not installed.
    """
    try:
        nbytes = parse_size(size_text)
        for text in endpoints:
            find(parse(text))
    except WeightwireError as exc:
        complain(str(exc))
        return 2
    if fault := _fault(nbytes, tensors, apply, against):
        complain(fault)
        return 2
    contenders = [Contender(text, apply) for text in endpoints]
    if against:
        trial.PRELOAD.extend(["tensordict.nn", "torchrl.collectors", "torchrl.envs"])
        contenders += [Contender(name, "") for name in peers.NAMES]
    state = {"tensors": tensors, "nbytes": nbytes, "workers": workers}
    with ExitStack() as stack, _progress(as_json, len(contenders) * (repeat + WARMUP + 1)) as step:
        for contender in contenders:
            contender.open(stack, state)
            step(f"{contender.name}: open")
        for turn in range(-WARMUP, repeat):
            for contender in contenders:
                contender.turn(turn >= 0)
                step(contender.name)
    if as_json:
        import json

        print(json.dumps({**state, "contenders": [contender.facts() for contender in contenders]}, indent=2))
    else:
        print("\n".join(_lines(contenders, state)))
    return int(any(contender.fault for contender in contenders))


def _fault(nbytes: int, tensors: int, apply: str, against: Sequence[str]) -> str:
    if nbytes < 4 * tensors:
        return f"{tensors} tensors of float32 are {4 * tensors} bytes at least; --size says {nbytes}"
    if apply not in ("copy", "alias"):
        return f"--apply is {apply!r}; it is copy or alias"
    for name in against:
        if name not in AGAINST:
            return f"--against knows {', '.join(AGAINST)}, not {name!r}.{did_you_mean(name, AGAINST)}"
        if not peers.available():
            return 'torchrl is not installed, so there is nothing to hold against: pip install "weightwire[torchrl]"'
    return ""


def _lines(contenders: Sequence[Contender], state: dict[str, int]) -> list[str]:
    first = contenders[0]
    base = statistics.median(first.seconds) if first.seconds and not first.fault else 0.0
    rows = [("", "MEDIAN", "QUARTILES", "BYTES/S", f"AGAINST {printable(first.name)}", "WORKERS")]
    for contender in contenders:
        if contender.fault or not contender.seconds:
            rows.append((contender.name, "failed", "-", "-", "-", "-"))
            continue
        low, median, high = _quartiles(contender.seconds)
        ratio = f"{median / base:.3g} times" if base else "-"
        where = "processes" if contender.processes else "in the trainer's process"
        cells = (duration(median), f"{duration(low)} to {duration(high)}", rate(contender.nbytes / median), ratio)
        rows.append((contender.name, *cells, f"{contender.workers} {where}"))
    turns = max((len(contender.seconds) for contender in contenders), default=0)
    text = [
        f"{size(state['nbytes'])} in {state['tensors']} tensors of float32, {turns} turns of each, one after the other"
    ]
    text += ["", *aligned(rows)]
    text += (
        ["", *(f"{c.name}: {printable(c.fault)}" for c in contenders if c.fault)]
        if any(contender.fault for contender in contenders)
        else []
    )
    text += ["", "From the push until every worker acts with it; all bytes of every worker compared after each turn."]
    return text


def _quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, median, high


def _progress(as_json: bool, steps: int) -> AbstractContextManager[Callable[[str], None]]:
    return _bar(steps) if sys.stderr.isatty() and not as_json else _no_bar()


@contextmanager
def _no_bar() -> Iterator[Callable[[str], None]]:
    yield lambda text: None


@contextmanager
def _bar(steps: int) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("opening", total=steps)
        yield lambda text: progress.update(task, advance=1, description=printable(text).replace("[", "("))
