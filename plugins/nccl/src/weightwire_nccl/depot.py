"""The versions that the trainer keeps, and how they come to workers that join late or fall behind: in chunks over the
control socket, sent by the service thread."""

from __future__ import annotations

from typing import NamedTuple

from weightwire.errors import WireError
from weightwire.transport import Shelf, Version, choose
from weightwire_nccl.link import CHUNK
from weightwire_nccl.messages import Abort, Done, Fetch, Offer, Parcel, Trouble
from weightwire_nccl.peers import Hall, Kept, Peer, Transfer

__all__ = ["Announcement", "Depot"]

SENT = 4
"""Transfers that a worker may still complain of: a full version, a subset on it, and the same of what came before."""


class Announcement(NamedTuple):
    """A version that is about to be known. ``served``: those who have its bytes, from this round; ``refused``: those
    who had no room for them, and why."""

    kept: Kept | None
    stamp: Version
    base: Version | None
    header: bytes
    to: frozenset[str] | None
    round: int
    served: tuple[Peer, ...]
    refused: dict[Peer, str]


class Depot:
    """All of it under the hall's lock, but for setting ``news``."""

    def __init__(self, hall: Hall, *, keeps: bool) -> None:
        self._hall = hall
        self.keeps = keeps
        """Whether versions are kept."""
        self._shelf: Shelf[Kept] = Shelf()
        self.news: Announcement | None = None
        """Whoever sets it need not be the one who announces it: the service thread does it, if need be."""

    def announce(self) -> bool:
        """Make the news known: to those who have its bytes by its header, to the others as a whole; if there is any."""
        news, self.news = self.news, None
        if news is None:
            return False
        if news.kept is not None:
            self._shelf.put(news.kept, news.to)
        for peer in news.served:
            if not peer.gone and peer.engaged == news.round:
                peer.engaged = 0
                peer.give(news.stamp, news.base)
                peer.link.send(Done(news.round, news.header))
        for peer, reason in news.refused.items():
            if news.kept is None and not peer.gone:  # or else it is tried again, over the control socket
                self._hall.events.append(peer.refuse(news.stamp, peer.has, reason))
        for peer in self._hall.workers.values():
            self.supply(peer)
        return True

    def supply(self, peer: Peer) -> None:
        """Begin to send what the worker lacks, or stop what it needs no more."""
        if peer.joined is None or peer.gone:
            return
        full, subset = self._shelf.of(peer.name)
        if peer.streams:
            self._offer(peer, full, subset)
            return
        if peer.transfer is not None and peer.transfer.kept not in (full, subset):
            peer.link.send(Abort(peer.transfer.round, 0))
            peer.transfer = None
        if peer.transfer is None and not peer.silent and not peer.engaged:
            kept = choose(peer.has, full, subset)
            if kept is not None:
                peer.transfer = Transfer(next(self._hall.rounds), kept)
                peer.link.send(Parcel(peer.transfer.round, kept.stamp, kept.base, kept.nbytes))

    def send_on(self, peer: Peer) -> None:
        """The next chunk of what is on its way to a worker that has read the last one."""
        transfer = peer.transfer
        assert transfer is not None
        kept = transfer.kept
        if transfer.at < kept.nbytes:
            stop = min(transfer.at + CHUNK, kept.nbytes)
            self._send_bytes(peer, transfer.round, kept, transfer.at, stop)
            transfer.at = stop
            return
        peer.sent = dict([*peer.sent.items(), (transfer.round, (kept.stamp, peer.has))][-SENT:])
        peer.give(kept.stamp, kept.base)
        more = choose(peer.has, *self._shelf.of(peer.name)) is not None
        peer.link.send(Done(transfer.round, kept.header, more))
        peer.transfer = None
        self.supply(peer)

    @staticmethod
    def _send_bytes(peer: Peer, round_: int, kept: Kept, start: int, stop: int) -> None:
        part = kept.lease.buffer[start:stop].cpu()
        peer.link.send_chunk(round_, start, memoryview(part.numpy()))  # type: ignore[arg-type]

    # -- to workers that stream --------------------------------------------------------------------------------------

    def _offer(self, peer: Peer, full: Kept | None, subset: Kept | None) -> None:
        """It fetches what it wants, when it wants it."""
        if not peer.link.idle:  # it has not read the last ones
            return
        while (kept := choose(peer.has, full, subset)) is not None:
            round_ = next(self._hall.rounds)
            peer.offers[round_] = kept
            peer.give(kept.stamp, kept.base)
            peer.link.send(Offer(round_, kept.header))
        old = [r for r, kept in peer.offers.items() if kept not in (full, subset) and r != peer.fetching]
        for round_ in old[:-1]:  # the last may have been taken a moment ago
            del peer.offers[round_]

    def hear_fetch(self, peer: Peer, fetch: Fetch) -> None:
        kept = peer.offers.get(fetch.round)
        if fetch.stop == 0:
            peer.fetching = 0
        elif kept is None:
            peer.link.send(Abort(fetch.ticket, 0))
        elif not 0 <= fetch.start < fetch.stop <= kept.nbytes:
            raise WireError(f"bytes {fetch.start} to {fetch.stop} are asked for, of {kept.nbytes}")
        else:
            peer.fetching = fetch.round
            for start in range(fetch.start, fetch.stop, CHUNK):
                self._send_bytes(peer, fetch.ticket, kept, start, min(start + CHUNK, fetch.stop))

    def hear_of_trouble(self, peer: Peer, trouble: Trouble) -> None:
        """A worker has no room for what is on its way to it, nor then for a subset on it; perhaps for the next
        version. All of it may have been sent before it could say so."""
        transfer = peer.transfer
        if transfer is not None and transfer.round == trouble.round:
            stamp, before = transfer.kept.stamp, peer.has
        elif trouble.round in peer.sent:
            stamp, before = peer.sent[trouble.round]
        else:
            return
        if transfer is not None:
            peer.link.send(Abort(transfer.round, 0))
        peer.transfer = None
        peer.sent.clear()
        subset = self._shelf.of(peer.name)[1]
        stamp = subset.stamp if subset is not None and subset.base == stamp else stamp
        self._hall.events.append(peer.refuse(stamp, before, peer.reason))
        self.supply(peer)

    def forget(self, worker: str) -> None:
        self._shelf.forget(worker)

    def clear(self) -> None:
        self._shelf = Shelf()
