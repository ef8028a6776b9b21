"""The board: a register in shared memory of which the latest content counts."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator

import pytest

from weightwire.errors import WireError
from weightwire_ipc import memory
from weightwire_ipc.memory import Board, BoardView
from weightwire_ipc.protocol import decode_news


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board()
    yield board
    board.close()


def test_what_is_written_is_read(board: Board) -> None:
    view = BoardView(board.shared)
    assert view.read() == (0, b"")
    board.write(b"one")
    assert view.read() == (2, b"one")
    assert view.words[0] == 2
    assert not view.closed
    board.say_closed()
    assert view.closed
    assert view.read() == (4, b"one")


def test_a_board_whose_writer_broke_off_says_nothing_until_it_is_written_again(board: Board) -> None:
    view = BoardView(board.shared)
    board.write(b"one")
    board._words[0] |= 1  # killed, or interrupted, at this place
    board._bytes[memory._TEXT] = 0
    assert view.read()[1] is None
    board.write(b"two")
    assert view.read() == (4, b"two")


def test_a_reader_never_sees_a_mix(board: Board) -> None:
    view, over = BoardView(board.shared), threading.Event()
    interval = sys.getswitchinterval()

    def write() -> None:
        for number in itertools.cycle(range(256)):
            board.write(bytes([number]) * 500)
            if over.is_set():
                return

    writer = threading.Thread(target=write)
    sys.setswitchinterval(1e-5)
    writer.start()
    try:
        seen: set[bytes] = set()
        while len(seen) < 100:
            _, data = view.read()
            if data:
                assert len(set(data)) == 1
                seen.add(data)
    finally:
        over.set()
        writer.join()
        sys.setswitchinterval(interval)


def test_only_a_sealed_board_is_looked_at() -> None:
    fd = memory.memfd("weightwire-test")
    with pytest.raises(WireError):
        BoardView(fd)
    memory.os.close(fd)
    with pytest.raises(WireError):
        decode_news(b"\xc1")
