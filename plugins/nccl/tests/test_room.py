"""A worker that has no room for a version: the trainer hears of it, by name, and the others have it."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest

from weightwire.errors import RefusedError, StorageFullError
from weightwire.testing import Rig
from weightwire.testing.rig import took
from weightwire.testing.states import counters, seen
from weightwire_nccl.groups import _NCCL_SETTINGS, _settings

Make = Callable[..., Rig]


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[int]]:
    """Let a receiver find no memory until ``monkeypatch.undo``: the machine's own cannot be filled for a test. What it
    asks for is noted."""

    def fill(receiver: Any) -> list[int]:
        asked: list[int] = []

        def take(nbytes: int, device: str = "cpu") -> None:
            asked.append(nbytes)
            raise StorageFullError(f"a version needs {nbytes} bytes on {device}: it is full")

        monkeypatch.setattr(receiver._receiver._station._pool, "take", take)
        return asked

    return fill


@pytest.mark.parametrize("keep", ["true", "false"])
def test_no_room_in_one_worker(
    make_rig: Make, fill: Callable[[Any], list[int]], monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    rig = make_rig(f"?keep={keep}")
    updater = rig.updater(counters(1))
    policies = {name: counters(0) for name in ("tight", "wide")}
    receivers = {
        name: rig.receiver(policy, worker=name, endpoint=updater.endpoint) for name, policy in policies.items()
    }
    updater.wait_for_workers(2)
    fill(receivers["tight"])
    with took(at_most=4.0), pytest.raises(RefusedError, match=r"worker 'tight', version 1 in phase stage.*it is full"):
        updater.push(timeout=8.0)
    assert receivers["wide"].pull(5.0) == seen(policies["wide"]) == 1
    assert receivers["tight"].pull(0.0) is None
    monkeypatch.undo()
    assert updater.push(counters(2)).receipts["tight"].state == "staged"
    assert receivers["tight"].pull(5.0) == seen(policies["tight"]) == 2


def test_nobody_has_room(make_rig: Make, fill: Callable[[Any], list[int]]) -> None:
    """Each is asked once, and the push does not wait for what cannot come."""
    rig = make_rig("?keep=false")
    updater = rig.updater(counters(1))
    asked = fill(rig.receiver(counters(0), worker="tight", endpoint=updater.endpoint))
    updater.wait_for_workers(1)
    with pytest.raises(RefusedError, match=r"worker 'tight', version 1 in phase stage.*it is full"):
        updater.push(timeout=8.0)
    assert len(asked) == 1


def test_a_subset_on_what_had_no_room(
    make_rig: Make, fill: Callable[[Any], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full version was not given, and so comes with the subset that needs it."""
    rig = make_rig()
    updater, policy = rig.updater(counters(1)), counters(0)
    receiver = rig.receiver(policy, worker="tight", endpoint=updater.endpoint)
    updater.wait_for_workers(1)
    fill(receiver)
    with pytest.raises(RefusedError, match="it is full"):
        updater.push(timeout=8.0)
    monkeypatch.undo()
    name = next(iter(policy))
    report = updater.push({name: counters(2)[name]}, partial=True, timeout=8.0)
    assert report.receipts["tight"].state == "staged"
    assert receiver.pull(5.0) == 2
    assert {key: float(tensor.view(-1)[0]) for key, tensor in policy.items()} == {
        key: 2.0 if key == name else 1.0 for key in policy
    }


# -- the user's environment --------------------------------------------------------------------------------------------


def test_the_environment_stays_as_it_is(make_rig: Make) -> None:
    before = dict(os.environ)
    rig = make_rig()
    updater, policy = rig.updater(counters(1)), counters(0)
    receiver = rig.receiver(policy, endpoint=updater.endpoint)
    updater.wait_for_workers(1)
    updater.push()
    assert receiver.pull(5.0) == 1
    assert dict(os.environ) == before
    rig.close()
    assert dict(os.environ) == before


def environment_in_c() -> dict[str, str]:
    """What a child inherits, and what torch reads."""
    lines = subprocess.check_output(["printenv", "-0"], text=True).split("\0")
    return dict(line.split("=", 1) for line in lines if line)


class Holder:
    """A thread that makes a group, and takes its time."""

    def __init__(self) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._hold)
        self.thread.start()

    def _hold(self) -> None:
        with _settings(_NCCL_SETTINGS):
            self.inside.set()
            self.leave.wait(10)


def test_what_nccl_reads_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """From two threads, over a value of the user's; ``os.environ`` does not even change meanwhile."""
    mine, unset = list(_NCCL_SETTINGS)[:2]
    monkeypatch.setenv(mine, "the user's")
    monkeypatch.delenv(unset, raising=False)
    before = dict(os.environ)
    first = Holder()
    assert first.inside.wait(10)
    second = Holder()
    assert dict(os.environ) == before
    assert _NCCL_SETTINGS.items() <= environment_in_c().items()
    assert not second.inside.wait(0.2), "or else it would lose them when the first one leaves"
    first.leave.set()
    assert second.inside.wait(10)
    assert _NCCL_SETTINGS.items() <= environment_in_c().items()
    second.leave.set()
    for holder in (first, second):
        holder.thread.join(10)
    after = environment_in_c()
    assert after[mine] == "the user's"
    assert unset not in after
