"""A worker's part in the trainer's groups: finding the others, and receiving what is broadcast."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
from functools import partial

from weightwire.errors import WireError
from weightwire.transport import ReceiverContext
from weightwire_nccl.bell import Bell
from weightwire_nccl.board import Board, BrokenBoard
from weightwire_nccl.groups import GlooGroup, Group, GroupError, NcclGroup
from weightwire_nccl.intake import Filling, Intake
from weightwire_nccl.link import Link
from weightwire_nccl.messages import Abort, Add, Added, Go, Key, Trouble
from weightwire_nccl.works import SLICE, Graveyard, Works

__all__ = ["Member"]

SUM = 30.0
"""Seconds that the trainer may take to add two numbers."""
_DROPPED = "the trainer has no more use for it"


class Member:
    """For one connection; belongs to the thread that runs the station.

    Args:
        link: the control socket.
        bell: has it written to, where an engine's thread queues something.
        intake: where the bytes go.
        graveyard: where groups go that are not used any more.
        device, interface: of this end, for NCCL and Gloo.
        pump: reads and writes the control socket, for so many seconds; may raise what ends the connection.
    """

    def __init__(
        self,
        link: Link,
        bell: Bell,
        intake: Intake,
        graveyard: Graveyard,
        context: ReceiverContext,
        *,
        device: str,
        interface: str,
        pump: Callable[[float], None],
    ) -> None:
        self._link, self._bell, self._intake, self._graveyard = link, bell, intake, graveyard
        self._context = context
        self._device, self._interface = device, interface
        self._pump = pump
        self._boards: dict[int, Board] = {}
        self._groups: dict[int, Group] = {}
        self._sums: dict[int, queue.SimpleQueue[int]] = {}
        self._serials = itertools.count(1)
        self._busy = 0  # the generation that takes part in a broadcast just now
        self._outdated: list[int] = []  # generations to be dropped after that
        self._off: set[int] = set()  # rounds that were called off while it went on
        self.go: Go | None = None
        """What the trainer waits for."""

    @property
    def busy(self) -> bool:
        """Whether it takes part in a broadcast just now."""
        return bool(self._busy)

    # -- what the trainer says ---------------------------------------------------------------------------------------

    def hear_go(self, go: Go) -> None:
        if self._intake.of(go.round) is None:
            return
        if not 0 < go.rank < go.size:
            raise WireError(f"rank {go.rank} of {go.size} cannot be")
        self.go = go
        if go.generation not in self._boards:
            self._boards[go.generation] = self._board(go.generation)

    def hear_key(self, key: Key) -> None:
        board = self._boards.get(key.generation)
        if board is not None:
            board.learn(key.key, key.value)

    def hear_added(self, added: Added) -> None:
        if added.serial in self._sums:
            self._sums[added.serial].put(added.value)

    def hear_abort(self, abort: Abort) -> None:
        self._intake.forget(abort.round)
        self._off.add(abort.round)
        if self.go is not None and self.go.round == abort.round:
            self.go = None
        if abort.generation:
            self.drop(abort.generation, "the round is off")

    def drop(self, generation: int, why: str = _DROPPED) -> None:
        """A group will not be used any more."""
        board = self._boards.get(generation)
        if board is not None:
            board.end(why)
        if generation == self._busy:
            self._outdated.append(generation)
        else:
            self._bury(generation, None, None)

    def _bury(self, generation: int, works: Works | None, held: object) -> None:
        self._boards.pop(generation, None)
        group = self._groups.pop(generation, None)
        if group is not None:
            self._graveyard.bury(group, works, held)

    def end(self, why: str) -> None:
        """The connection is over. Groups end now: they are known by what knows them, and would stay for long."""
        for generation in list(self._boards):
            self._boards[generation].end(why)
            self._bury(generation, None, None)

    def leak(self) -> None:
        """In a forked child: never touch the engines."""
        for group in self._groups.values():
            group.leak()

    # -- taking part -------------------------------------------------------------------------------------------------

    def take_part(self) -> None:
        """Receive all buckets of the version that the trainer waits to send."""
        go, self.go = self.go, None
        filling = self._intake.of(go.round) if go is not None else None
        if go is None or filling is None:
            return
        works: Works | None = None
        self._off.clear()
        self._busy = go.generation
        try:
            group = self._group(go, filling.engine)
            group.limit(go.timeout)
            works = Works(group, go.algorithm)
            self._receive(go.round, works, filling)
            group.finish()
        except BaseException as exc:
            self._give_up(go, works, filling)
            if not isinstance(exc, (GroupError, BrokenBoard)):
                raise
            self._context.logger.info("worker %s: round %s: %s", self._context.worker, go.round, str(exc))
            if go.round not in self._off:
                self._link.send(Trouble(go.round, str(exc)))
            return
        finally:
            self._busy = 0
            while self._outdated:
                self.drop(self._outdated.pop())
        self._intake.complete(go.round)
        self._link.flush()

    def _receive(self, round_: int, works: Works, filling: Filling) -> None:
        for bucket in filling.buckets():
            for _ in works.post(bucket):
                self._watch(round_)
            while works.full:
                self._step(round_, works)
        while works:
            self._step(round_, works)

    def _step(self, round_: int, works: Works) -> None:
        if not works.wait(SLICE):
            self._watch(round_)

    def _watch(self, round_: int) -> None:
        """While a broadcast goes on: answer the trainer, and stop where it says so, or is gone."""
        self._pump(0.0)
        if round_ in self._off:
            raise GroupError("the trainer has called it off")

    def _give_up(self, go: Go, works: Works | None, filling: Filling) -> None:
        self._intake.forget(go.round)
        board = self._boards.get(go.generation)
        if board is not None:
            board.end("the round is off")
        self._bury(go.generation, works, filling.lease)

    # -- groups ------------------------------------------------------------------------------------------------------

    def _group(self, go: Go, engine: str) -> Group:
        found = self._groups.get(go.generation)
        if found is not None:
            return found
        board = self._boards[go.generation]
        group: Group
        if engine == "nccl":
            group = NcclGroup(board, self._device, go.rank, go.size, go.timeout)
        else:
            group = GlooGroup(board, self._link.host, self._interface, go.rank, go.size, go.timeout)
        self._groups[go.generation] = group
        return group

    def _board(self, generation: int) -> Board:
        return Board(partial(self._publish, generation), partial(self._add, generation), self._pump)

    def _publish(self, generation: int, key: str, value: bytes) -> None:
        self._link.send(Key(generation, key, value))
        self._bell.ring()

    def _add(self, generation: int, key: str, amount: int) -> int:
        """Not from the thread that reads the socket unless nothing else is being read."""
        serial, answer = next(self._serials), queue.SimpleQueue[int]()
        self._sums[serial] = answer
        self._link.send(Add(serial, generation, key, amount))
        board = self._boards[generation]
        try:
            board.wait_until(lambda: not answer.empty(), "a sum", SUM)
            return answer.get_nowait()
        finally:
            self._sums.pop(serial, None)
