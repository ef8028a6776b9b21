"""What updaters say of themselves, over real sockets, to real processes."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightwire import PushReport, WeightReceiver, WeightUpdater, hookimpl, status
from weightwire.cli.new import TEMPLATE
from weightwire.transport import NOW

pytestmark = pytest.mark.skipif(not status.supported(), reason="abstract sockets are Linux's")

MINE = "import:weightwire_mine"
STATE = {"a": torch.zeros(1000), "b": torch.ones(3, 4)}
NBYTES = 4 * 1012


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend that `weightwire new` writes: there is no need of another one here."""
    monkeypatch.syspath_prepend(str(TEMPLATE / "src"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TEMPLATE / "src"), os.environ.get("PYTHONPATH", "")]))


def told(pid: int | None = None) -> list[dict[str, Any]]:
    """What the updaters of a process (default: this one) say. Others here are not asked: some are stopped."""
    pid = os.getpid() if pid is None else pid
    with pytest.MonkeyPatch.context() as patch:
        addresses = [found for found in status._addresses() if found[0] == pid]
        patch.setattr(status, "_addresses", lambda: addresses)
        return [updater for document in status.ask(10.0) for updater in document["updaters"]]


def test_what_is_told() -> None:
    with WeightUpdater(f"{MINE}://told", STATE) as updater, WeightReceiver(updater.endpoint, worker="w") as receiver:
        (before,) = told()
        assert before["endpoint"] == updater.endpoint == f"{MINE}://told"
        assert (before["backend"], before["version"], before["pushes"], before["last_push"]) == (MINE, 0, 0, None)
        assert [(w["name"], w["state"], w["version"], w["lag"]) for w in before["workers"]] == [
            ("w", "joined", 0, None)
        ]
        report = updater.push()
        (sent,) = told()
        assert [(w["state"], w["version"], w["staged"], w["lag"]) for w in sent["workers"]] == [("joined", 0, 1, None)]
        receiver.pull()
        (after,) = told()
        assert (after["version"], after["epoch"], after["pushing"]) == (1, updater.run, False)
        assert (after["pushes"], after["bytes"]) == (1, NBYTES)
        assert after["bytes_per_second"] > 0
        push = after["last_push"]
        assert (push["version"], push["tensors"], push["nbytes"], push["lost"]) == (1, 2, NBYTES, [])
        assert push["seconds"] == report.seconds
        (worker,) = after["workers"]
        assert (worker["state"], worker["version"], worker["lag"], worker["pid"]) == ("acting", 1, 0, os.getpid())
        receipt = worker["receipt"]
        assert (receipt["version"], receipt["tensors"], receipt["nbytes"]) == (1, 2, NBYTES)
        assert {"verify", "commit"} <= set(receipt["seconds"])
        updater.push()
        updater.push()
        (late,) = told()
        assert [(w["version"], w["lag"]) for w in late["workers"]] == [(1, 2)]
    assert told() == []


class Observer:
    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    @hookimpl
    def weightwire_worker_joined(self, worker: str) -> None:
        self.heard.append((worker, threading.get_ident()))


def test_observers_hear_in_the_trainers_thread_whatever_was_told_before() -> None:
    observer = Observer()
    with WeightUpdater(MINE, STATE, observers=[observer]) as updater, WeightReceiver(updater.endpoint, worker="w"):
        assert [w["name"] for w in told()[0]["workers"]] == ["w"]
        assert observer.heard == []
        assert set(updater.workers) == {"w"}
        assert observer.heard == [("w", threading.get_ident())]


def test_a_look_hides_nothing_from_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    with WeightUpdater(MINE, STATE) as updater, WeightReceiver(updater.endpoint, worker="w"):
        events = updater._sender.events

        def slow(deadline: Any) -> Any:
            found = events(deadline)
            if threading.current_thread().name == "weightwire-status":
                inside.set()
                assert go_on.wait(10.0)
            return found

        monkeypatch.setattr(updater._sender, "events", slow)
        asking = threading.Thread(target=told)
        asking.start()
        assert inside.wait(10.0)  # the status has taken the news that somebody joined
        threading.Timer(0.2, go_on.set).start()
        assert set(updater.workers) == {"w"}
        asking.join(10.0)


def test_losses_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightwire.transport import Lost

    with WeightUpdater(MINE, STATE) as updater, WeightReceiver(updater.endpoint, worker="w") as receiver:
        assert set(updater.workers) == {"w"}
        updater._sender.report(Lost(worker="w", incarnation=receiver._incarnation, reason="gone"))  # type: ignore[attr-defined]
        for _ in range(2):  # first as it was heard, then as it is booked
            (found,) = told()
            assert found["workers"] == []
            assert found["losses"] == 1
            assert [(loss["worker"], loss["reason"]) for loss in found["recent_losses"]] == [("w", "gone")]
            updater.push(on_lost="drop")


def usage() -> tuple[int, list[str]]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), sorted(thread.name for thread in threading.enumerate())


def test_nothing_is_left_with_the_last_updater() -> None:
    before = usage()
    with WeightUpdater(MINE, STATE):
        assert usage()[1].count("weightwire-status") == 1
        with WeightUpdater(MINE, STATE):
            assert usage()[1].count("weightwire-status") == 1  # one for all
        assert len(told()) == 1
    assert usage() == before
    WeightUpdater(MINE, STATE)  # forgotten
    assert usage() == before


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_STATUS", "off")
    before = usage()
    with WeightUpdater(MINE, STATE) as updater:
        updater.push()
        assert usage() == before
        assert told() == []


def test_a_push_pays_less_than_a_microsecond() -> None:
    pulse, report = status.Pulse(), PushReport(version=1, run=1, nbytes=100)
    assert min(timeit.repeat(lambda: pulse.pushed(report), number=10_000, repeat=20)) / 10_000 < 1e-6
    assert pulse.pushes == 200_000
    assert len(pulse.recent) == 256


def test_the_rate_is_that_of_late() -> None:
    pulse = status.Pulse()
    assert pulse.rate() == 0.0
    pulse.begun -= 100.0
    pulse.recent.extend([(time.monotonic() - 50.0, 10**9), (time.monotonic() - 5.0, 1000), (time.monotonic(), 1000)])
    assert 190 < pulse.rate() <= 200  # 2000 bytes within the last ten seconds
    pulse.recent.extend((time.monotonic() - 1.0 + n / 256, 1000) for n in range(256))
    assert 200_000 < pulse.rate() < 260_000  # all that is remembered, since the oldest of it


# -- other processes -------------------------------------------------------------------------------------------------

TRAINER = """
import os, signal, sys, torch
from weightwire import WeightUpdater
updater = WeightUpdater("import:weightwire_mine://alone", {"a": torch.zeros(3)})
updater.push()
child = 0
if "fork" in sys.argv:
    child = os.fork()
    if not child:
        with WeightUpdater("import:weightwire_mine://child", {"a": torch.zeros(3)}):
            print("forked", flush=True)
            signal.pause()
print("ready", os.getpid(), child, flush=True)
signal.pause()
"""


@pytest.fixture
def trainer(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    arguments = [getattr(request, "param", "")]
    process = subprocess.Popen([sys.executable, "-c", TRAINER, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def said(process: subprocess.Popen[str], count: int = 1) -> list[str]:
    assert process.stdout is not None
    return sorted(process.stdout.readline().strip() for _ in range(count))


def test_killed_trainers_leave_nothing(trainer: subprocess.Popen[str]) -> None:
    said(trainer)
    assert [updater["endpoint"] for updater in told(trainer.pid)] == ["import:weightwire_mine://alone"]
    trainer.kill()
    trainer.wait(10)
    assert told(trainer.pid) == []
    assert f"-{trainer.pid}-" not in Path("/proc/net/unix").read_text()


@pytest.mark.parametrize("trainer", ["fork"], indirect=True)
def test_a_fork_does_not_speak_for_its_parent(trainer: subprocess.Popen[str]) -> None:
    lines = said(trainer, 2)
    ready = [line.split() for line in lines if line.startswith("ready")]
    assert len(ready) == 1, lines
    child = int(ready[0][2])
    try:
        assert [updater["endpoint"] for updater in told(trainer.pid)] == ["import:weightwire_mine://alone"]
        assert [updater["endpoint"] for updater in told(child)] == ["import:weightwire_mine://child"]
        trainer.kill()
        trainer.wait(10)
        assert told(trainer.pid) == []
        assert f"-{trainer.pid}-" not in Path("/proc/net/unix").read_text()
        assert len(told(child)) == 1
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_stopped_trainer_is_there_with_its_fault(trainer: subprocess.Popen[str]) -> None:
    said(trainer)
    os.kill(trainer.pid, signal.SIGSTOP)
    os.waitpid(trainer.pid, os.WUNTRACED)
    begun = time.monotonic()
    (found,) = [document for document in status.ask(0.5) if document["pid"] == trainer.pid]
    assert time.monotonic() - begun < 5.0
    assert found["updaters"] == []
    assert "does not answer" in found["fault"]
    os.kill(trainer.pid, signal.SIGCONT)
    assert len(told(trainer.pid)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_others_are_hung_up_on() -> None:
    with WeightUpdater(MINE, STATE):
        ((_, address),) = [found for found in status._addresses() if found[0] == os.getpid()]
        code = (
            "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout(10); "
            "s.connect('\\0' + sys.argv[1]); print(s.recv(100))"
        )
        done = subprocess.run([sys.executable, "-c", code, address[1:]], capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "b''", done.stderr
        assert len(told()) == 1


def test_who_does_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [b" " * (8 << 20)]  # more than a socket takes at once
    document = status._document
    monkeypatch.setattr(status, "_document", lambda: documents.pop() if documents else document())
    monkeypatch.setattr(status, "PATIENCE", 0.2)
    with WeightUpdater(MINE, STATE), socket.socket(socket.AF_UNIX) as silent:
        ((_, address),) = [found for found in status._addresses() if found[0] == os.getpid()]
        silent.connect(address)
        assert len(told()) == 1
        assert documents == []


def test_a_broken_backend_is_told_of_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with WeightUpdater(MINE, STATE) as updater, WeightReceiver(updater.endpoint, worker="w"):
        assert set(updater.workers) == {"w"}
        events = updater._sender.events
        monkeypatch.setattr(updater._sender, "events", lambda deadline: 1 // 0)
        assert [w["name"] for w in told()[0]["workers"]] == ["w"]
        monkeypatch.setattr(updater._sender, "events", events)
        assert updater._sender.events(NOW) == []
