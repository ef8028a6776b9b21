"""A worker's side of device memory: what it has opened of the trainer's, in one session."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from weightwire.transport import Delivery
from weightwire.weights.digest import digest_of
from weightwire_ipc.device import DeviceError

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.transport import Header
    from weightwire_ipc.device import Layer
    from weightwire_ipc.leases import Lease
    from weightwire_ipc.protocol import Lend, Probe

__all__ = ["Holds", "OpenArena", "Reach"]


class OpenArena:
    """One arena of the trainer's. Deliveries from it lie at the same addresses: it is their ``memory``."""

    def __init__(self, slot: int, memory: Tensor) -> None:
        self.slot = slot
        self.memory = memory
        self._buffer = memory[:0]

    def buffer(self, nbytes: int) -> Tensor:
        """The payload, always as the same tensor. Never to be written to: others read it too."""
        if self._buffer.numel() != nbytes:
            self._buffer = self.memory[:nbytes]
        return self._buffer


class Reach:
    """What a worker on a device can open. ``mine``: the UUID of its device."""

    def __init__(self, layer: Layer, mine: str) -> None:
        self._layer = layer
        self._mine = mine
        self._answer: str | None = None  # to the probe
        self._arenas: dict[int, OpenArena] = {}

    def probe(self, message: Probe, fds: Sequence[int]) -> str:
        """Try the whole way once: why it cannot be gone, empty where it can."""
        if self._answer is None:
            self._answer = self._try(message, fds)
        return self._answer

    def _try(self, message: Probe, fds: Sequence[int]) -> str:
        barrier = self._layer.barrier(self._mine, message.handle.device)
        if barrier:
            return barrier
        try:
            found = digest_of([self._layer.open(message.handle, fds)])
        except (DeviceError, RuntimeError) as exc:
            return str(exc)
        return "" if found == message.digest else "what was opened is not what the trainer exported"

    def lend(self, message: Lend, fds: Sequence[int]) -> str:
        """Open an arena, in place of older ones of its slot: why that cannot be, empty where it can."""
        if message.arena in self._arenas or self._answer:
            return ""
        try:
            memory = self._layer.open(message.handle, fds)
        except DeviceError as exc:
            return str(exc)
        for number in [number for number, arena in self._arenas.items() if arena.slot == message.slot]:
            del self._arenas[number]
        self._arenas[message.arena] = OpenArena(message.slot, memory)
        return ""

    def arena(self, number: int, slot: int, nbytes: int) -> OpenArena | None:
        """The open arena of this number, where it is fit."""
        arena = self._arenas.get(number)
        fit = arena is not None and arena.slot == slot and nbytes <= arena.memory.numel() and self._answer == ""
        return arena if fit else None

    def forget(self, slot: int) -> None:
        """The slot is gone."""
        self._arenas = {number: arena for number, arena in self._arenas.items() if arena.slot != slot}

    def close(self) -> None:
        """Let go of everything that no tensor looks at any more."""
        self._arenas.clear()


class _Hold:
    """Lives as long as tensors over one delivery do."""

    __slots__ = ("__weakref__",)


class _Held(NamedTuple):
    hold: weakref.ref[_Hold]
    lease: Lease


class Holds:
    """Leases on device memory that a policy acts on as it lies there.

    A lease ends when the last tensor over it has died *and* the device has done what it was asked to do with them. Such
    memory cannot be made this process's own: after the receiver was closed a lease goes on as long as its tensors do.
    """

    def __init__(self, layer: Layer, mine: str) -> None:
        self._layer = layer
        self._mine = mine
        self._alive: dict[int, _Held] = {}
        self._serial = 0

    def aliased(self, arena: OpenArena, header: Header, lease: Lease) -> Delivery:
        """The memory itself, each block with a storage of its own."""
        hold = _Hold()
        self._serial += 1
        self._alive[self._serial] = _Held(weakref.ref(hold), lease)
        weakref.finalize(hold, self._died, self._serial).atexit = False
        cuts = zip(header.layout.starts, header.layout.sizes)
        return Delivery(header, blocks=self._layer.pieces(arena.memory, cuts, hold))

    def copied(self, arena: OpenArena, header: Header, lease: Lease) -> Delivery:
        """Memory of this process's own, for who writes to it; the lease ends here."""
        starts, sizes = header.layout.starts, header.layout.sizes
        blocks = [arena.memory[start : start + size].clone() for start, size in zip(starts, sizes)]
        self._layer.settle(self._mine)
        lease.release()
        return Delivery(header, blocks=blocks, writable=True)

    def _died(self, serial: int) -> None:
        """May run anywhere, at any time: what cannot be done there is done by the next :meth:`sweep`."""
        try:
            self._layer.settle(self._mine)
        except DeviceError:
            return
        held = self._alive.pop(serial, None)
        if held is not None:
            held.lease.release()

    def sweep(self) -> None:
        for serial, held in list(self._alive.items()):
            if held.hold() is None:
                self._died(serial)
