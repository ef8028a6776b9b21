"""The copy into a slot by threads of our own: the same bytes, and nothing is read any more when it is over."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from weightwire.transport import Version
from weightwire.weights.payload import Payload
from weightwire.weights.source import Source
from weightwire_ipc import packing
from weightwire_ipc.packing import Packer, cut


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(packing, "PIECE", 4096)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def payload(count: int = 200, **more: Any) -> Payload:
    state: dict[str, Tensor] = {f"t{n}": torch.randn(n * 7 % 900 + 1) for n in range(count)}
    state |= {"tied": state["t3"], "odd": torch.tensor([True] * 7), "cut": torch.randn(30, 40).t()[3:9]}
    return Payload(Source(state).extract(), stamp=Version(1, 1), **more)


def parts(out: Tensor) -> Any:
    known: dict[tuple[int, int], Tensor] = {}
    return lambda start, stop: known.setdefault((start, stop), out[start:stop])


@pytest.mark.parametrize("more", [{}, {"digest": True}])
@pytest.mark.parametrize("count", [4, 200])
def test_the_bytes_are_those_of_one_thread(count: int, more: dict[str, Any]) -> None:
    torch.manual_seed(count)
    one, many = payload(count, **more), Packer()
    expected, out = torch.zeros(one.nbytes, dtype=torch.uint8), torch.zeros(one.nbytes, dtype=torch.uint8)
    one.pack(expected)
    part = parts(out)
    for _ in range(20):
        out.zero_()
        many.pack(one, out, part)
        assert torch.equal(out, expected)
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("size", [64, 4096, 1 << 30])
def test_pieces_cover_all_and_end_between_blocks(size: int) -> None:
    layout = payload().layout
    pieces = cut(layout, size)
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
    assert pieces[-1][1] == layout.nbytes
    assert {stop for _, stop in pieces} <= set(layout.starts)
    assert all(stop - start >= size for start, stop in pieces[:-1])


class Halting(Payload):
    """The copies of one kind of thread wait, or fail."""

    def pack(self, out: Tensor, start: int = 0, stop: int | None = None) -> None:
        helper = threading.current_thread() is not threading.main_thread()
        self.packing(helper)  # type: ignore[attr-defined]
        super().pack(out, start, stop)
        self.packed.append(helper)  # type: ignore[attr-defined]


def halting(act: Any) -> Any:
    one = Halting(Source({f"t{n}": torch.randn(2000) for n in range(20)}).extract(), stamp=Version(1, 1))
    one.packing, one.packed = act, []  # type: ignore[attr-defined]
    return one


def test_an_error_in_any_thread_is_the_caller_s() -> None:
    begun = threading.Event()

    def act(helper: bool) -> None:
        if helper:
            begun.set()
            raise MemoryError("no more")
        assert begun.wait(20)

    one = halting(act)
    out = torch.zeros(one.nbytes, dtype=torch.uint8)
    with pytest.raises(MemoryError, match="no more"):
        Packer().pack(one, out, parts(out))


def test_an_interrupt_waits_for_what_is_being_copied() -> None:
    begun, go = threading.Event(), threading.Event()

    def act(helper: bool) -> None:
        if helper:
            begun.set()
            assert go.wait(20)
        else:
            assert begun.wait(20)
            threading.Timer(0.05, go.set).start()
            raise KeyboardInterrupt

    one = halting(act)
    out = torch.zeros(one.nbytes, dtype=torch.uint8)
    with pytest.raises(KeyboardInterrupt):
        Packer().pack(one, out, parts(out))
    assert go.is_set()
    assert one.packed, "what was begun is over"
    assert len(one.packed) <= 2, "and nothing else was begun"
    assert all(one.packed)
