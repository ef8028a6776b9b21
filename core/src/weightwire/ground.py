"""Which full version subsets lie on, for whom, and which names they must cover. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

from weightwire.errors import PreflightError

if TYPE_CHECKING:
    from weightwire.transport import Version
    from weightwire.weights.layout import Layout

__all__ = ["Ground"]

REMEMBERED = 1000
"""Versions that went to some workers only, of which it is remembered to whom."""


class Ground:
    """A subset lies on the last full version of those who get it, and covers the earlier subsets on that version.

    So the newest full version and the newest subset are always enough for whoever was busy or comes late.
    """

    def __init__(self) -> None:
        self.all: Version | None = None  # the newest full version addressed to everybody
        self.some: dict[str, Version] = {}  # newer ones, addressed to some
        self.layouts: dict[Version, Layout] = {}
        self.covered: dict[Version, set[str]] = {}  # names in the subsets so far, by base
        self.to: dict[Version, frozenset[str]] = {}  # versions that were addressed to some

    def base_for(self, layout: Layout, to: Iterable[str] | None) -> Version:
        """The base of a subset for the workers ``to`` (``None``: all). Raises
        :class:`~weightwire.PreflightError` that says what to push instead."""
        bases = {self.all, *self.some.values()} if to is None else {self.some.get(name, self.all) for name in to}
        if None in bases:
            raise PreflightError("push(partial=True) needs a full version to lie on: push a full one first")
        if len(bases) > 1:
            numbers = sorted(base.number for base in bases if base)
            raise PreflightError(
                f"push(partial=True) to workers whose last full versions differ ({numbers}): push a full one to all of "
                "them first"
            )
        base = next(iter(bases))
        assert base is not None
        self._check(layout, base)
        return base

    def _check(self, layout: Layout, base: Version) -> None:
        full = self.layouts[base]
        unknown = [name for name in layout.names if name not in full.index]
        if unknown:
            raise PreflightError(
                f"push(partial=True) brings names that full version {base.number} lacks: {_some(unknown)}; "
                "push a full one"
            )
        changed = [
            name
            for name, position in layout.index.items()
            if (theirs := full.entries[full.index[name]]).shape != (ours := layout.entries[position]).shape
            or theirs.dtype != ours.dtype
        ]
        if changed:
            raise PreflightError(
                f"push(partial=True) brings names with another shape or dtype than in full version {base.number}: "
                f"{_some(changed)}; push a full one"
            )
        left_out = sorted(self.covered.get(base, set()) - layout.index.keys())
        if left_out:
            raise PreflightError(
                f"push(partial=True) leaves out names of earlier subsets on version {base.number}: {_some(left_out)}; "
                "include them, or push a full version"
            )

    def book(
        self,
        stamp: Version,
        base: Version | None,
        layout: Layout,
        to: frozenset[str] | None,
        present: Container[str] | None = None,
    ) -> None:
        """A version became visible. ``present``: who is there now; of the others in ``to`` nothing is remembered."""
        if base is not None:
            self.covered.setdefault(base, set()).update(layout.names)
        elif to is None:
            self.all, self.some, self.layouts, self.covered = stamp, {}, {stamp: layout}, {}
        else:
            self.layouts[stamp] = layout
            self.some.update({name: stamp for name in to if present is None or name in present})
            self._tidy()
        if to is not None:
            self.to[stamp] = to
            while len(self.to) > REMEMBERED:
                del self.to[next(iter(self.to))]

    def lose(self) -> None:
        """Nobody knows who has the newest version: subsets need a new full one."""
        self.all, self.some, self.layouts, self.covered = None, {}, {}, {}

    def forget(self, worker: str) -> None:
        """It left, was lost, or is a new one of that name: it stands on what was addressed to all."""
        if self.some.pop(worker, None) is not None:
            self._tidy()

    def _tidy(self) -> None:
        live = {self.all, *self.some.values()}
        self.layouts = {base: kept for base, kept in self.layouts.items() if base in live}
        self.covered = {base: kept for base, kept in self.covered.items() if base in live}

    def addressed(self, stamp: Version, workers: Iterable[str]) -> list[str]:
        """Who of ``workers`` a version was meant for."""
        to = self.to.get(stamp)
        return [name for name in workers if to is None or name in to]


def _some(names: Sequence[str], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
