"""Proximal policy optimisation, as little of it as CartPole needs. Nothing in here knows about Weightwire."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor, nn

ENV = "CartPole-v1"
OBSERVATION, ACTIONS = 4, 2

DISCOUNT, TRACE = 0.99, 0.95
EPOCHS, MINIBATCHES = 6, 4
CLIP, ENTROPY, MAX_GRAD_NORM = 0.2, 0.005, 0.5
REWARD_SCALE = 0.05  # keeps the critic's targets near 1: the best policy's value is about 1 / (1 - DISCOUNT)


@dataclass
class Rollout:
    """What a worker's environments did under one policy. Arrays of shape ``(steps, environments, ...)``.

    ``successor`` is the observation that the action led to, also where the environment was reset right after it: an
    episode that ran out of time (``truncated``) is worth what its last observation promises, one that failed
    (``terminated``) is worth nothing more.
    """

    observation: np.ndarray
    action: np.ndarray
    log_probability: np.ndarray
    reward: np.ndarray
    successor: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray

    @classmethod
    def join(cls, rollouts: list[Rollout]) -> Rollout:
        """Several workers' rollouts side by side, as if one worker had had all the environments."""
        return cls(*(np.concatenate([getattr(r, f.name) for r in rollouts], axis=1) for f in fields(cls)))


def mlp(outputs: int, gain: float) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(OBSERVATION, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
    for layer, scale in zip(net[::2], (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return net


def make_policy() -> nn.Module:
    """Observations ``(batch, 4)`` to action logits ``(batch, 2)``. The trainer and every worker have one of these."""
    return mlp(ACTIONS, gain=0.01)


class Learner:
    """The policy, the critic, and the one thing that changes them."""

    def __init__(self, learning_rate: float = 1.5e-3) -> None:
        self.policy = make_policy()
        self.critic = mlp(1, gain=1.0)
        self.learning_rate = learning_rate
        self.parameters = [*self.policy.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=learning_rate, eps=1e-5)

    def update(self, rollout: Rollout, progress: float) -> None:
        """A few epochs of PPO over one batch. ``progress`` runs from 0 to 1: the learning rate falls with it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * max(0.1, 1.0 - progress)
        batch = self._flatten(rollout)
        count = len(batch[0])
        for _ in range(EPOCHS):
            for rows in torch.randperm(count).split(count // MINIBATCHES):
                loss = self._loss(*(column[rows] for column in batch))
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
                self.optimizer.step()

    @torch.no_grad()
    def _flatten(self, rollout: Rollout) -> tuple[Tensor, ...]:
        """Columns (observation, action, log probability, advantage, return), one row a step."""
        observation = torch.from_numpy(rollout.observation)
        value = self.critic(observation).squeeze(-1).numpy()
        successor_value = self.critic(torch.from_numpy(rollout.successor)).squeeze(-1).numpy()
        advantage = advantages(rollout, value, successor_value)
        columns = (rollout.observation, rollout.action, rollout.log_probability, advantage, advantage + value)
        return tuple(torch.from_numpy(column).flatten(0, 1) for column in columns)

    def _loss(self, observation: Tensor, action: Tensor, old: Tensor, advantage: Tensor, target: Tensor) -> Tensor:
        log_probabilities = self.policy(observation).log_softmax(-1)
        new = log_probabilities.gather(1, action[:, None]).squeeze(1)
        # `old` is of the version that acted, whichever it was: a worker one version behind is no mistake.
        ratio = (new - old).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).mean()
        miss = nn.functional.mse_loss(self.critic(observation).squeeze(-1), target)
        return miss - gain - ENTROPY * entropy


def advantages(rollout: Rollout, value: np.ndarray, successor_value: np.ndarray) -> np.ndarray:
    """Generalised advantage estimates (Schulman et al., 2016), shape ``(steps, environments)``."""
    promise = np.where(rollout.terminated, 0.0, successor_value)
    surprise = rollout.reward * REWARD_SCALE + DISCOUNT * promise - value
    goes_on = ~(rollout.terminated | rollout.truncated)
    result = np.zeros_like(value)
    trace = np.zeros_like(value[0])
    for step in reversed(range(len(value))):
        trace = surprise[step] + DISCOUNT * TRACE * goes_on[step] * trace
        result[step] = trace
    return result
