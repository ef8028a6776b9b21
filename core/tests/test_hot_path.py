"""What is remembered from one push to the next holds only as long as it is so; and it is what keeps them short."""

from __future__ import annotations

import gc
import sys
from functools import partial
from types import FrameType

import pytest
import torch
from torch import nn

from weightwire import PushReport, RefusedError, WeightReceiver, WeightUpdater
from weightwire.weights.commit import Prepared, commit

CALLS = 100
"""Python functions that an unchanged push into an inline policy may call, all together; there were 88."""


def net(width: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(10)))


def test_an_unchanged_push_calls_few_functions() -> None:
    calls: list[str] = []

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    trained, acting = net(), net()
    with WeightUpdater("vanilla", trained) as updater, WeightReceiver(updater.endpoint, acting, inline=True):
        for _ in range(3):
            updater.push(wait="applied")
        sys.setprofile(count)
        try:
            updater.push(wait="applied")
        finally:
            sys.setprofile(None)
    assert len(calls) <= CALLS, calls


def test_a_layout_that_all_took_is_held_against_who_joins_later() -> None:
    with WeightUpdater("vanilla", net(4)) as updater, WeightReceiver(updater.endpoint, net(4), worker="fits"):
        updater.push()
        updater.push()
        with WeightReceiver(updater.endpoint, net(5), worker="too wide"):
            report = refused(updater)
            assert report.receipts["too wide"].phase == "encode"
            assert report.receipts["too wide"].state == "refused"
            assert report.receipts["fits"].state == "staged"
        assert set(updater.push().receipts) == {"fits"}


def test_another_layout_is_held_against_who_is_there() -> None:
    weights = {"w": torch.zeros(4)}
    with (
        WeightUpdater("vanilla", lambda: weights) as updater,
        WeightReceiver(updater.endpoint, {"w": torch.zeros(4)}) as receiver,
    ):
        updater.push()
        assert receiver.pull() == 1
        weights = {"w": torch.zeros(5)}
        with pytest.raises(RefusedError, match="nothing was sent"):
            updater.push()
        weights = {"w": torch.ones(4)}
        updater.push()
        assert receiver.pull() == 2


@pytest.mark.parametrize("grad", [True, False])
def test_a_commit_leaves_the_modes_as_they_were(grad: bool) -> None:
    target = nn.Parameter(torch.zeros(3))
    good = partial(torch._foreach_copy_, [target.detach()], [torch.ones(3)])
    with torch.set_grad_enabled(grad):
        commit([Prepared(tensors=1, nbytes=12, steps=[good])])
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (grad, False)
        with pytest.raises(ValueError, match="invalid literal") as caught:  # which keeps the frames alive
            commit([Prepared(tensors=1, nbytes=12, steps=[partial(int, "x")])])
        assert caught.value is not None
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (grad, False)
    assert target.tolist() == [1.0] * 3
    assert not target.is_inference()
    (2 * target).sum().backward()
    assert target.grad is not None


def refused(updater: WeightUpdater) -> PushReport:
    with pytest.raises(RefusedError) as caught:
        updater.push()
    assert caught.value.report is not None
    return caught.value.report


def test_what_was_pushed_is_let_go_at_once() -> None:
    """Not when the garbage collector comes by: that may be many versions later."""

    def push(times: int) -> int:
        for _ in range(times):
            updater.push({f"w{n}": torch.zeros(8) for n in range(5)})
            receiver.pull()
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        with WeightUpdater("vanilla") as updater, WeightReceiver(updater.endpoint) as receiver:
            before = push(3)
            assert push(20) <= before
    finally:
        gc.enable()
