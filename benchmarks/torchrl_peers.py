"""TorchRL's weight synchronisation, driven as its own collectors drive it. No Weightwire code in here.

A worker is a real leaf ``Collector`` that received its scheme as torchrl's own runner gives it to one
(``collectors/_runner.py``, ``collectors/distributed/generic.py``); the trainer does what its collectors do in
``update_policy_weights_``, which is ``scheme.send()``. Only the environment is none, and nobody collects meanwhile.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial
from typing import Any

import states
import torch
from measure import PATIENCE, Contender
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector, VanillaWeightUpdater
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.weight_update import WeightSyncScheme
from workers import CONTEXT, Crew, contender, counter

__all__ = ["Leaf", "Trainer", "as_policy", "scheme_crew", "vanilla_updater"]


def as_policy(module: nn.Module) -> TensorDictModule:
    return TensorDictModule(module, in_keys=["observation"], out_keys=["action"])


class Nowhere(EnvBase):
    """An environment in which nothing happens."""

    def __init__(self, width: int) -> None:
        super().__init__(device="cpu", batch_size=())
        self.observation_spec = Composite(observation=Unbounded((width,)))
        self.action_spec = Unbounded((width,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase | None, **_: Any) -> TensorDictBase:
        return self.observation_spec.zero()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.observation_spec.zero().update(self.full_reward_spec.zero()).update(self.full_done_spec.zero())

    def _set_seed(self, seed: int | None) -> None: ...


class Leaf(Collector):
    """A worker's collector. At the end of each update it looks at every tensor, before the scheme acknowledges.

    Most schemes update from a thread of theirs, so that what the look finds is kept for whoever waits.
    """

    sentinel = 0.0
    error: Exception | None = None

    @classmethod
    def of(cls, policy: TensorDictModule) -> Leaf:
        width = next(policy.parameters()).shape[-1]
        leaf: Leaf = cls(
            Nowhere(width), policy, frames_per_batch=1, total_frames=-1, auto_register_policy_transforms=False
        )
        leaf.updated = threading.Event()
        leaf.look_at(policy)
        return leaf

    def look_at(self, policy: nn.Module) -> None:
        """Its parameters are other ones than before."""
        self.look = states.Look(policy)

    def expect(self, sentinel: float) -> None:
        self.updated.clear()
        self.sentinel = sentinel

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        self.error = None
        try:
            super().update_policy_weights_(*args, **kwargs)
            self.look(self.sentinel)
        except Exception as error:  # the scheme would log it, acknowledge nothing, and have its sender wait for ever
            self.error = error
        self.updated.set()

    def await_update(self) -> None:
        if not self.updated.wait(PATIENCE):
            raise TimeoutError(f"no update came within {PATIENCE:.0f} s")
        if self.error:
            raise self.error


class SchemeEnd:
    """A worker of ``MultiSyncCollector`` and its like."""

    def __init__(self, scheme: WeightSyncScheme, module: nn.Module, index: int) -> None:
        policy = as_policy(module)
        scheme.init_on_receiver(model=policy, model_id="policy", worker_idx=index)
        scheme.connect(worker_idx=index)  # replaces the policy's parameters
        self.leaf = Leaf.of(policy)
        self.leaf.register_scheme_receiver({"policy": scheme})
        self.scheme = scheme

    def take(self, sentinel: float, *how: str) -> None:
        self.leaf.expect(sentinel)
        self.leaf.await_update()

    def close(self) -> None:
        self.scheme.shutdown()


class Trainer:
    """What a scheme asks of the collector that owns it."""

    def __init__(self, module: nn.Module, workers: int) -> None:
        self.policy = as_policy(module)
        self.policy_device = [torch.device("cpu")] * workers
        self.num_workers = workers


def scheme_crew(stack: ExitStack, state: str, workers: int, scheme: WeightSyncScheme) -> Contender:
    """A scheme of the process collectors, with a crew of its own.

    What is trained is a policy of its own, as for instance on another device, which is handed to the update: the
    collector's own one becomes the workers' shared memory, where training would be seen at once and an update moves
    nothing.
    """
    module = states.build(state)
    trained = as_policy(module)
    trainer = Trainer(states.build(state), workers)
    scheme.init_on_sender(model_id="policy", context=trainer, ctx=CONTEXT)
    stack.callback(scheme.shutdown)
    crew = Crew(workers, state, partial(SchemeEnd, scheme))
    stack.callback(crew.close)
    crew.ask("memory")  # they are there: workers that take longer than 10 s to start fail in these schemes
    for index in range(workers):
        crew.tell("open", index, first=index, last=index + 1)
    scheme.connect()
    crew.answers()

    def push(owner: Trainer = trainer) -> None:  # schemes hold their owner weakly
        scheme.send(weights=trained)

    return contender(crew, module, push, counter(), peer=True)


def vanilla_updater(source: nn.Module, target: nn.Module) -> VanillaWeightUpdater:
    """Within a process, as a ``Collector`` with this updater has it."""
    policy = as_policy(source)
    return VanillaWeightUpdater(
        weight_getter=lambda: TensorDict.from_module(policy).data,
        policy_weights=TensorDict.from_module(as_policy(target)).data.lock_(),
    )
