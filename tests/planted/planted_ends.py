"""Both ends. The trainer's thread sends each worker the newest version, whole; the worker's thread keeps it for
``poll``. Each method that a fault replaces is one that the right backend needs anyway."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import secrets
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from weightwire import forks, rundir, wire
from weightwire.endpoint import Endpoint, scoped
from weightwire.errors import ClosedError, EndpointInUseError, WireError
from weightwire.transport import (
    Applied,
    Deadline,
    Delivery,
    Event,
    Have,
    Header,
    Joined,
    Left,
    Lost,
    Receiver,
    ReceiverContext,
    Refused,
    Sender,
    SenderContext,
    Shelf,
    Staged,
    Version,
    choose,
)
from weightwire.weights.payload import Payload

PREFIX = struct.Struct("<4scIQ")  # magic, kind, bytes of the head, bytes of the body
MAGIC = b"POST"
EVENT, VERSION, BASE, BYE, TAKEN = b"E", b"V", b"F", b"B", b"T"  # a BASE is of use with the subset that follows it
RETRY = 0.02
"""Seconds between looks for a trainer."""


class Item(NamedTuple):
    """A version on a shelf, at either end."""

    stamp: Version
    base: Version | None
    header: Header
    array: np.ndarray[Any, Any]


def frame(kind: bytes, head: bytes = b"", body: bytes = b"") -> bytes:
    return PREFIX.pack(MAGIC, kind, len(head), len(body)) + head + body


class Frames:
    """Bytes in, whole frames out."""

    def __init__(self, most: int) -> None:
        self.data, self.most = bytearray(), most

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
        self.data += data
        while len(self.data) >= PREFIX.size:
            magic, kind, head, body = PREFIX.unpack_from(self.data)
            if magic != MAGIC or head + body > self.most:
                raise WireError(f"a frame that begins with {bytes(self.data[:8])!r}")
            stop = PREFIX.size + head + body
            if len(self.data) < stop:
                return
            middle = PREFIX.size + head
            found = kind, bytes(self.data[PREFIX.size : middle]), bytes(self.data[middle:stop])
            del self.data[:stop]
            yield found


class Peer:
    """A connection to a worker, and what it was sent."""

    def __init__(self, conn: socket.socket) -> None:
        self.conn, self.frames = conn, Frames(wire.MAX_HEADER)
        self.out: bytes | memoryview = b""
        self.hello: Joined | None = None
        self.have = Have()
        self.goodbye = False


class PostSender(Sender):
    """One service thread: accepts, reads events, and sends to each worker what :func:`choose` picks for it."""

    def __init__(self, endpoint: Endpoint, context: SenderContext) -> None:
        location = endpoint.location or secrets.token_hex(8)
        self.endpoint = str(dataclasses.replace(endpoint, location=location))
        self.name, self.directory = rundir.file_name("planted", scoped(location)), rundir.create()
        self.lock = self.claim()
        self.epoch = max(context.epoch, int(os.pread(self.lock, 32, 0) or b"0") + 1)
        os.pwrite(self.lock, b"%032d" % self.epoch, 0)
        self.shelf: Shelf[Item] = Shelf()
        self.peers: dict[int, Peer] = {}
        self.heard: deque[Event] = deque()
        self.news = threading.Condition()
        self.ending, self.over = False, False
        self.listener, (self.bell, self.ring) = self.listen(), socket.socketpair()
        self.selector = selectors.DefaultSelector()
        for fd in (self.listener, self.bell):
            fd.setblocking(False)
            self.selector.register(fd, selectors.EVENT_READ)
        forks.forbid(self)
        self.thread = threading.Thread(target=self.serve, name="planted", daemon=True)
        self.thread.start()

    def claim(self) -> int:
        lock = os.open(self.directory / f"{self.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise EndpointInUseError(f"{self.endpoint} has a live updater") from None
        return lock

    def listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        with rundir.opened(self.directory) as directory:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.name, dir_fd=directory)
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(rundir.path_in(directory, self.name))
        listener.listen(64)
        return listener

    def in_child(self) -> None:
        conns = [peer.conn for peer in self.peers.values()]
        for held in (self.listener, self.bell, self.ring, *conns):
            if held.fileno() >= 0:
                forks.give_up(held.detach())
        forks.give_up(self.lock)

    # -- what the core calls -------------------------------------------------------------------------------------------

    def stage(self, payload: Payload, to: frozenset[str] | None, deadline: Deadline) -> None:
        self.publish(self.hold(payload), to)

    def hold(self, payload: Payload) -> Item:
        array = np.empty(payload.nbytes, np.uint8)
        payload.pack(torch.from_numpy(array))
        return Item(payload.stamp, payload.base, payload.header, array)

    def publish(self, item: Item, to: frozenset[str] | None) -> None:
        with self.news:
            self.shelf.put(item, to)
        self.wake()

    def events(self, deadline: Deadline) -> list[Event]:
        with self.news:
            if not self.heard and not self.over:
                self.news.wait(deadline.remaining)
            if self.over:
                raise ClosedError(f"the updater of {self.endpoint} is closed")
            heard = list(self.heard)
            self.heard.clear()
            return heard

    def close(self, deadline: Deadline) -> None:
        if self.over:
            return
        self.ending = True
        self.wake()
        self.thread.join(deadline.remaining + 1.0)
        with self.news:
            self.over = True
            self.news.notify_all()
        for held in (self.listener, self.bell, self.ring):
            held.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.directory / self.name)
        os.close(self.lock)
        self.lock = -1

    # -- the thread ----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self.ring.send(b"!", socket.MSG_DONTWAIT)

    def serve(self) -> None:
        while not self.ending:
            for key, _ in self.selector.select(0.5):
                if key.fileobj is self.bell:
                    self.bell.recv(4096)
                elif key.fileobj is self.listener:
                    self.accept()
                elif key.fd in self.peers:
                    self.read(self.peers[key.fd])
            for peer in list(self.peers.values()):
                self.write(peer)
        self.part()
        self.selector.close()

    def accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            conn, _ = self.listener.accept()
            conn.setblocking(False)
            self.peers[conn.fileno()] = Peer(conn)
            self.selector.register(conn, selectors.EVENT_READ)

    def read(self, peer: Peer) -> None:
        try:
            data = peer.conn.recv(1 << 16)
            for kind, head, _ in peer.frames.feed(data):
                self.take(peer, kind, head)
        except BlockingIOError:
            return
        except (OSError, WireError):
            data = self.nonsense(peer)
        if not data:
            self.gone(peer)

    def nonsense(self, peer: Peer) -> bytes:
        """What came is not of ours: the connection ends."""
        return b""

    def take(self, peer: Peer, kind: bytes, head: bytes) -> None:
        if kind == BYE:
            peer.goodbye = True
            return
        event = wire.decode_event(head)
        if isinstance(event, Joined):
            if self.taken(event):
                peer.out = frame(TAKEN)
                return
            peer.hello, peer.have = event, event.have
        if peer.hello is not None:
            self.emit(event)

    def taken(self, hello: Joined) -> bool:
        return any(other.hello and other.hello.worker == hello.worker for other in self.peers.values())

    def emit(self, event: Event) -> None:
        with self.news:
            self.heard.append(event)
            self.news.notify_all()

    def gone(self, peer: Peer) -> None:
        self.selector.unregister(peer.conn)
        del self.peers[peer.conn.fileno()]
        peer.conn.close()
        if peer.hello is not None:
            who = {"worker": peer.hello.worker, "incarnation": peer.hello.incarnation}
            with self.news:
                self.shelf.forget(peer.hello.worker)
            self.emit(Left(**who) if peer.goodbye else Lost(**who, reason="its connection ended"))

    def pick(self, peer: Peer) -> Item | None:
        """What this worker is to be sent next."""
        if peer.hello is None:
            return None
        with self.news:
            return choose(peer.have, *self.shelf.of(peer.hello.worker))

    def write(self, peer: Peer) -> None:
        try:
            while True:
                if not peer.out:
                    item = self.pick(peer)
                    if item is None:
                        break
                    peer.have = Have(item.stamp, item.base or item.stamp)
                    more = self.pick(peer)
                    kind = BASE if more and more.base == item.stamp else VERSION
                    whole = frame(kind, wire.encode_header(item.header), item.array.tobytes())
                    peer.out = memoryview(whole)  # of which a slice costs nothing
                peer.out = peer.out[peer.conn.send(peer.out) :]
        except BlockingIOError:
            pass
        except OSError:
            return  # the next read tells
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        if peer.conn.fileno() in self.peers:
            self.selector.modify(peer.conn, wanted)

    def part(self) -> None:
        """Let go what was accepted, then say goodbye."""
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                peer.conn.settimeout(1.0)
                while peer.out or self.pick(peer):
                    self.write(peer)
                    peer.conn.sendall(peer.out)
                    peer.out = b""
                peer.conn.sendall(frame(BYE))
            peer.conn.close()


class PostReceiver(Receiver):
    """One service thread: connects, takes whole versions, says that they are staged."""

    def __init__(self, endpoint: Endpoint, context: ReceiverContext) -> None:
        self.context, self.whereabouts = context, f"no socket of {endpoint}"
        self.who = {"worker": context.worker, "incarnation": context.incarnation}
        self.path = rundir.create() / rundir.file_name("planted", scoped(endpoint.location))
        self.full: Item | None = None
        self.part: Item | None = None
        self.base: Item | None = None
        self.news = threading.Condition()
        self.conn: socket.socket | None = None
        self.ending, self.refused, self.stop = False, False, threading.Event()
        self.mouth = threading.Lock()
        self.layouts = wire.LayoutCache()
        forks.forbid(self)
        self.thread = threading.Thread(target=self.serve, name="planted", daemon=True)
        self.thread.start()

    def in_child(self) -> None:
        if self.conn is not None and self.conn.fileno() >= 0:
            forks.give_up(self.conn.detach())

    # -- what the core calls -------------------------------------------------------------------------------------------

    def poll(self, have: Have, deadline: Deadline | None) -> Delivery | None:
        with self.news:
            while True:
                if self.refused:
                    raise EndpointInUseError(f"a worker named {self.context.worker!r} is live already")
                item = None if self.closed else self.pick(have)
                if item is not None:
                    return self.deliver(item)
                self.closed = self.closed or self.ending
                if self.closed or deadline is None or deadline.expired:
                    return None
                self.news.wait(deadline.remaining)

    def pick(self, have: Have) -> Item | None:
        return choose(have, self.full, self.part)

    def deliver(self, item: Item) -> Delivery:
        return Delivery(item.header, array=item.array.copy(), writable=True)

    def report(self, event: Applied | Refused) -> None:
        self.say(frame(EVENT, wire.encode_event(event)))

    def close(self, deadline: Deadline) -> None:
        self.say(frame(BYE))
        self.stop.set()
        conn = self.conn
        if conn is not None:
            with contextlib.suppress(OSError):
                conn.shutdown(socket.SHUT_RDWR)
        self.thread.join(deadline.remaining + 1.0)
        self.connected, self.closed = False, True

    def say(self, data: bytes) -> None:
        with self.mouth, contextlib.suppress(OSError):
            if self.conn is not None:
                self.conn.sendall(data)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        while not self.stop.is_set() and not self.ending and not self.refused:
            with socket.socket(socket.AF_UNIX) as conn, contextlib.suppress(OSError, WireError):
                with rundir.opened(self.path.parent) as directory:
                    conn.connect(rundir.path_in(directory, self.path.name))
                hello = msgspec.structs.replace(self.context.joined, have=self.context.have())
                conn.sendall(frame(EVENT, wire.encode_event(hello)))
                self.conn, self.connected = conn, True
                self.read(conn)
            self.conn = None
            with self.news:
                self.connected = False
                self.news.notify_all()
            self.stop.wait(RETRY)

    def read(self, conn: socket.socket) -> None:
        frames = Frames(wire.MAX_BYTES)
        while data := conn.recv(1 << 20):
            for kind, head, body in frames.feed(data):
                if kind in (VERSION, BASE):
                    header = wire.decode_header(head, self.layouts)
                    item = Item(header.stamp, header.base, header, np.frombuffer(body, np.uint8))
                    if kind == BASE:
                        self.base = item
                    else:
                        self.arrived(item)
                with self.news:
                    self.ending, self.refused = self.ending or kind == BYE, kind == TAKEN
                    self.news.notify_all()
                if kind in (BYE, TAKEN):
                    return

    def arrived(self, item: Item) -> None:
        self.keep(item)
        self.say(frame(EVENT, wire.encode_event(Staged(**self.who, stamp=item.stamp))))

    def keep(self, item: Item) -> None:
        with self.news:
            if item.base is None:
                self.full, self.part = item, None
            else:
                base = self.base if self.base and self.base.stamp == item.base else self.full
                self.full, self.part = base, item
            self.news.notify_all()
