"""The bars of benchmarks.md as data, and how measured samples are held against them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from measure import Contest, Spread

__all__ = ["BARS", "Bar", "Verdict", "judge"]


@dataclass(frozen=True)
class Bar:
    """What ``measured`` may cost in the contest ``bench``, ``work``.

    Attributes:
        against: the contender that it is held against; ``None``: nobody, the limit is in the contest's unit.
        how: ``"times"`` the other at most, ``"faster"`` than the other by that factor at least, ``"more"`` than the
            other at most (in the contest's unit), or ``"is"`` where there is none.
        limit: ``None``: shown, and not held against anything.
        unit: of the limit; a contest that is measured in another one is an error, not a bar that is easily reached.
    """

    bench: str
    work: str
    measured: str
    against: str | None
    how: str
    limit: float | None
    unit: str = "times"


def times(bench: str, work: str, measured: str, against: str, limit: float | None) -> Bar:
    return Bar(bench, work, measured, against, "times", limit)


def faster(bench: str, work: str, measured: str, against: str, limit: float | None) -> Bar:
    return Bar(bench, work, measured, against, "faster", limit)


def at_most(bench: str, work: str, measured: str, limit: float, unit: str) -> Bar:
    return Bar(bench, work, measured, None, "is", limit, unit)


PEERS = SHARED, PROCESS = "TorchRL SharedMem", "TorchRL MultiProcess"
GLOO_WORKS = [f"{state}, {workers}" for state in ("medium", "large") for workers in ("1 worker", "4 workers")]
BYTES = ("small", "medium", "large", "many")

BARS = (
    times("B1", "large, 4 workers", "ipc alias", "copy_, 2 threads", 1.3),
    times("B1", "large, 4 workers", "ipc copy", "copy_, 2 threads", None),
    faster("B2", "medium, 4 workers", "ipc alias", SHARED, 5),
    faster("B2", "medium, 4 workers", "ipc alias", PROCESS, 25),
    faster("B2", "medium, 4 workers", "ipc copy", SHARED, None),
    faster("B2", "medium, 4 workers", "ipc copy", PROCESS, None),
    faster("B2", "large, 4 workers", "ipc alias", SHARED, 4),
    faster("B2", "large, 4 workers", "ipc alias", PROCESS, 12),
    faster("B2", "large, 4 workers", "ipc copy", SHARED, None),
    faster("B2", "large, 4 workers", "ipc copy", PROCESS, None),
    times("B3", "small, 1 worker", "ipc alias", "bare floor", 1.5),
    times("B3", "small, 1 worker", "ipc copy", "bare floor", None),
    faster("B3", "small, 1 worker", "ipc alias", SHARED, 6),
    faster("B3", "small, 1 worker", "ipc alias", PROCESS, 50),
    faster("B3", "small, 1 worker", "ipc copy", SHARED, None),
    faster("B3", "small, 1 worker", "ipc copy", PROCESS, None),
    times("B3", "small, 4 workers", "ipc alias", "bare floor", None),
    times("B3", "small, 4 workers", "ipc copy", "bare floor", None),
    faster("B3", "small, 4 workers", "ipc alias", SHARED, 8),
    faster("B3", "small, 4 workers", "ipc alias", PROCESS, 60),
    faster("B3", "small, 4 workers", "ipc copy", SHARED, None),
    faster("B3", "small, 4 workers", "ipc copy", PROCESS, None),
    # What the floor itself reaches of these bars.
    *(
        faster("B3", work, "bare floor", peer, None)
        for work in ("small, 1 worker", "small, 4 workers")
        for peer in PEERS
    ),
    times("B4", "large, 8 workers, alias", "ipc alias, 8", "ipc alias, 1", 1.25),
    times("B4", "large, 8 workers, alias", "bare floor, 8", "bare floor, 1", None),
    times("B4", "large, 8 workers, copy", "ipc copy, 8", "ipc copy, 1", None),
    times("B4", "medium, 16 workers, alias", "ipc alias, 16", "ipc alias, 1", 1.6),
    times("B4", "medium, 16 workers, alias", "bare floor, 16", "bare floor, 1", None),
    times("B4", "medium, 16 workers, copy", "ipc copy, 16", "ipc copy, 1", None),
    *(at_most("B5", backend, "pull()", 2.0, "us") for backend in ("vanilla", "ipc", "ray", "nccl")),
    times("B6", "large, 4 actors, alias", "ray alias", "raw ray.put", 1.8),
    faster("B6", "large, 4 actors, alias", "ray alias", "ray.put(state_dict)", 20),
    faster("B6", "large, 4 actors, alias", "ray alias", "TorchRL Ray", 5),
    *(times("B7", work, "nccl staged", "pack, broadcast, unpack", 1.1) for work in GLOO_WORKS),
    # The strict reading: as the other one, until every policy acts with it.
    *(times("B7", work, "nccl applied", "pack, broadcast, unpack", 1.1) for work in GLOO_WORKS),
    *(times("B7", work, "nccl staged", "raw broadcast", None) for work in GLOO_WORKS),
    *(faster("B7", work, "nccl applied", "TorchRL Distributed", 2) for work in GLOO_WORKS),
    at_most("B8", "small", "vanilla inline", 60.0, "us"),
    times("B8", "medium", "vanilla inline", "_foreach_copy_", 1.1),
    times("B8", "large", "vanilla inline", "_foreach_copy_", 1.1),
    times("B8", "many", "vanilla inline", "_foreach_copy_", 2.0),
    *(faster("B8", state, "vanilla inline", "load_state_dict", 1.0) for state in BYTES),
    *(faster("B8", state, "vanilla inline", "TorchRL Vanilla", 1.0) for state in BYTES),
    at_most("B9", "large, 8 workers, alias, in all", "ipc", 2.0, "copies"),  # the slots that b9 asks for
    at_most("B9", "large, alias, each further worker", "ipc", 5.0, "% of a copy"),
    # The strict reading: nothing that the workers give back is set off against what Weightwire takes.
    at_most("B9", "large, untouched policies, 8 workers, alias, in all", "ipc", 2.0, "copies"),
    at_most("B9", "large, untouched policies, alias, each further worker", "ipc", 5.0, "% of a copy"),
    Bar("B10", "start", "import weightwire", "bare Python", "more", 60.0, "ms"),
    at_most("B10", "start", "weightwire backends", 200.0, "ms"),
    at_most("B10", "torch and ray imported", "import weightwire", 0.0, "modules"),
    at_most("B10", "torch and ray imported", "weightwire backends", 0.0, "modules"),
    at_most("B11", "many, 1 worker", "ipc copy", 5.0, "us"),
    at_most("B11", "many, 1 worker", "ipc alias", 5.0, "us"),
    times("C4", "the demo, 2 workers", "with a push", "without", None),
)


@dataclass(frozen=True)
class Verdict:
    """A bar, what was measured, the other's measure, and the result that is held against the limit.

    ``failed`` is set, and ``result`` is not, where the other one did not do the work.
    """

    bar: Bar
    unit: str
    measured: Spread
    against: Spread | None
    result: Spread | None
    failed: str = ""

    @property
    def reached(self) -> bool | None:
        """``None`` where there is no limit, or nothing to hold against it. The median counts."""
        if self.bar.limit is None or self.result is None:
            return None
        if self.bar.how == "faster":
            return self.result.median >= self.bar.limit
        return self.result.median <= self.bar.limit


RESULTS: dict[str, Callable[[float, float], float]] = {
    "times": lambda mine, theirs: mine / theirs,
    "faster": lambda mine, theirs: theirs / mine,
    "more": lambda mine, theirs: mine - theirs,
}


def judge(contests: Iterable[Contest]) -> list[Verdict]:
    """Hold every contest against its bars. Ratios and differences are taken turn by turn, then their median."""
    by_work = {(contest.bench, contest.work): contest for contest in contests}
    verdicts = []
    for bar in BARS:
        contest = by_work.get((bar.bench, bar.work))
        if contest:
            if bar.how in ("is", "more") and bar.unit != contest.unit:
                raise ValueError(f"{bar.bench}, {bar.work}: the limit is in {bar.unit}, the contest in {contest.unit}")
            measured = contest.series[bar.measured]
            if bar.against in contest.failed:
                why = contest.failed[bar.against]
                verdicts.append(Verdict(bar, contest.unit, Spread.of(measured), None, None, why))
                continue
            other = contest.series[bar.against] if bar.against else None
            result = list(measured)
            if other:
                result = [RESULTS[bar.how](mine, theirs) for mine, theirs in zip(measured, other, strict=True)]
            against = Spread.of(other) if other else None
            verdicts.append(Verdict(bar, contest.unit, Spread.of(measured), against, Spread.of(result)))
    return verdicts
