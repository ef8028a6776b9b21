"""The trainer's end: keeps versions, rings at the workers, answers what they ask for."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from weightwire import wire
from weightwire.endpoint import scoped
from weightwire.errors import ClosedError, EndpointInUseError
from weightwire.transport import Deadline, Event, Have, Joined, Left, Lost, Sender, Shelf, Version, choose
from weightwire_rpc import group, places

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.transport import SenderContext
    from weightwire.weights.payload import Payload
    from weightwire_rpc import Options

__all__ = ["RpcSender", "fetch", "here", "join", "tell"]

PING = 0.5
"""Seconds between two looks at whether the workers live."""

here: dict[str, RpcSender] = {}
"""The trainers' ends of this process, by place."""


class Item(NamedTuple):
    """A version on the shelf; its bytes are ours, and never change."""

    stamp: Version
    base: Version | None
    header: bytes
    data: Tensor


@dataclass
class Peer:
    hello: Joined
    member: str  # its process, in the group
    ringing: bool = False
    again: bool = False  # something came while it was rung at


class RpcSender(Sender):
    """Has no thread: torch's own run the functions below."""

    def __init__(self, endpoint: Endpoint, options: Options, context: SenderContext) -> None:
        location = endpoint.location or secrets.token_hex(8)
        self.endpoint = str(dataclasses.replace(endpoint, location=location))
        self._timeout, self._place = options.timeout, scoped(location)
        self._shelf: Shelf[Item] = Shelf()
        self._peers: dict[str, Peer] = {}
        self._heard: deque[Event] = deque()
        self._lock = threading.RLock()  # entered as it is: within Condition.__enter__ an interrupt would leave it taken
        self._news = threading.Condition(self._lock)
        self._closed = False
        self._pinged = 0.0
        me = group.member(options.join, options.timeout)
        taken = group.call(group.FIRST, places.take, self._place, me, context.epoch, timeout=context.deadline.remaining)
        if isinstance(taken, str):
            raise EndpointInUseError(f"{self.endpoint} has a live updater already, in {taken}")
        self.epoch = taken
        here[self._place] = self
        group.ends.add(self)

    # -- what the core calls -------------------------------------------------------------------------------------------

    def stage(self, payload: Payload, to: frozenset[str] | None, deadline: Deadline) -> None:
        data = torch.empty(payload.nbytes, dtype=torch.uint8)
        payload.pack(data)
        item = Item(payload.stamp, payload.base, payload.header_bytes(), data)
        with self._lock:
            self._shelf.put(item, to)
            peers = [peer for name, peer in self._peers.items() if to is None or name in to]
        with payload.phase("notify"):
            for peer in peers:
                self._ring(peer)

    def events(self, deadline: Deadline) -> list[Event]:
        while True:
            self._ping()
            with self._lock:
                if self._closed:
                    raise ClosedError(f"the updater of {self.endpoint} is closed")
                if not self._heard and not deadline.expired:
                    self._news.wait(deadline.sooner(PING).remaining)
                if self._heard or deadline.expired:
                    heard = list(self._heard)
                    self._heard.clear()
                    return heard

    def close(self, deadline: Deadline) -> None:
        """Workers fetch what they have not fetched yet before they answer to a goodbye."""
        if self._closed or here.get(self._place) is not self:
            return
        waits = []
        for name, peer in list(self._peers.items()):
            try:
                waits.append(self._to(peer, "goodbye", deadline.remaining))
            except group.Unreachable:
                self._lose(name, peer.hello.incarnation, "it cannot be reached")
        for future in waits:
            try:
                future.wait()
            except RuntimeError:
                continue  # it is gone, or will find that we are
        with self._lock:
            self._closed = True
            here.pop(self._place, None)
            group.ends.discard(self)
            self._news.notify_all()
        with suppress(group.Unreachable):
            group.call(group.FIRST, places.give_up, self._place, self.epoch, timeout=max(deadline.remaining, 1.0))

    # -- calls to workers ----------------------------------------------------------------------------------------------

    def _to(self, peer: Peer, what: str, timeout: float) -> torch.futures.Future[bool]:
        from weightwire_rpc import receiver

        who = (self._place, peer.hello.worker, peer.hello.incarnation)
        return group.start(peer.member, getattr(receiver, what), *who, timeout=timeout)

    def _ring(self, peer: Peer) -> None:
        """Have the worker fetch. One call at a time: a worker that is stopped is not to find hundreds of them."""
        with self._lock:
            peer.again = peer.ringing
            if peer.ringing:
                return
            peer.ringing = True
        who = peer.hello.worker, peer.hello.incarnation

        def done(future: torch.futures.Future[bool]) -> None:
            peer.ringing = False
            try:
                if not future.value():
                    self._lose(*who, "its process goes on without it")
                    return
            except RuntimeError as exc:
                if "timeout" not in str(exc):  # one that is stopped is not dead
                    self._lose(*who, str(exc).partition("\n")[0])
                    return
            if peer.again:
                self._ring(peer)

        try:
            self._to(peer, "ring", self._timeout).add_done_callback(done)
        except group.Unreachable as exc:
            self._lose(*who, str(exc))
        except BaseException:  # Ctrl-C: the next ping rings again
            peer.ringing = False
            raise

    def _ping(self) -> None:
        if time.monotonic() - self._pinged < PING:
            return
        self._pinged = time.monotonic()
        for peer in list(self._peers.values()):
            if not peer.ringing:
                self._ring(peer)

    # -- calls from workers --------------------------------------------------------------------------------------------

    def welcome(self, hello: Joined, member: str) -> str:
        with self._lock:
            known = self._peers.get(hello.worker)
            if known is not None and known.hello.incarnation != hello.incarnation:
                return "taken"
            peer = self._peers[hello.worker] = Peer(hello, member)
            self._put(hello)
        self._ring(peer)
        return ""

    def answer(self, worker: str, have: Have) -> list[tuple[bytes, Tensor]]:
        """The version that is next, and the subset on it that is newer still."""
        with self._lock:
            full, part = self._shelf.of(worker)
            first = choose(have, full, part)
            if first is None:
                return []
            more = part if part is not None and part.base == first.stamp else None
        return [(item.header, item.data) for item in (first, more) if item is not None]

    def hear(self, event: Event) -> None:
        with self._lock:
            known = self._peers.get(event.worker)
            if known is None or known.hello.incarnation != event.incarnation:
                return
            if isinstance(event, (Left, Lost)):
                del self._peers[event.worker]
                self._shelf.forget(event.worker)
            self._put(event)

    def _lose(self, worker: str, incarnation: int, reason: str) -> None:
        self.hear(Lost(worker=worker, incarnation=incarnation, reason=reason))

    def _put(self, event: Event) -> None:
        self._heard.append(event)
        self._news.notify_all()


# -- run here for workers ----------------------------------------------------------------------------------------------


def join(place: str, hello: bytes, member: str) -> str | None:
    """Empty where it is welcome; ``"taken"``; ``None`` where no trainer is here."""
    sender, event = here.get(place), wire.decode_event(hello)
    return sender.welcome(event, member) if sender is not None and isinstance(event, Joined) else None


def fetch(place: str, worker: str, have: tuple[Any, Any, Any]) -> list[tuple[bytes, Tensor]]:
    """What this worker is to be given next. torch sends the tensor beside the pickle, from our own memory."""
    sender = here.get(place)
    return [] if sender is None else sender.answer(worker, Have(*(part and Version(*part) for part in have)))


def tell(place: str, event: bytes) -> None:
    sender = here.get(place)
    if sender is not None:
        sender.hear(wire.decode_event(event))
