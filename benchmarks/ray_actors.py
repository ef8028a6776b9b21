"""Weightwire in the actors of a Ray of our own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import ray
import states
import torch
from measure import PATIENCE, Contender
from ray.exceptions import RayError
from torch import nn
from workers import SETTLE, WeightwireEnd, contender

from weightwire import WeightUpdater

__all__ = ["REMOTE", "Actor", "RayCrew", "RayWeightwire", "cluster"]


@contextmanager
def cluster(store: int) -> Iterator[None]:
    """A Ray of one node, with an object store of ``store`` bytes, for as long as the context lasts.

    Where there is one already, of an outer context, that one.
    """
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": "ERROR"}
    ray.init("local", num_cpus=1, object_store_memory=store, include_dashboard=False, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


class Actor:
    """A worker with one policy. ``take`` waits in its one thread; ``waiting`` tells from another one that it does."""

    def __init__(self, state: str) -> None:
        torch.set_num_threads(1)
        self.module = states.build(state, fill=False).eval().requires_grad_(False)
        self.begun = threading.Event()
        self.end: WeightwireEnd | None = None

    @ray.method(concurrency_group="ear")
    def waiting(self) -> None:
        if not self.begun.wait(PATIENCE):
            raise TimeoutError("the actor did not come to wait")
        self.begun.clear()

    def digest(self) -> str:
        return states.digest(self.module)

    def open(self, endpoint: str, apply: str) -> None:
        self.end = WeightwireEnd(self.module, endpoint, apply)

    def take(self, sentinel: float, *how: str) -> None:
        assert self.end
        self.ready_for(sentinel)
        self.end.take(sentinel)

    def ready_for(self, sentinel: float) -> None:
        states.Look(self.module).before(sentinel)
        self.begun.set()

    def idles(self, times: int) -> list[float]:
        assert self.end
        return self.end.idles(times)

    def close(self) -> None:
        if self.end:
            self.end.close()


class RayCrew:
    """Some actors, with what :func:`~workers.contender` asks of a crew."""

    def __init__(self, stack: ExitStack, actors: list[Any]) -> None:
        self.actors = actors
        self.taking: list[Any] = []
        stack.callback(self.close)

    def take(self, sentinel: float, *how: str) -> None:
        self.taking = [actor.take.remote(sentinel, *how) for actor in self.actors]
        self.ask("waiting")
        time.sleep(SETTLE)

    def answers(self) -> None:
        ray.get(self.taking, timeout=PATIENCE)

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        answers: list[Any] = ray.get(
            [getattr(actor, method).remote(*arguments) for actor in self.actors], timeout=PATIENCE
        )
        return answers

    def close(self) -> None:
        with suppress(RayError):  # an actor that could not even be made
            self.ask("close")
        for actor in self.actors:
            ray.kill(actor)


REMOTE = {"num_cpus": 0, "concurrency_groups": {"ear": 1}}


class RayWeightwire:
    """An updater with actors of its own, as :class:`workers.Weightwire`."""

    def __init__(self, stack: ExitStack, module: nn.Module, state: str, workers: int, apply: str) -> None:
        self.module = module
        self.updater = stack.enter_context(WeightUpdater("ray", module, timeout=PATIENCE))
        self.crew = RayCrew(stack, [ray.remote(**REMOTE)(Actor).remote(state) for _ in range(workers)])
        self.crew.ask("open", self.updater.endpoint, apply)
        self.updater.wait_for_workers(workers, PATIENCE)

    def until(self, wait: str = "applied") -> Contender:
        return contender(
            self.crew, self.module, lambda: self.updater.push(wait=wait), lambda: float(self.updater.version + 1)
        )
