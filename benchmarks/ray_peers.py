"""What a user of Ray has: the raw store, a put of the state_dict, and TorchRL's scheme.

One set of actors serves the last two, so that the large state fits into memory: each actor has one policy.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import ray
import torch
from floors import views, walk
from measure import PATIENCE, Contender
from ray_actors import REMOTE, Actor, RayCrew
from states import nbytes
from torch import nn
from torchrl.weight_update import RayWeightSyncScheme
from torchrl_peers import Leaf, as_policy
from workers import contender, counter

__all__ = ["actor_crew"]


class PeerActor(Actor):
    """A worker for naive Ray and for TorchRL's scheme: with the methods that a remote ``Collector`` has for the latter.

    It need not wait for anything: both ways call it.
    """

    def __init__(self, state: str, index: int) -> None:
        super().__init__(state)
        self.leaf = Leaf.of(as_policy(self.module))
        self.leaf.worker_idx = index

    def take(self, sentinel: float, *how: str) -> None:
        self.ready_for(sentinel)
        self.leaf.expect(sentinel)

    def load(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state)
        self.leaf.look(self.leaf.sentinel)

    def register_scheme_receiver(self, schemes: dict[str, Any], *, synchronize_weights: bool) -> None:
        self.leaf.register_scheme_receiver(schemes, synchronize_weights=synchronize_weights)

    def cascade_execute(self, path: str) -> None:
        self.leaf.cascade_execute(path)

    def _receive_weights_scheme(self) -> None:
        self.leaf._receive_weights_scheme()
        self.leaf.await_update()


def actor_crew(stack: ExitStack, module: nn.Module, state: str, workers: int) -> dict[str, Contender]:
    """One raw ``ray.put`` of as many bytes; a put of the state_dict that all actors load; TorchRL's scheme.

    The actors of the last two are the same, so that the large state fits into memory.
    """
    remote = ray.remote(**REMOTE)(PeerActor)
    crew = RayCrew(stack, [remote.remote(state, index) for index in range(workers)])
    policy = as_policy(module)
    scheme = RayWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", remote_collectors=crew.actors, num_workers=workers, model=policy)
    stack.callback(scheme.shutdown)
    registered = [a.register_scheme_receiver.remote({"policy": scheme}, synchronize_weights=False) for a in crew.actors]
    ray.get(registered, timeout=PATIENCE)
    connected = [actor.cascade_execute.remote("_receiver_schemes['policy'].connect") for actor in crew.actors]
    scheme.connect()
    ray.get(connected, timeout=PATIENCE)

    kept: list[Any] = []  # what was put, and its reference

    def load() -> None:
        reference = ray.put(module.state_dict())
        ray.get([actor.load.remote(reference) for actor in crew.actors], timeout=PATIENCE)

    def send() -> None:
        scheme.send(weights=scheme.strategy.extract_weights(policy))

    def fill() -> None:
        flat = np.empty(nbytes(module), np.uint8)
        torch._foreach_copy_(views(torch.from_numpy(flat), walk(module)), walk(module))
        kept[:] = [flat]

    def compare() -> None:
        flat, reference = kept
        if not np.array_equal(ray.get(reference), flat):
            raise AssertionError("what was put is not what is there")
        kept.clear()  # and with it, the room

    sentinels = counter(1e6)  # other ones than Weightwire's
    return {
        "raw ray.put": Contender(lambda: kept.append(ray.put(kept[0])), fill, compare, peer=True),
        "ray.put(state_dict)": contender(crew, module, load, sentinels, peer=True),
        "TorchRL Ray": contender(crew, module, send, sentinels, peer=True),
    }
