"""Names in the folder, and the two ways in which anything gets there: whole under its name, or not at all.

::

    run1/trainer.lock                    held by the live trainer
    run1/1796053791766/                  a trainer's own: its epoch, claimed by mkdir
        manifest.json                    which versions there are, and for whom; written last
        000000000012.safetensors         a version; a reader holds its lock while it reads
        workers/LABEL.lock               held by the live worker
        workers/LABEL-INCARNATION.hello  what it says when joining
        workers/LABEL-INCARNATION-000000000003.report
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from weightwire import rundir
from weightwire.endpoint import Endpoint
from weightwire.errors import EndpointError, StorageFullError, WireError
from weightwire.transport import Version
from weightwire_file.locks import held

__all__ = [
    "Draft",
    "Entry",
    "Manifest",
    "draft",
    "epochs",
    "label",
    "no_room",
    "publish",
    "read_manifest",
    "root",
    "sweep",
    "version_name",
]

MANIFEST, LOCK, WORKERS = "manifest.json", "trainer.lock", "workers"
MAX_MANIFEST = 64 << 20
_OURS = re.compile(r"manifest\.json|[0-9]{12,}\.safetensors|[0-9a-f]{32}(\.lock|-[0-9]+(-[0-9]{12,})?\.(hello|report))")
_DRAFT = ".part"


class Entry(msgspec.Struct, frozen=True):
    """A version that somebody may ask for. Its file's name follows from its number."""

    stamp: Version
    base: Version | None = None


Pair = tuple[Entry | None, Entry | None]


class Manifest(msgspec.Struct, frozen=True):
    """The newest full version and the newest subset on it: for all, and for those that were given others.

    These go by label and incarnation: a process that comes back under its name has what went to all.
    """

    epoch: int
    all: Pair = (None, None)
    some: dict[str, Pair] = {}
    closed: bool = False
    format: int = 1

    def of(self, who: str) -> Pair:
        return self.some.get(who, self.all)


_MANIFEST = msgspec.json.Decoder(Manifest)


def root(endpoint: Endpoint) -> Path:
    """The folder. Jobs that set ``WEIGHTWIRE_JOB`` have one of their own in it."""
    path = Path(endpoint.location)
    if not path.is_absolute():
        raise EndpointError(
            f"endpoint {str(endpoint)!r}: the location of 'file' is an absolute folder that trainer and workers share, "
            "as in 'file:///shared/run1'"
        )
    job = os.environ.get("WEIGHTWIRE_JOB", "")
    return path / rundir.file_name("job", job) if job else path


def epochs(folder: Path) -> list[int]:
    """The trainers that have been here, oldest first."""
    try:
        return sorted(int(name) for name in os.listdir(folder) if name.isascii() and name.isdigit())
    except FileNotFoundError:
        return []


def version_name(stamp: Version) -> str:
    return f"{stamp.number:012d}.safetensors"


def label(worker: str) -> str:
    """A worker's name may hold anything and be long; this stands for it in file names."""
    return blake2b(worker.encode(), digest_size=16).hexdigest()


def read_manifest(folder: Path) -> Manifest | None:
    """``None`` where there is none yet. Raises :class:`WireError` where something else is there."""
    path = folder / MANIFEST
    try:
        with open(path, "rb") as file:
            manifest = _MANIFEST.decode(file.read(MAX_MANIFEST))
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, ValueError) as exc:
        raise WireError(f"{path} is no manifest of Weightwire's: {exc}") from exc
    if manifest.format != 1:
        raise WireError(f"{path} is of format {manifest.format}; this release reads format 1")
    return manifest


# -- whole or not at all -----------------------------------------------------------------------------------------------


class Draft:
    """A file that nobody sees until :meth:`commit` gives it its name."""

    def __init__(self, path: Path, fd: int, *, sync: bool) -> None:
        self.path, self.fd, self._sync = path, fd, sync

    def reserve(self, nbytes: int) -> None:
        """Take the room on the disk. Raises :class:`StorageFullError` before anything is written."""
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as exc:
            raise no_room(exc, self.path, nbytes) from exc

    def commit(self) -> None:
        if self._sync:
            os.fsync(self.fd)
        os.rename(f"{self.path}{_DRAFT}", self.path)
        if self._sync:
            sync_folder(self.path.parent)


@contextmanager
def draft(path: Path, *, sync: bool) -> Iterator[Draft]:
    temporary = f"{path}{_DRAFT}"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        yield Draft(path, fd, sync=sync)
    finally:
        os.close(fd)
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def publish(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Write a small file."""
    with draft(path, sync=sync) as new:
        new.reserve(max(len(data), 1))
        os.ftruncate(new.fd, len(data))
        os.pwrite(new.fd, data, 0)
        new.commit()


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def no_room(exc: OSError, path: Path, nbytes: int) -> Exception:
    """The error to raise: of the disk where it is full, else the very same."""
    if exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return exc
    try:
        there = os.statvfs(path.parent)
        free = f"{there.f_bavail * there.f_frsize} bytes are free"
    except OSError:
        free = "nobody knows how much is free"
    return StorageFullError(
        f"no room for {nbytes} bytes at {path} ({exc.strerror}; {free} in all). Nothing was announced, and the version "
        "before is untouched: make room, or choose a smaller keep="
    )


# -- cleaning up -------------------------------------------------------------------------------------------------------


def sweep(folder: Path, before: int) -> None:
    """Remove what trainers before this epoch have left, where no live worker looks at it, and nothing else."""
    for epoch in epochs(folder):
        old = folder / str(epoch)
        if epoch < before and not any(held(path) for path in old.glob(f"{WORKERS}/*.lock")):
            for place in (old / WORKERS, old):
                _empty(place)


def _empty(place: Path) -> None:
    with suppress(OSError):  # somebody else sweeps too, or something strange is in it
        for name in os.listdir(place):
            if _OURS.fullmatch(name.removesuffix(_DRAFT)):
                with suppress(FileNotFoundError):
                    os.unlink(place / name)
        os.rmdir(place)
