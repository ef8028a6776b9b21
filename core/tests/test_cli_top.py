"""`weightwire top`: one look as text and as JSON, and the live table in a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from rich.console import Console

from weightwire import WeightReceiver, WeightUpdater, status
from weightwire.cli import main, top
from weightwire.cli.new import TEMPLATE

pytestmark = pytest.mark.skipif(not status.supported(), reason="abstract sockets are Linux's")

PLACE = f"import:weightwire_mine://top-{os.getpid()}"  # top lists whatever else runs on this machine, too


@pytest.fixture
def updater(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightUpdater]:
    monkeypatch.syspath_prepend(str(TEMPLATE / "src"))
    with WeightUpdater(PLACE, {"a": torch.zeros(1000)}) as updater:
        yield updater


@pytest.fixture
def receiver(updater: WeightUpdater) -> Iterator[WeightReceiver]:
    with WeightReceiver(PLACE, worker="evil [2J[red]") as receiver:
        yield receiver


def test_json(updater: WeightUpdater, receiver: WeightReceiver, capsys: pytest.CaptureFixture[str]) -> None:
    updater.push()
    receiver.pull()
    updater.push()
    assert main(["top", PLACE, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["endpoint"], found["pid"], found["version"], found["pushes"]) == (PLACE, os.getpid(), 2, 2)
    assert [(w["version"], w["lag"]) for w in found["workers"]] == [(1, 1)]
    assert 0 <= found["seconds_since_push"] < 60


def test_plain_text_where_nobody_looks(
    updater: WeightUpdater, receiver: WeightReceiver, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", PLACE]) == 0
    assert "no push yet" in capsys.readouterr().out
    updater.push()
    receiver.pull()
    assert main(["top", PLACE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{PLACE}   version 1   1 worker   ")
    assert "last push: version 1, now, 1 tensor, 4 kB in" in lines[1]
    assert "stage" in lines[1]
    assert lines[2].split() == ["WORKER", "HOST", "STATE", "VERSION", "LAG", "APPLIED", "IN", "NOTE"]
    assert lines[3].startswith("  evil [2J[red]")
    assert "acting" in lines[3]


def test_an_endpoint_is_a_filter(updater: WeightUpdater, capsys: pytest.CaptureFixture[str]) -> None:
    del updater
    assert main(["top", f"{PLACE}?option=1", "--json"]) == 0  # options are not part of the place
    assert main(["top", "import:weightwire_mine", "--json"]) == 0  # all of a backend
    capsys.readouterr()
    assert main(["top", f"{PLACE}-not", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == []
    assert main(["top", f"{PLACE}-not"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"no updater of {PLACE}-not on this machine" in captured.err
    assert PLACE in captured.err.partition("there: ")[2]
    assert main(["top", "not an endpoint"]) == 2
    assert main(["top", "--every", "0"]) == 2


def test_nobody_is_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(status, "_addresses", list)
    assert main(["top"]) == 1
    assert "WEIGHTWIRE_STATUS=off" in capsys.readouterr().err


def test_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(status, "ask", lambda: [{"pid": 4711, "fault": "it does not answer", "updaters": []}])
    assert main(["top"]) == 0
    assert capsys.readouterr().out == "process 4711: it does not answer\n"
    console = Console(file=io.StringIO(), width=100)
    console.print(top.screen(top.found(), console))
    assert "process 4711" in console.file.getvalue()  # type: ignore[attr-defined]


def test_wrong_turns(
    updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = [*status.ask(), {"pid": 4711, "fault": "it does not answer", "updaters": []}]
    monkeypatch.setattr(status, "ask", lambda: documents)
    monkeypatch.setattr(status, "_sockets", lambda: [(os.geteuid() + 1, 12, "theirs"), (os.geteuid(), 13, "ours")])
    assert main(["top", f"{PLACE}x"]) == 1
    said = capsys.readouterr().err
    assert f"Did you mean '{PLACE}'?" in said
    assert "Process 4711 may have it: it does not answer." in said
    assert f"Others have updaters here (user id {os.geteuid() + 1}), of which only they are told." in said
    console = Console(file=io.StringIO(), width=100)
    mine = [document for document in top.found() if document.get("endpoint") == PLACE or "fault" in document]
    console.print(top.screen(mine, console))
    assert "1 updater on this machine" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_screen(updater: WeightUpdater, receiver: WeightReceiver) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(top.screen([], console))
    assert "none yet" in console.file.getvalue()  # type: ignore[attr-defined]
    updater.push()
    receiver.pull()
    console.print(top.screen(top.found(top._place(PLACE)), console))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "evil [2J[red]" in shown  # not taken for markup
    assert "acting" in shown
    assert "encode" in shown


def test_live_in_a_terminal(updater: WeightUpdater, receiver: WeightReceiver) -> None:
    updater.push()
    receiver.pull()
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "weightwire", "top", PLACE, "--every", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        deadline, shown = time.monotonic() + 60, b""
        while b"acting" not in shown:
            assert time.monotonic() < deadline
            shown += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        while True:  # to its end, so that it is not held up by a full terminal
            try:
                os.read(ours, 1 << 16)
            except OSError:
                break
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(10)
        os.close(ours)
