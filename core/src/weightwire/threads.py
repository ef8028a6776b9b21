"""Copies on one core while others work, for backends.

torch shares large copies between OpenMP threads, which spin where they wait for each other. Where an engine's threads,
or workers, want the cores at the same time, that costs more than it gains: with two cores, packing took three to ten
times the processor time, and the receivers waited for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["one_core"]

_program: Any = ctypes.CDLL(None)  # with the OpenMP library that torch has loaded, where it is one


@contextmanager
def one_core() -> Iterator[None]:
    """Let this thread's copies run on one core. Other threads are not affected, as they are by
    ``torch.set_num_threads``; nor is anything where OpenMP is not what torch uses."""
    import torch

    before = torch.get_num_threads()  # also has torch make up its mind about this thread, which it does once
    if before == 1 or not hasattr(_program, "omp_set_num_threads"):
        yield
        return
    try:
        _program.omp_set_num_threads(1)
        yield
    finally:
        _program.omp_set_num_threads(before)
