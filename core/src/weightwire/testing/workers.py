"""Workers of the kit: a :class:`Body` in a thread, or in a process that can be killed, stopped and let go on.

Processes come from one fork server with torch and weightwire loaded, so that a fresh one takes about 20 ms. Commands
and answers are pickled: this is test code, between processes that trust each other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import psutil

from weightwire.testing.body import Body, Followed, Look, Usage

__all__ = ["PRELOAD", "LocalWorker", "Pending", "ProcessWorker", "Worker", "WorkerGone", "until"]

PATIENCE = 30.0
"""Seconds after which a command that should have been answered counts as hanging."""


PRELOAD = ["weightwire.testing.preload"]
"""What the fork server loads before its first worker. A suite whose workers all need something else that is slow to
load (an engine) may append it as its module is imported."""


class WorkerGone(Exception):
    """The worker died, or was killed, before it answered."""


def until(condition: Callable[[], Any], what: str, timeout: float = PATIENCE) -> None:
    """Wait for something that sends no signal, looking every few milliseconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not after {timeout} s")
        time.sleep(0.002)


class Pending:
    """The answer to a command that a worker is still busy with."""

    def __init__(self, receive: Callable[[float], tuple[bool, Any]]) -> None:
        self._receive = receive
        self._answer: tuple[bool, Any] | None = None

    def result(self, timeout: float = PATIENCE) -> Any:
        """What the command returned; raises what it raised."""
        if self._answer is None:
            self._answer = self._receive(timeout)
        good, value = self._answer
        if not good:
            raise value
        return value


class Worker(ABC):
    """A worker under orders. Orders are carried out one after the other; ``start`` does not wait for the answer."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def start(self, command: str, *args: Any, **options: Any) -> Pending:
        """Give an order: the name of a method of :class:`Body`."""

    @abstractmethod
    def end(self) -> None:
        """Close what is open and end, whatever state the worker is in. Idempotent."""

    def do(self, command: str, *args: Any, **options: Any) -> Any:
        return self.start(command, *args, **options).result()

    # The orders that tests give most, with their types.

    def pull(self, timeout: float | None = None) -> int | None:
        version: int | None = self.do("pull", timeout)
        return version

    def look(self) -> Look:
        look: Look = self.do("look")
        return look

    def seen(self) -> int:
        version: int = self.do("seen")
        return version

    def usage(self) -> Usage:
        usage: Usage = self.do("usage")
        return usage

    def follow(self, until: int, timeout: float = PATIENCE, *, exact: bool = True) -> Following:
        """Let the worker pull in a loop until version ``until`` acts."""
        return Following(self.start("follow", until, timeout, exact=exact))


class Following:
    """A worker that follows the trainer; :meth:`result` waits until it is through."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def result(self, timeout: float = PATIENCE + 5) -> Followed:
        followed: Followed = self._pending.result(timeout)
        return followed


class LocalWorker(Worker):
    """A worker in a thread of this process."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kit-{name}", daemon=True)
        self._thread.start()

    def start(self, command: str, *args: Any, **options: Any) -> Pending:
        answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._orders.put((command, args, options, answers))

        def receive(timeout: float) -> tuple[bool, Any]:
            try:
                return answers.get(timeout=timeout)
            except queue.Empty:
                raise AssertionError(f"worker {self.name!r} did not answer {command!r} in {timeout} s") from None

        return Pending(receive)

    def _run(self) -> None:
        body = Body()
        while (order := self._orders.get()) is not None:
            command, args, options, answers = order
            answers.put(_carry_out(body, command, args, options))

    def end(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(Exception):
                self.start("close", 1.0).result(10)
            self._orders.put(None)
            self._thread.join(10)


class ProcessWorker(Worker):
    """A worker in a process of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        context = _context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, _environment()), name=f"kit-{name}", daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._ended = False
        self._forked: list[int] = []
        self._unanswered: list[Pending] = []

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.pid)

    def start(self, command: str, *args: Any, **options: Any) -> Pending:
        for pending in self._unanswered:  # answers come in the order of the commands
            with contextlib.suppress(Exception):
                pending.result()
        try:
            self._pipe.send((command, args, options))
        except (BrokenPipeError, ConnectionResetError) as exc:
            raise WorkerGone(f"worker {self.name!r} is gone: {command!r} was not sent") from exc

        def receive(timeout: float) -> tuple[bool, Any]:
            self._unanswered.remove(pending)
            try:
                if not self._pipe.poll(timeout):
                    raise AssertionError(f"worker {self.name!r} did not answer {command!r} in {timeout} s")
                answer: tuple[bool, Any] = self._pipe.recv()
            except (EOFError, ConnectionResetError) as exc:
                raise WorkerGone(f"worker {self.name!r} died during {command!r}") from exc
            return answer

        pending = Pending(receive)
        self._unanswered.append(pending)
        return pending

    def fork(self, seconds: int = 60) -> int:
        """Let the worker fork a child that inherits everything and lives on, until the worker's ``end``."""
        pid: int = self.do("fork", seconds)
        self._forked.append(pid)
        return pid

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(PATIENCE)
        assert self._process.exitcode is not None, f"{self.name} outlived SIGKILL"

    def stop(self) -> None:
        """SIGSTOP; returns when all threads stand still."""
        os.kill(self.pid, signal.SIGSTOP)
        process = self.process
        until(lambda: process.status() == psutil.STATUS_STOPPED, f"{self.name} stopped")

    def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        for pid in self._forked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process.exitcode is None:
            with contextlib.suppress(OSError):
                self.cont()
                self._pipe.send(None)
            self._process.join(15)  # it may have others to say goodbye to; killing it would be news to them
            if self._process.exitcode is None:
                self.kill()
        self._pipe.close()
        self._process.close()


def _carry_out(body: Body, command: str, args: Any, options: Any) -> tuple[bool, Any]:
    try:
        return True, getattr(body, command)(*args, **options)
    except BaseException as exc:
        return False, exc


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    """The main loop of a worker process; ends with a ``None``, or with the test process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in [key for key in os.environ if _ours(key)]:
        del os.environ[name]
    os.environ.update(environment)
    body = Body()
    with contextlib.suppress(EOFError, OSError):
        while (order := pipe.recv()) is not None:
            good, answer = _carry_out(body, *order)
            try:
                pipe.send((good, answer))
            except (TypeError, AttributeError, ValueError) as exc:  # an answer that cannot be pickled
                pipe.send((False, RuntimeError(f"{answer!r} ({exc})")))
    with contextlib.suppress(Exception):
        body.close(1.0)


def _ours(name: str) -> bool:
    return name.startswith("WEIGHTWIRE_") or name == "XDG_RUNTIME_DIR"


def _environment() -> dict[str, str]:
    """What a test may have set since the fork server was started."""
    return {name: value for name, value in os.environ.items() if _ours(name)}


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context
