"""PPO on CartPole with TorchRL: its collector, its losses, and Weightwire between the trainer and the workers.

    python examples/torchrl_ppo.py                    # worker processes over shared memory
    python examples/torchrl_ppo.py --endpoint ray     # the same over a Ray cluster, which this script starts

It needs weightwire[torchrl], a backend (by default weightwire-ipc) and gymnasium.

Random actions keep the pole up for about 22 steps. This must reach a mean return of 150 over 40 episodes in a row, and
exits with 1 where it does not within its budget of frames. What is Weightwire's are the lines marked with `<--`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiAsyncCollector
from torchrl.envs import GymEnv, RewardSum, SerialEnv, TransformedEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from weightwire.collectors.torchrl import scheme  # <--

GOAL, EPISODES = 150.0, 40
ENVIRONMENTS, STEPS = 4, 128  # of each worker, a batch
EPOCHS, MINIBATCH = 6, 128
LEARNING_RATE = 1e-3


def make_env() -> TransformedEnv:
    return TransformedEnv(SerialEnv(ENVIRONMENTS, lambda: GymEnv("CartPole-v1")), RewardSum())


def mlp(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def make_policy() -> ProbabilisticActor:
    logits = TensorDictModule(mlp(2), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        logits, in_keys=["logits"], out_keys=["action"], distribution_class=OneHotCategorical, return_log_prob=True
    )


class Learner:
    """The policy, the critic, and one step of PPO with a batch of shape ``(environments, steps)``."""

    def __init__(self) -> None:
        self.policy, self.critic = make_policy(), ValueOperator(mlp(1), in_keys=["observation"])
        self.advantage = GAE(gamma=0.99, lmbda=0.95, value_network=self.critic, average_gae=True)
        self.loss = ClipPPOLoss(self.policy, self.critic, clip_epsilon=0.2, entropy_coeff=0.005)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=LEARNING_RATE)

    def learn(self, batch: TensorDict) -> None:
        batch["next", "reward"] *= 0.05  # keeps the critic's targets near 1
        for _ in range(EPOCHS):
            with torch.no_grad():
                self.advantage(batch)
            frames = batch.reshape(-1)
            for rows in torch.randperm(len(frames)).split(MINIBATCH):
                losses = self.loss(frames[rows])
                self.optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(self.loss.parameters(), 0.5)
                self.optimizer.step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", default="ipc", help="ipc (default), ray, or any other, such as nccl")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--frames", type=int, default=200_000, help="the budget, of all workers together")
    options = parser.parse_args()
    torch.manual_seed(0)
    endpoint = with_ray() if options.endpoint == "ray" else options.endpoint
    learner, weights = Learner(), scheme(endpoint)  # <--
    collector = MultiAsyncCollector(
        [make_env] * options.workers,
        learner.policy,
        frames_per_batch=ENVIRONMENTS * STEPS,
        total_frames=options.frames,
        weight_sync_schemes={"policy": weights},  # <--
        track_policy_version=True,
    )
    returns: deque[float] = deque(maxlen=EPISODES)
    frames, begun = 0, time.monotonic()
    try:
        for number, batch in enumerate(collector):
            batch = batch.clone()  # the collector's own memory, which the worker fills again
            ends = batch["next", "done"]
            returns.extend(batch["next", "episode_reward"][ends].tolist())
            frames += batch.numel()
            mean = sum(returns) / max(len(returns), 1)
            if number % 10 == 0:
                versions = batch.get(("next", "policy_version"), None)  # older releases of TorchRL do not tell
                age = "" if versions is None else f"  batch is {weights.version - int(versions.min())} versions old"
                print(f"{frames:7} frames  mean return {mean:6.1f}{age}")
            if len(returns) == EPISODES and mean >= GOAL:
                print(f"reached a mean return of {mean:.1f} after {frames} frames, {time.monotonic() - begun:.1f} s")
                return 0
            learner.learn(batch)
            collector.update_policy_weights_()
    finally:
        print(f"newest version {weights.version}; the workers act with {weights.versions}")
        collector.shutdown()
        weights.shutdown()
    print(f"only {mean:.1f} after {frames} frames; {GOAL:.0f} were to be reached", file=sys.stderr)
    return 1


def with_ray() -> str:
    """Start a local Ray cluster; the endpoint at which worker processes find it."""
    import ray

    context = ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    return f"ray://policy?address={context.address_info['gcs_address']}"


if __name__ == "__main__":
    sys.exit(main())
