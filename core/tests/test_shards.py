"""Where the parts of sharded tensors lie, and tensors that are read piece by piece."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from weightwire.transport import Version
from weightwire.weights.payload import Payload
from weightwire.weights.pieces import Piece, Want
from weightwire.weights.plan import Plan
from weightwire.weights.scaled import amax_of
from weightwire.weights.shards import boxes, common, cut, extent_of, first_of, part_of
from weightwire.weights.source import Source, State

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)

# -- geometry ----------------------------------------------------------------------------------------------------------


@given(shape=SHAPES, most=st.integers(1, 700))
def test_boxes_are_consecutive_stretches_of_a_row_major_tensor(shape: tuple[int, ...], most: int) -> None:
    tensor = torch.arange(prod(shape)).reshape(shape)
    whole = tuple((0, size) for size in shape)
    parts = list(boxes(shape, most))
    assert all(0 < extent_of(box) <= most for box in parts)
    flat = [value for box in parts for value in cut(tensor, whole, box).reshape(-1).tolist()]
    assert flat == list(range(prod(shape)))
    position = 0
    for box in parts:
        assert first_of(box, shape) == position
        position += extent_of(box)
    if prod(shape) <= most:
        assert len(parts) == bool(prod(shape))


@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    data=st.data(),
)
def test_parts_are_what_chunk_after_chunk_leaves(shape: Any, sizes: Any, data: st.DataObject) -> None:
    kinds = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    placements = [data.draw(st.sampled_from(kinds)) for _ in sizes]
    whole = torch.arange(prod(shape)).reshape(shape)
    for at in product(*map(range, sizes)):
        local = whole
        for placement, count, index in zip(placements, sizes, at):
            if isinstance(placement, Shard):
                chunks = local.chunk(count, placement.dim)
                empty = local.narrow(placement.dim, 0, 0)
                local = chunks[index] if index < len(chunks) else empty
        box = part_of(shape, sizes, placements, at)
        assert box is not None
        assert torch.equal(cut(whole, tuple((0, size) for size in shape), box), local)


def test_what_is_strided_is_cut_after_the_axes_that_follow() -> None:
    """FSDP2 over tensor parallelism: first by columns of the mesh, then each by its rows."""
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    found = {at: part_of((8, 3), (2, 2), placements, at) for at in product(range(2), range(2))}
    rows = {at: box[0] for at, box in found.items() if box is not None}
    assert rows == {(0, 0): (0, 2), (1, 0): (2, 4), (0, 1): (4, 6), (1, 1): (6, 8)}
    assert part_of((8,), (2,), [_StridedShard(0, split_factor=2)], (0,)) is None  # no box, but every other chunk


def test_sums_lie_in_no_boxes() -> None:
    assert part_of((8,), (2,), [Partial()], (0,)) is None


def test_what_boxes_share() -> None:
    assert common(((0, 4), (1, 3)), ((2, 9), (0, 2))) == ((2, 4), (1, 2))
    assert common(((0, 4),), ((4, 9),)) is None


# -- pieces ------------------------------------------------------------------------------------------------------------


class Slow:
    """Gathers in pieces of a few elements, and sees to it that nobody holds an old one when the next is made."""

    def __init__(self, state: State, most: int) -> None:
        self.state, self.most = state, most
        self.begun: list[int] = []  # how much was wanted, each time
        self.alive: list[weakref.ref[Tensor]] = []
        self.held = self.closed = 0

    def __call__(self, _: State, wants: Sequence[Want]) -> Iterator[Piece]:
        self.begun.append(len(wants))
        try:
            for want in wants:
                whole = self.state.tensors[want.leaf].detach().reshape(-1)
                amax = amax_of(whole) if want.amax else None
                for start in range(0, whole.numel(), self.most):
                    stop = min(start + self.most, whole.numel())
                    self.held = max(self.held, sum(ref() is not None for ref in self.alive))
                    storage = whole[start:stop].clone()
                    self.alive.append(weakref.ref(storage.untyped_storage()))
                    yield Piece(want.leaf, start, stop, storage, amax)
                    del storage
                    amax = None
        finally:
            self.closed += 1


def gathering(state: dict[str, Tensor], most: int, *, digest: bool = False, **mapping: Any) -> tuple[Payload, Slow]:
    """A payload whose tensors are gathered, and who does it."""
    found = Source(state, **mapping).extract()
    plan = found.plan
    blocks = tuple(block._replace(gathered=True) for block in plan.blocks)
    unusual = tuple(range(len(plan.layout.entries)))
    found = State(Plan(plan.layout, blocks, unusual, plan.devices), found.tensors)
    slow = Slow(found, most)
    return Payload(found, stamp=Version(1, 1), digest=digest, gather=slow), slow


def whole(payload: Payload) -> bytes:
    out = torch.zeros(payload.nbytes, dtype=torch.uint8)
    payload.pack(out)
    return out.numpy().tobytes()


def ranges(payload: Payload) -> bytes:
    out = torch.zeros(payload.nbytes, dtype=torch.uint8)
    bucket = torch.empty(192, dtype=torch.uint8)
    for start, stop in payload.buckets(192):
        bucket.zero_()  # padding is left as it is
        payload.pack(bucket, start, stop)
        out[start:stop] = bucket[: stop - start]
    return out.numpy().tobytes()


def odd(payload: Payload) -> bytes:
    """Ranges that end anywhere, into memory that lies anywhere."""
    out = torch.zeros(payload.nbytes + 1, dtype=torch.uint8)[1:]
    for start in range(0, payload.nbytes, 37):
        stop = min(start + 37, payload.nbytes)
        payload.pack(out[start:stop], start, stop)
    return out.numpy().tobytes()


def blocks(payload: Payload) -> bytes:
    padded = torch.zeros(payload.nbytes, dtype=torch.uint8)
    for place, block in zip(payload.layout.slice(padded), payload.tensors(), strict=True):
        place.copy_(block)
    return padded.numpy().tobytes()


def parts(payload: Payload) -> bytes:
    padded, position, sizes = torch.zeros(payload.nbytes, dtype=torch.uint8), 0, payload.layout.sizes
    found = list(payload.parts(150))
    assert max(part.numel() for part in found) <= 128
    for block, size in enumerate(sizes):
        flat = b""
        while len(flat) < size:
            flat += found[position].numpy().tobytes()
            position += 1
        position += not size  # one part that is empty
        start = payload.layout.starts[block]
        padded[start : start + size] = torch.frombuffer(bytearray(flat), dtype=torch.uint8) if size else 0
    assert position == len(found)
    return padded.numpy().tobytes()


def typed(payload: Payload) -> bytes:
    padded = torch.zeros(payload.nbytes, dtype=torch.uint8)
    places = payload.layout.slice(padded)
    for entry, tensor in zip(payload.layout.entries, payload.entries(), strict=True):
        if tensor.numel():
            places[entry.block].copy_(tensor.contiguous().view(-1).view(torch.uint8))
    return padded.numpy().tobytes()


def some_state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "a": torch.randn(7, 13, generator=generator),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(-0.0),
        "b": torch.randn(5, generator=generator).bfloat16(),
        "count": torch.arange(41),
        "flags": torch.arange(9) % 2 == 0,
        "last": torch.randn(100, generator=generator),
    }


WAYS = [whole, ranges, odd, blocks, parts, typed]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cast", [None, torch.float64, torch.float16, "float8_e4m3fn*scale"], ids=str)
@pytest.mark.parametrize("most", [1, 10, 1000])
def test_pieces_make_the_same_bytes_and_none_is_held(way: Callable[[Payload], bytes], cast: Any, most: int) -> None:
    mapping = {} if cast is None else {"cast": cast}
    plain = Payload(Source(some_state(), **mapping).extract(), stamp=Version(1, 1), digest=True)
    want = whole(plain)
    payload, slow = gathering(some_state(), most, digest=True, **mapping)
    assert way(payload) == want
    assert payload.header.digest == plain.header.digest
    payload.close()
    assert slow.closed == len(slow.begun)
    if way in (whole, ranges, odd):  # which copy
        assert slow.begun == [6]
        assert slow.held == 0


def test_to_go_back_is_to_gather_again() -> None:
    payload, slow = gathering(some_state(), 10)
    first = ranges(payload)
    assert ranges(payload) == first
    assert slow.begun == [6, 6]
    assert slow.closed == 1
    payload.close()
    assert slow.closed == 2


def test_a_scale_alone_is_made_from_its_tensor() -> None:
    payload, _ = gathering({"w": torch.tensor([1.0, -448.0, 3.0])}, 2, cast="float8_e4m3fn*scale")
    start, size = payload.layout.starts[1], payload.layout.sizes[1]
    out = torch.empty(size, dtype=torch.uint8)
    payload.pack(out, start, start + size)
    assert out.view(torch.float32).item() == 1.0


def test_what_fails_while_it_is_read_fails_the_reader_and_can_be_read_again() -> None:
    payload, slow = gathering(some_state(), 10)
    want = whole(payload)
    slow.most = 0  # range() refuses it
    with pytest.raises(ValueError, match="must not be zero"):
        whole(payload)
    slow.most = 7
    assert whole(payload) == want
