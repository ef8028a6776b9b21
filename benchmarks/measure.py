"""Contenders take turns (A, B, A, B, ...), so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Contender", "Contest", "Spread", "interleave"]


def nothing() -> None:
    """What a contender does before and after its turn, unless it says otherwise."""


@dataclass(frozen=True)
class Contender:
    """One who takes turns: ``run`` within the clock, ``before`` and ``after`` outside of it.

    ``after`` raises where the work was not done, in full.
    """

    run: Callable[[], object]
    before: Callable[[], object] = nothing
    after: Callable[[], object] = nothing


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Contest:
    """The raw samples of contenders that took turns: ``series[contender][turn]``, in ``unit``."""

    bench: str
    work: str
    series: Mapping[str, Sequence[float]]
    unit: str = "s"
    notes: Mapping[str, float] = field(default_factory=dict)


def interleave(
    bench: str,
    work: str,
    contenders: Mapping[str, Contender],
    *,
    repeat: int,
    warmup: int = 3,
    scale: float = 1.0,
    unit: str = "s",
) -> Contest:
    """``repeat`` turns for each contender, after ``warmup`` that do not count. Seconds times ``scale`` are ``unit``."""
    series: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.disable()  # a collection in the middle of one turn would be luck; all turns are alike without
    try:
        for turn in range(-warmup, repeat):
            for name, contender in contenders.items():
                contender.before()
                begun = time.perf_counter()
                contender.run()
                seconds = time.perf_counter() - begun
                contender.after()
                if turn >= 0:
                    series[name].append(seconds * scale)
    finally:
        gc.enable()
    return Contest(bench, work, series, unit)
