"""Which groups are used again, which engine they take, which memory: pure, but for a socket that is never used."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator

import pytest

from weightwire.errors import EndpointError
from weightwire.transport import Joined
from weightwire_nccl.board import Board
from weightwire_nccl.link import LIMIT, Link
from weightwire_nccl.peers import Generation, Generations, Peer, engine_for
from weightwire_nccl.place import address_of, location_of
from weightwire_nccl.pool import Pool

Make = Callable[[str], Peer]


@pytest.fixture
def peer() -> Iterator[Make]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = Link(socket.create_connection(server.getsockname()), LIMIT)

    def make(name: str, incarnation: int = 1) -> Peer:
        peer = Peer(link)
        peer.joined = Joined(worker=name, incarnation=incarnation)
        return peer

    yield make
    link.close()


def generation(number: int, *peers: Peer, engine: str = "gloo") -> Generation:
    return Generation(number, engine, peers, Board(lambda *_: None))


def test_a_group_is_found_by_its_members(peer: Make) -> None:
    a, b, c = peer("a"), peer("b"), peer("c")
    known = Generations()
    both, one = generation(1, a, b), generation(2, a)
    assert known.add(both) == known.add(one) == []
    assert known.find("gloo", [b, a]) is both
    assert known.find("gloo", [a]) is one
    assert known.find("gloo", [a, c]) is None
    assert known.find("nccl", [a]) is None
    assert known.of(b) == [both]
    assert known.numbered(2) is one
    assert known.remove(one)
    assert not known.remove(one)
    assert known.find("gloo", [a]) is None


def test_a_new_incarnation_is_another_member(peer: Make) -> None:
    known = Generations()
    known.add(generation(1, peer("a")))
    assert known.find("gloo", [peer("a", 2)]) is None  # type: ignore[call-arg]


def test_the_group_used_longest_ago_makes_way(peer: Make) -> None:
    known = Generations(most=2)
    one, two, three = (generation(number, peer(name)) for number, name in enumerate("abc", 1))
    known.add(one)
    known.add(two)
    known.find("gloo", one.peers)
    assert known.add(three) == [two]
    assert known.all() == [one, three]


@pytest.mark.parametrize(
    ("ours", "theirs", "engine"),
    [
        ("", [""], "gloo"),
        ("", ["gpu-1"], "gloo"),
        ("gpu-0", ["gpu-1", "gpu-2"], "nccl"),
        ("gpu-0", ["gpu-1", ""], "gloo"),
        ("gpu-0", ["gpu-1", "gpu-1"], "gloo"),
        ("gpu-0", ["gpu-0"], "gloo"),
    ],
)
def test_nccl_takes_one_member_a_gpu(ours: str, theirs: list[str], engine: str) -> None:
    found, why = engine_for(ours, theirs)
    assert found == engine
    assert bool(why) == (engine == "gloo" and bool(ours))


def test_memory_is_used_again_when_nobody_holds_it() -> None:
    pool = Pool()
    one = pool.take(5 << 20)
    address = one.buffer.data_ptr()
    two = pool.take(5 << 20)
    assert two.buffer.data_ptr() != address
    memory = one.memory
    del one
    gc.collect()
    again = pool.take(4 << 20)
    assert again.memory is memory
    del again
    assert pool.take(100).memory is not memory, "far too large"


@pytest.mark.parametrize("text", ["127.0.0.1:29600", "[::1]:0", "trainer.example:65535"])
def test_addresses_there_and_back(text: str) -> None:
    assert location_of(*address_of(text)) == text


@pytest.mark.parametrize("text", ["policy", ":29600", "host:", "host:port", "host:70000", "host:-1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(EndpointError, match="host:port"):
        address_of(text)


def test_nothing_is_a_free_port_of_the_loopback() -> None:
    assert address_of("") == ("127.0.0.1", 0)
