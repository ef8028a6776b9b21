"""What a worker of the kit can be told to do. The same code runs in a thread and in a process of its own."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
from torch import Tensor

from weightwire.errors import (
    ApplyError,
    ClosedError,
    DigestError,
    PreflightError,
    RefusedError,
    UpdaterLostError,
    WaitTimeout,
)
from weightwire.receiver import WeightReceiver
from weightwire.report import PushReport
from weightwire.testing.sockets import Listener, listeners
from weightwire.testing.states import Bits, counters, seen, snapshot, tie_groups
from weightwire.updater import WeightUpdater

__all__ = ["Body", "Followed", "Look", "Usage"]


@dataclass(frozen=True)
class Look:
    """What a receiver says of itself."""

    version: int
    run: int | None
    ready: bool
    connected: bool
    closed: bool
    metadata: Mapping[str, Any]


@dataclass
class Followed:
    """What came of following a trainer: versions that were applied, how often the content was looked at, errors."""

    versions: list[int] = field(default_factory=list)
    looks: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Usage:
    """What a process holds. ``shared``: bytes that it maps shared; ``rss``: bytes of its own that are resident."""

    fds: int
    threads: int
    shared: int
    rss: int

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        process = psutil.Process()
        memory = process.memory_info()
        # Of a large shared store (Ray's) more and more pages show as resident, which is no memory of this process.
        rss = memory.rss - getattr(memory, "shared", 0)
        return cls(process.num_fds(), process.num_threads(), _shared_bytes(), rss)


def _shared_bytes() -> int:
    """Bytes of memory that this process maps shared, or from a memory file."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            lines = [line.split(maxsplit=5) for line in maps]
    except OSError:
        return 0
    spans = [line[0].split("-") for line in lines if "s" in line[1] or "memfd:" in line[-1] or "/dev/shm" in line[-1]]
    return sum(int(stop, 16) - int(start, 16) for start, stop in spans)


class Body:
    """One worker (or, with :meth:`lead`, one trainer). Public methods are commands; they return plain data."""

    def __init__(self) -> None:
        self.weights: Any = None
        self.kept: list[dict[str, Tensor]] = []
        self.hooked: list[tuple[int, int]] = []
        self._receiver: WeightReceiver | None = None
        self._updater: WeightUpdater | None = None

    # -- as a worker -------------------------------------------------------------------------------------------------

    @property
    def receiver(self) -> WeightReceiver:
        assert self._receiver is not None, "this worker has opened no receiver"
        return self._receiver

    def open(self, endpoint: str, make: Callable[..., Any] | None = None, *args: Any, **options: Any) -> None:
        """Open a receiver over ``make(*args)``, or over weights that it owns itself."""
        self.weights = make(*args) if make else None
        self._receiver = WeightReceiver(endpoint, self.weights, **options)

    def pull(self, timeout: float | None = None) -> int | None:
        return self.receiver.pull(timeout)

    def wait(self, version: int = 1, timeout: float | None = None) -> None:
        self.receiver.wait(version, timeout)

    def look(self) -> Look:
        r = self.receiver
        return Look(r.version, r.run, r.ready, r.connected, r.closed, dict(r.metadata or {}))

    def state(self) -> dict[str, Tensor]:
        """What the policy acts with, by name."""
        weights = self.receiver.weights if self.weights is None else self.weights
        if hasattr(weights, "state_dict"):
            weights = weights.state_dict(keep_vars=True)
        return dict(weights)

    def contents(self) -> dict[str, Bits]:
        return snapshot(self.state())

    def seen(self) -> int:
        """The version that the content says; raises where it is a mix."""
        return seen(self.state())

    def ties(self) -> set[frozenset[str]]:
        return tie_groups(self.state())

    def keep(self) -> None:
        """Hold on to views of what was delivered last."""
        self.kept.append({name: tensor.detach() for name, tensor in self.state().items()})

    def kept_contents(self) -> list[dict[str, Bits]]:
        return [snapshot(state) for state in self.kept]

    def drop(self) -> None:
        self.kept.clear()
        gc.collect()

    def arm(self, name: str | None) -> None:
        """Let the tensor ``name`` of a brittle target raise from now on; ``None``: let all be sound again."""
        for key, tensor in self.weights.items():
            tensor.fails = key == name

    def hook(self, *, fails: bool = False) -> None:
        """Register an after-commit hook that notes (version, content)."""

        def note(*_: Any) -> None:
            self.hooked.append((self.receiver.version, self.seen()))
            if fails:
                raise RuntimeError("a hook that fails")

        self.receiver.on_applied(note)

    def hooks(self) -> list[tuple[int, int]]:
        return list(self.hooked)

    def follow(self, until: int, timeout: float = 30.0, *, exact: bool = True) -> Followed:
        """Pull and look at the content in a loop until version ``until`` acts, the stream is closed, or time is up.

        The content must be whole at each look, and (where ``exact``) say the version that the receiver says; stamps
        must only go forward. Refusals and failures of the target are noted, not raised.
        """
        followed, deadline, newest = Followed(), time.monotonic() + timeout, self.receiver.stamp
        while time.monotonic() < deadline:
            version = self._pull_once(followed)
            stamp = self.receiver.stamp
            if version is not None:
                assert stamp is not None
                assert newest is None or stamp > newest, f"went back from {newest} to {stamp}"
                newest = stamp
                followed.versions.append(version)
            if self.receiver.ready:
                content = self.seen()
                acts = self.receiver.version
                assert not exact or content == acts, f"the content of version {content} acts as version {acts}"
                followed.looks += 1
            if self.receiver.closed or self.receiver.version >= until:
                return followed
        raise AssertionError(f"version {until} did not come in {timeout} s: {followed}, {self.look()}")

    def _pull_once(self, followed: Followed) -> int | None:
        try:
            return self.receiver.pull(0.02)
        except (WaitTimeout, UpdaterLostError, ClosedError):
            return None
        except (PreflightError, ApplyError, RefusedError, DigestError) as exc:
            followed.errors.append(f"{type(exc).__name__}: {exc}")
            return None

    # -- as a trainer ------------------------------------------------------------------------------------------------

    @property
    def updater(self) -> WeightUpdater:
        assert self._updater is not None, "this process has opened no updater"
        return self._updater

    def lead(self, endpoint: str, **options: Any) -> tuple[str, int]:
        """Open an updater; returns its endpoint and run."""
        self._updater = WeightUpdater(endpoint, **options)
        return self._updater.endpoint, self._updater.run

    def push(self, **options: Any) -> PushReport:
        """Push counters that say their own version."""
        return self.updater.push(counters(self.updater.version + 1), **options)

    def push_made(self, make: Callable[..., Any], *args: Any, **options: Any) -> int:
        """Push ``make(*args)``; the version's number."""
        return self.updater.push(make(*args), **options).version

    def push_on(self, count: int = 1_000_000) -> int:
        """Push counters without waiting for anybody, until told otherwise by a signal."""
        for _ in range(count):
            self.updater.push(counters(self.updater.version + 1), on_lost="drop")
        return self.updater.version

    def wait_for_workers(self, count: int, timeout: float) -> None:
        self.updater.wait_for_workers(count, timeout)

    def names(self) -> set[str]:
        """Of the workers that are there."""
        return set(self.updater.workers)

    # -- as a rank ---------------------------------------------------------------------------------------------------

    def shards(self) -> dict[str, Bits]:
        """This rank's part of what the policy acts with."""
        state: dict[str, Any] = self.state()
        return snapshot({name: tensor.to_local() for name, tensor in state.items()})

    # -- as a process ------------------------------------------------------------------------------------------------

    def pid(self) -> int:
        return os.getpid()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def move(self, folder: str) -> None:
        """Have this machine's own places, for sockets and temporary files, in a folder of this process's own."""
        os.environ.update(XDG_RUNTIME_DIR=folder, TMPDIR=folder)
        tempfile.tempdir = None  # which is found anew then

    def usage(self) -> Usage:
        return Usage.now()

    def fork(self, seconds: int = 60) -> int:
        """Fork a child that inherits everything, does nothing, and ends after ``seconds``. Returns its pid."""
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            while True:
                signal.pause()
        return pid

    def fork_and_exit(self) -> int:
        """Fork a child that drops its copies of our ends, runs the exit handlers and ends. Returns its exit status."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.alarm(20)
                self._receiver = self._updater = None
                self.kept.clear()
                gc.collect()
                atexit._run_exitfuncs()
                status = 0
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def fork_and_use(self) -> str:
        """Use our ends in a forked child; returns the name of the error that it met."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write, self._use().encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        return said.decode()

    def _use(self) -> str:
        try:
            if self._updater is not None:
                self.push()
            else:
                self.pull(0.0)
        except ClosedError:
            return "ClosedError"
        except BaseException as exc:
            return repr(exc)
        return "no error"

    def listeners(self) -> list[Listener]:
        return listeners()

    def close(self, timeout: float | None = None) -> None:
        if self._receiver is not None:
            self._receiver.close(timeout)
        if self._updater is not None:
            self._updater.close(timeout)
