"""A worker's end: fetches when it is rung at, in torch's threads, and hands out what it has."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from torch import Tensor

from weightwire import wire
from weightwire.endpoint import scoped
from weightwire.errors import EndpointInUseError
from weightwire.transport import Deadline, Delivery, Have, Header, Left, Receiver, Staged, Version, choose
from weightwire_rpc import group, places, sender

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.transport import Applied, Event, ReceiverContext, Refused
    from weightwire_rpc import Options

__all__ = ["RpcReceiver", "goodbye", "here", "ring"]

LOOK = 0.1
"""Seconds between two looks for a trainer, and for whether it lives."""

here: dict[tuple[str, str, int], RpcReceiver] = {}
"""The workers' ends of this process, by place, name and incarnation."""


class Item(NamedTuple):
    stamp: Version
    base: Version | None
    header: Header
    data: Tensor


class RpcReceiver(Receiver):
    """Has no thread: torch's own run :func:`ring`."""

    def __init__(self, endpoint: Endpoint, options: Options, context: ReceiverContext) -> None:
        self._context, self._timeout = context, options.timeout
        self._place = scoped(endpoint.location)
        self.whereabouts = f"no updater has told the first member of this RPC group that it is {endpoint}"
        self._me = group.member(options.join, options.timeout)
        self._key = (self._place, context.worker, context.incarnation)
        self._full: Item | None = None
        self._part: Item | None = None
        self._lock = threading.RLock()  # entered as it is: within Condition.__enter__ an interrupt would leave it taken
        self._news = threading.Condition(self._lock)
        self._fetching, self._wanted = threading.Lock(), False
        self._layouts = wire.LayoutCache()
        self._trainer = ""
        self._epoch = 0
        self._looked = 0.0
        self._ping: torch.futures.Future[bool] | None = None
        self._told: list[torch.futures.Future[None]] = []  # which may be on their way
        self._ending = False
        here[self._key] = self
        group.ends.add(self)
        try:
            self._look(context.deadline)
        except BaseException:
            del here[self._key]
            group.ends.discard(self)
            raise

    # -- what the core calls -------------------------------------------------------------------------------------------

    def poll(self, have: Have, deadline: Deadline | None) -> Delivery | None:
        while True:
            self._look(deadline)
            with self._lock:
                item = None if self.closed else choose(have, self._full, self._part)
                if item is not None:
                    return Delivery(item.header, buffer=item.data)
                self.closed = self.closed or self._ending
                if self.closed or deadline is None or deadline.expired:
                    return None
                self._news.wait(deadline.sooner(LOOK).remaining)

    def report(self, event: Applied | Refused) -> None:
        self._tell(event)

    def close(self, deadline: Deadline) -> None:
        if here.get(self._key) is self:
            if self.connected:
                goodbye = wire.encode_event(Left(worker=self._context.worker, incarnation=self._context.incarnation))
                with suppress(group.Unreachable):  # it needs none then
                    while not all(told.done() for told in self._told) and not deadline.expired:
                        time.sleep(0.001)  # calls may overtake each other
                    group.call(self._trainer, sender.tell, self._place, goodbye, timeout=deadline.sooner(2.0).remaining)
            del here[self._key]
            group.ends.discard(self)
        self.connected, self.closed = False, True

    # -- the trainer ---------------------------------------------------------------------------------------------------

    def _look(self, deadline: Deadline | None) -> None:
        """Find the trainer, or see whether it still lives; waits for no answer where there was a trainer."""
        if self._ending or time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        if self.connected:
            self._check()
        else:
            self._meet()

    def _check(self) -> None:
        if self._ping is None:
            try:
                self._ping = group.start(self._trainer, places.lives, self._place, self._epoch, timeout=self._timeout)
            except group.Unreachable:
                self.connected = False
        elif self._ping.done():
            ping, self._ping = self._ping, None
            try:
                self.connected = ping.value()
            except RuntimeError as exc:
                self.connected = "timeout" in str(exc)

    def _meet(self) -> None:
        try:
            found = group.call(group.FIRST, places.find, self._place, timeout=0.5)
            if found is None:
                return
            self._trainer, self._epoch = found
            hello = msgspec.structs.replace(self._context.joined, have=self._context.have())
            said = group.call(self._trainer, sender.join, self._place, wire.encode_event(hello), self._me, timeout=1.0)
        except group.Unreachable as exc:
            self.whereabouts = str(exc)
            return
        if said == "taken":
            raise EndpointInUseError(f"a worker named {self._context.worker!r} is live at {self._place} already")
        self.connected = said is not None

    def _tell(self, event: Event) -> None:
        if self.connected:
            try:
                told = group.start(self._trainer, sender.tell, self._place, wire.encode_event(event), timeout=5.0)
                self._told = [*(one for one in self._told if not one.done()), told]
            except group.Unreachable:
                self.connected = False

    # -- what comes ----------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Take all that the trainer has for us. One thread does it; torch has few, and needs one for the answer."""
        self._wanted = True
        while self._wanted and self._fetching.acquire(blocking=False):
            try:
                self._wanted = False
                self._fetch_all()
            finally:
                self._fetching.release()

    def _fetch_all(self) -> None:
        while self._trainer and not self._ending:
            who = self._place, self._context.worker
            try:
                found = group.call(self._trainer, sender.fetch, *who, self._known(), timeout=self._timeout)
            except group.Unreachable:
                return
            if not found:
                return
            self._keep([(wire.decode_header(header, self._layouts), data) for header, data in found])

    def _known(self) -> Have:
        """What we need not be sent again."""
        have = self._context.have()
        stamps = [have.stamp, *(item.stamp for item in (self._full, self._part) if item is not None)]
        newest = max((stamp for stamp in stamps if stamp is not None), default=None)
        return Have(newest, self._full.stamp if self._full is not None else have.base, have.acting)

    def _keep(self, found: list[tuple[Header, Tensor]]) -> None:
        with self._lock:
            for header, data in found:
                item = Item(header.stamp, header.base, header, data)
                if item.base is None:
                    self._full, self._part = item, None
                else:
                    self._part = item
            self._news.notify_all()
        stamp = found[-1][0].stamp
        self._tell(Staged(worker=self._context.worker, incarnation=self._context.incarnation, stamp=stamp))

    def end(self) -> None:
        with self._fetching:
            self._fetch_all()
        with self._lock:
            self._ending, self.connected = True, False
            self._news.notify_all()


# -- run here for the trainer ------------------------------------------------------------------------------------------


def ring(place: str, worker: str, incarnation: int) -> bool:
    """There is something new, perhaps. Whether the worker is here; torch would print what is raised."""
    receiver = here.get((place, worker, incarnation))
    if receiver is not None:
        receiver.fetch()
    return receiver is not None


def goodbye(place: str, worker: str, incarnation: int) -> bool:
    receiver = here.get((place, worker, incarnation))
    if receiver is not None:
        receiver.end()
    return receiver is not None
