"""Whatever is sent to a listening socket: it is never loaded, and nobody else is disturbed."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightwire.testing.rig import Rig, took
from weightwire.testing.sockets import Listener, listeners
from weightwire.testing.states import counters
from weightwire.testing.suites.base import Cases

__all__ = ["HostileCases"]

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel for sockets as Linux answers")


class _Bomb:
    """A pickle of this makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (os.fspath(self.path), "w"))


class HostileCases(Cases):
    @pytest.fixture
    def run_directory(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """A private directory for a backend's sockets, with a short enough path; to be made before the rig."""
        with tempfile.TemporaryDirectory(prefix="kit-") as directory:
            monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
            monkeypatch.setenv("WEIGHTWIRE_STATUS", "off")  # the core's own socket, which asks the kernel who is there
            yield Path(directory)

    @linux
    def test_nothing_listens_where_others_can_connect(self, run_directory: Path, rig: Rig) -> None:
        before = set(listeners())
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        updater.push(counters(1))
        worker.pull(10.0)
        for listener in {*listeners(), *worker.do("listeners")} - before:
            assert listener.found(run_directory).private, listener

    @linux
    def test_a_pickle_is_never_loaded(self, run_directory: Path, rig: Rig, tmp_path: Path) -> None:
        if self.info().pickles == "own":
            pytest.skip(f"{self.endpoint} says itself that it loads them")
        before = set(listeners())
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        updater.push(counters(1))
        worker.pull(10.0)
        bomb = pickle.dumps(_Bomb(tmp_path / "loaded"))
        frames = [
            bomb,
            struct.pack("<I", len(bomb)) + bomb,
            struct.pack(">I", len(bomb)) + bomb,
            b"\0" * 64,
            b"",
            b"\xff" * 4096,
        ]
        frames += [struct.pack("<Q", 1 << 62) + bomb, struct.pack(">Q", len(bomb)) + bomb]
        with contextlib.ExitStack() as connections:
            for listener in {*listeners(), *worker.do("listeners")} - before:
                for frame in frames:
                    connection = connections.enter_context(_connect(listener.found(run_directory)))
                    with contextlib.suppress(OSError):
                        connection.sendall(frame)
            for version in range(2, 12):
                with took(at_most=3.0):
                    updater.push(counters(version))
                assert worker.pull(10.0) == version
            late = rig.worker("late", counters, 0)
            assert late.pull() == 11
            assert set(updater.workers) == {"w", "late"}
        assert list(tmp_path.iterdir()) == []

    @linux
    def test_connections_that_say_nothing(self, run_directory: Path, rig: Rig) -> None:
        before = set(listeners())
        updater = rig.updater()
        with contextlib.ExitStack() as connections:
            for listener in set(listeners()) - before:
                for _ in range(40):
                    with contextlib.suppress(OSError):
                        connections.enter_context(_connect(listener.found(run_directory)))
            worker = rig.worker("w", counters, 0)
            with took(at_most=5.0):
                updater.push(counters(1))
                assert worker.pull() == 1

    def test_names_are_labels(self, rig: Rig) -> None:
        updater = rig.updater()
        for name in ("../../etc", "a b/c", "ünïcode", "%s{0}", "x" * 200):
            receiver = rig.receiver(counters(0), worker=name)
            updater.wait_for_workers(1)
            updater.push(counters(updater.version + 1))
            assert receiver.pull(10.0) == updater.version
            assert name in updater.workers
            receiver.close()


def _connect(listener: Listener) -> socket.socket:
    family = (
        socket.AF_UNIX if listener.kind == "unix" else socket.AF_INET6 if listener.kind == "tcp6" else socket.AF_INET
    )
    connection = socket.socket(family, listener.type)
    connection.settimeout(1.0)
    deadline = time.monotonic() + 2.0
    while True:
        try:
            connection.connect(
                listener.address if listener.kind == "unix" else ("localhost", int(listener.address.split(":")[1], 16))
            )
            return connection
        except BlockingIOError:  # the backlog is full for a moment
            if time.monotonic() > deadline:
                connection.close()
                raise
            time.sleep(0.01)
        except OSError:
            connection.close()
            raise
