"""A device that is none, for tests: its memory lies in memory files, and is handled just as a GPU's is.

``import:weightwire_ipc.fake`` is an endpoint like ``ipc``, but both sides take all weights to be on such a device. What
is exported is counted as torch counts it: one export, one opening, one release.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import signal
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from weightwire.errors import StorageFullError, WireError
from weightwire.hookspecs import BackendInfo, hookimpl
from weightwire_ipc import weightwire_backend as _real
from weightwire_ipc.device import DeviceError, Export, Handle, Layer
from weightwire_ipc.memory import PAGE, allocate, check_sealed, memfd, pages
from weightwire_ipc.options import IpcOptions
from weightwire_ipc.receiver import IpcReceiver
from weightwire_ipc.sender import IpcSender

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.endpoint import Endpoint
    from weightwire.transport import Receiver, ReceiverContext, Sender, SenderContext

__all__ = ["FakeLayer", "FakeOptions", "weightwire_backend", "weightwire_make_receiver", "weightwire_make_sender"]

_ADD_SEALS, _SEALS = 1033, 0x2 | 0x4  # SHRINK, GROW
_MAGIC = b"FAKEMEM\x01"
_FIRST, _LAST = 8, PAGE // 8  # words of the page behind the memory: the handle, then a counter for each export
_LENT, _OPEN, _GONE = 1, 2, 0


class FakeOptions(IpcOptions, frozen=True, kw_only=True):
    """Options of the real backend, and what goes wrong.

    Attributes:
        ordinal: the device of whoever opens this endpoint. apart: devices do not reach each other.
        faults: of ``allocate``, ``export``, ``open``, joined by dots: what fails; ``garble``: what is opened is
            something else; ``kill``: the process dies while it opens; ``later``: none of it before the third time.
        together: memory can also be opened by the process that exported it, which CUDA refuses.
    """

    ordinal: int = 0
    apart: bool = False
    faults: str = ""
    together: bool = False


@hookimpl
def weightwire_backend() -> BackendInfo:
    """As the real one, but for its options."""
    info = _real()
    return BackendInfo(summary="ipc over a device that is none", capabilities=info.capabilities, options=FakeOptions)


@hookimpl
def weightwire_make_sender(endpoint: Endpoint, options: FakeOptions, context: SenderContext) -> Sender:
    return IpcSender(endpoint, options, context, FakeLayer(options))


@hookimpl
def weightwire_make_receiver(endpoint: Endpoint, options: FakeOptions, context: ReceiverContext) -> Receiver:
    return IpcReceiver(endpoint.location, context, FakeLayer(options))


class _Memory:
    """What the exporter knows of memory that it allocated."""

    def __init__(self, fd: int, words: memoryview, nbytes: int) -> None:
        self.fd, self.words, self.nbytes = fd, words, nbytes
        self.next = _FIRST
        self.token = _MAGIC + os.getpid().to_bytes(8, "little") + secrets.token_bytes(48)
        words.cast("B")[:64] = self.token


class FakeLayer(Layer):
    """See :class:`weightwire_ipc.device.Layer`. ``dead``: from now on everything fails."""

    def __init__(self, options: FakeOptions) -> None:
        self._options = options
        self._faults = frozenset(options.faults.split("."))
        self._memories: dict[int, _Memory] = {}  # by address
        self.calls: Counter[str] = Counter()
        self.dead = False

    def _call(self, what: str) -> None:
        self.calls[what] += 1
        if self.dead:
            raise DeviceError("the device has fallen off the bus")
        if "later" in self._faults and self.calls[what] < 3:
            return
        if what in self._faults:
            raise DeviceError(f"{what} fails, as was asked for")
        if what == "open" and "kill" in self._faults:
            os.kill(os.getpid(), signal.SIGKILL)

    def home(self, devices: frozenset[torch.device]) -> str:
        return self.mine("")

    def mine(self, device: str) -> str:
        return f"fake-{self._options.ordinal}"

    def barrier(self, mine: str, theirs: str) -> str:
        if not theirs.startswith("fake-"):
            return f"the trainer's device {theirs} is not visible to this process"
        return f"{mine} has no peer access to {theirs}" if self._options.apart and mine != theirs else ""

    def allocate(self, device: str, nbytes: int) -> Tensor:
        self._call("allocate")
        size = pages(nbytes) + PAGE
        fd = memfd("weightwire-fake-device")
        try:
            allocate(fd, size)
            mapping = mmap.mmap(fd, size)
            fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
        except StorageFullError as exc:
            os.close(fd)
            raise DeviceError(str(exc)) from exc
        array = np.frombuffer(mapping, dtype=np.uint8, count=nbytes)
        memory = torch.from_numpy(array)
        self._memories[memory.data_ptr()] = _Memory(fd, memoryview(mapping)[pages(nbytes) :].cast("Q"), nbytes)
        weakref.finalize(array, self._free, memory.data_ptr()).atexit = False
        return memory

    def _free(self, address: int) -> None:
        os.close(self._memories.pop(address).fd)

    def export(self, device: str, memory: Tensor) -> Export:
        self._call("export")
        mine = self._memories[memory.data_ptr()]
        if mine.next >= _LAST:
            raise DeviceError("no counters are left")
        place, mine.next = mine.next, mine.next + 1
        mine.words[place] = _LENT
        return Export(Handle(device, 0, mine.token, mine.nbytes, 0, b"fake", place), (mine.fd,))

    def withdraw(self, handle: Handle) -> None:
        self.calls["withdraw"] += 1
        for memory in self._memories.values():
            if memory.token == handle.memory:
                memory.words[handle.place] = _GONE

    def outstanding(self) -> int:
        """Exports that have not been let go."""
        return sum(memory.words[place] != _GONE for memory in self._memories.values() for place in range(_FIRST, _LAST))

    def open(self, handle: Handle, fds: Sequence[int]) -> Tensor:
        self._call("open")
        if len(fds) != 1 or handle.counter != b"fake" or not _FIRST <= handle.place < _LAST or handle.offset:
            raise DeviceError("the fields of a handle of a fake device are not as it makes them")
        if handle.memory[8:16] == os.getpid().to_bytes(8, "little") and not self._options.together:
            raise DeviceError("a process cannot open what it has exported itself")
        size = pages(handle.size) + PAGE
        try:
            check_sealed(fds[0], size)
            mapping = mmap.mmap(fds[0], size)
        except (WireError, OSError) as exc:
            raise DeviceError(f"that is no memory of a fake device: {exc}") from exc
        words = memoryview(mapping)[-PAGE:].cast("Q")
        if bytes(words.cast("B")[:64]) != handle.memory or words[handle.place] != _LENT:
            raise DeviceError("an export was opened twice, or another one's handle came with it")
        words[handle.place] = _OPEN
        array = np.frombuffer(mapping, dtype=np.uint8, count=handle.size)
        weakref.finalize(array, words.__setitem__, handle.place, _GONE).atexit = False
        memory = torch.from_numpy(array)
        return ~memory if "garble" in self._faults else memory

    def piece(self, memory: Tensor, start: int, size: int, owner: object) -> Tensor:
        return torch.from_numpy(np.asarray(_Piece(memory, start, size, owner)))

    def settle(self, device: str) -> None:
        self._call("settle")


class _Piece:
    """Memory that NumPy makes an array of, and torch a storage, which keeps this object alive."""

    def __init__(self, memory: Tensor, start: int, size: int, owner: object) -> None:
        self._kept = (memory, owner)
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (memory.data_ptr() + start, False),
        }
