"""Weightwire under TorchRL's collectors: :func:`scheme` for ``weight_sync_schemes=``, :func:`updater` for
``weight_updater=``.

    from weightwire.collectors import torchrl as weightwire_torchrl

    collector = MultiAsyncCollector(..., policy, weight_sync_schemes={"policy": weightwire_torchrl.scheme("ipc")})
    for batch in collector:
        train(policy, batch)
        collector.update_policy_weights_()

Which features the installed release has is found out by looking, not by its number; TorchRL is imported when one of the
two functions is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightwire.collectors.torchrl.schemes import WeightwireScheme
    from weightwire.collectors.torchrl.updaters import WeightwireUpdater
    from weightwire.endpoint import Endpoint
    from weightwire.weights.names import Cast, Rename, Select

__all__ = ["scheme", "updater"]


def scheme(
    endpoint: str | Mapping[str, Any] | Endpoint,
    *,
    apply: str = "copy",
    wait: str = "staged",
    timeout: float = 60.0,
    select: Select = None,
    rename: Rename = None,
    cast: Cast = None,
) -> WeightwireScheme:
    """A ``torchrl.weight_update.WeightSyncScheme`` for one model: ``weight_sync_schemes={model_id: scheme(...)}``.

    Args:
        endpoint: which backend, where: ``"ipc"``, ``"ipc://policy"``, ``"ray://policy"``. Each model has its own.
        apply: ``"copy"`` into the worker's tensors where they lie, or ``"alias"`` the delivered memory.
        wait: until when an update waits: ``"staged"`` (each worker acts with it from its next policy call) or
            ``"applied"`` (each acts with it now; the workers must be collecting meanwhile).
        timeout: seconds that an update, and a worker's wait for its first version, take at most.
        select, rename, cast: as in :class:`weightwire.WeightUpdater`.

    One object serves one collector at a time. Raises ``ImportError`` where TorchRL is missing or has no schemes yet
    (before 0.11: use :func:`updater`).
    """
    try:
        from weightwire.collectors.torchrl.schemes import WeightwireScheme
    except ImportError as exc:
        raise ImportError(
            f"{exc}: weight_sync_schemes need torchrl >= 0.11 (pip install 'weightwire[torchrl]'); releases from 0.8 "
            "on take weight_updater=weightwire.collectors.torchrl.updater(...)"
        ) from exc
    return WeightwireScheme(endpoint, apply=apply, wait=wait, timeout=timeout, select=select, rename=rename, cast=cast)


def updater(
    endpoint: str | Mapping[str, Any] | Endpoint,
    policy: Any = None,
    *,
    apply: str = "copy",
    wait: str = "staged",
    timeout: float = 60.0,
    select: Select = None,
    rename: Rename = None,
    cast: Cast = None,
) -> WeightwireUpdater:
    """A ``torchrl.collectors.WeightUpdaterBase`` for ``weight_updater=``.

    Args:
        policy: the trainer's policy, which is pushed where an update names no other weights. Where a collector sends
            this very Module to its worker processes, they receive by themselves. Policies that come from factories do
            where the factory is wrapped: ``policy_factory=updater.receiving(make_policy)``.
        endpoint, apply, wait, timeout, select, rename, cast: as in :func:`scheme`.

    Raises ``ImportError`` where TorchRL is missing.
    """
    try:
        from weightwire.collectors.torchrl.updaters import WeightwireUpdater
    except ImportError as exc:
        raise ImportError(f"{exc}: pip install 'weightwire[torchrl]'") from exc
    return WeightwireUpdater(
        endpoint, policy, apply=apply, wait=wait, timeout=timeout, select=select, rename=rename, cast=cast
    )
