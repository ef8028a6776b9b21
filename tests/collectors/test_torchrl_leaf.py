"""A worker's end by itself: when it begins, when it is over, and where it finds itself."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from types import ModuleType

import pytest
import torch

from weightwire import WeightUpdater
from weightwire.errors import PreflightError


def bare(policy: torch.nn.Module) -> torch.nn.Module:
    """As it comes to a worker process: without memory, and each name a tensor of its own."""
    for owner in policy.modules():
        for table in (owner._parameters, owner._buffers):
            for key, tensor in table.items():
                meta = torch.empty_like(tensor, device="meta")
                table[key] = torch.nn.Parameter(meta) if isinstance(tensor, torch.nn.Parameter) else meta
    return policy


def test_a_policy_without_memory_waits_for_its_first_version(parts: ModuleType) -> None:
    from weightwire.collectors.torchrl.leaf import Feed, Leaf
    from weightwire.collectors.torchrl.modules import kept

    policy = parts.Proof(3.0)
    with WeightUpdater("ipc", policy) as trainer:
        leaf, acting = (
            Leaf(Feed(endpoint=trainer.endpoint, kept=kept(policy), timeout=60), "worker"),
            bare(parts.Proof()),
        )
        worker = threading.Thread(target=leaf.start, args=(acting,))
        worker.start()
        trainer.wait_for_workers(1)
        worker.join(0.3)
        assert worker.is_alive()
        trainer.push()
        worker.join(60)
        assert acting.layers[0].weight.unique().tolist() == [3.0]
        assert acting.layers[-1].weight is acting.layers[0].weight
        assert acting.constant.tolist() == policy.constant.tolist()
        leaf.close()


def test_a_constant_that_nobody_kept_is_named(parts: ModuleType) -> None:
    from weightwire.collectors.torchrl.leaf import Feed, Leaf

    leaf, acting = Leaf(Feed(endpoint="ipc://nobody")), bare(parts.Proof())
    with pytest.raises(PreflightError, match=r"non-persistent buffer 'constant'.*policy_factory"):
        leaf.start(acting)


def test_it_follows_the_module_that_acts_and_the_thread(parts: ModuleType) -> None:
    from weightwire.collectors.torchrl.leaf import Feed, Leaf

    policy = parts.Proof(1.0)
    with WeightUpdater("ipc", policy) as trainer:
        trainer.push()
        leaf, first = Leaf(Feed(endpoint=trainer.endpoint, first=True), "worker"), parts.Proof(0.0)
        leaf.start(first)
        leaf.hook(first)
        copied = copy.deepcopy(first)  # to another device, say: it acts from now on
        trainer.push(parts.fill(policy, 2.0))
        data = parts.TensorDict({"observation": torch.zeros(1)}, [])
        assert copied(data)["low"].item() == 2.0
        trainer.push(parts.fill(policy, 3.0))
        elsewhere = threading.Thread(target=copied, args=(data,))
        elsewhere.start()
        elsewhere.join(30)
        assert (data["low"].item(), data["high"].item()) == (3.0, 3.0)
        assert list(trainer.workers) == ["worker"]
        assert first.layers[0].weight.unique().tolist() == [1.0]

        leaf.close()
        assert not copied._forward_pre_hooks
        leaf(copied, ())  # somebody still has the hook
        trainer.push(parts.fill(policy, 4.0))
        leaf(copied, ())
        assert copied.layers[0].weight.unique().tolist() == [3.0]
        assert not trainer.workers


def test_it_is_idle_at_home_and_begins_anew_elsewhere(parts: ModuleType) -> None:
    from weightwire.collectors.torchrl.leaf import Feed, Leaf

    policy = parts.Proof(1.0)
    with WeightUpdater("ipc", policy) as trainer:
        trainer.push()
        leaf = Leaf(Feed(endpoint=trainer.endpoint, first=True), home=os.getpid())
        leaf.hook(policy)
        policy(parts.TensorDict({"observation": torch.zeros(1)}, []))
        assert not trainer.workers
        travelled = pickle.loads(pickle.dumps(leaf))
        assert travelled.home == leaf.home
        travelled.home = 0  # as another process sees it
        assert travelled.pull(acting := parts.Proof(0.0)) == 1
        assert acting.layers[0].weight.unique().tolist() == [1.0]
        assert len(trainer.workers) == 1
        travelled.close()


def test_a_model_beside_the_policy_is_pulled_with_it_and_leaves_nothing_behind(parts: ModuleType) -> None:
    from weightwire.collectors.torchrl.leaf import Feed, Leaf

    trained, acting, critic = parts.Proof(1.0), parts.Proof(0.0), parts.Proof(0.0)
    with WeightUpdater("ipc", trained) as trainer:
        trainer.push()
        for value in (5.0, 6.0):
            leaf = Leaf(Feed(endpoint=trainer.endpoint, first=True), "critic-0")
            leaf.start(critic)
            for _ in range(2):
                leaf.hook_beside(acting)
            assert len(acting._forward_pre_hooks) == 1
            trainer.push(parts.fill(trained, value))
            acting(parts.TensorDict({"observation": torch.zeros(1)}, []))
            assert critic.layers[0].weight.unique().tolist() == [value]
            pickle.loads(pickle.dumps(acting))(parts.TensorDict({"observation": torch.zeros(1)}, []))
            leaf.close()
            assert not acting._forward_pre_hooks
