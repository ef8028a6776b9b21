"""Learn CartPole with a trainer and several workers whose policies move only through Weightwire.

    python examples/cartpole.py
    python examples/cartpole.py --workers 4 --plot cartpole.png
    python examples/cartpole.py --backend vanilla        # the workers are threads of this process

The trainer's part of it is three lines (look for ``updater``), the worker's part is in ``cartpole_worker.py`` (look for
``receiver``); ``cartpole_ppo.py`` is the learning and ``cartpole_view.py`` the table.

Exit status: 0, the goal was reached; 1, it was not; 2, an error; 130, Ctrl-C.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from cartpole_ppo import ENV, Learner, Rollout
from cartpole_view import View
from cartpole_worker import Report, work, work_in_process

from weightwire import WeightUpdater, WeightwireError, parse_endpoint
from weightwire.registry import open_backend

EPISODES = 20  # greedy ones, at the end
PATIENCE = 60.0  # seconds without a word from any worker: something is wrong


class Crew:
    """The workers and the queue through which their reports come back."""

    def __init__(self, endpoint: str, names: list[str], seed: int) -> None:
        self.processes = runs_in_processes(endpoint)
        spawn = multiprocessing.get_context("spawn")
        # Room for one: whoever waits here acts on the newest policy afterwards, not on an old one in advance.
        self.reports: Any = spawn.Queue(maxsize=1) if self.processes else queue.Queue(maxsize=1)
        jobs = [(endpoint, name, 1_000 * seed + index, self.reports) for index, name in enumerate(names)]
        self.workers: list[Any] = (
            [spawn.Process(target=work_in_process, args=job, name=job[1], daemon=True) for job in jobs]
            if self.processes
            else [threading.Thread(target=work, args=job, name=job[1], daemon=True) for job in jobs]
        )
        # Ctrl-C goes to every process of a terminal. Workers inherit that it is blocked: the trainer ends them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for worker in self.workers:
            worker.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def report(self) -> Report:
        """The next report of any worker. Raises ``RuntimeError`` where none comes within a minute, or none can."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                return self.reports.get(timeout=0.5)
            except queue.Empty:
                if not self.alive:
                    raise RuntimeError("all workers have ended; what they printed above says why") from None
        raise RuntimeError(f"no worker has reported for {PATIENCE:.0f} s")

    @property
    def alive(self) -> int:
        return sum(worker.is_alive() for worker in self.workers)

    def end(self) -> None:
        """Wait for the workers, which leave by themselves when the updater is closed; end who does not."""
        deadline = time.monotonic() + 10.0
        for worker in self.workers:
            worker.join(timeout=max(0.1, deadline - time.monotonic()))
            if self.processes and worker.is_alive():
                worker.kill()
                worker.join(timeout=5.0)


def runs_in_processes(endpoint: str) -> bool:
    """Whether the backend reaches other processes. One that does not (vanilla) serves threads."""
    return "processes" in open_backend(parse_endpoint(endpoint)).info.capabilities


def train(args: argparse.Namespace, learner: Learner, updater: WeightUpdater, crew: Crew, view: View) -> float:
    """Learn until the environment counts as solved or the time is up; the mean return of the greedy episodes."""
    solved = gym.spec(ENV).reward_threshold or 0.0  # 475, the environment's own
    updater.push()  # version 1: what the workers begin with. It may be pushed before any of them is there
    view.reported(crew.report())  # the first word of a worker: the clock starts
    begun = time.monotonic()
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
    view.pushed(updater.push(on_lost="drop", metadata={"greedy_episodes": EPISODES}))
    while (report := crew.report()).rollout:
        view.reported(report)
    if report.version != updater.version:
        raise RuntimeError(f"{report.worker} played on version {report.version}, not on {updater.version}")
    return statistics.fmean(report.returns)


def run(args: argparse.Namespace) -> int:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the policy is tiny: a second thread costs more than it brings
    learner = Learner()
    names = [f"worker-{index}" for index in range(args.workers)]
    # The updater reads the policy at each push; it never holds on to it in between.
    with WeightUpdater(args.backend, learner.policy) as updater:
        crew = Crew(updater.endpoint, names, args.seed)
        try:
            print(f"trainer at {updater.endpoint}, {args.workers} workers are starting", flush=True)
            with View(updater.endpoint, names) as view:
                result = train(args, learner, updater, crew, view)
        finally:
            updater.close()  # the workers see `receiver.closed` and leave
            crew.end()
    if args.plot:
        view.plot(args.plot)
    verdict = "Reached" if result >= args.goal else "NOT reached"
    push = statistics.median(moment.push for moment in view.history)
    view.console.print(
        f"{verdict}: mean return {result:.1f} of {EPISODES} greedy episodes by a worker "
        f"(goal {args.goal:g}).\n{updater.version} versions pushed to {args.workers} workers over {updater.endpoint}: "
        f"{view.nbytes:,} bytes in all, median push {push * 1e3:.2f} ms.",
        soft_wrap=True,
    )
    return 0 if result >= args.goal else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ipc", metavar="ENDPOINT", help="any endpoint (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="how many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="to learn for, at most (default: %(default)s)")
    parser.add_argument("--goal", type=float, default=400.0, help="mean greedy return to reach (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw return, lag and push time over the run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.workers < 1 or args.seconds <= 0:
        parser.error("at least one worker and a time above 0, please")
    return args


def main() -> int:
    args = arguments()
    try:
        return run(args)
    except KeyboardInterrupt:
        print("\nInterrupted; the workers have ended.", file=sys.stderr)
        return 130
    except (WeightwireError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
