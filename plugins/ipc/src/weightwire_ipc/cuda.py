"""Device memory between processes by CUDA's own means, as torch offers them. **This has not run on a GPU yet.**

torch counts what it exports: one export pairs with one opening and one release, in a small file of counters that the
exporter made. Opening one export twice, or for two consumers, drives the counter below zero and leaks; so each consumer
gets an export of its own, once, and keeps it. torch would hand the fields on as a pickled call; here they travel as
typed fields, and are looked at before torch sees them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from weightwire_ipc.device import DeviceError, Export, Handle, Layer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CudaLayer"]

_PLAIN = ord("c")
"""torch (2.5 and newer) writes its version of the handle and one letter before it: memory of ``cudaMalloc`` is ``c``.
Expandable segments are ``e``: another process would have to take descriptors out of the exporter."""
_COUNTER = re.compile(rb"/torch_[0-9a-zA-Z_]{1,50}")
"""torch opens this name as shared memory: nothing else than what torch itself makes up is handed to it."""


class CudaLayer(Layer):
    """See :class:`weightwire_ipc.device.Layer`."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def home(self, devices: frozenset[torch.device]) -> str:
        if len(devices) != 1:
            return ""
        (device,) = devices
        return _uuid(device.index or 0) if device.type == "cuda" else ""

    def mine(self, device: str) -> str:
        if not device.startswith("cuda") or not torch.cuda.is_available():
            return ""
        return _uuid(torch.device(device).index or 0)

    def barrier(self, mine: str, theirs: str) -> str:
        there = self._find(theirs)
        if there is None:
            return f"the trainer's GPU {theirs} is not visible to this process (CUDA_VISIBLE_DEVICES)"
        if mine == theirs:
            return ""
        here = self._find(mine)
        if here is None or not torch.cuda.can_device_access_peer(here, there):
            return f"GPU {mine} has no peer access to the trainer's GPU {theirs}"
        return ""

    def allocate(self, device: str, nbytes: int) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._at(device))
        except RuntimeError as exc:  # torch.OutOfMemoryError is one
            raise DeviceError(f"{nbytes} bytes cannot be had on GPU {device}: {_first_line(exc)}") from exc

    def export(self, device: str, memory: Tensor) -> Export:
        try:
            with torch.cuda.device(memory.device):
                fields = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        except RuntimeError as exc:
            raise DeviceError(f"torch cannot export memory of GPU {device}: {_first_line(exc)}") from exc
        _, raw, size, offset, counter, place, event, waits = fields
        form, plain = _taken_apart(raw)
        handle = Handle(device, form, plain, size, offset, counter, place, event if waits else b"")
        if not plain:
            self.withdraw(handle)
            raise DeviceError(
                "torch exports memory of expandable segments in a way that other processes cannot safely open: leave "
                "expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"
            )
        return Export(handle)

    def withdraw(self, handle: Handle) -> None:
        try:
            torch.UntypedStorage._release_ipc_counter(handle.counter, handle.place, device="cuda")  # type: ignore[no-untyped-call]
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        except RuntimeError:  # the file of counters is gone: then nobody waits for it
            return

    def open(self, handle: Handle, fds: Sequence[int]) -> Tensor:
        device = self._at(handle.device)
        if fds or not handle.size or not _COUNTER.fullmatch(handle.counter):
            raise DeviceError("the fields of a handle of GPU memory are not as torch makes them")
        raw = handle.memory if not handle.form else bytes((handle.form, _PLAIN)) + handle.memory
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            with torch.cuda.device(device):
                storage = torch.UntypedStorage._new_shared_cuda(
                    device.index,
                    raw,
                    handle.size,
                    handle.offset,
                    handle.counter,
                    handle.place,
                    handle.event,
                    bool(handle.event),
                )
                return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        except RuntimeError as exc:
            raise DeviceError(f"memory of GPU {handle.device} cannot be opened: {_first_line(exc)}") from exc

    def piece(self, memory: Tensor, start: int, size: int, owner: object) -> Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8, device=memory.device)
        with torch.cuda.device(memory.device):
            return torch.as_tensor(_Piece(memory, start, size, owner), device=memory.device)

    def settle(self, device: str) -> None:
        try:
            torch.cuda.synchronize(self._at(device))
        except RuntimeError as exc:
            raise DeviceError(f"GPU {device}: {_first_line(exc)}") from exc

    def _at(self, device: str) -> torch.device:
        index = self._find(device)
        if index is None:
            raise DeviceError(f"GPU {device} is not visible to this process (CUDA_VISIBLE_DEVICES)")
        return torch.device("cuda", index)

    def _find(self, device: str) -> int | None:
        if device not in self._index and torch.cuda.is_available():
            self._index = {_uuid(index): index for index in range(torch.cuda.device_count())}
        return self._index.get(device)


class _Piece:
    """Memory that torch makes a tensor of, with a storage that keeps this object, and so its owner, alive."""

    def __init__(self, memory: Tensor, start: int, size: int, owner: object) -> None:
        self._kept = (memory, owner)
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 2,
            "typestr": "|u1",
            "shape": (size,),
            "data": (memory.data_ptr() + start, False),
        }


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _taken_apart(raw: bytes) -> tuple[int, bytes]:
    """The form and the 64 bytes of a handle as torch has it; no bytes where it is of memory that we do not share."""
    if len(raw) == 64:
        return 0, raw
    if len(raw) == 66 and raw[1] == _PLAIN:
        return raw[0], raw[2:]
    return 0, b""


def _first_line(exc: Exception) -> str:
    return str(exc).partition("\n")[0]
