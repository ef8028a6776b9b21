"""Gymnasium workers whose observation normaliser is always of the same version as their policy.

    python examples/gymnasium_normaliser.py
    python examples/gymnasium_normaliser.py --workers 4 --seconds 30 --backend nccl

It needs weightwire, a backend (by default weightwire-ipc) and gymnasium.

A policy learns on normalised observations, and the running mean and variance that normalise them move on with every
batch. A worker that acts with the new policy and the old statistics, or the other way round, acts with a policy that
nobody has trained; libraries that synchronise the two separately have that now and then, and nothing tells. Here both
are one state, ``{"normaliser": ..., "policy": ...}``, pushed under one version: look for ``updater`` and ``receiver``.

Each worker runs a vector of CartPoles and takes the newest version before *every step*. It sends home what it saw, what
it computed, and which version it was; the trainer, which keeps the last versions, computes the same again from that
version's normaliser and policy, and counts what differs. It also counts what would have differed, had the policy been
one version older than the normaliser: a mix would show.

Exit status: 0, everything was computed by one version; 1, something was not; 130, Ctrl-C.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import multiprocessing
import queue
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

from weightwire import WeightReceiver, WeightUpdater

ENV, OBSERVATION, ACTIONS = "CartPole-v1", 4, 2
ENVIRONMENTS, STEPS = 8, 64
DISCOUNT = 0.99
KEPT = 50  # versions that the trainer keeps, to check what was computed with them
TOLERANCE = 1e-5  # between one step in a worker and all steps at once in the trainer
PATIENCE = 60.0  # seconds without a word from any worker
SPAWN = multiprocessing.get_context("spawn")


class Normaliser(nn.Module):
    """Running mean and variance of all observations so far. They are buffers, and so they travel like weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(OBSERVATION, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(OBSERVATION, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, observation: Tensor) -> Tensor:
        normal = (observation - self.mean) / (self.variance + 1e-8).sqrt()
        return normal.clamp(-10.0, 10.0).float()

    def take_in(self, batch: Tensor) -> None:
        """Merge the statistics of a batch ``(n, OBSERVATION)`` into those so far (Chan et al., 1979)."""
        known, new = int(self.count), len(batch)
        batch = batch.double()
        gap, total = batch.mean(0) - self.mean, known + new
        spread = self.variance * known + batch.var(0, unbiased=False) * new + gap**2 * known * new / total
        self.mean += gap * new / total
        self.variance.copy_(spread / total)
        self.count += new


def make_model() -> dict[str, nn.Module]:
    """What travels: one state of two modules, under one version. The trainer and every worker have one of these."""
    policy = nn.Sequential(nn.Linear(OBSERVATION, 64), nn.Tanh(), nn.Linear(64, ACTIONS))
    return {"normaliser": Normaliser(), "policy": policy}


def logits(model: dict[str, nn.Module], observation: Tensor) -> Tensor:
    return model["policy"](model["normaliser"](observation))


# -- the worker ------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """Arrays of shape ``(STEPS, ENVIRONMENTS, ...)``, and the version that acted in each of the steps."""

    version: list[int]
    observation: np.ndarray
    logits: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    done: np.ndarray
    returns: list[float]  # of the episodes that ended


def work(endpoint: str, name: str, seed: int, rollouts: Any) -> None:
    """Act, with the newest version at every step, until the trainer has closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer ends us
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    envs = SyncVectorEnv([lambda: gym.make(ENV)] * ENVIRONMENTS, autoreset_mode=AutoresetMode.SAME_STEP)
    observation, _ = envs.reset(seed=seed)
    scores = np.zeros(ENVIRONMENTS)
    model = make_model()
    with WeightReceiver(endpoint, model, worker=name) as receiver:
        while not receiver.closed:
            steps, marks = [], []
            for _ in range(STEPS):
                receiver.pull()  # waits for the first version only
                if not receiver.ready:
                    return  # the trainer has closed before there was one
                with torch.inference_mode():
                    scored = logits(model, torch.from_numpy(observation))
                    action = torch.distributions.Categorical(logits=scored).sample().numpy()
                after, reward, terminated, truncated, _ = envs.step(action)
                done = terminated | truncated
                steps.append((observation, scored.numpy(), action, reward.astype(np.float32), done))
                marks.append((receiver.version, scores + reward, done))
                scores = np.where(done, 0.0, scores + reward)
                observation = after
            ended = [score for _, total, done in marks for score in total[done].tolist()]
            rollout = Rollout([version for version, _, _ in marks], *map(np.stack, zip(*steps)), ended)
            while not receiver.closed:
                with contextlib.suppress(queue.Full):  # nobody acts far ahead of the trainer
                    rollouts.put(rollout, timeout=0.5)
                    break
                receiver.pull()  # is it over?
        rollouts.cancel_join_thread()  # what was not fetched is not missed


# -- the trainer -----------------------------------------------------------------------------------------------------


class Learner:
    """Proximal policy optimisation in short, on observations that its own normaliser has normalised."""

    def __init__(self) -> None:
        self.model = make_model()
        self.critic = nn.Sequential(nn.Linear(OBSERVATION, 64), nn.Tanh(), nn.Linear(64, 1))
        self.parameters = [*self.model["policy"].parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=2.5e-3)

    def update(self, rollout: Rollout) -> None:
        """Move the normaliser on by one batch; then policy and critic, by a few epochs over it."""
        seen = torch.from_numpy(rollout.observation).flatten(0, 1)
        self.model["normaliser"].take_in(seen)
        normal = self.model["normaliser"](seen)
        with torch.no_grad():
            value = self.critic(normal).squeeze(-1)
        target = self._returns(rollout, value.view(STEPS, ENVIRONMENTS)[-1]).flatten()
        action = torch.from_numpy(rollout.action).flatten()
        old = torch.from_numpy(rollout.logits).flatten(0, 1).log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        for _ in range(4):
            for rows in torch.randperm(len(seen)).chunk(4):
                loss = self._loss(normal[rows], action[rows], old[rows], target[rows] - value[rows], target[rows])
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.parameters, 0.5)
                self.optimizer.step()

    def _loss(self, normal: Tensor, action: Tensor, old: Tensor, advantage: Tensor, target: Tensor) -> Tensor:
        scored = self.model["policy"](normal).log_softmax(-1)
        ratio = (scored.gather(1, action[:, None]).squeeze(1) - old).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        entropy = -(scored.exp() * scored).sum(-1).mean()
        return nn.functional.mse_loss(self.critic(normal).squeeze(-1), target) - gain - 0.01 * entropy

    def _returns(self, rollout: Rollout, promise: Tensor) -> Tensor:
        """Discounted rewards to come, in twentieths, shape ``(STEPS, ENVIRONMENTS)``; ``promise``: at the end."""
        result = torch.empty(STEPS, ENVIRONMENTS)
        for step in reversed(range(STEPS)):
            going_on = torch.from_numpy(~rollout.done[step])
            promise = torch.from_numpy(rollout.reward[step]) / 20 + DISCOUNT * promise * going_on
            result[step] = promise
        return result


class Auditor:
    """Computes again what workers say that they have computed, with the versions that they say it was."""

    def __init__(self) -> None:
        self.kept: collections.OrderedDict[int, dict[str, nn.Module]] = collections.OrderedDict()
        self.checked = self.differing = self.mixes = self.would_differ = 0
        self.versions: set[int] = set()

    def keep(self, version: int, model: dict[str, nn.Module]) -> None:
        self.kept[version] = copy.deepcopy(model)
        while len(self.kept) > KEPT:
            self.kept.popitem(last=False)

    @torch.no_grad()
    def check(self, rollout: Rollout) -> None:
        for version, observation, computed in zip(rollout.version, rollout.observation, rollout.logits):
            model, before = self.kept.get(version), self.kept.get(version - 1)
            if model is None:
                continue  # of a worker that was very slow
            seen, told = torch.from_numpy(observation), torch.from_numpy(computed)
            self.checked += 1
            self.versions.add(version)
            self.differing += not torch.allclose(logits(model, seen), told, atol=TOLERANCE)
            if before is not None:
                mix = {"normaliser": model["normaliser"], "policy": before["policy"]}
                self.mixes += 1
                self.would_differ += not torch.allclose(logits(mix, seen), told, atol=TOLERANCE)


def train(args: argparse.Namespace) -> Auditor:
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    learner, auditor, returns = Learner(), Auditor(), collections.deque[float](maxlen=100)
    rollouts: Any = SPAWN.Queue(maxsize=args.workers)
    with WeightUpdater(args.backend, learner.model) as updater:
        workers = [
            SPAWN.Process(target=work, args=(updater.endpoint, f"worker-{n}", args.seed + n, rollouts), daemon=True)
            for n in range(args.workers)
        ]
        try:
            for worker in workers:
                worker.start()
            auditor.keep(updater.push().version, learner.model)
            end = None
            while end is None or time.monotonic() < end:
                rollout = rollouts.get(timeout=PATIENCE)
                end = end or time.monotonic() + args.seconds  # from the first experience on
                auditor.check(rollout)
                returns.extend(rollout.returns)
                learner.update(rollout)
                auditor.keep(updater.push(on_lost="drop").version, learner.model)
            print(
                f"{updater.version} versions of normaliser and policy to {args.workers} workers over "
                f"{updater.endpoint}; mean return of the last {len(returns)} episodes {statistics.fmean(returns):.0f}"
            )
            updater.close()  # the workers see it and leave
            for worker in workers:
                worker.join(10)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
    return auditor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ipc", metavar="ENDPOINT", help="that reaches processes: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="how many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="to learn for (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.workers < 1 or not args.seconds > 0:
        parser.error("at least one worker and a time above 0, please")
    auditor = train(args)
    print(
        f"{auditor.checked} steps of {len(auditor.versions)} versions computed again: {auditor.differing} differ; a "
        f"policy one version older than its normaliser would have shown in {auditor.would_differ} of {auditor.mixes}"
    )
    return 0 if auditor.checked and not auditor.differing else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
