"""What this backend asks of a device whose memory other processes can open.

There are two: :mod:`weightwire_ipc.cuda`, and :mod:`weightwire_ipc.fake`, which behaves like it over memory files, so
that everything above it can be tested without a GPU. A device is known by its UUID: indices differ between processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["DeviceError", "Export", "Handle", "Layer"]

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**46)]


class DeviceError(Exception):
    """Memory of a device cannot be had, handed out, or opened; the text says why, for the log and the notes."""


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """How a process opens device memory of another one, as plain fields: nothing in it is loaded or called.

    Attributes:
        device: the UUID of the device.
        form: how the handle is to be understood; each layer has its own numbers.
        memory: the handle of the allocation in which the memory lies.
        size: bytes of the memory. offset: where it starts in the allocation.
        counter, place: where the consumer notes that it let go of the memory: a label, and a number there.
        event: handle of an event to wait for; empty for none.
    """

    device: Annotated[str, msgspec.Meta(max_length=64)]
    form: Annotated[int, msgspec.Meta(ge=0, le=255)]
    memory: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    size: _Bytes
    offset: _Bytes
    counter: Annotated[bytes, msgspec.Meta(max_length=64)]
    place: _Bytes
    event: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class Export(NamedTuple):
    """What a consumer is given: the handle, and descriptors (which stay the layer's) where it takes those too."""

    handle: Handle
    fds: tuple[int, ...] = ()


class Layer(ABC):
    """Device memory between processes. All that can go wrong is a :class:`DeviceError`.

    Calls may come from any thread. ``device`` is a UUID in all of them.
    """

    @abstractmethod
    def home(self, devices: frozenset[torch.device]) -> str:
        """The UUID of the device on which a payload lies, whose tensors are on these (beside the CPU); empty where
        that is not one device of this kind."""

    @abstractmethod
    def mine(self, device: str) -> str:
        """The UUID of a worker's device, as torch calls it (``cuda:0``); empty where it is not of this kind."""

    @abstractmethod
    def barrier(self, mine: str, theirs: str) -> str:
        """Why a worker on the device ``mine`` cannot read memory of the device ``theirs``; empty where it can."""

    @abstractmethod
    def allocate(self, device: str, nbytes: int) -> Tensor:
        """Memory of our own: flat uint8, that can be exported."""

    @abstractmethod
    def export(self, device: str, memory: Tensor) -> Export:
        """For one consumer, who opens it once. The memory stays the caller's."""

    @abstractmethod
    def withdraw(self, handle: Handle) -> None:
        """The consumer of an export has died, or never got it: count it as let go. Does not raise."""

    @abstractmethod
    def open(self, handle: Handle, fds: Sequence[int]) -> Tensor:
        """Another process's memory: flat uint8, of ``handle.size`` bytes. It is let go with the last tensor over it."""

    @abstractmethod
    def piece(self, memory: Tensor, start: int, size: int, owner: object) -> Tensor:
        """Bytes of opened memory as a tensor with a storage of its own, which keeps ``owner`` alive."""

    @abstractmethod
    def settle(self, device: str) -> None:
        """Wait until the device has done all that this process asked of it."""

    def pieces(self, memory: Tensor, cuts: Iterable[tuple[int, int]], owner: object) -> list[Tensor]:
        """A :meth:`piece` for each start and size."""
        return [self.piece(memory, start, size, owner) for start, size in cuts]
