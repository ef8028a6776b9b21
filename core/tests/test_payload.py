"""From live tensors to bytes and back: whatever the way, range or bucket, the same bits and ties come out."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightwire.testing.states import Tied, arrange, bits, makeable, random_bits, snapshot, special_values, tie_groups
from weightwire.testing.strategies import states
from weightwire.transport import Version
from weightwire.weights.payload import Payload
from weightwire.weights.source import Source
from weightwire.wire import decode_header

STAMP = Version(1000, 1)


def payload_of(weights: Any, *, digest: bool = False, **mapping: Any) -> Payload:
    return Payload(Source(weights, **mapping).extract(), stamp=STAMP, digest=digest)


def packed(payload: Payload) -> Tensor:
    out = torch.zeros(payload.nbytes, dtype=torch.uint8)
    payload.pack(out)
    return out


def unpacked(payload: Payload, buffer: Tensor) -> dict[str, Tensor]:
    """What a worker gets: views of blocks that lie apart."""
    blocks = [block.clone() for block in payload.layout.slice(buffer)]
    return dict(zip(payload.layout.names, payload.layout.views(blocks)))


def bucketed(payload: Payload, size: int) -> Tensor:
    out = torch.zeros(payload.nbytes, dtype=torch.uint8)
    bucket = torch.empty(size, dtype=torch.uint8)
    for start, stop in payload.buckets(size):
        payload.pack(bucket, start, stop)
        out[start:stop] = bucket[: stop - start]
    return out


def joined(payload: Payload) -> Tensor:
    out = torch.zeros(payload.nbytes, dtype=torch.uint8)
    for place, block in zip(payload.layout.slice(out), payload.tensors()):
        place.copy_(block)
    return out


def without_padding(payload: Payload, buffer: Tensor) -> list[bytes]:
    return [block.numpy().tobytes() for block in payload.layout.slice(buffer)]


# -- bits and ties -----------------------------------------------------------------------------------------------------


@given(state=states(), size=st.integers(1, 20))
def test_every_way_gives_the_same_bits_and_ties(state: dict[str, Tensor], size: int) -> None:
    payload = payload_of(state)
    before, groups = snapshot(state), tie_groups(state)
    whole = packed(payload)
    got = unpacked(payload, whole)
    assert snapshot(got) == before
    assert tie_groups(got) == groups
    blocks = without_padding(payload, whole)
    assert without_padding(payload, joined(payload)) == blocks
    assert without_padding(payload, bucketed(payload, 64 * size)) == blocks
    assert snapshot(dict(zip(payload.layout.names, payload.entries()))) == before


@given(state=states())
def test_layouts_go_over_the_wire(state: dict[str, Tensor]) -> None:
    payload = payload_of(state, digest=True)
    bound = payload.header_size
    buffer = packed(payload)
    data = payload.header_bytes()
    assert len(data) <= bound
    header = decode_header(data)
    assert header == payload.header
    assert snapshot(unpacked(payload, buffer)) == snapshot(
        dict(zip(header.layout.names, header.layout.views(header.layout.slice(buffer))))
    )


def test_all_dtypes_in_one_state_after_an_odd_sized_one() -> None:
    state: dict[str, Tensor] = {}
    for name in makeable():
        state[f"{name}.odd"] = random_bits("bool", (3,))
        state[name] = random_bits(name, (5, 3), seed=1)
    payload = payload_of(state)
    assert snapshot(unpacked(payload, packed(payload))) == snapshot(state)
    assert snapshot(unpacked(payload, bucketed(payload, 64))) == snapshot(state)
    assert all(start % 64 == 0 for start in payload.layout.starts)


def test_special_values_keep_their_bits() -> None:
    state = special_values()
    payload = payload_of(state)
    assert snapshot(unpacked(payload, packed(payload))) == snapshot(state)


def test_ties_travel_once() -> None:
    model = Tied()
    payload = payload_of(model)
    assert payload.nbytes == 64 * 32 * 4 + 48 * 4
    got = unpacked(payload, packed(payload))
    assert got["embed.weight"].data_ptr() == got["head.weight"].data_ptr()
    got["mean"][16] = 7.0
    assert got["tail"][0] == 7.0


def view_states() -> dict[str, dict[str, Tensor]]:
    base = torch.arange(48.0)
    table = torch.arange(96.0).view(8, 12)
    wide = torch.arange(4000.0).view(40, 100)
    return {
        "slice of a dense one": {"all": base, "tail": base[16:]},
        "slice before what it is a slice of": {"tail": base[16:], "all": base},
        "transposed": {"w": table, "t": table.t()},
        "only transposed": {"t": table.t(), "row": table[2]},
        "rows and columns": {"w": table, "row": table[1], "column": table[:, 3], "corner": table[2:4, 5::3]},
        "another dtype": {"w": base, "bits": base.view(torch.int32), "bytes": base.view(torch.uint8)[8:24]},
        "expanded from a row": {"w": table, "e": table[0].expand(5, 12)},
        "overlapping, none of them all": {"a": base[:30], "b": base[20:]},
        "sparse, and a view of it": {"s": wide[::4, ::5], "row": wide[4, ::5], "one": wide[8:9, 10:11]},
        "diagonal of a sparse one": {"s": wide[::4, ::5], "d": wide[::4, ::5].diagonal()},
        "permuted": {"x": torch.arange(120.0).view(2, 3, 4, 5).permute(0, 3, 1, 2), "y": torch.ones(1)},
        "expanded, and a view of it": {"e": wide[0:1, ::3].expand(7, 34), "v": wide[0, ::3][3:9]},
        "same elements, other shape": {"a": base, "b": base.view(6, 8), "c": base.view(1, 48)},
    }


@pytest.mark.parametrize("case", view_states())
@pytest.mark.parametrize("cast", [None, torch.float64, torch.bfloat16])
def test_views_stay_views(case: str, cast: torch.dtype | None) -> None:
    state = view_states()[case]
    if cast is not None and len({t.dtype for t in state.values()}) > 1:
        pytest.skip("views of several dtypes cannot be cast and stay tied")
    payload = payload_of(state, cast=cast)
    got = unpacked(payload, packed(payload))
    want = {name: t if cast is None else t.to(cast) for name, t in state.items()}
    assert snapshot(got) == snapshot(want)
    assert tie_groups(got) == tie_groups(state)
    assert snapshot(unpacked(payload, joined(payload))) == snapshot(want)
    assert snapshot(unpacked(payload, bucketed(payload, 64))) == snapshot(want)
    assert snapshot(dict(zip(payload.layout.names, payload.entries()))) == snapshot(want)


@st.composite
def slices(draw: st.DrawFn, rank: int) -> tuple[slice, ...]:
    return tuple(slice(draw(st.integers(0, 3)), None, draw(st.integers(1, 4))) for _ in range(rank))


@given(data=st.data(), cast=st.sampled_from([None, torch.float64]))
def test_views_of_any_view_stay_views(data: st.DataObject, cast: torch.dtype | None) -> None:
    rank = data.draw(st.integers(1, 3))
    base = torch.arange(12.0**rank).view((12,) * rank)
    order = data.draw(st.permutations(range(rank)))
    owner = base[data.draw(slices(rank))].permute(order)
    state = {"a": owner, "b": owner[data.draw(slices(rank))], "c": owner[data.draw(slices(rank))].transpose(0, -1)}
    state = {name: state[name] for name in data.draw(st.permutations(sorted(state)))}
    state = {name: tensor for name, tensor in state.items() if tensor.numel()}
    payload = payload_of(state, cast=cast)
    got = unpacked(payload, packed(payload))
    assert snapshot(got) == snapshot(
        {name: tensor if cast is None else tensor.to(cast) for name, tensor in state.items()}
    )
    for name in got.keys() - {"a"}:
        got["a"].fill_(-1.0)
        assert (got[name] == -1.0).all()
    assert sum(payload.layout.sizes) == owner.numel() * (4 if cast is None else 8)


def test_what_lies_between_the_elements_of_a_sparse_tensor_is_not_sent() -> None:
    wide = torch.arange(4000.0).view(40, 100)
    payload = payload_of({"s": wide[::4, ::5], "row": wide[4, ::5]})
    assert payload.layout.sizes == (10 * 20 * 4,)


def test_overlapping_sparse_views_of_nothing_that_is_sent_come_apart() -> None:
    wide = torch.arange(100000.0).view(100, 1000)
    state = {"left": wide[:, :1], "right": wide[:, 5:6], "dense": wide[50]}
    payload = payload_of(state)
    assert sum(payload.layout.sizes) == (100 + 100 + 1000) * 4
    assert snapshot(unpacked(payload, packed(payload))) == snapshot(state)


def test_views_of_several_dtypes_of_which_one_is_cast_come_apart() -> None:
    base = torch.arange(16.0)
    payload = payload_of({"w": base, "bits": base.view(torch.int32)}, cast=torch.float64)
    got = unpacked(payload, packed(payload))
    assert torch.equal(got["w"], base.double())
    assert torch.equal(got["bits"], base.view(torch.int32))


def test_a_misaligned_view_comes_apart() -> None:
    raw = random_bits("uint8", (67,))
    odd = raw[3:67].view(torch.uint8)
    state = {"raw": raw, "floats": torch.from_numpy(np.frombuffer(odd.numpy(), np.float32).copy())}
    shifted = torch.from_numpy(raw.numpy()[1:65].view(np.float32))
    state["shifted"] = shifted
    payload = payload_of(state)
    assert snapshot(unpacked(payload, packed(payload))) == snapshot(state)


def test_conjugate_and_negative_views_are_sent_as_what_they_say() -> None:
    z = random_bits("complex64", (6,))
    state = {"z": z, "conj": z.conj(), "neg": z.conj().imag, "again": z.conj()}
    payload = payload_of(state)
    for buffer in (packed(payload), joined(payload), bucketed(payload, 64)):
        assert snapshot(unpacked(payload, buffer)) == snapshot(state)
    assert tie_groups(unpacked(payload, packed(payload))) == {frozenset({"conj", "again"})}
    assert snapshot(dict(zip(payload.layout.names, payload.entries()))) == snapshot(state)


def test_dense_orders_are_kept_and_others_are_packed() -> None:
    state = {
        "transposed": arrange("float32", (4, 6), "transposed"),
        "channels_last": arrange("float32", (2, 3, 4, 5), "channels_last"),
        "sliced": arrange("float32", (4, 6), "sliced"),
        "expanded": arrange("float32", (4, 6), "expanded"),
    }
    payload = payload_of(state)
    strides = {entry.name: entry.strides for entry in payload.layout.entries}
    assert strides == {"transposed": (1, 4), "channels_last": (60, 1, 15, 3), "sliced": (), "expanded": ()}
    shared = [block.data_ptr() for block in payload.tensors()]
    assert shared[:2] == [state["transposed"].data_ptr(), state["channels_last"].data_ptr()]


# -- ranges and buckets ------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(0, 700), max_size=12),
    bucket=st.integers(64, 512),
)
def test_buckets_cover_the_payload_once(sizes: list[int], bucket: int) -> None:
    payload = payload_of({f"t{i}": torch.zeros(n, dtype=torch.uint8) for i, n in enumerate([*sizes, 1])})
    ranges = list(payload.buckets(bucket))
    assert ranges[0][0] == 0
    assert ranges[-1][1] == payload.nbytes
    assert all(one[1] == two[0] for one, two in pairwise(ranges))
    assert all(0 < stop - start <= bucket for start, stop in ranges)
    starts = set(payload.layout.starts)
    whole = {a for a, b in pairwise(payload.layout.starts) if b - a <= bucket // 64 * 64}
    for start, _ in ranges:  # a block that fits into a bucket is never cut
        assert start in starts or not any(a < start < a + 64 for a in whole)


def test_a_block_larger_than_a_bucket_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightwire.weights.blocks import Block

    made: list[int] = []
    flat = Block.flat
    monkeypatch.setattr(Block, "flat", lambda self, *args: made.append(self.leaf) or flat(self, *args))
    state = {"tiny": torch.ones(1), "huge": torch.randn(64, 64).t()[:, ::2], "last": torch.ones(3)}
    payload = payload_of(state, cast=torch.float64)
    assert snapshot(unpacked(payload, bucketed(payload, 256))) == snapshot({k: v.double() for k, v in state.items()})
    assert made == [1]


@pytest.mark.parametrize(
    ("out", "span"),
    [
        (torch.empty(63, dtype=torch.uint8), (0, 64)),
        (torch.empty(64), (0, 64)),
        (torch.empty(2, 64, dtype=torch.uint8), (0, 64)),
        (torch.empty(128, dtype=torch.uint8)[::2], (0, 64)),
        (torch.empty(128, dtype=torch.uint8), (0, 65)),
        (torch.empty(128, dtype=torch.uint8), (32, 16)),
    ],
)
def test_memory_that_does_not_fit_is_refused(out: Tensor, span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="bytes"):
        payload_of({"w": torch.ones(16)}).pack(out, *span)


def test_any_range_may_be_packed_anywhere() -> None:
    state = {"a": torch.arange(7.0, dtype=torch.float64), "b": random_bits("bool", (3,)), "c": torch.arange(40.0)}
    payload = payload_of(state)
    whole = packed(payload)
    for start, stop in ((0, 1), (3, 61), (1, payload.nbytes), (65, 200), (64, 67)):
        out = torch.zeros(stop - start + 5, dtype=torch.uint8)[5:]  # misaligned, too
        payload.pack(out, start, stop)
        assert torch.equal(out, whole[start:stop])


# -- digests, headers, lifetimes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [packed, joined, lambda p: bucketed(p, 64), lambda p: p.entries()])
def test_the_digest_is_of_the_blocks_without_padding(read: Any) -> None:
    state = {
        "a": torch.randn(5, 3).t(),
        "b": random_bits("bool", (3,)),
        "empty": torch.empty(0),
        "c": torch.randn(100)[::3],
    }
    payload = payload_of(state, digest=True)
    want = xxhash.xxh3_128(b"".join(without_padding(payload, packed(payload_of(state))))).digest()
    read(payload)
    assert payload.header.digest == want


def test_a_header_before_all_bytes_were_read_is_a_bug_of_the_backend() -> None:
    payload = payload_of({"a": torch.ones(64)}, digest=True)
    with pytest.raises(RuntimeError, match="0 of 256 bytes"):
        _ = payload.header
    payload.pack(torch.empty(128, dtype=torch.uint8), 0, 128)
    with pytest.raises(RuntimeError, match="128 of 256 bytes"):
        payload.header_bytes()
    assert not payload.announced
    with pytest.raises(RuntimeError, match="order"):
        payload.pack(torch.empty(64, dtype=torch.uint8), 192, 256)
    packed(payload)  # from the beginning again: after StorageFullError, say
    assert payload.header.digest
    assert payload.announced


def test_asking_for_the_header_announces() -> None:
    payload = payload_of({"a": torch.ones(1)})
    assert not payload.announced
    assert payload.header_size > 0
    assert not payload.announced
    assert payload.header is payload.header
    assert payload.announced
    assert (payload.header.stamp, payload.header.base, payload.header.digest) == (STAMP, None, b"")


def test_a_payload_of_empty_tensors_is_complete_at_once() -> None:
    payload = payload_of({"a": torch.empty(0), "b": torch.empty(0, 8)}, digest=True)
    assert payload.nbytes == 0
    assert list(payload.buckets(64)) == []
    assert payload.header.digest == xxhash.xxh3_128(b"").digest()
    assert [tuple(t.shape) for t in unpacked(payload, packed(payload)).values()] == [(0,), (0, 8)]


def test_memory_that_was_packed_into_is_not_kept_alive() -> None:
    source = Source({"a": torch.ones(100), "b": torch.ones(3)})
    array = np.zeros(source.extract().layout.nbytes, np.uint8)
    out = torch.from_numpy(array)
    object_of, memory_of = weakref.ref(out), weakref.ref(array)
    Payload(source.extract(), stamp=STAMP).pack(out)
    Payload(source.extract(), stamp=STAMP).pack(out)
    del out, array
    gc.collect()
    assert object_of() is None
    assert memory_of() is None


def test_memory_that_moved_under_its_object_is_noticed() -> None:
    source = Source({"a": torch.ones(100)})
    out = torch.zeros(448, dtype=torch.uint8)
    Payload(source.extract(), stamp=STAMP).pack(out)
    out.set_(torch.zeros(448, dtype=torch.uint8))  # type: ignore[call-overload]
    Payload(source.extract(), stamp=STAMP).pack(out)
    assert torch.equal(out[:400].view(torch.float32), torch.ones(100))


def test_packing_needs_no_grad_and_leaves_none_behind() -> None:
    model = torch.nn.Linear(3, 2)
    source = Source(model)
    with torch.inference_mode():
        inference = torch.zeros(source.extract().layout.nbytes, dtype=torch.uint8)
        Payload(source.extract(), stamp=STAMP).pack(inference)
    plain = torch.zeros_like(inference)
    for out in (plain, inference, plain):
        payload = Payload(source.extract(), stamp=STAMP)
        payload.pack(out)
        assert bits(unpacked(payload, out)["weight"]) == bits(model.weight)
        assert not any(block.requires_grad for block in payload.tensors())
    model(torch.ones(1, 3)).sum().backward()


def test_a_phase_is_booked() -> None:
    payload = payload_of({"a": torch.ones(1)})
    with payload.phase("notify"):
        pass
    with pytest.raises(KeyError), payload.phase("notify"):
        raise KeyError
    assert payload.seconds.keys() == {"notify"}
    assert payload.seconds["notify"] > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_on_a_device() -> None:
    state = {
        "a": torch.randn(5, 3).t(),
        "b": torch.randn(100)[::3],
        "c": torch.randn(70),
        "d": random_bits("bool", (3,)),
    }
    there = {name: tensor.cuda() for name, tensor in state.items()}
    there["tail"] = there["c"][10:]
    state["tail"] = state["c"][10:]
    for cast in (None, torch.bfloat16):
        payload, want = payload_of(there, cast=cast), payload_of(state, cast=cast)
        for read in (packed, joined, lambda p: bucketed(p, 64)):
            assert snapshot(unpacked(payload, read(payload))) == snapshot(unpacked(want, packed(want)))
        on_device = torch.zeros(payload.nbytes, dtype=torch.uint8, device="cuda")
        payload.pack(on_device)
        assert without_padding(payload, on_device.cpu()) == without_padding(want, packed(want))
