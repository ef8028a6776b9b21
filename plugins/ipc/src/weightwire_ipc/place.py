"""Where an updater can be found: a socket and a lock file in the private run directory, or a socket without a file."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from weightwire import rundir
from weightwire.endpoint import scoped
from weightwire.errors import EndpointInUseError, StaleUpdaterError, WeightwireError

__all__ = ["NamedPlace", "NamelessPlace", "claim", "connect"]

_NAMELESS = re.compile(r"@[0-9a-f]{32}")
_BACKLOG = 1024
_RECORD = 128  # bytes of a lock file, padded with blanks


def claim(location: str, epoch: int) -> NamedPlace | NamelessPlace:
    """Take a place and listen there. An empty location is a new, unguessable one.

    Raises :class:`~weightwire.EndpointInUseError` where a live updater has it.
    """
    if not location or _NAMELESS.fullmatch(location):
        return NamelessPlace(location or f"@{secrets.token_hex(16)}", epoch)
    return NamedPlace(location, epoch)


class NamelessPlace:
    """An abstract socket: no file, nothing to leave behind. It has no permissions: the kernel is asked who is there."""

    def __init__(self, location: str, epoch: int) -> None:
        self.location = location
        self.epoch = epoch
        self.listener = _socket()
        try:
            self.listener.bind(_abstract(location))
            self.listener.listen(_BACKLOG)
        except OSError as exc:
            self.listener.close()
            raise EndpointInUseError(f"another updater listens at 'ipc://{location}': {exc.strerror}") from exc

    def check(self) -> str:
        """Nobody can take it from us."""
        return ""

    def record(self, epoch: int) -> None:
        """There is nowhere to write it down."""
        self.epoch = epoch

    def touch(self) -> None:
        """Nothing that could be swept away."""

    def close(self) -> None:
        self.listener.close()

    def detach(self) -> tuple[int, ...]:
        return (self.listener.detach(),)


class NamedPlace:
    """A socket of a known name.

    Whoever holds the ``flock`` of the file beside it has the place; the kernel drops the lock when its holder dies, and
    the next updater then replaces both files, and no others.
    """

    def __init__(self, location: str, epoch: int) -> None:
        self.location = location
        self._started = time.time()
        self._directory = rundir.create()
        self._name = rundir.file_name("ipc", scoped(location))
        newest = _newest_elsewhere(location, self._directory, self._name)
        with rundir.opened(self._directory) as directory:
            self._lock = self._acquire(directory)
            try:
                found = _read(self._lock)
                self.epoch = max(epoch, newest + 1, int(found.get("epoch", 0)) + 1)
                self._write()
                self.listener = self._listen(directory)
                self._lock_path, self._lock_stat = f"{self._directory}/{self._name}.lock", os.fstat(self._lock)
            except BaseException:
                os.close(self._lock)
                raise

    def _acquire(self, directory: int) -> int:
        name = f"{self._name}.lock"
        while True:
            lock = self._open_lock(directory, name)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found = _read(lock)
                os.close(lock)
                raise _in_use(self.location, found, self._directory) from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(name, dir_fd=directory, follow_symlinks=False)):
                    return lock
            os.close(lock)  # its last owner removed it in between

    def _open_lock(self, directory: int, name: str) -> int:
        try:
            lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
        except OSError as exc:
            if exc.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
                raise self._obstacle(name) from exc
            raise
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            os.close(lock)
            raise self._obstacle(name)
        return lock

    def _obstacle(self, name: str) -> EndpointInUseError:
        return EndpointInUseError(
            f"'ipc://{self.location}' cannot be had: {self._directory / name} is none of Weightwire's files (a "
            "directory, link or pipe?). Remove it, or use another location."
        )

    def _write(self) -> None:
        text = json.dumps({"pid": os.getpid(), "epoch": self.epoch, "started": self._started}).encode()
        os.pwrite(self._lock, text.ljust(_RECORD), 0)  # in one go: whoever dies here leaves the old epoch or the new
        os.ftruncate(self._lock, _RECORD)

    def _listen(self, directory: int) -> socket.socket:
        name = f"{self._name}.sock"
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                raise self._obstacle(name)
            os.unlink(name, dir_fd=directory)  # a dead updater's: we hold its lock
        listener = _socket()
        try:
            os.fchmod(listener.fileno(), 0o600)  # what bind() gives the file, less the umask
            listener.bind(rundir.path_in(directory, name))
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def check(self) -> str:
        """Raise :class:`~weightwire.StaleUpdaterError` where another updater has replaced the lock file. What is wrong
        where the file is gone, and so another one may come at any time; else empty."""
        path = self._lock_path
        try:
            if not os.path.samestat(self._lock_stat, os.lstat(path)):
                raise StaleUpdaterError(
                    f"another updater has taken 'ipc://{self.location}' ({path} is not the lock file of this one any "
                    "more); this one must not push"
                )
        except FileNotFoundError:
            return (
                f"{path} was removed: workers that come now do not find this updater, and another one may take "
                f"'ipc://{self.location}', after which this one's next push is refused"
            )
        return ""

    def record(self, epoch: int) -> None:
        """Versions carry a newer epoch from now on: the next owner shall go beyond it."""
        self.epoch = epoch
        self._write()

    def touch(self) -> None:
        """Keep the files from being swept away for their age."""
        with suppress(OSError):
            os.utime(self._lock)

    def close(self) -> None:
        """Remove both files, which are ours as long as the lock is, and let the next one in. Idempotent."""
        self.listener.close()
        if self._lock < 0:
            return
        try:
            with suppress(OSError, WeightwireError), rundir.opened(self._directory) as directory:
                name = f"{self._name}.lock"
                if os.path.samestat(self._lock_stat, os.stat(name, dir_fd=directory, follow_symlinks=False)):
                    with suppress(FileNotFoundError):
                        os.unlink(f"{self._name}.sock", dir_fd=directory)
                    os.unlink(name, dir_fd=directory)
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            lock, self._lock = self._lock, -1
            os.close(lock)

    def detach(self) -> tuple[int, ...]:
        """The bare descriptors, for a forked child to close: without unlocking, which would unlock the parent's too."""
        lock, self._lock = self._lock, -1
        return (self.listener.detach(), lock)


def connect(location: str) -> tuple[socket.socket | None, str]:
    """A connected socket, or ``None``; and where was looked, with what was found.

    Raises ``OSError`` where there are no file descriptors left to look with.
    """
    if _NAMELESS.fullmatch(location):
        sock, found = _try(_abstract(location))
        return sock, f"the nameless socket {location}: {found}"
    name = f"{rundir.file_name('ipc', scoped(location))}.sock"
    looked = []
    for path in rundir.candidates():
        try:
            with rundir.opened(path) as directory:
                sock, found = _try(rundir.path_in(directory, name))
        except OSError as exc:
            if exc.errno in (errno.EMFILE, errno.ENFILE):
                raise
            sock, found = None, f"no such directory ({exc.strerror})"
        except WeightwireError as exc:
            sock, found = None, f"passed over: {exc}"
        looked.append(f"{path}: {found}")
        if sock is not None:
            return sock, looked[-1]
    return None, f"looked for {name} in " + "; ".join(looked)


def _try(address: str) -> tuple[socket.socket | None, str]:
    sock = _socket()
    try:
        sock.connect(address)
    except OSError as exc:
        sock.close()
        return None, _FAILED.get(type(exc), exc.strerror or str(exc))
    return sock, "connected"


_FAILED: dict[type[OSError], str] = {
    FileNotFoundError: "no socket",
    ConnectionRefusedError: "nobody listens there any more",
    BlockingIOError: "the updater there is too busy to answer",
}


def _newest_elsewhere(location: str, directory: Path, name: str) -> int:
    """The newest epoch found in the other run directories. Raises where a live updater has the place from there."""
    newest = 0
    for path in rundir.candidates():
        if path != directory:
            with suppress(OSError, WeightwireError):
                found, held = _look(path, f"{name}.lock")
                if held:
                    break
                newest = max(newest, int(found.get("epoch", 0)))
    else:
        return newest
    raise _in_use(location, found, path)


def _look(path: Path, name: str) -> tuple[dict[str, float], bool]:
    """What a lock file in another run directory says, and whether it is held."""
    with rundir.opened(path) as directory:
        # A pipe in its place must not keep us waiting.
        lock = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(lock), True
    else:
        return _read(lock), False
    finally:
        os.close(lock)


_LATEST = 2**53
"""No epoch or process is as large: a file that says so was not written by us."""


def _read(lock: int) -> dict[str, float]:
    """What a lock file says; nothing where it is empty or unreadable."""
    try:
        found = json.loads(os.pread(lock, 4096, 0) or b"{}")
        return {k: v for k, v in found.items() if isinstance(v, (int, float)) and 0 <= v < _LATEST}  # no NaN either
    except (ValueError, AttributeError, RecursionError):
        return {}


def _in_use(location: str, found: dict[str, float], directory: Path) -> EndpointInUseError:
    job = os.environ.get("WEIGHTWIRE_JOB", "")
    who = f"process {int(found['pid'])}" if "pid" in found else "another process"
    return EndpointInUseError(
        f"'ipc://{location}' belongs to a live updater, {who} (run directory {directory}"
        f"{f', WEIGHTWIRE_JOB={job}' if job else ''}). Close it, use another location, or keep jobs of one user apart "
        "by setting WEIGHTWIRE_JOB differently for each."
    )


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    return sock


def _abstract(location: str) -> str:
    return f"\0weightwire-{location[1:]}"
