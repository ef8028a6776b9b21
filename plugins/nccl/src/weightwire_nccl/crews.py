"""The groups that the trainer makes of its workers, from the first key to the last work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

from weightwire_nccl.board import Board
from weightwire_nccl.groups import GlooGroup, Group, NcclGroup
from weightwire_nccl.messages import Add, Added, Drop, Key
from weightwire_nccl.peers import Generation, Generations, Hall, Peer
from weightwire_nccl.works import Graveyard, Works

__all__ = ["Crews"]


class Crews:
    """All but :meth:`group` and :meth:`close` are called under the hall's lock.

    Args:
        hall: who is there.
        device: where NCCL's buffers are.
        host: address at which the engines listen; empty: the one at which the workers were met.
        interface: network interface for Gloo, in place of that.
    """

    def __init__(self, hall: Hall, device: str, host: str, interface: str) -> None:
        self._hall = hall
        self._device, self._host, self._interface = device, host, interface
        self._known = Generations()
        self._graveyard = Graveyard()
        self._numbers = itertools.count(1)

    def all(self) -> list[Generation]:
        return self._known.all()

    def of(self, engine: str, peers: Sequence[Peer]) -> Generation:
        """The generation of these workers: a known one, or one whose group is still to be made."""
        found = self._known.find(engine, peers)
        if found is not None:
            return found
        number = next(self._numbers)
        board = Board(partial(self._publish, number, tuple(peers), None))
        generation = Generation(number, engine, peers, board)
        for old in self._known.add(generation):
            self._retire(old, "others were used since")
        return generation

    def group(self, generation: Generation, timeout: float) -> Group:
        """Its group, made now where it is new. Raises :class:`~weightwire_nccl.groups.GroupError`."""
        if generation.group is None:
            generation.group = self._make(generation, timeout)
        return generation.group

    def _make(self, generation: Generation, timeout: float) -> Group:
        size = len(generation.peers) + 1
        if generation.engine == "nccl":
            return NcclGroup(generation.board, self._device, 0, size, timeout)
        hosts = [self._host] if self._host else [peer.link.host for peer in generation.peers]
        outside = [host for host in hosts if not host.startswith("127.") and host != "::1"]
        return GlooGroup(generation.board, (outside or hosts)[0], self._interface, 0, size, timeout)

    # -- keys --------------------------------------------------------------------------------------------------------

    def _publish(self, number: int, peers: tuple[Peer, ...], author: Peer | None, key: str, value: bytes) -> None:
        # Without the lock: the engines call this from threads of their own, for which somebody may wait who has it.
        for peer in peers:
            if peer is not author and not peer.gone:
                peer.link.send(Key(number, key, value))
        self._hall.bell.ring()

    def hear_key(self, peer: Peer, key: Key) -> None:
        """A member has set a key. Raises :class:`~weightwire_nccl.board.BrokenBoard`."""
        generation = self._known.numbered(key.generation)
        if generation is not None and peer in generation.peers:
            generation.board.learn(key.key, key.value)
            self._publish(key.generation, generation.peers, peer, key.key, key.value)

    def hear_add(self, peer: Peer, add: Add) -> None:
        generation = self._known.numbered(add.generation)
        if generation is not None and peer in generation.peers:
            peer.link.send(Added(add.serial, generation.board.add(add.key, add.amount)))

    # -- ends --------------------------------------------------------------------------------------------------------

    def lose(self, peer: Peer) -> None:
        """A worker is gone: nobody waits for its keys any longer."""
        for generation in self._known.of(peer):
            generation.board.end(f"worker {peer.name!r} is gone")
        self.tidy()

    def tidy(self) -> None:
        """Give up groups that have lost a member, but for one that is in use: whoever uses it finds out."""
        for generation in self._known.all():
            lost = next((peer for peer in generation.peers if peer.gone), None)
            if lost is not None and not any(peer.engaged for peer in generation.peers):
                self._retire(generation, f"worker {lost.name!r} is gone")

    def give_up(self, generation: Generation, works: Works | None, held: object, why: str) -> None:
        """Its works failed, and may go on for a while with what they ``held``."""
        self._known.remove(generation)
        self._bury(generation, works, held, why)

    def _retire(self, generation: Generation, why: str) -> None:
        """Nobody uses this group any more."""
        self._known.remove(generation)
        for peer in generation.peers:
            if not peer.gone:
                peer.link.send(Drop(generation.number))
        self._bury(generation, None, None, why)

    def _bury(self, generation: Generation, works: Works | None, held: object, why: str) -> None:
        generation.board.end(why)
        group, generation.group = generation.group, None
        if group is not None:
            self._graveyard.bury(group, works, held)

    def sweep(self) -> None:
        """Let go what has ended meanwhile."""
        self._graveyard.sweep()

    def close(self, seconds: float) -> None:
        """Give up all of them, and wait that long for their last works."""
        with self._hall.lock:
            for generation in self._known.all():
                self.give_up(generation, None, None, "the updater has closed")
        self._graveyard.close(seconds)

    def in_child(self) -> None:
        self._graveyard.leak()
        for generation in self._known.all():
            if generation.group is not None:
                generation.group.leak()
