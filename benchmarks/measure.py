"""Contenders take turns (A, B, A, B, ...), so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import gc
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["PATIENCE", "Contender", "Contest", "Hung", "NoRoomError", "Plan", "Spread", "bounded", "interleave"]

PATIENCE = 120.0  # seconds that anything may take
FEWEST = 3  # turns that a contest has at least, however slow one of them is


@dataclass(frozen=True)
class Plan:
    """How much is measured: ``repeat`` turns of each contender; ``quick``: of toys, to see that everything works."""

    repeat: int = 7
    quick: bool = False

    def state(self, name: str) -> str:
        """The state to use where the benchmark asks for ``name``."""
        return f"toy {name}" if self.quick else name

    def workers(self, count: int) -> int:
        return min(count, 2) if self.quick else count

    def turns(self, times: int) -> int:
        """Turns of a work that is so small that it takes ``times`` as many."""
        return self.repeat * (1 if self.quick else times)

    def warmup(self, count: int) -> int:
        return min(count, 1) if self.quick else count

    def need(self, work: str, gigabytes: float) -> None:
        """Raises :class:`NoRoomError` where less memory is free: the kernel would kill somebody in the middle."""
        until = time.monotonic() + RETURN
        while (free := available() / 1e9) < gigabytes and not self.quick and time.monotonic() < until:
            time.sleep(0.2)
        if not self.quick and free < gigabytes:
            raise NoRoomError(f"{work}: needs {gigabytes:g} GB of free memory, and there are {free:.1f} GB")


RETURN = 30.0
"""Seconds in which the kernel has taken back what the processes of the work before had."""


class NoRoomError(Exception):
    """A work was not begun, because there is not enough memory for all its contenders at once."""


def available() -> int:
    """Bytes that new processes can have without swapping."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def nothing() -> None:
    """What a contender does before and after its turn, unless it says otherwise."""


@dataclass(frozen=True)
class Contender:
    """One who takes turns: ``run`` within the clock, ``before`` and ``after`` outside of it.

    ``after`` raises where the work was not done, in full. What a ``peer`` raises is recorded, and it takes no more
    turns; what one of ours raises ends the run.
    """

    run: Callable[[], object]
    before: Callable[[], object] = nothing
    after: Callable[[], object] = nothing
    peer: bool = False

    def once(self) -> float:
        """One turn: the seconds that ``run`` takes."""
        with bounded():
            self.before()
            begun = time.perf_counter()
            self.run()
            seconds = time.perf_counter() - begun
            self.after()
        return seconds


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some samples."""

    median: float
    low: float
    high: float
    turns: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high, len(samples))


@dataclass(frozen=True)
class Contest:
    """The raw samples of contenders that took turns: ``series[contender][turn]``, in ``unit``.

    Attributes:
        at: where the contest is a point of a curve: its place on the axis of ``bench``.
        failed: peers that did not do the work, and what happened instead. They have no series.
        seconds: that the whole contest took, what is outside of the clock included.
    """

    bench: str
    work: str
    series: Mapping[str, Sequence[float]]
    unit: str = "s"
    at: float | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class Hung(BaseException):
    """A wait took longer than :data:`PATIENCE`. No ``Exception``: some peers log those and wait on."""


@contextmanager
def bounded(seconds: float = PATIENCE) -> Iterator[None]:
    """Raise :class:`Hung` in the main thread where the block takes longer. Not amid a call into C that holds on."""

    def ring(*_: object) -> None:
        raise Hung(f"it took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interleave(
    bench: str,
    work: str,
    contenders: Mapping[str, Contender],
    *,
    repeat: int,
    warmup: int = 3,
    budget: float = 90.0,
    scale: float = 1.0,
    unit: str = "s",
    at: float | None = None,
) -> Contest:
    """``repeat`` turns for each contender, after ``warmup`` that do not count. Seconds times ``scale`` are ``unit``.

    After ``budget`` seconds no turn is begun any more, except for the first few.
    """
    series: dict[str, list[float]] = {name: [] for name in contenders}
    failed: dict[str, str] = {}
    started = time.perf_counter()
    gc.collect()
    gc.disable()  # a collection in the middle of one turn would be luck; all turns are alike without
    try:
        for turn in range(-warmup, repeat):
            if turn >= FEWEST and time.perf_counter() - started > budget:
                break
            for name, contender in contenders.items():
                if name not in failed:
                    try:
                        seconds = contender.once()
                    except (Exception, Hung) as error:
                        if not contender.peer:
                            raise
                        failed[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
                        continue
                    if turn >= 0:
                        series[name].append(seconds * scale)
    finally:
        gc.enable()
    done = {name: samples for name, samples in series.items() if name not in failed}
    return Contest(bench, work, done, unit, at, failed, time.perf_counter() - started)
