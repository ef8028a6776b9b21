"""The RPC group that this process is in, and calls within it.

The group is the user's: whoever calls ``torch.distributed.rpc.init_rpc`` before has it used. A process that is in none
can join a dynamic one whose store it is told (``join=``), and stays in it until it exits: torch numbers the groups that
a process was in, so that it cannot come back to the same one.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import rpc

from weightwire.errors import EndpointError
from weightwire.transport import Deadline

__all__ = ["FIRST", "Unreachable", "call", "member", "start"]

FIRST = 0
"""The rank that keeps the directory of places."""
RANKS = "weightwire/ranks"
LEAVING = 5.0
"""Seconds that leaving a group takes at most."""

AnswerT = TypeVar("AnswerT")
_joining = threading.Lock()
ends: weakref.WeakSet[Any] = weakref.WeakSet()
"""Open ends of this process, which have to say goodbye before it leaves the group."""


class Unreachable(Exception):
    """The other member is gone, or did not answer in time."""


def member(join: str = "", timeout: float = 60.0) -> str:
    """The name of this process in its group, which it joins where it is in none.

    Raises :class:`~weightwire.EndpointError`: it is in none and was not told of one, or that one lets nobody in.
    """
    with _joining:
        name = _name()
        if name is None:
            _join(join, timeout)
            name = _name()
    assert name is not None
    return name


def _name() -> str | None:
    try:
        name: str = rpc.get_worker_info().name
    except RuntimeError:  # RPC has not been initialized
        return None
    return name


def _join(place: str, timeout: float) -> None:
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal():
        raise EndpointError(
            "this process is in no RPC group: call torch.distributed.rpc.init_rpc() first, or name the store of a "
            f"dynamic group in the endpoint, join=host:port (it says join={place!r})"
        )
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, timeout=timedelta(seconds=timeout)
        )
        rank = int(store.add(RANKS, 1))  # the first one, who made the store, is 0
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{place}", rpc_timeout=timeout)
        host = "".join(c if c.isalnum() else "_" for c in socket.gethostname()[:40])
        name = f"weightwire_{host}_{os.getpid()}_{rank}"  # without a dash, at which torch cuts the names of such groups
        rpc.init_rpc(name, rank=rank, rpc_backend_options=options)  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as exc:
        raise EndpointError(
            f"the RPC group at {place} let this process not in: {exc}. It has to be a dynamic one (no world_size), and "
            "torch lets nobody in any more after a member died without goodbye"
        ) from exc
    atexit.register(_leave, os.getpid())
    Finalize(None, _leave, (os.getpid(),), exitpriority=10)  # multiprocessing's children run no atexit handlers


def _leave(joined: int) -> None:
    if os.getpid() != joined:
        return  # a forked child: none of torch's threads are here
    deadline = Deadline.after(LEAVING)
    for end in list(ends):
        end.close(deadline)
    if _name() is not None:
        with suppress(RuntimeError):  # the others are gone
            rpc.shutdown(timeout=max(1, int(deadline.remaining)))


def start(to: str | int, function: Callable[..., AnswerT], *args: Any, timeout: float) -> torch.futures.Future[AnswerT]:
    """A call that is on its way. Raises :class:`Unreachable` where it cannot even begin."""
    try:
        future: torch.futures.Future[AnswerT] = rpc.rpc_async(to, function, args=args, timeout=max(timeout, 0.05))
    except (RuntimeError, ValueError) as exc:
        raise Unreachable(str(exc).partition("\n")[0]) from exc
    return future


def call(to: str | int, function: Callable[..., AnswerT], *args: Any, timeout: float) -> AnswerT:
    """Call and wait. Raises :class:`Unreachable`."""
    future = start(to, function, *args, timeout=timeout)
    try:
        return future.wait()
    except RuntimeError as exc:
        raise Unreachable(str(exc).partition("\n")[0]) from exc
