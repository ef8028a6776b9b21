"""Full versions and the subsets on top of them: in targets whose memory cannot be written to as it is, and in those of
the receiver's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from weightwire import PreflightError, RefusedError, WeightReceiver, WeightUpdater
from weightwire.testing.states import snapshot

Ends = Callable[..., tuple[WeightUpdater, WeightReceiver]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    opened: list[Any] = []

    def make(source: Any, target: Any = None, **options: Any) -> tuple[WeightUpdater, WeightReceiver]:
        updater = WeightUpdater("vanilla", source, timeout=10.0)
        receiver = WeightReceiver(updater.endpoint, target, timeout=10.0, **options)
        opened.extend((receiver, updater))
        return updater, receiver

    yield make
    for end in opened:
        end.close()


def arrays() -> dict[str, Any]:
    return {"a": np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (4,), (0,)), "b": np.zeros(2, np.float32)}


def tensors() -> dict[str, Any]:
    return {"a": torch.zeros(1).expand(4), "b": torch.zeros(2)}


@pytest.mark.parametrize("make", [tensors, arrays])
def test_a_subset_beside_a_full_version_in_a_target_that_was_expanded(ends: Ends, make: Callable[[], Any]) -> None:
    source, target = {"a": torch.zeros(4), "b": torch.zeros(2)}, make()
    updater, receiver = ends(source, target)
    updater.push()
    assert receiver.pull() == 1
    for number in (2, 4):
        source["a"].fill_(number)
        source["b"].fill_(number)
        updater.push()
        source["a"].fill_(number + 1)
        updater.push(partial=True, select="a")
        assert receiver.pull() == number + 1, "both at once"
        assert (list(target["a"]), list(target["b"])) == ([number + 1] * 4, [number] * 2)


@pytest.mark.parametrize("apply", ["copy", "alias"])
def test_a_subset_with_a_view_of_what_is_expanded(ends: Ends, apply: str) -> None:
    one = torch.zeros(1)
    source = {"t": one.expand(2, 3), "v": one.expand(2, 3)[:, :2]}
    updater, receiver = ends(source, apply=apply)
    updater.push()
    receiver.pull()
    for number in (2, 3):
        one.fill_(number)
        updater.push(partial=True, select=["v"])
        assert receiver.pull() == number
        assert receiver.weights["v"].tolist() == [[number, number]] * 2
    one.fill_(7)
    updater.push()
    receiver.pull()
    assert receiver.weights["t"].tolist() == [[7.0] * 3] * 2
    assert receiver.weights["v"].tolist() == [[7.0] * 2] * 2


@pytest.mark.parametrize("apply", ["copy", "alias"])
def test_a_subset_keeps_ties_of_weights_that_the_receiver_owns(ends: Ends, apply: str) -> None:
    tied = torch.zeros(3)
    updater, receiver = ends({"a": tied, "b": tied, "c": torch.zeros(3)}, apply=apply)
    updater.push()
    receiver.pull()
    tied.fill_(7)
    updater.push(partial=True, select="a")
    assert receiver.pull() == 2
    assert snapshot(receiver.weights).keys() == {"a", "b", "c"}
    assert receiver.weights["a"].tolist() == receiver.weights["b"].tolist() == [7.0] * 3
    assert receiver.weights["a"].data_ptr() == receiver.weights["b"].data_ptr()
    assert receiver.weights["c"].tolist() == [0.0] * 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64, np.float32])
def test_arrays_that_run_backwards(ends: Ends, dtype: Any, stream: bool) -> None:
    values = np.arange(3, dtype=dtype)
    target = {"a": np.flip(np.zeros(3, dtype), 0)}
    updater, receiver = ends({"a": values}, target, stream=stream)
    updater.push()
    assert receiver.pull() == 1
    assert target["a"].tolist() == [0, 1, 2]


def test_a_row_of_a_large_tensor_is_streamed_alone(ends: Ends) -> None:
    whole = torch.randn(3000, 4000)
    target = {"row": torch.zeros(4000)}
    updater, receiver = ends({"w": whole, "row": whole[0]}, target, select="row", stream=True)
    updater.push()
    assert receiver.pull() == 1
    assert torch.equal(target["row"], whole[0])


@pytest.mark.parametrize("target", [None, lambda named: None], ids=["its own", "a function"])
@pytest.mark.parametrize("table", [{"rename": {"typo.": "x."}}, {"cast": {"typo*": "float16"}}], ids=["rename", "cast"])
def test_a_table_that_fits_no_name_is_refused(ends: Ends, target: Any, table: dict[str, Any]) -> None:
    source = {"a": torch.zeros(4), "b": torch.zeros(2)}
    updater, receiver = ends(source, target, **table)
    updater.push()
    with pytest.raises(PreflightError, match=r"(renames|casts) none of 2 names"):
        receiver.pull()
    assert not receiver.ready
    with pytest.raises(RefusedError, match="none of 2 names"):
        updater.wait()
