"""Worker processes that act when told to: over a pipe, outside of the clock.

Within the clock the trainer and its workers meet only through the system that is measured. A worker's ``End`` is its
side of that system; every peer has one (Weightwire's is here, the others' are in ``floors.py``).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import states
import torch
import torch.multiprocessing
from measure import PATIENCE, Contender
from torch import nn

from weightwire import WeightReceiver, WeightUpdater

__all__ = [
    "CONTEXT",
    "SETTLE",
    "Crew",
    "End",
    "Weightwire",
    "WeightwireEnd",
    "contender",
    "counter",
    "pss",
    "time_calls",
]

# What is preloaded is there in every worker at once; torchrl is missing where there are no peers, which is no error.
CONTEXT = torch.multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "weightwire.receiver", "torchrl.collectors"])
SETTLE = 0.002  # seconds from a worker's last word to its sleep in the system's own wait


class End(Protocol):
    """A worker's side of the system that is measured."""

    def take(self, sentinel: float, *how: str) -> None:
        """Wait for the version with this sentinel, act with it, look at every tensor, and let the trainer know."""

    def close(self) -> None: ...


class WeightwireEnd:
    def __init__(self, module: nn.Module, endpoint: str, apply: str) -> None:
        self.receiver = WeightReceiver(endpoint, module, apply=apply)
        # Hooks run after the commit and before the trainer hears of it: the look is within the clock.
        self.receiver.on_applied(states.Look(module))

    def take(self, sentinel: float, *how: str) -> None:
        self.receiver.wait(int(sentinel), PATIENCE)

    def idles(self, times: int) -> list[float]:
        """Seconds that it takes to ask for news when there are none, some times over."""
        return [time_calls(self.receiver.pull) for _ in range(times)]

    def close(self) -> None:
        self.receiver.close()


def pss() -> int:
    """Bytes of this process, pages that it shares counted in proportion."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel reports no Pss")


def serve(pipe: Connection, state: str, make_end: Callable[..., End]) -> None:
    """A worker's life: one command after the other. What goes wrong is sent in place of the answer."""
    torch.set_num_threads(1)
    module = states.build(state, fill=False)
    end: End | None = None
    try:
        while (command := pipe.recv())[0] != "quit":
            if command[0] == "open":
                end = make_end(module, *command[1:])
                answer: Any = None
            elif command[0] == "take":
                assert end
                states.Look(module).before(command[1])
                pipe.send("waiting")
                end.take(*command[1:])
                answer = None
            elif command[0] == "fill":
                for parameter in module.parameters():
                    parameter.data.fill_(0.5)  # no sentinel
                answer = None
            elif command[0] == "digest":
                answer = states.digest(module)
            elif command[0] == "call":  # a method that only this kind of end has
                answer = getattr(end, command[1])(*command[2:])
            else:
                answer = pss()
            pipe.send(answer)
    except (EOFError, ConnectionResetError):
        pass  # the trainer is gone
    except Exception as error:
        pipe.send(error)
    finally:
        if end:
            end.close()


def time_calls(call: Callable[[], object], count: int = 20_000) -> float:
    """Seconds that one call takes, over ``count`` of them."""
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count


class Crew:
    """Some worker processes of one state, each with an end of the same system as soon as it is told to open it."""

    def __init__(self, count: int, state: str, make_end: Callable[..., End]) -> None:
        self.pipes, self.processes = [], []
        for _ in range(count):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=serve, args=(there, state, make_end), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def tell(self, *command: Any, first: int = 0, last: int | None = None) -> None:
        for pipe in self.pipes[first:last]:
            pipe.send(command)

    def answers(self, *, first: int = 0, last: int | None = None) -> list[Any]:
        """One answer of each worker. Raises what a worker raised, and TimeoutError where one is silent."""
        answers = []
        for pipe in self.pipes[first:last]:
            if not pipe.poll(PATIENCE):
                raise TimeoutError(f"a worker was silent for {PATIENCE:.0f} s")
            answers.append(pipe.recv())
            if isinstance(answers[-1], Exception):
                raise answers[-1]
        return answers

    def ask(self, *command: Any, first: int = 0, last: int | None = None) -> list[Any]:
        self.tell(*command, first=first, last=last)
        return self.answers(first=first, last=last)

    def take(self, sentinel: float, *how: str, last: int | None = None) -> None:
        """Have the workers wait for the version with this sentinel; returns when they do."""
        self.ask("take", sentinel, *how, last=last)
        time.sleep(SETTLE)

    def close(self) -> None:
        for pipe in self.pipes:
            with suppress(OSError):  # who is gone already needs no telling
                pipe.send(("quit",))
        for process in self.processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join(10.0)
        for pipe in self.pipes:
            pipe.close()


def counter(first: float = 1.0) -> Callable[[], float]:
    """Sentinels, each one more than the one before."""
    return itertools.count(first).__next__


def contender(
    crew: Crew,
    module: nn.Module,
    push: Callable[[], object],
    upcoming: Callable[[], float],
    *how: str,
    peer: bool = False,
) -> Contender:
    """``push`` brings ``module`` to all of ``crew`` and returns when they have looked for the ``upcoming`` sentinel.

    ``how`` is handed on to the workers' ends, where they know more than one way.
    """

    def before() -> None:
        sentinel = upcoming()
        states.change(module, sentinel)
        crew.take(sentinel, *how)

    def after() -> None:
        crew.answers()
        expected = states.digest(module)
        if any(found != expected for found in crew.ask("digest")):
            raise AssertionError("a worker's policy is not what the trainer pushed")

    return Contender(push, before, after, peer)


class Weightwire:
    """An updater with a crew of its own, over any backend that reaches processes; closed with ``stack``."""

    def __init__(
        self, stack: ExitStack, module: nn.Module, state: str, workers: int, apply: str, endpoint: str = "ipc"
    ) -> None:
        self.module = module
        self.updater = stack.enter_context(WeightUpdater(endpoint, module, timeout=PATIENCE))
        self.crew = Crew(workers, state, WeightwireEnd)
        stack.callback(self.crew.close)
        self.crew.ask("open", self.updater.endpoint, apply)
        self.updater.wait_for_workers(workers, PATIENCE)

    def until(self, wait: str = "applied") -> Contender:
        """Pushes that return when every worker has the version ``staged`` or ``applied``."""
        return contender(
            self.crew,
            self.module,
            lambda: self.updater.push(wait=wait),
            lambda: float(self.updater.version + 1),
        )
