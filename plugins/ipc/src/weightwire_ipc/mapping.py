"""Files in memory, where the kernel can map huge pages.

In pages of 4 KiB a gigabyte is a quarter of a million entries in the page table of every process that maps it: to be
filled in, looked through for what was written, taken down. In huge pages it is 500, and it is copied faster, too. A
memory file has huge pages where they are asked for (``MADV_COLLAPSE``, since Linux 6.1), whatever the settings for
transparent ones are, and a mapping shows them where its address and the file's offset are alike modulo their size.
Python's ``mmap`` cannot be told an address. Where there are no huge pages all is as it would be without this module.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["HUGE", "PAGE", "Mapping", "thicken"]

PAGE = mmap.PAGESIZE
_FIXED, _FAILED = 0x10, 2**64 - 1  # MAP_FIXED, MAP_FAILED
_COLLAPSE = 25  # MADV_COLLAPSE
_STEP = 32 * 2**20

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]


def _huge() -> int:
    """Bytes of a huge page; a small one's where there are none."""
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return PAGE


HUGE = _huge()


class Mapping:
    """The first ``size`` bytes of a file. Unmapped when neither this object nor an array of it is there any more."""

    def __init__(self, fd: int, size: int, *, flags: int, prot: int) -> None:
        """``flags`` and ``prot`` as for ``mmap``. Raises ``OSError``."""
        huge = HUGE if size >= HUGE else PAGE
        self.size = size
        # Python's object takes the room, and gives it back, with whatever lies in it by then.
        self._room = mmap.mmap(-1, size + huge - PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
        first = np.frombuffer(self._room, dtype=np.uint8).ctypes.data
        self.address = -(-first // huge) * huge
        if _libc.mmap(self.address, size, prot, flags | _FIXED, fd, 0) == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def array(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes ``start`` to ``stop``. NumPy takes them for writable; where they are not, to write would be fatal."""
        return np.asarray(_Cells(self, start, stop))


class _Cells:
    """What NumPy makes an array of, and keeps with it."""

    def __init__(self, mapping: Mapping, start: int, stop: int) -> None:
        self._mapping = mapping
        data = (mapping.address + start, False)
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (stop - start,), "data": data}


def thicken(fd: int, nbytes: int) -> None:
    """Give the first ``nbytes`` of a memory file that has no memory yet huge pages, as far as they are to be had."""
    if nbytes < HUGE or HUGE == PAGE:
        return
    try:
        view = Mapping(fd, nbytes - nbytes % HUGE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        for start in range(0, view.size, _STEP):  # in steps, between which signals are heard
            step = min(_STEP, view.size - start)
            for first in range(start, start + step, HUGE):
                os.posix_fallocate(fd, first, PAGE)  # there must be something to make a huge page of
            if _libc.madvise(view.address + start, step, _COLLAPSE):
                return
    except OSError:  # no room: whoever allocates the rest says so
        return
