"""The mailbox: a small actor on the updater's node, through which the ends find and hear one another.

It holds references, never bytes: the newest versions for each worker, the workers that are there, and what the updater
has not heard yet. (Bytes pass through it only where it makes the digest of a version that a worker of another node
fetches.) Both sides ask and wait ("long poll"), so that nobody needs to be reached from outside. It lives no longer
than the updater's process; when it dies alone, the updater makes it again and the workers come back by themselves.

A worker is lost when the kernel says that its process is gone (on this node, within :data:`LOOK`), when Ray says that
its actor died (elsewhere), or when it was silent for :data:`SILENT` seconds. One that is stopped on this node is not
lost: the deadlines of the trainer find it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import count

import ray
from ray._private.state import actors  # what `ray list actors` shows; its public form needs the dashboard

from weightwire import wire
from weightwire.transport import Event, Left, Lost, Shelf, Staged, Version
from weightwire_ray.process import gone, started, stopped
from weightwire_ray.protocol import CLOSED, NEWS, PROTOCOL, QUIET, UNKNOWN, Facts, Item, News, Told, told
from weightwire_ray.store import digest_of

__all__ = ["LOOK", "SILENT", "Mailbox"]

LOOK = 0.25
"""Seconds between looks at the processes of this node; actors on other nodes are asked for every fourth time."""
SILENT = 10.0
"""Seconds of silence after which a worker counts as lost, and an old holder of a name as no hindrance. Long polls of a
worker end, and so begin again, within a fifth of it."""
RETURN = 5.0
"""Seconds in which workers come back to a mailbox that was made again; they look for it twice a second."""
GATHER = 0.0005
"""Seconds in which more events may come and share an answer: a call costs about as much."""
REMEMBERED = 1000
"""Goodbyes that overtook their hello: Ray does not keep the order of calls to an async actor."""
ANSWER = 1.5
"""Seconds that a worker whose name somebody else wants has to show that it lives."""


class Bell:
    """Wakes everybody who waits for it at the moment."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, until: float) -> None:
        """Returns at the ring, or when ``time.monotonic()`` is ``until``."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(future, max(0.0, until - time.monotonic()))
        finally:
            self._waiting.discard(future)


class Peer:
    """A worker that has joined."""

    def __init__(self, worker: str, incarnation: int, facts: Facts, local: bool) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.facts = facts
        self.local = local  # its process can be seen from here
        self.bell = Bell()
        self.spoke = Bell()
        self.polls = 0
        self.staged: Told = (None, None)
        self.heard = time.monotonic()
        self.asked = False  # whether it is to show that it lives

    def speak(self) -> None:
        self.heard = time.monotonic()
        self.polls += 1
        self.asked = False
        self.spoke.ring()


class Mailbox:
    """Runs as an async actor: methods interleave at ``await`` only."""

    def __init__(self, epoch: int, owner: Facts) -> None:
        self._epoch = epoch
        self._owner = owner
        self._node: str = ray.get_runtime_context().get_node_id()
        self._watched = owner.started != 0 and started(owner.pid) == owner.started  # else it is in another container
        self._shelf: Shelf[Item] = Shelf()
        self._edition = 0
        self._digests: dict[Version, asyncio.Future[bytes]] = {}
        self._peers: dict[str, Peer] = {}
        self._parted: deque[tuple[str, int]] = deque(maxlen=REMEMBERED)
        self._events: deque[tuple[int, str, int, bytes]] = deque()
        self._number = 0
        self._owner_bell = Bell()
        self._owner_spoke = Bell()
        self._owner_polls = 0
        self._challenged = False
        self._awaited: dict[str, int] = {}
        self._awaited_until = 0.0
        self._closed = False
        self._wanted = False  # by an updater that is to have this place when we have closed
        self._left = Bell()
        self._watching: asyncio.Task[None] | None = None

    # -- for the updater ---------------------------------------------------------------------------------------------

    async def attend(self, heard: int, patience: float) -> list[tuple[int, str, int, bytes]]:
        """Events after number ``heard``, which is forgotten with all before it; waits for one."""
        self._start()
        self._owner_polls += 1
        self._challenged = False
        self._owner_spoke.ring()
        until = time.monotonic() + patience
        while self._events and self._events[0][0] <= heard:
            self._events.popleft()
        while not self._events and not self._challenged and not self._closed and time.monotonic() < until:
            await self._owner_bell.wait(until)
            await asyncio.sleep(GATHER)
        return [event for event in self._events if event[0] > heard]

    async def put(
        self, item: Item, to: list[str] | None, edition: int, heard: int
    ) -> list[tuple[int, str, int, bytes]] | None:
        """``item`` is now the newest version for these workers (``None``: all). Answers as :meth:`attend` does, or with
        ``None`` where an earlier edition of the shelf is missing here."""
        if edition > self._edition + 1:
            return None
        if edition == self._edition + 1:
            self._edition = edition
            self._shelf.put(item, to)
            self._ring(self._peers if to is None else to)
        return await self.attend(heard, 0.0)

    async def restore(
        self, contents: list[tuple[Item, list[str] | None]], present: dict[str, int], edition: int
    ) -> None:
        """What this mailbox should hold, and who should be there: it is new, or may have missed something. Who does not
        come back is lost."""
        self._start()
        self._awaited = {name: number for name, number in present.items() if name not in self._peers}
        self._awaited_until = time.monotonic() + RETURN
        if edition > self._edition:
            self._edition = edition
            self._shelf = Shelf()
            for item, to in contents:
                self._shelf.put(item, to)
            self._ring(self._peers)

    async def close(self, patience: float) -> bool:
        """No more will come. Returns when every worker that is there was told, or at the end of patience: then, where
        some were not, this mailbox stays until they are, or somebody else wants its place."""
        self._closed = True
        self._owner_bell.ring()
        until = time.monotonic() + patience
        for peer in self._peers.values():
            peer.bell.ring()
        while self._peers and time.monotonic() < until:
            await self._left.wait(until)
        return not self._peers

    async def challenge(self, patience: float) -> tuple[bool, int]:
        """For whoever wants this place: whether its owner shows that it lives, and its epoch."""
        self._start()
        if self._closed:
            self._wanted = True
        seen, until = self._owner_polls, time.monotonic() + patience
        self._challenged = True
        self._owner_bell.ring()
        while self._owner_polls == seen and not self._closed and time.monotonic() < until:
            await self._owner_spoke.wait(until)
        return self._owner_polls != seen and not self._closed, self._epoch

    # -- for the workers ---------------------------------------------------------------------------------------------

    async def join(self, protocol: int, worker: str, incarnation: int, hello: bytes, facts: Facts) -> tuple[str, str]:
        """A worker says hello, or comes back. ``("", "")``, or what is wrong: its kind, and a text."""
        self._start()
        if protocol != PROTOCOL:
            return "protocol", (
                f"the updater speaks protocol {PROTOCOL}, this worker {protocol}: install one version of "
                "weightwire-ray on all nodes"
            )
        while (other := self._peers.get(worker)) is not None:
            if other.incarnation == incarnation:
                self._drop(other)
            elif await self._lives(other):
                return "name", (
                    f"another live worker is called {worker!r} (process {other.facts.pid}); give each a name of its own"
                )
            else:
                self._lose(other, f"process {other.facts.pid} died without a goodbye, and came back")
        if (worker, incarnation) in self._parted:
            return "", ""
        local = facts.node == self._node and facts.started != 0 and started(facts.pid) == facts.started
        peer = self._peers[worker] = Peer(worker, incarnation, facts, local)
        before = self._awaited.pop(worker, incarnation)
        if before != incarnation:
            self._miss(worker, before)
        self._say(peer, hello)
        return "", ""

    async def news(self, worker: str, incarnation: int, known: Told, patience: float) -> News:
        """What there is for a worker beyond ``known``, which it has fetched and can apply by itself; waits for it."""
        peer = self._peers.get(worker)
        if peer is None or peer.incarnation != incarnation:
            return News(UNKNOWN)
        peer.speak()
        for stamp in known:
            if stamp is not None and stamp not in peer.staged:
                self._say(peer, Staged(worker=worker, incarnation=incarnation, stamp=stamp))
        peer.staged = known
        until = time.monotonic() + patience
        while True:
            if self._peers.get(worker) is not peer:
                return News(UNKNOWN)
            offer = self._shelf.of(worker)
            if told(offer) != known:
                return News(NEWS, offer, time.monotonic())
            if self._closed:
                return News(CLOSED)
            if peer.asked or time.monotonic() >= until:
                return News(QUIET)
            await peer.bell.wait(until)

    async def beat(self, worker: str, incarnation: int) -> None:
        """A worker that is busy fetching lives."""
        peer = self._peers.get(worker)
        if peer is not None and peer.incarnation == incarnation:
            peer.speak()

    async def report(self, worker: str, incarnation: int, event: bytes) -> None:
        """What became of a version in a worker."""
        peer = self._peers.get(worker)
        if peer is not None and peer.incarnation == incarnation:
            self._say(peer, event)

    async def leave(self, worker: str, incarnation: int) -> None:
        """Goodbye."""
        peer = self._peers.get(worker)
        if peer is None or peer.incarnation != incarnation:
            self._parted.append((worker, incarnation))
        else:
            self._drop(peer)
            self._shelf.forget(worker)
            if not self._closed:
                self._say(peer, Left(worker=worker, incarnation=incarnation))

    async def digest(self, stamp: Version) -> bytes | None:
        """The digest of a version's bytes as they lie in this node's store, for those who fetch them from there.
        ``None`` where there is something newer."""
        kept = {item.stamp: item for item in self._shelf.kept()}
        self._digests = {known: task for known, task in self._digests.items() if known in kept}
        if stamp not in kept:
            return None
        if stamp not in self._digests:
            self._digests[stamp] = asyncio.ensure_future(_digest(kept[stamp]))
        try:
            return await asyncio.shield(self._digests[stamp])
        except Exception:
            self._digests.pop(stamp, None)  # the next one who asks may have more luck
            raise

    async def newest(self, worker: str) -> Told:
        """The versions that this worker is to have."""
        return told(self._shelf.of(worker))

    # -- who is there ------------------------------------------------------------------------------------------------

    def _say(self, peer: Peer, event: Event | bytes) -> None:
        self._queue(peer.worker, peer.incarnation, event if isinstance(event, bytes) else wire.encode_event(event))

    def _miss(self, worker: str, incarnation: int) -> None:
        """A worker died while there was no mailbox to see it."""
        reason = "it did not come back after the mailbox was made again"
        self._queue(worker, incarnation, wire.encode_event(Lost(worker=worker, incarnation=incarnation, reason=reason)))

    def _queue(self, worker: str, incarnation: int, data: bytes) -> None:
        """Put an event into the updater's queue."""
        self._number += 1
        self._events.append((self._number, worker, incarnation, data))
        self._owner_bell.ring()

    def _ring(self, workers: Iterable[str]) -> None:
        for worker in workers:
            if worker in self._peers:
                self._peers[worker].bell.ring()

    def _lose(self, peer: Peer, reason: str) -> None:
        if self._peers.get(peer.worker) is not peer:
            return
        self._drop(peer)
        self._shelf.forget(peer.worker)
        self._say(peer, Lost(worker=peer.worker, incarnation=peer.incarnation, reason=reason))

    def _drop(self, peer: Peer) -> None:
        if self._peers.get(peer.worker) is peer:
            del self._peers[peer.worker]
        peer.bell.ring()
        self._left.ring()

    async def _lives(self, peer: Peer) -> bool:
        """Whether a worker lives whose name another one wants. Those that do are asked, and answer at once."""
        if await self._gone(peer):
            return False
        polls, until = peer.polls, time.monotonic() + ANSWER
        peer.asked = True
        peer.bell.ring()
        while peer.polls == polls and self._peers.get(peer.worker) is peer and time.monotonic() < until:
            await peer.spoke.wait(min(until, time.monotonic() + LOOK))
        return self._peers.get(peer.worker) is peer

    def _start(self) -> None:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        """Look after the processes of this node, the updater's among them, and after those that fall silent."""
        for look in count():
            await asyncio.sleep(LOOK)
            if self._watched and gone(self._owner.pid, self._owner.started):
                os._exit(1)  # its forked children may keep Ray from noticing
            if self._closed and (self._wanted or not self._peers):
                ray.kill(ray.get_runtime_context().current_actor)
            now = time.monotonic()
            while self._awaited and now > self._awaited_until:
                self._miss(*self._awaited.popitem())
            for peer in list(self._peers.values()):
                pid, node = peer.facts.pid, peer.facts.node
                if (peer.local or look % 4 == 0) and await self._gone(peer):
                    self._lose(peer, f"process {pid} on node {node[:8]} died without a goodbye")
                elif now - peer.heard > SILENT and peer.local and stopped(pid):
                    peer.heard = now
                elif now - peer.heard > SILENT:
                    self._lose(peer, f"process {pid} on node {node[:8]} said nothing for {SILENT:.0f} s")

    async def _gone(self, peer: Peer) -> bool:
        """Whether a worker's process is known to have ended."""
        if peer.local:
            return gone(peer.facts.pid, peer.facts.started)
        return bool(peer.facts.actor) and await asyncio.to_thread(_actor_gone, peer.facts)


async def _digest(item: Item) -> bytes:
    buckets = [await reference for reference in item.buckets]
    return await asyncio.to_thread(digest_of, buckets, wire.decode_header(item.header).layout)


def _actor_gone(facts: Facts) -> bool:
    """Whether Ray knows that an actor is dead, or that it runs in another process now."""
    try:
        found = actors(actor_id=facts.actor)
    except Exception:  # not public, and only a short cut: silence will tell
        return False
    return bool(found) and (found.get("State") in ("DEAD", "RESTARTING") or found.get("Pid") not in (None, facts.pid))
