"""Memory for one version, given back when nobody holds it any more."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from weightwire.transport import Delivery
from weightwire.weights.layout import ALIGNMENT

if TYPE_CHECKING:
    from weightwire.transport import Header

__all__ = ["Arena"]


class Arena:
    """``nbytes`` of aligned host memory with a count of holders: the shelf, deliveries, and views that live on."""

    def __init__(self, nbytes: int, idle: Callable[[Arena], None]) -> None:
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self.array = raw[start : start + nbytes]
        self.tensor = torch.from_numpy(self.array)
        self._idle = idle
        self._holders = 0
        self._lock = threading.RLock()  # a finaliser may come in while we hold it

    def hold(self) -> None:
        with self._lock:
            self._holders += 1

    def drop(self) -> None:
        with self._lock:
            self._holders -= 1
            idle = not self._holders
        if idle:
            self._idle(self)

    def deliver(self, header: Header, *, alias: bool) -> Delivery:
        """A delivery over this arena; with ``alias`` it is held until the last view of it has died."""
        self.hold()
        if not alias:
            return Delivery(header, buffer=self.tensor[: header.layout.nbytes], memory=self, release=self.drop)
        # The memoryview in between keeps NumPy from hanging the slices onto our own array: they hang onto `base`.
        base = np.frombuffer(memoryview(self.array), np.uint8)  # type: ignore[arg-type]
        weakref.finalize(base, self.drop).atexit = False
        layout = header.layout
        blocks = [torch.from_numpy(base[start : start + size]) for start, size in zip(layout.starts, layout.sizes)]
        return Delivery(header, blocks=blocks)
