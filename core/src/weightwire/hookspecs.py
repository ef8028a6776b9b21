"""The hook spec: what a backend must answer, what an observer may hear.

A backend is a light module with three function hooks, named by an entry point in the group ``weightwire.backends``::

    # pyproject.toml
    [project.entry-points."weightwire.backends"]
    mine = "weightwire_mine"

    # weightwire_mine/__init__.py
    from weightwire import hookimpl
    from weightwire.hookspecs import BackendInfo

    @hookimpl
    def weightwire_backend() -> BackendInfo:
        return BackendInfo(summary="over a message queue", capabilities=frozenset({"processes"}))

Hooks run once, when an end is opened; bytes move through plain methods of the objects that they return.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.report import PushReport, Receipt
    from weightwire.transport import Receiver, ReceiverContext, Sender, SenderContext

__all__ = ["API", "CAPABILITIES", "BackendInfo", "BackendSpec", "ObserverSpec", "hookimpl", "hookspec"]

PROJECT = "weightwire"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

API = 1
"""The newest API number of the hook spec. A plugin says which one it was written for, or which ones.

It grows when a plugin of the old number could not be called as before: a hook, a method of
:class:`~weightwire.transport.Sender` or :class:`~weightwire.transport.Receiver`, or an argument is gone or means
something else. A core that has moved on speaks the number before as well, with a ``DeprecationWarning`` that names the
release that will not (``weightwire.registry.OLD_APIS``).
"""

CAPABILITIES = frozenset(
    {"processes", "hosts", "alias", "inline", "late_join", "subset_workers", "stream", "sharded_target", "cuda"}
)
"""The closed list. What a backend does not claim is refused; what it claims, the conformance kit tries.

``processes``, ``hosts``: workers may be in other processes, on other machines. ``alias``: delivered memory stays as
it is until the last view of it has died. ``inline``: ``stage`` calls ``context.deliver``. ``late_join``: whoever
joins gets the newest version at once. ``subset_workers``: ``stage(to=...)`` reaches those workers only. ``stream``:
deliveries come in buckets. ``sharded_target``: a worker gets only the slices that it needs. ``cuda``: memory stays on
the GPU.
"""


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """What a backend says of itself. Every default is the cautious answer.

    Attributes:
        summary: one line for people.
        api: the API number that the plugin was written for, or a tuple of several: the newest that the core knows too
            is spoken.
        capabilities: a subset of :data:`CAPABILITIES`.
        options: a ``msgspec.Struct`` type whose fields are the endpoint's options, with defaults and bounds;
            ``None``: no options. A field of type :data:`~weightwire.endpoint.Size` takes units (``64MiB``).
        pickles: ``"none"``, ``"engine"`` (an engine below pickles its own calls and is handed only bytes and numeric
            arrays), or ``"own"`` (refused unless the endpoint says ``allow_pickle=true``).
        location: what the location means, for errors and docs: ``"name"``, ``"host:port"``.
    """

    summary: str
    api: int | tuple[int, ...] = API
    capabilities: frozenset[str] = field(default_factory=frozenset)
    options: type[Any] | None = None
    pickles: str = "none"
    location: str = "name"


class BackendSpec:
    """Hooks of the group ``weightwire.backends``. All three are required."""

    @hookspec(firstresult=True)
    def weightwire_backend(self) -> BackendInfo:  # type: ignore[empty-body]
        """Describe the backend. Imports nothing heavy: ``weightwire backends --check`` calls it."""

    @hookspec(firstresult=True)
    def weightwire_make_sender(self, endpoint: Endpoint, options: Any, context: SenderContext) -> Sender:  # type: ignore[empty-body]
        """Open the trainer's end. ``options`` is an instance of ``BackendInfo.options``. Does not wait for any
        worker."""

    @hookspec(firstresult=True)
    def weightwire_make_receiver(self, endpoint: Endpoint, options: Any, context: ReceiverContext) -> Receiver:  # type: ignore[empty-body]
        """Open a worker's end. Does not wait for the trainer."""


class ObserverSpec:
    """Hooks of the group ``weightwire.observers``. All are optional; an error in one is contained, logged and reported.

    They run in the thread that calls ``push``, ``wait``, ``workers`` or ``close`` (trainer) or ``pull`` (worker).
    """

    @hookspec
    def weightwire_worker_joined(self, endpoint: str, worker: str, host: str, pid: int) -> None:
        """A worker has joined, or come back as a new incarnation."""

    @hookspec
    def weightwire_worker_lost(self, endpoint: str, worker: str, reason: str) -> None:
        """A worker went away; ``reason`` is empty where it said goodbye."""

    @hookspec
    def weightwire_before_push(self, endpoint: str, version: int, workers: frozenset[str] | None) -> None:
        """A push begins: the source has not been read yet."""

    @hookspec
    def weightwire_after_push(self, endpoint: str, report: PushReport) -> None:
        """A version was sent, and was waited for as asked; the report says what became of it."""

    @hookspec
    def weightwire_after_pull(self, endpoint: str, receipt: Receipt) -> None:
        """A worker has applied a version, or failed to."""
