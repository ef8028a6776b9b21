"""A worker's view of the trainer's slots."""

from __future__ import annotations

import mmap
import os
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from xxhash import xxh3_128_digest

from weightwire.errors import DigestError, WireError
from weightwire_ipc.mapping import PAGE, Mapping
from weightwire_ipc.memory import HEADER, MAGIC, check_sealed, unwritten

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from weightwire.transport import Version
    from weightwire_ipc.loans import Loan

__all__ = ["MappedSlot"]


class MappedSlot:
    """One of the trainer's slots as this process sees it.

    Two deliveries in ``copy`` mode that come from one slot lie at the same addresses: it is their ``memory``.
    """

    def __init__(self, number: int, start: int, size: int, fd: int) -> None:
        """``fd`` stays the caller's. Raises :class:`~weightwire.WireError` where this is not what was announced."""
        if not 0 < start < size or start % PAGE or size % PAGE:
            raise WireError(f"slot {number} cannot be laid out like this: start {start}, size {size}")
        check_sealed(fd, size)
        self.number = number
        self.start, self.size = start, size
        self.where = 0  # of the payload of the header that was read last
        self._head = mmap.mmap(fd, start, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._buffer: Tensor | None = None
        self.spare: list[Loan] = []  # what was lent and came back as it was: no more than one
        self.fd = os.dup(fd)

    def header(self, stamp: Version) -> bytes | None:
        """The header, under a lease; ``None`` where the slot does not hold this version any more.

        Raises :class:`~weightwire.DigestError`.
        """
        magic, length, digest, epoch, number, self.where = HEADER.unpack_from(self._head)
        if (epoch, number) != stamp:
            return None
        header = self._head[HEADER.size : min(HEADER.size + length, self.start)]
        if magic != MAGIC or len(header) != length or xxh3_128_digest(header) != digest:
            raise DigestError(f"the header of version {number} in slot {self.number} is damaged")
        return header

    @cached_property
    def _payload(self) -> NDArray[np.uint8]:
        """To write to it would be fatal."""
        mapping = Mapping(self.fd, self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        return mapping.array(self.start, self.size)

    def map_private(self) -> Mapping:
        """A mapping of the slot of which nobody sees what is written to it (copy on write)."""
        return Mapping(self.fd, self.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def take_back(self, loan: Loan) -> None:
        """Nobody looks at it any more. Where its mapping shows what the slot holds it will do so again: to map anew
        costs a page fault for each page, and to unmap more than to ask."""
        if self.fd >= 0 and not self.spare and unwritten(loan.mapping):
            self.spare.append(loan)

    def buffer(self, nbytes: int) -> Tensor:
        """The payload, always at the same place. To write to it would be fatal."""
        if self._buffer is None or self._buffer.numel() != nbytes:
            self._buffer = torch.from_numpy(self._payload[:nbytes])
        return self._buffer

    def copy_to(self, array: NDArray[np.uint8]) -> None:
        """The payload, into memory of this process's own."""
        array[:] = self._payload[: array.size]

    def close(self) -> None:
        """Let go of the descriptor; mappings go when the last tensor over them does. Idempotent."""
        self.spare.clear()
        fd, self.fd = self.fd, -1  # no call between these lines: Ctrl-C would lose the descriptor
        if fd >= 0:
            os.close(fd)
