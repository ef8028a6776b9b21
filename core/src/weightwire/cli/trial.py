"""A trial: one trainer and some workers that move a made-up state, in processes of their own.

``doctor`` and ``bench`` hold a :class:`Trial`. Its trainer runs in a process of its own, so that a backend which hangs,
ends the process or leaves threads behind harms nothing else; its workers too, or in the trainer's process where the
backend reaches no other. All processes come from one fork server that has torch loaded. They are told what to do in
JSON, and end at once when the process that has started them is gone.

Within the clock are only the push and the workers' look at every tensor. After each turn, outside of it, the bytes of
every worker's state are compared with the trainer's by their xxh3-128.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Crew", "Trial", "TrialError", "serve"]

PRELOAD: list[str] = []
"""What else the fork server loads; to be set before the first trial of a process."""
OPENING = 60.0
"""Seconds in which a backend's ends must be open and have met."""
FAREWELL = 10.0
"""Seconds in which a process that was told to close has ended, or is ended."""
TURN = 60.0
"""Seconds in which one version must be applied and looked at everywhere."""


class TrialError(Exception):
    """What went wrong in a trial. ``kind`` is the name of the error that was raised there."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class Trial:
    """A trainer in a process of its own, which gets its workers itself.

    Args:
        what: an endpoint, or the name of a peer (see :mod:`weightwire.cli.peers`).
        tensors, nbytes: the state: that many float32 tensors, equally large, of that many bytes in all.
        workers: how many.
        apply: ``"copy"`` or ``"alias"``.
    """

    def __init__(self, what: str, *, tensors: int, nbytes: int, workers: int, apply: str = "copy") -> None:
        self.what = what
        self._busy = False
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["weightwire.cli.ends", *PRELOAD])
        self._pipe, theirs = context.Pipe()
        state = {"tensors": tensors, "nbytes": nbytes, "workers": workers, "apply": apply}
        # No daemon: it has children of its own.
        self._process = context.Process(target=_lead, args=(theirs, what, state), name=f"trial of {what}")
        self._process.start()
        theirs.close()

    def open(self) -> dict[str, Any]:
        """Open the ends and let them meet: what they say of themselves. Raises :class:`TrialError`."""
        self._ask("start", seconds=OPENING)
        return self._ask("open", seconds=OPENING)

    def turn(self) -> dict[str, Any]:
        """One version, pushed, applied, looked at and compared: ``seconds`` and, of ours, ``phases``."""
        return self._ask("turn", seconds=TURN)

    def _ask(self, command: str, *, seconds: float) -> dict[str, Any]:
        self._busy = True
        try:
            self._pipe.send_bytes(json.dumps([command]).encode())
            if not self._pipe.poll(seconds):
                raise TrialError(f"it hangs: no answer to {command!r} within {seconds:.0f} s", "Hung")
            answer: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as exc:
            self._process.join(2.0)
            code = self._process.exitcode
            raise TrialError(f"its process ended during {command!r} (exit status {code})", "Died") from exc
        self._busy = False
        if "error" in answer:
            raise TrialError(answer["error"], answer["kind"])
        return answer

    def close(self) -> None:
        """End all its processes: gently, or, amid a command (Ctrl-C, or it hangs), at once."""
        if not self._busy:
            with contextlib.suppress(OSError):
                self._pipe.send_bytes(b'["close"]')
            self._process.join(FAREWELL + 5.0)
        self._pipe.close()
        if self._process.exitcode is None:
            self._process.kill()  # its workers see that
            self._process.join(5.0)

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- in the trainer's process ----------------------------------------------------------------------------------------


def _lead(pipe: Connection, what: str, state: Mapping[str, Any]) -> None:
    """The trainer's life: one command after the other, until it is told to close, or nobody tells it anything more."""
    _end_with_the_parent()
    from weightwire.cli import ends, peers

    leader: Any = None

    def carry_out(command: str) -> Any:
        nonlocal leader
        if leader is None:
            leader = (peers.Peer if what in peers.NAMES else ends.Leader)(what, **state)
        return getattr(leader, command)()

    try:
        _obey(pipe, carry_out)
    finally:
        # Whatever threads an engine keeps, and whatever its exit handlers wait for: this process is done.
        last = threading.Timer(FAREWELL, os._exit, (0,))
        last.daemon = True
        last.start()
        if leader is not None:
            with contextlib.suppress(Exception):
                leader.close()


def _obey(pipe: Connection, carry_out: Callable[..., Any]) -> None:
    """Carry out what is told, one command after the other, until ``close``, or until there is nobody to tell more. What
    one raises is sent in place of the answer."""
    with contextlib.suppress(EOFError, OSError):
        while (command := json.loads(pipe.recv_bytes()))[0] != "close":
            try:
                answer = carry_out(*command)
            except Exception as exc:
                answer = {"error": str(exc) or repr(exc), "kind": type(exc).__name__}
            pipe.send_bytes(json.dumps(answer).encode())


def _end_with_the_parent() -> None:
    """This process ends when the one that has started it does, however that went; Ctrl-C is for that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class Crew:
    """Worker processes, each at the other end of a pipe."""

    def __init__(self, target: Any, arguments: Sequence[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipes: list[Connection] = []
        self._processes = []
        for mine in arguments:
            here, there = context.Pipe()
            process = context.Process(target=target, args=(there, *mine), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def tell(self, *command: Any) -> None:
        for pipe in self._pipes:
            pipe.send_bytes(json.dumps(command).encode())

    def answers(self, seconds: float) -> list[Any]:
        """One answer of each. Raises :class:`TrialError` with what a worker raised, or where one is silent."""
        deadline = time.monotonic() + seconds
        answers = []
        for number, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise TrialError(f"worker {number} is silent after {seconds:.0f} s", "Hung")
                answer = json.loads(pipe.recv_bytes())
            except (EOFError, OSError) as exc:
                raise TrialError(f"worker {number} has died", "Died") from exc
            if isinstance(answer, dict) and "error" in answer:
                raise TrialError(f"worker {number}: {answer['error']}", answer["kind"])
            answers.append(answer)
        return answers

    def ask(self, *command: Any, seconds: float = TURN) -> list[Any]:
        self.tell(*command)
        return self.answers(seconds)

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b'["close"]')
            pipe.close()
        for process in self._processes:
            process.join(5.0)
            if process.exitcode is None:
                process.kill()
                process.join(5.0)


def serve(pipe: Connection, end: Any) -> None:
    """A worker's life: ``end`` has a method for each command."""
    _end_with_the_parent()

    def carry_out(command: str, *arguments: Any) -> Any:
        if command == "take":
            pipe.send_bytes(b'"waiting"')
        return getattr(end, command)(*arguments)

    try:
        _obey(pipe, carry_out)
    finally:
        with contextlib.suppress(Exception):
            end.close()
        os._exit(0)
