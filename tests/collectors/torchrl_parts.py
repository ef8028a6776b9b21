"""What the tests of the TorchRL adapter hand to worker processes, which import it by name."""

from __future__ import annotations

import inspect
import os
import time
from contextlib import suppress

import torch
import torchrl.collectors
import torchrl.collectors.distributed
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase

try:
    from torchrl.collectors import _runner as worker
except ImportError:  # one large module, before 0.11
    from torchrl.collectors import collectors as worker


def _named(*names: str) -> type:
    """A class by the first name that this release has for it."""
    places = (torchrl.collectors, torchrl.collectors.distributed)
    return next(getattr(place, name) for name in names for place in places if hasattr(place, name))


Collector = _named("Collector", "SyncDataCollector")
MultiSyncCollector = _named("MultiSyncCollector", "MultiSyncDataCollector")
MultiAsyncCollector = _named("MultiAsyncCollector", "MultiaSyncDataCollector")
DistributedCollector = _named("DistributedCollector", "DistributedDataCollector")

with suppress(ImportError):
    from torchrl.collectors.llm import LLMCollector  # noqa: F401

# Whether worker processes put a version on their frames: later releases than those in which the option appeared.
VERSIONED = "track_policy_version=" in inspect.getsource(worker)

KEYS = ["action", "low", "high", "constant", "tied", "pid"]


class Proof(TensorDictModuleBase):
    """A policy whose outputs prove with which weights they were computed.

    The trainer gives every weight one value. ``low`` and ``high`` are the least and greatest that were met, in the
    order of a forward that takes its time; ``constant`` is a buffer that no version brings; ``tied`` says whether two
    names are one tensor still.
    """

    in_keys = ["observation"]  # noqa: RUF012
    out_keys = KEYS

    def __init__(self, value: float = 1.0, *, layers: int = 4, width: int = 64, slow: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.layers[-1].weight = self.layers[0].weight  # tied
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("constant", torch.arange(5.0), persistent=False)
        self.slow = slow
        fill(self, value)

    def forward(self, data: TensorDict) -> TensorDict:
        low, high = torch.tensor(float("inf")), torch.tensor(-float("inf"))
        for tensor in (*self.layers.parameters(), self.norm.weight, self.norm.running_mean):
            found = tensor.detach().aminmax()
            low, high = torch.minimum(low, found.min), torch.maximum(high, found.max)
            if self.slow:
                time.sleep(self.slow)
        shape = (*data.batch_size, 1)
        tied = float(self.layers[-1].weight is self.layers[0].weight)
        values = (0.0, low.item(), high.item(), self.constant.sum().item(), tied, float(os.getpid()))
        for key, value in zip(KEYS, values, strict=True):
            data.set(key, torch.full(shape, value, dtype=torch.float64 if key == "pid" else torch.float32))
        return data


def fill(policy: nn.Module, value: float) -> nn.Module:
    """Train: in place, as optimizers do."""
    with torch.no_grad():
        for tensor in (*policy.parameters(), *(b for name, b in policy.named_buffers() if "running" in name)):
            tensor.fill_(value)
    return policy


class Still(EnvBase):
    """An environment in which nothing happens, quickly."""

    def __init__(self) -> None:
        super().__init__(batch_size=[])
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, data: TensorDict | None = None) -> TensorDict:
        return TensorDict({"observation": torch.zeros(1)}, [])

    def _step(self, data: TensorDict) -> TensorDict:
        done = torch.zeros(1, dtype=torch.bool)
        ones: Tensor = torch.ones(1)
        return TensorDict({"observation": ones, "reward": ones, "done": done, "terminated": done.clone()}, [])

    def _set_seed(self, seed: int | None) -> None:
        pass


class Judged(Still):
    """Its observations are the bias of a model of its own, which is updated beside the policy."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = fill(nn.Linear(1, 1), 0.0)

    def _step(self, data: TensorDict) -> TensorDict:
        return super()._step(data).set("observation", self.critic.bias.detach().clone())


class Counter(nn.Module):
    """State that is neither parameter nor buffer."""

    count = torch.tensor(0.0)

    def get_extra_state(self) -> Tensor:
        return self.count

    def set_extra_state(self, state: Tensor) -> None:
        self.count = state


class Counting(Proof):
    """Shows the extra state of a child where ``Proof`` shows its constant."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.counter = Counter()

    def forward(self, data: TensorDict) -> TensorDict:
        data = super().forward(data)
        return data.set("constant", torch.full_like(data["constant"], float(self.counter.count)))


class Placed(Proof):
    """Shows where its weights lie, and does nothing that a compiler would leave out."""

    def forward(self, data: TensorDict) -> TensorDict:
        tensors = [*self.layers.parameters(), self.norm.weight, self.norm.running_mean]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        shape = (*data.batch_size, 1)
        for key in ("action", "tied"):
            data.set(key, torch.zeros(shape))
        data.set("low", flat.min().expand(shape).clone())
        data.set("high", flat.max().expand(shape).clone())
        data.set("constant", self.place().expand(shape))
        return data.set("pid", torch.full(shape, 1.0, dtype=torch.float64))

    @torch.compiler.disable
    def place(self) -> Tensor:
        return torch.tensor(float(hash(tuple(tensor.data_ptr() for tensor in self.parameters())) % 2**20))


def low_and_high(data: TensorDict) -> dict[str, float]:
    return {"low": data["low"].min().item(), "high": data["high"].max().item()}


def proof_for(env: EnvBase | None = None) -> nn.Module:
    return Proof(0.5)


def lazy() -> nn.Module:
    policy = Proof(1.0)
    policy.head = nn.LazyLinear(3)
    return policy


def still() -> EnvBase:
    return Still()


def judged() -> EnvBase:
    return Judged()


def proof() -> nn.Module:
    return Proof(0.5)


def wide_proof() -> nn.Module:
    return Proof(0.5, width=65)


def slow_start() -> EnvBase:
    """Longer than the ten seconds that TorchRL's own schemes wait for."""
    time.sleep(11)
    return Still()
