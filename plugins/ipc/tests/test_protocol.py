"""Messages and packets."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.errors import WireError
from weightwire_ipc.protocol import Channel, Goodbye, Hello, Memory, Report

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


def test_a_message_larger_than_a_packet_arrives_whole_without_waiting(pair: Pair) -> None:
    left, right, _ = pair
    before = len(os.listdir("/proc/self/fd"))
    large = Hello(1, os.urandom(10 << 20))
    left.send(large)
    assert left.idle
    assert heard(right) == [large]
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_brings_descriptors(pair: Pair) -> None:
    left, right, _ = pair
    read, write = os.pipe()
    left.send(Memory(((3, 4096, 8192),)), [write])
    os.close(write)
    right.drain()
    for message, fds in right.messages():
        assert message == Memory(((3, 4096, 8192),))
        os.write(fds[0], b"x")
        assert os.read(read, 1) == b"x"
        assert not os.get_inheritable(fds[0])
    assert os.read(read, 1) == b"", "they are closed with the message that brought them"
    os.close(read)


def test_descriptors_that_come_with_nothing_new_are_closed(pair: Pair) -> None:
    left, right, raw = pair
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(raw, [b"\0\0\0\0\0"], [0, 1])
    left.send(Goodbye())
    assert heard(right) == [Goodbye()]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_message_in_a_file_that_cannot_be_read_is_a_wire_error(pair: Pair) -> None:
    _, right, raw = pair
    file = os.open("/proc/self/exe", os.O_PATH)
    socket.send_fds(raw, [b"\1\0\0\0\1"], [file])
    os.close(file)
    with pytest.raises(WireError, match="cannot be read"):
        heard(right)


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
    assert next(right.messages())[0] == Report(b"one"), "and it was broken off before the next was asked for"
    assert heard(right) == [Report(b"one"), Report(b"two")]


def test_a_packet_that_was_sent_twice_is_heard_once(pair: Pair) -> None:
    _, right, raw = pair
    for _ in range(2):
        raw.send(b"\1\0\0\0\0\x81\xa4type\xa7Goodbye")
    assert heard(right) == [Goodbye()]
    raw.send(b"\2\0\0\0\0\x81\xa4type\xa7Goodbye")
    assert heard(right) == [Goodbye()]


def test_what_was_said_before_the_end_is_heard_although_the_other_side_left_much_unread(pair: Pair) -> None:
    left, right, _ = pair
    right.send(Report(b"never read"))
    left.send(Goodbye())
    left.close()
    assert heard(right) == [Goodbye()]
    assert right.ended


def test_unread_is_told(pair: Pair) -> None:
    left, right, _ = pair
    assert not left.unread
    left.send(Goodbye())
    assert left.unread
    right.drain()
    assert not left.unread


def test_a_ring_wakes_and_says_nothing(pair: Pair) -> None:
    left, right, _ = pair
    left.ring()
    assert not right.drain(1), "there may be more"
    assert list(right.messages()) == []
    left.send(Goodbye())
    left.ring()
    assert heard(right) == [Goodbye()]
    assert right.drain(1), "this was all"
    for _ in range(10_000):  # more than its socket takes
        left.ring()
    right.close()
    left.ring()


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
    [
        b"x",
        b"\1\0\0\0\0",
        pickle.dumps(OSError),
        b"\1\0\0\0\0" + pickle.dumps(OSError),
        b"\1\0\0\0\0\xdd\xff\xff\xff\xff",
    ],
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
        with contextlib.suppress(WireError):
            heard(right)
    finally:
        left.close()
        right.close()
