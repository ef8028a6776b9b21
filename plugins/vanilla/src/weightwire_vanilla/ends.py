"""Both ends meet at a :class:`Place` in this process, under one lock."""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from weightwire.endpoint import scoped
from weightwire.errors import ClosedError, EndpointInUseError
from weightwire.transport import (
    NOW,
    Applied,
    Deadline,
    Delivery,
    Event,
    Have,
    Header,
    Left,
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
from weightwire_vanilla.arena import Arena

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.endpoint import Endpoint
    from weightwire.weights.payload import Payload
    from weightwire_vanilla import Options

__all__ = ["VanillaReceiver", "VanillaSender"]

SPARE = 2
"""Idle arenas that a place keeps for the next versions."""


class Item(NamedTuple):
    """A version on the shelf."""

    stamp: Version
    base: Version | None
    header: Header
    arena: Arena


class Place:
    """Where the ends of one location meet. ``news`` grows with whatever a waiting receiver may want to look at."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.RLock()  # entered as it is: within Condition.__enter__ an interrupt would leave it taken
        self._changed = threading.Condition(self.lock)
        self._waiting = 0
        self.sender: VanillaSender | None = None
        self.receivers: dict[str, VanillaReceiver] = {}
        self.events: list[Event] = []
        self.shelf: Shelf[Item] = Shelf()
        self.news = 0
        self.epoch = 0
        self._spare: list[Arena] = []

    def arena(self, nbytes: int) -> Arena:
        fit = next((spare for spare in self._spare if spare.array.nbytes == nbytes), None)
        if fit is None:
            self._spare.clear()
            return Arena(nbytes, self._idle)
        self._spare.remove(fit)
        return fit

    def _idle(self, arena: Arena) -> None:
        if len(self._spare) < SPARE:
            self._spare.append(arena)

    def put(self, item: Item, to: frozenset[str] | None) -> None:
        before = self.shelf.kept()
        item.arena.hold()
        self.shelf.put(item, to)
        self.let_go(before)

    def let_go(self, before: list[Item]) -> None:
        """Drop the arenas of those items of ``before`` that nobody can ask for any more."""
        kept = {id(item) for item in self.shelf.kept()}
        for item in {id(item): item for item in before}.values():
            if id(item) not in kept:
                item.arena.drop()

    def clear(self) -> None:
        if before := self.shelf.kept():
            self.shelf = Shelf()
            self.let_go(before)

    def wake(self) -> None:
        self.news += 1
        self.notify()

    def notify(self) -> None:
        if self._waiting:  # usually nobody is, within one process
            self._changed.notify_all()

    def wait(self, deadline: Deadline) -> None:
        self._waiting += 1
        try:
            self._changed.wait(deadline.remaining)
        finally:
            self._waiting -= 1


_places: dict[str, Place] = {}


def _in_child() -> None:
    """None of the parent's threads is there, and one may have held a lock: a forked child meets nobody of before."""
    _places.clear()


os.register_at_fork(after_in_child=_in_child)


@contextmanager
def _entering(name: str) -> Iterator[Place]:
    """The place of this name, locked, and with it everybody out who would give it up meanwhile."""
    while True:
        place = _places.setdefault(name, Place(name))
        with place.lock:
            if _places.get(name) is place:
                yield place
                return


def _part(place: Place) -> None:
    with place.lock:
        if place.sender is None and not place.receivers and _places.get(place.name) is place:
            del _places[place.name]


class VanillaSender(Sender):
    """Copies each version into an arena, or straight into the only receiver where that is inline."""

    def __init__(self, endpoint: Endpoint, options: Options, context: SenderContext) -> None:
        location = endpoint.location or secrets.token_hex(8)
        self._keep = options.keep
        self.endpoint = str(dataclasses.replace(endpoint, location=location))
        with _entering(scoped(location)) as place:
            self._place = place
            if place.sender is not None:
                raise EndpointInUseError(
                    f"{self.endpoint} has a live updater in this process already; close it, or choose another location"
                )
            place.sender = self
            self.epoch = place.epoch = max(context.epoch, place.epoch + 1)
            place.events.clear()
            for receiver in place.receivers.values():
                receiver.join()
            place.wake()

    def stage(self, payload: Payload, to: frozenset[str] | None, deadline: Deadline) -> None:
        place = self._place
        with place.lock:
            receivers = [r for name, r in place.receivers.items() if to is None or name in to]
            if (
                len(place.receivers) == len(receivers) == 1
                and receivers[0].direct
                and not (self._keep or payload.digest)
            ):
                deliveries: list[tuple[VanillaReceiver, Delivery]] = [(receivers[0], Straight(payload))]
                if to is None:
                    place.clear()  # what is there is older: who joins now is not to get it
            else:
                item = self._shelve(payload, to)
                deliveries = [(r, delivery) for r in receivers if r.inline for delivery in r.owed(item)]
                prospects = [r.prospect(item) for r in receivers if not r.inline]  # an inline one tells itself
                place.events.extend(event for event in prospects if event is not None)
        begun = time.perf_counter()
        for receiver, delivery in deliveries:
            assert receiver.deliver is not None
            receiver.deliver(delivery)
        payload.seconds["commit"] = time.perf_counter() - begun

    def _shelve(self, payload: Payload, to: frozenset[str] | None) -> Item:
        place = self._place
        arena = place.arena(payload.nbytes)
        arena.hold()
        try:
            payload.pack(arena.tensor)
            item = Item(payload.stamp, payload.base, payload.header, arena)
            place.put(item, to)
            place.wake()
        finally:
            arena.drop()
        return item

    def events(self, deadline: Deadline) -> list[Event]:
        place = self._place
        with place.lock:
            if place.sender is not self:
                raise ClosedError(f"the updater of {self.endpoint} is closed")
            if not place.events and deadline is not NOW:
                place.wait(deadline)
        # No call between these lines: a Ctrl-C is noticed only at calls, and must not lose an event.
        events = place.events[:]
        del place.events[: len(events)]
        return events

    def close(self, deadline: Deadline) -> None:
        place = self._place
        with place.lock:
            if place.sender is self:
                for receiver in place.receivers.values():
                    receiver.part()
                place.receivers.clear()
                place.wake()
                place.sender = None  # last, so that a close() that was interrupted begins again
        _part(place)


class Straight(Delivery):
    """The trainer's own tensors, for a receiver that copies from them before ``stage`` returns."""

    def __init__(self, payload: Payload) -> None:
        self._entries = payload.entries()
        self._on_host = not payload.devices
        super().__init__(payload.header)

    @property
    def on_host(self) -> bool:
        return self._on_host

    def views(self) -> list[Tensor]:
        return self._entries


class VanillaReceiver(Receiver):
    """Looks at the place's shelf; reports into its events."""

    def __init__(self, endpoint: Endpoint, context: ReceiverContext) -> None:
        self._context = context
        self.name, self.incarnation = context.worker, context.incarnation
        self.alias = context.apply == "alias"
        self.inline = context.deliver is not None
        self.deliver = context.deliver  # set where it is inline
        self.direct = self.inline and not self.alias  # it is done with the tensors when `deliver` returns
        self.whereabouts = "vanilla reaches trainers in this process only"
        self._seen: tuple[int, Have] | None = None
        self._ending = False
        with _entering(scoped(endpoint.location)) as place:
            self._place = place
            if self.name in place.receivers:
                raise EndpointInUseError(
                    f"a worker named {self.name!r} is live at {endpoint} already; choose another name"
                )
            place.receivers[self.name] = self
            if place.sender is not None:
                self.join()
                place.wake()

    def join(self) -> None:
        """Tell the place's (new) sender who is here."""
        self.connected = True
        hello, place = self._context.joined, self._place
        have = self._context.have()
        place.events.append(msgspec.structs.replace(hello, have=have))
        staged = choose(have, *place.shelf.of(self.name))
        if staged is not None:
            place.events.append(Staged(worker=self.name, incarnation=self.incarnation, stamp=staged.stamp))

    def owed(self, item: Item) -> list[Delivery]:
        """What an inline receiver takes now: the newest version, after the full one that it lies on where that one is
        here and the receiver came later."""
        full, _ = self._place.shelf.of(self.name)
        lacks = item.base is not None and self._context.have().base != item.base
        items = [full, item] if lacks and full is not None and full.stamp == item.base else [item]
        return [one.arena.deliver(one.header, alias=self.alias) for one in items]

    def prospect(self, item: Item) -> Event | None:
        """What becomes of the newest version here, as far as can be told now."""
        if self.can_take_something():
            return Staged(worker=self.name, incarnation=self.incarnation, stamp=item.stamp)
        if item.base is None:
            return None
        error = (
            f"version {item.stamp.number} is a subset on full version {item.base.number}, which went straight into "
            "the inline receiver and was not kept (?keep=true does that): push a full one"
        )
        return Refused(
            worker=self.name,
            incarnation=self.incarnation,
            stamp=item.stamp,
            kind="refused",
            phase="stage",
            error=error,
        )

    def can_take_something(self) -> bool:
        """Whether the shelf has what this receiver has not."""
        return choose(self._context.have(), *self._place.shelf.of(self.name)) is not None

    def part(self) -> None:
        """The sender has closed. What it has accepted may still be taken; then it is over."""
        self.connected = False
        self._ending = True
        self.closed = not self.can_take_something()

    def poll(self, have: Have, deadline: Deadline | None) -> Delivery | None:
        place = self._place
        if self._seen is not None and self._seen[0] == place.news and self._seen[1] is have and deadline is None:
            return None
        with place.lock:
            while True:
                full, subset = place.shelf.of(self.name)
                item = None if self.closed else choose(have, full, subset)
                if item is not None:
                    delivery = item.arena.deliver(item.header, alias=self.alias)
                    delivery.alone = subset is None
                    return delivery
                self.closed = self.closed or self._ending
                if deadline is None or deadline.expired or self.closed:
                    self._seen = (place.news, have)
                    return None
                place.wait(deadline)

    def report(self, event: Applied | Refused) -> None:
        with self._place.lock:
            if self.connected:
                self._place.events.append(event)
                self._place.notify()

    def close(self, deadline: Deadline) -> None:
        place = self._place
        with place.lock:
            if place.receivers.get(self.name) is self:
                before = place.shelf.kept()
                place.shelf.forget(self.name)
                place.let_go(before)
                goodbye = Left(worker=self.name, incarnation=self.incarnation)
                place.events.append(goodbye)  # twice where Ctrl-C comes up here: the second one counts for nothing
                del place.receivers[self.name]
            self.connected, self.closed = False, True
            place.wake()
        _part(place)
