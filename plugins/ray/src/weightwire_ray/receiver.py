"""A worker's end: a thread that waits for news and fetches them, so that ``poll`` only looks at what is there."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from ray.exceptions import GetTimeoutError, RayError

from weightwire import wire
from weightwire.complaints import Complaints
from weightwire.errors import EndpointInUseError, WireError
from weightwire.forks import Origin
from weightwire.transport import Applied, Deadline, Delivery, Have, Receiver, ReceiverContext, Refused, Version, choose
from weightwire_ray.alias import refuse_alias
from weightwire_ray.engine import LOOK, Engine, EngineGone, Late, MailboxGone, NoMailbox, mailbox_name
from weightwire_ray.protocol import CLOSED, NEWS, PROTOCOL, UNKNOWN, Item, News, Told, told
from weightwire_ray.store import blocks_of, stretches_of

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.transport import Header
    from weightwire_ray.options import RayOptions

__all__ = ["RayReceiver"]

PATIENCE = 2.0
"""Seconds that a long poll for news takes at most. Each is a sign of life: a fifth of the mailbox's ``SILENT``."""
RETRY = (0.02, 0.5)
"""Seconds between looks for a mailbox: at first, and when there was none for long."""
JOIN = 10.0
"""Seconds for an answer to a hello."""
SLOW = 1e9
"""Bytes a second that the mailbox's node hashes at least."""


class Superseded(Exception):
    """There is something newer than the version that was being fetched."""


class Fetched:
    """A version whose bytes are in this node's store, mapped here: read-only."""

    def __init__(self, header: Header, buckets: Sequence[Sequence[Any]]) -> None:
        """Raises ``WireError`` where the buckets do not hold what the header speaks of."""
        self.stamp: Version = header.stamp
        self.base: Version | None = header.base
        self.header = header
        self._stretches = stretches_of(buckets, header.layout)
        self._blocks = list(blocks_of(self._stretches, header.layout)) if len(self._stretches) > 1 else []

    def delivery(self) -> Delivery:
        """Tensors over the store's memory; that is freed when they, and all that was made of them, are gone."""
        if not self._blocks:  # NumPy cuts one stretch into tensors several times as fast as torch does
            array = self._stretches[0] if self._stretches else np.empty(0, np.uint8)
            return Delivery(self.header, array=array, writable=False)
        return Delivery(self.header, blocks=[torch.from_numpy(block) for block in self._blocks], writable=False)


class RayReceiver(Receiver):
    """See :class:`weightwire.transport.Receiver`. The thread writes, ``poll`` reads; ``_changed`` guards both."""

    def __init__(self, endpoint: Endpoint, options: RayOptions, context: ReceiverContext) -> None:
        if context.apply == "alias" and options.alias != "force":
            refuse_alias(context.trained)
        self._context = context
        self._options = options
        self._engine = Engine(endpoint, options, context.deadline)
        self._name = mailbox_name(endpoint.location)
        self._where = f"the mailbox {self._name!r} in Ray's namespace {options.namespace!r}"
        self.whereabouts = f"{self._where} was not looked for yet"
        self._origin = Origin(f"The ray receiver {context.worker!r} of {str(endpoint)!r}")
        self._cache = wire.LayoutCache()
        self._mailbox: Any = None
        self._greeted: Any = None  # the mailbox that knows us, or will when it reads our hello
        self._known: Told = (None, None)  # what the thread has fetched, or given up
        self._full: Fetched | None = None
        self._subset: Fetched | None = None
        self._as_of = 0.0  # by the monotonic clock of this node: when these were the newest; 0 where nobody knows
        self._error: Exception | None = None
        self._serial = 0  # grows with everything that ``poll`` should look at
        self._seen = -1
        self._told: bytes | None = None  # the last report
        self._ending = False  # the trainer has closed: when nothing is left to be read, so are we
        self._over = False
        self._changed = threading.Condition()
        self._bell = threading.Event()  # wakes the thread
        self._thread = threading.Thread(target=self._serve, name=f"weightwire-ray {context.worker}", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)  # before Ray's own handler, which was registered earlier

    # -- poll --------------------------------------------------------------------------------------------------------

    def poll(self, have: Have, deadline: Deadline | None) -> Delivery | None:
        if deadline is None and self._serial == self._seen:
            return None
        self._origin.check()
        begun = time.monotonic()
        while not self._over:
            serial, ending = self._serial, self._ending
            if self._error is not None:
                with self._changed:  # or else one that comes just now would be lost
                    error, self._error = self._error, None
                if error is not None:
                    raise error
            chosen = choose(have, self._full, self._subset)
            if chosen is not None and deadline is not None and self._as_of < begun and not deadline.expired:
                self._catch_up(deadline)
                chosen = choose(have, self._full, self._subset)
            if chosen is not None:
                delivery: Delivery = chosen.delivery()
                return delivery
            self._seen = serial
            self.closed = self.closed or ending
            if self.closed or deadline is None or deadline.expired:
                return None
            with self._changed:
                self._changed.wait_for(lambda was=serial: self._serial != was or self._over, deadline.remaining)  # type: ignore[misc]
        return None

    def _catch_up(self, deadline: Deadline) -> None:
        """Where there is time: let the thread fetch what is newest now. It may just have been woken up."""
        mailbox = self._mailbox
        if mailbox is None:
            return
        with suppress(MailboxGone, EngineGone, Late):
            timeout = max(0.01, min(LOOK, deadline.remaining))
            newest = _newest(self._engine.ask(mailbox, "newest", self._context.worker, timeout=timeout))
            with self._changed:
                self._changed.wait_for(
                    lambda: _newest(self._known) >= newest or self._mailbox is not mailbox or self._over,
                    deadline.remaining,
                )

    def report(self, event: Applied | Refused) -> None:
        told = self._told = wire.encode_event(event)  # first, and then the look for a mailbox: see ``_join``
        mailbox = self._mailbox
        if mailbox is not None and self._origin.here:
            with suppress(MailboxGone, EngineGone, Late):
                # Once we have returned, a trainer that asks the mailbox knows: whatever else this worker tells it.
                self._engine.ask(mailbox, "report", *self._me, told, timeout=LOOK)

    @property
    def _me(self) -> tuple[str, int]:
        return self._context.worker, self._context.incarnation

    # -- the thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        pause, complaints = RETRY[0], Complaints(self._context.logger)
        while not self._over and not self._ending:
            try:
                mailbox = self._engine.find_mailbox(self._name, self._options.namespace)
                if self._join(mailbox):
                    pause = RETRY[0]
                    self._follow(mailbox)
            except MailboxGone as exc:
                self._disconnected(f"{self._where} is not there: {str(exc).partition(chr(10))[0]}")
            except NoMailbox as exc:
                self._disconnected(str(exc))
            except Late:
                self._disconnected(f"{self._where} does not answer")
            except EngineGone as exc:
                self._disconnected(str(exc))
                return
            except Exception as exc:
                complaints.log("%s: its thread failed and goes on", self._origin.what)
                self._disconnected(f"{self._where}: {exc}")
            self._rest(pause)
            pause = min(2 * pause, RETRY[1])

    def _join(self, mailbox: Any) -> bool:
        """Say hello; whether we are welcome. If not, the next ``poll`` says why."""
        joined = msgspec.structs.replace(self._context.joined, have=self._context.have())
        hello = wire.encode_event(joined)
        engine = self._engine
        self._greeted = mailbox  # first, and then the look at ``_over``, which ``close`` sets before it looks here
        if self._over:
            raise Late
        future = engine.send(mailbox, "join", PROTOCOL, *self._me, hello, engine.facts)
        kind, text = self._wait_for(future, JOIN)
        if kind:
            self._greeted = None
            error = EndpointInUseError if kind == "name" else WireError
            self._disconnected(f"{self._where} turned this worker away")
            self._update(error=error(f"{self._origin.what} was turned away: {text}"))
            return False
        self._mailbox, self._error = mailbox, None
        self.connected = True
        self.whereabouts = f"{self._where} was there"
        if self._told is not None and self._context.have() != joined.have:  # what was reported while it did not hear us
            self._engine.send(mailbox, "report", *self._me, self._told)
        return True

    def _follow(self, mailbox: Any) -> None:
        """Take news until the trainer has closed or we have; raises when the mailbox is gone."""
        self._known = (None, None)
        while not self._over:
            asked = self._engine.send(mailbox, "news", *self._me, self._known, PATIENCE)
            news: News = self._wait_for(asked, PATIENCE + JOIN)
            if news.kind == NEWS:
                self._fetch(mailbox, news)
            elif news.kind == CLOSED:
                self._engine.send(mailbox, "leave", *self._me)  # or else its farewell would wait for us
                self._mailbox = self._greeted = None
                self.connected = False
                self.whereabouts = f"{self._where} has closed"
                self._update(ending=True)
                return
            elif news.kind == UNKNOWN:
                self._disconnected(f"{self._where} did not know this worker any more")
                return

    def _wait_for(self, future: Any, timeout: float, *, busy: Any = None) -> Any:
        """The answer to a call, unless we close first; ``busy``: a mailbox that is to know meanwhile that we live.

        Raises ``Late``, ``MailboxGone``, ``EngineGone``.
        """
        deadline = Deadline.after(timeout)
        future.add_done_callback(lambda _: self._bell.set())
        while not future.done():
            if self._over or deadline.expired:
                raise Late
            self._bell.wait(min(LOOK, deadline.remaining))
            self._bell.clear()
            self._engine.check()
            if busy is not None and not future.done():
                self._engine.send(busy, "beat", *self._me)
        return self._engine.answer(future)

    def _rest(self, seconds: float) -> None:
        """Pause, unless we close."""
        self._bell.clear()
        if not self._over:
            self._bell.wait(seconds)

    def _fetch(self, mailbox: Any, news: News) -> None:
        """Bring the bytes of what is offered to this node and map them."""
        offer = news.offer
        there = {fetched.stamp: fetched for fetched in (self._full, self._subset) if fetched is not None}
        try:
            full, subset = [
                item and (there[item.stamp] if item.stamp in there else self._get(mailbox, item)) for item in offer
            ]
        except RayError as exc:  # the trainer, who owns the objects, is gone or about to be found gone
            self._context.logger.warning("%s: a version could not be fetched: %s", self._origin.what, exc)
            self.whereabouts = f"{self._where} was there, but the bytes of its newest version were not"
            self._rest(RETRY[1])
        except WireError as exc:
            self._update(known=told(offer), error=exc)
        except Superseded:
            pass
        else:
            near = all(item is None or item.node == self._engine.node for item in offer)
            self._update(known=told(offer), offer=(full, subset), as_of=news.at if near else 0.0)

    def _get(self, mailbox: Any, item: Item) -> Fetched:
        """Raises ``WireError``, ``Superseded``, Ray's errors, ``EngineGone``; ``Late`` where we close first."""
        header = wire.decode_header(item.header, self._cache)
        while True:
            try:
                buckets = self._engine.get(item.buckets, LOOK)
                break
            except GetTimeoutError:
                if self._over:
                    raise Late from None
                self._engine.send(mailbox, "beat", *self._me)
        if header.stamp != item.stamp or header.base != item.base:
            raise WireError(f"version {item.stamp.number} came under the header of version {header.stamp.number}")
        if item.check and item.node != self._engine.node:
            asked = self._engine.send(mailbox, "digest", item.stamp)
            digest = self._wait_for(asked, JOIN + header.layout.nbytes / SLOW, busy=mailbox)
            if digest is None:
                raise Superseded
            header = header._replace(digest=digest)
        return Fetched(header, buckets)

    def _update(
        self,
        *,
        known: Told | None = None,
        offer: tuple[Fetched | None, Fetched | None] | None = None,
        as_of: float = 0.0,
        error: Exception | None = None,
        ending: bool = False,
    ) -> None:
        """Let ``poll`` see something new, all at once."""
        with self._changed:
            if offer is not None and not self._over:
                (self._full, self._subset), self._as_of = offer, as_of
            self._known = known or self._known
            self._error = error or self._error
            self._ending = self._ending or ending
            if ending and choose(self._context.have(), self._full, self._subset) is None:
                self.closed = True
            self._serial += 1
            self._changed.notify_all()

    def _disconnected(self, where: str) -> None:
        with self._changed:
            self._mailbox, self.connected, self.whereabouts = None, False, where
            self._changed.notify_all()

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        if self._over or not self._origin.here:
            return
        self._over = True
        greeted = self._greeted
        atexit.unregister(self._at_exit)
        self._bell.set()
        if greeted is not None:  # which may hear this before our hello
            with suppress(MailboxGone, EngineGone, Late):
                timeout = min(1.0, max(0.05, deadline.remaining))
                self._engine.ask(greeted, "leave", *self._me, timeout=timeout)
        if threading.current_thread() is not self._thread:
            self._thread.join(max(LOOK, deadline.remaining))
        self.connected = False
        self._full = self._subset = None
        with self._changed:
            self._changed.notify_all()

    def _at_exit(self) -> None:
        self.close(Deadline.after(1.0))


def _newest(versions: Told) -> Version:
    return max((stamp for stamp in versions if stamp is not None), default=Version(-1, 0))
