"""What happens at an awkward moment (Ctrl-C, a close from elsewhere) is told all the same, and once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import weightwire.receiver
from weightwire import ApplyError, ClosedError, UpdaterLostError, WaitTimeout, WeightReceiver, WeightUpdater
from weightwire.hookspecs import hookimpl
from weightwire.testing.workers import until


def weights(value: float = 0.0) -> dict[str, Tensor]:
    return {"a": torch.full((8,), value)}


def broken(_: Mapping[str, Tensor]) -> None:
    raise ValueError("this target is broken")


@pytest.fixture
def updater() -> Iterator[WeightUpdater]:
    with WeightUpdater("vanilla", weights(1.0), timeout=30) as updater:
        yield updater


def test_what_failed_is_told_by_a_close_that_ends_a_push_in_another_thread(updater: WeightUpdater) -> None:
    ended: list[BaseException] = []

    def push() -> None:
        try:
            updater.push(wait="applied")
        except BaseException as exc:
            ended.append(exc)

    with (
        WeightReceiver(updater.endpoint, broken, worker="bad") as bad,
        WeightReceiver(updater.endpoint, weights(), worker="slow"),
    ):
        thread = threading.Thread(target=push)
        thread.start()
        until(lambda: updater.version == 1, "pushed", 10)
        with pytest.raises(ApplyError):
            bad.pull(10.0)
        until(lambda: updater._roster.failures, "the failure is booked", 10)
        with pytest.raises(ApplyError, match="this target is broken"):
            updater.close()
        thread.join(10)
    assert [type(exc) for exc in ended] == [ClosedError]
    updater.close()


def test_what_failed_is_told_after_an_observer_was_interrupted() -> None:
    class Impatient:
        @hookimpl
        def weightwire_after_push(self, report: Any) -> None:
            if report.version == 2:
                raise KeyboardInterrupt

    with (
        WeightUpdater("vanilla", weights(), observers=[Impatient()], timeout=30) as updater,
        WeightReceiver(updater.endpoint, broken, worker="bad") as bad,
    ):
        updater.push()
        with pytest.raises(ApplyError):
            bad.pull(10.0)
        with pytest.raises(KeyboardInterrupt):
            updater.push()
        with pytest.raises(ApplyError, match=r"version 1 .*this target is broken"):
            updater.push()
        updater.push()


def test_a_hook_that_failed_is_told_after_its_report_was_interrupted(
    updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WeightReceiver(updater.endpoint, weights(), worker="w") as receiver:
        receiver.on_applied(lambda _: 1 // 0)
        updater.push()
        with monkeypatch.context() as patched:
            patched.setattr(receiver._receiver, "report", interrupt)
            with pytest.raises(KeyboardInterrupt):
                receiver.pull(10.0)
        assert receiver.pull(0.0) is None
        with pytest.raises(ApplyError, match="ZeroDivisionError"):
            updater.wait()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_what_a_signal_handler_raises_after_the_commit_is_no_failure_of_it(
    updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = weightwire.receiver.commit

    def late(*args: Any, **options: Any) -> None:
        commit(*args, **options)
        raise TimeoutError("the handler of an alarm")

    with WeightReceiver(updater.endpoint, weights(), worker="w") as receiver:
        updater.push()
        with monkeypatch.context() as patched:
            patched.setattr(weightwire.receiver, "commit", late)
            with pytest.raises(TimeoutError, match="of an alarm"):
                receiver.pull(10.0)
        assert (receiver.version, receiver.ready) == (1, True)
        assert receiver.pull(0.0) is None
        assert updater.wait(timeout=10.0).receipts["w"].state == "applied"


@pytest.mark.parametrize("lost", [False, True], ids=["no version", "no trainer"])
def test_a_wait_that_had_some_news_names_all_of_its_time(updater: WeightUpdater, lost: bool) -> None:
    with WeightReceiver(updater.endpoint, weights(), worker="w") as receiver:
        updater.push()
        ask: Callable[..., Any] = receiver._receiver.poll

        def once(*args: Any) -> Any:
            delivery = ask(*args)
            receiver._receiver.connected = delivery is not None or not lost
            return delivery

        receiver._receiver.poll = once  # type: ignore[method-assign]
        kind = UpdaterLostError if lost else WaitTimeout
        with pytest.raises(kind, match=r"waited 0\.3 s for version 2"):
            receiver.wait(2, timeout=0.3)
        assert receiver.version == 1
