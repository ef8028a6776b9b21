"""The trainer's end: versions go into the object store, their references to the mailbox."""

from __future__ import annotations

import atexit
import secrets
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from weightwire import wire
from weightwire.complaints import Complaints
from weightwire.errors import (
    ClosedError,
    EndpointInUseError,
    StaleUpdaterError,
    StorageFullError,
    WaitTimeout,
    WireError,
)
from weightwire.forks import Origin
from weightwire.transport import Deadline, Event, Joined, Left, Lost, Sender, SenderContext, Shelf
from weightwire_ray.engine import LOOK, Engine, EngineGone, Late, MailboxGone, NoMailbox, mailbox_name
from weightwire_ray.protocol import Item
from weightwire_ray.store import buckets

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightwire.endpoint import Endpoint
    from weightwire.weights.payload import Payload
    from weightwire_ray.options import RayOptions

__all__ = ["RaySender"]

PATIENCE = 10.0
"""Seconds that a long poll for events takes at most."""
CLAIM = 5.0
"""Seconds after which a holder of the place that neither answers nor dies counts as alive."""
FAREWELL = 1.0
"""Seconds that closing waits for workers to hear of it."""
HANDS = 2
"""Threads that copy the buckets of one large push into the store."""
LEAST = 32 << 20
"""Bytes of a bucket, below which none is cut so that both hands have two."""
GATHERED = 64 << 20
"""Bytes of buckets that are in memory at once, at most, of a version that is made or gathered as it is read."""


class RaySender(Sender):
    """See :class:`weightwire.transport.Sender`. ``_lock`` guards events and the mailbox's handle."""

    digests = True  # the mailbox does

    def __init__(self, endpoint: Endpoint, options: RayOptions, context: SenderContext) -> None:
        self._options = options
        self._logger = context.logger
        self._complaints = Complaints(context.logger)
        self._check_afar = context.digest == "auto"
        self._engine = Engine(endpoint, options, context.deadline)
        location = endpoint.location or secrets.token_hex(16)
        self.endpoint = str(replace(endpoint, location=location))
        self._name = mailbox_name(location)
        self._origin = Origin(f"The ray sender of {self.endpoint}")
        self._mailbox, self.epoch = self._claim(context)
        self._shelf: Shelf[Item] = Shelf()
        self._named: set[str] = set()  # workers for whom the shelf may have something of their own
        self._edition = 0  # of the shelf: calls to an async actor may overtake one another
        self._lock = threading.RLock()
        self._events: list[Event] = []
        self._present: dict[str, int] = {}  # the workers that were told of: name -> incarnation
        self._heard = 0  # number of the newest event that was taken from this mailbox
        self._started = False  # a mailbox has answered
        self._fresh = False  # the mailbox was asked a moment ago
        self._untold = False  # the mailbox may have missed what is on the shelf
        self._fault: Exception | None = None  # why no more can be sent
        self._closed = False
        self._arrived = threading.Event()  # wakes the trainer's thread
        self._bell = threading.Event()  # wakes the service thread
        self._thread = threading.Thread(target=self._serve, name=f"weightwire-ray {location}", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._engine.kill(self._mailbox)  # or else the place stays taken
            raise
        atexit.register(self._at_exit)  # before Ray's own handler, which was registered earlier

    def _claim(self, context: SenderContext) -> tuple[Any, int]:
        """Take the name. Raises :class:`~weightwire.EndpointInUseError` where a live updater has it."""
        epoch, patience = context.epoch, context.deadline.sooner(CLAIM)
        while True:
            try:
                return self._make(epoch), epoch
            except ValueError as taken:
                alive, found = self._holder(max(0.1, patience.remaining))
                epoch = max(epoch, found + 1)
                if alive or patience.expired:
                    raise EndpointInUseError(
                        f"another updater, of run {found}, has {self.endpoint}"
                        + ("" if alive else "; it does not answer, but was not found dead either")
                    ) from taken
                time.sleep(0.02)

    def _holder(self, patience: float) -> tuple[bool, int]:
        """Whether the updater lives whose mailbox has our name, and its epoch (-1: unknown); a dead one's name is made
        free."""
        try:
            other = self._engine.find_mailbox(self._name, self._options.namespace)
        except MailboxGone:
            return False, -1
        except NoMailbox as exc:
            raise EndpointInUseError(f"{self.endpoint}: {exc}. Take another location or namespace") from exc
        try:
            alive, epoch = self._engine.ask(other, "challenge", patience, timeout=patience + LOOK)
        except MailboxGone:
            self._engine.kill(other)
            return False, -1
        except Late:
            return False, -1
        return alive, epoch

    def _make(self, epoch: int) -> Any:
        """A mailbox of that name. Raises ``ValueError`` where there is one."""
        return self._engine.make_mailbox(self._name, self._options.namespace, epoch, self._engine.facts)

    # -- stage -------------------------------------------------------------------------------------------------------

    def stage(self, payload: Payload, to: frozenset[str] | None, deadline: Deadline) -> None:
        self._check()
        refs = self._put_all(payload, deadline)
        header, check = payload.header_bytes(), self._check_afar and not payload.digest
        item = Item(payload.stamp, payload.base, header, refs, self._engine.node, check)
        with payload.phase("notify"):
            try:
                self._announce(item, to, self._place(item, to), deadline)
            except BaseException:
                self._untold = True  # from here on it happens all the same, by the service thread
                self._bell.set()
                raise
        self._fresh = True

    def _put_all(self, payload: Payload, deadline: Deadline) -> list[Any]:
        """ray.put copies before it returns: when this returns or raises, nothing of the payload's is read any more."""
        if payload.sharded:  # what is in one hand, and what comes next: not more than a bucket
            half = min(self._options.bucket, GATHERED) // 2
            return [self._put(bucket, payload, deadline) for bucket in buckets(payload, half)]
        # As few as keep both hands busy: each object costs every process that is told of it 0.2 to 0.5 ms.
        size = min(self._options.bucket, max(LEAST, -(-payload.nbytes // (2 * HANDS))))
        parts = buckets(payload, size)
        if payload.nbytes <= size:
            return [self._put(bucket, payload, deadline) for bucket in parts]
        refs: list[Any] = []
        pending: deque[Future[Any]] = deque()
        with ThreadPoolExecutor(HANDS, thread_name_prefix="weightwire-ray put") as hands:
            for bucket in parts:
                if len(pending) == HANDS:
                    refs.append(pending.popleft().result())
                pending.append(hands.submit(self._put, bucket, payload, deadline))
            refs.extend(future.result() for future in pending)
        return refs

    def _put(self, bucket: list[NDArray[Any]], payload: Payload, deadline: Deadline) -> Any:
        if deadline.expired:
            raise WaitTimeout(
                f"the deadline of version {payload.stamp.number} passed while its {payload.nbytes} bytes went into "
                "Ray's object store",
                version=payload.stamp.number,
                phase="stage",
            )
        try:
            return self._engine.put(bucket)
        except (ObjectStoreFullError, OutOfDiskError) as exc:
            raise StorageFullError(
                f"Ray's object store has no room for version {payload.stamp.number}: {sum(a.nbytes for a in bucket)} "
                f"of its {payload.nbytes} bytes did not go in. Give ray.init() more object_store_memory. {exc}"
            ) from exc
        except EngineGone as exc:
            raise self._broken(exc) from exc

    def _place(self, item: Item, to: frozenset[str] | None) -> int:
        """Put a version on the shelf, of which this makes a new edition."""
        with self._lock:
            self._edition += 1
            self._shelf.put(item, to)
            self._named = set() if to is None else self._named | to
            return self._edition

    def _announce(self, item: Item, to: frozenset[str] | None, edition: int, deadline: Deadline) -> None:
        """Tell the mailbox, or the one that is made in its place."""
        names = None if to is None else sorted(to)
        while not self._fault:
            mailbox = self._mailbox
            try:
                timeout = max(0.05, deadline.remaining)
                events = self._engine.ask(mailbox, "put", item, names, edition, self._heard, timeout=timeout)
                if events is None:  # it was made again, and has not heard of the others yet
                    self._engine.ask(mailbox, "restore", *self._contents(), timeout=timeout)
                self._take(mailbox, events or [])
                return
            except MailboxGone as exc:
                self._remake(mailbox, exc)
            except EngineGone as exc:
                raise self._broken(exc) from exc
            except Late:
                time.sleep(0.01)
            if deadline.expired and not self._started:  # so no worker has joined, and the calls wait in its queue
                self._untold = True
                self._bell.set()
                self._logger.info("%s: Ray is still starting the mailbox; no worker can join yet", self.endpoint)
                return
            if deadline.expired:
                raise WaitTimeout(
                    f"the mailbox of {self.endpoint} did not take version {item.stamp.number} by the deadline; it will "
                    "be told as soon as it answers",
                    version=item.stamp.number,
                    phase="notify",
                )
        raise self._fault

    def _remake(self, dead: Any, why: Exception) -> None:
        """Make the mailbox again, with all that is on the shelf. Raises ``StaleUpdaterError``, ``ClosedError``."""
        patience = Deadline.after(CLAIM)
        with self._lock:
            while self._mailbox is dead and not self._closed and not patience.expired:
                try:
                    self._adopt(self._make(self.epoch))
                    self._logger.warning("%s: the mailbox died and is made again: %s", self.endpoint, _first_line(why))
                    self._engine.send(self._mailbox, "restore", *self._contents())
                except EngineGone as exc:
                    raise self._broken(exc) from exc
                except ValueError as taken:
                    _, epoch = self._holder(0.0)
                    if epoch == self.epoch:  # it lives: Ray could not reach it for a moment
                        return
                    if epoch >= 0:
                        self._fault = StaleUpdaterError(
                            f"another updater, of run {epoch}, has taken {self.endpoint}; this one, of run "
                            f"{self.epoch}, must not send any more"
                        )
                        raise self._fault from taken
                    time.sleep(0.02)

    def _adopt(self, mailbox: Any) -> None:
        self._heard = 0
        self._mailbox = mailbox  # first, and then the look at ``_closed``: ``close`` does the opposite
        if self._closed:
            self._engine.kill(mailbox)

    def _contents(self) -> tuple[list[tuple[Item, list[str] | None]], dict[str, int], int]:
        """The shelf as the mailbox puts it together again, who should be there, and which edition this is."""
        with self._lock:
            # No worker is called "": that is what all have.
            pairs = [(None, self._shelf.of("")), *(([name], self._shelf.of(name)) for name in sorted(self._named))]
            contents = [(item, to) for to, pair in pairs for item in pair if item is not None]
            return contents, dict(self._present), self._edition

    def _broken(self, exc: Exception) -> ClosedError:
        return ClosedError(f"{self._origin.what} is of no use any more: {exc}")

    # -- events ------------------------------------------------------------------------------------------------------

    def events(self, deadline: Deadline) -> list[Event]:
        if self._closed or not self._origin.here:
            return []
        if deadline.expired and not self._fresh:  # who waits is told by the service thread
            self._look()
        self._fresh = False
        while not self._events and not deadline.expired and not self._closed:
            self._arrived.clear()
            if not self._events:
                self._arrived.wait(deadline.remaining)
        # No call between these lines: a Ctrl-C is noticed only at calls, and must not lose an event.
        events = self._events[:]
        del self._events[: len(events)]
        return events

    def _look(self) -> None:
        """Ask the mailbox now, so that whoever has joined is known."""
        mailbox = self._mailbox
        with suppress(MailboxGone, EngineGone, Late):  # the service thread sees to it
            self._take(mailbox, self._engine.ask(mailbox, "attend", self._heard, 0.0, timeout=LOOK))

    def _take(self, mailbox: Any, events: list[tuple[int, str, int, bytes]]) -> None:
        """Events that are new, in their order. Two threads may be told the same ones."""
        self._started = True
        with self._lock:
            for number, worker, incarnation, data in events:
                if number > self._heard and mailbox is self._mailbox:
                    self._heard = number
                    try:
                        event = wire.decode_event(data)
                    except (WireError, TypeError) as exc:
                        self._logger.warning("%s: worker %r sent something malformed: %s", self.endpoint, worker, exc)
                        continue
                    self._note(event, worker, incarnation)
                    self._events.append(msgspec.structs.replace(event, worker=worker, incarnation=incarnation))
        if self._events:
            self._arrived.set()

    def _note(self, event: Event, worker: str, incarnation: int) -> None:
        """Who is there, so that a new mailbox can tell who did not come back."""
        if isinstance(event, Joined):
            self._present[worker] = incarnation
        elif isinstance(event, (Left, Lost)) and self._present.get(worker) == incarnation:
            del self._present[worker]
            self._shelf.forget(worker)
            self._named.discard(worker)

    # -- the service thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Hear the mailbox, show it that we live, and make it again when it dies."""
        while not self._closed and not self._fault:
            mailbox = self._mailbox
            try:
                self._bell.clear()
                if self._untold:
                    self._untold = False
                    self._engine.send(mailbox, "restore", *self._contents())
                future = self._engine.send(mailbox, "attend", self._heard, PATIENCE)
                future.add_done_callback(lambda _: self._bell.set())
                while not future.done() and self._stays(mailbox):
                    self._bell.wait(LOOK)
                    self._bell.clear()
                    self._engine.check()
                if future.done():
                    self._take(mailbox, self._engine.answer(future))
            except MailboxGone as exc:
                with suppress(ClosedError, EndpointInUseError, StaleUpdaterError):
                    self._remake(mailbox, exc)
                time.sleep(0.02)
            except Late:  # Ray cannot reach it for now
                time.sleep(0.1)
            except EngineGone:
                return
            except Exception:
                self._complaints.log("%s: the service thread failed and goes on", self.endpoint)
                time.sleep(0.1)
            self._arrived.set()

    def _stays(self, mailbox: Any) -> bool:
        """Whether there is nothing better to do than to hear this mailbox."""
        return self._mailbox is mailbox and not self._untold and not self._closed

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        if self._closed or not self._origin.here:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._bell.set()
        self._arrived.set()
        if self._engine.alive and not self._fault:
            patience, mailbox, over = min(FAREWELL, deadline.remaining), self._mailbox, True
            with suppress(MailboxGone, EngineGone, Late):
                over = self._engine.ask(mailbox, "close", patience, timeout=patience + 0.5)
            if over:  # else it has still somebody to tell, and ends by itself
                with suppress(Exception):
                    self._engine.kill(mailbox)
        if threading.current_thread() is not self._thread:
            self._thread.join(max(1.0, deadline.remaining))
        self._shelf = Shelf()
        self._events.clear()

    def _at_exit(self) -> None:
        self.close(Deadline.after(FAREWELL))

    def _check(self) -> None:
        self._origin.check()
        if self._closed:
            raise ClosedError(f"{self._origin.what} is closed")
        if self._fault:
            raise self._fault
        if not self._engine.alive:
            raise self._broken(EngineGone("Ray was shut down in this process"))


def _first_line(exc: Exception) -> str:
    return str(exc).partition("\n")[0]
