"""The private directory for sockets and lock files of this user on this machine.

``$XDG_RUNTIME_DIR/weightwire`` where that variable names a directory that is ours alone, else ``weightwire-<uid>`` in
the system's directory for temporary files. A process that looks for another one tries every place where that one may
have made it, since the two may have been started with different environments (ssh, sudo, cron, a job scheduler).
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from weightwire.errors import WeightwireError

__all__ = ["candidates", "create", "file_name", "opened", "path_in"]

NAME = "weightwire"


def candidates() -> list[Path]:
    """Every directory in which a process of this user may have put its sockets, the likeliest first."""
    uid = os.geteuid()
    parents = [Path(text) for text in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{uid}") if text]
    temporary = dict.fromkeys((tempfile.gettempdir(), "/tmp"))
    paths = [parent / NAME for parent in parents if parent.is_absolute()]
    return list(dict.fromkeys([*paths, *(Path(parent) / f"{NAME}-{uid}" for parent in temporary)]))


def create() -> Path:
    """The directory for new sockets; made (mode 0700) where it is missing.

    Raises:
        WeightwireError: the place is taken by something that is not a private directory of this user.
    """
    parent = os.environ.get("XDG_RUNTIME_DIR", "")
    if parent and os.path.isabs(parent) and _fault(parent) is None:
        path = Path(parent, NAME)
    else:
        path = Path(tempfile.gettempdir(), f"{NAME}-{os.geteuid()}")
    try:
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # whatever the umask is
    except FileExistsError:
        pass
    except OSError as exc:
        raise WeightwireError(f"cannot make the run directory {path}: {exc.strerror}") from exc
    if fault := _fault(path):
        raise WeightwireError(
            f"the run directory {path} {fault}. Weightwire puts its sockets only into a directory that is yours alone: "
            "remove it, or set XDG_RUNTIME_DIR to a private directory (chmod 700)."
        )
    return path


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a run directory, checked once more after it was opened.

    Raises ``OSError`` where there is none, and :class:`~weightwire.WeightwireError` where it is not ours alone.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fds: list[int] = []
    try:
        fds.extend(map(os.open, (path,), (flags,)))  # one call: Ctrl-C comes up after it, when the descriptor is held
        if fault := _judge(os.fstat(fds[0])):
            raise WeightwireError(f"{path} {fault}")
        yield fds[0]
    finally:
        for fd in fds:
            os.close(fd)


def path_in(directory: int, name: str) -> str:
    """A short path of ``name`` in an open directory: a socket's path has room for only 107 bytes."""
    return f"/proc/self/fd/{directory}/{name}"


def file_name(kind: str, label: str) -> str:
    """A file name for a label that may hold anything: a readable part, and a hash that tells labels apart."""
    readable = re.sub(r"[^A-Za-z0-9_]+", "-", label).strip("-")[:40]
    return "-".join(part for part in (kind, readable, xxh3_64_hexdigest(label.encode())) if part)


def _fault(path: str | Path) -> str | None:
    """What is wrong with a directory, or ``None``. A link is not followed."""
    try:
        return _judge(os.lstat(path))
    except OSError as exc:
        return f"cannot be looked at: {exc.strerror}"


def _judge(found: os.stat_result) -> str | None:
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to user {os.geteuid()}"
    if found.st_mode & 0o077:
        return f"is open to others (mode {stat.S_IMODE(found.st_mode):04o})"
    return None
