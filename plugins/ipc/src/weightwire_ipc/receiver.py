"""A worker's end. It has no thread: everything happens within ``poll``."""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from weightwire import wire
from weightwire.errors import DigestError, EndpointInUseError, WireError
from weightwire.forks import Origin, forbid, give_up
from weightwire.transport import (
    Applied,
    Deadline,
    Delivery,
    Have,
    Header,
    Receiver,
    ReceiverContext,
    Refused,
    choose,
)
from weightwire.weights.layout import Layout
from weightwire_ipc import place
from weightwire_ipc.leases import Lease, ReadLeases
from weightwire_ipc.loans import Loans
from weightwire_ipc.mapped import MappedSlot
from weightwire_ipc.memory import BoardView, out_of_files
from weightwire_ipc.protocol import (
    BURST,
    PROTOCOL,
    Channel,
    Goodbye,
    Hello,
    Lend,
    Memory,
    Message,
    News,
    Probe,
    Probed,
    Reject,
    Report,
    SlotInfo,
    Welcome,
    decode_news,
    peer_of,
)
from weightwire_ipc.reach import Holds, Reach

if TYPE_CHECKING:
    import socket

    from weightwire_ipc.device import Layer
    from weightwire_ipc.reach import OpenArena

__all__ = ["IpcReceiver"]

LOOK = 0.1
"""Seconds after which the socket is looked at even where the version word has not changed: the trainer may be gone."""
SMALL = 1 << 20
"""Bytes up to which a payload is copied where its views may live on: to map its pages would cost more."""
RETRY = 0.05
"""Seconds between attempts to connect."""
_QUIET = memoryview(bytes(16)).cast("Q")
"""Stands in for the board where there is none."""


class Session:
    """One connection to one updater, with all that belongs to it."""

    def __init__(self, sock: socket.socket, pid: int, reach: Reach | None) -> None:
        """``reach``: where the worker's weights are on a device."""
        self.channel = Channel(sock)
        self.reach = reach
        self.pid = pid
        self.board: BoardView | None = None
        self.leases: ReadLeases | None = None  # from the welcome on
        self.news = News(None, None, (), 0)
        self.sequence = -1  # of the board, as it was when the news were read
        self.slots: dict[int, MappedSlot] = {}
        self.rejected: Reject | None = None
        self._poll = select.poll()

    def pump(self, most: int) -> bool:
        """Send what is queued and take in what has come, up to so many packets; whether that was all of it.

        Raises :class:`~weightwire.WireError`.
        """
        self.channel.flush()
        dry = self.channel.drain(most)
        for message, fds in self.channel.messages():
            self._hear(message, fds)
        return dry

    @property
    def fresh(self) -> bool:
        """Whether nothing was written on the board since it was read."""
        return self.board is not None and self.board.words[0] == self.sequence

    def read(self) -> None:
        """Read the board, after :meth:`pump`: what is written from now on rings again."""
        if self.board is None or self.fresh:
            return
        sequence, data = self.board.read()
        if data:
            self.news = decode_news(data)
            for number in self.slots.keys() - self.news.live:
                if number < self.news.until:
                    self.slots.pop(number).close()
                    if self.reach is not None:
                        self.reach.forget(number)
        self.sequence = sequence if data is not None else -1

    def choose(self, have: Have) -> SlotInfo | None:
        """What the news have beyond ``have``."""
        return choose(have, self.news.full, self.news.subset)

    def wait(self, seconds: float) -> None:
        """Until there is something to :meth:`pump`."""
        self._poll.register(self.channel.fileno(), select.POLLIN | (0 if self.channel.idle else select.POLLOUT))
        self._poll.poll(seconds * 1000)

    def _hear(self, message: Message, fds: list[int]) -> None:
        """Take one message; harmless when it is taken twice."""
        if isinstance(message, Memory) and len(fds) == len(message.slots):
            for (number, start, size), fd in zip(message.slots, fds):
                if number not in self.slots:
                    self.slots[number] = MappedSlot(number, start, size, fd)
        elif isinstance(message, Welcome) and len(fds) == 2:
            if self.leases is None:
                self.board = BoardView(fds[0])
                self.leases = ReadLeases(fds[1], message.lane)
        elif isinstance(message, Reject):
            self.rejected = message
        elif isinstance(message, Probe) and self.reach is not None:
            self.channel.send(Probed(self.reach.probe(message, fds)[:2000]))
        elif isinstance(message, Lend) and self.reach is not None:
            if reason := self.reach.lend(message, fds):
                self.channel.send(Probed(reason[:2000]))
        else:
            raise WireError(f"{type(message).__name__} came out of turn")

    def close(self) -> None:
        """Close the connection; leases that live on keep what they need."""
        self.channel.close()
        for slot in self.slots.values():
            slot.close()
        if self.reach is not None:
            self.reach.close()
        if self.leases is not None:
            self.leases.close()


def _unreadable(info: SlotInfo, why: Exception) -> Delivery:
    """A version whose header, or memory, cannot be had."""
    delivery = Delivery(Header(info.stamp, Layout((), ()), base=info.base))
    delivery.fault = why
    return delivery


class IpcReceiver(Receiver):
    """See :class:`weightwire.transport.Receiver`."""

    def __init__(self, location: str, context: ReceiverContext, layer: Layer | None = None) -> None:
        """``layer``: what can open the trainer's device memory, where the target is on such a device."""
        self._location = location
        self._context = context
        self._device = "" if layer is None else layer.mine(context.device)
        self._layer = layer if self._device else None
        self._holds = None if self._layer is None else Holds(self._layer, self._device)
        self._alias = context.apply == "alias"
        self._origin = Origin(f"The ipc receiver {context.worker!r} of 'ipc://{location}'")
        self._cache = wire.LayoutCache()
        self._session: Session | None = None
        self._retry_at = 0.0
        # What ``poll`` compares when there is nothing new: the version word, what it was, when to look at the socket.
        self._words = _QUIET
        self._seen = -1
        self._look_at = 0.0
        self._loans = Loans(steady=context.steady)
        self._over = False
        self.whereabouts = f"'ipc://{location}' was not looked for yet"
        forbid(self)
        try:
            self._connect()  # where the trainer is there already, it shall know of us before the first poll
        except OSError as exc:
            raise self._broken(exc) from exc

    # -- poll --------------------------------------------------------------------------------------------------------

    def poll(self, have: Have, deadline: Deadline | None) -> Delivery | None:
        if deadline is None and self._words[0] == self._seen and time.monotonic() < self._look_at:
            return None
        self._origin.check()
        try:
            while not self._over:
                delivery = self._look(have)
                if delivery is not None or self.closed or deadline is None or deadline.expired:
                    return delivery
                self._wait(deadline)
        except OSError as exc:
            raise self._broken(exc) from exc
        return None

    def _broken(self, exc: OSError) -> Exception:
        """What to raise in place of an error of the system. What came over the connection may be lost by now."""
        self._end("this process ran out of what it takes to talk to it")
        return out_of_files(self._origin.what, exc) or exc

    def _look(self, have: Have) -> Delivery | None:
        """Look once, without waiting: connect, read, and hand out what is newest."""
        if self.closed:
            return None
        session = self._session or self._connect()
        if session is None:
            return None
        self._seen = -1
        try:
            delivery = self._newest(session, have)
        except WireError as exc:
            self._context.logger.warning("%s: %s; connecting anew", self._origin.what, exc)
            self._end("what the updater sent was malformed")
            return None
        self.connected = session.leases is not None
        if delivery is not None:
            return delivery
        if session.rejected is not None or session.channel.ended:
            self._end_of(session)
        elif session.board is not None and session.channel.idle:
            self._words, self._seen = session.board.words, session.sequence
        return None

    def _newest(self, session: Session, have: Have) -> Delivery | None:
        """What is newest beyond ``have``, after a look at the board, and at the socket where that is due.

        One packet is the rule, and it is the ring; to ask for another costs more than to read it when it is needed.
        """
        now = time.monotonic()
        if session.fresh and session.channel.idle and now < self._look_at:
            info = session.choose(have)
            if info is None or info.slot in session.slots:
                found = self._offer(session, info)
                if found is not None or info is None or session.reach is None:
                    return found  # else what it takes to open device memory may wait in the socket
        self._look_at = now + LOOK
        self._sweep(session)
        most, dry, delivery = 1, False, None
        while delivery is None and not dry:
            dry = session.pump(most)
            session.read()
            delivery = self._offer(session, session.choose(have))
            most = BURST
        return delivery

    def _connect(self) -> Session | None:
        now = time.monotonic()
        if now < self._retry_at:
            self._rest(self._retry_at)
            return None
        self._retry_at = now + RETRY
        sock, self.whereabouts = place.connect(self._location)
        if sock is None:
            self._rest(self._retry_at)
            return None
        pid, uid = peer_of(sock)
        if uid != os.geteuid():
            sock.close()
            self.whereabouts += f", but process {pid} there belongs to user {uid}: not trusted"
            self._rest(self._retry_at)
            return None
        self.whereabouts += f" to process {pid}"
        reach = None if self._layer is None else Reach(self._layer, self._device)
        session = self._session = Session(sock, pid, reach)
        joined = msgspec.structs.replace(self._context.joined, have=self._context.have())
        session.channel.send(Hello(PROTOCOL, wire.encode_event(joined), self._device))
        return session

    def _rest(self, until: float) -> None:
        """Nothing can have changed before then: let ``poll`` return at once."""
        self._words, self._seen, self._look_at = _QUIET, 0, until

    def _wait(self, deadline: Deadline) -> None:
        """Wait for the socket, or for the time of the next attempt to connect."""
        session = self._session
        if session is None:
            time.sleep(min(deadline.remaining, max(self._retry_at - time.monotonic(), 0.001)))
            return
        session.wait(deadline.remaining)
        self._look_at = 0.0

    def _end_of(self, session: Session) -> None:
        """The connection is over; the board says whether that was meant."""
        closed = session.board is not None and session.board.closed
        rejected = session.rejected
        self._end("the updater has closed" if closed else "the updater there is gone")
        self.closed = closed
        if rejected is not None:
            kind = EndpointInUseError if rejected.kind == "name" else WireError
            raise kind(f"{self._origin.what} was turned away: {rejected.reason}")

    def _end(self, why: str) -> None:
        session, self._session = self._session, None
        self.connected = False
        self._retry_at = max(self._retry_at, time.monotonic() + 0.001)
        self._rest(self._retry_at)
        self.whereabouts += f"; {why}"
        if session is not None:
            session.close()

    # -- deliveries --------------------------------------------------------------------------------------------------

    def _offer(self, session: Session, info: SlotInfo | None) -> Delivery | None:
        """A version under a lease; ``None`` where there is none, also where newer news must be on its way."""
        slot = session.slots.get(info.slot) if info is not None else None
        if info is None or slot is None or session.leases is None:
            return None
        lease = session.leases.take(slot.number)
        if lease is None:
            return None
        try:
            data = slot.header(info.stamp)
            delivery = None if data is None else self._deliver(session, slot, lease, self._decode(data, info, slot))
        except (DigestError, OSError) as exc:  # damaged, or not to be mapped: no memory, no room for another mapping
            lease.release()
            return _unreadable(info, exc)
        except BaseException:
            lease.release()
            raise
        if delivery is None:
            lease.release()
        else:
            delivery.alone = session.news.subset is None
        return delivery

    def _decode(self, data: bytes, info: SlotInfo, slot: MappedSlot) -> Header:
        header = wire.decode_header(data, self._cache)
        if header.stamp != info.stamp or header.base != info.base or header.layout.nbytes > slot.size - slot.start:
            raise WireError(f"the header of version {info.stamp.number} does not fit what was announced of it")
        return header

    def _deliver(self, session: Session, slot: MappedSlot, lease: Lease, header: Header) -> Delivery | None:
        nbytes = header.layout.nbytes
        if session.reach is not None:
            arena = session.reach.arena(slot.where >> 1, slot.number, nbytes)
            if arena is not None:
                return self._deliver_from(arena, lease, header)
        if not slot.where & 1:
            return None  # what it takes to open it is on its way, or it will be copied to the host
        if not self._alias:
            return Delivery(header, buffer=slot.buffer(nbytes), memory=slot, release=lease.release)
        if nbytes <= SMALL:
            return self._loans.copy(slot, header, lease)
        return self._loans.lend(slot, header, lease)

    def _deliver_from(self, arena: OpenArena, lease: Lease, header: Header) -> Delivery:
        """A version in device memory, which others read too and nobody may write to."""
        assert self._holds is not None
        if not self._alias:
            return Delivery(header, buffer=arena.buffer(header.layout.nbytes), memory=arena, release=lease.release)
        make = self._holds.copied if self._context.trained else self._holds.aliased
        return make(arena, header, lease)

    def _sweep(self, session: Session) -> None:
        """End leases whose end was interrupted: the trainer would wait for them for ever."""
        self._loans.sweep()
        if self._holds is not None:
            self._holds.sweep()
        if session.leases is not None:
            session.leases.sweep()

    # -- reports, end ------------------------------------------------------------------------------------------------

    def report(self, event: Applied | Refused) -> None:
        session = self._session
        if session is not None and self._origin.here:
            try:
                session.channel.send(Report(wire.encode_event(event)))
            except OSError as exc:
                raise self._broken(exc) from exc
            if not session.channel.idle:
                self._look_at = 0.0

    def close(self, deadline: Deadline) -> None:
        """Every step may be done twice: a close that was broken off goes on when it is called again."""
        if self._over or not self._origin.here:
            return
        self._words, self._seen = _QUIET, -1
        self.connected = False
        self._loans.take_along()
        if self._holds is not None:
            self._holds.sweep()
        if self._session is not None:
            self._take_leave(self._session, deadline)
        self._session = None
        self._over = True

    @staticmethod
    def _take_leave(session: Session, deadline: Deadline) -> None:
        if session.reach is not None:  # what was exported for this worker is only let go by opening it
            with suppress(WireError):
                session.pump(BURST)
        session.channel.send(Goodbye())
        while not session.channel.flush() and not deadline.expired:
            poll = select.poll()
            poll.register(session.channel.fileno(), select.POLLOUT)
            poll.poll(deadline.remaining * 1000)
        session.close()

    def before_fork(self) -> None:
        """Weights that point at a slot would change under a forked child when this process has moved on: from here on
        both have pages of their own, at the price of one copy."""
        self._loans.make_private()

    def in_child(self) -> None:
        """In a forked child: let go of everything that tells the trainer that this worker lives."""
        self._words, self._seen = _QUIET, -1
        if self._session is not None:
            give_up(self._session.channel.detach())
