"""A sharded trainer: every rank makes the updater and calls it alike, the first one does what is asked, all of them
return or raise the same.

The first rank leads. It says what comes next in *words*, under numbered keys of the trainer's own
:class:`torch.distributed.Store`; the others follow. A tensor is gathered in two steps, so that no rank enters a
collective that another one does not come to: all answer that they are there, and then the word is given. Words stay
until all have read them: a rank that comes late reads what it missed, and is in step again.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Union

import msgspec

from weightwire import errors
from weightwire.errors import PreflightError, PushError, WaitTimeout, WeightwireError
from weightwire.report import PushReport
from weightwire.transport import Deadline, Sender, Version
from weightwire.weights.blocks import gathered
from weightwire.weights.walk import is_dtensor, is_state, walk

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.transport import Event
    from weightwire.weights.payload import Payload
    from weightwire.weights.source import State

__all__ = ["Follower", "Outcome", "Ranks"]

T = TypeVar("T")

_counters: dict[tuple[int, ...], Iterator[int]] = {}  # of updaters, by the ranks that make them alike
SLACK = 5.0
"""Seconds beyond a call's own deadline that a rank waits for what the first one has to say of it."""


class _Begin(msgspec.Struct, frozen=True, tag=True):
    call: int
    kind: str


class _Go(msgspec.Struct, frozen=True, tag=True):
    """All gather this tensor now."""

    leaf: int
    name: str


class Outcome(msgspec.Struct, frozen=True, tag=True):
    """What came of a call, as plain data. ``version`` and ``run``: the newest version afterwards."""

    version: int = 0
    run: int = 0
    endpoint: str = ""
    report: PushReport | None = None
    names: list[str] = []
    error: str = ""
    kind: str = ""
    facts: dict[str, Union[str, int, None]] = {}

    @classmethod
    def of(cls, error: BaseException, newest: Version) -> Outcome:
        facts = {fact: getattr(error, fact, None) for fact in ("version", "worker", "phase", "tensor")}
        return cls(
            version=newest.number,
            run=newest.epoch,
            report=getattr(error, "report", None),
            error=str(error) or type(error).__name__,
            kind=type(error).__name__,
            facts=facts if isinstance(error, PushError) else {},
        )

    def check(self) -> Outcome:
        """Raise what the first rank raised."""
        if not self.error:
            return self
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, PushError):
            raise kind(self.error, report=self.report, **self.facts)  # type: ignore[arg-type]
        if isinstance(kind, type) and issubclass(kind, WeightwireError):
            raise kind(self.error)
        if self.kind in _BUILT_IN:
            raise _BUILT_IN[self.kind](self.error)
        raise PushError(f"the first rank of the trainer ended with {self.kind}: {self.error}")


_BUILT_IN = {kind.__name__: kind for kind in (RuntimeError, TypeError, ValueError)}
"""Errors that are none of ours and mean the same on every rank: of arguments, mostly."""

_Word = Union[_Begin, _Go, Outcome]
_ENCODE, _DECODER = msgspec.msgpack.encode, msgspec.msgpack.Decoder(_Word)


class Ranks:
    """The ranks over which a trainer's weights are sharded.

    Attributes:
        first: whether this is the rank that leads: it opens the Sender, and sends.
    """

    def __init__(self, ranks: Sequence[int], rank: int, store: Any, timeout: float) -> None:
        self._leader = ranks[0]
        self._others = [other for other in ranks if other != ranks[0]]
        self._rank = rank
        self._store = store  # a torch.distributed.Store, whose stubs know no bytes
        self._timeout = timeout
        self._word = self._call = 0
        self._unread: list[int] = []  # words that somebody has not answered to yet
        self._seconds = timeout  # of the call that goes on
        self._deadline = Deadline.after(timeout)
        self._gatherer = _Gatherer()
        self.first = rank == ranks[0]

    @classmethod
    def of(cls, weights: Any, timeout: float) -> Ranks | None:
        """The ranks of ``weights``; ``None`` where nothing of them is sharded.

        Raises :class:`~weightwire.PreflightError` where its tensors are spread over different ranks.
        """
        if "torch.distributed.tensor" not in sys.modules or not is_state(weights):
            return None
        meshes = {leaf.device_mesh: None for leaf in walk(weights).leaves if is_dtensor(leaf) and _is_spread(leaf)}
        if not meshes:
            return None
        from torch.distributed import distributed_c10d as dist

        found = {tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}
        if len({frozenset(ranks) for ranks in found}) > 1:
            spread = "; ".join(sorted(map(str, found)))
            raise PreflightError(f"the weights are sharded over different ranks: {spread}; send them one by one")
        ranks = sorted(found)[0]
        store = dist._get_default_store()
        number = next(_counters.setdefault(ranks, itertools.count()))
        name = f"weightwire/{'-'.join(map(str, ranks))}/{number}"
        return cls(ranks, dist.get_rank(), dist.PrefixStore(name, store), timeout)

    def together(
        self,
        kind: str,
        timeout: float,
        lead: Callable[[], Outcome],
        newest: Callable[[], Version],
        state: Callable[[], State] | None = None,
        learn: Callable[[Version], None] | None = None,
    ) -> Outcome:
        """What every rank calls alike: ``lead()`` runs on the first, and all return its outcome or raise its error.

        ``newest()``: the stamp of the newest version. ``state()``: what the others gather of. ``learn(stamp)``: what
        they do when they hear of the newest version.
        """
        self._call += 1
        self._seconds = timeout
        self._deadline = Deadline.after(timeout)
        if not self.first:
            outcome = self._follow(kind, state)
            if learn is not None:
                learn(Version(outcome.run, outcome.version))
            return outcome.check()
        try:
            self._say(_Begin(self._call, kind), f"come to {kind}()")
            outcome = lead()
        except BaseException as exc:
            self._tell(Outcome.of(exc, newest()))
            raise
        self._tell(outcome)
        return outcome

    def open(self, make: Callable[[], Sender]) -> Sender:
        """The Sender on the first rank, and a stand-in for it on the others."""
        sender: list[Sender] = []

        def lead() -> Outcome:
            sender.append(make())
            return Outcome(run=sender[0].epoch, endpoint=sender[0].endpoint)

        outcome = self.together("WeightUpdater", self._timeout, lead, lambda: Version(0, 0))
        return sender[0] if sender else Follower(outcome.endpoint, outcome.run)

    def gather(self, payload: Payload, leaf: int, tensor: Tensor) -> Tensor:
        """All of a tensor, on the first rank: the others come along. Any other tensor as it is."""
        if not is_dtensor(tensor) or not _is_spread(tensor):
            return gathered(tensor)
        name = payload.layout.entries[leaf].name
        number = self._say(_Go(leaf, name), f"gather {name!r}", name)
        self._store.set(f"{number}/go", b"\1")
        return self._gatherer.gather(name, tensor, self._deadline)

    # -- the first rank ----------------------------------------------------------------------------------------------

    def _say(self, word: _Word, to: str, tensor: str = "") -> int:
        """Say a word, and wait until everybody has answered. Raises what somebody has against it."""
        self._word += 1
        number = self._word
        self._store.set(str(number), _ENCODE(word))
        self._unread.append(number)
        answers = [f"{number}/{rank}" for rank in self._others]
        try:
            self._wait(answers, self._deadline)
            said = [(rank, self._store.get(key)) for rank, key in zip(self._others, answers)]
            against = [f"rank {rank}: {text.decode(errors='replace')}" for rank, text in said if text]
            if against:
                raise PreflightError("; ".join(against))
        except BaseException as exc:
            self._store.set(f"{number}/go", b"\0")
            if not isinstance(exc, _Silence):
                raise
            silent = ", ".join(str(rank) for rank, key in zip(self._others, answers) if not self._there(key))
            raise WaitTimeout(
                f"rank {silent} of the trainer did not {to} within {self._seconds:.3g} s: it is slow, gone, or "
                "does not call the updater as the first rank does",
                phase="extract",
                tensor=tensor or None,
            ) from None
        self._forget()
        return number

    def _tell(self, outcome: Outcome) -> None:
        """Say what came of a call. Nobody is waited for: whoever is late will read it."""
        self._word += 1
        with suppress(Exception):  # the store is gone, and with it whoever reads it
            self._store.set(str(self._word), _ENCODE(outcome))
            self._unread.append(self._word)

    def _forget(self) -> None:
        """Delete words that everybody has answered to."""
        for number in list(self._unread):
            keys = [f"{number}/{rank}" for rank in self._others]
            if number != self._word and self._there(*keys):
                for key in (str(number), f"{number}/go", *keys):
                    self._store.delete_key(key)
                self._unread.remove(number)

    # -- the others --------------------------------------------------------------------------------------------------

    def _follow(self, kind: str, state: Callable[[], State] | None) -> Outcome:
        """Do as the first rank says, until it says what came of this call."""
        mine, call = False, 0
        found: State | None = None
        while True:
            word = self._hear(kind)
            against = ""
            if isinstance(word, _Begin):
                call = word.call
                mine = call >= self._call  # else a call that this rank had given up
                if mine:  # the first rank may have come late, and has all of its time from here on
                    self._deadline = Deadline.after(self._seconds)
                if mine and word.kind != kind:
                    against = f"is in {kind}(), where the first rank is in {word.kind}()"
                elif mine and state is not None:
                    try:
                        found = state()
                    except Exception as exc:  # whatever it is, the first rank must not wait for us
                        against = str(exc) if isinstance(exc, WeightwireError) else f"{type(exc).__name__}: {exc}"
            elif isinstance(word, _Go):
                if not mine or found is None:
                    against = "has not come to this call"
                elif [entry.name for entry in found.layout.entries[word.leaf :][:1]] != [word.name]:
                    against = f"has no tensor {word.name!r} at place {word.leaf}"
            self._answer(against)
            if isinstance(word, Outcome) and mine:
                self._call = call
                return word
            if isinstance(word, _Go) and not against and found is not None and self._given():
                self._gatherer.gather(word.name, found.tensors[word.leaf], self._deadline)

    def _hear(self, kind: str) -> _Word:
        key = str(self._word + 1)
        patience = self._deadline.remaining + SLACK
        try:
            self._wait([key], Deadline.after(patience))
        except _Silence:
            raise WaitTimeout(
                f"rank {self._leader} of the trainer, which leads, was silent in {kind}() for {patience:.3g} s",
                phase="extract",
            ) from None
        word = _DECODER.decode(self._store.get(key))
        self._word += 1
        return word

    def _answer(self, against: str) -> None:
        with suppress(Exception):  # the first rank is gone: the next word will not come
            self._store.set(f"{self._word}/{self._rank}", against.encode())

    def _given(self) -> bool:
        """Whether all came to this word."""
        key = f"{self._word}/go"
        try:
            self._wait([key], Deadline.after(self._deadline.remaining + SLACK))
        except _Silence:
            raise WaitTimeout(
                f"rank {self._leader} of the trainer, which leads, was silent when a tensor was to be gathered",
                phase="extract",
            ) from None
        return bool(self._store.get(key) == b"\1")

    # -- the store ---------------------------------------------------------------------------------------------------

    def _wait(self, keys: list[str], deadline: Deadline) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=max(deadline.remaining, 0.001)))
        except RuntimeError as exc:  # DistStoreError; of a lost connection, too
            raise _Silence from exc

    def _there(self, *keys: str) -> bool:
        try:
            return bool(self._store.check(list(keys)))
        except RuntimeError:
            return False


class _Silence(Exception):
    """Nobody has said what was waited for."""


def _is_spread(tensor: Any) -> bool:
    return bool(tensor.device_mesh.size() > 1) and not all(p.is_replicate() for p in tensor.placements)


class _Job(NamedTuple):
    tensor: Any
    stream: Any  # of the thread that asks, where the tensor is on a GPU
    done: SimpleQueue[Any]


class _Gatherer:
    """Gathers in a thread of its own: a collective of which a rank has died may never end."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def gather(self, name: str, tensor: Any, deadline: Deadline) -> Tensor:
        import queue

        seconds = deadline.remaining
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="weightwire-gather", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None).atexit = False
        job = _Job(tensor, _stream_of(tensor), SimpleQueue())
        self._jobs.put(job)
        try:
            found = job.done.get(timeout=max(seconds, 0.001))
        except queue.Empty:
            self._jobs.put(None)
            self._thread, self._jobs = None, SimpleQueue()  # that one may never come back
            raise WaitTimeout(
                f"tensor {name!r} was not gathered within {seconds:.3g} s: a rank of the trainer is stuck or "
                "gone, and its process group out of step; start the trainer again",
                phase="extract",
                tensor=name,
            ) from None
        if isinstance(found, BaseException):
            raise PushError(
                f"tensor {name!r} could not be gathered: {type(found).__name__}: {found}", phase="extract", tensor=name
            ) from found
        whole: Tensor = found
        return whole


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    import torch

    while (job := jobs.get()) is not None:
        try:
            with nullcontext() if job.stream is None else torch.cuda.stream(job.stream):
                whole = gathered(job.tensor)
            if job.stream is not None:
                job.stream.synchronize()
        except BaseException as exc:
            job.done.put(exc)
        else:
            job.done.put(whole)
            del whole
        del job


def _stream_of(tensor: Any) -> Any:
    """The stream on which a tensor may still be written, and on which what is gathered is read."""
    import torch

    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


class Follower(Sender):
    """Stands in for the Sender on the ranks that do not send."""

    def __init__(self, endpoint: str, epoch: int) -> None:
        self.endpoint = endpoint
        self.epoch = epoch

    def stage(self, payload: Payload, to: Iterable[str] | None, deadline: Deadline) -> None:
        raise RuntimeError("only the first rank of a sharded trainer sends")

    def events(self, deadline: Deadline) -> list[Event]:
        return []

    def close(self, deadline: Deadline) -> None:
        """Nothing to close."""
