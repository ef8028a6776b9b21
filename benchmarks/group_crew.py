"""nccl over Gloo, and what a user of torch.distributed has without it: flat broadcasts, and TorchRL's scheme.

One crew serves all of them, or the large state would not fit into memory: each worker has one policy, in which a
receiver, a leaf collector and plain broadcasts leave by turns what they have brought.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import states
import torch
import torch.distributed as dist
import xxhash
from floors import views, walk
from measure import PATIENCE, Contender
from torch import Tensor, nn
from torchrl.weight_update import DistributedWeightSyncScheme
from torchrl_peers import Leaf, Trainer, as_policy
from workers import Crew, WeightwireEnd, contender, counter

from weightwire import WeightUpdater

__all__ = ["group_crew"]


def join(path: str, rank: int, world: int) -> None:
    """The default group: TorchRL's collectors use that one."""
    store = dist.FileStore(path, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE))


def acknowledge() -> None:
    """The trainer returns from this when every worker has come to it."""
    dist.reduce(torch.zeros(1), 0)


def xxh3(flat: Tensor) -> str:
    return xxhash.xxh3_128(flat.numpy()).hexdigest()


class GroupEnd:
    """A worker: a receiver, a leaf collector as ``DistributedCollector`` has it, and a flat buffer for broadcasts."""

    def __init__(
        self,
        scheme: DistributedWeightSyncScheme,
        module: nn.Module,
        endpoint: str,
        path: str,
        rank: int,
        world: int,
    ) -> None:
        join(path, rank, world)
        self.leaf = Leaf.of(as_policy(module))
        scheme.init_on_receiver(model_id="policy", context=self.leaf, worker_idx=rank)
        scheme.connect()  # replaces the policy's parameters
        self.leaf.look_at(module)
        self.scheme = scheme
        self.targets = walk(module)
        self.flat = torch.empty(states.nbytes(module), dtype=torch.uint8)
        self.sources = views(self.flat, self.targets)
        self.ours = WeightwireEnd(module, endpoint, "copy")

    def take(self, sentinel: float, *how: str) -> None:
        if how == ("weightwire",):
            self.ours.take(sentinel)
            return
        self.leaf.expect(sentinel)
        if how == ("torchrl",):
            self.leaf.await_update()
            return
        dist.broadcast(self.flat, 0)
        if how == ("unpack",):
            torch._foreach_copy_(self.targets, self.sources)
            self.leaf.look(sentinel)
        acknowledge()

    def flat_digest(self) -> str:
        return xxh3(self.flat)

    def close(self) -> None:
        self.ours.close()
        self.scheme.shutdown()
        dist.destroy_process_group()


def group_crew(stack: ExitStack, state: str, workers: int) -> dict[str, Contender]:
    """nccl until staged and until applied; pack, broadcast and unpack; the broadcast alone; TorchRL's scheme."""
    module = states.build(state)
    updater = stack.enter_context(WeightUpdater("nccl://127.0.0.1:0", module, timeout=PATIENCE))
    trainer = Trainer(module, workers)
    scheme = DistributedWeightSyncScheme(timeout=2 * PATIENCE)
    scheme.init_on_sender(model_id="policy", context=trainer, num_workers=workers)
    crew = Crew(workers, state, partial(GroupEnd, scheme))
    stack.callback(crew.close)
    path = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store")
    for index in range(workers):
        crew.tell("open", updater.endpoint, path, index + 1, workers + 1, first=index, last=index + 1)
    join(path, 0, workers + 1)
    stack.callback(dist.destroy_process_group)
    stack.callback(scheme._send_instruction, "stop")  # its workers' threads wait in C and hear nothing else
    scheme.connect()
    crew.answers()
    updater.wait_for_workers(workers, PATIENCE)

    flat = torch.empty(states.nbytes(module), dtype=torch.uint8)
    arena = views(flat, walk(module))

    def pack() -> None:
        torch._foreach_copy_(arena, walk(module))

    def broadcast() -> None:
        dist.broadcast(flat, 0)
        acknowledge()

    def packed() -> None:
        pack()
        broadcast()

    sentinels = counter(1e6)  # other ones than the versions: nobody is to find what another one has brought

    def raw_before() -> None:
        sentinel = sentinels()
        states.change(module, sentinel)
        pack()
        crew.take(sentinel, "raw")

    def raw_after() -> None:
        crew.answers()
        if any(found != xxh3(flat) for found in crew.ask("call", "flat_digest")):
            raise AssertionError("a worker's buffer is not what was broadcast")

    def send(owner: Trainer = trainer) -> None:  # the scheme holds its owner weakly
        scheme.send()

    def ours(wait: str) -> Contender:
        version = lambda: float(updater.version + 1)  # noqa: E731
        return contender(crew, module, lambda: updater.push(wait=wait), version, "weightwire")

    return {
        "nccl staged": ours("staged"),
        "nccl applied": ours("applied"),
        "pack, broadcast, unpack": contender(crew, module, packed, sentinels, "unpack", peer=True),
        "raw broadcast": Contender(broadcast, raw_before, raw_after, peer=True),
        "TorchRL Distributed": contender(crew, module, send, sentinels, "torchrl", peer=True),
    }
