"""Sender and receiver of the backend, below the core's updater and receiver; all in this process, in threads."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from weightwire.errors import CapabilityError, EndpointError, EndpointInUseError, WaitTimeout
from weightwire.testing import Rig
from weightwire.testing.rig import took
from weightwire.testing.states import counters
from weightwire.transport import NOW, Deadline, Have, Joined, Left, Lost, Staged, Version
from weightwire.wire import encode_event
from weightwire_nccl.link import Link
from weightwire_nccl.messages import Accepted, Challenge, Goodbye, Hello
from weightwire_nccl.options import NcclOptions
from weightwire_nccl.receiver import NcclReceiver
from weightwire_nccl.sender import NcclSender

Bench = Any  # of conftest.py, which cannot be imported
Read = Callable[..., int]
Gather = Callable[..., list[Any]]
TOKEN = "correct horse battery staple"


def soon() -> Deadline:
    return Deadline.after(5)


def joined(gather: Gather, sender: NcclSender, *names: str) -> None:
    missing = set(names)

    def last(event: Any) -> bool:
        if isinstance(event, Joined):
            missing.discard(event.worker)
        return not missing

    gather(sender, last)


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["broadcast", "scatter_allgather"])
@pytest.mark.parametrize("keep", [True, False], ids=["keep", "no keep"])
def test_versions_arrive_in_many_buckets(bench: Bench, gather: Gather, read: Read, algorithm: str, keep: bool) -> None:
    sender = bench.sender(bucket=16384, algorithm=algorithm, keep=keep)
    receivers = [bench.receiver(name) for name in "ab"]
    joined(gather, sender, "a", "b")
    have = Have()
    for number in range(1, 6):
        stamp = bench.stage(sender, number, size=20_000, digest=True)
        deliveries = [receiver.poll(have, soon()) for receiver in receivers]
        assert [read(delivery) for delivery in deliveries] == [number, number]
        for delivery in deliveries:
            delivery.release()
        have = Have(stamp, stamp, stamp)
    assert {group.engine for group in sender._crews.all()} == {"gloo"}


def test_staged_is_said_when_all_bytes_are_there(bench: Bench, gather: Gather, read: Read) -> None:
    sender, receiver = bench.sender(bucket=4096), bench.receiver()
    joined(gather, sender, "w")
    stamp = bench.stage(sender, 1, size=20_000)
    gather(sender, lambda event: event == Staged(worker="w", stamp=stamp))
    assert read(receiver.poll(Have(), None)) == 1, "without waiting"


def test_a_leased_version_is_not_overwritten(bench: Bench, gather: Gather, read: Read) -> None:
    sender, receiver = bench.sender(), bench.receiver()
    joined(gather, sender, "w")
    held, have = [], Have()
    for number in range(1, 6):
        stamp = bench.stage(sender, number)
        held.append(receiver.poll(have, soon()))
        have = Have(stamp, stamp, stamp)
    assert [read(delivery) for delivery in held] == [1, 2, 3, 4, 5]
    assert len({delivery.memory for delivery in held}) == 5
    for delivery in held:
        delivery.release()
    held.clear()
    known = set()
    for number in range(6, 16):
        stamp = bench.stage(sender, number)
        delivery = receiver.poll(have, soon())
        known.add(delivery.memory)
        delivery.release()
        have = Have(stamp, stamp, stamp)
    assert len(known) <= 3, "two take turns, and one is spare"


def test_aliased_tensors_live_on(bench: Bench, gather: Gather, read: Read) -> None:
    sender, receiver = bench.sender(), bench.receiver(apply="alias")
    joined(gather, sender, "w")
    first = bench.stage(sender, 1)
    delivery = receiver.poll(Have(), soon())
    views = delivery.views()
    assert len({view.untyped_storage().data_ptr() for view in views}) == len(views), "a storage each"
    delivery.release()
    del delivery
    for number in range(2, 8):
        bench.stage(sender, number)
        last = receiver.poll(Have(first, first, first), soon())
        assert read(last) == number
        first = last.header.stamp
    assert all((view == 1).all() for view in views)
    receiver.close(soon())
    sender.close(soon())
    assert all((view == 1).all() for view in views)


def test_without_a_thread_versions_come_by_polling(bench: Bench, gather: Gather, read: Read) -> None:
    sender = bench.sender()
    receiver = bench.receiver(staging="inline")
    while not receiver.connected:
        receiver.poll(Have(), NOW)
    found: list[int] = []
    threads = threading.active_count()
    polling = threading.Thread(target=lambda: found.append(read(receiver.poll(Have(), soon()))))
    polling.start()
    joined(gather, sender, "w")
    bench.stage(sender, 1)
    polling.join(10)
    assert found == [1]
    assert threading.active_count() <= threads
    sender.close(soon())
    stamp = Version(sender.epoch, 1)
    while not receiver.closed:
        assert receiver.poll(Have(stamp, stamp, stamp), NOW) is None


# -- who gets what -----------------------------------------------------------------------------------------------------


def test_late_joiner_is_given_what_is_kept(bench: Bench, read: Read) -> None:
    sender = bench.sender()
    full = bench.stage(sender, 1, size=1_000_000)
    late = bench.receiver("late")
    assert read(late.poll(Have(), soon())) == 1
    subset = bench.stage(sender, 2, base=full)
    later = bench.receiver("later")
    first = later.poll(Have(), soon())
    assert first.header.stamp == full
    assert later.poll(Have(full, full), None).header.stamp == subset, "both came in one step"


def test_late_joiner_waits_where_nothing_is_kept(bench: Bench, gather: Gather, read: Read) -> None:
    sender = bench.sender(keep=False)
    bench.stage(sender, 1)
    late = bench.receiver("late")
    joined(gather, sender, "late")
    assert late.poll(Have(), Deadline.after(0.2)) is None
    bench.stage(sender, 2)
    assert read(late.poll(Have(), soon())) == 2


def test_pushes_to_some_use_groups_of_their_own_again(bench: Bench, gather: Gather, read: Read) -> None:
    sender = bench.sender()
    a, b = bench.receiver("a"), bench.receiver("b")
    joined(gather, sender, "a", "b")
    bench.stage(sender, 1)
    for number in (2, 3):
        bench.stage(sender, number, to={"a"})
    assert read(b.poll(Have(), soon())) == 1
    stamp = Version(sender.epoch, 1)
    assert b.poll(Have(stamp, stamp, stamp), Deadline.after(0.1)) is None
    found = a.poll(Have(stamp, stamp, stamp), soon())
    assert read(found) in (2, 3)
    bench.stage(sender, 4)
    assert read(b.poll(Have(stamp, stamp, stamp), soon())) == 4
    assert [len(group.peers) for group in sender._crews.all()] == [1, 2]
    assert sorted(group.number for group in sender._crews.all()) == [1, 2], "none was made twice"


def test_groups_change_with_the_workers(bench: Bench, gather: Gather, read: Read) -> None:
    sender = bench.sender()
    a, b = bench.receiver("a"), bench.receiver("b")
    joined(gather, sender, "a", "b")
    bench.stage(sender, 1)
    b.close(soon())
    gather(sender, lambda event: event == Left(worker="b"))
    with took(at_most=3.0):
        second = bench.stage(sender, 2)
    assert read(a.poll(Have(), soon())) in (1, 2)
    assert [len(group.peers) for group in sender._crews.all()] == [1]
    c = bench.receiver("c")
    joined(gather, sender, "c")
    with took(at_most=3.0):
        bench.stage(sender, 3)
    have = Have(second, second, second)
    assert [read(r.poll(have, soon())) for r in (a, c)] == [3, 3]


# -- the place ---------------------------------------------------------------------------------------------------------


def test_the_port_is_the_place(bench: Bench) -> None:
    sender = bench.sender()
    place = sender.endpoint.removeprefix("nccl://")
    with pytest.raises(EndpointInUseError, match=place):
        bench.sender(place)
    sender.close(soon())
    assert bench.sender(place).endpoint == sender.endpoint


def test_a_worker_follows_the_next_updater(bench: Bench, gather: Gather, read: Read) -> None:
    sender = bench.sender()
    receiver = bench.receiver()
    joined(gather, sender, "w")
    old = bench.stage(sender, 7)
    assert read(receiver.poll(Have(), soon())) == 7
    _die(sender)
    deadline = soon()
    while receiver.connected:
        receiver.poll(Have(old, old, old), deadline.sooner(0.05))
        assert not deadline.expired
    again = bench.sender(sender.endpoint.removeprefix("nccl://"), epoch=2000)
    joined(gather, again, "w")
    bench.stage(again, 1)
    assert read(receiver.poll(Have(old, old, old), soon())) == 1
    assert not receiver.closed


def _die(sender: NcclSender) -> None:
    """Let the connections end without a goodbye, as SIGKILL does."""
    service = sender._service
    with sender._hall.lock:
        for peer in list(service._peers):
            service._drop(peer, "a test")
    sender.close(NOW)


def test_a_worker_takes_the_place_of_its_own_old_connection(bench: Bench, gather: Gather, read: Read) -> None:
    """Where a network in between has ended it on one side only. They are of one incarnation."""
    sender = bench.sender()
    bench.receiver()
    joined(gather, sender, "w")
    again = bench.receiver()
    gather(sender, lambda event: isinstance(event, Joined))
    bench.stage(sender, 1)
    assert read(again.poll(Have(), soon())) == 1
    assert not any(isinstance(event, Lost) for event in sender.events(NOW))


def test_closed_by_another_thread_while_it_polls(bench: Bench, gather: Gather) -> None:
    sender, receiver = bench.sender(), bench.receiver(staging="inline")
    polled: list[Any] = []
    polling = threading.Thread(target=lambda: polled.append(receiver.poll(Have(), Deadline.after(20))))
    polling.start()
    joined(gather, sender, "w")
    with took(at_most=5.0):
        receiver.close(soon())
        polling.join(10)
    assert polled == [None]
    gather(sender, lambda event: isinstance(event, Left))


def test_a_worker_needs_a_port(bench: Bench) -> None:
    for place in ("nccl", "nccl://127.0.0.1:0"):
        with pytest.raises(EndpointError, match="host and port"):
            bench.receiver(endpoint=place)


def test_a_gpu_that_is_not_there(bench: Bench) -> None:
    with pytest.raises(CapabilityError, match="cuda:97"):
        bench.sender(device="cuda:97")


@pytest.mark.parametrize(
    "option", ["device=tpu", "bucket=10", "staging=process", "algorithm=ring", "keep=perhaps", "no_such=1"]
)
def test_options_that_are_none(option: str) -> None:
    with pytest.raises(EndpointError, match=option.partition("=")[0]):
        Rig(lambda: f"nccl://127.0.0.1:0?{option}", frozenset()).updater()


def test_every_option_is_in_the_readme() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for field in msgspec.structs.fields(NcclOptions):
        default = "" if field.default == "" else str(field.default).lower()
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{field.name}` |"))
        shown = row.split("|")[2].strip().strip("`")
        assert shown in (default, "32MiB")


# -- who may connect ---------------------------------------------------------------------------------------------------


def test_only_the_loopback_is_listened_on(bench: Bench, gather: Gather) -> None:
    process = psutil.Process()
    before = {c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    sender = bench.sender()
    bench.receiver("a")
    bench.receiver("b")
    joined(gather, sender, "a", "b")
    bench.stage(sender, 1)
    found = {c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN} - before
    assert len(found) == 4, "the control socket, and Gloo's of three members"
    assert {address.ip for address in found} == {"127.0.0.1"}


def test_beyond_the_loopback_a_token_is_needed(bench: Bench) -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(EndpointError, match=r"token_file.*WEIGHTWIRE_TOKEN"):
        bench.sender("0.0.0.0:0")
    assert psutil.Process().num_fds() <= before


def test_somebody_elses_address(bench: Bench) -> None:
    with pytest.raises(EndpointError, match=r"29500: that is no address of this machine.*WEIGHTWIRE_TOKEN"):
        bench.sender("192.0.2.1:29500")  # of the net that is kept for documentation: RFC 5737


def test_a_token_opens_the_door(bench: Bench, tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    sender = bench.sender(token_file=str(file))
    assert TOKEN not in sender.endpoint
    bench.stage(sender, 1)
    place = f"nccl://{sender.endpoint.removeprefix('nccl://')}"
    monkeypatch.setenv("WEIGHTWIRE_TOKEN", TOKEN)
    assert read(bench.receiver("w", endpoint=place).poll(Have(), soon())) == 1


@pytest.mark.parametrize(("ours", "theirs"), [(TOKEN, ""), (TOKEN, "not the right one at all"), ("", TOKEN)])
def test_without_the_right_token_nobody_joins(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ours: str, theirs: str
) -> None:
    monkeypatch.setenv("WEIGHTWIRE_TOKEN", ours)
    sender = bench.sender()
    bench.stage(sender, 1)
    monkeypatch.setenv("WEIGHTWIRE_TOKEN", theirs)
    receiver = bench.receiver()
    with pytest.raises(EndpointError, match="token"):
        receiver.poll(Have(), soon())
    assert sender.events(NOW) == []


def test_an_updater_without_the_token_is_not_believed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that merely says that it knows it."""
    monkeypatch.setenv("WEIGHTWIRE_TOKEN", TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        receiver: NcclReceiver | None = None

        def pose() -> None:
            sock, _ = server.accept()
            link = Link(sock, 1 << 20)
            link.send(Challenge(1, bytes(32), True))
            answers: list[Any] = []
            while not answers and not link.ended:
                link.flush()
                answers += link.frames()
            link.send(Accepted(bytes(32), 5))
            while not link.ended:
                link.flush()
                heard.extend(link.frames())
            link.close()

        heard: list[Any] = []
        posing = threading.Thread(target=pose)
        posing.start()
        receiver = bench.receiver(endpoint=f"nccl://127.0.0.1:{port}")
        with pytest.raises(EndpointError, match="does not know the token"):
            receiver.poll(Have(), soon())
        posing.join(5)
        assert [type(message) for message in heard] in ([], [Goodbye]), "the worker told it nothing"


def test_a_digest_travels_where_bytes_can_leave_the_host(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or where others on it are not trusted. Over the loopback there is one if somebody asks for it."""

    def digest(**more: Any) -> str:
        rig = make_rig()
        updater = rig.updater(counters(1), **more)
        receiver = rig.receiver(counters(0), worker="w", endpoint=updater.endpoint)
        updater.wait_for_workers(1)
        updater.push()
        assert receiver.pull(5.0) == 1
        return updater.wait().receipts["w"].digest

    assert digest() == ""
    assert len(digest(digest="on")) == 32
    monkeypatch.setenv("WEIGHTWIRE_TOKEN", TOKEN)
    assert len(digest()) == 32
    assert digest(digest="off") == ""


def test_beyond_the_loopback_a_digest_travels(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_TOKEN", TOKEN)
    assert not bench.sender("0.0.0.0:0").digests


def test_a_stranger_cannot_skip_the_proof(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_TOKEN", TOKEN)
    sender = bench.sender()
    host, port = sender.endpoint.removeprefix("nccl://").split(":")
    link = Link(socket.create_connection((host, int(port))), 1 << 20)
    link.send(Hello(encode_event(Joined(worker="intruder")), ""))
    link.flush()
    deadline = soon()
    while not link.ended:
        list(link.frames())
        assert not deadline.expired
    link.close()
    assert sender.events(NOW) == []


# -- forks and neighbours ----------------------------------------------------------------------------------------------


def test_a_forked_child_holds_nothing(bench: Bench, gather: Gather, read: Read) -> None:
    sender, receiver = bench.sender(), bench.receiver()
    joined(gather, sender, "w")
    stamp = bench.stage(sender, 1)
    assert read(receiver.poll(Have(), soon())) == 1
    pid = os.fork()
    if pid == 0:
        try:
            mine = {c.laddr.port for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
            port = int(sender.endpoint.rpartition(":")[2])
            sender.close(NOW)
            receiver.close(NOW)
            del sender, receiver
            os._exit(3 if port in mine else 0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    bench.stage(sender, 2)
    assert read(receiver.poll(Have(stamp, stamp, stamp), soon())) == 2


def test_a_push_that_is_kept_needs_nobody(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    updater = rig.updater(counters(1))
    assert updater.push().receipts == {}
    late = rig.receiver(counters(0), endpoint=updater.endpoint)
    assert late.pull() == 1


def test_without_a_copy_a_failed_push_says_so(bench: Bench, gather: Gather, monkeypatch: pytest.MonkeyPatch) -> None:
    import weightwire_nccl.crews as module
    from weightwire_nccl.groups import GroupError

    def fail(*_: Any) -> None:
        raise GroupError("no group today")

    monkeypatch.setattr(module, "GlooGroup", fail)
    kept, bare = bench.sender(), None
    receiver = bench.receiver("kept")
    joined(gather, kept, "kept")
    bench.stage(kept, 1)
    assert receiver.poll(Have(), soon()) is not None, "it came over the control socket"
    bare = bench.sender(keep=False)
    bench.receiver("bare")
    joined(gather, bare, "bare")
    with pytest.raises(WaitTimeout, match="no group today"):
        bench.stage(bare, 1)


def test_a_worker_that_dies_is_lost_at_once(bench: Bench, gather: Gather) -> None:
    sender, receiver = bench.sender(), bench.receiver()
    joined(gather, sender, "w")
    with took(at_most=2.0):
        receiver._station._session.link._sock.shutdown(socket.SHUT_RDWR)
        gather(sender, lambda event: isinstance(event, Lost) and event.worker == "w")


def test_the_engine_ends_when_an_end_closes(bench: Bench, gather: Gather, read: Read) -> None:
    """Not when the interpreter does: an engine's thread that comes home only then ends the process by abort."""
    process = psutil.Process()
    gc.collect()
    gc.disable()
    try:
        before = process.num_threads()
        sender, receiver = bench.sender(), bench.receiver()
        joined(gather, sender, "w")
        bench.stage(sender, 1)
        assert read(receiver.poll(Have(), soon())) == 1
        assert process.num_threads() > before + 2, "the service threads, and the engine's"
        sender.close(soon())
        receiver.close(soon())
        deadline = soon()
        while process.num_threads() > before:  # a thread that was joined is gone a moment later
            assert not deadline.expired
    finally:
        gc.enable()
