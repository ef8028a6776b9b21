"""The kit tries a third party's backend: a right one passes, a wrong one is caught, and what is skipped says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TINY = '''
"""A backend within one process, as a third party would write it. ``FAULT`` makes it wrong in one way."""

from __future__ import annotations

import os
import threading
import uuid
from typing import Any

from weightwire.errors import EndpointInUseError
from weightwire.hookspecs import BackendInfo, hookimpl
from weightwire.transport import Deadline, Delivery, Have, Left, Receiver, Sender, Staged, choose

FAULT = os.environ.get("FAULT", "")


class Stored:
    def __init__(self, header: Any, blocks: Any, to: Any) -> None:
        self.header, self.blocks, self.to = header, blocks, to
        self.stamp, self.base = header.stamp, header.base


class Place:
    def __init__(self) -> None:
        self.news = threading.Condition()
        self.sender: Any = None
        self.epoch = 0
        self.receivers: dict[str, Any] = {}
        self.events: list[Any] = []
        self.full: Any = None
        self.part: Any = None


PLACES: dict[str, Place] = {}


class TinySender(Sender):
    def __init__(self, place: Place, endpoint: str, epoch: int) -> None:
        if place.sender is not None:
            raise EndpointInUseError(f"{endpoint} has an updater already")
        self.place, self.endpoint = place, endpoint
        self.epoch = place.epoch = max(epoch, place.epoch + 1)
        place.sender, place.full, place.part = self, None, None
        place.events = [receiver.context.joined for receiver in place.receivers.values()]

    def stage(self, payload: Any, to: Any, deadline: Deadline) -> None:
        blocks = [block if FAULT == "shares" else block.clone() for block in payload.tensors()]
        if FAULT == "flips" and blocks[-1].numel():
            blocks[-1][0] ^= 1
        stored = Stored(payload.header, blocks, to)
        with self.place.news:
            if stored.base is None:
                self.place.full, self.place.part = stored, None
            elif FAULT != "forgets subsets":
                self.place.part = stored
            for receiver in self.place.receivers.values():
                self.place.events.append(
                    Staged(worker=receiver.context.worker, incarnation=receiver.context.incarnation, stamp=stored.stamp)
                )
            self.place.news.notify_all()

    def events(self, deadline: Deadline) -> list[Any]:
        with self.place.news:
            if not self.place.events:
                self.place.news.wait(deadline.remaining)
            events, self.place.events = self.place.events, []
            return events

    def close(self, deadline: Deadline) -> None:
        with self.place.news:
            if self.place.sender is self:
                self.place.sender = None
                for receiver in self.place.receivers.values():
                    receiver.ending = True  # closed once it has taken what was accepted
                self.place.receivers = {}
                self.place.news.notify_all()


class TinyReceiver(Receiver):
    def __init__(self, place: Place, context: Any) -> None:
        self.place, self.context, self.ending = place, context, False
        with place.news:
            if context.worker in place.receivers:
                raise EndpointInUseError(f"there is a worker {context.worker!r} already")
            place.receivers[context.worker] = self
            place.events.append(context.joined)

    def poll(self, have: Have, deadline: Deadline | None) -> Delivery | None:
        with self.place.news:
            while True:
                self.connected = self.place.sender is not None
                stored = choose(have, self.place.full, self.place.part)
                if stored is not None and not self.closed:
                    return Delivery(stored.header, blocks=stored.blocks)
                self.closed = self.closed or self.ending
                if self.closed or deadline is None or deadline.expired:
                    return None
                self.place.news.wait(deadline.remaining)

    def report(self, event: Any) -> None:
        with self.place.news:
            self.place.events.append(event)
            self.place.news.notify_all()

    def close(self, deadline: Deadline) -> None:
        with self.place.news:
            if self.place.receivers.get(self.context.worker) is self:
                del self.place.receivers[self.context.worker]
                self.place.events.append(Left(worker=self.context.worker, incarnation=self.context.incarnation))
                self.place.news.notify_all()


@hookimpl
def weightwire_backend() -> BackendInfo:
    return BackendInfo(summary="for tests", capabilities=frozenset({"late_join"}))


@hookimpl
def weightwire_make_sender(endpoint: Any, options: Any, context: Any) -> Sender:
    location = endpoint.location or uuid.uuid4().hex
    return TinySender(PLACES.setdefault(location, Place()), f"import:tiny://{location}", context.epoch)


@hookimpl
def weightwire_make_receiver(endpoint: Any, options: Any, context: Any) -> Receiver:
    return TinyReceiver(PLACES.setdefault(endpoint.location, Place()), context)
'''

SUITE = """
from weightwire.testing import BackendSuite


class TestTiny(BackendSuite):
    endpoint = "import:tiny"
    skip = {"names_are_labels": "ours are numbers"}
"""


def run_suite(folder: Path, cases: str, fault: str = "") -> str:
    """Run some cases over the tiny backend; returns what pytest printed."""
    (folder / "tiny.py").write_text(TINY)
    (folder / "test_tiny.py").write_text(SUITE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-k",
        cases,
    ]
    run = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "FAULT": fault},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return run.stdout + run.stderr


def test_a_right_backend_passes(tmp_path: Path) -> None:
    said = run_suite(
        tmp_path, "TestTiny and not leaks and not thousand and not histories and not random and not interpreter"
    )
    assert " failed" not in said, said
    assert " error" not in said, said
    assert "import:tiny does not claim processes" in said
    assert "ours are numbers" in said
    assert "time budget" in said
    assert "test_tiny.py::TestTiny: " in said
    assert "Warning" not in said


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("shares", "test_trainer_changes_tensors_after_push and place"),
        ("flips", "test_special_values"),
        ("forgets subsets", "test_histories"),
    ],
)
def test_a_wrong_backend_is_caught(tmp_path: Path, fault: str, case: str) -> None:
    said = run_suite(tmp_path, case, fault)
    assert " failed" in said, said


def test_the_plugin_is_light_and_silent_without_a_suite(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\nfilterwarnings = error\n")
    (tmp_path / "test_other.py").write_text(
        "import sys, pytest\n"
        "class TestOther:\n"
        "    @pytest.mark.soak\n"
        "    def test_it(self, request):\n"
        "        assert request.config.pluginmanager.has_plugin('weightwire.testing.plugin')\n"
        "        heavy = {'torch', 'hypothesis', 'psutil', 'msgspec', 'weightwire.testing.suite'}\n"
        "        assert not heavy & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "time budget" not in run.stdout
