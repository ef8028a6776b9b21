"""Whoever reaches the control socket may say anything: it ends their connection, and harms nobody else."""

from __future__ import annotations

import logging
import os
import pickle
import random
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

from weightwire.errors import EndpointError
from weightwire.transport import NOW, Deadline, Have, Joined, Lost, Version
from weightwire.wire import encode_event
from weightwire_nccl import messages, secret, service
from weightwire_nccl.link import LIMIT, UNREAD, Link
from weightwire_nccl.messages import PROTOCOL, Accepted, Challenge, Goodbye, Hello, Message, Ping, Proof

Bench = Any  # of conftest.py, which cannot be imported
Read = Callable[..., int]
Gather = Callable[..., list[Any]]
RNG = random.Random(7)
NOISE = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    pickle.dumps(ValueError("x")),
    b"\0" * 5000,
    b"\xff" * 5000,
    struct.pack("<IB", 0, 0),
    struct.pack("<IB", 0, 1),
    struct.pack("<IB", 1000, 0) + b"\x91" * 1000,
    *(RNG.randbytes(RNG.randrange(1, 300)) for _ in range(60)),
]


@pytest.fixture(autouse=True)
def _nothing_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What comes from outside is an event, never an exception in a thread of ours."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def soon() -> Deadline:
    return Deadline.after(10)


def connect(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("nccl://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def read_until(link: Link, there: Callable[[], bool], into: list[Any]) -> None:
    deadline = soon()
    while not there():
        assert not deadline.expired, into
        assert not link.ended, into
        link.flush()
        into += [frame for frame in link.frames() if not isinstance(frame, Ping)]


@pytest.fixture
def mallory() -> Iterator[Callable[..., Link]]:
    """A worker that has introduced itself, and from here on says what it likes."""
    links: list[Link] = []

    def join(endpoint: str, *, streams: bool = False) -> Link:
        link, heard = Link(connect(endpoint), LIMIT), []
        links.append(link)
        read_until(link, lambda: bool(heard), heard)
        assert isinstance(heard.pop(), Challenge)
        say(link, Proof(PROTOCOL, secret.fresh_nonce(), b""))
        read_until(link, lambda: bool(heard), heard)
        say(link, Hello(encode_event(Joined(worker="mallory")), "", streams))
        return link

    yield join
    for link in links:
        link.close()


def say(link: Link, *said: Message) -> None:
    """Until it is with the kernel, or the other end has hung up."""
    for message in said:
        link.send(message)
    deadline = soon()
    while not link.flush():
        assert not deadline.expired


def until_ended(link: Link) -> None:
    deadline = soon()
    while not link.ended:
        link.flush()
        for _ in link.frames():
            pass
        assert not deadline.expired, "still connected"


# -- against the trainer -----------------------------------------------------------------------------------------------


def test_noise_from_strangers(bench: Bench, gather: Gather, read: Read) -> None:
    sender, receiver = bench.sender(), bench.receiver()
    gather(sender, lambda event: isinstance(event, Joined))
    sockets = [connect(sender.endpoint) for _ in NOISE]
    for sock, noise in zip(sockets, NOISE):
        sock.sendall(noise)
        sock.shutdown(socket.SHUT_WR)
    for sock in sockets:
        with suppress(ConnectionResetError):
            while sock.recv(4096):
                pass
        sock.close()
    bench.stage(sender, 1)
    assert read(receiver.poll(Have(), soon())) == 1
    assert not [event for event in sender.events(NOW) if isinstance(event, (Joined, Lost))]


ODD: list[Message] = [
    messages.Plan(1, Version(1, 1), None, 8, (8,), "gloo"),
    messages.Accepted(b"", 1),
    messages.Report(b"\x80junk"),
    messages.Go(1, 1, 1, 2, "broadcast", 1.0),
    messages.Report(encode_event(Joined(worker="other"))),
    messages.Report(encode_event(Lost(worker="other"))),
    Hello(b"", ""),
    Proof(1, b"", b""),
]
IDLE: list[Message] = [
    messages.Ready(2**60),
    messages.Got(-1),
    messages.Trouble(0, "x" * 10_000),
    messages.Key(1, "weightwire/0/0", b"mine"),
    messages.Key(2**60, "k", b"v"),
    messages.Add(1, 1, "n", 1),
    messages.Fetch(1, 1, 0, 2**40),
    messages.Pong(),
]


@pytest.mark.parametrize("said", ODD, ids=lambda said: type(said).__name__)
def test_what_no_worker_may_say(
    bench: Bench, gather: Gather, read: Read, mallory: Callable[..., Link], said: Message
) -> None:
    sender, receiver = bench.sender(), bench.receiver()
    link = mallory(sender.endpoint)
    say(link, said)
    found = gather(sender, lambda event: isinstance(event, Lost))
    assert found[-1].worker == "mallory"
    assert "malformed" in found[-1].reason
    assert not [event for event in found if event.worker == "other"]
    until_ended(link)
    bench.stage(sender, 1)
    assert read(receiver.poll(Have(), soon())) == 1


def test_what_changes_nothing(bench: Bench, gather: Gather, read: Read, mallory: Callable[..., Link]) -> None:
    """Answers to what was not asked, keys of groups that it is not in: the others get their version, with and without
    a member that takes part in nothing."""
    sender, receiver = bench.sender(), bench.receiver()
    link = mallory(sender.endpoint)
    gather(sender, lambda event: getattr(event, "worker", "") == "mallory")
    say(link, *IDLE)
    have = Have()
    for number in (1, 2):
        stamp = bench.stage(sender, number)
        assert read(receiver.poll(have, soon())) == number
        have = Have(stamp, stamp, stamp)


def test_keys_without_end(bench: Bench, gather: Gather, read: Read, mallory: Callable[..., Link]) -> None:
    """Set by a member of a group: the trainer's memory is not theirs to fill."""
    sender, receiver = bench.sender(), bench.receiver()
    link, heard = mallory(sender.endpoint), []
    gather(sender, lambda event: getattr(event, "worker", "") == "mallory")
    staging = threading.Thread(target=bench.stage, args=(sender, 1))
    staging.start()
    read_until(link, lambda: any(isinstance(frame, messages.Plan) for frame in heard), heard)
    say(link, messages.Ready(next(frame for frame in heard if isinstance(frame, messages.Plan)).round))
    read_until(link, lambda: any(isinstance(frame, messages.Go) for frame in heard), heard)
    generation = next(frame for frame in heard if isinstance(frame, messages.Go)).generation
    say(link, *(messages.Key(generation, f"key {number}", bytes(60_000)) for number in range(200)))
    found = gather(sender, lambda event: isinstance(event, Lost))
    staging.join(20)
    assert "more than an engine needs" in found[-1].reason
    assert read(receiver.poll(Have(), soon())) == 1


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 5), (7, 3), (0, 2**40)])
def test_bytes_that_there_are_not(
    bench: Bench, gather: Gather, mallory: Callable[..., Link], start: int, stop: int
) -> None:
    sender, heard = bench.sender(), []
    bench.stage(sender, 1)
    link = mallory(sender.endpoint, streams=True)
    read_until(link, lambda: any(isinstance(frame, messages.Offer) for frame in heard), heard)
    offer = next(frame for frame in heard if isinstance(frame, messages.Offer))
    say(link, messages.Fetch(offer.round, 1, start, stop))
    assert "are asked for" in gather(sender, lambda event: isinstance(event, Lost))[-1].reason


def test_who_reads_nothing_is_hung_up_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = Link(socket.create_connection(server.getsockname()), LIMIT)
        while not link.ended:
            link.send(messages.Added(1, 1))
            assert len(link._out) <= UNREAD + 1
        link.close()


def test_no_descriptors_are_left(bench: Bench, gather: Gather, read: Read, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever knocks has to wait; those who are there are served, and the thread does not spin."""
    sender, receiver = bench.sender(), bench.receiver()
    gather(sender, lambda event: isinstance(event, Joined))
    first = bench.stage(sender, 1)
    assert read(receiver.poll(Have(), soon())) == 1
    with socket.socket() as knocking:
        with no_descriptors():
            knocking.connect(sender._service._listener.getsockname())
            deadline = soon()
            while "no descriptors are left" not in caplog.text:
                assert not deadline.expired
            second = bench.stage(sender, 2)
            assert read(receiver.poll(Have(first, first, first), soon())) == 2
            assert receiver.poll(Have(second, second, second), Deadline.after(2 * service.DEAF)) is None
            assert caplog.text.count("no descriptors are left") <= 10
        knocking.settimeout(10)
        assert knocking.recv(1), "it is let in"


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_an_end_that_cannot_be_opened_leaves_nothing(bench: Bench, end: str) -> None:
    """Wherever the descriptors run out while it is made."""
    place = bench.sender().endpoint
    open_one = {"sender": bench.sender, "receiver": lambda: bench.receiver(endpoint=place, staging="inline")}[end]
    failed = 0
    for left in range(10):
        with no_descriptors(left):
            before = psutil.Process().num_fds() if left else 0  # which needs one itself
            try:
                open_one()
                break
            except (OSError, EndpointError):
                failed += 1
                assert not left or psutil.Process().num_fds() == before
    assert failed >= 3, "one after the other was what it lacked"


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_an_end_whose_thread_does_not_start_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    place = bench.sender().endpoint
    open_one = {"sender": bench.sender, "receiver": lambda: bench.receiver(endpoint=place)}[end]

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = psutil.Process().num_fds()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        open_one()
    assert psutil.Process().num_fds() == before


def test_a_failure_that_stays_is_told_once(
    bench: Bench, gather: Gather, read: Read, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the threads of both ends, which go on, and go on trying."""
    sender, receiver = bench.sender(), bench.receiver()
    gather(sender, lambda event: isinstance(event, Joined))
    failed = {"service": 0, "staging": 0}

    def failing(thread: str) -> Callable[..., None]:
        def fail(*_: Any) -> None:
            failed[thread] += 1
            raise RuntimeError(f"the {thread} thread's own fault")

        return fail

    with monkeypatch.context() as patch:
        patch.setattr(sender._service, "_turn", failing("service"))
        patch.setattr(receiver._station, "turn", failing("staging"))
        sender._hall.bell.ring()
        deadline = soon()
        while min(failed.values()) < 4:
            assert not deadline.expired
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert sorted(str(record.exc_info[1]) for record in errors if record.exc_info) == [
        "the service thread's own fault",
        "the staging thread's own fault",
    ]
    caplog.clear()
    bench.stage(sender, 1)
    assert read(receiver.poll(Have(), soon())) == 1, "both have recovered"


@contextmanager
def no_descriptors(left: int = 0) -> Iterator[None]:
    """Or only so many."""
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), [os.dup(0)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 50, limits[1]))
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        for _ in range(left):
            os.close(held.pop())
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# -- against a worker --------------------------------------------------------------------------------------------------


class Impostor:
    """Listens where a trainer should, and says what it was told to each who comes; ``met`` counts them."""

    def __init__(self, *said: Message, guarded: bool = False, welcome: bool = True) -> None:
        self._said, self._guarded, self._welcome = said, guarded, welcome
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"nccl://127.0.0.1:{self._server.getsockname()[1]}"
        self.met = 0
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            sock, _ = self._server.accept()
            self.met += 1
            link = Link(sock, LIMIT)
            if self._welcome:
                link.send(Challenge(PROTOCOL, bytes(32), self._guarded))
                link.send(Accepted(b"", 5))
            for message in self._said:
                link.send(message)
            while not link.ended and not self._over:
                link.flush()
                for _ in link.frames():
                    pass
            link.close()

    def close(self) -> None:
        self._over = True
        with connect(self.endpoint):
            self._thread.join(10)
        self._server.close()


@pytest.fixture
def pose() -> Iterator[Callable[..., Impostor]]:
    opened: list[Impostor] = []

    def pose(*said: Message, **more: Any) -> Impostor:
        opened.append(Impostor(*said, **more))
        return opened[-1]

    yield pose
    for impostor in opened:
        impostor.close()


ONE = Version(5, 1)


@pytest.mark.parametrize(
    "said",
    [
        [messages.Plan(1, ONE, None, 100, (64, 128), "gloo")],
        [messages.Plan(1, ONE, None, 100, (100, 64), "gloo")],
        [messages.Plan(1, ONE, None, 100, (-64, 100), "gloo")],
        [messages.Plan(1, ONE, None, 100, (64,), "gloo")],
        [messages.Plan(1, ONE, None, -1, (), "gloo")],
        [messages.Parcel(1, ONE, None, 2**62)],
        [messages.Parcel(1, ONE, None, 0), messages.Done(1, b"junk")],
        [messages.Plan(1, ONE, None, 64, (64,), "gloo"), messages.Go(1, 1, 0, 2, "broadcast", 1.0)],
        [messages.Plan(1, ONE, None, 64, (64,), "gloo"), messages.Go(1, 1, 5, 2, "broadcast", 1.0)],
        [messages.Offer(1, b"junk")],
        [Hello(b"", "")],
        [Challenge(PROTOCOL, bytes(32), False)],
    ],
    ids=lambda said: type(said[-1]).__name__,
)
def test_what_no_trainer_says(bench: Bench, pose: Callable[..., Impostor], said: list[Message]) -> None:
    """The worker hangs up, tries again, and has got nothing."""
    impostor = pose(*said)
    receiver = bench.receiver(endpoint=impostor.endpoint)
    deadline = soon()
    while impostor.met < 2:
        assert receiver.poll(Have(), deadline.sooner(0.05)) is None
        assert not deadline.expired
    assert not receiver.closed


def test_a_goodbye_without_a_proof_is_none(
    bench: Bench, pose: Callable[..., Impostor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goodbye is final: only the trainer may say it, which knows the token."""
    monkeypatch.setenv(secret.VARIABLE, "correct horse battery staple")
    impostor = pose(Goodbye(), welcome=False)
    receiver = bench.receiver(endpoint=impostor.endpoint)
    deadline = soon()
    while impostor.met < 2:
        assert receiver.poll(Have(), deadline.sooner(0.05)) is None
        assert not deadline.expired
    assert not receiver.closed


def test_who_only_says_that_it_is_the_trainer(
    bench: Bench, pose: Callable[..., Impostor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(secret.VARIABLE, "correct horse battery staple")
    receiver = bench.receiver(endpoint=pose(guarded=True).endpoint)
    with pytest.raises(EndpointError, match="does not know the token"):
        receiver.poll(Have(), soon())


@pytest.mark.parametrize("place", ["a..b:5", "x" * 300 + ":5", "no-such-host.invalid:5"])
def test_hosts_that_cannot_be(bench: Bench, place: str) -> None:
    receiver = bench.receiver(endpoint=f"nccl://{place}")
    assert receiver.poll(Have(), Deadline.after(0.1)) is None
    assert place.rpartition(":")[0] in receiver.whereabouts


def test_interfaces_that_are_none(bench: Bench) -> None:
    with pytest.raises(EndpointError, match="none of that name"):
        bench.sender(interface="nosuch0")
    with pytest.raises(EndpointError, match="none of that name"):
        bench.receiver(endpoint="nccl://127.0.0.1:1", interface="nosuch0")
