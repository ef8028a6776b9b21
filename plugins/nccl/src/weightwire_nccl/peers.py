"""What the trainer knows of each connection, and of the groups that it has made of them. Plain records."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from weightwire.transport import Event, Have, Joined, Refused, Version
from weightwire_nccl.bell import Bell
from weightwire_nccl.secret import fresh_nonce

if TYPE_CHECKING:
    from weightwire_nccl.board import Board
    from weightwire_nccl.groups import Group
    from weightwire_nccl.link import Link
    from weightwire_nccl.pool import Lease

__all__ = ["Generation", "Generations", "Hall", "Kept", "Peer", "Transfer", "engine_for"]


class Hall:
    """What the thread that pushes and the service thread share.

    ``lock`` guards everything that both know: the workers, what each was told and has said, groups, what is kept. No
    wait for a worker happens under it but ``changed.wait``.
    """

    def __init__(self, place: str, logger: logging.Logger) -> None:
        self.place = place
        self.logger = logger
        self.lock = threading.RLock()  # "with" a Condition is Python code: Ctrl-C in it would leave it locked
        self.changed = threading.Condition(self.lock)
        self.bell = Bell()
        """Has the service thread send what was queued."""
        self.workers: dict[str, Peer] = {}
        self.rounds = itertools.count(1)
        self.events: list[Event] = []
        """What the workers have done, for ``Sender.events``."""


class Kept(NamedTuple):
    """A version that the trainer has a packed copy of."""

    stamp: Version
    base: Version | None
    header: bytes
    nbytes: int
    lease: Lease


class Transfer:
    """A kept version on its way to one worker, in chunks over the control socket."""

    def __init__(self, round_: int, kept: Kept) -> None:
        self.round = round_
        self.kept = kept
        self.at = 0


class Peer:
    """One connection. It has a name as soon as the worker has introduced itself."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.opened = time.monotonic()
        self.nonce = fresh_nonce()
        self.proven = False
        self.joined: Joined | None = None
        self.device = ""
        self.has = Have()  # what it was given, or is about to have
        self.heard = self.opened
        self.silent = False  # it did not answer in time, and has not spoken since
        self.gone = ""  # why, where it is
        self.engaged = 0  # the round that it takes part in
        self.ready = self.got = self.trouble = 0  # the last round of which it said so
        self.reason = ""
        self.transfer: Transfer | None = None
        self.sent: dict[int, tuple[Version, Have]] = {}  # the last transfers, by round, and what it had before each
        self.streams = False
        self.offers: dict[int, Kept] = {}  # what it may fetch, by round
        self.fetching = 0  # the round of what it does fetch

    @property
    def name(self) -> str:
        return self.joined.worker if self.joined else f"a stranger at {self.link.other}"

    @property
    def identity(self) -> tuple[str, int]:
        return (self.joined.worker, self.joined.incarnation) if self.joined else ("", 0)

    def give(self, stamp: Version, base: Version | None) -> None:
        """It is about to have this version."""
        self.has = Have(stamp, base or stamp, self.has.acting)

    def refuse(self, stamp: Version, before: Have, reason: str) -> Refused:
        """It has no room for this version, and stands where it stood before; what the trainer is to hear of it."""
        self.has = Have(stamp, before.base, before.acting)
        worker, incarnation = self.identity
        return Refused(worker=worker, incarnation=incarnation, stamp=stamp, kind="refused", phase="stage", error=reason)


class Generation:
    """A group of the trainer (rank 0) and some workers, in the order of their ranks."""

    def __init__(self, number: int, engine: str, peers: Sequence[Peer], board: Board) -> None:
        self.number = number
        self.engine = engine
        self.peers = tuple(peers)
        self.board = board
        self.group: Group | None = None


class Generations:
    """The groups that can be used again, by membership; the one used longest ago makes way."""

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._known: dict[tuple[str, frozenset[tuple[str, int]]], Generation] = {}

    def find(self, engine: str, peers: Iterable[Peer]) -> Generation | None:
        """The group of just these workers."""
        key = (engine, frozenset(peer.identity for peer in peers))
        found = self._known.pop(key, None)
        if found is not None:
            self._known[key] = found
        return found

    def add(self, generation: Generation) -> list[Generation]:
        """Remember a group; those that make way for it."""
        self._known[generation.engine, frozenset(peer.identity for peer in generation.peers)] = generation
        old = list(self._known.values())[: -self._most]
        for one in old:
            self.remove(one)
        return old

    def remove(self, generation: Generation) -> bool:
        """Forget a group; whether it was known."""
        before = len(self._known)
        self._known = {key: known for key, known in self._known.items() if known is not generation}
        return len(self._known) < before

    def of(self, peer: Peer) -> list[Generation]:
        """Those that a worker is a member of."""
        return [known for known in self._known.values() if peer in known.peers]

    def numbered(self, number: int) -> Generation | None:
        return next((known for known in self._known.values() if known.number == number), None)

    def all(self) -> list[Generation]:
        return list(self._known.values())


def engine_for(ours: str, theirs: Iterable[str]) -> tuple[str, str]:
    """``"nccl"`` or ``"gloo"`` for a group with these GPUs (labels; empty: none), and why not NCCL where we have one.

    NCCL takes one member a GPU.
    """
    labels = [ours, *theirs]
    if not ours:
        return "gloo", ""
    if not all(labels):
        return "gloo", "a worker has no CUDA device"
    if len(set(labels)) < len(labels):
        return "gloo", "two members share a GPU, which NCCL does not allow"
    return "nccl", ""
