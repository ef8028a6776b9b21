"""A sharded trainer: every rank makes the updater and calls it alike, the first one does what is asked, all of them
return or raise the same.

The first rank leads. It says what comes next in *words*, under numbered keys of the trainer's own
:class:`torch.distributed.Store`; the others follow. A bucket is gathered in two steps, so that nobody waits for a
message from a rank that does not come: all answer that they are there, and whoever is the last to do so gives the word.
Words stay until all have read them: a rank that comes late reads what it missed, and is in step again.
"""

from __future__ import annotations

import itertools
import logging
import queue
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, Union

import msgspec

from weightwire import errors
from weightwire.desk import GRACE, Desk, Silence
from weightwire.errors import ClosedError, PreflightError, PushError, WaitTimeout, WeightwireError
from weightwire.gathering import Cut, Gatherer, Job, Shards
from weightwire.report import PushReport
from weightwire.transport import Deadline, Sender, Version
from weightwire.weights.pieces import Piece, Want, whole_piece
from weightwire.weights.shards import is_spread
from weightwire.weights.walk import is_dtensor, is_state, walk

if TYPE_CHECKING:
    from weightwire.transport import Event
    from weightwire.weights.payload import Payload
    from weightwire.weights.source import State

__all__ = ["Follower", "Outcome", "Ranks"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

_counters: dict[tuple[int, ...], Iterator[int]] = {}  # of updaters, by the ranks that make them alike
SLACK = 5.0
"""Seconds beyond a call's own deadline that a rank waits for what the first one has to say of it."""
AGAINST, STOP = 1 << 24, 1 << 48
"""Beside one for each answer: what is added to a word's count by who cannot follow, and by the first rank when it gives
up. So the count alone says, to everybody alike, whether all came in time."""


class _Begin(msgspec.Struct, frozen=True, tag=True):
    call: int
    kind: str


class _Go(msgspec.Struct, frozen=True, tag=True):
    """All bring these pieces together now."""

    cuts: list[Cut]


class _Over(msgspec.Struct, frozen=True, tag=True):
    """The first rank has closed its updater."""


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

_Word = Union[_Begin, _Go, _Over, Outcome]
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
        self._desk = Desk(store)
        self._timeout = timeout
        self._word = self._call = 0
        self._forgotten = 0  # up to which word they are deleted
        self._seconds = timeout  # of the call that goes on
        self._deadline = Deadline.after(timeout)
        self._shards = Shards(ranks[0], rank)
        self._gatherer = Gatherer()
        self._calling = self._closed = False
        self.first = rank == ranks[0]

    @classmethod
    def of(cls, weights: Any, timeout: float) -> Ranks | None:
        """The ranks of ``weights``; ``None`` where nothing of them is sharded.

        Raises :class:`~weightwire.PreflightError` where its tensors are spread over different ranks.
        """
        if "torch.distributed.tensor" not in sys.modules or not is_state(weights):
            return None
        meshes = {leaf.device_mesh: None for leaf in walk(weights).leaves if is_dtensor(leaf) and is_spread(leaf)}
        if not meshes:
            return None
        from torch.distributed import distributed_c10d as dist

        found = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes}
        ranks = max(found, key=len)  # of others, there may be meshes in it: of its rows, say
        if any(not set(some) <= set(ranks) for some in found):
            spread = "; ".join(sorted(map(str, found)))
            raise PreflightError(f"the weights are sharded over different ranks: {spread}; send them one by one")
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
        self._calling = True
        try:
            self._say(_Begin(self._call, kind), f"come to {kind}()")
            outcome = lead()
        except BaseException as exc:
            self._tell(Outcome.of(exc, newest()))
            raise
        else:
            self._tell(outcome)
        finally:
            self._calling = False
            if self._closed:
                self.close()
        return outcome

    def open(self, make: Callable[[], Sender]) -> Sender:
        """The Sender on the first rank, and a stand-in for it on the others."""
        sender: list[Sender] = []

        def lead() -> Outcome:
            sender.append(make())
            return Outcome(run=sender[0].epoch, endpoint=sender[0].endpoint)

        outcome = self.together("WeightUpdater", self._timeout, lead, lambda: Version(0, 0))
        return sender[0] if sender else Follower(outcome.endpoint, outcome.run)

    def pieces(self, state: State, wants: Sequence[Want]) -> Iterator[Piece]:
        """On the first rank: what is wanted of a state, in that order. The next bucket is gathered while what came of
        the one before is used; whoever asks for the next piece has done with the last one."""
        plan = list(self._shards.plan(state, wants))
        buckets = iter([unit for unit in plan if isinstance(unit, list)])
        ahead = self._begin(buckets, state)
        try:
            for unit in plan:
                if not isinstance(unit, list):
                    yield whole_piece(unit, state.tensors[unit.leaf])
                    continue
                assert ahead is not None
                job, ahead = ahead, None
                found = self._come(job, unit[0].name)
                ahead = self._begin(buckets, state)
                while found:
                    yield found.pop(0)
        finally:
            if ahead is not None:
                self._gatherer.settle(ahead, self._deadline.remaining + 2 * GRACE)

    def close(self) -> None:
        """On the first rank: the others need not wait for it any more. Within a call, when that has ended."""
        self._closed = True
        if self.first and not self._calling:
            word = _ENCODE(_Over())
            number = str(self._word + 1)
            try:
                self._desk.ask(lambda store: store.set(number, word), Deadline.after(GRACE))
            except WeightwireError:
                logger.debug("the ranks could not be told that the updater is closed", exc_info=True)

    # -- the first rank ----------------------------------------------------------------------------------------------

    def _begin(self, buckets: Iterator[list[Cut]], state: State) -> Job | None:
        cuts = next(buckets, None)
        if cuts is None:
            return None

        def gather(job: Job) -> list[Piece]:
            number = self._say(_Go(cuts), f"gather {cuts[0].name!r}", cuts[0].name)
            return self._shards.collect(cuts, state.tensors, number, job)

        return self._gatherer.submit(gather, state.tensors[cuts[0].leaf])

    def _come(self, job: Job, name: str) -> list[Piece]:
        """What a job has gathered, or an error that says who did not deliver."""
        try:
            found = job.wait(self._deadline.remaining + 2 * GRACE * (job.missing is None))
        except queue.Empty:
            self._gatherer.abandon()
            missing = "a rank of the trainer" if job.missing is None else f"rank {job.missing} of the trainer"
            raise WaitTimeout(
                f"{missing} did not deliver its part of tensor {name!r} within {self._seconds:.3g} s: it is stuck or "
                "gone; if the next push ends so, too, start the trainer again",
                phase="extract",
                tensor=name,
            ) from None
        if isinstance(found, WeightwireError):
            raise found
        if isinstance(found, BaseException):
            missing = "" if job.missing is None else f" from rank {job.missing} of the trainer"
            raise PushError(
                f"tensor {name!r} could not be gathered{missing}: {type(found).__name__}: {found}",
                phase="extract",
                tensor=name,
            ) from found
        pieces: list[Piece] = found
        return pieces

    def _say(self, word: _Word, to: str, tensor: str = "") -> int:
        """Say a word, and wait until everybody has answered. Raises what somebody has against it."""
        self._word += 1
        number = self._word
        data = _ENCODE(word)
        self._desk.post(lambda store: store.set(str(number), data))
        try:
            given = self._desk.read(f"{number}/all", self._deadline)
        except Silence:
            given = self._give_up(number, to, tensor)
        if given != GO:
            raise PreflightError("; ".join(self._objections(number)))
        self._forget(number)
        return number

    def _give_up(self, number: int, to: str, tensor: str) -> bytes:
        """At the deadline: what was said all the same, just in time, or an error that names who did not answer."""
        patience = Deadline.after(GRACE)
        count = self._desk.ask(lambda store: store.add(f"{number}/count", STOP), patience)
        if count % AGAINST == len(self._others):
            with suppress(Silence):  # who was to say it has died just then
                return self._desk.read(f"{number}/all", patience)
        self._desk.post(lambda store: store.set(f"{number}/all", STAY))

        def came(store: Any) -> list[int]:
            keys = {rank: f"at/{rank}" for rank in self._others}
            return [r for r, key in keys.items() if store.check([key]) and int(store.get(key)) >= number]

        there = self._desk.ask(came, Deadline.after(GRACE))
        silent = ", ".join(str(rank) for rank in self._others if rank not in there) or "?"
        raise WaitTimeout(
            f"rank {silent} of the trainer did not {to} within {self._seconds:.3g} s: it is slow, gone, or does not "
            "call the updater as the first rank does",
            phase="extract",
            tensor=tensor or None,
        ) from None

    def _objections(self, number: int) -> list[str]:
        def against(store: Any) -> list[str]:
            keys = {rank: f"{number}/against/{rank}" for rank in self._others}
            texts = {rank: store.get(key).decode(errors="replace") for rank, key in keys.items() if store.check([key])}
            return [f"rank {rank}: {text}" for rank, text in texts.items()]

        found: list[str] = self._desk.ask(against, Deadline.after(GRACE))
        return found

    def _tell(self, outcome: Outcome) -> None:
        """Say what came of a call. Nobody is waited for: whoever is late will read it."""
        self._word += 1
        key, word = str(self._word), _ENCODE(outcome)
        self._desk.post(lambda store: store.set(key, word))

    def _forget(self, number: int) -> None:
        """Delete the words before one to which all have answered: nobody reads those any more."""
        done = range(self._forgotten + 1, number)
        self._forgotten = number - 1

        def delete(store: Any) -> None:
            for old in done:
                for key in (str(old), f"{old}/count", f"{old}/all"):
                    store.delete_key(key)

        self._desk.post(delete)

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
                self._answer(against)
            elif isinstance(word, _Go):
                if not mine or found is None:
                    against = "has not come to this call"
                else:
                    against = self._shards.against(word.cuts, found)
                if self._answer(against) and found is not None:
                    self._deliver(word.cuts, found)
            elif isinstance(word, Outcome) and mine:
                self._call = call
                return word

    def _hear(self, kind: str) -> _Word:
        patience = self._deadline.remaining + SLACK
        try:
            data = self._desk.read(str(self._word + 1), Deadline.after(patience))
        except Silence:
            raise self._silent(f"in {kind}() for {patience:.3g} s") from None
        word: _Word = _DECODER.decode(data)
        if isinstance(word, _Over):  # and stays the next word, for the next call
            raise ClosedError(f"rank {self._leader} of the trainer, which leads, has closed its updater")
        self._word += 1
        return word

    def _answer(self, against: str) -> bool:
        """Say that this rank has come to a word, and wait for the others; whether it is to be done."""
        number, rank, count = self._word, self._rank, len(self._others)

        def answer(store: Any) -> bytes:
            store.set(f"at/{rank}", str(number))
            if against:
                store.set(f"{number}/against/{rank}", against)
            said = store.add(f"{number}/count", 1 + AGAINST * bool(against))
            if said >= STOP:
                return STAY
            if said % AGAINST < count:
                return b""
            given = GO if said < AGAINST else STAY
            store.set(f"{number}/all", given)
            return given

        given: bytes = self._desk.ask(answer, Deadline.after(self._deadline.remaining + SLACK))
        if not given:
            try:
                given = self._desk.read(f"{number}/all", Deadline.after(self._deadline.remaining + SLACK))
            except Silence:
                raise self._silent("when a tensor was to be gathered") from None
        return given == GO

    def _deliver(self, cuts: list[Cut], state: State) -> None:
        """Send what this rank has. Where that fails, it fails for the first rank, too, which says what comes of it."""
        number, tensors = self._word, state.tensors
        job = self._gatherer.submit(lambda _: self._shards.deliver(cuts, tensors, number), tensors[cuts[0].leaf])
        try:
            found = job.wait(self._deadline.remaining)
        except queue.Empty:
            self._gatherer.abandon()
            found = None
        if isinstance(found, BaseException):
            logger.debug("rank %d could not deliver its parts of %r: %s", self._rank, cuts[0].name, found)

    def _silent(self, when: str) -> WaitTimeout:
        return WaitTimeout(f"rank {self._leader} of the trainer, which leads, was silent {when}", phase="extract")


GO, STAY = b"\1", b"\0"
"""What is said when all have answered: to do it, or not to."""


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
