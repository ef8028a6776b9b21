"""Actors that know nothing of Weightwire."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ray
import torch

import weightwire_ray
from weightwire import WeightUpdater
from weightwire.errors import (
    CapabilityError,
    EndpointError,
    PreflightError,
    RefusedError,
    WaitTimeout,
    WorkerLostError,
)
from weightwire.testing.rig import took
from weightwire.testing.states import snapshot


class Plain:
    """An actor as users have them."""

    def __init__(self, size: int = 8) -> None:
        self.agent = {"policy": torch.nn.Linear(size, size)}

    def state(self) -> Any:
        return snapshot(self.agent["policy"].state_dict())

    def calm(self) -> None:
        self.agent["policy"].eval().requires_grad_(False)

    def busy(self, seconds: float) -> None:
        torch.multiprocessing.Event().wait(seconds)

    def die(self) -> None:
        os._exit(1)


@pytest.fixture
def actors(cluster: str) -> Any:
    actors = [ray.remote(Plain).options(num_cpus=0).remote() for _ in range(3)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def names(receipts: Any) -> list[tuple[str, int]]:
    return [(receipt.state, receipt.version) for receipt in receipts]


def test_each_applies_the_newest_version(updater: WeightUpdater, actors: Any) -> None:
    policy = torch.nn.Linear(8, 8)
    workers = weightwire_ray.attach(actors, updater.endpoint, policy="agent.policy")
    assert len(set(workers)) == 3
    assert all(name.startswith("Plain-") for name in workers)
    updater.wait_for_workers(3)
    for version in (1, 2, 3):
        with torch.no_grad():
            policy.weight.add_(1)
        updater.push(policy)
        receipts = weightwire_ray.pull(actors, timeout=20)
        assert names(receipts) == [("applied", version)] * 3
        assert [receipt.worker for receipt in receipts] == workers
        assert {receipt.tensors for receipt in receipts} == {2}
        expected = snapshot(policy.state_dict())
        assert ray.get([actor.state.remote() for actor in actors], timeout=20) == [expected] * 3
    assert names(weightwire_ray.pull(actors, timeout=20)) == [("applied", 3)] * 3, "nothing new is fine"


def test_a_refusal_is_raised_with_all_receipts(updater: WeightUpdater, actors: Any) -> None:
    odd = ray.remote(Plain).options(num_cpus=0).remote(9)
    crew = [actors[0], odd]
    weightwire_ray.attach(crew, updater.endpoint, policy="agent.policy", workers=["good", "odd"])
    updater.wait_for_workers(2)
    with pytest.raises(RefusedError):
        updater.push(torch.nn.Linear(8, 8))
    for _ in range(2):  # and it is not forgotten
        with pytest.raises(RefusedError, match="odd") as caught:
            weightwire_ray.pull(crew, timeout=20)
        assert caught.value.worker == "odd"
        assert caught.value.report is not None
        assert caught.value.report.receipts["good"].state == "applied"
    assert names(weightwire_ray.pull(crew, timeout=20, raising=False)) == [("applied", 1), ("refused", 1)]
    ray.kill(odd)


def test_the_dead_and_the_busy_are_named(updater: WeightUpdater, actors: Any) -> None:
    weightwire_ray.attach(actors, updater.endpoint, policy="agent.policy")
    updater.wait_for_workers(3)
    updater.push(torch.nn.Linear(8, 8))
    actors[1].die.remote()
    receipts = weightwire_ray.pull(actors, timeout=20, raising=False)
    assert [receipt.state for receipt in receipts] == ["applied", "lost", "applied"]
    with pytest.raises(WorkerLostError):
        weightwire_ray.pull(actors, timeout=20)
    actors[0].busy.remote(60)
    with took(at_most=10.0), pytest.raises(WaitTimeout, match="no answer"):
        weightwire_ray.pull([actors[0], actors[2]], timeout=0.5)


def test_a_pull_without_a_first_version_ends_at_its_deadline(updater: WeightUpdater, actors: Any) -> None:
    weightwire_ray.attach(actors[:1], updater.endpoint, policy="agent.policy")
    with took(at_most=5.0), pytest.raises(WaitTimeout, match="first version"):
        weightwire_ray.pull(actors[:1], timeout=0.5)


def test_what_cannot_be_attached(updater: WeightUpdater, actors: Any) -> None:
    with pytest.raises(PreflightError, match="lacks 'nothing'"):
        weightwire_ray.attach(actors, updater.endpoint, policy="agent.nothing")
    with pytest.raises(ValueError, match="2 names for 3 actors"):
        weightwire_ray.attach(actors, updater.endpoint, workers=["a", "b"])
    with pytest.raises(EndpointError, match="attach"):
        weightwire_ray.pull(actors)


def test_attaching_anew_replaces_the_receiver(updater: WeightUpdater, actors: Any) -> None:
    for _ in range(2):
        weightwire_ray.attach(actors[:1], updater.endpoint, policy="agent.policy", workers=["w"])
        updater.wait_for_workers(1)
    updater.push(torch.nn.Linear(8, 8))
    assert names(weightwire_ray.pull(actors[:1], timeout=20)) == [("applied", 1)]


def test_alias_is_refused_for_a_policy_that_is_trained_unless_asked_twice(updater: WeightUpdater, actors: Any) -> None:
    with pytest.raises(CapabilityError, match="training mode"):
        weightwire_ray.attach(actors[:1], updater.endpoint, policy="agent.policy", apply="alias")
    ray.get(actors[0].calm.remote(), timeout=20)
    insisting = f"{updater.endpoint}?alias=force"
    weightwire_ray.attach(actors[:1], updater.endpoint, policy="agent.policy", apply="alias", workers=["calm"])
    weightwire_ray.attach(actors[1:2], insisting, policy="agent.policy", apply="alias", workers=["bold"])
    updater.wait_for_workers(2)
    policy = torch.nn.Linear(8, 8)
    updater.push(policy)
    assert names(weightwire_ray.pull(actors[:2], timeout=20)) == [("applied", 1)] * 2
    states = ray.get([actor.state.remote() for actor in actors[:2]], timeout=20)
    assert states == [snapshot(policy.state_dict())] * 2
