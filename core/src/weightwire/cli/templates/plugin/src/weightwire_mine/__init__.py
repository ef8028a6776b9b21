"""``mine``: weights between threads of one process, over queues: one to each receiver, and one for all reports.

Replace the queues by what carries your bytes. The contract is in ``weightwire.transport``, and the command
``weightwire conformance mine`` holds this against it.
"""

from __future__ import annotations

import dataclasses
import queue
import secrets
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from weightwire.endpoint import scoped
from weightwire.errors import ClosedError, EndpointInUseError
from weightwire.hookspecs import BackendInfo, hookimpl
from weightwire.transport import (
    NOW,
    Deadline,
    Delivery,
    Event,
    Have,
    Header,
    Left,
    Receiver,
    ReceiverContext,
    Sender,
    SenderContext,
    Shelf,
    Staged,
    Version,
    choose,
)

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.endpoint import Endpoint
    from weightwire.weights.payload import Payload


# The hooks: what weightwire asks first. Nothing heavy may be imported before an end is made.


@hookimpl
def weightwire_backend() -> BackendInfo:
    # Claim a capability when its cases pass: "late_join" here, for a wire between processes "processes" as well.
    return BackendInfo(summary="between threads, over a queue", capabilities=frozenset({"late_join"}))


@hookimpl
def weightwire_make_sender(endpoint: Endpoint, options: Any, context: SenderContext) -> Sender:
    return MineSender(endpoint, context)


@hookimpl
def weightwire_make_receiver(endpoint: Endpoint, options: Any, context: ReceiverContext) -> Receiver:
    return MineReceiver(endpoint, context)


# The wire: a place where both ends meet, and what goes over it.


class Item(NamedTuple):
    """One version: the header that says what it is, and its bytes, which nobody writes to any more."""

    stamp: Version
    base: Version | None
    header: Header
    memory: Tensor


class Place:
    """Where the ends of one location meet. ``shelf`` keeps the newest versions, for whoever comes late."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.sender: MineSender | None = None
        self.receivers: dict[str, MineReceiver] = {}
        self.shelf: Shelf[Item] = Shelf()
        self.epoch = 0


_places: dict[str, Place] = {}
_lock = threading.RLock()  # guards all places; an RLock, since ends may be closed by the garbage collector


def _meet(label: str) -> Place:
    return _places.setdefault(label, Place(label))


def _part(place: Place) -> None:
    """Forget a place that nobody is at."""
    if place.sender is None and not place.receivers and _places.get(place.label) is place:
        del _places[place.label]


class MineSender(Sender):
    """The trainer's end."""

    def __init__(self, endpoint: Endpoint, context: SenderContext) -> None:
        location = endpoint.location or secrets.token_hex(8)  # an empty location is a new, unique one
        self.endpoint = str(dataclasses.replace(endpoint, location=location))
        self._reports: queue.Queue[Event] = queue.Queue()
        self._closed = False
        with _lock:
            self._place = place = _meet(scoped(location))
            if place.sender is not None:
                raise EndpointInUseError(f"{self.endpoint} has a live updater; close it, or choose another location")
            place.sender = self
            self.epoch = place.epoch = max(context.epoch, place.epoch + 1)  # newer than whoever was here before
            for receiver in place.receivers.values():
                receiver.meet(self)

    def stage(self, payload: Payload, to: frozenset[str] | None, deadline: Deadline) -> None:
        import torch

        memory = torch.empty(payload.nbytes, dtype=torch.uint8)
        payload.pack(memory)  # read all of it first; asking for the header is what makes it a version
        item = Item(payload.stamp, payload.base, payload.header, memory)
        with _lock:
            self._place.shelf.put(item, to)
            for receiver in self._place.receivers.values():
                receiver.offer(item)

    def report(self, event: Event) -> None:
        self._reports.put(event)

    def events(self, deadline: Deadline) -> list[Event]:
        if self._closed:
            raise ClosedError(f"the updater of {self.endpoint} is closed")
        return _drain(self._reports, deadline)

    def close(self, deadline: Deadline) -> None:
        with _lock:
            if self._closed:
                return
            self._closed = True
            self._place.sender = None
            self._place.shelf = Shelf()
            for receiver in self._place.receivers.values():
                receiver.part()
            self._place.receivers.clear()  # a goodbye is final: whoever is made from now on meets the next updater
            _part(self._place)


class MineReceiver(Receiver):
    """A worker's end. ``None`` in its queue is the trainer's goodbye."""

    def __init__(self, endpoint: Endpoint, context: ReceiverContext) -> None:
        self._context = context
        self._inbox: queue.Queue[Item | None] = queue.Queue()
        self._shelf: Shelf[Item] = Shelf()  # what came out of the queue: the newest full version, and subset
        self._sender: MineSender | None = None
        self._ending = False
        self.whereabouts = "'mine' reaches trainers in this process only"
        with _lock:
            self._place = _meet(scoped(endpoint.location))
            if context.worker in self._place.receivers:
                raise EndpointInUseError(f"a worker {context.worker!r} is live at {endpoint}; choose another name")
            self._place.receivers[context.worker] = self
            if self._place.sender is not None:
                self.meet(self._place.sender)

    # Called by the sender, with the lock held.

    def meet(self, sender: MineSender) -> None:
        self._sender, self.connected = sender, True
        sender.report(msgspec.structs.replace(self._context.joined, have=self._context.have()))
        for item in self._place.shelf.kept():
            self.offer(item)

    def offer(self, item: Item) -> None:
        for older in _drain(self._inbox, NOW):  # a worker that is busy costs one version, not all that it missed
            if older is not None and older.stamp == item.base:  # which a subset lies on
                self._inbox.put(older)
        self._inbox.put(item)
        assert self._sender is not None
        self._sender.report(
            Staged(worker=self._context.worker, incarnation=self._context.incarnation, stamp=item.stamp)
        )

    def part(self) -> None:
        self._sender, self.connected = None, False
        self._inbox.put(None)

    # Called by the worker.

    def poll(self, have: Have, deadline: Deadline | None) -> Delivery | None:
        while True:
            if not self._inbox.empty():  # with nothing new this is all: poll is asked before every step of a policy
                self._take(_drain(self._inbox, NOW))
            item = choose(have, *self._shelf.of(self._context.worker))
            if item is not None:
                return Delivery(item.header, buffer=item.memory)
            self.closed = self.closed or self._ending  # only now: what was accepted before has been handed out
            if deadline is None or deadline.expired or self.closed:
                return None
            self._take(_drain(self._inbox, deadline))

    def _take(self, items: list[Item | None]) -> None:
        for item in items:
            if item is None:
                self._ending = True
            else:
                self._shelf.put(item, None)

    def report(self, event: Event) -> None:
        sender = self._sender
        if sender is not None:
            sender.report(event)

    def close(self, deadline: Deadline) -> None:
        with _lock:
            if self._place.receivers.get(self._context.worker) is self:
                del self._place.receivers[self._context.worker]
                self.report(Left(worker=self._context.worker, incarnation=self._context.incarnation))
            self._sender, self.connected, self.closed = None, False, True
            _part(self._place)


def _drain(source: queue.Queue[Any], deadline: Deadline) -> list[Any]:
    """All that is in a queue; waits for the first until the deadline."""
    found = []
    try:
        found.append(source.get(timeout=deadline.remaining) if deadline.remaining else source.get_nowait())
        while True:
            found.append(source.get_nowait())
    except queue.Empty:
        return found
