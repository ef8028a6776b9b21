"""Tensors that are made, or brought together, only when they are read: piece by piece, each once, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from weightwire.weights.scaled import amax_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Feed", "Gather", "Piece", "Want", "gathered", "whole_piece"]


class Want(NamedTuple):
    """A tensor of a state, by its position; ``amax``: the largest magnitude in it, too, with its first piece."""

    leaf: int
    amax: bool = False


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of a row-major tensor, flat, in memory that nobody else writes to."""

    leaf: int
    start: int
    stop: int
    flat: Tensor
    amax: Tensor | None = None


Gather = Callable[[Sequence[Want]], "Iterator[Piece]"]
"""What is wanted -> its pieces, in that order."""


class Feed:
    """Reads forward through pieces, of which it holds one; to go back is to gather again."""

    def __init__(self, wants: Sequence[Want], gather: Gather) -> None:
        self._wants = wants
        self._gather = gather
        self._order = {want.leaf: n for n, want in enumerate(wants)}
        self._pieces: Iterator[Piece] | None = None
        self._piece: Piece | None = None
        self._passed = (0, 0)  # up to where pieces have been handed out: the want, and its elements

    def read(self, leaf: int, first: int, last: int, take: Callable[[Tensor, int], None]) -> None:
        """``take(values, position of the first of them)`` for each piece of elements ``first`` to ``last``. They are
        to be forgotten when it returns."""
        while first < last:
            piece = self._find(leaf, first)
            stop = min(last, piece.stop)
            take(piece.flat[first - piece.start : stop - piece.start], first)
            del piece  # before the next one is asked for
            first = stop

    def amax(self, leaf: int) -> Tensor:
        """The largest magnitude in a tensor of which it is wanted."""
        amax = self._find(leaf, 0).amax
        assert amax is not None
        return amax

    def close(self) -> None:
        """What was begun ahead is ended, and nothing of the tensors read any more."""
        pieces, self._pieces, self._piece = self._pieces, None, None
        if pieces is not None:
            pieces.close()  # type: ignore[attr-defined]

    def _find(self, leaf: int, element: int) -> Piece:
        order, piece = self._order[leaf], self._piece
        if piece is not None and piece.leaf == leaf and piece.start <= element < piece.stop:
            return piece
        del piece
        if self._pieces is None or (order, element) < self._passed:
            self.close()
            self._pieces = self._gather(self._wants[order:])
        while True:
            self._piece = None
            self._piece = found = next(self._pieces)
            self._passed = (self._order[found.leaf], found.stop)
            if found.leaf == leaf and found.start <= element < found.stop:
                return found
            del found


def gathered(tensor: Tensor) -> Tensor:
    """All of a DTensor (every rank of it has to come here at the same time), and of what is made when it is read; any
    other tensor as it is."""
    import torch

    if not hasattr(tensor, "full_tensor"):
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        whole: Tensor = tensor.full_tensor()
        return whole


def whole_piece(want: Want, tensor: Tensor) -> Piece:
    """All of a tensor as one piece."""
    whole = gathered(tensor).detach().contiguous()
    amax = amax_of(whole) if want.amax else None
    # Not view(-1), which leaves any stride to a tensor of one element.
    return Piece(want.leaf, 0, whole.numel(), whole.as_strided((whole.numel(),), (1,)), amax)
