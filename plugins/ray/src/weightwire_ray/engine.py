"""The Ray that this process was connected to when an end was opened. Nothing here ever starts one, or joins another.

Ray's own functions start a cluster where none is connected ("auto-init"), so that one call after ``ray.shutdown()``
would bring a new Ray to life. Looking first is not enough, because another thread may shut down in between: calls go
past that wrapper (``__wrapped__``, as ``functools.wraps`` leaves it).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightwire.endpoint import scoped
from weightwire.errors import EndpointError, WeightwireError
from weightwire.transport import Deadline
from weightwire_ray.mailbox import Mailbox
from weightwire_ray.process import started
from weightwire_ray.protocol import Facts

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire_ray.options import RayOptions

__all__ = ["LOOK", "Engine", "EngineGone", "Late", "MailboxGone", "NoMailbox", "RayNotRunningError", "mailbox_name"]

POLLS = 10_000
"""Calls that a mailbox has pending at most: one long poll for each worker, and a few more."""

LOOK = 0.5
"""Seconds within which a wait notices that Ray was shut down."""

T = TypeVar("T")


class RayNotRunningError(WeightwireError, RuntimeError):
    """This process is not connected to Ray, or not any more."""


class MailboxGone(Exception):
    """The mailbox died, or was never there."""


class NoMailbox(Exception):
    """An actor has the mailbox's name and is something else."""


class EngineGone(Exception):
    """Ray was shut down in this process since the end was opened."""


class Engine:
    """One connection to one cluster.

    Raises:
        RayNotRunningError: Ray is not initialised here, and the endpoint has no ``address``, or one where no cluster
            lets us in.
        EndpointError: nobody listens at the ``address``; found out by ``deadline``.
    """

    def __init__(self, endpoint: Endpoint, options: RayOptions, deadline: Deadline) -> None:
        if not ray.is_initialized():
            if not options.address:
                raise RayNotRunningError(
                    f"endpoint {str(endpoint)!r}: Ray is not initialised in this process. Call ray.init() first, or "
                    "name a cluster that runs (`ray start --head` starts one) in the endpoint: ?address=auto. "
                    "Weightwire never starts Ray by itself."
                )
            _connect(endpoint, options.address, deadline)
        if ray.util.client.ray.is_connected():
            raise RayNotRunningError(
                f"endpoint {str(endpoint)!r}: this process is connected through Ray Client (ray.init('ray://...')), "
                "which has no object store. Run the trainer and the workers inside the cluster."
            )
        context = ray.get_runtime_context()
        self.node: str = context.get_node_id()
        self._worker: str = context.get_worker_id()
        self.facts = Facts(self.node, os.getpid(), started(os.getpid()), context.get_actor_id() or "")

    @property
    def alive(self) -> bool:
        """Whether this process is still connected as it was."""
        try:
            return bool(ray.is_initialized() and ray.get_runtime_context().get_worker_id() == self._worker)
        except Exception:  # another thread shuts it down just now
            return False

    def check(self) -> None:
        if not self.alive:
            raise EngineGone("Ray was shut down in this process")

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Whatever Ray raises when it is shut down meanwhile becomes :class:`EngineGone`."""
        self.check()
        try:
            yield
        except Exception:
            self.check()
            raise

    # -- calls -------------------------------------------------------------------------------------------------------

    def send(self, mailbox: Any, method: str, *args: Any) -> Future[Any]:
        """Call the mailbox; do not wait. Raises :class:`EngineGone`."""
        bound = getattr(mailbox, method)
        try:
            with self._connected():
                future: Future[Any] = _unhooked(bound._remote)(args, {}).future()
        except EngineGone:
            raise
        except Exception as exc:
            raise MailboxGone(str(exc)) from exc
        return future

    def ask(self, mailbox: Any, method: str, *args: Any, timeout: float) -> Any:
        """Call the mailbox and wait for its answer.

        Raises :class:`MailboxGone`, :class:`EngineGone`, and :class:`Late` at the timeout.
        """
        future, deadline = self.send(mailbox, method, *args), Deadline.after(timeout)
        while True:
            try:
                return self.answer(future, deadline.sooner(LOOK).remaining)
            except Late:  # after a shutdown no answer comes
                if future.done() or deadline.expired:
                    raise

    def answer(self, future: Future[Any], timeout: float = 0.0) -> Any:
        """What came of a call. Raises as :meth:`ask` does."""
        try:
            with self._connected():
                return future.result(timeout)
        except ActorUnavailableError as exc:  # for now; it may well live
            raise Late(str(exc)) from exc
        except RayActorError as exc:
            raise MailboxGone(str(exc)) from exc

    def get(self, refs: Sequence[Any], timeout: float) -> list[Any]:
        """Objects of the store. Raises Ray's errors, ``GetTimeoutError`` among them, and :class:`EngineGone`."""
        with self._connected():
            found: list[Any] = _unhooked(ray.get)(list(refs), timeout=timeout)
        return found

    def put(self, value: Any) -> Any:
        """A reference to a copy of ``value`` in the store."""
        with self._connected():
            return _unhooked(ray.put)(value)

    # -- mailboxes ---------------------------------------------------------------------------------------------------

    def make_mailbox(self, name: str, namespace: str, *args: Any) -> Any:
        """A mailbox on this node, which lives no longer than this process. Raises ``ValueError`` where the name is
        taken."""
        options = {
            "name": name,
            "namespace": namespace,
            "num_cpus": 0,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": POLLS,
            "enable_task_events": False,  # long polls would fill Ray's own books
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.node, soft=False),
        }
        with self._connected():
            return _unhooked(_actor_class()._remote)(list(args), {}, **options)

    def find_mailbox(self, name: str, namespace: str) -> Any:
        """Raises :class:`MailboxGone` where there is none of that name, :class:`NoMailbox` where that is another's."""
        try:
            with self._connected():
                found = _unhooked(ray.get_actor)(name, namespace=namespace)
        except (ValueError, RayError) as exc:
            raise MailboxGone(f"there is no actor {name!r} in namespace {namespace!r}") from exc
        if not all(hasattr(found, method) for method in ("attend", "join", "news", "challenge")):
            raise NoMailbox(f"the actor {name!r} in namespace {namespace!r} is not Weightwire's: {found}")
        return found

    def kill(self, mailbox: Any) -> None:
        """End a mailbox; a dead one, too: Ray leaves its name to it until somebody says so."""
        with suppress(EngineGone), self._connected():
            _unhooked(ray.kill)(mailbox, no_restart=True)


def _connect(endpoint: Endpoint, address: str, deadline: Deadline) -> None:
    """Connect this process to a running cluster. Ray itself tries for long where nobody answers: knock first."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and host and "//" not in host:
        fault = _knock(address, host.strip("[]"), int(port), deadline)
        if fault:
            raise EndpointError(
                f"endpoint {str(endpoint)!r}: no cluster answers at address={address}: {fault}. It is where a running "
                "cluster's head node has its GCS, port 6379 unless told otherwise: `ray status` shows it there, and "
                "address=auto finds a cluster on this machine."
            )
    elif address == "local":
        raise EndpointError(
            f"endpoint {str(endpoint)!r}: address=local would start a cluster; call ray.init() for that"
        )
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level=logging.WARNING)
    except Exception as exc:
        raise RayNotRunningError(
            f"endpoint {str(endpoint)!r}: Ray could not connect to a cluster at address={address}: "
            f"{type(exc).__name__}: {exc}"
        ) from exc


def _knock(address: str, host: str, port: int, deadline: Deadline) -> str:
    """What is wrong with an address, found out by the deadline; empty where a cluster answers."""
    try:
        socket.create_connection((host, port), timeout=max(0.1, deadline.remaining)).close()
    except (OSError, OverflowError) as exc:
        return str(exc)
    client = getattr(ray._raylet, "GcsClient", None)  # there is no public way to ask, and Ray's patience is 20 s
    if client is None:
        return ""
    answers: list[object] = []

    def ask() -> None:
        with suppress(Exception):
            answers.append(client(address=address))

    thread = threading.Thread(target=ask, name="weightwire-ray-knock", daemon=True)
    thread.start()
    thread.join(max(0.1, deadline.remaining))
    return "" if answers else "something listens there, and does not answer as Ray does"


def mailbox_name(location: str) -> str:
    """The name of the mailbox actor of a location, apart for each job."""
    return f"weightwire/{scoped(location)}"


@cache
def _actor_class() -> Any:
    return ray.remote(Mailbox)


def _unhooked(function: Callable[..., T]) -> Callable[..., T]:
    """The function without the wrapper that starts Ray."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return function
    owner = getattr(function, "__self__", None)
    return inner if owner is None else partial(inner, owner)
