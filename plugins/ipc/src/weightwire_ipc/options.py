"""The options that an ``ipc`` endpoint takes."""

from __future__ import annotations

from typing import Annotated, Literal, Optional

import msgspec

__all__ = ["IpcOptions"]


class IpcOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``ipc://...?slots=3``; all but ``device`` concern the trainer's end only.

    Attributes:
        slots: copies of the payload that are kept at rest. Two: one to act with, one to write.
        max_slots: how many there may be while workers hold on to old ones. Default: ``max(4, workers + 2)``, or two
            more than are kept for workers with versions of their own where those are many.
        device: ``auto``: between two ends on GPUs payloads stay there, as far as that can be. ``cpu``: an end that says
            so has them go through the host.
    """

    slots: Annotated[int, msgspec.Meta(ge=2)] = 2
    max_slots: Optional[Annotated[int, msgspec.Meta(ge=2)]] = None  # noqa: UP045 - resolved at run time on 3.10 too
    device: Literal["auto", "cpu"] = "auto"

    def __post_init__(self) -> None:
        if self.max_slots is not None and self.max_slots < self.slots:
            raise ValueError(f"max_slots={self.max_slots} is less than slots={self.slots}")

    def most(self, workers: int, kept: int = 0) -> int:
        """How many slots there may be at most, with this many workers, and this many slots that have to be kept."""
        return max(4, self.slots, workers + 2, kept + 2) if self.max_slots is None else self.max_slots
