"""What is asked of a TorchRL collector, and changed in it, where a scheme alone cannot do."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from weightwire.errors import PushError

__all__ = [
    "acts_here",
    "as_one",
    "caller",
    "gate",
    "model_of",
    "says_ranks",
    "update_as_one",
    "while_ray_is_up",
    "workers_of",
]


def acts_here(collector: Any) -> bool:
    """Whether it calls its policy itself, in this process."""
    return hasattr(type(collector), "rollout")


def caller() -> Any:
    """The collector that is calling its policy, for releases and ways in that do not tell a worker's policy by whom it
    is called; or ``None``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None and acts_here(owner) and hasattr(type(owner), "update_policy_weights_"):
            return owner
        frame = frame.f_back
    return None


def gate(collector: Any, pull: Callable[[], object]) -> None:
    """Where the collector's policy is compiled, or a CUDA graph, in which no hook runs: pull before each call of it."""
    if not (getattr(collector, "compiled_policy", False) or getattr(collector, "cudagraphed_policy", False)):
        return
    name = "_wrapped_policy_maybe_compiled" if hasattr(collector, "_wrapped_policy_maybe_compiled") else "policy"
    compiled = collector._wrapped_policy if name != "policy" else collector.policy

    def act(*args: Any, **kwargs: Any) -> Any:
        pull()
        return compiled(*args, **kwargs)

    setattr(collector, name, act)


def model_of(context: Any, model_id: str) -> Any:
    """The model of that name in a collector: an attribute path with subscripts; ``None`` where it has none."""
    try:
        if hasattr(context, "get_model"):
            return context.get_model(model_id)
        from torchrl.weight_update.utils import _resolve_model

        return _resolve_model(context, model_id)
    except (AttributeError, LookupError, ValueError):
        return None


def workers_of(context: Any, num_workers: int | None, remote_collectors: Any, devices: Any) -> int:
    """How many workers there are to be; 0 where nobody says."""
    for collection in (remote_collectors, devices):
        if collection is not None:
            return len(collection)
    if num_workers is not None:
        return num_workers
    return int(getattr(context, "num_workers", 0) or 0) if hasattr(context, "procs") or hasattr(context, "pipes") else 0


def says_ranks(context: Any) -> bool:
    """Whether a DistributedCollector updates of its own accord: it then says ranks, which begin at 1, where its users,
    and its own ``update_interval``, say indices."""
    if not hasattr(context, "_init_worker_dist_mp"):
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        if frame.f_code.co_name == "update_policy_weights_" and frame.f_locals.get("self") is context:
            return frame.f_back.f_code.co_name in ("_next_async", "_iterator_dist")
        frame = frame.f_back
    return False


def update_as_one(collector: Any) -> None:
    """Make an update of several models end as one: each is pushed, then one error tells what failed, and where all
    stand.

    TorchRL pushes one model after the other and stops at the first that fails. Without a reference to the collector, so
    that ``del collector`` still ends it at once.
    """
    original = getattr(type(collector), "_weight_update_impl", None)
    if original is None or "_weight_update_impl" in vars(collector):
        return
    reference = weakref.ref(collector)

    def update(policy_or_weights: Any = None, **options: Any) -> None:
        me = reference()
        together = options.get("weights_dict")
        if me is None or not together or policy_or_weights is not None or options.get("model_id") is not None:
            original(me, policy_or_weights, **options)
            return
        schemes = me._weight_sync_schemes or {}
        unknown = [name for name in together if name not in schemes]
        if unknown:
            raise KeyError(f"weights_dict names {unknown}; there are schemes for {list(schemes)}. Nothing was sent.")
        options = {key: value for key, value in options.items() if key not in ("weights_dict", "model_id")}
        failed: dict[str, Exception] = {}
        for name, weights in together.items():
            try:
                original(me, weights, model_id=name, **options)
            except Exception as exc:
                failed[f"model {name!r}"] = exc
        if failed:
            versions = {name: getattr(schemes[name], "version", "unknown") for name in together}
            raise as_one(failed, [f"model {name!r} is at version {version}" for name, version in versions.items()])

    collector._weight_update_impl = update


def as_one(failed: Mapping[str, Exception], standing: Sequence[str]) -> Exception:
    """One error for several pushes: of the kind of the most serious one, with what became of the others."""
    if len(failed) == 1 and not standing:
        return next(iter(failed.values()))
    worst = min(failed.values(), key=lambda exc: not isinstance(exc, PushError))
    text = "\n".join([*(f"{what} failed: {type(exc).__name__}: {exc}" for what, exc in failed.items()), *standing])
    if isinstance(worst, PushError):
        facts = {key: getattr(worst, key) for key in ("report", "version", "worker", "phase", "tensor")}
        joined: Exception = type(worst)(text, **facts)
    else:
        joined = PushError(text)
    joined.__cause__ = worst
    return joined


def while_ray_is_up(collector: Any) -> None:
    """A RayCollector that is forgotten kills its actors, and calling Ray after ``ray.shutdown()`` starts a new cluster:
    let it see none then."""
    remote = getattr(collector, "_remote_collectors", None)
    if type(remote) is list:
        collector._remote_collectors = _WhileRayIsUp(remote)


class _WhileRayIsUp(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        ray = sys.modules.get("ray")
        return super().__iter__() if ray is None or ray.is_initialized() else iter(())
