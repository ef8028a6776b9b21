"""Packing and sending go on together, and packing leaves the other cores alone meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weightwire import threads
from weightwire.threads import one_core
from weightwire.transport import Deadline, Have, Joined
from weightwire_nccl.source import Ring, Whole
from weightwire_nccl.works import IN_FLIGHT, Works

Bench = Any  # of conftest.py, which cannot be imported
openmp = pytest.mark.skipif(
    not hasattr(threads._program, "omp_set_num_threads"), reason="torch uses no OpenMP that can be found here"
)


@pytest.mark.parametrize("algorithm", ["broadcast", "scatter_allgather"])
@pytest.mark.parametrize("keep", [True, False], ids=["keep", "no keep"])
def test_buckets_are_packed_while_others_are_under_way(
    bench: Bench,
    gather: Callable[..., Any],
    read: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    keep: bool,
) -> None:
    under_way: list[int] = []
    works: list[Works] = []
    kind = Whole if keep else Ring
    begin, pack = Works.__init__, kind.bucket

    def begun(self: Works, *args: Any) -> None:
        begin(self, *args)
        if self.group.rank == 0:
            works.append(self)

    def packed(self: Any, number: int) -> torch.Tensor:
        if works:
            under_way.append(len(works[-1]._posted))
        return pack(self, number)

    monkeypatch.setattr(Works, "__init__", begun)
    monkeypatch.setattr(kind, "bucket", packed)
    sender, receiver = bench.sender(bucket=16384, algorithm=algorithm, keep=keep), bench.receiver()
    gather(sender, lambda event: isinstance(event, Joined))
    bench.stage(sender, 1, size=50_000)
    assert read(receiver.poll(Have(), Deadline.after(5))) == 1
    assert under_way[:IN_FLIGHT] == list(range(IN_FLIGHT)), "none was waited for"
    assert max(under_way) == IN_FLIGHT - 1


@openmp
def test_one_core_is_for_this_thread_and_this_time() -> None:
    before, elsewhere = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        with one_core():
            other = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
            other.start()
            other.join()
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        assert elsewhere == [3]
    finally:
        torch.set_num_threads(before)


@openmp
def test_a_push_is_packed_on_one_core(
    bench: Bench, gather: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    pack = Whole.bucket

    def packed(self: Whole, number: int) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return pack(self, number)

    monkeypatch.setattr(Whole, "bucket", packed)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sender = bench.sender()
        bench.receiver()
        gather(sender, lambda event: isinstance(event, Joined))
        bench.stage(sender, 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
