"""The worker's machine: connects, takes part in broadcasts, and shelves whole versions.

It is run by a thread of the receiver's, or by ``poll`` itself, never by two at once. For each connection it has an
:mod:`~weightwire_nccl.intake` and a :mod:`~weightwire_nccl.member`.
"""

from __future__ import annotations

import queue
import random
import selectors
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from weightwire import forks, wire
from weightwire.complaints import Complaints
from weightwire.errors import WeightwireError, WireError
from weightwire.transport import Deadline, ReceiverContext
from weightwire_nccl import messages, place, secret
from weightwire_nccl.bell import Bell
from weightwire_nccl.board import BrokenBoard
from weightwire_nccl.groups import device_of, gpu_label
from weightwire_nccl.handshake import Refusal, Visitor
from weightwire_nccl.intake import Intake, Shelves
from weightwire_nccl.link import LIMIT, TERSE, Chunk, Link
from weightwire_nccl.member import Member
from weightwire_nccl.messages import Goodbye, Hello, Message, Report
from weightwire_nccl.pool import Pool
from weightwire_nccl.stream import Streams
from weightwire_nccl.works import Graveyard

if TYPE_CHECKING:
    from weightwire_nccl.options import NcclOptions

__all__ = ["Station"]

BACKOFF = (0.02, 0.5)
"""Seconds between attempts to connect: the first, and the longest."""
CONNECT = 2.0
"""Seconds that an attempt may take."""
HURRY = 0.1
"""The same where somebody polls who does not want to wait."""


class _Off(Exception):
    """The connection is over."""


class _Session:
    """One connection to one trainer."""

    link: Link
    visitor: Visitor
    intake: Intake
    member: Member
    welcome = False


class Station:
    """What a receiver runs.

    Args:
        address: where the trainer listens.
        shelves: where whole versions go.
        news: called when the station has met the trainer, or not, or lost it. It must not keep the receiver alive.
    """

    def __init__(
        self,
        address: tuple[str, int],
        options: NcclOptions,
        context: ReceiverContext,
        shelves: Shelves,
        news: Callable[[], None],
    ) -> None:
        self._address = address
        self._options = options
        self._context = context
        self._shelves = shelves
        self._news = news
        place.check_interface(options.interface)
        self._token = secret.read_token(options.token_file)
        ours = context.device if options.device == "auto" and context.device != "cpu" else options.device
        self._device = device_of(ours)
        self._label = gpu_label(self._device)
        self._cache = wire.LayoutCache()
        self._pool = Pool()
        self._graveyard = Graveyard()
        self._session: _Session | None = None
        self._pause = BACKOFF[0]
        self._retry_at = 0.0
        self._stopping: Deadline | None = None
        self._reports: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._complaints = Complaints(context.logger)
        self._patience = context.deadline.remaining  # the receiver's timeout: it was made a moment ago
        with ExitStack() as undo:
            self._bell = Bell()
            undo.callback(self._bell.close)
            self._selector = selectors.DefaultSelector()
            undo.callback(self._selector.close)
            self._selector.register(self._bell, selectors.EVENT_READ)
            self._open_things = undo.pop_all()
        self.refused: WeightwireError | None = None
        self.connected = False
        self.farewell = False
        self.whereabouts = f"nobody was looked for at {place.location_of(*address)} yet"
        self.tried = False
        """Whether the first attempt to meet the trainer has come to an end."""
        forks.forbid(self)

    # -- for any thread ----------------------------------------------------------------------------------------------

    def tell(self, event: bytes) -> None:
        """Report an event to the trainer, where it is there."""
        if self.connected:
            self._reports.put(event)
            self._bell.ring()

    def stop(self, deadline: Deadline) -> None:
        """Let :meth:`run` say goodbye and return."""
        self._stopping = deadline
        self._bell.ring()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until told to stop; then say goodbye and free everything."""
        while self._stopping is None:
            try:
                self.turn(0.5)
            except Exception:
                self._complaints.log("%s: the staging thread failed and goes on", self._context.worker)
                time.sleep(0.1)
        self._wind_up(self._stopping)

    def turn(self, seconds: float) -> None:
        """One round of the loop: wait up to ``seconds`` for something, and handle it."""
        session = self._session or self._connect(seconds)
        if session is None:
            return
        try:
            self._pump(session, seconds)
            while session.member.go is not None:
                session.member.take_part()
            self._graveyard.sweep()
        except (WireError, BrokenBoard) as exc:
            self._context.logger.warning("worker %s: %s; connecting anew", self._context.worker, exc)
            self._end("what the trainer sent was malformed")
        except Refusal as exc:
            self._refuse(exc)
            self._end(str(exc))
        except _Off as exc:
            self._end(str(exc))
        except BaseException:  # Ctrl-C, where ``poll`` runs this: nobody knows how far it had come
            self._end("interrupted")
            raise

    def _pump(self, session: _Session, seconds: float) -> None:
        """Read and write the control socket. Raises :class:`_Off` where the connection is over."""
        self._write(session)
        self._rest(seconds)
        for frame in session.link.frames():
            self._hear(session, frame)
        self._write(session)
        if session.link.ended:
            raise _Off("the trainer there has closed" if self.farewell else "the trainer there is gone")
        if self._stopping is not None and session.member.busy:
            raise _Off("this worker closes")

    def _rest(self, seconds: float) -> None:
        """Until something can be read, or the bell rings."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._bell:
                self._bell.hush()

    def _write(self, session: _Session) -> None:
        if session.welcome:
            self._queue_reports(session)
        session.link.flush()
        wanted = selectors.EVENT_READ | (0 if session.link.idle else selectors.EVENT_WRITE)
        if self._selector.get_key(session.link.fileno()).events != wanted:
            self._selector.modify(session.link.fileno(), wanted)

    def _queue_reports(self, session: _Session) -> None:
        with suppress(queue.Empty):
            while True:
                session.link.send(Report(self._reports.get_nowait()))

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
            sock = place.reach(*self._address, CONNECT if seconds else HURRY)
        except (OSError, ValueError) as exc:  # ValueError: no name can be that
            self.whereabouts = f"{where}: {getattr(exc, 'strerror', None) or exc}"
            self._put_off()
            return None
        self.whereabouts = f"somebody listens at {where}"
        self._session = self._open(Link(sock, TERSE))
        return self._session

    def _open(self, link: Link) -> _Session:
        session = _Session()
        session.link, session.visitor = link, Visitor(self._token)
        streams = Streams(partial(self._ask, link), self._options.bucket, self._patience)
        session.intake = Intake(link, self._shelves, self._pool, self._cache, self._context, self._device, streams)
        session.member = Member(
            link,
            self._bell,
            session.intake,
            self._graveyard,
            self._context,
            device=self._device,
            interface=self._options.interface,
            pump=partial(self._pump, session),
        )
        self._selector.register(link.fileno(), selectors.EVENT_READ)
        return session

    def _ask(self, link: Link, message: messages.Fetch) -> None:
        """For the thread that pulls."""
        link.send(message)
        self._bell.ring()

    def _put_off(self) -> None:
        self._retry_at = time.monotonic() + self._pause * random.uniform(0.7, 1.0)
        self._pause = min(2 * self._pause, BACKOFF[1])
        self.tried = True
        self._news()

    def _refuse(self, refusal: Refusal) -> None:
        """We, or the trainer, want nothing of the other: the next ``poll`` says so."""
        where = place.location_of(*self._address)
        self.refused = refusal.kind(f"worker {self._context.worker!r} was turned away at {where}: {refusal}")
        self._pause = BACKOFF[1]  # whoever was turned away does not knock again at once

    def _end(self, why: str) -> None:
        """The connection is over; what was shelved stays."""
        session, self._session = self._session, None
        if session is None:
            return
        session.intake.end(why)
        session.member.end(why)
        with suppress(KeyError, ValueError):
            self._selector.unregister(session.link.fileno())
        session.link.close()
        with suppress(queue.Empty):
            while True:
                self._reports.get_nowait()  # the next hello says what it has
        self.connected = False
        self.whereabouts = f"{place.location_of(*self._address)}: {why}"
        self._put_off()

    # -- messages ----------------------------------------------------------------------------------------------------

    def _hear(self, session: _Session, frame: Message | Chunk) -> None:
        if isinstance(frame, Goodbye):
            if not session.welcome:  # it may be anybody who says so
                raise _Off("somebody there said goodbye before hello")
            self.farewell = True
        elif isinstance(frame, messages.Reject):
            raise session.visitor.rejected(frame)
        elif not session.welcome:
            self._meet(session, frame)
        elif isinstance(frame, messages.Ping):
            session.link.send(messages.Pong())
            self.tried = True
            self._news()
        elif isinstance(frame, (Chunk, messages.Plan, messages.Parcel, messages.Done, messages.Offer)):
            self._hear_of_versions(session.intake, frame)
        else:
            self._hear_of_groups(session.member, frame)

    def _meet(self, session: _Session, frame: Message | Chunk) -> None:
        """The trainer proves who it is, as this worker does."""
        if isinstance(frame, messages.Challenge):
            session.link.send(session.visitor.answer(frame))
        elif isinstance(frame, messages.Accepted):
            session.visitor.check(frame)
            self.connected = True  # first: what is reported from now on is sent, what was before, the hello says
            joined = msgspec.structs.replace(self._context.joined, have=self._context.have())
            session.link.send(Hello(wire.encode_event(joined), self._label, self._context.stream))
            session.link.limit = LIMIT
            session.welcome = True
            self._pause = BACKOFF[0]
            self.whereabouts = f"connected to {place.location_of(*self._address)}"
            self._news()
        else:
            raise WireError(f"{type(frame).__name__} came out of turn")

    @staticmethod
    def _hear_of_versions(
        intake: Intake, frame: Chunk | messages.Plan | messages.Parcel | messages.Done | messages.Offer
    ) -> None:
        if isinstance(frame, Chunk):
            intake.hear_chunk(frame)
        elif isinstance(frame, messages.Done):
            intake.hear_done(frame)
        elif isinstance(frame, messages.Offer):
            intake.hear_offer(frame)
        else:
            intake.hear_plan(frame)

    @staticmethod
    def _hear_of_groups(member: Member, frame: Message) -> None:
        if isinstance(frame, messages.Go):
            member.hear_go(frame)
        elif isinstance(frame, messages.Key):
            member.hear_key(frame)
        elif isinstance(frame, messages.Added):
            member.hear_added(frame)
        elif isinstance(frame, messages.Abort):
            member.hear_abort(frame)
        elif isinstance(frame, messages.Drop):
            member.drop(frame.generation)
        else:
            raise WireError(f"{type(frame).__name__} came out of turn")

    # -- the end -----------------------------------------------------------------------------------------------------

    def _wind_up(self, deadline: Deadline) -> None:
        session = self._session
        if session is not None:
            if session.welcome:
                self._write_out(session, deadline)
            self._end("this worker has closed")
        self._graveyard.close(min(1.0, deadline.remaining))
        self.free()
        self.tried = True
        self._shelves.clear()
        self._pool.clear()

    def free(self) -> None:
        """Give its descriptors back; alone, where it was never run."""
        self._open_things.close()

    def _write_out(self, session: _Session, deadline: Deadline) -> None:
        self._queue_reports(session)
        session.link.send(Goodbye())
        while not session.link.flush() and not deadline.expired:
            with selectors.DefaultSelector() as one:
                one.register(session.link.fileno(), selectors.EVENT_WRITE)
                one.select(min(deadline.remaining, 0.5))

    def in_child(self) -> None:
        """In a forked child: let go of everything that tells the trainer that this worker lives."""
        self._graveyard.leak()
        self._shelves.settled = None
        sockets = [*self._bell.detach()]
        if self._session is not None:
            self._session.member.leak()
            sockets.append(self._session.link.detach())
        forks.give_up(*sockets)
