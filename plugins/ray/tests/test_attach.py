"""Actors that know nothing of Weightwire."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
from weightwire_ray.attached import ATTRIBUTE


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


@pytest.fixture(scope="module")
def crew(nodes: Any) -> Iterator[list[Any]]:
    """To start an actor takes seconds, most of them Ray's and torch's: the tests share some."""
    crew: list[Any] = []
    yield crew
    for actor in crew:
        ray.kill(actor)


@pytest.fixture
def actors(crew: list[Any]) -> Iterator[list[Any]]:
    """Three actors to which nothing is attached, with policies that are new."""
    crew.extend(ray.remote(Plain).options(num_cpus=0).remote() for _ in range(3 - len(crew)))
    yield list(crew)
    for actor in list(crew):
        try:
            ray.get(actor.__ray_call__.remote(_as_new), timeout=60)
        except ray.exceptions.RayError:  # it was to die in the test
            ray.kill(actor)
            crew.remove(actor)


def _as_new(actor: Any) -> None:
    for attached in vars(actor).pop(ATTRIBUTE, {}).values():
        attached.receiver.close(1.0)
    vars(actor).clear()
    actor.__init__()


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
        receipts = weightwire_ray.pull(actors, timeout=60)
        assert names(receipts) == [("applied", version)] * 3
        assert [receipt.worker for receipt in receipts] == workers
        assert {receipt.tensors for receipt in receipts} == {2}
        expected = snapshot(policy.state_dict())
        assert ray.get([actor.state.remote() for actor in actors], timeout=60) == [expected] * 3
    assert names(weightwire_ray.pull(actors, timeout=60)) == [("applied", 3)] * 3, "nothing new is fine"


def test_a_refusal_is_raised_with_all_receipts(updater: WeightUpdater, actors: Any) -> None:
    odd = ray.remote(Plain).options(num_cpus=0).remote(9)
    crew = [actors[0], odd]
    weightwire_ray.attach(crew, updater.endpoint, policy="agent.policy", workers=["good", "odd"])
    updater.wait_for_workers(2)
    with pytest.raises(RefusedError):
        updater.push(torch.nn.Linear(8, 8))
    for _ in range(2):  # and it is not forgotten
        with pytest.raises(RefusedError, match="odd") as caught:
            weightwire_ray.pull(crew, timeout=60)
        assert caught.value.worker == "odd"
        assert caught.value.report is not None
        assert caught.value.report.receipts["good"].state == "applied"
    assert names(weightwire_ray.pull(crew, timeout=60, raising=False)) == [("applied", 1), ("refused", 1)]
    ray.kill(odd)


def test_the_dead_and_the_busy_are_named(updater: WeightUpdater, actors: Any) -> None:
    weightwire_ray.attach(actors, updater.endpoint, policy="agent.policy")
    updater.wait_for_workers(3)
    updater.push(torch.nn.Linear(8, 8))
    actors[1].die.remote()
    receipts = weightwire_ray.pull(actors, timeout=60, raising=False)
    assert [receipt.state for receipt in receipts] == ["applied", "lost", "applied"]
    with pytest.raises(WorkerLostError):
        weightwire_ray.pull(actors, timeout=60)
    actors[0].busy.remote(60)
    with took(at_most=10.0), pytest.raises(WaitTimeout, match="no answer"):
        weightwire_ray.pull([actors[0], actors[2]], timeout=0.5)
    ray.kill(actors[0])  # nobody waits for it


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


class Asynchronous(Plain):
    async def state(self) -> Any:
        return super().state()


@pytest.mark.parametrize(("kind", "options"), [(Plain, {"max_concurrency": 4}), (Asynchronous, {})])
def test_actors_with_threads_or_an_event_loop(updater: WeightUpdater, kind: type, options: dict[str, int]) -> None:
    """Ray runs each call in any of an actor's threads."""
    actor = ray.remote(kind).options(num_cpus=0, **options).remote()
    weightwire_ray.attach([actor], updater.endpoint, policy="agent.policy")
    updater.wait_for_workers(1)
    policy = torch.nn.Linear(8, 8)
    for version in range(1, 9):
        with torch.no_grad():
            policy.weight.add_(1)
        updater.push(policy)
        calls = [actor.state.remote() for _ in range(3)]  # so that threads take turns
        assert names(weightwire_ray.pull([actor], timeout=60)) == [("applied", version)]
        assert ray.get([*calls, actor.state.remote()], timeout=60)[-1] == snapshot(policy.state_dict())
    ray.kill(actor)


def test_one_to_which_nothing_is_attached_keeps_nobody_from_pulling(updater: WeightUpdater, actors: Any) -> None:
    """A restarted actor, say."""
    weightwire_ray.attach(actors[1:], updater.endpoint, policy="agent.policy")
    updater.wait_for_workers(2)
    updater.push(torch.nn.Linear(8, 8))
    receipts = weightwire_ray.pull(actors, timeout=60, raising=False)
    assert names(receipts) == [("failed", 0), ("applied", 1), ("applied", 1)]
    assert "attach() it first" in receipts[0].error
    with pytest.raises(EndpointError, match="attach"):
        weightwire_ray.pull(actors, timeout=60)


def test_attaching_anew_replaces_the_receiver(updater: WeightUpdater, actors: Any) -> None:
    for _ in range(2):
        weightwire_ray.attach(actors[:1], updater.endpoint, policy="agent.policy", workers=["w"])
        updater.wait_for_workers(1)
    updater.push(torch.nn.Linear(8, 8))
    assert names(weightwire_ray.pull(actors[:1], timeout=60)) == [("applied", 1)]


def test_alias_is_refused_for_a_policy_that_is_trained_unless_asked_twice(updater: WeightUpdater, actors: Any) -> None:
    with pytest.raises(CapabilityError, match="training mode"):
        weightwire_ray.attach(actors[:1], updater.endpoint, policy="agent.policy", apply="alias")
    ray.get(actors[0].calm.remote(), timeout=60)
    insisting = f"{updater.endpoint}?alias=force"
    weightwire_ray.attach(actors[:1], updater.endpoint, policy="agent.policy", apply="alias", workers=["calm"])
    weightwire_ray.attach(actors[1:2], insisting, policy="agent.policy", apply="alias", workers=["bold"])
    updater.wait_for_workers(2)
    policy = torch.nn.Linear(8, 8)
    updater.push(policy)
    assert names(weightwire_ray.pull(actors[:2], timeout=60)) == [("applied", 1)] * 2
    states = ray.get([actor.state.remote() for actor in actors[:2]], timeout=60)
    assert states == [snapshot(policy.state_dict())] * 2
