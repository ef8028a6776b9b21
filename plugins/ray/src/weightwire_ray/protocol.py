"""What travels between the ends and the mailbox: plain tuples, bytes and references, which Ray pickles by itself."""

from __future__ import annotations

from typing import Any, NamedTuple

from weightwire.transport import Version

__all__ = ["CLOSED", "NEWS", "PROTOCOL", "QUIET", "UNKNOWN", "Facts", "Item", "News", "Told", "told"]

PROTOCOL = 1
"""Grows when ends and mailbox of different releases could not talk to each other."""

# The first word of the mailbox's answer to a worker's long poll.
NEWS, QUIET, UNKNOWN, CLOSED = "news", "quiet", "unknown", "closed"


class Facts(NamedTuple):
    """Where a process is, for whoever watches over it. ``started`` is 0 where that cannot be known."""

    node: str
    pid: int
    started: int
    actor: str = ""


class Item(NamedTuple):
    """One version: header, and references to buckets, see :mod:`weightwire_ray.store`.

    ``node`` is the one into whose store they were put. ``check``: the mailbox there makes the digest that the header
    lacks, for those who fetch the bytes from elsewhere.
    """

    stamp: Version
    base: Version | None
    header: bytes
    buckets: list[Any]
    node: str
    check: bool


Told = tuple[Version | None, Version | None]
"""Which full version and which subset: those a worker has, or those that it is to have."""


class News(NamedTuple):
    """The answer to a worker's long poll. ``at``: when, by the monotonic clock of the mailbox's machine."""

    kind: str
    offer: tuple[Item | None, Item | None] = (None, None)
    at: float = 0.0


def told(offer: tuple[Item | None, Item | None]) -> Told:
    full, subset = offer
    return (full and full.stamp, subset and subset.stamp)
