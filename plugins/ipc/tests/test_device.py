"""Device memory between processes, over a device that is none: what goes where, and what happens when it cannot."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from weightwire.errors import WireError
from weightwire.testing import Rig
from weightwire.testing.states import counters
from weightwire.testing.workers import WorkerGone, until
from weightwire.transport import Deadline, Have, Joined, Noted, Version
from weightwire_ipc import protocol
from weightwire_ipc.cuda import CudaLayer
from weightwire_ipc.device import DeviceError, Handle
from weightwire_ipc.fake import FakeLayer, FakeOptions
from weightwire_ipc.reach import OpenArena

SOON = Deadline.after
Gather = Callable[..., list[Any]]


def fake(**options: Any) -> FakeLayer:
    return FakeLayer(FakeOptions(together=True, **options))


def at(stamp: Version) -> Have:
    return Have(stamp, stamp, stamp)


def value(delivery: Any) -> float:
    views = dict(zip(delivery.header.layout.names, delivery.views()))
    assert (views["value"] == views["value"][0]).all()
    return float(views["value"][0])


def take(receiver: Any, have: Have = Have()) -> Any:  # noqa: B008 - a tuple
    delivery = receiver.poll(have, SOON(5))
    assert delivery is not None
    return delivery


class Two:
    """A trainer and a worker, both on a device, that have tried whether it works."""

    def __init__(self, bench: Any, gather: Gather, here: FakeLayer, there: FakeLayer, **receiver: Any) -> None:
        self.bench, self.gather, self.here, self.there = bench, gather, here, there
        self.sender = bench.sender(layer=here)
        self.receiver = bench.receiver(layer=there, **receiver)
        self.joined()
        self.stamp = bench.stage(self.sender, 1)
        self.first = take(self.receiver)
        self.note = self.noted()

    def joined(self, worker: str = "w") -> None:
        self.gather(self.sender, lambda event: isinstance(event, Joined) and event.worker == worker)

    def noted(self, worker: str = "w") -> str:
        events = self.gather(self.sender, lambda event: isinstance(event, Noted) and event.worker == worker)
        return str(next(e.notes["device"] for e in events if isinstance(e, Noted) and e.worker == worker))

    def next(self, number: int) -> Any:
        before, self.stamp = self.stamp, self.bench.stage(self.sender, number)
        return take(self.receiver, at(before))

    def slots(self) -> list[Any]:
        return list(self.sender._slots.values())


# -- what goes where ---------------------------------------------------------------------------------------------------


def test_between_two_ends_on_a_device_nothing_goes_through_the_host(bench: Any, gather: Gather) -> None:
    two = Two(bench, gather, fake(), fake())
    assert isinstance(two.first.memory, OpenArena), "the first version is in both, and is taken from the device"
    assert "reads the memory of device fake-0" in two.note
    assert (value(two.first), two.slots()[0].where & 1) == (1, 1)
    two.first.release()
    for number in range(2, 12):
        delivery = two.next(number)
        assert isinstance(delivery.memory, OpenArena)
        assert value(delivery) == number
        delivery.release()
    assert len(two.slots()) == 2
    assert not any(slot.where & 1 for slot in two.slots())
    lean = two.slots()[1]  # made when it was known that nobody reads the host's
    assert os.stat(lean.shared).st_blocks * 512 == lean.shape.start, "it takes no memory of the host for the payload"


def test_each_worker_is_lent_each_arena_once(bench: Any, gather: Gather) -> None:
    two = Two(bench, gather, fake(), fake())
    two.first.release()
    other = bench.receiver("x", layer=two.there)
    two.joined("x")
    for number in range(2, 20):
        before = two.stamp
        two.next(number).release()
        take(other, at(before)).release()
    assert two.here.calls["export"] == 2 * (1 + len(two.slots())), "for each worker the probe, and each arena"
    assert two.here.calls["allocate"] == 1 + len(two.slots())
    assert two.there.calls["open"] == two.here.calls["export"]


def test_a_worker_on_the_host_gets_what_lies_on_the_device_only(bench: Any, gather: Gather) -> None:
    two = Two(bench, gather, fake(), fake())
    two.first.release()
    two.next(2).release()
    slot = next(slot for slot in two.slots() if not slot.where & 1)
    late = take(bench.receiver("late"))
    assert value(late) == 2
    assert slot.where & 1, "it was copied for the late one"
    late.release()
    two.joined("late")
    third = two.next(3)
    assert isinstance(third.memory, OpenArena)
    assert value(take(bench.receiver("later"))) == value(third) == 3


def test_without_a_device_nobody_is_asked(bench: Any, gather: Gather) -> None:
    layer = fake()
    sender, receiver = bench.sender(layer=CudaLayer()), bench.receiver(layer=layer)
    gather(sender, lambda event: isinstance(event, Joined))
    bench.stage(sender, 1)
    assert value(take(receiver)) == 1
    assert not layer.calls
    assert sender._slots[0].arena is None


def test_device_cpu_keeps_off_the_device(bench: Any, gather: Gather) -> None:
    layer = fake()
    sender, receiver = bench.sender(device="cpu"), bench.receiver(layer=layer)
    gather(sender, lambda event: isinstance(event, Joined))
    bench.stage(sender, 1)
    assert value(take(receiver)) == 1
    assert not layer.calls


# -- where it cannot be ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "there", "reason"),
    [
        ({"faults": "export"}, {}, "export fails"),
        ({"faults": "allocate"}, {}, "allocate fails"),
        ({}, {"faults": "open"}, "open fails"),
        ({}, {"faults": "garble"}, "is not what the trainer exported"),
        ({}, {"ordinal": 1, "apart": True}, "fake-1 has no peer access to fake-0"),
    ],
    ids=["export", "allocate", "open", "garble", "no peer access"],
)
def test_what_cannot_be_goes_through_the_host_and_says_why(
    bench: Any, gather: Gather, caplog: pytest.LogCaptureFixture, here: Any, there: Any, reason: str
) -> None:
    caplog.set_level(logging.WARNING)
    two = Two(bench, gather, fake(**here), fake(**there))
    assert not isinstance(two.first.memory, OpenArena)
    assert two.note.startswith("through the host: ")
    assert reason in two.note
    assert reason in caplog.text
    two.first.release()
    for number in range(2, 6):
        delivery = two.next(number)
        assert value(delivery) == number
        delivery.release()
    assert caplog.text.count(reason) == 1, "once, not with each version"
    assert two.here.outstanding() == 0


def test_a_worker_on_another_device_reads_over_peer_access(bench: Any, gather: Gather) -> None:
    two = Two(bench, gather, fake(), fake(ordinal=1))
    assert isinstance(two.first.memory, OpenArena)
    assert value(two.first) == 1


def test_a_device_that_is_not_visible_is_named(bench: Any, gather: Gather) -> None:
    class Elsewhere(FakeLayer):
        def home(self, devices: Any) -> str:
            return "GPU-unseen"

    two = Two(bench, gather, Elsewhere(FakeOptions(together=True)), fake())
    assert "GPU-unseen is not visible" in two.note
    assert value(two.first) == 1


def test_what_fails_later_is_given_again_through_the_host(bench: Any, gather: Gather) -> None:
    two = Two(bench, gather, fake(), fake(faults="later.open"))  # the probe and one arena can be opened, no more
    assert "reads the memory" in two.note
    two.first.release()
    delivery = two.next(2)
    assert not isinstance(delivery.memory, OpenArena)
    assert value(delivery) == 2
    delivery.release()
    assert "open fails" in two.noted()
    assert value(two.next(3)) == 3


def test_where_the_device_is_full_versions_go_through_the_host(
    bench: Any, gather: Gather, caplog: pytest.LogCaptureFixture
) -> None:
    two = Two(bench, gather, fake(faults="later.allocate"), fake())  # the pattern and one arena can be had, no more
    two.first.release()
    for number in (2, 3, 4):
        delivery = two.next(number)
        assert value(delivery) == number
        delivery.release()
    assert caplog.text.count("this version goes through the host") == 1


# -- leases ------------------------------------------------------------------------------------------------------------


def test_aliased_memory_stays_until_its_last_view_dies_and_the_device_is_through(bench: Any, gather: Gather) -> None:
    two = Two(bench, gather, fake(), fake(), apply="alias")
    views = two.first.views()
    assert not two.first.writable
    assert len({view.untyped_storage().data_ptr() for view in views}) == len(views)
    two.first.release()
    two.first = None
    for number in range(2, 5):
        del views[1:]
        assert value(two.next(number)) == number
        assert float(views[0][0] if views[0].dim() else views[0]) == 1
    assert len(two.slots()) == 3
    two.there.dead = True
    views.clear()
    assert any(two.sender._leases.holders(slot.number) for slot in two.slots()), "work on the device may go on"
    two.there.dead = False
    two.receiver._look_at = 0.0
    two.receiver.poll(at(two.stamp), None)
    assert not any(two.sender._leases.holders(slot.number) for slot in two.slots())


def test_who_writes_to_its_weights_gets_a_copy(bench: Any, gather: Gather) -> None:
    two = Two(bench, gather, fake(), fake(), apply="alias", trained="it is in training mode")
    views = two.first.views()
    assert two.first.writable
    assert not any(two.sender._leases.holders(slot.number) for slot in two.slots())
    views[0].fill_(-1)
    assert value(take(bench.receiver("x", layer=two.there))) == 1


def test_exports_are_let_go_when_a_worker_leaves(bench: Any, gather: Gather) -> None:
    two = Two(bench, gather, fake(), fake())
    two.first.release()
    two.first = None
    bench.stage(two.sender, 2)  # what is exported with it was not read when the worker leaves
    assert two.here.outstanding() == 2
    two.receiver.close(SOON(1))
    assert two.here.outstanding() == 0


# -- killed ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rig(private: Path) -> Iterator[Rig]:
    rig = Rig(lambda: "import:weightwire_ipc.fake://kills", frozenset({"processes"}))
    yield rig
    rig.close()


@pytest.mark.parametrize("apply", ["copy", "alias"])
def test_a_killed_worker_costs_one_slot_at_most(rig: Rig, apply: str) -> None:
    updater = rig.updater()
    stays = rig.worker("stays", counters, 0)
    sender: Any = updater._sender
    for round_ in range(5):
        victim = rig.victim(f"victim{round_}", counters, 0, apply=apply)
        updater.wait_for_workers(2)
        updater.push(counters(updater.version + 1))
        assert victim.pull(10.0) == stays.pull(10.0) == updater.version
        victim.kill()
        until(lambda: len(updater.workers) == 1, "the killed one is lost")
        updater.push(counters(updater.version + 1), on_lost="drop")
        assert stays.pull(10.0) == stays.seen() == updater.version
    assert "reads the memory" in updater.workers["stays"].notes["device"]
    assert len(sender._slots) <= 3
    lent = len(sender._workers["stays"].link.lent)
    assert sender._arenas.layer.outstanding() == lent, "only what the living one has"


def test_a_worker_that_dies_while_it_opens(rig: Rig) -> None:
    updater = rig.updater()
    stays = rig.worker("stays", counters, 0)
    victim = rig.victim("victim", counters, 0, endpoint=f"{rig.endpoint}?faults=later.kill")
    updater.wait_for_workers(2)
    following = victim.follow(100)
    version = 0
    while "victim" in updater.workers:
        version += 1
        assert version < 8, "it opens the pattern, one arena, and dies with the second"
        updater.push(counters(version), on_lost="drop")
        assert stays.pull(10.0) == version
        until(lambda: "victim" not in updater.workers or updater.workers["victim"].version == version, "it or its end")  # noqa: B023
    with pytest.raises(WorkerGone):
        following.result()
    sender: Any = updater._sender
    assert sender._arenas.layer.outstanding() == len(sender._workers["stays"].link.lent)
    assert version >= 2


# -- what comes over the wire ------------------------------------------------------------------------------------------

GOOD = Handle("fake-0", 0, bytes(64), 4096, 0, b"fake", 8)


@pytest.mark.parametrize(
    "bad",
    [
        {"memory": bytes(63)},
        {"memory": bytes(4096)},
        {"form": 256},
        {"form": -1},
        {"size": -1},
        {"size": 2**60},
        {"offset": -8},
        {"place": 2**63},
        {"counter": b"/" * 65},
        {"event": bytes(65)},
        {"device": "x" * 65},
    ],
    ids=str,
)
def test_hostile_fields_are_refused_before_anybody_sees_them(bad: dict[str, Any]) -> None:
    message = protocol.Lend(1, 1, msgspec.structs.replace(GOOD, **bad))
    with pytest.raises(WireError):
        protocol._decode(msgspec.msgpack.encode(message))
    assert protocol._decode(msgspec.msgpack.encode(protocol.Lend(1, 1, GOOD)))


@pytest.mark.parametrize("counter", [b"", b"/etc/passwd", b"/torch_1_2/../x", b"torch_1", b"/torch_1\0", b"/torch_1 2"])
def test_torch_is_only_given_names_that_torch_makes(counter: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = CudaLayer()
    layer._index["GPU-0"] = 0
    given: list[Any] = []
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", lambda *args: given.append(args))
    with pytest.raises(DeviceError, match="not as torch makes them"):
        layer.open(Handle("GPU-0", 2, bytes(64), 4096, 0, counter, 1), ())
    assert not given


def test_only_plain_memory_is_exported() -> None:
    from weightwire_ipc.cuda import _taken_apart

    assert _taken_apart(b"\3c" + bytes(64)) == (3, bytes(64))
    assert _taken_apart(bytes(64)) == (0, bytes(64))
    assert _taken_apart(b"\3e" + bytes(64)) == (0, b""), "expandable segments"
    assert _taken_apart(b"\3e" + bytes(200)) == (0, b"")


def test_an_arena_of_another_slot_is_not_taken_for_this_one(bench: Any, gather: Gather) -> None:
    two = Two(bench, gather, fake(), fake())
    reach: Any = two.receiver._session.reach  # type: ignore[union-attr]
    number = two.slots()[0].arena.number
    assert reach.arena(number, two.slots()[0].number, 10) is not None
    assert reach.arena(number, 99, 10) is None
    assert reach.arena(number + 1, two.slots()[0].number, 10) is None
    assert reach.arena(number, two.slots()[0].number, 1 << 40) is None
