"""The thread behind :class:`~weightwire.collectors.gate.GatedReceiver`."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weightwire.collectors.turnstile import Stuck, Turnstile
from weightwire.errors import ClosedError, UpdaterLostError, WaitTimeout, WeightwireError
from weightwire.forks import Origin
from weightwire.hookspecs import hookimpl
from weightwire.receiver import SILENCE, WeightReceiver
from weightwire.transport import Deadline

if TYPE_CHECKING:
    import torch

    from weightwire.report import Receipt
    from weightwire.transport import Version

__all__ = ["Ear", "Gatekeeper", "copied"]

logger = logging.getLogger(__name__)

SLICE = 0.1
"""Seconds that the thread waits for news at a time: how long ``close()`` may have to wait for it."""
PAUSE = 0.2
"""Seconds after which a backend that failed is asked again."""
PATIENCE = 10.0
"""Seconds that a fork waits for an update and its hooks."""

NO_VERSION = "no version has come yet"
COMING = "an update waits until nobody acts"
APPLYING = "an update is being applied"
RUINED = "an update failed halfway, and no full version has come since"


class _Kept(NamedTuple):
    """What went wrong with an update."""

    error: BaseException
    number: int | None  # of the version, where it is one's


class _Blocked(WaitTimeout):
    """Somebody acts on and on."""

    def __init__(self, message: str, worker: str, stuck: Stuck) -> None:
        super().__init__(message, phase="wait", worker=worker)
        self.stuck = stuck.visits

    def __reduce__(self) -> tuple[Any, ...]:
        return (WaitTimeout, self.args, {"phase": self.phase, "worker": self.worker})


class Gatekeeper:
    """The thread, the receiver that belongs to it, and what became of its versions. Knows no ``GatedReceiver``, which
    can so be forgotten while the thread runs.

    It is the guard of its receiver: entered when a version is ready to be committed, left when its hooks have run.

    Attributes:
        kept: what went wrong with the last update; changed with the gate's lock, as ``done`` is.
        done, booked: the newest version whose hooks have run, and its stamp.
        told: the version that the receiver has told of last, for the error that follows.
        still: held while the policy changes: a fork waits for it.
        closing, over: this end is being closed; no version will come any more.
    """

    receiver: WeightReceiver
    origin: Origin
    thread: threading.Thread

    def __init__(self, weights: Any, timeout: float) -> None:
        self.timeout = timeout
        self.gate = Turnstile(NO_VERSION)
        self.closing = self.over = False
        self.kept: _Kept | None = None
        self.done = 0
        self.booked: Version | None = None
        self.told: int | None = None
        self.still = threading.RLock()
        self._devices = _devices(weights)
        self._met = False
        self._silent_since: float | None = None
        self._parting = Deadline.after(timeout)

    def start(self, what: str) -> None:
        self.origin = Origin(what)
        self.thread = threading.Thread(target=self._run, name=f"weightwire-gate-{self.receiver.worker}", daemon=True)
        _keepers.add(self)
        self.thread.start()

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self.closing or self.receiver.closed):
                self._step()
        finally:
            with contextlib.suppress(Exception):
                self.receiver.close(self._parting.remaining if self.closing else min(self.timeout, 10.0))
            if not self.closing and not self.receiver.ready:
                self.gate.turn_away(ClosedError(f"{self.origin.what}: the trainer has closed; no version will come"))
            with self.gate.changed:
                self.over = True
                self.gate.changed.notify_all()

    def _step(self) -> None:
        self.told = None
        try:
            self.receiver.pull(SLICE)
        except _Blocked as exc:
            self._keep(exc, None)
            while not (self.closing or self.gate.wait_gone(exc.stuck, Deadline.after(SLICE))):
                pass
        except (WaitTimeout, UpdaterLostError) as exc:
            self._quiet(exc)
        except BaseException as exc:  # of a hook that exits, too: a thread that ends in silence helps nobody
            over = isinstance(exc, ClosedError) and self.receiver.closed
            if not (self.closing or over):
                hooked = self.receiver.version if self.receiver.stamp != self.booked else None
                told: int | None = getattr(self, "told")  # noqa: B009 - hooks have set it since, which mypy cannot see
                number = hooked if told is None else told
                self._keep(exc, number)
                if number is None:
                    self._pause()
        else:
            self._quiet(None)
            if self.receiver.stamp != self.booked:
                self._book(None)

    def _quiet(self, silence: WeightwireError | None) -> None:
        """Nothing has come. Whatever was wrong with the backend is over; where there is no trainer, say so once."""
        self._met |= self.receiver.connected
        kept = self.kept
        if kept is not None and kept.number is None and not isinstance(kept.error, _Blocked):
            with self.gate.changed:
                self.kept = self.gate.refusal = None
        if self.receiver.connected or silence is None:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = time.monotonic()
        elif 0 <= self._silent_since < time.monotonic() - SILENCE:
            self._silent_since = -1.0  # said
            logger.warning("%s has heard nothing for %.3g s; %s", self.origin.what, SILENCE, silence)

    def _keep(self, error: BaseException, number: int | None) -> None:
        if self.kept is None or (type(error), str(error)) != (type(self.kept.error), str(self.kept.error)):
            logger.warning("%s: an update went wrong", self.origin.what, exc_info=error)
        _untraced(error)
        if not self.receiver.ready:
            self.gate.turn_away(error)
        self._book(_Kept(error, number))

    def _book(self, kept: _Kept | None) -> None:
        with self.gate.changed:
            self.kept, self.booked, self.done = kept, self.receiver.stamp, self.receiver.version
            self.gate.changed.notify_all()

    def _pause(self) -> None:
        deadline = Deadline.after(PAUSE)
        with self.gate.changed:
            while not (self.closing or deadline.expired):
                self.gate.changed.wait(deadline.remaining)

    def __enter__(self) -> None:
        """As the receiver's guard: shut the gate, and wait until nobody acts."""
        try:
            self.gate.shut(COMING, Deadline.after(self.timeout))
        except Stuck as exc:
            raise _Blocked(
                f"{self.origin.what}: an update waited {self.timeout:.3g} s for those who act: {exc}. It comes in when "
                "they have left; until then nobody else is kept waiting",
                self.receiver.worker,
                exc,
            ) from None
        self.gate.why = APPLYING
        self.still.acquire()
        try:
            _synchronize(self._devices)  # what was asked of a device within a block may go on after it
        except BaseException:
            self._let_go()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            _synchronize(self._devices)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self.still.release()
        if self.receiver.ready:
            self.gate.open()
        else:
            self.gate.why = RUINED if self.done else NO_VERSION

    # -- for the other threads, with the gate's lock -----------------------------------------------------------------

    def has(self, version: int) -> bool:
        """Whether it, or a newer one, is applied, and its hooks did not fail."""
        failed = self.kept is not None and self.kept.number == self.done
        return self.done >= version and self.receiver.ready and not failed

    def raise_for(self, version: int) -> None:
        """Raise what went wrong with a version, or why it will not come."""
        kept = self.kept if self.receiver.stamp == self.booked else None  # else it is old, and hooks are running
        if kept is not None and (kept.number is None or kept.number >= version):
            raise copied(kept.error)
        if self.closing:
            raise ClosedError(f"{self.origin.what} was closed; version {version} will not come")
        if self.over:
            raise ClosedError(f"{self.origin.what}: the trainer has closed; version {version} will not come")

    def missed(self, seconds: float, what: str) -> WeightwireError:
        """Nothing has come within a deadline."""
        text = f"{self.origin.what} waited {seconds:.3g} s for {what}"
        cause = f" ({self.gate.why})" if self.gate.why and self.gate.why != NO_VERSION else ""
        if self.receiver.connected:
            newest = f"version {self.done} is the newest" if self.done else "but has pushed none that it can take"
            return WaitTimeout(
                f"{text}: the trainer is there, {newest}{cause}", phase="wait", worker=self.receiver.worker
            )
        if self._met:
            return UpdaterLostError(f"{text}: the trainer is lost{cause}")
        return WaitTimeout(f"{text}: there is no trainer", phase="wait", worker=self.receiver.worker)

    def late(self, seconds: float, who: str) -> WeightwireError:
        """Somebody could not act within a deadline."""
        why = self.gate.why
        if why == NO_VERSION:
            return self.missed(seconds, f"a first version for {who} to act with")
        told = f": {self.gate.inside()}" if why == COMING else ""
        return WaitTimeout(
            f"{self.origin.what}: {who} waited {seconds:.3g} s to act, but {why or 'the gate was shut'}{told}",
            phase="wait",
            worker=self.receiver.worker,
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self, seconds: float) -> None:
        if not self.origin.here:
            return
        self._parting = deadline = Deadline.after(seconds)
        self.closing = True
        self.gate.turn_away(ClosedError(f"{self.origin.what} was closed; nobody acts any more"), for_good=True)
        if self.thread is threading.current_thread():
            return
        self.thread.join(deadline.remaining + SLICE)
        if self.thread.is_alive():
            doing = f": {self.gate.why}" if self.gate.why else ""
            raise WaitTimeout(
                f"{self.origin.what}: its thread has not ended in {seconds:.3g} s{doing}; it will when the hook, the "
                "callable target or the backend that it is in returns",
                phase="wait",
                worker=self.receiver.worker,
            )


class Ear:
    """An observer that tells the gatekeeper which version an error belongs to."""

    def __init__(self, keeper: Gatekeeper) -> None:
        self._keeper = weakref.ref(keeper)

    @hookimpl
    def weightwire_after_pull(self, receipt: Receipt) -> None:
        if (keeper := self._keeper()) is not None:
            keeper.told = receipt.version


def _untraced(error: BaseException | None) -> None:
    """Forget where an error came from, once that was logged: its frames hold the payload's memory."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def copied(error: BaseException) -> BaseException:
    """An error of one's own to raise: several threads raise what is kept."""
    try:
        fresh = copy.copy(error)
    except Exception:  # one whose constructor takes something else
        return error
    fresh.__cause__ = error.__cause__ if error.__cause__ is not error else None
    return fresh


def _devices(weights: Any) -> list[torch.device]:
    """The accelerators that a policy lies on."""
    import torch

    tensors: list[Any] = []
    if isinstance(weights, torch.nn.Module):
        tensors = [*weights.parameters(), *weights.buffers()]
    elif isinstance(weights, Mapping):
        tensors = list(weights.values())
    found = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}
    return [device for device in found if device.type not in ("cpu", "meta")]


def _synchronize(devices: Sequence[torch.device]) -> None:
    """Wait until a device has done all that any thread has asked of it."""
    for device in devices:
        import torch

        torch.accelerator.synchronize(device)


# -- forks -----------------------------------------------------------------------------------------------------------

_keepers: weakref.WeakSet[Gatekeeper] = weakref.WeakSet()
_forking = threading.local()


def _before_fork() -> None:
    """Let no version be half applied in the child: it has no thread that would finish it."""
    _forking.held = []
    for keeper in list(_keepers):
        if keeper.still.acquire(timeout=PATIENCE):
            _forking.held.append(keeper)
        else:
            logger.warning("%s: the process forks amid an update, whose hooks take too long", keeper.origin.what)


def _after_fork() -> None:
    while _forking.held:
        _forking.held.pop().still.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
