"""What the updaters of a process say of themselves to whoever asks: ``weightwire top``, or a monitor of your own.

A process with an updater has one thread that sleeps in ``accept()``. Whoever connects is sent one JSON document and
hung up on; nothing is ever read. A push leaves references behind (:class:`Pulse`), and the document is made when
somebody asks for it, so that being watched costs and not being watched does not. ``WEIGHTWIRE_STATUS=off`` in the
environment of a process switches it off.

The socket is an abstract one: SIGKILL leaves nothing of it behind, and ``/proc/net/unix`` says which there are. It has
no permissions, so each side asks the kernel who the other one is: the owner of a trainer and root are told, everybody
else is hung up on without a word, at most twenty times a second. Linux only; elsewhere nothing listens.

The document (times in seconds since 1970, durations in seconds)::

    {"format": 1, "pid": 4711, "host": "node3", "time": ..., "updaters": [{
      "endpoint": "ipc://policy", "backend": "ipc", "distribution": "weightwire-ipc 0.1.0",
      "epoch": ..., "version": 12, "started": ..., "pushing": false, "pushes": 12,
      "bytes": ..., "bytes_per_second": ...,
      "workers": [{"name": ..., "host": ..., "pid": ..., "state": "acting", "version": 12, "staged": 12, "lag": 0,
                   "error": "", "notes": {}, "receipt": {"version", "tensors", "nbytes", "seconds", "digest"} or null}],
      "last_push": {"version", "time", "tensors", "nbytes", "seconds": {phase: ...}, "lost": [...]} or null,
      "losses": 1, "recent_losses": [{"worker", "time", "reason"}]}]}

``lag`` is how many versions a worker is behind, ``null`` where it acts with none of this updater's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from weightwire import forks
from weightwire.roster import Failure, Roster, WorkerInfo
from weightwire.transport import Event, Lost

if TYPE_CHECKING:
    from weightwire.report import PushReport
    from weightwire.updater import WeightUpdater

__all__ = ["FORMAT", "Pulse", "announce", "ask", "strangers", "supported", "withdraw"]

logger = logging.getLogger(__name__)

FORMAT = 1
"""Grows with a change that a reader has to know of; new keys do not count."""

SWITCH = "WEIGHTWIRE_STATUS"
WINDOW = 10.0
"""Seconds over which bytes a second are counted, or the last pushes that are remembered where those are fewer."""
PATIENCE = 1.0
"""Seconds in which one side must take, or give, the whole document."""
LARGEST = 64 << 20
"""Bytes of a document; no honest one is longer."""

_PREFIX = "weightwire-status-"
_LISTENS = 1 << 16  # __SO_ACCEPTCON in the kernel's net.h
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Pulse:
    """What an updater's pushes leave behind: references and sums, at well under a microsecond a push."""

    __slots__ = ("begun", "last", "losses", "lost", "nbytes", "pushes", "recent", "started")

    def __init__(self) -> None:
        self.started, self.begun = time.time(), time.monotonic()
        self.pushes = self.nbytes = self.losses = 0
        self.last: PushReport | None = None
        self.recent: deque[tuple[float, int]] = deque(maxlen=256)  # when (monotonic), bytes
        self.lost: deque[tuple[str, float, str]] = deque(maxlen=16)  # worker, when, why

    def pushed(self, report: PushReport) -> None:
        self.recent.append((time.monotonic(), report.nbytes))
        self.last = report
        self.pushes += 1
        self.nbytes += report.nbytes

    def lose(self, event: Lost) -> None:
        self.losses += 1
        self.lost.append((event.worker, time.time(), event.reason))

    def rate(self) -> float:
        """Bytes a second of late; 0 where there was no push within the window."""
        now, pushes = time.monotonic(), list(self.recent)
        full = len(pushes) == self.recent.maxlen  # older ones are forgotten: count from the oldest that is known
        since = max(now - WINDOW, pushes[0][0] if full else self.begun)
        return sum(nbytes for at, nbytes in pushes if at > since) / max(now - since, 1e-6)


# -- who is asked ----------------------------------------------------------------------------------------------------


class _Board:
    """The updaters of this process, and the service that tells of them while there are any."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a finaliser may come in while we hold it
        self.updaters: weakref.WeakSet[WeightUpdater] = weakref.WeakSet()
        self.service: _Service | None = None
        forks.forbid(self)

    def in_child(self) -> None:
        self.lock = threading.RLock()
        self.updaters = weakref.WeakSet()
        service, self.service = self.service, None
        if service is not None:
            forks.give_up(service.listener.detach())


_board = _Board()


def supported() -> bool:
    """Whether this system has abstract sockets that tell who is at the other end."""
    return sys.platform == "linux" and hasattr(socket, "SO_PEERCRED")


def announce(updater: WeightUpdater) -> None:
    """From now on an updater is told of. Never fails: a trainer works without being watched, too."""
    if not supported() or os.environ.get(SWITCH, "").lower() in ("off", "0", "false", "no"):
        return
    with _board.lock:
        try:
            if _board.service is None or _board.service.over.is_set():
                _board.service = _Service()
        except (OSError, RuntimeError) as exc:  # out of descriptors, out of threads
            logger.debug("no status is served: %s", exc)
        else:
            _board.updaters.add(updater)


def withdraw(updater: WeightUpdater | None = None) -> None:
    """An updater is closed, or (none given) was forgotten. With the last one the service ends."""
    with _board.lock:
        if updater is not None:
            _board.updaters.discard(updater)
        service = _board.service
        if _board.updaters or service is None:
            return
        service.over.set()
    service.stop()
    with _board.lock:  # not before: a close() that was interrupted is called again, and has to find it
        if _board.service is service:
            _board.service = None


class _Service:
    def __init__(self) -> None:
        self.over = threading.Event()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The random part keeps others from taking the name before us.
            self.listener.bind(f"\0{_PREFIX}{os.geteuid()}-{os.getpid()}-{secrets.token_hex(8)}")
            self.listener.listen(16)
            self._thread = threading.Thread(target=self._run, name="weightwire-status", daemon=True)
            self._thread.start()
        except BaseException:
            self.listener.close()
            raise

    def stop(self) -> None:
        """Idempotent."""
        self.over.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which closing does not
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * PATIENCE)
        self.listener.close()

    def _run(self) -> None:
        while not self.over.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:  # stopped; or out of descriptors, which may pass
                self.over.wait(0.1)
                continue
            with connection, contextlib.suppress(OSError):
                if _peer(connection)[1] in (os.geteuid(), 0):
                    connection.settimeout(PATIENCE)
                    connection.sendall(_document())
                else:
                    self.over.wait(0.05)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


# -- the document ----------------------------------------------------------------------------------------------------


def _document() -> bytes:
    with _board.lock:
        updaters = list(_board.updaters)
    told = []
    for updater in sorted(updaters, key=id):
        try:
            told.append(_describe(updater))
        except Exception:  # one that is being closed, or whose backend is broken
            logger.debug("%r has no status", updater, exc_info=True)
    facts = {"format": FORMAT, "pid": os.getpid(), "host": socket.gethostname(), "time": time.time(), "updaters": told}
    return msgspec.json.encode(facts)


def _describe(updater: WeightUpdater) -> dict[str, Any]:
    pulse, record = updater._pulse, updater._backend.record
    infos, heard, epochs, pushing = updater._glance()
    workers = {info.name: info for info in infos}
    losses = [*pulse.lost, *_catch_up(workers, heard, epochs)]
    version = updater.version
    last = pulse.last
    return {
        "endpoint": updater.endpoint,
        "backend": record.name,
        "distribution": f"{record.distribution} {record.version}".strip(),
        "epoch": updater.run,
        "version": version,
        "started": pulse.started,
        "pushing": pushing,
        "pushes": pulse.pushes,
        "bytes": pulse.nbytes,
        "bytes_per_second": pulse.rate(),
        "workers": [_worker(info, version, epochs) for _, info in sorted(workers.items())],
        "last_push": None
        if last is None
        else {
            "version": last.version,
            "time": time.time() - (time.monotonic() - pulse.recent[-1][0]),
            "tensors": last.tensors,
            "nbytes": last.nbytes,
            "seconds": last.seconds,
            "lost": last.lost,
        },
        "losses": pulse.losses + len(losses) - len(pulse.lost),
        "recent_losses": [{"worker": name, "time": at, "reason": why} for name, at, why in losses],
    }


def _worker(info: WorkerInfo, version: int, epochs: Iterable[int]) -> dict[str, Any]:
    ours = info.stamp is not None and info.stamp.epoch in epochs
    done = info.applied
    return {
        "name": info.name,
        "host": info.host,
        "pid": info.pid,
        "state": info.state,
        "version": info.version,
        "staged": info.staged.number if info.staged else 0,
        "lag": max(0, version - info.version) if ours else None,
        "error": info.error,
        "notes": dict(info.notes),
        "receipt": None
        if done is None
        else {
            "version": done.stamp.number,
            "tensors": done.tensors,
            "nbytes": done.nbytes,
            "seconds": done.seconds,
            "digest": done.digest,
        },
    }


def _catch_up(
    workers: dict[str, WorkerInfo], heard: Iterable[Event], epochs: Iterable[int]
) -> list[tuple[str, float, str]]:
    """Put what was heard, and waits for the next push to be booked and told, into copies; who was lost."""
    ahead, lost = _Ahead(), []
    ahead.workers, ahead.epochs = workers, set(epochs)
    for event in heard:
        info = workers.get(event.worker)
        if isinstance(event, Lost) and info is not None and info.incarnation == event.incarnation:
            lost.append((event.worker, time.time(), event.reason))
        ahead.observe(event)
    return lost


class _Ahead(Roster):
    """A roster of copies: the failures in it are told by the real one, when it comes to them."""

    def _fail(self, failure: Failure) -> None: ...


# -- who asks --------------------------------------------------------------------------------------------------------


def ask(timeout: float = PATIENCE) -> list[dict[str, Any]]:
    """The document of every process of this user on this machine that has an updater, by process number.

    One that does not answer within ``timeout`` seconds (a stopped process, or one that is busy in C code) is there as
    ``{"pid": ..., "fault": ..., "updaters": []}``. Sockets of this network namespace only.
    """
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        asked: list[tuple[int, socket.socket | None]] = []
        for pid, address in _addresses():
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.setblocking(False)
            try:
                connection.connect(address)
                peer, uid = _peer(connection)
            except BlockingIOError:
                asked.append((pid, None))  # its queue is full
                continue
            except OSError:
                continue  # it has just ended
            if uid in (os.geteuid(), 0):
                asked.append((peer or pid, connection))
        return sorted((_answer(pid, connection, deadline) for pid, connection in asked), key=_pid)


def _pid(document: dict[str, Any]) -> int:
    return int(document["pid"])


def _addresses() -> list[tuple[int, str]]:
    """Process number (as the name says) and address of every status socket of this user."""
    return [(pid, address) for uid, pid, address in _sockets() if uid == os.geteuid()]


def strangers() -> list[int]:
    """Other users' ids that have updaters on this machine, of which they alone are told."""
    return sorted({uid for uid, _, _ in _sockets() if uid != os.geteuid()})


def _sockets() -> list[tuple[int, int, str]]:
    """User, process (as the name says) and address of every status socket."""
    pattern = re.compile(rf"@({_PREFIX}(\d+)-(\d+)-[0-9a-f]{{16}})")
    try:
        rows = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]]
    except OSError:
        return []
    matches = [pattern.fullmatch(row[7]) for row in rows if len(row) == 8 and int(row[3], 16) & _LISTENS]
    return [(int(match[2]), int(match[3]), f"\0{match[1]}") for match in matches if match]


def _answer(pid: int, connection: socket.socket | None, deadline: float) -> dict[str, Any]:
    parts: list[bytes] = []
    try:
        while connection is not None and sum(map(len, parts)) < LARGEST:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = connection.recv(1 << 16)
            if not part:
                return msgspec.json.decode(b"".join(parts), type=dict[str, Any])
            parts.append(part)
    except (OSError, ValueError, RecursionError) as exc:
        logger.debug("process %d gave no status: %s", pid, exc)
    return {"pid": pid, "fault": "it does not answer: stopped, or busy outside of Python", "updaters": []}
