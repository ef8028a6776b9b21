"""Layouts: where things lie, and typed views of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from weightwire.testing.states import makeable, random_bits
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.layout import ALIGNMENT, Entry, Layout, aligned, dense_strides, extent, view

LAYOUT = Layout(
    entries=(
        Entry("flags", "bool", (3,), 0),
        Entry("w", "float32", (4, 6), 1),
        Entry("w.t", "float32", (6, 4), 1, 0, (1, 6)),
        Entry("row", "float32", (6,), 1, 24),
        Entry("empty", "float64", (0, 8), 2),
        Entry("scalar", "int64", (), 3),
    ),
    sizes=(3, 96, 0, 8),
)


def test_blocks_begin_aligned() -> None:
    assert LAYOUT.starts == (0, 64, 192, 192, 256)
    assert LAYOUT.nbytes == 256
    assert LAYOUT.index["row"] == 3
    assert list(LAYOUT.names) == ["flags", "w", "w.t", "row", "empty", "scalar"]


@given(st.integers(0, 10**15))
def test_aligned(nbytes: int) -> None:
    assert 0 <= aligned(nbytes) - nbytes < ALIGNMENT
    assert aligned(nbytes) % ALIGNMENT == 0


@given(st.lists(st.integers(0, 5), max_size=5))
def test_strides_and_extents_are_torch_s(shape: list[int]) -> None:
    tensor = torch.empty(shape)
    assert dense_strides(shape) == tensor.stride()
    assert extent(shape) == extent(shape, tensor.stride()) == tensor.numel()


def test_views_lie_over_their_blocks() -> None:
    buffer = torch.arange(256, dtype=torch.uint8)
    blocks = LAYOUT.slice(buffer)
    assert [block.numel() for block in blocks] == list(LAYOUT.sizes)
    assert all(block.untyped_storage().data_ptr() == buffer.data_ptr() for block in blocks)
    views = dict(zip(LAYOUT.names, LAYOUT.views([block.clone() for block in blocks])))
    assert [tuple(v.shape) for v in views.values()] == [entry.shape for entry in LAYOUT.entries]
    assert [str(v.dtype) for v in views.values()] == [f"torch.{entry.dtype}" for entry in LAYOUT.entries]
    assert torch.equal(views["w"].t(), views["w.t"])
    views["w"][1] = 5.0
    assert views["row"].tolist() == [5.0] * 6
    assert views["w.t"][:, 1].tolist() == [5.0] * 6


@pytest.mark.parametrize("dtype", makeable())
def test_every_dtype_in_a_block_of_any_length(dtype: str) -> None:
    size = DTYPES[dtype]
    block = random_bits("uint8", (size * 6 + 1,))
    for entry in (Entry("x", dtype, (2,), 0, 4 * size), Entry("x", dtype, (2, 2), 0, size, (1, 2))):
        tensor = view(entry, block)
        assert tensor.shape == entry.shape
        assert tensor.data_ptr() == block.data_ptr() + entry.offset
    assert view(Entry("x", dtype, (0, 3), 0), block[:0]).shape == (0, 3)


def test_views_over_an_array_are_the_same_in_storages_of_their_own() -> None:
    entries = [Entry(dtype, dtype, (2, 3), number) for number, dtype in enumerate(makeable())]
    sizes = [6 * DTYPES[entry.dtype] for entry in entries]
    late = Entry("late", "float32", (2,), len(sizes), 4)
    layout = Layout(
        (*entries, late, *(replace(entry, block=entry.block + len(sizes) + 1) for entry in LAYOUT.entries)),
        (*sizes, 12, *LAYOUT.sizes),
    )
    array = np.random.default_rng(0).integers(0, 2, layout.nbytes, dtype=np.uint8)
    views, blocks = layout.array_views(array), layout.array_blocks(array)
    for tensor, like in zip(views, layout.views(blocks), strict=True):
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (like.dtype, like.shape, like.stride())
        assert tensor.data_ptr() == like.data_ptr()
    assert [block.numel() for block in blocks] == list(layout.sizes)
    storages = [tensor.untyped_storage()._cdata for tensor in views]
    ties = {layout.index[name] for name in ("w", "w.t", "row")}
    assert len(set(storages)) == len(storages) - 2
    assert len({storages[position] for position in ties}) == 1


@given(st.data())
def test_ranges_take_each_byte_of_each_block_once(data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=8)))
    layout = Layout(tuple(Entry(f"t{n}", "uint8", (size,), n) for n, size in enumerate(sizes)), sizes)
    cuts = sorted(data.draw(st.sets(st.integers(0, layout.nbytes), max_size=6)) | {0, layout.nbytes})
    seen = [0] * len(sizes)
    for start, stop in pairwise(cuts):
        for block, first, last in layout.within(start, stop):
            assert first == seen[block] < last
            assert start <= layout.starts[block] + first <= layout.starts[block] + last <= stop
            seen[block] = last
    assert tuple(seen) == sizes
