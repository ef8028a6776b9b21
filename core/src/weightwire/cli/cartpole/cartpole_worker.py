"""A worker: acts with whatever version of the policy it has pulled last, and sends home what happened."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import threading
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from cartpole_ppo import ENV, Rollout, make_policy
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from weightwire import WeightReceiver

ENVIRONMENTS, STEPS = 8, 64


@dataclass
class Report:
    """What a worker sends: the version that acted, the returns of the episodes that ended, and the experience."""

    worker: str
    version: int
    returns: list[float]
    rollout: Rollout | None = None  # None: the episodes were the greedy ones that the trainer had asked for


class Outbox:
    """A worker's own way to the trainer, with room for one report. A shared queue would stop for all of them when a
    worker is killed that just holds its lock."""

    def __init__(self, context: Any) -> None:
        self.inbox, self._pipe = context.Pipe(duplex=False)
        self._room = context.Semaphore(1)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "inbox": None}  # that is the trainer's

    def put(self, report: Report, timeout: float) -> None:
        """Raises ``queue.Full``, as a queue does."""
        if not self._room.acquire(timeout=timeout):
            raise queue.Full
        self._pipe.send(report)

    def started(self) -> None:
        """The worker has its end: without this one, the trainer sees that end close when the worker dies."""
        self._pipe.close()

    def get(self) -> Report:
        """In the trainer. Raises ``EOFError`` or ``OSError`` where the worker is gone."""
        report: Report = self.inbox.recv()
        self._room.release()
        return report


def work_in_process(endpoint: str, name: str, seed: int, reports: Any) -> None:
    """:func:`work` as the target of a process."""
    threading.Thread(target=end_with_the_trainer, daemon=True).start()
    torch.set_num_threads(1)  # many workers share the cores
    with contextlib.suppress(BrokenPipeError):  # the trainer is gone
        work(endpoint, name, seed, reports)


def end_with_the_trainer() -> None:
    """End this process when the one that has started it is gone, however that went: killed, it says no goodbye."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()
    os._exit(1)


def work(endpoint: str, name: str, seed: int, reports: Any) -> None:
    """The life of a worker: pull, act, report, until the trainer says that it is over.

    The endpoint is all that a worker needs in order to find the trainer, and it is one line of text. ``reports`` is a
    bounded queue: who is more than a few rollouts ahead of the trainer waits there.
    """
    policy = make_policy()
    actor = Actor(policy, seed)
    report: Report | None = None
    with WeightReceiver(endpoint, policy, worker=name) as receiver:
        while not receiver.closed:
            # The very first pull waits until there is a version. Every other one takes the newest, or returns at once.
            news = receiver.pull()
            if not receiver.ready:
                continue
            # What the trainer says beside the weights (`metadata`) is of the same version as the weights.
            episodes = receiver.metadata.get("greedy_episodes", 0)
            if news and episodes:
                report = Report(name, receiver.version, play(policy, episodes, seed))
            elif report is None:
                returns, rollout = actor.collect()
                report = Report(name, receiver.version, returns, rollout)
            with contextlib.suppress(queue.Full):  # look around once more, and try it again
                reports.put(report, timeout=0.5)
                report = None


class Actor:
    """Environments, and the policy that acts in them."""

    def __init__(self, policy: nn.Module, seed: int) -> None:
        self.policy = policy
        self.envs = make_envs(ENVIRONMENTS)
        self.random = np.random.default_rng(seed)
        self.observation, _ = self.envs.reset(seed=seed)
        self.scores = np.zeros(ENVIRONMENTS)

    def collect(self) -> tuple[list[float], Rollout]:
        """Act for some steps in every environment: the returns of the episodes that ended, and all that happened."""
        returns: list[float] = []
        steps = []
        for _ in range(STEPS):
            action, log_probability = self._choose()
            after, reward, terminated, truncated, info = self.envs.step(action)
            done = terminated | truncated
            successor = after.copy()
            if done.any():
                successor[done] = np.stack(info["final_obs"][done])
            reward = reward.astype(np.float32)
            steps.append((self.observation, action, log_probability, reward, successor, terminated, truncated))
            self.scores += reward
            returns.extend(self.scores[done].tolist())
            self.scores[done] = 0.0
            self.observation = after
        return returns, Rollout(*map(np.stack, zip(*steps, strict=True)))

    def _choose(self) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            log_probabilities = self.policy(torch.from_numpy(self.observation)).log_softmax(-1).numpy()
        threshold = self.random.random((len(log_probabilities), 1))
        action = (np.exp(log_probabilities).cumsum(1) < threshold).sum(1).clip(max=log_probabilities.shape[1] - 1)
        return action, log_probabilities[np.arange(len(action)), action]


def play(policy: nn.Module, episodes: int, seed: int) -> list[float]:
    """The returns of whole episodes in which the policy does what it thinks best."""
    envs = make_envs(episodes)
    observation, _ = envs.reset(seed=seed + 1_000_000)
    returns, running = np.zeros(episodes), np.ones(episodes, bool)
    while running.any():
        with torch.inference_mode():
            action = policy(torch.from_numpy(observation)).argmax(-1).numpy()
        observation, reward, terminated, truncated, _ = envs.step(action)
        returns += reward * running  # only the first episode of each environment counts
        running &= ~(terminated | truncated)
    envs.close()
    return returns.tolist()


def make_envs(count: int) -> SyncVectorEnv:
    """``count`` CartPoles that are reset in the step in which their episode ends."""
    return SyncVectorEnv([lambda: gym.make(ENV)] * count, autoreset_mode=AutoresetMode.SAME_STEP)
