"""Broadcasts: one round after the other, around whoever is lost, until everybody who is awake has the bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from weightwire.errors import WaitTimeout
from weightwire.threads import one_core
from weightwire_nccl.board import BrokenBoard
from weightwire_nccl.groups import GroupError
from weightwire_nccl.messages import Abort, Go, Ping, Plan
from weightwire_nccl.source import Source, Whole
from weightwire_nccl.works import SLICE, Works

if TYPE_CHECKING:
    from weightwire.transport import Deadline
    from weightwire.weights.payload import Payload
    from weightwire_nccl.crews import Crews
    from weightwire_nccl.peers import Hall, Peer

__all__ = ["Outcome", "Rounds"]

READY = 0.5
"""Seconds in which a worker that is awake answers a plan. Who does not is left out, and gets the version later."""
PATIENT = 2.0
"""The same where no copy is kept for later; and how long a worker may be silent while a broadcast stands still."""
STALL = 0.3
"""Seconds without progress after which the workers are asked whether they are awake."""
ATTEMPTS = 4
"""Groups that are tried for one version."""
HANG = (2.0, 30.0)
"""Seconds after which a broadcast that nobody ends ends by itself, at least and at most."""


class _Failed(Exception):
    """This round came to nothing."""


class Outcome(NamedTuple):
    """Of a broadcast: the last round, who has the bytes, and who has no room for them, and why."""

    round: int
    served: list[Peer]
    refused: dict[Peer, str]


class Rounds:
    """Belongs to the thread that pushes. ``keep``: who is left out gets the version later."""

    def __init__(self, hall: Hall, crews: Crews, algorithm: str, *, keep: bool) -> None:
        self._hall = hall
        self._crews = crews
        self._algorithm = algorithm
        self._keep = keep

    def candidates(self, payload: Payload, to: frozenset[str] | None) -> list[Peer]:
        """Who can take part: addressed, awake, and with the full version that a subset lies on."""
        with self._hall.lock:
            workers = self._hall.workers
            peers = [workers[name] for name in sorted(workers if to is None else workers.keys() & to)]
            return [
                p for p in peers if not (p.silent or p.streams) and (payload.base is None or p.has.base == payload.base)
            ]

    def broadcast(
        self, source: Source, engine: str, to: frozenset[str] | None, deadline: Deadline, *, suit: Sequence[Peer] = ()
    ) -> Outcome:
        """Bring the bytes to whoever is awake. Groups are made anew around the lost. ``suit``: those for whom NCCL was
        chosen, which whoever joins after that may be no match for.

        Raises :class:`~weightwire.WaitTimeout` where nobody has them and no copy is kept.
        """
        number = source.payload.stamp.number
        failed = ""  # only the text: an exception would keep the works of the round, which others have to let go
        refused: dict[Peer, str] = {}
        for attempt in range(ATTEMPTS):
            peers = [peer for peer in self.candidates(source.payload, to) if peer not in refused]
            if engine == "nccl":
                peers = [peer for peer in peers if peer in suit]
            if not peers or (attempt and deadline.expired):
                break
            round_ = next(self._hall.rounds)
            try:
                with one_core():  # the engine's threads, and receivers on this machine, want the others
                    ready = self._muster(round_, source, engine, peers, deadline)
                    refused.update((peer, peer.reason) for peer in peers if peer.trouble == round_)
                    if ready:
                        self._transfer(round_, source, engine, ready, deadline)
                        return Outcome(round_, ready, refused)
            except _Failed as exc:
                failed = str(exc)
                self._hall.logger.info("%s: version %s: %s", self._hall.place, number, failed)
                source.again()
            except BaseException:
                self.call_off(round_, peers)
                raise
        if failed and not self._keep:
            raise WaitTimeout(f"version {number} reached nobody: {failed}", version=number, phase="stage")
        if failed:
            self._hall.logger.warning(
                "%s: version %s goes over the control socket, which is slower: %s", self._hall.place, number, failed
            )
        return Outcome(0, [], refused)

    def call_off(self, round_: int, peers: Iterable[Peer], generation: int = 0) -> None:
        """A round is off: who took part goes back to waiting."""
        with self._hall.lock:
            for peer in peers:
                if not peer.gone and peer.engaged == round_:
                    peer.engaged = 0
                    peer.link.send(Abort(round_, generation))
        self._hall.bell.ring()

    def _muster(self, round_: int, source: Source, engine: str, peers: list[Peer], deadline: Deadline) -> list[Peer]:
        """Announce a round and see who is awake. The first bucket is packed meanwhile."""
        payload = source.payload
        plan = Plan(round_, payload.stamp, payload.base, payload.nbytes, source.stops, engine)
        with self._hall.lock:
            for peer in peers:
                peer.engaged = round_
                peer.link.send(plan)
        self._hall.bell.ring()
        until = deadline.sooner(min(READY if self._keep else PATIENT, max(deadline.remaining / 3, 0.05)))
        if isinstance(source, Whole) and source.ranges:
            source.bucket(0)
        with self._hall.lock:
            self._hall.changed.wait_for(partial(_answered, peers, round_), until.remaining)
            for peer in peers:
                if not _answered([peer], round_):
                    self._hall.logger.warning(
                        "%s: worker %r does not answer; it is left out", self._hall.place, peer.name
                    )
                    peer.silent = True
            ready = [peer for peer in peers if not peer.gone and peer.ready == round_]
            self.call_off(round_, set(peers) - set(ready))
            return ready

    def _transfer(self, round_: int, source: Source, engine: str, peers: list[Peer], deadline: Deadline) -> None:
        """Broadcast all buckets to these workers. Raises :class:`_Failed`; the group is then of no more use."""
        timeout = min(max(deadline.remaining, HANG[0]), HANG[1])
        with self._hall.lock:
            generation = self._crews.of(engine, peers)
        works: Works | None = None
        try:
            with self._hall.lock:
                size = len(generation.peers) + 1
                for rank, peer in enumerate(generation.peers, 1):
                    peer.link.send(Go(round_, generation.number, rank, size, self._algorithm, timeout))
            self._hall.bell.ring()
            group = self._crews.group(generation, timeout)
            group.limit(timeout)
            works = Works(group, self._algorithm)
            watch = _Watch(self._hall, round_, generation.peers, deadline)
            for number in range(len(source.ranges)):
                for _ in works.post(source.bucket(number)):
                    watch.look()
                while works.full:
                    watch.progress(works.wait(SLICE))
            while works:
                watch.progress(works.wait(SLICE))
            group.finish()
            self._confirm(round_, peers, watch)
        except BaseException as exc:
            with self._hall.lock:
                self._crews.give_up(generation, works, source.held, f"round {round_} failed")
            self.call_off(round_, peers, generation.number)
            if isinstance(exc, (GroupError, BrokenBoard)):
                raise _Failed(str(exc)) from exc
            raise

    def _confirm(self, round_: int, peers: list[Peer], watch: _Watch) -> None:
        """Be sure that everybody has all bytes: workers pass them on to each other, and one may have died meanwhile."""
        while True:
            with self._hall.lock:
                if self._hall.changed.wait_for(lambda: all(peer.got == round_ for peer in peers), SLICE):
                    return
            watch.look()


def _answered(peers: list[Peer], round_: int) -> bool:
    return all(peer.gone or round_ in (peer.ready, peer.trouble) for peer in peers)


class _Watch:
    """Looks after a broadcast: is everybody still there, and does it go on?"""

    def __init__(self, hall: Hall, round_: int, peers: Sequence[Peer], deadline: Deadline) -> None:
        self._hall = hall
        self._round = round_
        self._peers = peers
        self._deadline = deadline
        self._moved = time.monotonic()
        self._asked = 0.0

    def progress(self, done: bool) -> None:
        """After each wait for a bucket."""
        if done:
            self._moved, self._asked = time.monotonic(), 0.0
        else:
            self.look()

    def look(self) -> None:
        """Raise :class:`_Failed` where it makes no sense to wait any longer."""
        now = time.monotonic()
        with self._hall.lock:
            for peer in self._peers:
                if peer.gone:
                    raise _Failed(f"worker {peer.name!r} is lost: {peer.gone}")
                if peer.trouble == self._round:
                    raise _Failed(f"worker {peer.name!r} has trouble: {peer.reason}")
            if self._deadline.expired:
                raise _Failed("there is no time left")
            if now - self._moved > STALL:
                self._ask(now)

    def _ask(self, now: float) -> None:
        """Nothing has moved for a while: find out who sleeps."""
        if not self._asked:
            self._asked = now
            self._patience = min(PATIENT, max(0.2, self._deadline.remaining / 4))
            for peer in self._peers:
                peer.link.send(Ping())
            self._hall.bell.ring()
            return
        if now - self._asked > self._patience:
            asleep = [peer for peer in self._peers if peer.heard < self._asked]
            for peer in asleep:
                peer.silent = True
            if asleep:
                raise _Failed(f"worker {asleep[0].name!r} does not answer")
            self._asked = 0.0
