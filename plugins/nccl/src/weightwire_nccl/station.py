"""The worker's machine: connects, takes part in broadcasts, and shelves whole versions.

It is run by a thread of the receiver's, or by ``poll`` itself, never by two at once.
"""

from __future__ import annotations

import itertools
import queue
import random
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch

from weightwire import forks, wire
from weightwire.errors import EndpointError, EndpointInUseError, StorageFullError, WeightwireError, WireError
from weightwire.transport import Deadline, ReceiverContext, Staged
from weightwire_nccl import place, secret
from weightwire_nccl.board import Board, BrokenBoard
from weightwire_nccl.groups import (
    GlooGroup,
    Graveyard,
    Group,
    GroupError,
    NcclGroup,
    Works,
    device_of,
    gpu_label,
)
from weightwire_nccl.pool import Lease, Pool
from weightwire_nccl.protocol import (
    LIMIT,
    PROTOCOL,
    Abort,
    Accepted,
    Add,
    Added,
    Challenge,
    Chunk,
    Done,
    Drop,
    Go,
    Goodbye,
    Got,
    Hello,
    Key,
    Link,
    Message,
    Parcel,
    Ping,
    Plan,
    Pong,
    Proof,
    Ready,
    Reject,
    Report,
    Trouble,
)

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.transport import Header, Version
    from weightwire_nccl.options import NcclOptions
    from weightwire_nccl.receiver import NcclReceiver

__all__ = ["Shelved", "Station"]

SLICE = 0.02
"""Seconds between looks at the control socket while a broadcast goes on."""
BACKOFF = (0.02, 0.5)
"""Seconds between attempts to connect: the first, and the longest."""
CONNECT = 2.0
"""Seconds that an attempt may take."""


class _Off(Exception):
    """The round, or the whole connection, is over."""


class Shelved:
    """A whole version that can be handed out."""

    def __init__(self, header: Header, lease: Lease) -> None:
        self.header = header
        self.stamp = header.stamp
        self.base = header.base
        self.lease = lease
        self._given = False

    def own_blocks(self) -> list[Tensor]:
        """Each block with a storage of its own, over the buffer; the buffer's lease ends with the last of them."""
        layout, buffer = self.header.layout, self.lease.buffer
        if buffer.device.type != "cpu":  # no two storages can share device memory
            return [block.clone() for block in layout.slice(buffer)]
        if self._given:  # somebody may write to the first ones
            buffer = buffer[: layout.nbytes].clone()
        self._given = True
        base = np.frombuffer(memoryview(buffer.numpy()), dtype=np.uint8)  # type: ignore[arg-type]
        weakref.finalize(base, [self.lease].clear).atexit = False
        return [torch.from_numpy(base[start : start + size]) for start, size in zip(layout.starts, layout.sizes)]


class _Filling(NamedTuple):
    """A version whose bytes are coming."""

    stamp: Version
    base: Version | None
    nbytes: int
    stops: tuple[int, ...]
    engine: str
    lease: Lease


class _Session:
    """One connection to one trainer."""

    def __init__(self, link: Link, token: bytes) -> None:
        self.link = link
        self.token = token
        self.nonce = secret.fresh_nonce()
        self.theirs = b""
        self.welcome = False
        self.fillings: dict[int, _Filling] = {}
        self.filled: set[int] = set()  # rounds whose bytes are all there
        self.headers: dict[int, Done] = {}  # rounds whose header came before that
        self.held_back: Shelved | None = None  # a full version on which a subset is to follow at once
        self.boards: dict[int, Board] = {}
        self.groups: dict[int, Group] = {}
        self.go: Go | None = None
        self.off: set[int] = set()  # rounds that were called off while they went on
        self.sums: dict[int, queue.SimpleQueue[int]] = {}


class Station:
    """What a receiver runs. ``full`` and ``subset``: the newest whole versions, changed under ``owner``'s lock only."""

    def __init__(
        self, owner: NcclReceiver, address: tuple[str, int], options: NcclOptions, context: ReceiverContext
    ) -> None:
        self._owner = weakref.ref(owner)
        self._address = address
        self._options = options
        self._context = context
        self._token = secret.read_token(options.token_file)
        self._device = device_of(
            options.device if options.device != "auto" or context.device == "cpu" else context.device
        )
        self._label = gpu_label(self._device)
        self._cache = wire.LayoutCache()
        self._pool = Pool()
        self._graveyard = Graveyard()
        self._session: _Session | None = None
        self._busy = 0  # the generation that takes part in a broadcast just now
        self._outdated: list[int] = []  # generations to be dropped after that
        self._serials = itertools.count(1)
        self._pause = BACKOFF[0]
        self._retry_at = 0.0
        self._stopping: Deadline | None = None
        self._reports: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._bell, self._ring_end = socket.socketpair()
        for end in (self._bell, self._ring_end):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self.full: Shelved | None = None
        self.subset: Shelved | None = None
        self.refused: WeightwireError | None = None
        self.connected = False
        self.farewell = False
        self.whereabouts = f"nobody was looked for at {place.location_of(*address)} yet"
        self.tried = threading.Event()
        """Set when the first attempt to meet the trainer has come to an end."""
        forks.forbid(self)

    # -- for any thread ----------------------------------------------------------------------------------------------

    def tell(self, event: bytes) -> None:
        """Report an event to the trainer, where it is there."""
        if self.connected:
            self._reports.put(event)
            self._ring()

    def stop(self, deadline: Deadline) -> None:
        """Let :meth:`run` say goodbye and return."""
        self._stopping = deadline
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):
            self._ring_end.send(b"!")

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until told to stop; then say goodbye and free everything."""
        while self._stopping is None:
            try:
                self.turn(0.5)
            except Exception:
                self._context.logger.exception("%s: the staging thread failed and goes on", self._context.worker)
                time.sleep(0.1)
        self._wind_up(self._stopping)

    def turn(self, seconds: float) -> None:
        """One round of the loop: wait up to ``seconds`` for something, and handle it."""
        session = self._session or self._connect(seconds)
        if session is None:
            return
        try:
            self._pump(session, seconds)
            while session.go is not None:
                go, session.go = session.go, None
                self._take_part(session, go)
            self._graveyard.sweep()
        except WireError as exc:
            self._context.logger.warning("worker %s: %s; connecting anew", self._context.worker, exc)
            self._end("what the trainer sent was malformed")
        except _Off as exc:
            self._end(str(exc))
        except BaseException:  # Ctrl-C, where ``poll`` runs this: nobody knows how far it had come
            self._end("interrupted")
            raise

    def _pump(self, session: _Session, seconds: float) -> None:
        """Read and write the control socket. Raises :class:`_Off` where the connection is over."""
        self._write(session)
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._bell:
                with suppress(BlockingIOError):
                    self._bell.recv(4096)
        for frame in session.link.frames():
            self._hear(session, frame)
        self._write(session)
        if session.link.ended:
            raise _Off("the trainer there has closed" if self.farewell else "the trainer there is gone")

    def _write(self, session: _Session) -> None:
        if session.welcome:
            with suppress(queue.Empty):
                while True:
                    session.link.send(Report(self._reports.get_nowait()))
        session.link.flush()
        wanted = selectors.EVENT_READ | (0 if session.link.idle else selectors.EVENT_WRITE)
        if self._selector.get_key(session.link.fileno()).events != wanted:
            self._selector.modify(session.link.fileno(), wanted)

    # -- the connection ----------------------------------------------------------------------------------------------

    def _connect(self, seconds: float) -> _Session | None:
        if self.farewell or self.refused is not None:  # it is over; or ``poll`` has to say first why it did not work
            self._rest(seconds)
            return None
        wait = self._retry_at - time.monotonic()
        if wait > 0:
            self._rest(min(wait, seconds))
            return None
        where = place.location_of(*self._address)
        try:
            sock = place.reach(*self._address, CONNECT)
        except OSError as exc:
            self.whereabouts = f"{where}: {exc.strerror or exc}"
            self._put_off()
            return None
        self.whereabouts = f"somebody listens at {where}"
        session = self._session = _Session(Link(sock, LIMIT), self._token)
        self._selector.register(session.link.fileno(), selectors.EVENT_READ)
        return session

    def _rest(self, seconds: float) -> None:
        for _ in self._selector.select(seconds):
            with suppress(BlockingIOError):
                self._bell.recv(4096)

    def _put_off(self) -> None:
        self._retry_at = time.monotonic() + self._pause * random.uniform(0.7, 1.0)
        self._pause = min(2 * self._pause, BACKOFF[1])
        self._changed()
        self.tried.set()

    def _end(self, why: str) -> None:
        """The connection is over; what was shelved stays."""
        session, self._session = self._session, None
        if session is None:
            return
        self._show(session)
        for board in session.boards.values():
            board.end(why)
        for group in session.groups.values():
            self._graveyard.bury(group, None, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(session.link.fileno())
        session.link.close()
        with suppress(queue.Empty):
            while True:
                self._reports.get_nowait()  # the next hello says what it has
        self.connected = False
        self.whereabouts = f"{place.location_of(*self._address)}: {why}"
        self._put_off()

    def _changed(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner.news()

    # -- messages ----------------------------------------------------------------------------------------------------

    def _hear(self, session: _Session, frame: Message | Chunk) -> None:
        if isinstance(frame, Goodbye):
            self.farewell = True
        elif isinstance(frame, Reject):
            kinds = {"name": EndpointInUseError, "protocol": WireError}
            self._refuse(kinds.get(frame.kind, EndpointError), frame.reason)
        elif not session.welcome:
            self._meet(session, frame)
        elif isinstance(frame, Chunk):
            self._hear_chunk(session, frame)
        elif isinstance(frame, Ping):
            session.link.send(Pong())
            self.tried.set()
        elif isinstance(frame, (Plan, Parcel)):
            self._hear_plan(session, frame)
        elif isinstance(frame, Go):
            if frame.round in session.fillings:
                session.go = frame
                if frame.generation not in session.boards:
                    session.boards[frame.generation] = self._board(session, frame.generation)
        elif isinstance(frame, Key):
            board = session.boards.get(frame.generation)
            if board is not None:
                board.learn(frame.key, frame.value)
        elif isinstance(frame, Added):
            if frame.serial in session.sums:
                session.sums[frame.serial].put(frame.value)
        elif isinstance(frame, Done):
            self._hear_done(session, frame)
        elif isinstance(frame, Abort):
            self._hear_abort(session, frame)
        elif isinstance(frame, Drop):
            self._drop(session, frame.generation, "the trainer has no more use for it")
        else:
            raise WireError(f"{type(frame).__name__} came out of turn")

    def _meet(self, session: _Session, frame: Message | Chunk) -> None:
        """The trainer proves who it is, as this worker does."""
        if isinstance(frame, Challenge) and not session.theirs:
            self._answer(session, frame)
        elif isinstance(frame, Accepted) and session.theirs:
            if session.token and not secret.verify(
                session.token, "trainer", session.nonce, session.theirs, frame.proof
            ):
                self._refuse(EndpointError, "who listens there does not know the token")
            joined = msgspec.structs.replace(self._context.joined, have=self._context.have())
            session.link.send(Hello(wire.encode_event(joined), self._label))
            session.welcome = True
            self._pause = BACKOFF[0]
            self.connected = True
            self.whereabouts = f"connected to {place.location_of(*self._address)}"
            self._changed()
        else:
            raise WireError(f"{type(frame).__name__} came out of turn")

    def _answer(self, session: _Session, challenge: Challenge) -> None:
        if challenge.protocol != PROTOCOL:
            text = f"the updater speaks protocol {challenge.protocol}, this worker {PROTOCOL}: install one version of "
            self._refuse(WireError, text + "weightwire-nccl on all sides")
        if bool(session.token) is not challenge.guarded or len(challenge.nonce) != secret.NONCE:
            who, lacks = ("it asks for", "this worker has") if challenge.guarded else ("this worker has", "it asks for")
            self._refuse(
                EndpointError, f"{who} a token, but {lacks} none: set token_file or {secret.VARIABLE} on all sides"
            )
        session.theirs = challenge.nonce
        proof = secret.prove(session.token, "worker", challenge.nonce, session.nonce) if session.token else b""
        session.link.send(Proof(PROTOCOL, session.nonce, proof))

    def _refuse(self, kind: type[WeightwireError], reason: str) -> None:
        """We, or the trainer, want nothing of the other: the next ``poll`` says so."""
        self.refused = kind(
            f"worker {self._context.worker!r} was turned away at {place.location_of(*self._address)}: {reason}"
        )
        self._pause = BACKOFF[1]  # whoever was turned away does not knock again at once
        raise _Off(reason)

    # -- versions ----------------------------------------------------------------------------------------------------

    def _hear_plan(self, session: _Session, plan: Plan | Parcel) -> None:
        """Make room for a version."""
        engine = plan.engine if isinstance(plan, Plan) else "gloo"
        stops = plan.stops if isinstance(plan, Plan) else (plan.nbytes,)
        if (
            not 0 <= plan.nbytes <= wire.MAX_BYTES
            or list(stops) != sorted(stops)
            or (stops and stops[-1] > plan.nbytes)
        ):
            raise WireError(f"a plan of {plan.nbytes} bytes in {len(stops)} buckets is malformed")
        try:
            lease = self._pool.take(plan.nbytes, self._device if engine == "nccl" else "cpu")
        except StorageFullError as exc:
            self._context.logger.error("worker %s: %s", self._context.worker, exc)
            session.link.send(Trouble(plan.round, str(exc)))
            return
        session.fillings[plan.round] = _Filling(plan.stamp, plan.base, plan.nbytes, stops, engine, lease)
        if isinstance(plan, Plan):
            session.link.send(Ready(plan.round))
        else:
            session.filled.add(plan.round)  # the header comes after the last chunk

    def _hear_chunk(self, session: _Session, chunk: Chunk) -> None:
        filling = session.fillings.get(chunk.round)
        if filling is None:
            return
        stop = chunk.start + len(chunk.data)
        if stop > filling.nbytes:
            raise WireError(f"bytes {chunk.start} to {stop} of a version of {filling.nbytes}")
        filling.lease.buffer.numpy()[chunk.start : stop] = chunk.data

    def _hear_done(self, session: _Session, done: Done) -> None:
        if done.round in session.filled:
            self._shelve(session, done)
        elif done.round in session.fillings:
            session.headers[done.round] = done

    def _hear_abort(self, session: _Session, abort: Abort) -> None:
        self._forget(session, abort.round)
        session.off.add(abort.round)
        if session.go is not None and session.go.round == abort.round:
            session.go = None
        if abort.generation:
            self._drop(session, abort.generation, "the round is off")

    @staticmethod
    def _forget(session: _Session, round_: int) -> None:
        session.fillings.pop(round_, None)
        session.headers.pop(round_, None)
        session.filled.discard(round_)

    def _shelve(self, session: _Session, done: Done) -> None:
        """A version is whole."""
        filling = session.fillings[done.round]
        self._forget(session, done.round)
        header = wire.decode_header(done.header, self._cache)
        if (header.stamp, header.base, header.layout.nbytes) != (filling.stamp, filling.base, filling.nbytes):
            raise WireError(f"the header of version {header.stamp.number} does not fit what was announced of it")
        item = Shelved(header, filling.lease)
        if done.more:
            session.held_back = item
            return
        self._show(session, item)
        staged = self._whole()
        if staged is not None:
            joined = self._context.joined
            event = Staged(worker=joined.worker, incarnation=joined.incarnation, stamp=staged)
            session.link.send(Report(wire.encode_event(event)))

    def _show(self, session: _Session, *items: Shelved) -> None:
        """Let ``poll`` see these, and what was held back for them, in one step."""
        owner = self._owner()
        if owner is None:
            return
        held, session.held_back = session.held_back, None
        with owner._changed:
            for item in (held, *items):
                if item is None:
                    continue
                if item.base is None:
                    if self.full is None or item.stamp > self.full.stamp:
                        self.full = item
                elif self.subset is None or item.stamp > self.subset.stamp:
                    self.subset = item
            if self.full is not None and self.subset is not None and self.subset.stamp < self.full.stamp:
                self.subset = None
        self._changed()

    def _whole(self) -> Version | None:
        """The newest version that this worker can apply."""
        if self.subset is not None:
            have = self._context.have()
            full = self.full.stamp if self.full is not None else None
            if self.subset.base in (full, have.base):
                return self.subset.stamp
        return self.full.stamp if self.full is not None else None

    # -- broadcasts --------------------------------------------------------------------------------------------------

    def _take_part(self, session: _Session, go: Go) -> None:
        """Receive all buckets of a version, as a member of a group."""
        filling = session.fillings.get(go.round)
        if filling is None:
            return
        works: Works | None = None
        session.off.clear()
        self._busy = go.generation
        try:
            group = self._group(session, go, filling.engine)
            group.limit(go.timeout)
            works = Works(group, go.algorithm)
            self._receive(session, go.round, works, filling)
            group.finish()
        except BaseException as exc:
            self._give_up(session, go, works, filling.lease)
            if not isinstance(exc, (GroupError, BrokenBoard)):
                raise
            self._context.logger.info("worker %s: round %s: %s", self._context.worker, go.round, exc)
            if go.round not in session.off:
                session.link.send(Trouble(go.round, str(exc)))
            return
        finally:
            self._busy = 0
            while self._outdated:
                self._drop(session, self._outdated.pop(), "the trainer has no more use for it")
        self._received(session, go.round)

    def _received(self, session: _Session, round_: int) -> None:
        """All bytes are here; the header may be, too."""
        session.filled.add(round_)
        session.link.send(Got(round_))
        done = session.headers.pop(round_, None)
        if done is not None:
            self._shelve(session, done)
        session.link.flush()

    def _receive(self, session: _Session, round_: int, works: Works, filling: _Filling) -> None:
        slices = filling.lease.memory.slices(list(zip((0, *filling.stops), filling.stops)))
        for bucket in slices:
            for _ in works.post(bucket):
                self._watch(session, round_)
            while works.full:
                self._step(session, round_, works)
        while works:
            self._step(session, round_, works)

    def _step(self, session: _Session, round_: int, works: Works) -> None:
        if not works.wait(SLICE):
            self._watch(session, round_)

    def _watch(self, session: _Session, round_: int) -> None:
        """While a broadcast goes on: answer the trainer, and stop where it says so, or is gone."""
        self._pump(session, 0.0)
        if round_ in session.off:
            raise GroupError("the trainer has called it off")
        if self._stopping is not None:
            raise _Off("this worker closes")

    def _give_up(self, session: _Session, go: Go, works: Works | None, held: object) -> None:
        self._forget(session, go.round)
        board = session.boards.pop(go.generation, None)
        if board is not None:
            board.end("the round is off")
        group = session.groups.pop(go.generation, None)
        if group is not None:
            self._graveyard.bury(group, works, held)

    def _drop(self, session: _Session, generation: int, why: str) -> None:
        board = session.boards.get(generation)
        if board is not None:
            board.end(why)
        if generation == self._busy:
            self._outdated.append(generation)
            return
        session.boards.pop(generation, None)
        group = session.groups.pop(generation, None)
        if group is not None:
            self._graveyard.bury(group, None, None)

    def _group(self, session: _Session, go: Go, engine: str) -> Group:
        found = session.groups.get(go.generation)
        if found is not None:
            return found
        if not 0 < go.rank < go.size:
            raise WireError(f"rank {go.rank} of {go.size} cannot be")
        board = session.boards[go.generation]
        group: Group
        if engine == "nccl":
            group = NcclGroup(board, self._device, go.rank, go.size, go.timeout)
        else:
            host, interface = session.link.host, self._options.interface
            group = GlooGroup(board, host, interface, go.rank, go.size, go.timeout)
        session.groups[go.generation] = group
        return group

    def _board(self, session: _Session, generation: int) -> Board:
        return Board(
            partial(self._publish, session, generation),
            partial(self._add, session, generation),
            partial(self._pump, session),
        )

    def _publish(self, session: _Session, generation: int, key: str, value: bytes) -> None:
        session.link.send(Key(generation, key, value))
        self._ring()

    def _add(self, session: _Session, generation: int, key: str, amount: int) -> int:
        """Not from the thread that reads the socket unless nothing else is being read."""
        serial, answer = next(self._serials), queue.SimpleQueue[int]()
        session.sums[serial] = answer
        session.link.send(Add(serial, generation, key, amount))
        board = session.boards[generation]
        try:
            board.wait_until(lambda: not answer.empty(), "a sum", 30.0)
            return answer.get_nowait()
        finally:
            session.sums.pop(serial, None)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _wind_up(self, deadline: Deadline) -> None:
        session = self._session
        if session is not None:
            if session.welcome:
                self._write_out(session, deadline)
            self._end("this worker has closed")
        self._graveyard.close(min(1.0, deadline.remaining))
        self._selector.close()
        self._bell.close()
        self._ring_end.close()
        self.tried.set()
        owner = self._owner()
        if owner is not None:
            with owner._changed:
                self.full = self.subset = None
        self._pool.clear()

    def _write_out(self, session: _Session, deadline: Deadline) -> None:
        with suppress(queue.Empty):
            while True:
                session.link.send(Report(self._reports.get_nowait()))
        session.link.send(Goodbye())
        while not session.link.flush() and not deadline.expired:
            with selectors.DefaultSelector() as one:
                one.register(session.link.fileno(), selectors.EVENT_WRITE)
                one.select(min(deadline.remaining, 0.5))

    def in_child(self) -> None:
        """In a forked child: let go of everything that tells the trainer that this worker lives."""
        self._graveyard.leak()
        session = self._session
        sockets: Sequence[int] = [sock.detach() for sock in (self._bell, self._ring_end)]
        if session is not None:
            for group in session.groups.values():
                group.leak()
            sockets = [*sockets, session.link.detach()]
        forks.give_up(*sockets)
        owner = self._owner()
        if owner is not None:
            owner._settled = None
