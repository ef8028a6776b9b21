"""The trainer's service thread: it alone accepts, reads, writes and closes control sockets."""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time

import msgspec

from weightwire import wire
from weightwire.complaints import Complaints
from weightwire.errors import WireError
from weightwire.transport import Applied, Deadline, Event, Left, Lost, Refused, Staged
from weightwire_nccl import messages, place
from weightwire_nccl.board import BrokenBoard
from weightwire_nccl.crews import Crews
from weightwire_nccl.depot import Depot
from weightwire_nccl.handshake import Doorman, introduced
from weightwire_nccl.link import LIMIT, SHY, Chunk, Link
from weightwire_nccl.messages import Goodbye, Hello, Message, Ping, Proof, Reject, Report
from weightwire_nccl.peers import Hall, Peer

__all__ = ["Service"]

HANDSHAKE = 10.0
"""Seconds that a connection may take to say who it is."""
STRANGERS = 256
"""Connections that have not said it yet; the oldest makes way."""
DEAF = 0.2
"""Seconds without new connections where the process has no descriptors left for them."""


class Service:
    """Looks after all connections until :meth:`close`. Everything that it does to what others know is done under the
    hall's lock."""

    def __init__(self, hall: Hall, crews: Crews, depot: Depot, doorman: Doorman, listener: socket.socket) -> None:
        self._hall, self._crews, self._depot, self._doorman = hall, crews, depot, doorman
        self._listener = listener
        self._complaints = Complaints(hall.logger)
        self._deaf_until = 0.0
        self._peers: list[Peer] = []
        self._closing: Deadline | None = None
        self._selector = selectors.DefaultSelector()
        port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name=f"weightwire-nccl {port}", daemon=True)

    def start(self) -> None:
        """From here on it has the listener and the bell; not where this raises."""
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._hall.bell, selectors.EVENT_READ)
            self._thread.start()
        except BaseException:
            self._selector.close()
            raise

    def close(self, deadline: Deadline) -> None:
        """Let go what was queued, say goodbye to everybody, end the thread."""
        self._closing = deadline
        self._hall.bell.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(max(2.0, deadline.remaining + 1.0))

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._over():
            try:
                self._turn()
            except Exception:
                self._complaints.log("%s: the service thread failed and goes on", self._hall.place)
                time.sleep(0.1)
        with self._hall.lock:
            self._wind_up()

    def _over(self) -> bool:
        """Whether it is time to go: everything accepted is with the workers, or there is no time left."""
        if self._closing is None:
            return False
        with self._hall.lock:
            self.announce()
            workers = self._hall.workers.values()
            waiting = [
                peer for peer in workers if not peer.silent and (peer.transfer or peer.fetching or not peer.link.idle)
            ]
            return not waiting or self._closing.expired

    def _turn(self) -> None:
        ready = self._selector.select(0.05 if self._closing or self._deaf_until else 0.5)
        with self._hall.lock:
            self.announce()
            for key, _ in ready:
                if key.fileobj is self._hall.bell:
                    self._hall.bell.hush()
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._peers:
                    self._listen(key.data)
            for peer in list(self._peers):
                self._attend(peer)
            self._prick_up()

    def announce(self) -> None:
        """Make a version known, if there is a new one. Under the lock; by any thread."""
        if self._depot.announce():
            self._crews.tidy()

    def _attend(self, peer: Peer) -> None:
        """Send what the socket takes."""
        if peer.gone:
            return
        if peer.joined is None and time.monotonic() - peer.opened > HANDSHAKE:
            self._drop(peer, "it did not say who it is")
            return
        for _ in range(8):  # then it is the others' turn
            if not peer.link.flush() or peer.transfer is None:
                break
            self._depot.send_on(peer)
        if peer.streams and peer.link.idle:
            self._depot.supply(peer)
            peer.link.flush()
        wanted = selectors.EVENT_READ | (0 if peer.link.idle else selectors.EVENT_WRITE)
        if self._selector.get_key(peer.link.fileno()).events != wanted:
            self._selector.modify(peer.link.fileno(), wanted, peer)

    # -- what is said ------------------------------------------------------------------------------------------------

    def _listen(self, peer: Peer) -> None:
        """Read what a worker says. Anything malformed ends this connection, and no other."""
        try:
            for frame in peer.link.frames():
                self._hear(peer, frame)
                if peer.gone:
                    return
        except (WireError, BrokenBoard) as exc:
            self._hall.logger.warning("%s: %s: %s; connection closed", self._hall.place, peer.name, exc)
            self._lose(peer, f"it sent something malformed: {exc}")
            return
        if peer.link.ended:
            self._lose(peer, "its connection ended without a goodbye: it died, or its host cannot be reached")

    def _hear(self, peer: Peer, frame: Message | Chunk) -> None:
        if peer.joined is None:
            self._meet(peer, frame)
            return
        peer.heard = time.monotonic()
        if isinstance(frame, messages.Ready):
            peer.ready = frame.round
        elif isinstance(frame, messages.Got):
            peer.got = frame.round
        elif isinstance(frame, messages.Trouble):
            peer.trouble, peer.reason = frame.round, frame.reason[:500]
            self._depot.hear_of_trouble(peer, frame)
        elif isinstance(frame, messages.Key):
            self._crews.hear_key(peer, frame)
        elif isinstance(frame, messages.Add):
            self._crews.hear_add(peer, frame)
        elif isinstance(frame, messages.Fetch):
            self._depot.hear_fetch(peer, frame)
        elif isinstance(frame, Report):
            self._hear_report(peer, frame)
        elif isinstance(frame, Goodbye):
            self._part(peer, Left(worker=peer.name, incarnation=peer.joined.incarnation), "it said goodbye")
        elif not isinstance(frame, messages.Pong):
            raise WireError(f"{type(frame).__name__} came out of turn")
        if peer.silent and not peer.gone:
            peer.silent = False
            self._depot.supply(peer)
        self._hall.changed.notify_all()

    def _hear_report(self, peer: Peer, report: Report) -> None:
        assert peer.joined is not None
        event = wire.decode_event(report.event)
        if not isinstance(event, (Staged, Applied, Refused)):
            raise WireError(f"a report of kind {type(event).__name__}")
        joined = peer.joined
        self._hall.events.append(msgspec.structs.replace(event, worker=joined.worker, incarnation=joined.incarnation))

    # -- who comes and goes ------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
            place.tune(sock)
            peer = Peer(Link(sock, SHY))
        except OSError as exc:
            if exc.errno in (errno.EMFILE, errno.ENFILE):  # it would ring for the same one again and again
                self._hall.logger.warning("%s: no descriptors are left: %s", self._hall.place, exc)
                self._deaf_until = time.monotonic() + DEAF
                self._selector.unregister(self._listener)
            return
        self._peers.append(peer)
        self._selector.register(peer.link.fileno(), selectors.EVENT_READ, peer)
        peer.link.send(self._doorman.challenge(peer.nonce))
        strangers = [peer for peer in self._peers if peer.joined is None]
        if len(strangers) > STRANGERS:
            self._drop(strangers[0], "too many connections")

    def _prick_up(self) -> None:
        """Listen again for new connections."""
        if self._deaf_until and time.monotonic() > self._deaf_until:
            self._deaf_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _meet(self, peer: Peer, frame: Message | Chunk) -> None:
        """From strangers: first the proof, then the hello."""
        if isinstance(frame, Proof) and not peer.proven:
            answer = self._doorman.answer(peer.nonce, frame)
            if isinstance(answer, Reject):
                self._reject(peer, answer)
                return
            peer.proven = True
            peer.link.limit = LIMIT
            peer.link.send(answer)
        elif isinstance(frame, Hello) and peer.proven:
            self._greet(peer, frame)
        elif not isinstance(frame, Goodbye):
            raise WireError(f"{type(frame).__name__} came out of turn")

    def _greet(self, peer: Peer, hello: Hello) -> None:
        joined = introduced(hello)
        workers = self._hall.workers
        other = workers.get(joined.worker)
        if other is not None:
            self._listen(other)  # it may have gone a moment ago
        other = workers.get(joined.worker)
        if other is not None and other.joined and other.joined.incarnation == joined.incarnation:
            self._drop(other, "it has connected anew")  # this end of the old connection does not know yet
        elif other is not None:
            where = f"process {other.joined.pid} on {other.joined.host}" if other.joined else "another"
            text = f"another live worker is called {joined.worker!r} ({where}); give each a name of its own"
            self._reject(peer, Reject("name", text[:2000]))
            return
        if hello.streams and not self._depot.keeps:
            text = "stream=True fetches from the copy that the trainer keeps, and keep=false is set there"
            self._reject(peer, Reject("stream", text))
            return
        peer.joined, peer.device, peer.has, peer.streams = joined, hello.device, joined.have, hello.streams
        workers[joined.worker] = peer
        self._hall.events.append(joined)
        peer.link.send(Ping())  # it knows by this that it is known
        self._depot.supply(peer)
        self._hall.changed.notify_all()

    def _reject(self, peer: Peer, why: Reject) -> None:
        self._hall.logger.warning("%s: turned away %s: %s", self._hall.place, peer.name, why.reason)
        peer.link.send(why)
        peer.link.flush()
        self._drop(peer, why.reason)

    def _lose(self, peer: Peer, reason: str) -> None:
        joined = peer.joined
        event = Lost(worker=joined.worker, incarnation=joined.incarnation, reason=reason) if joined else None
        self._part(peer, event, reason)

    def _part(self, peer: Peer, event: Event | None, why: str) -> None:
        self._drop(peer, why)
        if event is not None:
            self._hall.events.append(event)
        self._hall.changed.notify_all()

    def _drop(self, peer: Peer, why: str) -> None:
        """Forget a connection, and the groups that it was in."""
        peer.gone, peer.engaged = why, 0
        if peer in self._peers:
            self._peers.remove(peer)
            self._selector.unregister(peer.link.fileno())
        if self._hall.workers.get(peer.name) is peer:
            del self._hall.workers[peer.name]
            self._depot.forget(peer.name)
        peer.transfer = None
        peer.link.close()
        self._crews.lose(peer)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _wind_up(self) -> None:
        """The last act of the thread."""
        for peer in list(self._peers):
            peer.link.send(Goodbye())
            peer.link.flush()
            self._peers.remove(peer)
            peer.gone = "the updater has closed"
            peer.link.close()
        self._hall.workers.clear()
        self._selector.close()
        self._listener.close()
        self._hall.bell.close()
        self._hall.changed.notify_all()

    def in_child(self) -> list[int]:
        """The bare descriptors, for a forked child to close."""
        sockets = [peer.link.detach() for peer in self._peers]
        return [*sockets, self._listener.detach(), *self._hall.bell.detach()]
