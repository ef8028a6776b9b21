"""xxh3-128 over the bytes of blocks, in order, without padding: what the trainer sends along and the worker checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from weightwire.weights.arrays import array_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["digest_of"]


def digest_of(blocks: Iterable[Tensor]) -> bytes:
    """16 bytes. ``blocks`` are flat uint8 tensors; those on a device are copied to the host one by one."""
    import xxhash

    state = xxhash.xxh3_128()
    for block in blocks:
        state.update(array_of(block.cpu()))  # type: ignore[arg-type]
    return state.digest()
