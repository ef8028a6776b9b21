"""Where the blocks of a layout lie in memory that somebody packs them into."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from weightwire.weights.blocks import bits
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.layout import view

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.weights.blocks import Block
    from weightwire.weights.layout import Layout

__all__ = ["Part", "Window", "Windows"]


class Part(NamedTuple):
    """Bytes ``start`` to ``stop`` of a block, and where they go, as flat bytes."""

    block: int
    start: int
    stop: int
    into: Tensor


class Window(NamedTuple):
    """A range of the packed payload in somebody's memory.

    ``into`` are typed tensors for the ``leaves``, which are copied in one go. ``odd`` are whole blocks that are read
    one by one, ``parts`` blocks that are cut, or lie where their dtype must not. ``streams`` are blocks, cut or whole,
    that are gathered, in their order.
    """

    leaves: list[int]
    into: list[Tensor]
    odd: list[tuple[int, Tensor]]
    parts: list[Part]
    streams: list[Part]


class Windows:
    """Windows into the same memory again and again, made once each.

    They are kept as long as the tensor *object* that was given lives; they keep neither it nor its memory alive.
    """

    def __init__(self, layout: Layout, blocks: Sequence[Block]) -> None:
        self._layout = layout
        self._blocks = blocks
        self._kept: dict[int, tuple[weakref.ref[Tensor], int, dict[tuple[int, int], Window]]] = {}

    def of(self, out: Tensor, start: int, stop: int) -> Window:
        """The window for bytes ``start`` to ``stop`` in ``out``. ``ValueError`` where that is no flat uint8 tensor, or
        too small."""
        key, address, all_kept = id(out), out.data_ptr(), self._kept
        kept = all_kept.get(key)
        if kept is None or kept[0]() is not out or kept[1] != address:
            kept = all_kept[key] = (weakref.ref(out, lambda _: all_kept.pop(key, None)), address, {})
        window = kept[2].get((start, stop))
        if window is None:
            window = kept[2][start, stop] = self._make(out, start, stop)
        return window

    def _make(self, out: Tensor, start: int, stop: int) -> Window:
        import torch

        _check(out, start, stop, self._layout.nbytes)
        # Not a view of `out`, which would keep its object alive: another tensor over the same storage.
        flat = torch.empty(0, dtype=torch.uint8, device=out.device)
        flat.set_(out.untyped_storage(), out.storage_offset(), (stop - start,), (1,))
        window = Window([], [], [], [], [])
        for number, first, last in self._layout.within(start, stop):
            block, begin = self._blocks[number], self._layout.starts[number] - start
            into = flat[begin + first : begin + last]
            if block.gathered:
                window.streams.append(Part(number, first, last, into))
            elif last - first < self._layout.sizes[number] or into.storage_offset() % DTYPES[block.written.dtype]:
                window.parts.append(Part(number, first, last, into))
            elif block.plain:
                window.leaves.append(block.leaf)
                window.into.append(view(block.written, into))
            else:
                window.odd.append((number, bits(view(block.written, into))))
        return window


def _check(out: Tensor, start: int, stop: int, nbytes: int) -> None:
    import torch

    if not 0 <= start <= stop <= nbytes:
        raise ValueError(f"bytes {start} to {stop} of a payload of {nbytes}")
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or out.numel() < stop - start:
        raise ValueError(
            f"bytes {start} to {stop} do not go into a tensor of {out.dtype} and shape {tuple(out.shape)}: "
            f"flat uint8 of at least {stop - start} bytes is wanted"
        )
