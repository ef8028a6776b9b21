"""Workers as actors and tasks: joining, dying, standing still, coming back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from random import Random
from threading import Timer
from typing import Any

import pytest
import ray

from weightwire import WeightReceiver, WeightUpdater, wire
from weightwire.errors import EndpointInUseError, WaitTimeout, WorkerLostError
from weightwire.testing.rig import took
from weightwire.testing.states import counters, seen
from weightwire.testing.workers import until
from weightwire.transport import Joined
from weightwire_ray.engine import mailbox_name
from weightwire_ray.process import started
from weightwire_ray.protocol import PROTOCOL, UNKNOWN, Facts

Hire = Callable[..., Any]


def get(call: Any, timeout: float = 60.0) -> Any:
    return ray.get(call, timeout=timeout)


def mailbox(place: str) -> Any:
    return ray.get_actor(mailbox_name(place.removeprefix("ray://")), namespace="weightwire")


def test_actors_and_a_task_take_what_is_pushed(place: str, updater: WeightUpdater, hire: Hire) -> None:
    @ray.remote(num_cpus=0)
    def task(endpoint: str) -> int:
        with WeightReceiver(endpoint, counters(0), worker="task", timeout=60) as receiver:
            return receiver.wait(2)

    a, b, done = hire(place, "a"), hire(place, "b"), task.remote(place)
    updater.wait_for_workers(3)
    updater.push(counters(1))
    assert [get(actor.pull.remote()) for actor in (a, b)] == [1, 1]
    updater.push(counters(2))
    assert get(done) == 2
    pulling = [actor.pull.remote(10.0) for actor in (a, b)]
    updater.wait(2, workers=["a", "b"])
    assert get(pulling) == [2, 2]
    until(lambda: set(updater.workers) == {"a", "b"}, "the task's goodbye")


@pytest.mark.parametrize("how", ["exit", "ray.kill"])
def test_a_dead_actor_is_lost_and_named(place: str, updater: WeightUpdater, hire: Hire, how: str) -> None:
    victim, other = hire(place, "victim"), hire(place, "other")
    updater.wait_for_workers(2)
    pulling = other.pull.remote(10.0)
    if how == "exit":
        victim.die.remote()
    else:
        ray.kill(victim)
    with took(at_most=5.0), pytest.raises(WorkerLostError, match="victim"):
        updater.push(counters(1), wait="applied", timeout=10.0)
    assert get(pulling) == 1
    assert set(updater.workers) == {"other"}


def test_a_restarted_actor_is_a_new_incarnation_and_not_ready_until_current(
    place: str, updater: WeightUpdater, hire: Hire
) -> None:
    worker = hire(place, "w", actor={"max_restarts": 1})
    updater.wait_for_workers(1)
    updater.push(counters(1))
    assert get(worker.pull.remote()) == 1
    before = updater.workers["w"].incarnation
    worker.die.remote()

    def back() -> bool:
        now = updater.workers.get("w")
        return now is not None and now.incarnation != before

    until(back, "the actor is back")
    until(lambda: _answers(worker), "the actor answers", timeout=60)
    assert get(worker.look.remote())["ready"] is False
    assert get(worker.pull.remote()) == 1
    with pytest.raises(WorkerLostError, match="w"):
        updater.wait(1)
    updater.push(counters(2))
    assert get(worker.wait.remote(2)) == 2


def _answers(actor: Any) -> bool:
    try:
        get(actor.look.remote())
    except ray.exceptions.RayActorError:
        return False
    return True


def test_a_stopped_actor_costs_its_deadline_once_and_is_named(place: str, updater: WeightUpdater, hire: Hire) -> None:
    stopped, other = hire(place, "stopped"), hire(place, "other")
    updater.wait_for_workers(2)
    pid = get(stopped.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    try:
        pulling = other.pull.remote(10.0)
        with took(at_most=3.0), pytest.raises(WaitTimeout, match="stopped"):
            updater.push(counters(1), wait="applied", timeout=1.0)
        assert get(pulling) == 1
        with took(at_most=3.0):
            for version in range(2, 22):
                updater.push(counters(version))
        assert updater.workers["stopped"].state == "stuck"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert get(stopped.wait.remote(21)) == 21
    assert updater.wait(21, workers=["stopped"]).receipts["stopped"].state == "applied"


def test_a_killed_mailbox_is_made_again(place: str, updater: WeightUpdater, hire: Hire) -> None:
    worker = hire(place, "w")
    updater.wait_for_workers(1)
    updater.push(counters(1))
    updater.push({"layer0.weight": counters(2)["layer0.weight"]}, partial=True)
    assert get(worker.pull.remote()) == 2
    first = mailbox(place)
    ray.kill(first)
    report = updater.push(counters(3), timeout=10.0)
    assert report.version == 3
    assert get(worker.wait.remote(3)) == 3
    until(lambda: "w" in updater.workers and updater.workers["w"].version == 3, "the worker has come back")
    assert get(hire(place, "late").pull.remote()) == 3


def test_a_mailbox_that_dies_between_pushes_still_has_everything(
    place: str, updater: WeightUpdater, hire: Hire
) -> None:
    a, b = hire(place, "a"), hire(place, "b")
    updater.wait_for_workers(2)
    updater.push(counters(1))
    updater.push(counters(2), workers=["b"])
    first = mailbox(place)._actor_id
    ray.kill(mailbox(place))
    until(lambda: _mailbox_id(place) not in (first, None), "the mailbox is made again")
    assert get(hire(place, "late").pull.remote()) == 1
    assert get([a.pull.remote(), b.pull.remote()]) == [1, 2]


def test_a_stopped_mailbox_costs_deadlines_and_nothing_else(place: str, updater: WeightUpdater, hire: Hire) -> None:
    worker = hire(place, "w")
    updater.wait_for_workers(1)
    updater.push(counters(1))
    assert get(worker.pull.remote()) == 1
    pid = get(mailbox(place).__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    try:
        with took(at_most=5.0), pytest.raises(WaitTimeout, match="the mailbox"):
            updater.push(counters(2), timeout=1.0)
        assert get(worker.look.remote())["value"] == 1
    finally:
        os.kill(pid, signal.SIGCONT)
    assert get(worker.wait.remote(2)) == 2, "it is told all the same"
    updater.push(counters(3), wait="staged")
    assert get(worker.wait.remote(3)) == 3


def test_who_dies_together_with_the_mailbox_is_lost(place: str, updater: WeightUpdater, hire: Hire) -> None:
    victim, other = hire(place, "victim"), hire(place, "other")
    updater.wait_for_workers(2)
    pid = get(victim.pid.remote())
    os.kill(pid, signal.SIGSTOP)  # so that nothing of it comes back
    ray.kill(mailbox(place))
    os.kill(pid, signal.SIGKILL)
    pulling = other.pull.remote(40.0)
    with took(at_most=40.0), pytest.raises(WorkerLostError, match="victim"):  # a new actor takes Ray its time
        updater.push(counters(1), wait="applied", timeout=40.0)
    assert get(pulling) == 1


@pytest.mark.soak
def test_mailboxes_die_again_and_again(place: str, updater: WeightUpdater, hire: Hire) -> None:
    """At random moments of pushes and pulls: every version is whole, and the last one arrives."""
    random = Random(7)
    workers = [hire(place, f"w{i}") for i in range(2)]
    updater.wait_for_workers(2)
    following = [worker.follow.remote(400) for worker in workers]
    for version in range(1, 400):
        if version % 20 == 0:
            killer = Timer(random.random() * 0.05, lambda: ray.kill(mailbox(place)))
            killer.start()
        updater.push(counters(version), wait=random.choice(["none", "none", "staged"]), on_lost="drop", timeout=30.0)
        if version % 20 == 0:
            killer.join()
    updater.push(counters(400), on_lost="drop", timeout=30.0)
    assert all(looks > 1 for looks in get(following))
    assert updater.wait(400, on_lost="drop", timeout=30.0).receipts.keys() == {"w0", "w1"}


def _mailbox_id(place: str) -> Any:
    try:
        return mailbox(place)._actor_id
    except ValueError:
        return None


def test_a_second_updater_is_refused_until_the_first_is_dead(
    place: str, hire: Hire, opened: Callable[[Any], Any]
) -> None:
    @ray.remote(num_cpus=0)
    class Trainer:
        def __init__(self, endpoint: str) -> None:
            self.updater = WeightUpdater(endpoint, timeout=60)

        def push(self, version: int) -> tuple[int, int]:
            return self.updater.push(counters(version)).version, self.updater.run

    first, worker = Trainer.remote(place), hire(place, "w")
    _, run = get(first.push.remote(1))
    assert get(worker.pull.remote()) == 1
    with took(at_most=5.0), pytest.raises(EndpointInUseError, match=place):
        WeightUpdater(place)
    ray.kill(first)
    until(lambda: not get(worker.look.remote())["connected"], "the worker learns of it")
    assert get(worker.look.remote())["value"] == 1
    second = opened(WeightUpdater(place, timeout=60))
    assert second.run > run
    second.push(counters(7))
    assert get(worker.pull.remote(10.0)) == 1, "the first version of its run"
    assert get(worker.look.remote()) | {"run": second.run, "value": 7} == get(worker.look.remote())


def test_one_name_for_two_actors_is_refused(place: str, updater: WeightUpdater, hire: Hire) -> None:
    first = hire(place, "w")
    updater.wait_for_workers(1)
    with pytest.raises(ray.exceptions.RayTaskError, match="another live worker is called 'w'"):
        get(hire(place, "w").pull.remote(5.0))
    updater.push(counters(1))
    assert get(first.pull.remote()) == 1


def test_an_empty_location_is_handed_on(hire: Hire, opened: Callable[[Any], Any], cluster: str) -> None:
    one, two = opened(WeightUpdater("ray", timeout=60)), opened(WeightUpdater("ray", timeout=60))
    assert one.endpoint != two.endpoint
    worker = hire(one.endpoint, "w")
    one.push(counters(1))
    two.push(counters(2))
    assert get(worker.pull.remote()) == 1
    assert get(worker.look.remote())["value"] == 1


def test_who_closes_while_it_joins_leaves(place: str, updater: WeightUpdater) -> None:
    """At whatever point of its hello: nobody waits for it until its silence tells."""
    updater.push(counters(1))
    for delay in range(12):
        receiver = WeightReceiver(place, counters(0), worker=f"w{delay}")
        time.sleep(delay / 2000)  # wherever its thread is by then
        receiver.close()
    with took(at_most=5.0):
        updater.push(counters(2), wait="applied", allow_empty=True)


def test_a_goodbye_may_overtake_its_hello(place: str, updater: WeightUpdater) -> None:
    """Ray does not keep the order of calls to an async actor."""
    box, me = mailbox(place), ("hasty", time.time_ns())
    get(box.leave.remote(*me))
    joined = Joined(worker=me[0], incarnation=me[1])
    facts = Facts(ray.get_runtime_context().get_node_id(), os.getpid(), started(os.getpid()), "")
    assert get(box.join.remote(PROTOCOL, *me, wire.encode_event(joined), facts)) == ("", "")
    assert get(box.news.remote(*me, (None, None), 0.0)).kind == UNKNOWN
    assert updater.push(counters(1), wait="applied", allow_empty=True).receipts == {}


def test_goodbye_reaches_everybody(place: str, updater: WeightUpdater, hire: Hire) -> None:
    workers = [hire(place, f"w{i}") for i in range(3)]
    updater.wait_for_workers(3)
    updater.push(counters(1))
    assert get([worker.pull.remote() for worker in workers]) == [1, 1, 1]
    updater.close()
    for worker in workers:
        until(lambda w=worker: get(w.look.remote())["closed"], "the worker learns that it is over")  # type: ignore[misc]


def test_who_was_stopped_at_the_goodbye_hears_it_later(
    place: str, updater: WeightUpdater, hire: Hire, opened: Callable[[Any], Any]
) -> None:
    worker = hire(place, "w")
    updater.push(counters(1), wait="staged")
    process = get(worker.pid.remote())
    os.kill(process, signal.SIGSTOP)
    with took(at_most=5.0):
        updater.push(counters(2), wait="none")
        updater.close()
    os.kill(process, signal.SIGCONT)
    assert get(worker.pull.remote(10.0)) == 2
    until(
        lambda: get(worker.pull.remote()) is None and get(worker.look.remote())["closed"], "it learns that it is over"
    )
    second = opened(WeightUpdater(place, timeout=60))  # the place is free
    second.push(counters(3))


def test_a_mailbox_that_is_made_again_while_its_updater_closes_is_ended(
    place: str, updater: WeightUpdater, opened: Callable[[Any], Any]
) -> None:
    updater.push(counters(1))
    for _ in range(3):
        ray.kill(mailbox(place))
        updater.close()
        updater = opened(WeightUpdater(place, timeout=60))
        updater.push(counters(1))


def test_what_is_applied_while_there_is_no_mailbox_is_told_to_the_next(
    place: str, updater: WeightUpdater, opened: Callable[[Any], Any]
) -> None:
    """At whatever point of its return the worker pulls."""
    receiver = opened(WeightReceiver(place, counters(0), worker="w"))
    for number in range(1, 5):
        updater.push(counters(number))
        ray.kill(mailbox(place))
        until(lambda: not receiver.connected, "the worker misses the mailbox")
        time.sleep(number / 5)  # it looks for the next one, or has said hello
        receiver.pull()
        assert updater.wait(number, timeout=20.0).receipts["w"].state == "applied"


def test_namespaces_are_apart_and_a_mailbox_takes_no_cpu(
    place: str, opened: Callable[[Any], Any], cluster: str
) -> None:
    cpus = ray.cluster_resources()["CPU"]
    for number in (1, 2):
        endpoint = f"{place}?namespace=n{number}"
        updater, receiver = opened(WeightUpdater(endpoint, timeout=60)), opened(WeightReceiver(endpoint, counters(0)))
        updater.wait_for_workers(1)
        updater.push(counters(number))
        receiver.pull()
        assert seen(receiver.weights) == number
        name = mailbox_name(place.removeprefix("ray://"))
        assert ray.get_actor(name, namespace=f"n{number}")
    until(lambda: ray.available_resources()["CPU"] == cpus, "no CPU is taken")


class Squatter:
    def here(self) -> bool:
        return True


@pytest.mark.usefixtures("cluster")
def test_an_actor_of_that_name_that_is_no_mailbox(place: str, opened: Callable[[Any], Any]) -> None:
    name = mailbox_name(place.removeprefix("ray://"))
    squatter = ray.remote(Squatter).options(name=name, namespace="weightwire", num_cpus=0).remote()
    with took(at_most=10.0), pytest.raises(EndpointInUseError, match="not Weightwire's"):
        WeightUpdater(place, timeout=60)
    receiver = opened(WeightReceiver(place, counters(0)))
    with pytest.raises(WaitTimeout, match="not Weightwire's"):
        receiver.pull(1.0)
    assert get(squatter.here.remote()), "it was left alone"
    ray.kill(squatter)
    until(lambda: _mailbox_id(place) is None, "it is gone")
    updater = opened(WeightUpdater(place, timeout=60))
    updater.push(counters(1))
    assert receiver.pull(30.0) == 1


@pytest.mark.parametrize("event", [b"", b"\x80\x04.", b"\xff" * 100])
def test_what_is_no_event_is_dropped(
    place: str, updater: WeightUpdater, opened: Callable[[Any], Any], event: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody in the cluster calls the mailbox."""
    receiver = opened(WeightReceiver(place, counters(0), worker="w"))
    updater.wait_for_workers(1)
    box = mailbox(place)
    get(box.report.remote("w", receiver._incarnation, event))
    get(box.report.remote("nobody", 1, event))
    with pytest.raises(ray.exceptions.RayTaskError):
        get(box.report.remote("w", receiver._incarnation, {"not": event}))
    until(lambda: updater.workers and "malformed" in caplog.text, "it is told in the log")
    updater.push(counters(1))
    assert receiver.pull(30.0) == 1
    assert updater.wait(1).receipts["w"].state == "applied"


def test_nothing_new_is_one_look_at_an_attribute(
    place: str, updater: WeightUpdater, opened: Callable[[Any], Any]
) -> None:
    receiver = opened(WeightReceiver(place, counters(0)))
    updater.push(counters(1))
    receiver.pull()
    receiver.pull(0.0)
    best = min(_seconds(receiver) for _ in range(20))
    assert best < 2e-6


def _seconds(receiver: WeightReceiver) -> float:
    begun = time.perf_counter()
    for _ in range(1000):
        receiver.pull(0.0)
    return (time.perf_counter() - begun) / 1000
