"""nccl over Gloo, and what a user of torch.distributed has without it: flat broadcasts, and TorchRL's scheme.

One crew serves all of them, or the large state would not fit into memory: each worker has one policy, in which a
receiver, a leaf collector and plain broadcasts leave by turns what they have brought. The second buffer that our ends
keep is lent to the plain broadcasts for their turns.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

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


class Flat:
    """Memory for a flat broadcast, and the ``tensors``' shapes over it: lent by a pool of ours, outside of the clock.

    It is as good as memory of the peer's own: touched, always the same one or two buffers, and nobody else's meanwhile.
    """

    def __init__(self, pool: Any, tensors: list[Tensor]) -> None:
        self.pool, self.tensors = pool, tensors
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self.known: dict[int, list[Tensor]] = {}
        self.give_back()

    def borrow(self) -> None:
        self.lease = self.pool.take(self.nbytes)
        self.bytes = self.lease.buffer[: self.nbytes]
        if self.bytes.data_ptr() not in self.known:
            self.bytes.zero_()
            self.known[self.bytes.data_ptr()] = views(self.bytes, self.tensors)
        self.views = self.known[self.bytes.data_ptr()]

    def give_back(self) -> None:
        self.lease = self.bytes = self.views = None

    def digest(self) -> str:
        return xxhash.xxh3_128(self.bytes.numpy()).hexdigest()


class GroupEnd:
    """A worker: a receiver, a leaf collector as ``DistributedCollector`` has it, and, in their turns, a flat buffer for
    plain broadcasts."""

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
        self.ours = WeightwireEnd(module, endpoint, "copy")
        self.flat = Flat(self.ours.receiver._receiver._station._pool, self.targets)  # type: ignore[attr-defined]

    def take(self, sentinel: float, *how: str) -> None:
        if how == ("weightwire",):
            self.ours.take(sentinel)
            return
        self.leaf.expect(sentinel)
        if how == ("torchrl",):
            self.leaf.await_update()
            return
        dist.broadcast(self.flat.bytes, 0)
        if how == ("unpack",):
            torch._foreach_copy_(self.targets, self.flat.views)
            self.leaf.look(sentinel)
        acknowledge()

    def borrow(self) -> None:
        self.flat.borrow()

    def give_back(self) -> str:
        """The digest of what was in it."""
        found = self.flat.digest()
        self.flat.give_back()
        return found

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

    flat = Flat(updater._sender._pool, walk(module))  # type: ignore[attr-defined]

    def pack() -> None:
        torch._foreach_copy_(flat.views, walk(module))

    def broadcast() -> None:
        dist.broadcast(flat.bytes, 0)
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

    def with_flat(inner: Contender) -> Contender:
        """Everybody has a flat buffer for this turn; what was broadcast is compared as it lies there."""

        def before() -> None:
            flat.borrow()
            crew.ask("call", "borrow")
            inner.before()

        def after() -> None:
            inner.after()
            if any(found != flat.digest() for found in crew.ask("call", "give_back")):
                raise AssertionError("a worker's buffer is not what was broadcast")
            flat.give_back()

        return replace(inner, before=before, after=after)

    def send(owner: Trainer = trainer) -> None:  # the scheme holds its owner weakly
        scheme.send()

    def ours(wait: str) -> Contender:
        version = lambda: float(updater.version + 1)  # noqa: E731
        return contender(crew, module, lambda: updater.push(wait=wait), version, "weightwire")

    return {
        "nccl staged": ours("staged"),
        "nccl applied": ours("applied"),
        "pack, broadcast, unpack": with_flat(contender(crew, module, packed, sentinels, "unpack", peer=True)),
        "raw broadcast": with_flat(Contender(broadcast, raw_before, crew.answers, peer=True)),
        "TorchRL Distributed": contender(crew, module, send, sentinels, "torchrl", peer=True),
    }
