"""The copy into a slot, on as many cores as torch would use, without its threads.

torch shares each tensor's copy between OpenMP threads, which wait for one another at its end, and after the last one
for more work, by spinning. On cores that workers want as well that costs far more than it gains: a thread that is not
running keeps the others waiting once a tensor, and the spinning goes on for some milliseconds when the workers have
just been woken. Here each thread copies pieces of many tensors until there are none left; nobody waits for one who has
not begun.
"""

from __future__ import annotations

import _thread
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import torch

from weightwire.threads import one_core

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.weights.layout import Layout
    from weightwire.weights.payload import Payload

__all__ = ["Packer", "cut"]

PIECE = 2 * 2**20
"""Bytes of a piece, at least. A thread is not worth its start for much less."""
SHARE = 8
"""Pieces for each thread, about, so that one which gets less of its core leaves the others more."""
ALONE = 2**18, 2**25
"""Bytes of payloads that one thread copies: less are not shared by torch either, and more it had better share."""


def cut(layout: Layout, size: int) -> list[tuple[int, int]]:
    """Ranges of the packed payload, of about ``size`` bytes, that end between blocks; a larger block is one range."""
    starts, pieces, start = layout.starts, [], 0
    while start < layout.nbytes:
        stop = starts[min(bisect_left(starts, start + size), len(starts) - 1)]
        pieces.append((start, stop))
        start = stop
    return pieces


class Packer:
    """Packs payloads for one sender, one after the other."""

    def __init__(self) -> None:
        self._busy: list[threading.Lock] = []  # each is held by a thread while it may copy something

    def pack(self, payload: Payload, out: Tensor, part: Callable[[int, int], Tensor]) -> None:
        """Write a payload to ``out``. ``part(start, stop)``: these bytes of it, always as the same tensor.

        When it returns nothing is read any more. A thread that an interrupt did not let us wait for is waited for
        before the next payload is packed.
        """
        self._outwait()
        nbytes = payload.nbytes
        threads = min(torch.get_num_threads(), nbytes // PIECE) if payload.independent else 1
        pieces = cut(payload.layout, max(PIECE, nbytes // (SHARE * threads))) if threads > 1 else []
        if len(pieces) < max(2 * threads, 2):
            with one_core() if ALONE[0] < nbytes < ALONE[1] else nullcontext():
                payload.pack(out)
            return
        tasks = deque((part(*piece), *piece) for piece in pieces)
        errors: list[Exception] = []
        try:
            for _ in range(1, threads):
                self._busy.append(threading.Lock())
                with suppress(RuntimeError):  # no more threads to be had
                    # Not threading.Thread, whose start waits until it has a core.
                    _thread.start_new_thread(_help, (payload, tasks, self._busy[-1], errors))
            with one_core():
                _copy(payload, tasks)
        finally:
            tasks.clear()
            self._outwait()
        if errors:
            raise errors[0]

    def _outwait(self) -> None:
        while self._busy:
            with self._busy[-1]:
                pass
            self._busy.pop()


def _help(
    payload: Payload, tasks: deque[tuple[Tensor, int, int]], busy: threading.Lock, errors: list[Exception]
) -> None:
    with busy:
        try:
            with one_core():
                _copy(payload, tasks)
        except Exception as exc:
            tasks.clear()
            errors.append(exc)


def _copy(payload: Payload, tasks: deque[tuple[Tensor, int, int]]) -> None:
    while True:
        try:
            task = tasks.popleft()
        except IndexError:
            return
        payload.pack(*task)
