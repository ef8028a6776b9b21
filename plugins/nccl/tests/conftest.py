"""Ends of the backend itself, workers to kill, and the kit's rig at a place of this backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from weightwire.endpoint import parse
from weightwire.hookspecs import CAPABILITIES
from weightwire.testing import Rig
from weightwire.testing.rig import gather
from weightwire.transport import Deadline, Delivery, Have, Joined, ReceiverContext, SenderContext, Version
from weightwire.weights.payload import Payload
from weightwire.weights.source import Source
from weightwire_nccl.options import NcclOptions
from weightwire_nccl.receiver import NcclReceiver
from weightwire_nccl.sender import NcclSender

NOTHING = Have()


class Bench:
    """Opens ends at one place and closes them all at the end of the test."""

    def __init__(self) -> None:
        self.opened: list[Any] = []
        self.endpoint = ""

    def sender(self, location: str = "127.0.0.1:0", *, epoch: int = 1000, **options: Any) -> NcclSender:
        context = SenderContext(epoch=epoch, deadline=Deadline.after(5))
        sender = NcclSender(parse({"backend": "nccl", "location": location}), NcclOptions(**options), context)
        self.opened.append(sender)
        self.endpoint = sender.endpoint
        return sender

    def receiver(
        self,
        worker: str = "w",
        *,
        endpoint: str = "",
        apply: str = "copy",
        have: Have = NOTHING,
        stream: bool = False,
        patience: float = 5.0,
        **options: Any,
    ) -> NcclReceiver:
        context = ReceiverContext(
            joined=Joined(worker=worker),
            have=lambda: have,
            apply=apply,
            stream=stream,
            deadline=Deadline.after(patience),
        )
        receiver = NcclReceiver(parse(endpoint or self.endpoint), NcclOptions(**options), context)
        self.opened.append(receiver)
        return receiver

    def stage(
        self,
        sender: NcclSender,
        number: int,
        *,
        to: set[str] | None = None,
        size: int = 100,
        timeout: float = 5.0,
        **more: Any,
    ) -> Version:
        state = {"value": torch.full((size,), float(number)), "n": torch.tensor(number)}
        payload = Payload(Source(state).extract(), stamp=Version(sender.epoch, number), **more)
        sender.stage(payload, None if to is None else frozenset(to), Deadline.after(timeout))
        return payload.stamp

    def close(self) -> None:
        for end in reversed(self.opened):
            end.close(Deadline.after(1))


def said(delivery: Delivery | None) -> int:
    """The number that the content says; 0 for no delivery. Fails where it is a mix."""
    if delivery is None:
        return 0
    value, number = (dict(zip(delivery.header.layout.index, delivery.views()))[name] for name in ("value", "n"))
    assert (value == number).all()
    return int(number)


@pytest.fixture
def read() -> Callable[[Delivery | None], int]:
    return said


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTWIRE_TOKEN", raising=False)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture(name="gather")
def _gather() -> Callable[..., list[Any]]:
    return gather


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Rigs at a free port, with options in the endpoint: the updater comes first and says where."""
    rigs: list[Rig] = []

    def make(options: str = "") -> Rig:
        rig = Rig(lambda: f"nccl://127.0.0.1:0{options}", CAPABILITIES)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.close()
