"""Process groups of our own: Gloo or NCCL, built directly on a board, beside and without the user's default group."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d

from weightwire import forks
from weightwire_nccl.store import BoardStore

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire_nccl.board import Board

__all__ = ["GlooGroup", "Group", "GroupError", "NcclGroup", "device_of", "gpu_label"]

c10d: Any = distributed_c10d  # torch types these in parts only
_cuda: Any = torch.cuda


class GroupError(RuntimeError):
    """A broadcast failed, or the group could not be made."""


class Group(ABC):
    """One group. ``rank`` 0 is the trainer; all members post the same operations in the same order."""

    rank: int
    size: int
    patience = 0.0
    """Seconds after which another member's work in a group that failed is over, at the latest."""
    _scratch: Tensor | None = None

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> Any:
        """Post the broadcast of a tensor from rank 0; a work to be waited for."""

    @abstractmethod
    def scatter(self, part: Tensor, parts: Sequence[Tensor]) -> Any:
        """Post: rank ``n`` gets ``parts[n]`` of rank 0 in ``part``."""

    @abstractmethod
    def gather(self, parts: Sequence[Tensor], part: Tensor) -> Any:
        """Post: everybody gets the ``part`` of rank ``n`` in ``parts[n]``."""

    def scratch(self, count: int, like: Tensor) -> list[Tensor]:
        """So many tensors that nobody reads, kept from push to push. Works that go on together may share them."""
        nbytes = count * like.numel()
        if self._scratch is None or self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=like.dtype, device=like.device)
        return list(torch.split(self._scratch[:nbytes], like.numel()))

    @abstractmethod
    def ended(self, work: Any) -> bool:
        """Whether a work has ended, well or not."""

    @abstractmethod
    def wait(self, work: Any, seconds: float) -> bool:
        """Wait that long; whether it has ended well. Raises :class:`GroupError` where it has failed."""

    def finish(self) -> None:  # noqa: B027 - most engines have nothing left to do
        """After the last work of a version: what was received can be read by anybody."""

    def abort(self) -> None:  # noqa: B027 - Gloo's abort ends nothing
        """Ask the engine to end what is under way. It may take its time."""

    @abstractmethod
    def limit(self, timeout: float) -> None:
        """From now on works end after that many seconds, at the latest."""

    @abstractmethod
    def leak(self) -> None:
        """Never run the engine's destructor: it would wait for threads that are not there, or for works that hang."""


# -- Gloo --------------------------------------------------------------------------------------------------------------


_SLICE_IS_OVER = "Operation timed out!"
"""What torch says where a wait, not the work itself, was too long."""


def _gloo_device(host: str, interface: str) -> Any:
    """Where Gloo listens, and with which address others reach it.

    Pairs connect when they are first used, so that making a group waits for nobody. With that, two groups cannot share
    a device: Gloo tells pairs apart by numbers that are unique only within one.
    """
    where = {"interface": interface} if interface else {"hostname": host}
    return c10d.ProcessGroupGloo.create_device(**where, lazy_init=True)


class GlooGroup(Group):
    """Tensors on the CPU. ``host`` is this end's address, unless ``interface`` names the one to listen on."""

    def __init__(self, board: Board, host: str, interface: str, rank: int, size: int, timeout: float) -> None:
        """``timeout`` seconds end a work that nobody else ends, and with it the time that a buffer is out of use."""
        self.rank, self.size = rank, size
        self._timeout = timedelta(seconds=timeout)
        self._store = BoardStore(board)
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._threads = 2
        try:
            options._devices = [_gloo_device(host, interface)]
            self._group = c10d.ProcessGroupGloo(c10d.PrefixStore("weightwire", self._store), rank, size, options)
        except RuntimeError as exc:
            raise GroupError(f"no Gloo group of {size}: {exc}") from exc

    def limit(self, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)
        self.patience = timeout + 1.0

    def broadcast(self, tensor: Tensor) -> Any:
        options = c10d.BroadcastOptions()
        options.timeout = self._timeout
        return self._group.broadcast([tensor], options)

    def scatter(self, part: Tensor, parts: Sequence[Tensor]) -> Any:
        options = c10d.ScatterOptions()
        options.timeout = self._timeout
        options.rootRank = 0
        return self._group.scatter([part], [list(parts)] if parts else [], options)

    def gather(self, parts: Sequence[Tensor], part: Tensor) -> Any:
        options = c10d.AllgatherOptions()
        options.timeout = self._timeout
        return self._group.allgather([list(parts)], [part], options)

    def ended(self, work: Any) -> bool:
        return bool(work.is_completed())

    def wait(self, work: Any, seconds: float) -> bool:
        try:
            work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as exc:
            if not work.is_completed():  # only this slice of time is over
                return False
            if _SLICE_IS_OVER not in str(exc):
                # Never wait for it again: an error of the store's is an exception of Python's, and torch ends the
                # process where one is raised a second time.
                raise GroupError(f"Gloo: {exc}") from exc
            self._outcome(work)
        return True

    @staticmethod
    def _outcome(work: Any) -> None:
        """Of a work that has ended just after the wait for it had."""
        try:
            work.wait()
        except RuntimeError as exc:
            raise GroupError(f"Gloo: {exc}") from exc

    def leak(self) -> None:
        forks.keep(self._group)
        forks.keep(self._store)


# -- NCCL --------------------------------------------------------------------------------------------------------------

_NCCL_SETTINGS = {
    # Our own aborts, with our own deadlines: NCCL's default is to end the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_settings_lock = threading.Lock()


@contextlib.contextmanager
def _settings(settings: dict[str, str]) -> Iterator[None]:
    """torch reads these from C's environment when a group is made, and only then, and knows no other way to be told.
    ``os.environ``, which is the user's, stays as it is, and says what is put back; one thread at a time, or else the
    next would put back what the one before has set."""
    with _settings_lock:
        try:
            for name, value in settings.items():
                os.putenv(name, value)
            yield
        finally:
            for name in settings:
                if name in os.environ:
                    os.putenv(name, os.environ[name])
                else:
                    os.unsetenv(name)


class NcclGroup(Group):
    """Tensors on CUDA devices, one a member. Only where torch was built with NCCL."""

    def __init__(self, board: Board, device: str, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        self._device = torch.device(device)
        self._board = board
        self._store = BoardStore(board)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        options.config.blocking = 0  # a communicator that is being made, or that hangs, can be aborted
        try:
            with torch.cuda.device(self._device), _settings(_NCCL_SETTINGS):
                store = c10d.PrefixStore("weightwire", self._store)
                self._group = c10d.ProcessGroupNCCL(store, rank, size, options)
        except RuntimeError as exc:
            raise GroupError(f"no NCCL group of {size}: {exc}") from exc

    def limit(self, timeout: float) -> None:
        """Works are aborted by us; the engine's own timeout stays what it was."""

    def broadcast(self, tensor: Tensor) -> Any:
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        return self._post(lambda: self._group.broadcast([tensor], options))

    def scatter(self, part: Tensor, parts: Sequence[Tensor]) -> Any:
        options = c10d.ScatterOptions()
        options.rootRank = 0
        return self._post(lambda: self._group.scatter([part], [list(parts)] if parts else [], options))

    def gather(self, parts: Sequence[Tensor], part: Tensor) -> Any:
        return self._post(lambda: self._group.allgather([list(parts)], [part]))

    def _post(self, call: Any) -> Any:
        try:
            with torch.cuda.device(self._device):  # this may be the user's thread, with a device of its own
                return call()
        except RuntimeError as exc:
            raise GroupError(f"NCCL: {exc}") from exc

    def ended(self, work: Any) -> bool:
        return bool(work.is_completed())

    def wait(self, work: Any, seconds: float) -> bool:
        # Not work.wait(timeout): it aborts the communicator, and would leave us no slice to look around in.
        until, pause = time.monotonic() + seconds, 20e-6
        while not work.is_completed():
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        if work.exception() is not None:
            raise GroupError("NCCL: a broadcast failed")
        try:
            work.wait()  # our stream follows NCCL's from here on
        except RuntimeError as exc:
            raise GroupError(f"NCCL: {exc}") from exc
        return True

    def finish(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def abort(self) -> None:
        with contextlib.suppress(RuntimeError):  # it had failed already
            self._group.abort()

    def leak(self) -> None:
        forks.keep(self._group)
        forks.keep(self._store)


def device_of(option: str) -> str:
    """``"cpu"`` or ``"cuda:N"`` for the option ``device``. Raises :class:`~weightwire.CapabilityError`."""
    from weightwire.errors import CapabilityError

    if option == "cpu" or (option == "auto" and not (_cuda.is_initialized() and _has_nccl())):
        return "cpu"
    if not torch.cuda.is_available() or not _has_nccl():
        what = "has no NCCL" if torch.cuda.is_available() else "sees no CUDA device"
        raise CapabilityError(f"device={option} asks for a GPU, but torch {torch.__version__} {what} here")
    index = int(option.partition(":")[2]) if ":" in option else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise CapabilityError(f"device={option}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return f"cuda:{index}"


def gpu_label(device: str) -> str:
    """A label that all processes on one GPU share, whatever index they know it by; empty for the CPU."""
    if device == "cpu":
        return ""
    return str(torch.cuda.get_device_properties(torch.device(device)).uuid)


def _has_nccl() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_nccl_available()
