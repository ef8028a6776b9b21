"""TorchRL's own weight synchronisation in a trial, driven as its process collectors drive it. No Weightwire in here.

A worker is a leaf ``Collector`` that has its scheme as torchrl's runner gives it to one; the trainer calls
``scheme.send()``, which waits for every worker's acknowledgement. The environment is none, and nobody collects
meanwhile. The workers look at their tensors after the clock has stopped, which is to the peers' favour.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

from weightwire.cli.trial import OPENING, Crew, serve

__all__ = ["NAMES", "Peer", "available"]

_SCHEMES = {
    "torchrl shared memory": "SharedMemWeightSyncScheme",
    "torchrl multiprocess": "MultiProcessWeightSyncScheme",
}
NAMES = tuple(_SCHEMES)


def available() -> bool:
    """Whether the peers are installed. Imports nothing."""
    return find_spec("torchrl") is not None and find_spec("tensordict") is not None


class _Owner:
    """What a scheme asks of the collector that owns it."""

    def __init__(self, policy: Any, workers: int) -> None:
        import torch

        self.policy = policy
        self.policy_device = [torch.device("cpu")] * workers
        self.num_workers = workers


def _policy(module: Any) -> Any:
    from tensordict.nn import TensorDictModule

    return TensorDictModule(module, in_keys=["observation"], out_keys=["action"])


class Peer:
    """The trainer of a trial of a scheme."""

    def __init__(self, what: str, *, tensors: int, nbytes: int, workers: int, apply: str) -> None:
        import torch
        import torch.multiprocessing
        from torchrl import weight_update

        from weightwire.cli.ends import make_state

        torch.set_num_threads(2)
        # What is trained is not the collector's own policy, whose memory these schemes share with the workers: there an
        # update would move nothing.
        self._module = make_state(tensors, nbytes)
        self._trained = _policy(self._module)
        self._owner = _Owner(_policy(make_state(tensors, nbytes)), workers)  # kept: the scheme holds it weakly
        self._scheme = getattr(weight_update, _SCHEMES[what])()
        context = torch.multiprocessing.get_context("forkserver")
        self._scheme.init_on_sender(model_id="policy", context=self._owner, ctx=context)
        self._crew = Crew(work, [(self._scheme, number, tensors, nbytes) for number in range(workers)])
        self._version = 0

    def start(self) -> dict[str, Any]:
        return {}  # its workers were started with it: they get the scheme as it was then

    def open(self) -> dict[str, Any]:
        self._crew.ask("ready", seconds=OPENING)  # workers that take longer than 10 s to start fail in these schemes
        self._crew.tell("open")
        self._scheme.connect()
        self._crew.answers(OPENING)
        nbytes = sum(tensor.nbytes for tensor in self._module.parameters())
        return {"endpoint": "", "capabilities": ["processes"], "processes": True, "nbytes": nbytes, "notes": {}}

    def turn(self) -> dict[str, Any]:
        from weightwire.cli.ends import change, compare, digest

        self._version += 1
        change(self._module, float(self._version))
        begun = time.perf_counter()
        self._scheme.send(weights=self._trained)
        seconds = time.perf_counter() - begun
        self._crew.ask("look", float(self._version))
        compare(digest(self._module), self._crew.ask("digest"))
        return {"seconds": seconds, "phases": {}}

    def close(self) -> None:
        self._crew.close()
        self._scheme.shutdown()


def _environment() -> Any:
    """An environment in which nothing happens."""
    from torchrl.data import Composite, Unbounded
    from torchrl.envs import EnvBase

    class Nowhere(EnvBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(device="cpu", batch_size=())
            self.observation_spec = Composite(observation=Unbounded((1,)))
            self.action_spec = Unbounded((1,))
            self.reward_spec = Unbounded((1,))

        def _reset(self, tensordict: Any, **_: Any) -> Any:
            return self.observation_spec.zero()

        def _step(self, tensordict: Any) -> Any:
            found = self.observation_spec.zero()
            return found.update(self.full_reward_spec.zero()).update(self.full_done_spec.zero())

        def _set_seed(self, seed: int | None) -> None: ...

    return Nowhere()


class _PeerEnd:
    """A worker of a trial of a scheme."""

    def __init__(self, scheme: Any, number: int, tensors: int, nbytes: int) -> None:
        from weightwire.cli.ends import make_state

        self._scheme, self._number = scheme, number
        self._policy = _policy(make_state(tensors, nbytes))

    def ready(self) -> None: ...

    def open(self) -> None:
        self._scheme.init_on_receiver(model=self._policy, model_id="policy", worker_idx=self._number)
        self._scheme.connect(worker_idx=self._number)  # replaces the policy's parameters
        from torchrl.collectors import Collector

        self._leaf = Collector(
            _environment(), self._policy, frames_per_batch=1, total_frames=-1, auto_register_policy_transforms=False
        )
        self._leaf.register_scheme_receiver({"policy": self._scheme})

    def look(self, sentinel: float) -> None:
        from weightwire.cli.ends import Look

        Look(self._policy)(sentinel)

    def digest(self) -> str:
        from weightwire.cli.ends import digest

        return digest(self._policy)

    def close(self) -> None: ...


def work(pipe: Connection, scheme: Any, number: int, tensors: int, nbytes: int) -> None:
    """A worker's process."""
    serve(pipe, _PeerEnd(scheme, number, tensors, nbytes))
