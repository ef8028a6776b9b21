"""The trainer's side of device memory: arenas of slots, who was lent them, and who cannot be."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING

import torch
from xxhash import xxh3_128_digest

from weightwire_ipc.device import DeviceError, Export, Handle
from weightwire_ipc.protocol import Lend, Probe

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire_ipc.device import Layer
    from weightwire_ipc.protocol import Channel
    from weightwire_ipc.slots import Slot

__all__ = ["ASKED", "NONE", "OPEN", "SHUT", "Arena", "Arenas", "Link"]

NONE, ASKED, OPEN, SHUT = "", "asked", "open", "shut"
"""Of a worker: it has no device, or nobody knows of the trainer's yet; it was sent a probe; it reads device memory; it
cannot, and reads the host's."""
_REMEMBERED = 64
"""Exports that are remembered of each worker, to be withdrawn when it dies."""


class Arena:
    """Device memory for the payloads of one slot. Its number is never used again."""

    def __init__(self, number: int, device: str, memory: Tensor) -> None:
        self.number = number
        self.device = device
        self.memory = memory
        self._out = memory[:0]

    def out(self, nbytes: int) -> Tensor:
        """The memory for a payload of this many bytes, always as the same tensor."""
        if self._out.numel() != nbytes:
            self._out = self.memory[:nbytes]
        return self._out


class Link:
    """What is known of one worker's reach to the trainer's device."""

    def __init__(self, device: str = "") -> None:
        self.device = device  # its UUID, as the worker says
        self.state = NONE
        self.probe: Handle | None = None
        self.lent: dict[int, Handle] = {}  # by arena

    @property
    def hopeful(self) -> bool:
        """Whether it may read device memory."""
        return self.state in (ASKED, OPEN)


class Arenas:
    """All under the sender's lock, but for the copying of bytes. ``device``: on which payloads lie; empty for none."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.device = ""
        self._numbers = count(1)
        self._pattern: tuple[Tensor, bytes] | None = None

    def ask(self, link: Link, channel: Channel) -> str:
        """Have a worker try the whole way: export, open, digest, release. Why that cannot even begin, else empty."""
        try:
            memory, digest = self._probe()
            export = self.layer.export(self.device, memory)
        except DeviceError as exc:
            return str(exc)
        link.state, link.probe = ASKED, export.handle
        channel.send(Probe(export.handle, digest), export.fds)
        return ""

    def _probe(self) -> tuple[Tensor, bytes]:
        """Memory with a pattern that nobody can guess, and its digest; the same for all workers."""
        if self._pattern is None:
            text = secrets.token_bytes(4096)
            memory = self.layer.allocate(self.device, len(text))
            memory.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            self.layer.settle(self.device)
            self._pattern = memory, xxh3_128_digest(text)
        return self._pattern

    def moved(self, device: str) -> None:
        """Payloads lie on another device from now on."""
        self.device, self._pattern = device, None

    def equip(self, slot: Slot) -> Arena:
        """The slot's arena on the device, made where it has none. Raises :class:`DeviceError`."""
        if slot.arena is None or slot.arena.device != self.device:
            memory = self.layer.allocate(self.device, slot.shape.size - slot.shape.start)
            slot.arena = Arena(next(self._numbers), self.device, memory)
        return slot.arena

    def lend(self, slot: Slot, arena: Arena, link: Link, channel: Channel) -> bool:
        """See to it that a worker was given an arena, exported for it once; False where its socket takes no more now.

        Raises :class:`DeviceError`.
        """
        if arena.number in link.lent:
            return True
        export: Export = self.layer.export(arena.device, arena.memory)
        if not channel.try_send(Lend(slot.number, arena.number, export.handle), export.fds):
            self.layer.withdraw(export.handle)
            return False
        link.lent[arena.number] = export.handle
        while len(link.lent) > _REMEMBERED:
            del link.lent[next(iter(link.lent))]
        return True

    def withdraw(self, link: Link) -> None:
        """The worker has died, or cannot open what it was given. May be broken off, and done again."""
        if link.probe is not None:
            self.layer.withdraw(link.probe)
            link.probe = None
        while link.lent:
            number, handle = next(iter(link.lent.items()))
            self.layer.withdraw(handle)
            del link.lent[number]

    @staticmethod
    def needs(links: Iterable[Link]) -> tuple[bool, bool]:
        """Whether a version for these workers has to be in device memory, and in the host's: there, too, where nobody
        is there yet, or it is not known what somebody can do."""
        links = list(links)
        return any(link.hopeful for link in links), not links or any(link.state != OPEN for link in links)
