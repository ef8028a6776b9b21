"""The trainer: learns from what the workers report, and pushes its policy to them after each update."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import queue
import signal
import statistics
import threading
import time
from collections.abc import Collection
from multiprocessing import connection
from typing import Any

import gymnasium as gym
import torch
from cartpole_engine import started
from cartpole_ppo import ENV, Learner, Rollout
from cartpole_view import View
from cartpole_worker import Outbox, Report, work, work_in_process

from weightwire import WeightUpdater, WorkerLostError, parse_endpoint
from weightwire.registry import open_backend

EPISODES = 20  # greedy ones, at the end
PATIENCE = 60.0  # seconds without a word from any worker: something is wrong
SPAWN = multiprocessing.get_context("spawn")
GOODBYE = 10.0  # seconds in which all workers that were at work finish what they are at


class Crew:
    """The workers and the ways on which their reports come back."""

    def __init__(self, endpoint: str, names: list[str], seed: int) -> None:
        self.processes = runs_in_processes(endpoint)
        # Room for one: whoever waits here acts on the newest policy afterwards, not on an old one in advance.
        self.queue: queue.Queue[Report] = queue.Queue(maxsize=1)  # of all threads
        self.outboxes: dict[Any, Outbox] = {}  # of each process, by its end of the pipe
        self.workers: list[Any] = []
        for index, name in enumerate(names):
            job = (endpoint, name, 1_000 * seed + index)
            if self.processes:
                outbox = Outbox(SPAWN)
                self.outboxes[outbox.inbox] = outbox
                self.workers.append(SPAWN.Process(target=work_in_process, args=(*job, outbox), name=name, daemon=True))
            else:
                self.workers.append(threading.Thread(target=work, args=(*job, self.queue), name=name, daemon=True))

    def start(self) -> None:
        # Ctrl-C goes to every process of a terminal. Workers inherit that it is blocked: the trainer ends them. Here it
        # takes effect when all have been started (another thread may well get it), for half of one says so at length.
        pressed: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for worker in self.workers:
            worker.start()
        for outbox in self.outboxes.values():
            outbox.started()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, before)
        if pressed:
            raise KeyboardInterrupt

    def report(self) -> Report:
        """The next report of any worker. Raises ``RuntimeError`` where none comes within a minute, or none can."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return self._next() if self.processes else self.queue.get(timeout=0.5)
            if not self.alive:
                raise RuntimeError("all workers have ended; what they printed above says why")
        raise RuntimeError(f"no worker has reported for {PATIENCE:.0f} s")

    def _next(self) -> Report:
        for inbox in connection.wait(list(self.outboxes), timeout=0.5):
            outbox = self.outboxes.pop(inbox)
            with contextlib.suppress(EOFError, OSError):  # of a worker that is gone, perhaps amid its report
                report = outbox.get()
                self.outboxes[inbox] = outbox  # the last to be asked again: each has its turn
                return report
        raise queue.Empty

    @property
    def alive(self) -> int:
        return sum(worker.is_alive() for worker in self.workers)

    def end(self, joined: Collection[str]) -> None:
        """Wait for those who have joined: they leave by themselves when the updater is closed. End everybody else."""
        deadline = time.monotonic() + GOODBYE
        for worker in self.workers:
            if worker.is_alive() and (worker.name in joined or not self.processes):
                # A thread cannot be ended. One that has not joined comes to wait for a trainer, which disturbs nobody.
                worker.join(timeout=max(0.1, deadline - time.monotonic()) if worker.name in joined else 0.5)
            if worker.is_alive() and self.processes:
                worker.kill()
                worker.join(timeout=5.0)


def runs_in_processes(endpoint: str) -> bool:
    """Whether the backend reaches other processes. One that does not (vanilla) serves threads."""
    return "processes" in open_backend(parse_endpoint(endpoint)).info.capabilities


def train(args: argparse.Namespace, learner: Learner, updater: WeightUpdater, crew: Crew, view: View) -> float:
    """Learn until the environment counts as solved or the time is up; the mean return of the greedy episodes."""
    solved = gym.spec(ENV).reward_threshold or 0.0  # 475, the environment's own
    updater.push()  # version 1: what the workers begin with. It may be pushed before any of them is there
    first = crew.report()  # the first word of a worker: the clock starts
    begun = time.monotonic()
    view.say(f"the first experience is there: learning for up to {args.seconds:g} s from now on")
    view.reported(first)
    while view.mean_return < solved and (progress := (time.monotonic() - begun) / args.seconds) < 1.0:
        rollouts: list[Rollout] = []
        while len(rollouts) < max(1, crew.alive):
            report = crew.report()
            view.reported(report)
            if report.rollout:
                rollouts.append(report.rollout)
        learner.update(Rollout.join(rollouts), progress)
        # Back as soon as the workers can have it; each takes it when it has finished its rollout. A worker that dies is
        # dropped here, and the others learn on; without `on_lost` this would raise WorkerLostError.
        view.pushed(updater.push(on_lost="drop"))
    view.finished(updater.push(on_lost="drop", metadata={"greedy_episodes": EPISODES}))
    view.say(f"learning is over: {EPISODES} greedy episodes with version {updater.version} begin")
    while (report := crew.report()).rollout:
        view.reported(report)
    if report.version != updater.version:
        raise RuntimeError(f"{report.worker} played on version {report.version}, not on {updater.version}")
    return statistics.fmean(report.returns)


def run(args: argparse.Namespace) -> int:
    """Do all that the command line asks for; the exit status."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the policy is tiny: a second thread costs more than it brings
    learner = Learner()
    names = [f"worker-{index}" for index in range(args.workers)]
    # The updater reads the policy at each push; it never holds on to it in between.
    with started(args.backend) as endpoint, WeightUpdater(endpoint, learner.policy) as updater:
        crew = Crew(updater.endpoint, names, args.seed)
        try:
            crew.start()
            print(f"trainer at {updater.endpoint}, {args.workers} workers are starting", flush=True)
            with View(updater.endpoint, names) as view:
                result = train(args, learner, updater, crew, view)
        finally:
            part(updater, crew)
    if args.plot:
        view.plot(args.plot)
    verdict = "Reached" if result >= args.goal else "NOT reached"
    view.say(
        f"{verdict}: mean return {result:.1f} of {EPISODES} greedy episodes by a worker "
        f"(goal {args.goal:g}).\n{updater.version} versions pushed to {args.workers} workers over {updater.endpoint}: "
        f"{view.nbytes:,} bytes in all, median push {statistics.median(view.pushes) * 1e3:.2f} ms."
    )
    return 0 if result >= args.goal else 1


def part(updater: WeightUpdater, crew: Crew) -> None:
    """Close the updater and end the workers, whatever happens on the way."""
    joined: Collection[str] = ()
    try:
        joined = updater.workers
        # The workers see `receiver.closed` and leave. One that is lost since the last push is dropped as any other.
        with contextlib.suppress(WorkerLostError):
            updater.close()
    finally:
        crew.end(joined)
