"""In what ways a backend can be wrong. Each is one class that overrides one method of a right end."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from planted_ends import Item, Peer, PostReceiver, PostSender
from torch import Tensor

from weightwire.transport import Applied, Deadline, Delivery, Event, Have, Header, Joined, Refused, Staged, choose
from weightwire.weights.layout import Entry, Layout
from weightwire.weights.payload import Payload

Kind = type[PostSender] | type[PostReceiver]
FAULTS: dict[str, Kind] = {}


def fault(name: str) -> Callable[[Kind], Kind]:
    def note(kind: Kind) -> Kind:
        FAULTS[name] = kind
        return kind

    return note


def ends(name: str) -> tuple[type[PostSender], type[PostReceiver]]:
    """The classes of both ends: right ones, but for the one that the fault is in."""
    kind = FAULTS[name] if name else PostSender
    if issubclass(kind, PostSender):
        return kind, getattr(kind, "other", PostReceiver)
    return PostSender, kind


def repacked(item: Item, tensors: Iterable[tuple[Entry, Tensor]]) -> Item:
    """The same version made of these tensors, each in a block of its own."""
    entries, parts = [], []
    for block, (entry, tensor) in enumerate(tensors):
        entries.append(Entry(entry.name, entry.dtype, entry.shape, block))
        parts.append(tensor.contiguous().flatten().view(torch.uint8).numpy())
    layout = Layout(entries=tuple(entries), sizes=tuple(part.nbytes for part in parts))
    array = np.zeros(layout.nbytes, np.uint8)
    for start, part in zip(layout.starts, parts):
        array[start : start + part.nbytes] = part
    return Item(item.stamp, item.base, item.header._replace(layout=layout), array)


def unpacked(item: Item) -> list[tuple[Entry, Tensor]]:
    layout = item.header.layout
    return list(zip(layout.entries, layout.array_views(item.array)))


# -- what arrives ------------------------------------------------------------------------------------------------------


@fault("commits before data")
class CommitsBeforeData(PostReceiver):
    """What it hands out is there by half."""

    def deliver(self, item: Item) -> Delivery:
        array = item.array.copy()
        array[array.size // 2 :] = 0
        return super().deliver(item._replace(array=array))


@fault("carries no digest")
class CarriesNoDigest(PostSender):
    def hold(self, payload: Payload) -> Item:
        item = super().hold(payload)
        return item._replace(header=item.header._replace(digest=b""))


@fault("flips a bit")
class FlipsABit(PostSender):
    def hold(self, payload: Payload) -> Item:
        item = super().hold(payload)
        item.array[0] ^= 1
        return item


@fault("drops zero-size tensors")
class DropsZeroSizeTensors(PostSender):
    def hold(self, payload: Payload) -> Item:
        item = super().hold(payload)
        return repacked(item, [(entry, tensor) for entry, tensor in unpacked(item) if tensor.numel()])


@fault("unties")
class Unties(PostSender):
    def hold(self, payload: Payload) -> Item:
        item = super().hold(payload)
        return repacked(item, unpacked(item))


@fault("reorders tensors")
class ReordersTensors(PostSender):
    """The bytes of two tensors of one size change places."""

    def hold(self, payload: Payload) -> Item:
        item = super().hold(payload)
        spans = list(zip(item.header.layout.starts, item.header.layout.sizes))
        for (one, size), (two, other) in pairwise(spans):
            if size == other:
                first = item.array[one : one + size].copy()
                item.array[one : one + size] = item.array[two : two + size]
                item.array[two : two + size] = first
        return item


@fault("shares the trainer's memory")
class SharesTheTrainersMemory(PostSender):
    """Within one process it hands out the trainer's own tensors."""

    blocks: ClassVar[dict[Any, list[Tensor]]] = {}

    class Taker(PostReceiver):
        def deliver(self, item: Item) -> Delivery:
            return Delivery(item.header, blocks=SharesTheTrainersMemory.blocks[item.stamp])

    other = Taker

    def hold(self, payload: Payload) -> Item:
        self.blocks[payload.stamp] = list(payload.tensors())
        return Item(payload.stamp, payload.base, payload.header, np.zeros(payload.nbytes, np.uint8))


# -- which version -----------------------------------------------------------------------------------------------------


@fault("goes back a version")
class GoesBackAVersion(PostSender):
    """Whoever comes late stays one version behind."""

    before: Item | None = None
    newest: Item | None = None

    def publish(self, item: Item, to: frozenset[str] | None) -> None:
        self.before, self.newest = self.newest, item
        super().publish(item, to)

    def take(self, peer: Peer, kind: bytes, head: bytes) -> None:
        super().take(peer, kind, head)
        self.late = {*getattr(self, "late", ()), *([peer] if self.before and peer.have.stamp is None else [])}

    def pick(self, peer: Peer) -> Item | None:
        return choose(peer.have, self.before, None) if peer in getattr(self, "late", ()) else super().pick(peer)


@fault("old bytes under a new number")
class OldBytesUnderANewNumber(PostReceiver):
    before: np.ndarray[Any, Any] | None = None

    def deliver(self, item: Item) -> Delivery:
        before, self.before = self.before, item.array
        return super().deliver(item if before is None else item._replace(array=before))


@fault("forgets subsets")
class ForgetsSubsets(PostSender):
    def publish(self, item: Item, to: frozenset[str] | None) -> None:
        if item.base is None:
            super().publish(item, to)
        else:
            for peer in self.peers.values():
                if peer.hello is not None:
                    who = {"worker": peer.hello.worker, "incarnation": peer.hello.incarnation}
                    self.emit(Staged(**who, stamp=item.stamp))


@fault("hands out a subset without its full version")
class SubsetAlone(PostReceiver):
    def pick(self, have: Have) -> Item | None:
        newer = self.part is not None and (have.stamp is None or self.part.stamp > have.stamp)
        return self.part if newer else super().pick(have)


@fault("loses what was accepted before close")
class LosesWhatWasAccepted(PostSender):
    """It sends a version when the next one is there."""

    waiting: tuple[Item, frozenset[str] | None] | None = None

    def publish(self, item: Item, to: frozenset[str] | None) -> None:
        before, self.waiting = self.waiting, (item, to)
        if before is not None:
            super().publish(*before)


# -- what is said ------------------------------------------------------------------------------------------------------


@fault("acknowledges early")
class AcknowledgesEarly(PostSender):
    def publish(self, item: Item, to: frozenset[str] | None) -> None:
        super().publish(item, to)
        for peer in self.peers.values():
            if peer.hello is not None:
                self.emit(applied(peer.hello, item.header))


@fault("says staged before the worker has it")
class SaysStagedTooEarly(LosesWhatWasAccepted):
    """The word is there at once; the bytes follow with the next version."""

    def publish(self, item: Item, to: frozenset[str] | None) -> None:
        super().publish(item, to)
        for peer in self.peers.values():
            if peer.hello is not None:
                who = {"worker": peer.hello.worker, "incarnation": peer.hello.incarnation}
                self.emit(Staged(**who, stamp=item.stamp))


@fault("reorders events")
class ReordersEvents(PostSender):
    """That a worker came back is told after what it applied, which is waited for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.known: set[str] = set()

    def events(self, deadline: Deadline) -> list[Event]:
        heard = super().events(deadline)
        joined = [event for event in heard if isinstance(event, Joined)]
        back = [event for event in joined if event.worker in self.known]
        self.known.update(event.worker for event in joined)
        if back:
            patience = Deadline.after(10)
            while not any(isinstance(event, Applied) for event in heard) and not patience.expired:
                heard += super().events(patience)
        return [event for event in heard if event not in back] + back


@fault("swallows a worker's error")
class SwallowsAWorkersError(PostReceiver):
    def report(self, event: Applied | Refused) -> None:
        if isinstance(event, Applied):
            super().report(event)


@fault("swallows an error of the trainer's")
class SwallowsAnErrorOfTheTrainers(PostSender):
    def stage(self, payload: Payload, to: frozenset[str] | None, deadline: Deadline) -> None:
        with contextlib.suppress(Exception):
            super().stage(payload, to, deadline)


@fault("ignores the deadline of events")
class IgnoresTheDeadlineOfEvents(PostSender):
    def events(self, deadline: Deadline) -> list[Event]:
        return super().events(deadline if deadline.expired else Deadline.after(3.3))


@fault("ignores the deadline of poll")
class IgnoresTheDeadlineOfPoll(PostReceiver):
    def poll(self, have: Have, deadline: Deadline | None) -> Delivery | None:
        return super().poll(have, deadline and Deadline.after(3.3))


@fault("never says goodbye")
class NeverSaysGoodbye(PostSender):
    def part(self) -> None:
        for peer in self.peers.values():
            peer.conn.close()


# -- who is there ------------------------------------------------------------------------------------------------------


@fault("answers for a dead worker")
class AnswersForADeadWorker(PostSender):
    """Nobody is told that the worker is lost, and each version counts as applied there."""

    def gone(self, peer: Peer) -> None:
        self.dead = [*getattr(self, "dead", ()), peer.hello]
        self.selector.unregister(peer.conn)
        del self.peers[peer.conn.fileno()]
        peer.conn.close()
        self.answer()

    def publish(self, item: Item, to: frozenset[str] | None) -> None:
        super().publish(item, to)
        self.newest = item
        self.answer()

    def answer(self) -> None:
        for hello in getattr(self, "dead", ()):
            if hello is not None:
                self.emit(applied(hello, self.newest.header))


@fault("serves two workers of one name")
class ServesTwoWorkersOfOneName(PostSender):
    def taken(self, hello: Joined) -> bool:
        return False


@fault("lets two updaters have a place")
class LetsTwoUpdatersHaveAPlace(PostSender):
    def claim(self) -> int:
        return os.open(self.directory / f"{self.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


# -- what is claimed ---------------------------------------------------------------------------------------------------


@fault("claims alias falsely")
class ClaimsAliasFalsely(PostReceiver):
    """All deliveries lie in one buffer."""

    buffer = np.empty(0, np.uint8)

    def deliver(self, item: Item) -> Delivery:
        if self.buffer.size != item.array.size:
            self.buffer = item.array.copy()
        self.buffer[:] = item.array
        return Delivery(item.header, array=self.buffer, writable=True)


@fault("claims late_join falsely")
class ClaimsLateJoinFalsely(PostSender):
    """Whoever comes has to wait for the next version."""

    def take(self, peer: Peer, kind: bytes, head: bytes) -> None:
        super().take(peer, kind, head)
        newest = max((item.stamp for item in self.shelf.kept()), default=None)
        if newest and newest.number > 1 and peer.have.stamp is None:  # no worker of a case is late for the first
            peer.have = Have(newest)


@fault("claims subset_workers falsely")
class ClaimsSubsetWorkersFalsely(PostSender):
    """All get it, and have it when the push has returned."""

    def publish(self, item: Item, to: frozenset[str] | None) -> None:
        super().publish(item, None)
        there = {peer.hello.worker for peer in self.peers.values() if peer.hello is not None}

        def everywhere() -> bool:
            staged = {event.worker for event in self.heard if isinstance(event, Staged) and event.stamp == item.stamp}
            return there <= staged

        with self.news:
            assert self.news.wait_for(everywhere, 10)


for name in ("claims hosts falsely", "claims sharded_target falsely"):
    FAULTS[name] = PostSender  # the claim is all that is wrong: planted_claims.py


# -- what it does to the machine ---------------------------------------------------------------------------------------


@fault("leaks a descriptor a push")
class LeaksADescriptorAPush(PostSender):
    def publish(self, item: Item, to: frozenset[str] | None) -> None:
        os.open(os.devnull, os.O_RDONLY)
        super().publish(item, to)


@fault("keeps every version")
class KeepsEveryVersion(PostReceiver):
    def keep(self, item: Item) -> None:
        self.hoard = [*getattr(self, "hoard", ()), item]
        super().keep(item)


@fault("listens on all interfaces")
class ListensOnAllInterfaces(PostSender):
    def listen(self) -> socket.socket:
        self.public = socket.create_server(("", 0))
        return super().listen()

    def close(self, deadline: Deadline) -> None:
        self.public.close()
        super().close(deadline)


@fault("unpickles")
class Unpickles(PostSender):
    def read(self, peer: Peer) -> None:
        with contextlib.suppress(Exception):
            pickle.loads(peer.conn.recv(1 << 16, socket.MSG_PEEK))
        super().read(peer)


@fault("lets one silent caller stop it")
class LetsASilentCallerStopIt(PostSender):
    def accept(self) -> None:
        before = set(self.peers)
        super().accept()
        for fd in set(self.peers) - before:
            self.peers[fd].conn.settimeout(1.0)
            with contextlib.suppress(TimeoutError):
                self.peers[fd].conn.recv(1, socket.MSG_PEEK)
            self.peers[fd].conn.setblocking(False)


def applied(hello: Joined, header: Header) -> Applied:
    """What only the worker itself may say."""
    return Applied(worker=hello.worker, incarnation=hello.incarnation, stamp=header.stamp)
