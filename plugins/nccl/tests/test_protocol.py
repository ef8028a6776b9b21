from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator

import pytest

from weightwire.errors import WireError
from weightwire.transport import Version
from weightwire_nccl.link import LIMIT, SHY, Chunk, Link
from weightwire_nccl.messages import Go, Goodbye, Key, Message, Plan, Ready


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        two, _ = server.accept()
    links = Link(one, LIMIT), Link(two, LIMIT)
    yield links
    for link in links:
        link.close()


def pass_on(one: Link, two: Link) -> list[Message | Chunk]:
    """Everything that is queued, as the other end reads it; a chunk's data as bytes."""
    found: list[Message | Chunk] = []
    idle = False
    while not idle:
        idle = one.flush()
        for frame in two.frames():
            found.append(frame._replace(data=memoryview(bytes(frame.data))) if isinstance(frame, Chunk) else frame)
    while not found:
        found += list(two.frames())
    return found


def test_messages_come_as_they_were_sent(pair: tuple[Link, Link]) -> None:
    messages: list[Message] = [
        Plan(1, Version(5, 6), None, 100, (64, 100), "gloo"),
        Ready(1),
        Go(1, 2, 1, 3, "broadcast", 1.5),
        Key(2, "k", b"\0v"),
        Goodbye(),
    ]
    for message in messages:
        pair[0].send(message)
    assert pass_on(*pair) == messages


def test_chunks_larger_than_a_socket_takes(pair: tuple[Link, Link]) -> None:
    data = bytes(range(256)) * (1 << 14)
    pair[0].send(Ready(7))
    pair[0].send_chunk(7, 64, memoryview(data))
    pair[0].send(Ready(8))
    assert pass_on(*pair) == [Ready(7), Chunk(7, 64, memoryview(data)), Ready(8)]


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<IB", LIMIT + 1, 0),
        struct.pack("<IB", 4, 9) + b"abcd",
        struct.pack("<IB", 4, 0) + b"\xff\xff\xff\xff",
        struct.pack("<IB", 3, 1) + b"abc",
        struct.pack("<IB", 20, 0) + pickle.dumps(ValueError)[:20],
        struct.pack("<Q", 1 << 62) + b"\0" * 20,
    ],
)
def test_what_is_malformed_is_refused(pair: tuple[Link, Link], frame: bytes) -> None:
    pair[0]._sock.setblocking(True)
    pair[0]._sock.sendall(frame)
    pair[0]._sock.shutdown(socket.SHUT_WR)
    with pytest.raises(WireError):
        _read_all(pair[1])


def _read_all(link: Link) -> None:
    while not link.ended:
        list(link.frames())


def test_strangers_may_say_little(pair: tuple[Link, Link]) -> None:
    pair[1].limit = SHY
    pair[0].send(Key(1, "k", b"x" * SHY))
    with pytest.raises(WireError, match=str(SHY)):
        pass_on(*pair)


def test_the_end_shows_after_what_was_said(pair: tuple[Link, Link]) -> None:
    pair[0].send(Goodbye())
    pair[0].flush()
    pair[0].close()
    found: list[Message | Chunk] = []
    while not pair[1].ended:
        found += pair[1].frames()
    assert found == [Goodbye()]
