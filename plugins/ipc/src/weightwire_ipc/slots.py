"""The trainer's slots: memory for one version each, and the choice of which one to write next."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from xxhash import xxh3_128_digest

from weightwire_ipc.memory import (
    EPOCH,
    HEADER,
    MAGIC,
    NUMBER,
    WHERE,
    allocate,
    map_shared,
    memfd,
    out_of_files,
    pages,
    reopen,
    seal,
)

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.transport import Version
    from weightwire_ipc.arenas import Arena

__all__ = ["Need", "Plan", "Shape", "Slot", "choose_slot"]

_SPARE_HEADER = 1024  # bytes: metadata may grow a little without a new slot
_SMALL = 1 << 20  # bytes: below this nothing is called wasteful


class Need(NamedTuple):
    """What a version takes, in bytes."""

    payload: int
    header: int


class Shape(NamedTuple):
    """What a slot offers, in bytes: the header area, where the payload starts, and all."""

    start: int
    size: int

    @classmethod
    def of(cls, need: Need) -> Shape:
        """The shape of a new slot."""
        start = pages(HEADER.size + need.header + _SPARE_HEADER)
        return cls(start, start + pages(need.payload))

    def holds(self, need: Need) -> bool:
        return HEADER.size + need.header <= self.start and need.payload <= self.size - self.start

    def wastes(self, need: Need) -> bool:
        return self.size - self.start > max(2 * need.payload, _SMALL)

    def fits(self, need: Need) -> bool:
        return self.holds(need) and not self.wastes(need)


class Slot:
    """Sealed memory for one version. Its number is never used again.

    Attributes:
        idle: versions for which it was not needed.
        arena: where it has memory on a device too; the header never lies there.
        nbytes: of the payload that it holds.
    """

    def __init__(self, number: int, need: Need, *, roomless: bool = False) -> None:
        """``roomless``: memory for the payload is only had when it is asked for. Raises
        :class:`~weightwire.StorageFullError`."""
        self.number = number
        self.shape = Shape.of(need)
        self.idle = self.nbytes = 0
        self.arena: Arena | None = None
        self._roomless = roomless
        try:
            fd = memfd(f"weightwire-slot-{number}")
            try:
                if roomless:
                    allocate(fd, self.shape.start, self.shape.size)
                else:
                    allocate(fd, self.shape.size)
                memory = map_shared(fd, self.shape.size).array(0, self.shape.size)
            except BaseException:
                os.close(fd)
                raise
            self.shared = seal(fd)
        except OSError as exc:
            raise (out_of_files("a version", exc) or exc) from exc
        self._head = memory.data
        self._words = self._head.cast("Q")
        self._bytes = torch.from_numpy(memory)
        self._out: Tensor = self._bytes[:0]
        self._parts: dict[tuple[int, int], Tensor] = {}

    def out(self, nbytes: int) -> Tensor:
        """The memory for a payload of this many bytes, a flat uint8 tensor.

        Raises :class:`~weightwire.StorageFullError` where it is to be had only now, and there is none.
        """
        if self._roomless:
            try:
                fd = reopen(self.shared, os.O_RDWR)
            except OSError as exc:
                raise (out_of_files("a version", exc) or exc) from exc
            try:
                allocate(fd, self.shape.size)
            finally:
                os.close(fd)
            self._roomless = False
        if self._out.numel() != nbytes:
            self._out = self._bytes[self.shape.start : self.shape.start + nbytes]
            self._parts.clear()
        return self._out

    def part(self, start: int, stop: int) -> Tensor:
        """Bytes ``start`` to ``stop`` of what :meth:`out` has given, always as the same tensor."""
        known = self._parts.get((start, stop))
        if known is None:
            known = self._parts[start, stop] = self._out[start:stop]
        return known

    def blank(self) -> None:
        """From now on it holds no version: whoever was told of the old one will find out."""
        self._words[EPOCH] = self._words[NUMBER] = 0

    @property
    def where(self) -> int:
        """Where the payload lies: see :data:`~weightwire_ipc.memory.WHERE`."""
        return self._words[WHERE]

    @where.setter
    def where(self, places: int) -> None:
        self._words[WHERE] = places

    def write_header(self, stamp: Version, header: bytes, where: int = 1) -> None:
        """Say what the payload is. The stamp comes last; all of it under the trainer's lock."""
        end = HEADER.size + len(header)
        if end > self.shape.start:
            raise ValueError(f"header of {len(header)} bytes is larger than was announced")
        self._head[HEADER.size : end] = header
        HEADER.pack_into(self._head, 0, MAGIC, len(header), xxh3_128_digest(header), 0, 0, where)
        self._words[EPOCH], self._words[NUMBER] = stamp

    def close(self) -> None:
        """Give the memory up; it lives on as long as a worker has it. Idempotent."""
        fd, self.shared = self.shared, -1
        if fd < 0:
            return
        os.close(fd)
        self._bytes = self._out = torch.empty(0, dtype=torch.uint8)
        self._parts.clear()
        self.arena = None
        del self._words, self._head


class Plan(NamedTuple):
    """What to do for the next version: write ``use``, or make a new slot (in place of ``instead``), or wait."""

    use: Slot | None = None
    make: bool = False
    instead: Slot | None = None
    patient: bool = False
    """A slot that fits is only leased at the moment: a short wait may be cheaper than a new one."""


def choose_slot(need: Need, free: Sequence[Slot], busy: Iterable[Slot], keep: int, most: int) -> Plan:
    """Pick the slot for a version.

    Args:
        need: what it takes.
        free: slots that hold nothing of use and that no worker leases.
        busy: the others. keep: slots kept at rest. most: slots that there may be.

    A slot that fits is used; where there are few, or none of this size, one is made; one that is too small is replaced
    before memory grows beyond ``keep``, one that is far too large only when nothing else is left.
    """
    busy = list(busy)
    count = len(free) + len(busy)
    fitting = [slot for slot in free if slot.shape.fits(need)]
    if fitting:
        return Plan(use=min(fitting, key=lambda slot: slot.number))
    if count < keep:
        return Plan(make=True)
    small = [slot for slot in free if not slot.shape.holds(need)]
    if small:
        return Plan(make=True, instead=min(small, key=lambda slot: slot.shape.size))
    if count < most:
        patient = any(slot.shape.fits(need) for slot in busy)
        return Plan(make=True, patient=patient)
    if free:
        return Plan(make=True, instead=max(free, key=lambda slot: slot.shape.size))
    return Plan()
