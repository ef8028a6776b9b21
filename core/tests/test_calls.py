"""Functions of which a call runs nothing are refused, wherever one is taken."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch

from weightwire import WeightReceiver, WeightUpdater, hookimpl
from weightwire.errors import ApplyError


async def coroutine(*_: Any) -> None: ...


def generator(*_: Any) -> Iterator[None]:
    yield


async def async_generator(*_: Any) -> AsyncIterator[None]:
    yield


class Async:
    async def __call__(self, *_: Any) -> None: ...


TAKERS: dict[str, Callable[[Any], object]] = {
    "target": lambda function: WeightReceiver("vanilla://x", function),
    "source": lambda function: WeightUpdater("vanilla", function),
    "hook": lambda function: WeightReceiver("vanilla://x").on_applied(function),
    "group": lambda function: WeightReceiver("vanilla://x", {"a": torch.ones(1)}, stream=True, group=function),
    "select": lambda function: WeightUpdater("vanilla", {"a": torch.ones(1)}, select=function),
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize(
    "function", [coroutine, generator, async_generator, Async(), Async().__call__, partial(coroutine, 1)]
)
def test_they_are_refused_where_they_are_given(taker: str, function: Any) -> None:
    with pytest.raises(TypeError, match=f"{taker} is .*async or generator function"):
        TAKERS[taker](function)


@pytest.mark.parametrize("idle", [coroutine, generator, async_generator])
def test_what_has_not_run_is_an_error_when_it_is_returned(idle: Any) -> None:
    with WeightUpdater("vanilla", {"a": torch.ones(1)}) as updater:
        target = WeightReceiver(updater.endpoint, lambda tensors: idle())
        hook = WeightReceiver(updater.endpoint)
        hook.on_applied(lambda version: idle())
        updater.push()
        for receiver, version in (target, 0), (hook, 1):
            with pytest.raises(ApplyError, match="nothing has run"):
                receiver.pull()
            assert receiver.version == version
        with pytest.raises(ApplyError, match="nothing has run"):
            updater.wait()
    with WeightUpdater("vanilla", lambda: idle()) as updater, pytest.raises(TypeError, match="nothing has run"):
        updater.push()


def test_observers_too() -> None:
    class Late:
        @hookimpl
        async def weightwire_after_push(self) -> None: ...

    with WeightUpdater("vanilla", {"a": torch.ones(1)}, observers=[Late()]) as updater:
        updater.push()
        assert any("nothing has run" in error for error in updater.push().errors)


@contextmanager
def once() -> Iterator[None]:
    yield


@pytest.mark.parametrize("guard", [3, object(), threading.Lock, once, once(), Async()])
def test_a_guard_can_be_entered_again_and_again(guard: Any) -> None:
    with pytest.raises(TypeError, match="guard="):
        WeightReceiver("vanilla://x", guard=guard)


@pytest.mark.parametrize("stream", [False, True])
def test_a_guard_that_hides_errors_hides_no_failed_commit(stream: bool) -> None:
    failing = [True]

    def load(tensors: Any) -> None:
        if failing[0]:
            raise ValueError("the engine is full")

    with (
        WeightUpdater("vanilla", {"a": torch.ones(1)}) as updater,
        WeightReceiver(updater.endpoint, load, guard=suppress(BaseException), stream=stream) as receiver,
    ):
        updater.push()
        with pytest.raises(ApplyError, match="the engine is full"):
            receiver.pull()
        assert (receiver.version, receiver.ready) == (0, False)
        failing[0] = False
        with pytest.raises(ApplyError, match="the engine is full"):
            updater.push()  # which is sent, too
        assert receiver.pull() == 2
