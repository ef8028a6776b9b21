"""Tensors <-> arrays over the same memory, without the side effects that torch's own ways have.

``tensor.numpy()`` keeps a tensor's storage from ever being resized, which is not ours to do to a caller's tensors.
``torch.from_numpy`` warns of arrays that are read-only, as those over memory of others are; that they must not be
written to travels as ``Delivery(writable=False)`` instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["array_of", "tensor_of"]


class _Window:
    """Memory that somebody else owns, for NumPy, which keeps this object with the array."""

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}


def array_of(tensor: Tensor) -> NDArray[np.uint8]:
    """A flat, contiguous uint8 tensor on the CPU as an array."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    return np.asarray(_Window(tensor, tensor.data_ptr(), tensor.numel()))


def tensor_of(array: NDArray[np.uint8]) -> Tensor:
    """A flat uint8 array, also a read-only one, as a tensor with a storage of its own."""
    import torch

    if not array.size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.asarray(_Window(array, array.ctypes.data, array.size)))
