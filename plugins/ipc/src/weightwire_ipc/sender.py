"""The trainer's end: slots that are written once for all workers, and a service thread that looks after the workers."""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from weightwire import wire
from weightwire.errors import ClosedError, StorageFullError, WaitTimeout, WireError
from weightwire.forks import Origin, forbid, give_up
from weightwire.transport import (
    Applied,
    Deadline,
    Event,
    Joined,
    Left,
    Lost,
    Noted,
    Refused,
    Sender,
    SenderContext,
    Shelf,
    Staged,
    Version,
)
from weightwire_ipc import place
from weightwire_ipc.arenas import NONE, OPEN, SHUT, Arenas, Link
from weightwire_ipc.device import DeviceError
from weightwire_ipc.leases import WriteLocks
from weightwire_ipc.memory import Board
from weightwire_ipc.packing import Packer
from weightwire_ipc.protocol import (
    BURST,
    PROTOCOL,
    Channel,
    Goodbye,
    Hello,
    Memory,
    Message,
    News,
    Probed,
    Reject,
    Report,
    SlotInfo,
    Welcome,
    encode_news,
    peer_of,
)
from weightwire_ipc.slots import Need, Slot, choose_slot

if TYPE_CHECKING:
    import socket

    from weightwire.endpoint import Endpoint
    from weightwire.weights.payload import Payload
    from weightwire_ipc.device import Layer
    from weightwire_ipc.options import IpcOptions

__all__ = ["IpcSender"]

ATTENDED = 0.02
"""Seconds for which the service thread keeps off the sockets after the trainer's own thread was at them: two threads
that wake up for the same message cost more than one."""
SURPLUS_AGE = 8
"""Versions for which a slot beyond ``slots`` must have been of no use before it is given up."""
FILL_RATE = 4e9
"""Bytes a second at which new memory is had, about: it is worth waiting that long for old memory instead."""
QUEUE = 32 * 1024
"""Bytes of socket buffer towards a worker, so that one that does not read holds few descriptors of old slots."""
DEAF = 0.1
"""Seconds for which nobody is let in after there were not enough descriptors or memory to do so."""
TOUCH = 3600.0
"""Seconds between marks that the lock file is in use."""


Offers = tuple["SlotInfo | None", "SlotInfo | None"]
"""A full version and a subset on it, as the shelf has them for a worker."""


class Peer:
    """One connection. It has a name as soon as the worker has introduced itself."""

    def __init__(self, channel: Channel, lane: int, pid: int) -> None:
        self.channel = channel
        self.fd = channel.fileno()
        self.lane = lane
        self.pid = pid
        self.board = Board()
        self.link = Link()
        self.joined: Joined | None = None
        self.hello: Hello | None = None
        self.acting: Version | None = None
        self.known: set[int] = set()  # slots whose descriptors it has
        self.told: Offers = (None, None)
        self.dirty = False  # there is news for it
        self.rung = False  # it was woken, and has not been heard since
        self.watched = False  # the service thread waits until its socket takes more

    @property
    def name(self) -> str:
        return self.joined.worker if self.joined else f"process {self.pid}"

    def lacks(self, stamp: Version) -> bool:
        """Whether it does not act with this version or a newer one yet."""
        return self.acting is None or self.acting < stamp


def _bell(undo: ExitStack) -> int:
    bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    undo.callback(os.close, bell)
    return bell


class _Announcement(NamedTuple):
    info: SlotInfo
    to: frozenset[str] | None


class IpcSender(Sender):
    """See :class:`weightwire.transport.Sender`. ``_lock`` guards all but the slots' bytes; no wait happens under it."""

    def __init__(
        self, endpoint: Endpoint, options: IpcOptions, context: SenderContext, layer: Layer | None = None
    ) -> None:
        """``layer``: what keeps payloads on a device where all of their tensors are on one."""
        self._options = options
        self._arenas = None if layer is None else Arenas(layer)
        self._device = ""  # on which payloads were, at least once
        self._told_of: set[str] = set()  # troubles with it that were logged
        self._logger = context.logger
        self._lock = threading.Lock()
        self._slots: dict[int, Slot] = {}
        self._packer = Packer()
        self._next_slot = self._next_lane = 0
        self._shelf: Shelf[SlotInfo] = Shelf()
        self._announcement: _Announcement | None = None
        self._untold = False
        self._written: tuple[Offers, bytes] | None = None  # the newest offers, and the news of them
        self._peers: dict[int, Peer] = {}  # by descriptor
        self._workers: dict[str, Peer] = {}  # by name
        self._broken_off = False  # a turn at the sockets has not come to its end
        self._events: list[Event] = []
        self._closed = self._freed = False
        self._attended = 0.0
        self._deaf_until = 0.0  # when the listener is to be looked at again; 0: it is
        self._short = False  # of what it takes to accept a connection, when last tried
        with ExitStack() as undo:
            self._open(endpoint.location, context.epoch, undo)
            self.epoch = self._place.epoch
            self.endpoint = str(replace(endpoint, location=self._place.location))
            self._origin = Origin(f"The ipc sender of {self.endpoint}")
            name = f"weightwire-ipc {self._place.location}"
            self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
            undo.callback(self._halt)
            self._thread.start()
            self._own = undo.pop_all()
        forbid(self)

    def _open(self, location: str, epoch: int, undo: ExitStack) -> None:
        """Take the place, and whatever else has to be given back."""
        self._place = place.claim(location, epoch)
        undo.callback(self._place.close)
        self._leases = WriteLocks()
        undo.callback(self._leases.close)
        self._bell, self._wake = _bell(undo), _bell(undo)  # wake the trainer's thread, the service thread
        self._epoll = undo.enter_context(select.epoll())
        self._epoll.register(self._place.listener.fileno(), select.EPOLLIN)
        self._waiter = undo.enter_context(select.epoll())
        for fd in (self._epoll.fileno(), self._bell):
            self._waiter.register(fd, select.EPOLLIN)

    # -- stage -------------------------------------------------------------------------------------------------------

    def stage(self, payload: Payload, to: frozenset[str] | None, deadline: Deadline) -> None:
        self._check()
        if fault := self._place.check():
            self._tell_of(fault)
        if payload.stamp.epoch > self.epoch:  # the core goes beyond what a worker has
            self._place.record(payload.stamp.epoch)
            self.epoch = payload.stamp.epoch
        self._attended = time.monotonic() + ATTENDED
        nbytes = payload.layout.nbytes
        there, here = (False, True) if self._arenas is None else self._places(self._arenas, payload, to)
        slot = self._take(Need(nbytes, payload.header_size), payload.stamp, deadline, roomless=not here)
        try:
            slot.blank()
            slot.nbytes = nbytes
            if there:
                where = self._write_there(slot, payload, here=here)
            else:
                self._packer.pack(payload, slot.out(nbytes), slot.part)
                where = 1
            slot.write_header(payload.stamp, payload.header_bytes(), where)
        finally:
            self._leases.drop(slot.number)
        with payload.phase("notify"):
            info = SlotInfo(payload.stamp, payload.base, slot.number, *slot.shape)
            # From here on it happens, if need be by the service thread: no worker is left out by a Ctrl-C.
            self._announcement = _Announcement(info, to)
            try:
                with self._lock:
                    self._announce()
            except BaseException:
                self._ring(self._wake)
                raise

    def _places(self, arenas: Arenas, payload: Payload, to: frozenset[str] | None) -> tuple[bool, bool]:
        """Whether a payload is to be written to the device on which its tensors are, and whether to the host."""
        home = arenas.layer.home(payload.devices)
        if not home:
            return False, True
        with self._lock:
            if home != arenas.device:
                arenas.moved(home)
                self._device = home
            for peer in list(self._workers.values()):
                self._probe(peer)
            return arenas.needs(peer.link for name, peer in self._workers.items() if to is None or name in to)

    def _write_there(self, slot: Slot, payload: Payload, *, here: bool) -> int:
        """Pack on the device, and copy what was packed to the host where that is needed too; where it lies then."""
        assert self._arenas is not None
        try:
            with self._lock:
                arena = self._arenas.equip(slot)
        except DeviceError as exc:
            self._tell_of("this version goes through the host", exc)
            self._packer.pack(payload, slot.out(payload.nbytes), slot.part)
            return 1
        packed = arena.out(payload.nbytes)
        payload.pack(packed)  # when it returns, the device has done it
        if here:
            slot.out(payload.nbytes).copy_(packed)
        return arena.number << 1 | here

    def _tell_of(self, what: str, exc: Exception | None = None) -> None:
        """Once for each kind of trouble."""
        why = what if exc is None else f"{what}: {exc}"
        if why not in self._told_of:
            self._told_of.add(why)
            self._logger.warning("%s: %s", self.endpoint, why)

    def _take(self, need: Need, stamp: Version, deadline: Deadline, *, roomless: bool = False) -> Slot:
        """A slot of the right size, locked against readers. ``roomless``: a new one needs no memory for the payload."""
        begun = time.monotonic()
        patience = begun + need.payload / FILL_RATE
        pause = 0.0002
        while True:
            with self._lock:
                slot = self._find(need, patient=time.monotonic() < patience, roomless=roomless)
            if slot is not None:
                return slot
            if deadline.expired:
                raise self._no_slot(stamp, time.monotonic() - begun)
            time.sleep(min(pause, max(deadline.remaining, 0.0001)))
            pause = min(2 * pause, 0.01)
            self._attended = time.monotonic() + ATTENDED
            self._turn()  # reports may set a slot free

    def _find(self, need: Need, *, patient: bool, roomless: bool) -> Slot | None:
        """Look once for a slot, and make one where that is due; ``None``: wait."""
        self._announce()
        kept = self._kept()
        if len(self._slots) <= self._options.slots:  # none to be weighed against the others, or to be given up
            for slot in self._slots.values():
                if slot.number not in kept and slot.shape.fits(need) and self._leases.take(slot.number):
                    return slot
        free: list[Slot] = []
        try:
            for slot in list(self._slots.values()):
                if slot.number not in kept and self._leases.take(slot.number):
                    free.append(slot)
            busy = [slot for slot in self._slots.values() if slot not in free]
            most = self._options.most(len(self._workers), len(kept))
            plan = choose_slot(need, free, busy, self._options.slots, most)
            if plan.use is None and plan.make and not (plan.patient and patient):
                plan = plan._replace(use=self._make(need, free, plan.instead, roomless))
            if plan.use is not None:
                self._give_up_surplus(free, plan.use)
        except BaseException:
            for slot in free:
                self._leases.drop(slot.number)
            raise
        for slot in free:
            if slot is not plan.use:
                self._leases.drop(slot.number)
        return plan.use

    def _make(self, need: Need, free: list[Slot], instead: Slot | None, roomless: bool) -> Slot:
        """A new slot, locked. Where memory is short, free slots make way for it."""
        if instead is not None:
            self._discard(instead)
        try:
            slot = Slot(self._next_slot, need, roomless=roomless)
        except StorageFullError:
            spare = [slot for slot in free if slot.number in self._slots]
            if not spare:
                raise
            for slot in spare:
                self._discard(slot)
            slot = Slot(self._next_slot, need, roomless=roomless)
        self._next_slot += 1
        self._slots[slot.number] = slot
        self._leases.take(slot.number)
        return slot

    def _discard(self, slot: Slot) -> None:
        self._slots.pop(slot.number, None)
        self._written = None
        for peer in self._peers.values():
            peer.known.discard(slot.number)
        slot.close()

    def _give_up_surplus(self, free: list[Slot], used: Slot) -> None:
        """Slots beyond ``slots`` that were of no use for a while make room again."""
        used.idle = 0
        for slot in free:
            if slot is not used:
                slot.idle += 1
        old = [slot for slot in free if slot.idle >= SURPLUS_AGE and slot.number in self._slots]
        while old and len(self._slots) > self._options.slots:
            self._discard(old.pop())

    def _kept(self) -> set[int]:
        """Slots that somebody may still have to read: those for all, and others whose version is not applied yet."""
        common = self._shelf.of("")
        kept = {info.slot for info in common if info is not None}
        for name, peer in self._workers.items():
            own = self._shelf.of(name)
            if own is not common:
                kept |= {info.slot for info in own if info is not None and peer.lacks(info.stamp)}
        return kept

    def _no_slot(self, stamp: Version, seconds: float) -> WaitTimeout:
        with self._lock:
            lanes = {peer.lane: name for name, peer in self._workers.items()}
            kept = self._kept()
            holders: dict[str, None] = {}
            for number in self._slots:
                for lane in self._leases.holders(number) if number not in kept else ():
                    holders[lanes.get(lane, f"a former worker (lane {lane})")] = None
            for name, peer in self._workers.items():
                mine = [i for i in self._shelf.of(name) if i and i not in self._shelf.of("")]
                if any(peer.lacks(info.stamp) for info in mine):
                    holders[name] = None
        who = ", ".join(holders) or "nobody any more"
        return WaitTimeout(
            f"version {stamp.number} found no free slot within {seconds:.3g} s: all {len(self._slots)} are in use by "
            f"{who}. Let the views of old versions go there, or raise max_slots in the endpoint.",
            version=stamp.number,
            worker=next(iter(holders), None),
            phase="stage",
        )

    # -- news --------------------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Put the newest version on the shelf and tell everybody. May be broken off anywhere, and done again."""
        pending = self._announcement
        if pending is not None:
            # Who left meanwhile has nothing on the shelf, or else whoever comes under that name would be offered it.
            to = None if pending.to is None else pending.to & self._workers.keys()
            self._shelf.put(pending.info, to)
            for name, peer in self._workers.items():
                peer.dirty |= to is None or name in to
            self._untold = True
            self._announcement = None
        if self._untold:
            for peer in list(self._workers.values()):
                if peer.dirty and not peer.watched:
                    self._tell(peer)
            self._untold = False

    def _tell(self, peer: Peer) -> None:
        """Put a worker's news up, or see to it that this is done as soon as its socket takes the memory they need."""
        if peer.joined is not None and peer.dirty and self._hand_over(peer):
            offers = self._shelf.of(peer.name)
            peer.board.write(self._news(offers))
            peer.dirty = False
            if not (peer.rung and peer.channel.unread):  # else it is awake already
                peer.channel.ring()
                peer.rung = True
            self._staged(peer, offers)
        self._watch(peer, peer.dirty or not peer.channel.idle)

    def _news(self, offers: Offers) -> bytes:
        """What is to stand on the board of whoever has these offers: made once for all of them."""
        known = self._written
        if known is None or known[0] is not offers:
            known = self._written = (offers, encode_news(News(*offers, tuple(self._slots), self._next_slot)))
        return known[1]

    def _hand_over(self, peer: Peer) -> bool:
        """Send the descriptors of slots that the worker does not have; whether it has all that it needs."""
        if not peer.channel.flush():
            return False
        wanted = {info.slot for info in self._shelf.of(peer.name) if info is not None}
        slots = [self._slots[number] for number in wanted - peer.known if number in self._slots]
        if slots:
            memory = Memory(tuple((slot.number, *slot.shape) for slot in slots))
            if not peer.channel.try_send(memory, [slot.shared for slot in slots]):
                return False
            peer.known.update(wanted)
        return not self._device or self._reach_out(peer, wanted)

    # -- the device --------------------------------------------------------------------------------------------------

    def _probe(self, peer: Peer) -> None:
        """Find out whether a worker on a device reads the trainer's, where that is not known."""
        assert self._arenas is not None
        if not self._device or not peer.link.device or peer.link.state != NONE:
            return
        if reason := self._arenas.ask(peer.link, peer.channel):
            self._shut(peer, reason)

    def _shut(self, peer: Peer, reason: str) -> None:
        """A worker does not read device memory: it is given the host's."""
        assert self._arenas is not None
        peer.link.state = SHUT
        self._logger.warning("%s: worker %r is sent its weights through the host: %s", self.endpoint, peer.name, reason)
        self._note(peer, f"through the host: {reason}")
        self._arenas.withdraw(peer.link)

    def _note(self, peer: Peer, text: str) -> None:
        assert peer.joined is not None
        notes = {"device": text[:2000]}
        self._events.append(Noted(worker=peer.name, incarnation=peer.joined.incarnation, notes=notes))

    def _hear_probed(self, peer: Peer, reason: str) -> None:
        if reason and peer.link.hopeful:
            self._shut(peer, reason)
            peer.dirty = True  # what it could not read is there for it once more
            self._tell(peer)
        elif not reason and peer.link.probe is not None:
            peer.link.state, peer.link.probe = OPEN, None
            self._note(peer, f"reads the memory of device {self._device}")

    def _reach_out(self, peer: Peer, wanted: set[int]) -> bool:
        """See to it that a worker can read the payloads of these slots, on the device or else on the host; False where
        its socket takes no more now."""
        assert self._arenas is not None
        for slot in [self._slots[number] for number in wanted if number in self._slots]:
            arena = slot.arena if slot.where >> 1 else None
            if arena is None:
                continue
            if peer.link.hopeful and arena.device == self._device:
                try:
                    if not self._arenas.lend(slot, arena, peer.link, peer.channel):
                        return False
                except DeviceError as exc:
                    self._shut(peer, str(exc))
            if not slot.where & 1 and not (peer.link.state == OPEN and arena.number in peer.link.lent):
                self._bring_home(slot)
        return True

    def _bring_home(self, slot: Slot) -> None:
        """Copy a payload that lies on the device only to the host, for whoever reads it there. Its slot is kept, so
        nobody writes to it."""
        assert slot.arena is not None
        try:
            slot.out(slot.nbytes).copy_(slot.arena.out(slot.nbytes))
        except (StorageFullError, RuntimeError) as exc:
            self._tell_of("a version on the device cannot be had on the host", exc)
            return
        slot.where |= 1

    def _staged(self, peer: Peer, offers: Offers) -> None:
        """A worker that was told of a version has it within reach."""
        assert peer.joined is not None
        have = peer.joined.have.stamp
        for info in offers:
            if info is not None and info not in peer.told and (have is None or info.stamp > have):
                self._events.append(Staged(worker=peer.name, incarnation=peer.joined.incarnation, stamp=info.stamp))
        peer.told = offers

    def _watch(self, peer: Peer, wanted: bool) -> None:
        if wanted != peer.watched and peer.channel.fileno() in self._peers:
            peer.watched = wanted
            self._epoll.modify(peer.channel.fileno(), select.EPOLLIN | (select.EPOLLOUT if wanted else 0))
            if wanted:
                self._ring(self._wake)

    # -- events ------------------------------------------------------------------------------------------------------

    def events(self, deadline: Deadline) -> list[Event]:
        if self._closed or not self._origin.here:
            return []
        now = time.monotonic()
        if now >= deadline.at or self._broken_off:
            self._turn()
        while now < deadline.at and not self._events and not self._closed:
            self._attended = now + ATTENDED
            for fd, _ in self._waiter.poll(min(deadline.at - now, ATTENDED / 2)):
                if fd == self._bell:
                    self._hush(fd)
                else:
                    self._turn(1)  # one packet is the rule; whatever is left wakes us again
            now = time.monotonic()
        # No call between these lines: a Ctrl-C is noticed only at calls, and must not lose an event.
        events = self._events[:]
        del self._events[: len(events)]
        return events

    def _turn(self, most: int = BURST) -> None:
        """Handle what is ready on the sockets now, without waiting: up to so many packets of each."""
        with self._lock:
            if self._closed:
                return
            self._announce()
            if self._deaf_until:
                self._listen_again()
            if self._broken_off:  # by an interrupt, after messages had left a socket and before they were handled
                for one in list(self._peers.values()):
                    self._listen(one, most)
            self._broken_off = True
            for fd, mask in self._epoll.poll(0):
                peer = self._peers.get(fd)
                if peer is None:
                    self._accept()
                    continue
                if mask & ~select.EPOLLOUT:
                    self._listen(peer, most)
                if mask & select.EPOLLOUT and fd in self._peers:
                    self._tell(peer)
            self._broken_off = False

    def _accept(self) -> None:
        """Let one worker in. What is short now may be there again soon: meanwhile they wait at the door."""
        try:
            sock, _ = self._place.listener.accept()
            try:
                self._admit(sock)
            except BaseException:
                sock.close()
                raise
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except (OSError, StorageFullError) as exc:
            self._deaf_until = time.monotonic() + DEAF  # first, so that an interrupt leaves nobody deaf for ever
            with suppress(FileNotFoundError):
                self._epoll.unregister(self._place.listener.fileno())
            self._ring(self._wake)
            if not self._short:
                advice = "; raise the limit (ulimit -n)" if getattr(exc, "errno", 0) == errno.EMFILE else ""
                self._logger.error("%s: cannot let workers in: %s%s", self.endpoint, exc, advice)
            self._short = True
        else:
            self._short = False

    def _admit(self, sock: socket.socket) -> None:
        pid, uid = peer_of(sock)
        if uid != os.geteuid():
            self._logger.warning("%s: turned away process %d of user %d", self.endpoint, pid, uid)
            sock.close()
            return
        self._next_lane += 1
        peer = Peer(Channel(sock), self._next_lane, pid)
        try:
            peer.channel.widen(QUEUE)
            self._epoll.register(sock.fileno(), select.EPOLLIN)
            self._peers[sock.fileno()] = peer
        except BaseException:
            peer.board.close()
            raise

    def _listen_again(self) -> None:
        if time.monotonic() >= self._deaf_until:
            with suppress(FileExistsError):
                self._epoll.register(self._place.listener.fileno(), select.EPOLLIN)
            self._deaf_until = 0.0

    def _listen(self, peer: Peer, most: int = BURST) -> None:
        """Read what a worker says. Anything malformed ends this connection, and no other."""
        try:
            peer.channel.drain(most)
            for message, fds in peer.channel.messages():
                if fds:
                    raise WireError(f"{len(fds)} descriptors came with a {type(message).__name__}")
                self._hear(peer, message)
                if peer.channel.fileno() not in self._peers:
                    return
        except WireError as exc:
            self._logger.warning("%s: %s: %s; connection closed", self.endpoint, peer.name, exc)
            self._lose(peer, f"it sent something malformed: {exc}")
            return
        if peer.channel.ended:
            self._lose(peer, f"process {peer.pid} closed the connection without a goodbye, or died")

    def _hear(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Report) and peer.joined is not None:
            peer.rung = False
            event = wire.decode_event(message.event)
            if not isinstance(event, (Applied, Refused)):
                raise WireError(f"a report of kind {type(event).__name__}")
            if isinstance(event, Applied):
                peer.acting = max(peer.acting or event.stamp, event.stamp)
            joined = peer.joined
            if event.worker != joined.worker or event.incarnation != joined.incarnation:
                event = msgspec.structs.replace(event, worker=joined.worker, incarnation=joined.incarnation)
            self._events.append(event)
        elif isinstance(message, Probed) and peer.joined is not None:
            self._hear_probed(peer, message.reason)
        elif isinstance(message, Goodbye):
            if peer.joined is not None:  # first: where the rest is broken off, the connection counts as lost
                self._events.append(Left(worker=peer.name, incarnation=peer.joined.incarnation))
            self._drop(peer)
        elif isinstance(message, Hello) and peer.hello in (None, message):
            self._greet(peer, message)
        else:
            raise WireError(f"{type(message).__name__} came out of turn")

    def _greet(self, peer: Peer, hello: Hello) -> None:
        """May be broken off anywhere, and done again: a second welcome says nothing new."""
        peer.hello = hello
        if hello.protocol != PROTOCOL:
            self._reject(
                peer,
                "protocol",
                f"the updater speaks protocol {PROTOCOL}, this worker {hello.protocol}: install one version of "
                "weightwire-ipc on both sides",
            )
            return
        joined = wire.decode_event(hello.joined)
        if not isinstance(joined, Joined):
            raise WireError(f"a hello of kind {type(joined).__name__}")
        if self._workers.get(joined.worker) is not peer and not self._make_way(joined):
            other = self._workers[joined.worker].pid
            self._reject(
                peer,
                "name",
                f"another live worker is called {joined.worker!r} (process {other}); give each a name of its own",
            )
            return
        if peer.joined is None:
            self._events.append(joined)
        peer.joined, peer.acting = joined, joined.have.acting
        self._workers[joined.worker] = peer
        peer.channel.send(Welcome(self.epoch, peer.lane), [peer.board.shared, self._leases.shared])
        if self._arenas is not None and hello.device:
            peer.link.device = hello.device
            self._probe(peer)
        peer.dirty = True
        self._tell(peer)

    def _make_way(self, joined: Joined) -> bool:
        """Whether the name is free: an old connection of that name that has ended is cleared away first."""
        other = self._workers.get(joined.worker)
        if other is not None:
            self._listen(other)
        return joined.worker not in self._workers

    def _reject(self, peer: Peer, kind: str, reason: str) -> None:
        self._logger.warning("%s: turned away process %d: %s", self.endpoint, peer.pid, reason)
        peer.channel.send(Reject(kind, reason[:2000]))
        self._drop(peer)

    def _lose(self, peer: Peer, reason: str) -> None:
        if self._arenas is not None:
            self._arenas.withdraw(peer.link)
        if peer.joined is not None:  # perhaps again, where the rest was broken off: it counts once
            self._events.append(Lost(worker=peer.name, incarnation=peer.joined.incarnation, reason=reason))
        self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        """Forget a connection. May be broken off anywhere, and done again."""
        if self._workers.get(peer.name) is peer:
            del self._workers[peer.name]
            self._shelf.forget(peer.name)
        if peer.channel.fileno() in self._peers:
            with suppress(FileNotFoundError):
                self._epoll.unregister(peer.fd)
        peer.channel.close()
        peer.board.close()
        if self._peers.get(peer.fd) is peer:
            del self._peers[peer.fd]

    # -- the service thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Look after the workers while the trainer's own thread is elsewhere."""
        waiter = select.poll()
        for fd in (self._epoll.fileno(), self._wake):
            waiter.register(fd, select.POLLIN)
        parked = select.poll()
        parked.register(self._wake, select.POLLIN)
        touched = time.monotonic()
        while True:
            pause = self._attended - time.monotonic()
            if pause > 0:
                ready = parked.poll(pause * 1000)
            else:
                ready = waiter.poll((DEAF if self._deaf_until else TOUCH) * 1000)
            self._hush(self._wake)  # before the look: what rings from now on is heard next time
            if self._closed:
                return
            if time.monotonic() - touched > TOUCH:
                touched = time.monotonic()
                self._place.touch()
            if ready or self._deaf_until:
                try:
                    self._turn()
                except Exception:
                    self._logger.exception("%s: the service thread failed and goes on", self.endpoint)
                    time.sleep(0.1)
                if self._events:
                    self._ring(self._bell)

    @staticmethod
    def _ring(bell: int) -> None:
        with suppress(BlockingIOError):
            os.eventfd_write(bell, 1)

    @staticmethod
    def _hush(bell: int) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(bell)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        """Whatever goes wrong on the way, the place is free afterwards, or when this is called again."""
        if self._freed or not self._origin.here:
            return
        try:
            self._turn()  # whoever has just come is told that it is over, too
            self._tell_the_last()
        finally:
            self._say_goodbye()
            self._free(deadline)

    def _tell_the_last(self) -> None:
        with self._lock:
            for peer in list(self._workers.values()):
                if peer.dirty and not self._closed:  # it has not read its news for a while; now they must be there
                    peer.channel.widen(QUEUE * 16)
                    self._tell(peer)

    def _say_goodbye(self) -> None:
        with self._lock:
            self._closed = True
            for peer in list(self._peers.values()):
                peer.board.say_closed()
                self._drop(peer)
            self._place.close()

    def _free(self, deadline: Deadline) -> None:
        self._halt(max(1.0, deadline.remaining))
        for slot in self._slots.values():
            slot.close()  # idempotent, should Ctrl-C come up on the way
        self._slots.clear()
        if self._arenas is not None:
            self._arenas.moved("")
        self._leases.close()  # here, because a stack calls nothing twice that Ctrl-C has broken off
        self._own.close()
        self._freed = True

    def _halt(self, seconds: float = 1.0) -> None:
        """End the service thread."""
        self._closed = True
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._ring(self._wake)
            self._thread.join(seconds)

    def _check(self) -> None:
        self._origin.check()
        if self._closed:
            raise ClosedError(f"{self._origin.what} is closed")

    def in_child(self) -> None:
        """In a forked child: let go of everything that tells the others that we live."""
        if self._freed:  # these numbers may stand for something else by now
            return
        sockets = [peer.channel.detach() for peer in self._peers.values()]
        give_up(*sockets, *self._place.detach(), *self._leases.detach(), self._bell, self._wake)
        self._epoll.close()
        self._waiter.close()
