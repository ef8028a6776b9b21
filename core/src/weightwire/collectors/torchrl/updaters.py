"""The updater for ``weight_updater=``. Importing this module imports TorchRL."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253  (imported by updater() only)
from torchrl.collectors.weight_update import WeightUpdaterBase  # noqa: TID253

from weightwire.collectors.torchrl.host import acts_here
from weightwire.collectors.torchrl.leaf import Feed, Leaf
from weightwire.collectors.torchrl.local import own_policy
from weightwire.collectors.torchrl.modules import Kept, kept
from weightwire.collectors.torchrl.sending import Sending, ids_of

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.report import PushReport
    from weightwire.roster import WorkerInfo

__all__ = ["WeightwireUpdater"]

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # newer releases warn of every class made here

    class WeightwireUpdater(WeightUpdaterBase):  # type: ignore[misc]
        """One policy's weights through Weightwire; made by :func:`weightwire.collectors.torchrl.updater`.

        The way into a collector's processes is the policy itself: it carries a forward pre-hook, idle in the trainer's
        process, that makes a receiver where it finds itself in another one.
        """

        def __init__(
            self,
            endpoint: str | Mapping[str, Any] | Endpoint,
            policy: Any = None,
            *,
            apply: str,
            wait: str,
            timeout: float,
            **mapping: Any,
        ) -> None:
            super().__init__()
            self._mine: weakref.ref[Any] | None = None  # the collector
            self._policy = policy
            self._leaf: Leaf | None = None  # of a collector that acts in this process
            self._sending = Sending(
                endpoint,
                policy,
                self._find,
                wait=wait,
                timeout=timeout,
                hint="hand the updater the policy that the collector has, or the collector "
                "policy_factory=updater.receiving(make_policy)",
                **mapping,
            )
            self._feed = Feed(
                endpoint=self._sending.updater.endpoint,
                apply=apply,
                timeout=timeout,
                first=policy is not None,
                kept=kept(policy) if isinstance(policy, torch.nn.Module) else Kept(),
            )
            self._traveller = Leaf(self._feed, home=os.getpid())
            if isinstance(policy, torch.nn.Module):
                self._traveller.hook(policy)
            if policy is not None:
                self._sending.begin()

        # -- what TorchRL calls ----------------------------------------------------------------------------------

        def register_collector(self, collector: Any) -> None:
            """Serve this collector, instead of one that was shut down before."""
            self._mine = weakref.ref(collector)
            policy = getattr(collector, "policy", None)
            if acts_here(collector) and isinstance(policy, torch.nn.Module):
                self._lead(collector)

        @property
        def collector(self) -> Any:
            return None if self._mine is None else self._mine()

        @property
        def collectors(self) -> list[Any]:
            return [] if self.collector is None else [self.collector]

        def push_weights(
            self, policy_or_weights: Any = None, worker_ids: Any = None, *, weights: Any = None, **_: Any
        ) -> PushReport:
            """Push to all workers, or to some. ``weights`` is what the argument was called before torchrl 0.9."""
            source = policy_or_weights if policy_or_weights is not None else weights
            if source is self._policy:
                source = None
            collector = self.collector
            ids = ids_of(worker_ids, getattr(collector, "policy_device", None))
            count = len(self.all_worker_ids() or ()) or int(self._leaf is not None)
            report = self._sending.push(source, ids, count=count)
            for hook in getattr(self, "post_hooks", ()):
                hook()
            return report

        def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None, **kwargs: Any) -> PushReport:
            return self.push_weights(policy_or_weights, worker_ids, **kwargs)

        def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any = None) -> None:
            self.push_weights(server_weights, worker_id)

        def _get_server_weights(self) -> Any:
            return self._policy

        def _maybe_map_weights(self, server_weights: Any) -> Any:
            return server_weights  # select, rename and cast have their own place

        def all_worker_ids(self) -> list[int] | None:
            processes = getattr(self.collector, "procs", None)
            return None if processes is None else list(range(len(processes)))

        # -- what users call -------------------------------------------------------------------------------------

        def update_weights(self, weights: Any = None) -> None:
            """What TorchRL's ``UpdateWeights(sender=...)`` calls."""
            self.push_weights(weights)

        def receiving(self, factory: Callable[..., Any]) -> Callable[..., Any]:
            """``factory`` for a worker process: the policy that it makes receives by itself."""
            return _Receiving(factory, self._traveller)

        @property
        def version(self) -> int:
            """The number of the newest version."""
            return self._sending.updater.version

        @property
        def versions(self) -> dict[str, int]:
            """Worker's name -> number of the version that it has acknowledged as acting."""
            return self._sending.versions()

        @property
        def workers(self) -> dict[str, WorkerInfo]:
            """What is known of each worker that is there."""
            return self._sending.updater.workers

        @property
        def endpoint(self) -> str:
            return self._feed.endpoint

        def close(self) -> None:
            """Say goodbye, and take the hook out of the policy. Idempotent."""
            if isinstance(self._policy, torch.nn.Module):
                self._traveller.unhook(self._policy)
            leaf, self._leaf = self._leaf, None
            if leaf is not None:
                leaf.close()
            self._sending.close()

        # -- inside ----------------------------------------------------------------------------------------------

        def _lead(self, collector: Any) -> None:
            """Feed the policy of a collector that acts in this process."""
            acts, _ = own_policy(collector, "policy", self._policy)
            self._traveller.unhook(acts)
            self._leaf = Leaf(self._feed, "policy-0")
            self._leaf.start(acts)
            self._leaf.hook(acts)
            self._leaf.follow(collector)

        def _find(self, worker: int, workers: Mapping[str, int]) -> list[str]:
            """Worker processes give themselves names; which is which is known by its process."""
            processes = getattr(self.collector, "procs", None)
            if processes is None:
                return [name for name in workers if name == f"policy-{worker}"]
            if not 0 <= worker < len(processes):
                return []
            return [name for name, pid in workers.items() if pid == processes[worker].pid]


class _Receiving:
    """A picklable policy factory whose policies receive by themselves."""

    def __init__(self, factory: Callable[..., Any], leaf: Leaf) -> None:
        self.factory = factory
        self.leaf = leaf

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        policy = self.factory(*args, **kwargs)
        if isinstance(policy, torch.nn.Module):
            self.leaf.hook(policy)
        return policy
