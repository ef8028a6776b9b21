"""Messages and packets."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weightwire.errors import WireError
from weightwire.transport import Version

from weightwire_ipc.protocol import CHUNK, Channel, Goodbye, Hello, News, Report, SlotInfo

Pair = tuple[Channel, Channel, socket.socket]


def connected() -> Pair:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(left), Channel(right), left


@pytest.fixture
def pair() -> Iterator[Pair]:
    found = connected()
    yield found
    for channel in found[:2]:
        channel.close()


def heard(channel: Channel) -> list[object]:
    channel.drain()
    return [message for message, _ in channel.messages()]


def test_a_message_larger_than_a_packet_arrives_whole(pair: Pair) -> None:
    left, right, _ = pair
    large = Hello(1, os.urandom(30 * CHUNK + 17))
    left.send(large)
    assert not left.idle, "more than the socket takes at once"
    found: list[object] = []
    for _ in range(100):
        found += heard(right)
        left.flush()
    assert found == [large]
    assert left.idle


def test_news_bring_descriptors(pair: Pair) -> None:
    left, right, _ = pair
    read, write = os.pipe()
    info = SlotInfo(Version(1, 2), Version(1, 1), 3, 4096, 8192)
    left.send(News(info, None, (3,), (3,)), [write])
    os.close(write)
    right.drain()
    ((message, fds),) = right.messages()
    assert message == News(info, None, (3,), (3,))
    os.write(fds[0], b"x")
    assert os.read(read, 1) == b"x"
    assert not os.get_inheritable(fds[0])
    for fd in (read, *fds):
        os.close(fd)


def test_unread_descriptors_are_closed_with_the_channel(pair: Pair) -> None:
    left, right, _ = pair
    before = len(os.listdir("/proc/self/fd"))
    left.send(Goodbye(), [0, 1])
    right.drain()
    assert len(os.listdir("/proc/self/fd")) == before + 2
    right.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_an_interrupted_reader_hears_a_message_again_and_loses_none(pair: Pair) -> None:
    left, right, _ = pair
    left.send(Report(b"one"))
    left.send(Report(b"two"))
    right.drain()
    with pytest.raises(KeyboardInterrupt):
        for _ in right.messages():
            raise KeyboardInterrupt
    assert heard(right) == [Report(b"one"), Report(b"two")]


def test_a_packet_that_was_sent_twice_is_heard_once(pair: Pair) -> None:
    left, right, raw = pair
    left._queue(b"".join(()), True, ())
    left._out[0] = (left._out[0][0] + b"\x81\xa4type\xa7Goodbye"[:5], ())
    left._queue(b"\x81\xa4type\xa7Goodbye"[5:], False, ())
    for data, _ in list(left._out):
        raw.send(data)
        raw.send(data)
    left._out.clear()
    assert heard(right) == [Goodbye()]
    left.send(Report(b"next"))
    assert heard(right) == [Report(b"next")]


def test_what_was_said_before_the_end_is_heard_although_the_other_side_left_much_unread(pair: Pair) -> None:
    left, right, _ = pair
    right.send(Report(b"never read"))
    left.send(Goodbye())
    left.close()
    assert heard(right) == [Goodbye()]
    assert right.ended


def test_try_send_sends_now_or_never(pair: Pair) -> None:
    left, right, _ = pair
    left.widen(4096)
    sent = 0
    while left.try_send(Report(b"x" * 100)):
        sent += 1
    assert 0 < sent < 50
    assert left.idle
    assert len(heard(right)) == sent
    assert left.try_send(Report(b"again"))


@pytest.mark.parametrize(
    "junk",
    [b"x", b"\1\0\0\0\0", pickle.dumps(OSError), b"\1\0\0\0\0" + pickle.dumps(OSError), b"\1\0\0\0\0\xdd\xff\xff\xff\xff"],
)
def test_junk_is_a_wire_error(pair: Pair, junk: bytes) -> None:
    _, right, raw = pair
    raw.send(junk)
    with pytest.raises(WireError):
        heard(right)


@settings(deadline=None)
@given(junk=st.lists(st.binary(min_size=1, max_size=200), max_size=5))
def test_random_packets_give_only_wire_errors(junk: list[bytes]) -> None:
    left, right, raw = connected()
    try:
        for packet in junk:
            raw.send(packet)
        try:
            heard(right)
        except WireError:
            pass
    finally:
        left.close()
        right.close()
