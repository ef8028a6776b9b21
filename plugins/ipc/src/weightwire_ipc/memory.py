"""Memory that other processes can read, and that nobody can cut short under them: sealed memfds.

There is no name to leak or to guess, no limit by the size of ``/dev/shm``, and nothing left when the last holder dies.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import struct
from array import array

from xxhash import xxh3_64_intdigest

from weightwire.errors import StorageFullError, WeightwireError, WireError
from weightwire_ipc.mapping import PAGE, Mapping, thicken

__all__ = [
    "EPOCH",
    "HEADER",
    "MAGIC",
    "NUMBER",
    "PAGE",
    "WHERE",
    "Board",
    "BoardView",
    "allocate",
    "check_sealed",
    "map_shared",
    "memfd",
    "out_of_files",
    "pages",
    "reopen",
    "seal",
    "unwritten",
]

_ADD_SEALS, _GET_SEALS = 1033, 1034  # fcntl has the names only on some builds
_SEALS = 0x1 | 0x2 | 0x4 | 0x10  # SEAL, SHRINK, GROW, FUTURE_WRITE
_NOEXEC_SEAL = 0x8  # since Linux 6.3, which warns about (and may forbid) a memfd that could be executed
_STEP = 32 * 2**20
_BOARD, _TEXT = 4 * PAGE, 32
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages, at least one."""
    return max(1, -(-nbytes // PAGE)) * PAGE


def memfd(name: str) -> int:
    """An empty memfd that can be sealed, private to this user. ``name`` shows only in ``/proc``."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | _NOEXEC_SEAL)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, flags)
    os.fchmod(fd, 0o600)
    return fd


def reopen(fd: int, flags: int) -> int:
    """The same file under an open file description of its own."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def allocate(fd: int, nbytes: int, size: int = 0) -> None:
    """Reserve memory for so many bytes of a file, so that no later write to them can fail. ``size``: how long the file
    is to be, where it is longer than that: the rest has no memory yet.

    Raises :class:`~weightwire.StorageFullError` with the sizes.
    """
    room = _room()
    if nbytes > room:
        raise StorageFullError(f"a version needs {_mib(nbytes)} of shared memory, but only {_mib(room)} are free")
    start = 0
    try:
        os.ftruncate(fd, max(nbytes, size))
        thicken(fd, nbytes)
        for start in range(0, nbytes, _STEP):  # in steps: a signal makes the kernel undo the one at hand
            os.posix_fallocate(fd, start, min(_STEP, nbytes - start))
    except OSError as exc:
        if exc.errno not in _NO_ROOM:
            raise
        raise StorageFullError(
            f"a version needs {_mib(max(nbytes, size))} of shared memory, but only {_mib(start)} could be had "
            f"({exc.strerror}); {_mib(room)} of memory are free"
        ) from exc


def _room() -> int:
    """Bytes that could be had without the kernel's killing somebody for them."""
    found = {}
    with open("/proc/meminfo", "rb") as file:
        for line in file:
            key, value = line.split()[:2]
            found[key] = int(value) * 1024
    return found.get(b"MemAvailable:", 1 << 62) + found.get(b"SwapFree:", 0)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def out_of_files(what: str, exc: OSError) -> WeightwireError | None:
    """What to raise where ``exc`` says that there are no file descriptors left; else ``None``."""
    if exc.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return StorageFullError(
        f"{what} needs file descriptors, and there are none left ({exc.strerror}): this process may have {limit}. "
        "Raise the limit (ulimit -n), or close some"
    )


def map_shared(fd: int, nbytes: int) -> Mapping:
    """A writable mapping; only possible before :func:`seal`, and unharmed by it.

    Raises :class:`~weightwire.StorageFullError` where this process may not have so much address space.
    """
    try:
        return Mapping(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as exc:
        if exc.errno not in _NO_ROOM:
            raise
        raise StorageFullError(
            f"a version needs {_mib(nbytes)} of address space, which this process cannot have ({exc.strerror}): "
            "see ulimit -v"
        ) from exc


def seal(fd: int) -> int:
    """Forbid resizing, and writing by anybody who has not mapped it yet. Closes ``fd``; returns a read-only one."""
    try:
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
        return reopen(fd, os.O_RDONLY)
    finally:
        os.close(fd)


def check_sealed(fd: int, nbytes: int) -> None:
    """Raise :class:`~weightwire.WireError` unless ``fd`` has this size for good: else reading it could be fatal."""
    size = os.fstat(fd).st_size
    try:
        sealed = fcntl.fcntl(fd, _GET_SEALS) & 0x2
    except OSError:
        sealed = 0
    if size != nbytes or not sealed:
        raise WireError(f"a memory of {size} bytes came where a sealed one of {nbytes} was announced")


def unwritten(mapping: Mapping) -> bool:
    """Whether nothing was written to a copy-on-write mapping: all its pages are still the file's.

    False where the kernel does not say (before Linux 6.7). Costs less than half of unmapping, and next to nothing where
    the pages are huge.
    """
    found = array("Q", (0, 0, 0))  # one region: start, end, categories
    begin, end = mapping.address, mapping.address + mapping.size
    wanted = _SCAN.pack(  # one page that is present or swapped, and not the file's
        *(_SCAN.size, 0, begin, end, 0, found.buffer_info()[0], 1, 1),
        *(_FILE, _FILE, _PRESENT | _SWAPPED, _PRESENT),
    )
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            return not fcntl.ioctl(file, _PAGEMAP_SCAN, bytearray(wanted))
    except OSError:
        return False


_PAGEMAP_SCAN, _SCAN = 0xC0606610, struct.Struct("12Q")
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4  # PAGE_IS_...


class Board:
    """What the trainer has to say to one worker, in memory that only the trainer can write: the latest counts.

    A message in a socket would have to be read before the next ones find room; this can be written any number of times
    while the worker is busy or stopped. Word 0 is a sequence number, odd while the board is being written; word 1 says
    that the trainer has closed; word 2 is the length of what follows, word 3 its xxh3-64. Words are read and written
    whole, through a memoryview: ``struct`` would do it byte by byte.
    """

    def __init__(self) -> None:
        fd = memfd("weightwire-board")
        try:
            allocate(fd, _BOARD)
            self._bytes = map_shared(fd, _BOARD).array(0, _BOARD).data
        except BaseException:
            os.close(fd)
            raise
        self._words = self._bytes.cast("Q")
        self.shared = seal(fd)

    def write(self, data: bytes) -> None:
        """Put up something new. May be broken off anywhere and done again."""
        words = self._words
        words[0] |= 1
        words[2], words[3] = len(data), xxh3_64_intdigest(data)
        self._bytes[_TEXT : _TEXT + len(data)] = data
        words[0] += 1

    def say_closed(self) -> None:
        """No more will come."""
        self._words[1] = 1
        self._words[0] += 2

    def close(self) -> None:
        """Let go of it; the worker keeps it as long as it likes. Idempotent."""
        self._bytes = memoryview(bytearray(_BOARD))
        self._words = self._bytes.cast("Q")
        fd, self.shared = self.shared, -1
        if fd >= 0:
            os.close(fd)


class BoardView:
    """A worker's view of its board."""

    def __init__(self, fd: int) -> None:
        """Raises :class:`~weightwire.WireError` where this is no board."""
        check_sealed(fd, _BOARD)
        self._bytes = memoryview(mmap.mmap(fd, _BOARD, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
        self.words = self._bytes.cast("Q")

    @property
    def closed(self) -> bool:
        return bool(self.words[1])

    def read(self) -> tuple[int, bytes | None]:
        """The sequence number, and what is on the board: ``None`` where it is being written just now."""
        words = self.words
        before, size, check = words[0], words[2], words[3]
        data = bytes(self._bytes[_TEXT : _TEXT + size])
        good = not before & 1 and words[0] == before and (not size or xxh3_64_intdigest(data) == check)
        return before, data if good else None


HEADER = struct.Struct("=8sQ16sQQQ")
"""At the beginning of a slot: magic, bytes of the header, its xxh3-128, epoch, number, where. The header follows."""
EPOCH, NUMBER, WHERE = 4, 5, 6
"""Where the stamp is, and where the payload lies, in words of 8 bytes. The payload: bit 0, behind the header; the bits
above, the number of the device arena that has it, 0 for none."""
MAGIC = b"WWSLOT\x00\x02"
