"""How bytes lie in the store: without Ray."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from weightwire.errors import WireError
from weightwire.transport import Version
from weightwire.weights import digest
from weightwire.weights.arrays import array_of, tensor_of
from weightwire.weights.layout import aligned
from weightwire.weights.payload import Payload
from weightwire.weights.source import Source
from weightwire_ray import store

STATES: dict[str, dict[str, torch.Tensor]] = {
    "small": {f"t{i}": torch.full((i,), i, dtype=torch.uint8) for i in range(200)},
    "odd": {"bool": torch.ones(3, dtype=torch.bool), "wide": torch.arange(70_001.0), "scalar": torch.tensor(1 << 60)},
    "large": {"a": torch.randn(700_001), "tiny": torch.ones(1), "b": torch.randn(300_000), "none": torch.empty(0, 4)},
    "nothing": {"none": torch.empty(0, 4)},
    "mixed": {f"t{i}": torch.randn(40_000 if i % 5 == 0 else 11) for i in range(40)},
}


def payload(state: dict[str, torch.Tensor]) -> Payload:
    return Payload(Source(state).extract(None), stamp=Version(1, 1))


def laid(bucket: list[Any]) -> list[Any]:
    """A bucket's arrays as Ray lays them: one after the other, each at a multiple of 64."""
    nbytes = sum(aligned(array.size) for array in bucket)
    spacious = np.zeros(nbytes + 64, np.uint8)
    memory = spacious[-spacious.ctypes.data % 64 :]
    found, start = [], 0
    for array in bucket:
        found.append(memory[start : start + array.size])
        found[-1][:] = array
        found[-1].flags.writeable = False
        start += aligned(array.size)
    return found


@pytest.mark.parametrize("size", [1 << 16, 1 << 20, 1 << 30])
@pytest.mark.parametrize("name", STATES)
def test_what_goes_in_comes_out(name: str, size: int) -> None:
    sent = payload(STATES[name])
    expected = [bytes(array_of(flat)) for flat in sent.tensors()]
    buckets = [laid(bucket) for bucket in store.buckets(sent, size)]
    stretches = store.stretches_of(buckets, sent.layout)
    assert [bytes(block) for block in store.blocks_of(stretches, sent.layout)] == expected
    for stretch, bucket in zip(stretches, buckets):
        assert stretch.ctypes.data == bucket[0].ctypes.data, "not copied"
    assert store.digest_of(buckets, sent.layout) == digest.digest_of(sent.tensors())
    largest = max(aligned(len(block)) for block in expected)
    assert all(stretch.size <= max(size, largest) for stretch in stretches)


def test_arrays_that_lie_elsewhere_are_copied_together() -> None:
    sent = payload(STATES["mixed"])
    expected = [bytes(array_of(flat)) for flat in sent.tensors()]
    store.stretches_of([laid(bucket) for bucket in store.buckets(sent, 1 << 20)], sent.layout)
    for _ in range(2):  # whatever is known of others of these sizes
        buckets = [[array.copy() for array in bucket] for bucket in store.buckets(sent, 1 << 20)]
        stretches = store.stretches_of(buckets, sent.layout)
        assert all(stretch.ctypes.data % 64 == 0 for stretch in stretches)
        assert [bytes(block) for block in store.blocks_of(stretches, sent.layout)] == expected


def test_no_array_is_copied_by_threads_of_rays_but_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "WHOLE", 4 << 20)
    sizes = [
        array.size
        for bucket in store.buckets(payload({"a": torch.zeros(3 << 20, dtype=torch.uint8)}), 1 << 30)
        for array in bucket
    ]
    assert sizes == [1 << 20] * 3
    (whole,) = store.buckets(payload({"a": torch.zeros(5 << 20, dtype=torch.uint8)}), 1 << 30)
    assert [array.size for array in whole] == [5 << 20]


def test_small_tensors_share_arrays() -> None:
    (bucket,) = store.buckets(payload(STATES["small"]), 1 << 30)
    assert len(bucket) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda buckets: buckets[1:],
        lambda buckets: [*buckets, [np.zeros(64, np.uint8)]],
        lambda buckets: [[b[0][:-64], *b[1:]] for b in buckets],
        lambda buckets: [[array.view(np.int8) for array in bucket] for bucket in buckets],
        lambda buckets: [[array.reshape(1, -1) for array in bucket] for bucket in buckets],
        lambda buckets: [["text"]],
        lambda buckets: [[buckets[0][0][:100]], [buckets[0][0][128:], *buckets[0][1:]], *buckets[1:]],
    ],
    ids=["one bucket less", "one more", "shorter", "signed", "two axes", "text", "a block cut off"],
)
def test_what_is_no_payload_of_that_layout_is_refused(spoil: Any) -> None:
    sent = payload({"a": torch.randn(700_001), "b": torch.randn(700_001)})
    buckets = [laid(bucket) for bucket in store.buckets(sent, 1 << 20)]
    assert len(buckets) == 2
    with pytest.raises(WireError):
        list(store.blocks_of(store.stretches_of(spoil(buckets), sent.layout), sent.layout))


# -- memory ----------------------------------------------------------------------------------------------------------


def test_arrays_leave_a_tensors_storage_as_it_is() -> None:
    tensor = torch.arange(10, dtype=torch.uint8)
    array = array_of(tensor)
    assert array.tolist() == tensor.tolist()
    del array
    tensor.untyped_storage().resize_(0)


def test_read_only_arrays_become_tensors_without_a_warning() -> None:
    array = array_of(torch.arange(10, dtype=torch.uint8)).copy()
    array.flags.writeable = False
    tensor = tensor_of(array)
    del array
    assert tensor.tolist() == list(range(10))
    assert tensor_of(array_of(torch.empty(0, dtype=torch.uint8))).numel() == 0
