"""What a push did: one receipt a worker, the phases in seconds, and who was lost."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import torch

__all__ = ["PushReport", "Receipt", "peak_memory"]


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker says of one version.

    Attributes:
        worker: its name.
        version: the number of the version.
        state: ``sent`` (announced, no more known), ``staged``, ``applied``, ``refused`` (nothing touched), ``failed``
            (its target raised; the old version acts), ``lost``, ``left`` (said goodbye) or ``stuck`` (missed a
            deadline).
        tensors, nbytes: what it applied.
        seconds: phase -> seconds in the worker.
        digest: xxh3-128 of the applied bytes in hex, where it was asked for.
        error: what went wrong, else empty. Set beside ``applied`` where a hook failed after the commit.
        phase, tensor: where it went wrong.
    """

    worker: str
    version: int
    state: str
    tensors: int = 0
    nbytes: int = 0
    seconds: dict[str, float] = {}
    digest: str = ""
    error: str = ""
    phase: str = ""
    tensor: str = ""


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a push, or of a wait. Prints as a small table.

    Attributes:
        version, run: the number, and the updater's epoch.
        receipts: worker name -> :class:`Receipt`, for each worker that was addressed.
        lost: names of workers that were found lost; each is reported once.
        tensors, nbytes: what was sent. ``nbytes`` counts tied tensors once and padding not at all.
        seconds: phase -> seconds in the trainer.
        errors: what observers raised; contained, and told here.
        memory: the most bytes that this process has had so far: resident (``"host"``), and on each CUDA device that was
            read from.
    """

    version: int
    run: int
    receipts: dict[str, Receipt] = {}
    lost: tuple[str, ...] = ()
    tensors: int = 0
    nbytes: int = 0
    seconds: dict[str, float] = {}
    errors: tuple[str, ...] = ()
    memory: dict[str, int] = {}

    def __str__(self) -> str:
        phases = "  ".join(f"{name} {_time(value)}" for name, value in self.seconds.items())
        size = f"{self.tensors} tensors, {_size(self.nbytes)}  " if self.tensors else ""
        memory = "  ".join(f"peak {name} {_size(value)}" for name, value in self.memory.items())
        lines = ["  ".join(filter(None, (f"version {self.version}: {size}{phases}".rstrip(), memory)))]
        width = max(map(len, self.receipts), default=0)
        for name, receipt in self.receipts.items():
            took = _time(sum(receipt.seconds.values())) if receipt.seconds else ""
            lines.append(f"  {name:<{width}}  {receipt.state:<8} {took:>9}  {receipt.error}".rstrip())
        lines += [f"  {name:<{width}}  lost" for name in self.lost if name not in self.receipts]
        lines += [f"  observer: {error}" for error in self.errors]
        return "\n".join(lines if len(lines) > 1 else [*lines, "  no workers"])


def peak_memory(devices: Iterable[torch.device] = ()) -> dict[str, int]:
    """The most bytes that this process has had so far, by ``"host"`` and CUDA device. Costs under a microsecond."""
    memory = {}
    if resource is not None:
        memory["host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
    for device in devices:
        if device.type == "cuda":
            import torch

            memory[str(device)] = torch.cuda.max_memory_allocated(device)
    return memory


_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in which the system counts a process's peak."""


def _time(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{1e3 * seconds:.2f} ms"
        if seconds >= 1e-3
        else f"{1e6 * seconds:.0f} us"
    )


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"
