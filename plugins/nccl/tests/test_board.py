from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore

from weightwire_nccl.board import Board, BrokenBoard
from weightwire_nccl.groups import GlooGroup, GroupError
from weightwire_nccl.store import BoardStore
from weightwire_nccl.works import Works


class Table:
    """Boards that tell each other what was set."""

    def __init__(self, count: int) -> None:
        self.boards: list[Board] = []
        self.boards = [Board(lambda key, value, me=me: self.tell(me, key, value)) for me in range(count)]  # type: ignore[misc]

    def tell(self, me: int, key: str, value: bytes) -> None:
        for number, board in enumerate(self.boards):
            if number != me:
                board.learn(key, value)


def test_a_key_is_everywhere() -> None:
    one, two = Table(2).boards
    one.set("k", b"v")
    assert one.has(["k"])
    assert two.get("k", 0.0) == b"v"
    assert not two.has(["k", "other"])
    assert [one.add("n", 2), one.add("n", 3)] == [2, 5]


def test_a_wait_ends_with_the_key() -> None:
    one, two = Table(2).boards
    setting = threading.Timer(0.05, one.set, ("k", b"v"))
    setting.start()
    assert two.get("k", 5.0) == b"v"
    setting.join()


def test_a_wait_ends_at_its_time_or_with_the_generation() -> None:
    (board,) = Table(1).boards
    with pytest.raises(BrokenBoard, match="did not come"):
        board.get("k", 0.05)
    ending = threading.Timer(0.05, board.end, ("worker 'w' is gone",))
    ending.start()
    begun = time.monotonic()
    with pytest.raises(BrokenBoard, match="'w' is gone"):
        board.get("k", 20.0)
    assert time.monotonic() - begun < 5
    ending.join()


def test_the_thread_that_reads_the_socket_reads_while_it_waits() -> None:
    board = Board(lambda *_: None, pump=lambda _: board.learn("k", b"v"))
    assert board.get("k", 5.0) == b"v"


def test_there_is_no_end_of_keys_but_ours() -> None:
    (board,) = Table(1).boards
    with pytest.raises(BrokenBoard, match="more than"):
        board.learn("k", bytes(1 << 17))


def test_torch_takes_it_for_a_store() -> None:
    stores = [BoardStore(board) for board in Table(2).boards]  # torch holds only the half that is C++
    one, two = (PrefixStore("p", store) for store in stores)
    one.set("k", "v")
    assert two.get("k") == b"v"
    assert two.check(["k"])
    assert not two.check(["other"])
    assert one.add("n", 4) == 4
    one.wait(["k"], timedelta(seconds=1))
    with pytest.raises(RuntimeError, match="did not come"):
        two.wait(["other"], timedelta(milliseconds=20))


def groups(count: int) -> list[GlooGroup]:
    boards = Table(count).boards
    return [GlooGroup(board, "127.0.0.1", "", rank, count, 10.0) for rank, board in enumerate(boards)]


@pytest.mark.parametrize("algorithm", ["broadcast", "scatter_allgather"])
@pytest.mark.parametrize("nbytes", [1, 64, 12_288, 16_001, 100_001])
def test_every_member_gets_every_byte(algorithm: str, nbytes: int) -> None:
    members = groups(3)
    sent = torch.arange(nbytes).to(torch.uint8)
    buffers = [sent.clone(), torch.zeros_like(sent), torch.zeros_like(sent)]
    errors: list[BaseException] = []

    def take_part(rank: int) -> None:
        works = Works(members[rank], algorithm)
        try:
            for start in range(0, nbytes, 16_001):
                for _ in works.post(buffers[rank][start : start + 16_001]):
                    pass
                while works.full:
                    works.wait(0.02)
            while works:
                works.wait(0.02)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert all(torch.equal(buffer, sent) for buffer in buffers)


def test_a_generation_that_ends_while_members_connect() -> None:
    """The store's error is an exception of Python's in a thread of Gloo's: a second look at it ends the process."""
    boards = Table(2).boards
    group = GlooGroup(boards[0], "127.0.0.1", "", 0, 2, 10.0)
    works = Works(group, "broadcast")
    for _ in works.post(torch.zeros(1000)):
        pass
    assert not works.wait(0.02), "the other one is not there"
    boards[0].end("worker 'w' is gone")
    with pytest.raises(GroupError, match="'w' is gone"):
        works.wait(10.0)
