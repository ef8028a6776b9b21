"""What a push did: one receipt a worker, the phases in seconds, and who was lost."""

from __future__ import annotations

import msgspec

__all__ = ["PushReport", "Receipt"]


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
    """

    version: int
    run: int
    receipts: dict[str, Receipt] = {}
    lost: tuple[str, ...] = ()
    tensors: int = 0
    nbytes: int = 0
    seconds: dict[str, float] = {}
    errors: tuple[str, ...] = ()

    def __str__(self) -> str:
        phases = "  ".join(f"{name} {1e3 * value:.2f} ms" for name, value in self.seconds.items())
        lines = [f"version {self.version}: {self.tensors} tensors, {self.nbytes / 1e6:.2f} MB  {phases}".rstrip()]
        width = max((len(name) for name in self.receipts), default=0)
        for name, receipt in self.receipts.items():
            took = sum(receipt.seconds.values())
            lines.append(f"  {name:<{width}}  {receipt.state:<8} {1e3 * took:9.2f} ms  {receipt.error}".rstrip())
        lines += [f"  {name:<{width}}  lost" for name in self.lost if name not in self.receipts]
        lines += [f"  observer: {error}" for error in self.errors]
        return "\n".join(lines)
