"""The two ends over vanilla: what each argument and error means. What holds over every backend is in the kit."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weightwire
from weightwire import (
    ApplyError,
    ClosedError,
    EndpointError,
    EndpointInUseError,
    PreflightError,
    PushError,
    RefusedError,
    UnknownWorkerError,
    WaitTimeout,
    WeightReceiver,
    WeightUpdater,
    hookimpl,
)
from weightwire.collectors.gate import GatedReceiver
from weightwire.transport import PHASES


def model(seed: int = 0, width: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))


@pytest.fixture
def updater() -> Iterator[WeightUpdater]:
    up = WeightUpdater("vanilla", model(0), timeout=5.0)
    yield up
    up._shut(None)  # late failures are the test's own business


def receiver_of(updater: WeightUpdater, weights: Any = None, **options: Any) -> WeightReceiver:
    return WeightReceiver(updater.endpoint, weights, timeout=5.0, **options)


def test_a_version_arrives(updater: WeightUpdater) -> None:
    policy = model(1)
    with receiver_of(updater, policy, worker="w") as receiver:
        assert (receiver.version, receiver.ready, receiver.stamp, receiver.run) == (0, False, None, 0)
        report = updater.push(metadata={"step": 10})
        assert (report.version, report.run, report.receipts["w"].state) == (1, updater.run, "staged")
        assert receiver.pull() == 1
        assert same(policy, model(0))
        assert (receiver.version, receiver.ready, receiver.run) == (1, True, updater.run)
        assert receiver.metadata == {"step": 10}
        assert receiver.pull() is None
        assert updater.wait().receipts["w"].state == "applied"
        assert updater.workers["w"].version == 1
        assert "version 1" in str(report)
        assert "w" in str(report)


def test_a_receiver_without_weights_owns_a_mapping(updater: WeightUpdater) -> None:
    with receiver_of(updater) as receiver:
        updater.push()
        receiver.pull()
        assert set(receiver.weights) == set(model().state_dict())
        assert torch.equal(receiver.weights["0.weight"], model(0)[0].weight)


def test_push_other_weights_leaves_the_trainers_own_alone(updater: WeightUpdater) -> None:
    policy, other = model(1), model(2)
    with receiver_of(updater, policy) as receiver:
        updater.push(other)
        receiver.pull()
        assert same(policy, other)
        updater.push()
        receiver.pull()
        assert same(policy, model(0))


def test_versions_count_from_start_version() -> None:
    with WeightUpdater("vanilla", model(), start_version=41) as updater:
        assert updater.version == 41
        assert updater.push().version == 42


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"wait": "maybe"}, ValueError),
        ({"on_lost": "ignore"}, ValueError),
        ({"workers": "w"}, TypeError),
        ({"workers": []}, UnknownWorkerError),
        ({"workers": ["nobody"]}, UnknownWorkerError),
        ({"metadata": {"x": object()}}, ValueError),
        ({"weights": {}}, PreflightError),
        ({"weights": {"a": 3.0}}, PreflightError),
        ({"partial": True}, PreflightError),
        ({"wait": "applied"}, PushError),
    ],
)
def test_what_cannot_be_asked_uses_up_no_number(
    updater: WeightUpdater, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        updater.push(**arguments)
    assert updater.version == 0
    assert updater.push().version == 1


def test_applied_with_nobody_there_passes_where_allowed(updater: WeightUpdater) -> None:
    assert updater.push(wait="applied", allow_empty=True).receipts == {}


def test_a_misfit_is_refused_before_anything_is_sent(updater: WeightUpdater) -> None:
    policy = model(1, width=5)
    with receiver_of(updater, policy, worker="w") as receiver:
        with pytest.raises(RefusedError, match=r"(?s)'w'.*0\.weight") as caught:
            updater.push()
        assert (caught.value.worker, caught.value.version, updater.version) == ("w", 1, 0)
        assert receiver.pull(0.0) is None


def test_one_misfit_among_two_costs_the_other_nothing(updater: WeightUpdater) -> None:
    good, bad = model(1), model(1, width=5)
    before = {name: value.clone() for name, value in bad.state_dict().items()}
    with receiver_of(updater, good, worker="good") as a, receiver_of(updater, bad, worker="bad") as b:
        with pytest.raises(RefusedError) as caught:
            updater.push()
        report = caught.value.report
        assert report is not None
        assert (report.receipts["bad"].state, report.receipts["good"].state) == ("refused", "staged")
        assert a.pull() == 1
        with pytest.raises(PreflightError, match=r"0\.weight"):
            b.pull()
        assert b.pull(0.0) is None
        assert all(torch.equal(before[name], value) for name, value in bad.state_dict().items())
        assert updater.push(workers=["good"]).receipts["good"].state == "staged"  # and what b said is not told again


def test_a_late_failure_is_raised_once_by_the_next_call(updater: WeightUpdater) -> None:
    failing = [True]

    def target(weights: dict[str, torch.Tensor]) -> None:
        if failing[0]:
            raise RuntimeError("no room")

    with receiver_of(updater, target, worker="w") as receiver:
        updater.push()
        with pytest.raises(ApplyError, match="no room"):
            receiver.pull()
        assert not receiver.ready
        assert updater.workers["w"].state == "refusing"
        failing[0] = False
        with pytest.raises(ApplyError, match=r"'w'.*no room") as caught:
            updater.push()
        assert (caught.value.version, caught.value.worker, caught.value.phase) == (1, "w", "commit")
        assert updater.version == 2
        assert receiver.pull() == 2
        assert receiver.ready
        updater.push()


def test_hooks_run_once_after_all_tensors_and_a_failing_one_is_told(updater: WeightUpdater) -> None:
    policy = model(1)
    seen: list[int] = []
    with receiver_of(updater, policy, worker="w") as receiver:

        @receiver.on_applied
        def look(version: int) -> None:
            assert same(policy, model(0))
            seen.append(version)

        @receiver.on_applied
        def fail(version: int) -> None:
            raise KeyError("hook's own")

        receiver.on_applied(seen.append)
        updater.push()
        with pytest.raises(ApplyError, match="hook's own") as caught:
            receiver.pull()
        assert caught.value.phase == "after-hooks"
        assert seen == [1, 1]
        assert receiver.version == 1
        with pytest.raises(ApplyError, match="hook's own"):
            updater.wait()
        assert receiver.pull() is None
        assert updater.wait().receipts["w"].state == "applied"


def test_waiting_for_applied_names_who_did_not_and_then_stops_waiting_for_it(updater: WeightUpdater) -> None:
    with receiver_of(updater, model(1), worker="lazy") as receiver:
        with pytest.raises(WaitTimeout, match=r"'lazy'.*wait.*not applied after 0\.\d+ s") as caught:
            updater.push(wait="applied", timeout=0.1)
        assert isinstance(caught.value, TimeoutError)
        assert updater.workers["lazy"].state == "stuck"
        assert updater.push().receipts["lazy"].state == "stuck"
        receiver.pull()
        assert updater.wait(timeout=5).receipts["lazy"].state == "applied"


def test_wait_for_workers_and_wait_for_versions(updater: WeightUpdater) -> None:
    with pytest.raises(WaitTimeout, match="nobody"):
        updater.wait_for_workers(1, timeout=0.05)
    with pytest.raises(ValueError, match="not pushed"):
        updater.wait(1)
    with receiver_of(updater, worker="a"):
        assert updater.wait_for_workers(1) == ["a"]


def test_subsets_lie_on_the_last_full_version(updater: WeightUpdater) -> None:
    policy = model(1)
    bias = torch.full((2,), 7.0)
    with receiver_of(updater, policy) as receiver:
        updater.push()
        updater.push({"2.bias": bias}, partial=True)
        assert receiver.pull() == 2
        assert torch.equal(policy[2].bias, bias)
        assert torch.equal(policy[0].weight, model(0)[0].weight)
        with pytest.raises(PreflightError, match=r"2\.bias.*push a full version"):
            updater.push({"0.bias": torch.zeros(3)}, partial=True)
        with pytest.raises(PreflightError, match=r"nothing\.there"):
            updater.push({"nothing.there": bias}, partial=True)
        assert updater.push().version == 3
        updater.push({"0.bias": torch.zeros(3)}, partial=True)
        assert receiver.pull() == 4
        assert torch.equal(policy[2].bias, model(0)[2].bias)


def test_a_targeted_full_version_parts_the_ground_of_subsets(updater: WeightUpdater) -> None:
    with receiver_of(updater, worker="a") as a, receiver_of(updater, worker="b") as b:
        updater.push()
        updater.push(workers=["a"])
        with pytest.raises(PreflightError, match="full"):
            updater.push({"2.bias": torch.zeros(2)}, partial=True)
        updater.push({"2.bias": torch.zeros(2)}, partial=True, workers=["a"])
        assert (a.pull(), b.pull()) == (3, 1)
        with receiver_of(updater, worker="c") as c:
            assert c.pull() == 1
        updater.push()
        assert (a.pull(), b.pull()) == (4, 4)


def test_wait_looks_only_at_those_who_were_addressed(updater: WeightUpdater) -> None:
    with receiver_of(updater, worker="a") as a, receiver_of(updater, worker="b"):
        updater.push(workers=["a"])
        a.pull()
        assert set(updater.wait(timeout=1).receipts) == {"a"}


def test_a_second_worker_of_one_name_is_refused(updater: WeightUpdater) -> None:
    with receiver_of(updater, worker="w"), pytest.raises(EndpointInUseError, match="'w'"):
        receiver_of(updater, worker="w")


@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "x" * 256])
def test_a_workers_name_is_printable_and_bounded(updater: WeightUpdater, name: str) -> None:
    with pytest.raises(ValueError, match="printable"):
        receiver_of(updater, worker=name)


def test_a_second_updater_of_one_place_is_refused(updater: WeightUpdater) -> None:
    with pytest.raises(EndpointInUseError):
        WeightUpdater(updater.endpoint)


def test_a_receiver_belongs_to_one_thread(updater: WeightUpdater) -> None:
    with receiver_of(updater) as receiver:
        updater.push()
        receiver.pull()
        caught: list[BaseException] = []

        def pull() -> None:
            try:
                receiver.pull()
            except RuntimeError as exc:
                caught.append(exc)

        thread = threading.Thread(target=pull)
        thread.start()
        thread.join(10)
        assert "thread" in str(caught[0])


def test_ends() -> None:
    updater = WeightUpdater("vanilla", model())
    receiver = receiver_of(updater, worker="w")
    updater.push()
    updater.close()
    updater.close()
    assert not receiver.connected
    assert receiver.pull() == 1, "what push accepted may still be taken"
    assert receiver.pull() is None
    assert receiver.closed
    for wait in (lambda: receiver.pull(5.0), lambda: receiver.wait(2)):
        with pytest.raises(ClosedError, match="trainer has closed"):
            wait()
    for call in (updater.push, updater.wait, lambda: updater.workers, lambda: updater.wait_for_workers(1)):
        with pytest.raises(ClosedError):
            call()
    receiver.close()
    receiver.close()
    assert receiver.pull(0.0) is None


def test_closing_ends_a_wait_in_another_thread() -> None:
    updater = WeightUpdater("vanilla", model())
    with receiver_of(updater, worker="w"):
        caught: list[BaseException] = []
        begun = threading.Event()

        def wait() -> None:
            begun.set()
            try:
                updater.push(wait="applied", timeout=60)
            except ClosedError as exc:
                caught.append(exc)

        thread = threading.Thread(target=wait)
        thread.start()
        assert begun.wait(10)
        updater.close()
        thread.join(10)
        assert not thread.is_alive()
        assert caught


def test_a_worker_that_never_meets_a_trainer_is_told_where_it_looked() -> None:
    receiver = WeightReceiver("vanilla://nobody-here", timeout=0.05)
    assert receiver.pull(0.0) is None
    with pytest.raises(WaitTimeout, match=r"0\.05 s.*vanilla://nobody-here"):
        receiver.pull()
    receiver.close()


def test_a_receiver_may_come_first() -> None:
    with WeightReceiver("vanilla://first") as receiver:
        assert receiver.pull(0.0) is None
        with WeightUpdater("vanilla://first", model()) as updater:
            updater.push()
            assert receiver.pull() == 1


def test_a_new_updater_takes_over_with_a_newer_epoch() -> None:
    receiver = WeightReceiver("vanilla://again")
    first = WeightUpdater("vanilla://again", model(0))
    first.push()
    receiver.pull()
    first.close()
    with WeightUpdater("vanilla://again", model(1)) as second, WeightReceiver("vanilla://again") as other:
        assert second.run > first.run
        second.push()
        assert other.pull() == 1
    receiver.close()


def test_inline_is_applied_within_push(updater: WeightUpdater) -> None:
    policy = model(1)
    with receiver_of(updater, policy, inline=True, worker="w") as receiver:
        report = updater.push(wait="applied")
        assert same(policy, model(0))
        assert (receiver.version, report.receipts["w"].state) == (1, "applied")
        updater.push({"2.bias": torch.zeros(2)}, partial=True)
        assert not policy[2].bias.any()
        assert receiver.pull() is None


def test_inline_failures_are_raised_by_that_push(updater: WeightUpdater) -> None:
    def target(weights: dict[str, torch.Tensor]) -> None:
        raise RuntimeError("no room")

    with receiver_of(updater, target, inline=True, worker="w"), pytest.raises(ApplyError, match="no room"):
        updater.push()


def test_inline_alias_never_aliases_the_trainers_own_memory(updater: WeightUpdater) -> None:
    policy, trained = model(1), model(2)
    with receiver_of(updater, policy, inline=True, apply="alias"):
        updater.push(trained)
        with torch.no_grad():
            trained[0].weight.zero_()
        assert policy[0].weight.any()


class Listener:
    def __init__(self, fail: bool = False) -> None:
        self.heard: list[str] = []
        self.fail = fail

    def note(self, what: str) -> None:
        self.heard.append(what)
        if self.fail:
            raise RuntimeError("observer's own")

    @hookimpl
    def weightwire_worker_joined(self, worker: str) -> None:
        self.note(f"joined {worker}")

    @hookimpl
    def weightwire_worker_lost(self, worker: str, reason: str) -> None:
        self.note(f"lost {worker}{reason}")

    @hookimpl
    def weightwire_before_push(self, version: int) -> None:
        self.note(f"before {version}")

    @hookimpl
    def weightwire_after_push(self, report: weightwire.PushReport) -> None:
        self.note(f"after {report.version}")

    @hookimpl
    def weightwire_after_pull(self, receipt: weightwire.Receipt) -> None:
        self.note(f"pulled {receipt.version} {receipt.state}")


def test_observers_hear_everything_and_disturb_nothing() -> None:
    quiet, loud, there = Listener(), Listener(fail=True), Listener()
    with WeightUpdater("vanilla", model(), observers=[loud, quiet]) as updater:
        with receiver_of(updater, worker="w", observers=[there]) as receiver:
            report = updater.push()
            receiver.pull()
        updater.push()
        assert quiet.heard == loud.heard == ["joined w", "before 1", "after 1", "lost w", "before 2", "after 2"]
        assert there.heard == ["pulled 1 applied"]
        assert any("observer's own" in error for error in report.errors)


def test_phases_have_their_names(updater: WeightUpdater) -> None:
    with receiver_of(updater, model(1), worker="w") as receiver:
        report = updater.push()
        receiver.pull()
        assert set(report.seconds) <= set(PHASES)
        assert {"extract", "encode", "stage", "wait"} <= set(report.seconds)
        assert set(updater.wait().receipts["w"].seconds) >= {"verify", "commit"}


def test_a_digest_travels_where_it_is_asked_for() -> None:
    with WeightUpdater("vanilla", model(), digest="on") as updater, receiver_of(updater, worker="w") as receiver:
        updater.push()
        receiver.pull()
        assert len(updater.wait().receipts["w"].digest) == 32
    with pytest.raises(ValueError, match="digest"):
        WeightUpdater("vanilla", model(), digest="sometimes")


# -- arguments that are something else ---------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [WeightUpdater, WeightReceiver])
def test_what_can_be_no_weights_is_refused_at_once(end: Any) -> None:
    policy = model()
    for nothing in (3, policy.parameters(), torch.optim.SGD(policy.parameters()), [torch.ones(1)], torch.ones(1)):
        with pytest.raises(PreflightError, match=f"not a {type(nothing).__qualname__}"):
            end("vanilla://weights", nothing)
    for swapped in (policy, {"a": torch.ones(1)}):
        with pytest.raises(EndpointError, match="did you swap the arguments"):
            end(swapped, "vanilla://weights")


def test_arguments_of_another_type_are_named(updater: WeightUpdater) -> None:
    updater.push()
    receiver = WeightReceiver(updater.endpoint, model())
    for call, name in (
        (lambda: updater.push(workers=3), "workers"),  # type: ignore[arg-type]
        (lambda: updater.wait(workers=3), "workers"),  # type: ignore[arg-type]
        (lambda: updater.wait("1"), "version"),  # type: ignore[arg-type]
        (lambda: receiver.wait("1"), "version"),  # type: ignore[arg-type]
        (lambda: updater.wait_for_workers(None), "count"),  # type: ignore[arg-type]
        (lambda: WeightUpdater("vanilla", observers=3), "observers"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=f"^{name} is "):
            call()
    with pytest.raises(EndpointError, match="it is one of 'auto', 'cpu'"):
        WeightUpdater("ipc://?device=CPU")


def test_ends_are_neither_pickled_nor_copied(updater: WeightUpdater) -> None:
    gate = GatedReceiver(updater.endpoint)
    for end in (updater, WeightReceiver(updater.endpoint), gate):
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"cannot be pickled or copied.*Hand on the text of its \.endpoint"):
                copied(end)
    gate.close()
