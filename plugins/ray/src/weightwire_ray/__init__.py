"""Weights over Ray: put into the object store once, held once a node, for the actors and tasks of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightwire.errors import BackendLoadError
from weightwire.hookspecs import BackendInfo, hookimpl
from weightwire_ray.options import RayOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightwire.endpoint import Endpoint
    from weightwire.report import Receipt
    from weightwire.transport import Receiver, ReceiverContext, Sender, SenderContext

__all__ = [
    "RayOptions",
    "attach",
    "pull",
    "weightwire_backend",
    "weightwire_make_receiver",
    "weightwire_make_sender",
]


@hookimpl
def weightwire_backend() -> BackendInfo:
    """Claims; light enough to be called without Ray and torch."""
    return BackendInfo(
        summary="between the actors and tasks of a Ray cluster, through its object store",
        capabilities=frozenset(
            {"processes", "hosts", "alias", "late_join", "sharded_target", "stream", "subset_workers"}
        ),
        options=RayOptions,
        pickles="engine",
    )


@hookimpl
def weightwire_make_sender(endpoint: Endpoint, options: RayOptions, context: SenderContext) -> Sender:
    """Take the place. Raises ``EndpointInUseError`` where another live updater has it."""
    _check_ray()
    from weightwire_ray.sender import RaySender

    return RaySender(endpoint, options, context)


@hookimpl
def weightwire_make_receiver(endpoint: Endpoint, options: RayOptions, context: ReceiverContext) -> Receiver:
    """Looks for the trainer in a thread of its own, from here on."""
    from weightwire.endpoint import check_located

    check_located(endpoint)
    _check_ray()
    from weightwire_ray.receiver import RayReceiver

    return RayReceiver(endpoint, options, context)


def attach(
    actors: Sequence[Any],
    endpoint: str | Mapping[str, Any] | Endpoint,
    policy: str | None = None,
    *,
    workers: Sequence[str] | None = None,
    timeout: float = 60.0,
    **options: Any,
) -> list[str]:
    """Give each of these actors, whatever its class, a receiver over the policy that it has.

    Args:
        actors: handles.
        endpoint: ``updater.endpoint``.
        policy: where the policy is in the actor: ``"agent.policy"``, keys of mappings included. ``None``: the receiver
            owns its weights.
        workers: a name for each actor; default: its class and its id, so that a restarted actor that is attached again
            is a new incarnation of the same name.
        timeout: seconds, in all.
        options: of :class:`~weightwire.WeightReceiver`: ``apply``, ``select`` and so on.

    Returns the workers' names. Attaching anew to the same place closes the receiver that was there. Raises what the
    receiver raises, and ``WaitTimeout`` or ``WorkerLostError`` for actors that do not answer.
    """
    _check_ray()
    from weightwire_ray import attached

    return attached.attach(actors, endpoint, policy, workers=workers, timeout=timeout, options=options)


def pull(
    actors: Sequence[Any],
    *,
    endpoint: str | Mapping[str, Any] | Endpoint | None = None,
    timeout: float = 60.0,
    raising: bool = True,
) -> list[Receipt]:
    """Have attached actors apply the newest version now, in parallel; a receipt for each, in their order.

    Args:
        actors: handles that :func:`attach` was given.
        endpoint: which place, for actors that are attached to more than one.
        timeout: seconds, in all.
        raising: raise the most serious failure (``RefusedError``, ``ApplyError``, ``WorkerLostError``, ``WaitTimeout``)
            after the others are through, with all receipts in ``.report``, or what an actor raised that has nothing
            attached to it; ``False``: only return the receipts.
    """
    _check_ray()
    from weightwire_ray import attached

    return attached.pull(actors, endpoint=endpoint, timeout=timeout, raising=raising)


def _check_ray() -> None:
    try:
        import ray  # noqa: F401 - asked for here, and nowhere before an end is opened
    except ImportError as exc:
        raise BackendLoadError(
            f"the backend 'ray' needs Ray, which cannot be imported: {exc}. pip install ray"
        ) from exc
