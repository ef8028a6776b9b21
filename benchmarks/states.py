"""The states that are moved, as modules of float32 parameters, and what is looked at in them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import chain

import torch
import xxhash
from torch import nn

__all__ = ["STATES", "Look", "build", "change", "digest", "evenly", "nbytes"]

STATES: dict[str, Callable[[], nn.Module]] = {
    "small": lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(10))),  # 20 tensors, 0.17 MB
    "medium": lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(100))),  # 200 tensors, 105 MB
    "large": lambda: nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(60))),  # 120 tensors, 1 GB
    "many": lambda: nn.Sequential(*(nn.LayerNorm(1024) for _ in range(5000))),  # 10,000 tensors of 4 KB
    # The same things as toys, for runs that only have to show that everything works.
    "toy small": lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))),
    "toy medium": lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))),
    "toy large": lambda: nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))),
    "toy many": lambda: nn.Sequential(*(nn.LayerNorm(16) for _ in range(50))),
}


def evenly(tensors: int, numbers: int) -> str:
    """The name of a state of ``tensors`` tensors of ``numbers`` float32 each, for :func:`build`."""
    return f"{tensors} x {numbers}"


def build(state: str, *, fill: bool = True) -> nn.Module:
    """A state as a module, by its name. Without ``fill`` its memory is not touched, and so takes no room yet."""
    with torch.device("meta"):
        module = STATES[state]() if state in STATES else _even(*map(int, state.split(" x ")))
    module.to_empty(device="cpu")
    if fill:
        pattern = torch.rand(1 << 22)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.flatten().copy_(pattern[: parameter.numel()])
    return module


def _even(tensors: int, numbers: int) -> nn.Module:
    return nn.ParameterList([torch.empty(numbers) for _ in range(tensors)])


def nbytes(module: nn.Module) -> int:
    """Bytes of the state."""
    return sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers()))


@torch.no_grad()
def change(module: nn.Module, sentinel: float) -> None:
    """Change every element in place, as an optimizer would, and set the first one of every tensor to ``sentinel``."""
    tensors = list(module.parameters())
    torch._foreach_add_(tensors, 1.0)
    for tensor in tensors:
        tensor.view(-1)[0] = sentinel


def digest(module: nn.Module) -> str:
    """xxh3-128 of all bytes that the module acts with."""
    state = xxhash.xxh3_128()
    for tensor in module.parameters():
        state.update(tensor.detach().numpy())
    return state.hexdigest()


class Look:
    """Looks at the first element of every tensor, where the module has it now: aliased tensors have moved.

    Reads the memory itself, since indexing 10,000 tensors would take longer than what is measured.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors = list(module.parameters())

    def __call__(self, sentinel: float) -> None:
        wrong = len(self.tensors) - self._holding(sentinel)
        if wrong:
            raise AssertionError(f"{wrong} of {len(self.tensors)} tensors do not hold version {sentinel:g}")

    def before(self, sentinel: float) -> None:
        """Raises where the version is there already: what the trainer has not pushed must not be seen."""
        early = self._holding(sentinel)
        if early:
            raise AssertionError(
                f"{early} of {len(self.tensors)} tensors hold version {sentinel:g} before it was pushed"
            )

    def _holding(self, sentinel: float) -> int:
        read = ctypes.c_float.from_address
        return sum(read(tensor.data_ptr()).value == sentinel for tensor in self.tensors)
