"""Ends of the backend itself, below the core's updater and receiver."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightwire.endpoint import parse
from weightwire.testing.rig import gather
from weightwire.transport import Deadline, Have, Joined, ReceiverContext, SenderContext, Version
from weightwire.weights.payload import Payload
from weightwire.weights.source import Source
from weightwire_ipc.options import IpcOptions
from weightwire_ipc.receiver import IpcReceiver
from weightwire_ipc.sender import IpcSender

NOTHING = Have()

ON_A_DEVICE = (
    "aliased",
    "applied",
    "kept_views",
    "views_outlive",
    "reader_never_sees",
    "late",
    "some",
    "subset",
    "histories",
    "thousand",
    "come_and_go",
    "worker_is_killed",
    "trainer_is_killed",
    "stream",
    "ties",
    "shapes",
)
"""Words in the names of the kit's cases that are run on a device each time; the others only in the soak."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "TestIpcOnADevice" in item.nodeid:
            name = item.name
            if "histories_with_deaths" in name or not any(word in name for word in ON_A_DEVICE):
                item.add_marker(pytest.mark.soak)


class Bench:
    """Opens ends at one place and closes them all at the end of the test."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.opened: list[Any] = []

    def sender(self, location: str | None = None, *, layer: Any = None, **options: Any) -> IpcSender:
        place = self.location if location is None else location
        context = SenderContext(epoch=1000, deadline=Deadline.after(5))
        sender = IpcSender(parse({"backend": "ipc", "location": place}), IpcOptions(**options), context, layer)
        self.opened.append(sender)
        return sender

    def receiver(
        self,
        worker: str = "w",
        *,
        location: str | None = None,
        apply: str = "copy",
        have: Have = NOTHING,
        layer: Any = None,
        trained: str = "",
        **joined: Any,
    ) -> IpcReceiver:
        context = ReceiverContext(
            joined=Joined(worker=worker, **joined),
            have=lambda: have,
            apply=apply,
            trained=trained,
            deadline=Deadline.after(5),
            logger=logging.getLogger("test"),
        )
        receiver = IpcReceiver(self.location if location is None else location, context, layer)
        self.opened.append(receiver)
        return receiver

    @staticmethod
    def payload(
        sender: IpcSender,
        number: int,
        value: float | None = None,
        *,
        size: int = 100,
        epoch: int | None = None,
        **more: Any,
    ) -> Payload:
        state = {"value": torch.full((size,), float(number if value is None else value)), "n": torch.tensor(number)}
        return Payload(Source(state).extract(), stamp=Version(epoch or sender.epoch, number), **more)

    def stage(
        self, sender: IpcSender, number: int, *, to: set[str] | None = None, timeout: float = 5.0, **more: Any
    ) -> Version:
        payload = self.payload(sender, number, **more)
        sender.stage(payload, None if to is None else frozenset(to), Deadline.after(timeout))
        return payload.stamp

    def close(self) -> None:
        for end in reversed(self.opened):
            end.close(Deadline.after(1))


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory of the test's own; the path of Weightwire's part of it."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "weightwire"


@pytest.fixture
def bench(private: Path) -> Iterator[Bench]:
    bench = Bench("policy")
    yield bench
    bench.close()


@pytest.fixture(name="gather")
def _gather() -> Callable[..., list[Any]]:
    return gather
