"""What a test of the kit stands on: ends and workers at one place of the backend, cleaned up whatever happens."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from weightwire.errors import WeightwireError
from weightwire.receiver import WeightReceiver
from weightwire.testing.workers import LocalWorker, ProcessWorker, Worker
from weightwire.transport import Deadline, Event, Sender
from weightwire.updater import WeightUpdater

__all__ = ["Rig", "gather", "interrupted", "took"]

TIMEOUT = 10.0
"""Seconds that a wait of an end takes at most, unless a test is about just that."""


class Rig:
    """Ends and workers at one place.

    Attributes:
        endpoint: the place, known to both sides beforehand.
        capabilities: what the backend claims.
    """

    def __init__(self, make_endpoint: Callable[[], str], capabilities: frozenset[str]) -> None:
        self.make_endpoint = make_endpoint
        self.endpoint = make_endpoint()
        self.capabilities = capabilities
        self._workers: list[Worker] = []
        self._receivers: list[WeightReceiver] = []
        self._updaters: list[WeightUpdater] = []

    def updater(self, weights: Any = None, *, endpoint: str | None = None, **options: Any) -> WeightUpdater:
        """A trainer's end in this process."""
        updater = WeightUpdater(endpoint or self.endpoint, weights, **{"timeout": TIMEOUT, **options})
        self._updaters.append(updater)
        return updater

    def receiver(self, weights: Any = None, *, endpoint: str | None = None, **options: Any) -> WeightReceiver:
        """A worker's end in this thread."""
        receiver = WeightReceiver(endpoint or self.endpoint, weights, **{"timeout": TIMEOUT, **options})
        self._receivers.append(receiver)
        return receiver

    def worker(
        self, name: str, make: Callable[..., Any] | None = None, *args: Any, endpoint: str | None = None, **options: Any
    ) -> Worker:
        """A worker with a receiver over ``make(*args)``: in a process where the backend has those, else in a thread."""
        worker: Worker = self.process(name) if "processes" in self.capabilities else self.thread(name)
        worker.do("open", endpoint or self.endpoint, make, *args, worker=name, **{"timeout": TIMEOUT, **options})
        return worker

    def thread(self, name: str) -> Worker:
        """A thread of this process in which nothing is open yet."""
        return self._add(LocalWorker(name))

    def process(self, name: str) -> ProcessWorker:
        """A process in which nothing is open yet."""
        worker = ProcessWorker(name)
        self._add(worker)
        return worker

    def victim(self, name: str, make: Callable[..., Any] | None = None, *args: Any, **options: Any) -> ProcessWorker:
        """A :meth:`worker` that can be killed, stopped and forked."""
        worker = self.worker(name, make, *args, **options)
        assert isinstance(worker, ProcessWorker)
        return worker

    def _add(self, worker: Worker) -> Worker:
        self._workers.append(worker)
        return worker

    def forget(self) -> None:
        """Drop all references to ends of this process, as a program does that forgets to close them."""
        self._receivers.clear()
        self._updaters.clear()
        gc.collect()

    def close(self) -> None:
        """End all workers, then close all ends. What the ends still have to say is of no interest any more."""
        for worker in self._workers:
            worker.end()
        ends: list[WeightReceiver | WeightUpdater] = [*self._receivers, *self._updaters]
        for end in ends:
            with contextlib.suppress(WeightwireError):
                end.close(1.0)


class took:
    """Measure a block, and hold it to a limit: ``with took(at_most=1.0): ...``"""

    def __init__(self, *, at_most: float) -> None:
        self.at_most = at_most
        self.seconds = 0.0

    def __enter__(self) -> took:
        self._begun = time.monotonic()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.seconds = time.monotonic() - self._begun
        if kind is None:
            assert self.seconds <= self.at_most, f"took {self.seconds:.2f} s, at most {self.at_most} s are fine"


def gather(sender: Sender, fits: Callable[[Event], bool], timeout: float = 5.0) -> list[Event]:
    """Events of a backend's own end, until one fits."""
    deadline = Deadline.after(timeout)
    found: list[Event] = []
    while not any(fits(event) for event in found):
        assert not deadline.expired, f"not among {found}"
        found += sender.events(deadline)
    return found


def interrupted(call: Callable[[], Any], after: float) -> bool:
    """Run ``call`` in this (the main) thread and raise KeyboardInterrupt in it after some seconds, as Ctrl-C does;
    whether that came amid it.

    By an alarm: another thread that is to send SIGINT gets its turn at Python only when this one waits for something.
    """
    assert threading.current_thread() is threading.main_thread(), "only the main thread gets signals"
    others, rest = signal.signal(signal.SIGALRM, signal.default_int_handler), signal.getitimer(signal.ITIMER_REAL)
    begun = ended = False
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, max(after, 1e-6))
            begun = True
            call()
            ended = True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # from here on no signal is on its way
    except KeyboardInterrupt:
        return begun and not ended
    finally:
        signal.signal(signal.SIGALRM, others)
        signal.setitimer(signal.ITIMER_REAL, *rest)
    return False
