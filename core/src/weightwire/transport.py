"""What a backend implements: a :class:`Sender`, a :class:`Receiver`, and the :class:`Delivery` that joins them.

A sender is given a :class:`weightwire.weights.payload.Payload`; its ``layout`` (:mod:`weightwire.weights.layout`) says
what lies where. The hooks that make the two ends are in :mod:`weightwire.hookspecs`; :mod:`weightwire.testing` tries
them.

A backend only moves bytes and news. Versions, the roster, preflight, digests, all-or-nothing apply, receipts, hooks and
errors belong to the core and are written once, for every backend.

The contract in five lines:

* every method that may wait takes a :class:`Deadline` and returns or raises by then;
* ``Sender.stage`` has read all of the payload when it returns *or raises*, and asks for ``payload.header`` only when
  the version is about to become visible to a worker (asking for it is what uses up the version's number);
* a backend keeps the newest full version and the newest subset on top of it, for workers that are slow or come late;
* ``Receiver.poll`` hands out whole versions only, newest first wins, a subset's full version before the subset;
* memory under a delivery does not change until ``release()`` (``apply="copy"``) or until the last view of it has died
  (``apply="alias"``).
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, Union

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from weightwire.weights.layout import Layout
    from weightwire.weights.payload import Payload

__all__ = [
    "NOW",
    "PHASES",
    "Applied",
    "Deadline",
    "Delivery",
    "Event",
    "Have",
    "Header",
    "Joined",
    "Left",
    "Lost",
    "Noted",
    "Offer",
    "Receiver",
    "ReceiverContext",
    "Refused",
    "Sender",
    "SenderContext",
    "Shelf",
    "Staged",
    "Version",
    "choose",
]

PHASES = ("extract", "encode", "stage", "notify", "wait", "verify", "commit", "after-hooks")
"""The phases of a version's way, under the same names in every report, log, error and benchmark."""


class Version(NamedTuple):
    """The stamp of a payload. Ordered: a later epoch beats any number of an earlier one."""

    epoch: int  # new for each updater, in milliseconds since 1970 where the clock allows
    number: int  # grows by one a push, from 1


class Have(NamedTuple):
    """What a receiver has.

    ``stamp``: the newest one that it need not be offered again, because it has applied or refused it. ``base``: the
    full version under its policy. ``acting``: the version that its policy acts with.
    """

    stamp: Version | None = None
    base: Version | None = None
    acting: Version | None = None


class Deadline:
    """A point in time on the monotonic clock. ``Deadline.after(0)`` never waits; there is no infinite one."""

    __slots__ = ("at",)

    def __init__(self, at: float) -> None:
        self.at = at

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The moment ``seconds`` from now."""
        return cls(time.monotonic() + seconds)

    @property
    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.at

    def sooner(self, seconds: float) -> Deadline:
        """This deadline, or ``seconds`` from now where that is earlier: for waits in slices."""
        return Deadline(min(self.at, time.monotonic() + seconds))

    def __repr__(self) -> str:
        return f"Deadline(in {self.at - time.monotonic():.3f} s)"


NOW = Deadline(float("-inf"))
"""A deadline that has passed: look, do not wait."""


class Header(NamedTuple):
    """What travels beside the bytes.

    ``base`` is set where the payload is a subset: the full version on which it lies. ``digest`` is the xxh3-128 of the
    blocks' bytes in layout order, without padding; empty where none was asked for. ``metadata`` is the caller's, as
    JSON. ``encoding`` leaves room for deltas; a receiver refuses one that it does not know.
    """

    stamp: Version
    layout: Layout
    base: Version | None = None
    digest: bytes = b""
    metadata: bytes = b"{}"
    encoding: str = "plain"


def bounded(timeout: float | None, default: float = 60.0) -> float:
    """Seconds that somebody asked for, or else the default. There are no negative or infinite ones: ``ValueError``."""
    seconds = default if timeout is None else timeout
    if not isinstance(seconds, (int, float)) or not 0 <= seconds <= LONGEST:  # type: ignore[redundant-expr]
        raise ValueError(f"timeout is {timeout!r}; it is a number of seconds from 0 to {LONGEST:.0f}")
    return float(seconds)


def whole(number: Any, what: str) -> int:
    """A whole number that somebody gave as ``what``. ``TypeError`` for anything else."""
    try:
        return index(number)
    except TypeError:
        raise TypeError(f"{what} is {number!r}; it is a whole number") from None


LONGEST = 1e7
"""Seconds. More than a hundred days are a mistake, and more than some system calls take."""


# -- events: worker -> trainer ---------------------------------------------------------------------------------------


class _Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    worker: str
    incarnation: int = 0


class Joined(_Event, frozen=True, kw_only=True):
    """A worker is there. ``needs`` is what its policy takes, encoded by the core and opaque to a backend."""

    host: str = ""
    pid: int = 0
    have: Have = Have()
    needs: bytes = b""
    notes: dict[str, str] = {}


class Staged(_Event, frozen=True, kw_only=True):
    """The worker can apply this version without anything more from the trainer."""

    stamp: Version


class Applied(_Event, frozen=True, kw_only=True):
    """The worker's policy acts with this version, whole. ``error`` is set where a hook failed after the commit."""

    stamp: Version
    digest: str = ""
    tensors: int = 0
    nbytes: int = 0
    seconds: dict[str, float] = {}
    error: str = ""


class Refused(_Event, frozen=True, kw_only=True):
    """The worker did not take this version and acts with the one before. ``kind`` is ``"refused"`` or ``"apply"``."""

    stamp: Version
    kind: str
    phase: str
    error: str
    tensor: str = ""


class Lost(_Event, frozen=True, kw_only=True):
    """The worker went without goodbye."""

    reason: str = ""


class Left(_Event, frozen=True, kw_only=True):
    """The worker said goodbye."""


class Noted(_Event, frozen=True, kw_only=True):
    """What the backend has found out of a worker since it joined, such as why it fell back to another path: it stands
    in ``updater.workers[...].notes``, beside the notes of other keys."""

    notes: dict[str, str]


Event = Union[Joined, Staged, Applied, Refused, Lost, Left, Noted]


# -- which version a worker is to be given ---------------------------------------------------------------------------


class Offer(NamedTuple):
    """A version that a backend can hand out: its stamp, and for a subset the full version on which it lies."""

    stamp: Version
    base: Version | None = None


OfferT = TypeVar("OfferT", bound=Any)


def choose(have: Have, full: OfferT | None, subset: OfferT | None) -> OfferT | None:
    """Pick what a worker that has ``have`` is given next, from the newest full version and newest subset meant for it.

    ``full`` and ``subset`` are any objects with ``.stamp`` and ``.base``. The answer is ``subset`` where it is newer
    and the worker stands on its base; else ``full`` where that is newer, or needed as the base of a newer subset;
    else ``None``. A pure function, so that every backend follows one rule.
    """
    if full is None:
        return None
    if subset is not None and subset.base == full.stamp and subset.stamp > full.stamp:
        if have.stamp is not None and subset.stamp <= have.stamp:
            return None
        return subset if have.base == full.stamp else full
    return full if have.stamp is None or full.stamp > have.stamp else None


class Shelf(Generic[OfferT]):
    """Which versions a backend keeps, and for whom: the newest full one and the newest subset on it, for each worker.

    Whoever was not addressed by name, and whoever joins, has what was addressed to all. Pure; a help, to be used or
    not.
    """

    def __init__(self) -> None:
        self._all: tuple[OfferT | None, OfferT | None] = (None, None)
        self._some: dict[str, tuple[OfferT | None, OfferT | None]] = {}

    def put(self, item: OfferT, to: Iterable[str] | None) -> None:
        """``item`` is now the newest version for the workers ``to`` (``None``: all)."""
        if to is None:
            self._all = _with(self._all, item)
            self._some.clear()  # the core lets a subset go to all only where all stand on its base
        else:
            self._some.update({worker: _with(self.of(worker), item) for worker in to})

    def of(self, worker: str) -> tuple[OfferT | None, OfferT | None]:
        """The full version and the subset, for :func:`choose`."""
        return self._some.get(worker, self._all)

    def forget(self, worker: str) -> None:
        """It left or was lost; when it comes back it has what was addressed to all."""
        self._some.pop(worker, None)

    def kept(self) -> list[OfferT]:
        """Everything that somebody may still ask for."""
        pairs = [self._all, *self._some.values()]
        return [item for pair in pairs for item in pair if item is not None]


def _with(pair: tuple[OfferT | None, OfferT | None], item: OfferT) -> tuple[OfferT | None, OfferT | None]:
    return (item, None) if item.base is None else (pair[0], item)


# -- deliveries ------------------------------------------------------------------------------------------------------


BUCKET = 32 * 2**20
"""Bytes of a bucket of a delivery that is in reach as a whole."""


class Delivery:
    """One whole version in a worker's reach, in memory that the backend vouches for until it is released.

    Args:
        header: the decoded header.
        blocks: one flat uint8 tensor for each block of the layout, or
        buffer: one flat uint8 tensor of ``layout.nbytes`` bytes that holds them all at ``layout.starts``, or
        array: the same as a NumPy array that may be written to: each block then has a storage of its own, which keeps
            the array alive.
        writable: whether the worker may write into the memory without anybody else seeing it.
        memory: any object; two deliveries with the same one (and the same layout) lie at the same addresses, so that
            the core can use its views again. ``None``: never.
        release: called once, from any thread, when the core needs the memory no more. Where the receiver was made with
            ``apply="alias"`` views may live on after it: the backend then waits for the last of them to die.

    Attributes:
        alone: a backend that knows that no subset lies on this version yet sets it, so that nobody asks for one.
        fault: why this version cannot be read, where a backend that was told of it found that out: it is refused with
            this error, once, and the trainer hears of it. The header need not say more than the version and its base.
    """

    fault: Exception | None = None

    def __init__(
        self,
        header: Header,
        *,
        blocks: Sequence[Tensor] | None = None,
        buffer: Tensor | None = None,
        array: NDArray[np.uint8] | None = None,
        writable: bool = False,
        memory: object | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.header = header
        self.writable = writable
        self.alone = False
        self.memory = memory
        self._blocks = blocks
        self._buffer = buffer
        self._array = array
        self._release = release

    @property
    def on_host(self) -> bool:
        """Whether it is known that all of it is in the host's memory, so that nobody has to look."""
        return self._array is not None or (self._buffer is not None and self._buffer.is_cpu)

    def tensors(self) -> Sequence[Tensor]:
        """The blocks: flat uint8 tensors, in the order of the layout, each with a storage of its own."""
        if self._blocks is None:
            layout = self.header.layout
            if self._array is not None:
                self._blocks = layout.array_blocks(self._array)
            else:
                assert self._buffer is not None
                self._blocks = layout.slice(self._buffer)
        return self._blocks

    def views(self) -> list[Tensor]:
        """A typed tensor for each entry of the layout, in its order; ties are views of one block."""
        if self._array is not None:
            return self.header.layout.array_views(self._array)
        return self.header.layout.views(self.tensors())

    def buckets(self) -> Iterator[tuple[int, Tensor]]:
        """For ``stream=True``: ``(start byte, flat uint8 tensor)`` in ascending order, each valid until the next is
        asked for. Here, of a delivery that is in reach as a whole; a backend whose bytes come in one by one has its
        own, and raises :class:`~weightwire.UpdaterLostError` where they end too early."""
        if self._buffer is not None:
            for start in range(0, self.header.layout.nbytes, BUCKET):
                yield start, self._buffer[start : min(start + BUCKET, self.header.layout.nbytes)]
            return
        layout = self.header.layout
        for number, block in enumerate(self.tensors()):
            for first in range(0, layout.sizes[number], BUCKET):
                yield layout.starts[number] + first, block[first : min(first + BUCKET, layout.sizes[number])]

    def release(self) -> None:
        """Give the memory back. Idempotent; may be called from any thread."""
        release, self._release = self._release, None
        if release is not None:
            release()


# -- the two classes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SenderContext:
    """What the core tells a backend that opens a sender."""

    epoch: int  # floor: use it, or one more than the newest epoch found at the place where that is higher
    digest: str = "auto"  # what the user asked for
    deadline: Deadline
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("weightwire"))


@dataclass(frozen=True, kw_only=True)
class ReceiverContext:
    """What the core tells a backend that opens a receiver.

    ``apply``: ``"copy"``, the core is done with a delivery's memory when it calls ``release()``; ``"alias"``, tensors
    may live on. ``deliver`` is set where the receiver is inline: the backend calls it within ``stage`` with each
    delivery. ``joined`` is this worker's hello, ready for the wire; ``have()`` is asked anew at each (re)connection.
    ``trained`` says why the target is likely to be written to in place, where it is: a backend whose delivered memory
    must not be written to refuses ``alias`` then. ``steady``: the views of a delivery are used from one version to the
    next by tensors of the target, which a backend may rely on when it decides whether to make new ones each time.
    """

    joined: Joined
    have: Callable[[], Have]
    apply: str = "copy"
    stream: bool = False
    deliver: Callable[[Delivery], None] | None = None
    trained: str = ""
    steady: bool = False
    device: str = "cpu"  # on which the target's tensors are
    deadline: Deadline
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("weightwire"))

    @property
    def worker(self) -> str:
        return self.joined.worker

    @property
    def incarnation(self) -> int:
        return self.joined.incarnation


class Sender(ABC):
    """The trainer's end of a backend.

    Attributes:
        endpoint: complete, usable by a worker anywhere the backend reaches, and without secrets.
        epoch: at least ``context.epoch``, and newer than any epoch that was found at the place. After a clock was set
            back, a payload may carry a newer one.
        digests: with ``digest="auto"``, this backend sees to it by itself that a delivery has a digest where its bytes
            have left the trainer's host, so that the payload need not have one.

    The hook that makes it raises :class:`~weightwire.EndpointInUseError` where another live updater has the place.
    ``stage`` is called by one thread at a time, and ``events`` too, but both may run at once; ``close`` comes after the
    last ``stage``, perhaps while a thread is in ``events``, which then returns or raises
    :class:`~weightwire.ClosedError`.
    """

    endpoint: str
    epoch: int
    digests: bool = False

    @abstractmethod
    def stage(self, payload: Payload, to: frozenset[str] | None, deadline: Deadline) -> None:
        """Read all of ``payload`` and make it available to the workers named in ``to`` (``None``: all, and whoever
        joins).

        Returns when nothing of the payload's tensors will be read any more and the news is on its way; that a worker
        has it staged is an event. Raises :class:`~weightwire.StorageFullError` before writing,
        :class:`~weightwire.WaitTimeout` naming whoever holds what is needed, :class:`~weightwire.StaleUpdaterError`
        where a newer updater has the place.
        """

    @abstractmethod
    def events(self, deadline: Deadline) -> list[Event]:
        """What has happened since the last call, oldest first; waits for something until the deadline, else ``[]``.

        The backend makes all of them: ``Joined`` when a worker is there (from ``context.joined``, with ``have`` as it
        is then), ``Staged`` when it can apply a version without the trainer, ``Applied`` and ``Refused`` as its
        receiver reports them, ``Left`` when it said goodbye, ``Lost`` when it is gone without.
        """

    @abstractmethod
    def close(self, deadline: Deadline) -> None:
        """Let go what ``stage`` accepted, say goodbye to every worker, free everything. Idempotent."""


class Receiver(ABC):
    """A worker's end of a backend. All methods but ``close`` are called by one thread.

    Attributes:
        connected: whether the trainer is there, as of the last call.
        closed: whether the trainer said goodbye, and all that it had accepted before was handed out.
        whereabouts: for errors: where this receiver looks for the trainer, and what it found there.

    A second live worker of one name is refused with :class:`~weightwire.EndpointInUseError`: by the hook that makes the
    receiver, or by its first ``poll`` that meets the trainer.
    """

    connected: bool = False
    closed: bool = False
    whereabouts: str = ""

    @abstractmethod
    def poll(self, have: Have, deadline: Deadline | None) -> Delivery | None:
        """The version that :func:`choose` picks beyond ``have``, or ``None`` at the deadline, or when ``closed``
        becomes true. Reconnects by itself. ``None`` for a deadline: do not wait, and be cheap: it is asked before
        every step of a policy.
        """

    @abstractmethod
    def report(self, event: Applied | Refused) -> None:
        """Tell the trainer. Never blocks for long and does not raise where the trainer is gone."""

    @abstractmethod
    def close(self, deadline: Deadline) -> None:
        """Say goodbye and free everything. Idempotent; leases end here."""
