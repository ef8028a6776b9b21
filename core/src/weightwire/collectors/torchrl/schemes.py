"""The scheme for ``weight_sync_schemes=``. Importing this module imports TorchRL."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253  (imported by scheme() only)
from torchrl.weight_update import WeightSyncScheme  # noqa: TID253

from weightwire.collectors.torchrl.host import (
    acts_here,
    model_of,
    says_ranks,
    update_as_one,
    while_ray_is_up,
    workers_of,
)
from weightwire.collectors.torchrl.leaf import Feed, Leaf
from weightwire.collectors.torchrl.local import own_policy
from weightwire.collectors.torchrl.modules import Kept, kept
from weightwire.collectors.torchrl.sending import Sending, ids_of
from weightwire.endpoint import parse
from weightwire.errors import ClosedError

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.report import PushReport
    from weightwire.roster import WorkerInfo
    from weightwire.updater import WeightUpdater

__all__ = ["WeightwireScheme"]


class WeightwireScheme(WeightSyncScheme):  # type: ignore[misc]
    """One model's weights through Weightwire; made by :func:`weightwire.collectors.torchrl.scheme`.

    In the trainer it holds an updater, in a worker a :class:`~weightwire.collectors.torchrl.leaf.Leaf`; on the way
    between them it is plain data. Workers are called ``<model>-<index>``, those of a collector within a worker
    ``<model>-<index>.<index>``.
    """

    context: Any  # a property of the base class: a weak reference to the collector

    def __init__(
        self, endpoint: str | Mapping[str, Any] | Endpoint, *, apply: str, wait: str, timeout: float, **mapping: Any
    ) -> None:
        super().__init__()
        parsed = parse(endpoint)
        self._asked = str(parsed)  # the feed has the complete one, once there is an updater
        self._feed = Feed(endpoint=self._asked, apply=apply, timeout=timeout)
        self._wait = wait
        self._mapping: dict[str, Any] = mapping  # select, rename, cast: perhaps functions, so they stay in the trainer
        self._nested: int | None = None  # the index of the worker within which this one serves a collector
        self._first_index = 0  # of workers, as TorchRL tells it to them
        self._workers = 0  # how many there are to be, as far as known
        self._sending: Sending | None = None
        self._leaf: Leaf | None = None
        self._process = os.getpid()

    # -- what can be read --------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The number of the newest version: in the trainer of those pushed, in a worker the one that acts."""
        if self._sending is not None:
            return self._sending.updater.version
        leaf = self._leaf
        return leaf.receiver.version if leaf is not None and leaf.receiver is not None else 0

    @property
    def versions(self) -> dict[str, int]:
        """In the trainer: worker's name -> number of the version that it has acknowledged as acting."""
        return self._sender().versions()

    @property
    def workers(self) -> dict[str, WorkerInfo]:
        """In the trainer: what is known of each worker that is there."""
        return self._sender().updater.workers

    @property
    def updater(self) -> WeightUpdater:
        """The trainer's end itself."""
        return self._sender().updater

    @property
    def endpoint(self) -> str:
        """Where it is, complete: what a worker of one's own would be given."""
        return self._feed.endpoint

    def leaves(self, worker: int) -> WeightwireScheme:
        """For the collector within worker number ``worker`` of a distributed one, whose processes then connect straight
        to the trainer: ``collector_kwargs=[{"weight_sync_schemes": {"policy": scheme.leaves(n)}} for n in range(2)]``.

        Raises ``ValueError`` where the endpoint has no location, which the workers could not know.
        """
        if not parse(self._feed.endpoint).location:
            raise ValueError(f"nested collectors need a named location: 'ipc://policy' instead of {self.endpoint!r}")
        nested = WeightwireScheme(
            self._feed.endpoint, apply=self._feed.apply, wait=self._wait, timeout=self._feed.timeout
        )
        nested._nested = worker
        return nested

    # -- the trainer's end -------------------------------------------------------------------------------------------

    @property
    def initialized_on_sender(self) -> bool:
        """Never in the trainer: whoever asks wants to know whether to initialise it, and that is where a second
        collector, or a second model of one, is refused."""
        return bool(self._initialized_on_sender) and self._process != os.getpid()

    def init_on_sender(self, *args: Any, model_id: str = "policy", context: Any = None, **kwargs: Any) -> None:
        """TorchRL's first call in the trainer. Raises ``RuntimeError`` where it serves another collector or model."""
        if self.context is not None and not self._left():
            if self.context is not context:
                raise RuntimeError(self._taken())
            if self._model_id != model_id:
                raise RuntimeError(
                    f"weight_sync_schemes has one scheme for the models {self._model_id!r} and {model_id!r}, and one "
                    f"object carries one model: make a scheme for each, {{{self._model_id!r}: scheme(...), "
                    f"{model_id!r}: scheme(...)}}, each with a location of its own"
                )
        elif self._leaf is not None:  # of a collector in this process that is gone
            self._close_leaf()
        super().init_on_sender(*args, model_id=model_id, context=context, **kwargs)

    def _init_on_sender_impl(
        self,
        *,
        model_id: str = "policy",
        context: Any = None,
        model: Any = None,
        weights: Any = None,
        num_workers: int | None = None,
        remote_collectors: Any = None,
        devices: Any = None,
        **_: Any,
    ) -> None:
        """``context`` is the collector; without one, ``model`` (or ``weights``) is what is pushed."""
        self.model_id = model_id
        self.context = context
        self.synchronized_on_sender = False
        source = model if model is not None else weights
        if source is None and context is not None:
            source = model_of(context, model_id)
        if isinstance(source, torch.nn.Module) and next(iter(source.state_dict(keep_vars=True)), None) is None:
            source = None
        lost = kept(source) if isinstance(source, torch.nn.Module) else Kept()
        self._feed = dataclasses.replace(self._feed, kept=lost)
        self._workers = workers_of(context, num_workers, remote_collectors, devices)
        # The processes of a DistributedCollector are told their rank, which begins at 1: the trainer is 0.
        self._first_index = int(hasattr(context, "_init_worker_dist_mp"))
        if self._nested is not None:
            return
        acts = None
        if acts_here(context):
            original = getattr(context, "_orig_policy", None)  # what its user gave it, where it acts with another one
            acts, source = own_policy(context, model_id, source if original is None else original)
            _check_module(acts, model_id, context)
        if self._sending is not None and self._sending.source is not source:
            self._close_sending()
        if self._sending is None:
            self._sending = Sending(
                self._asked,
                source,
                self._find,
                wait=self._wait,
                timeout=self._feed.timeout,
                hint="its collector was not given this scheme",
                **self._mapping,
            )
        self._feed = dataclasses.replace(self._feed, endpoint=self._sending.updater.endpoint, first=source is not None)
        if source is not None:
            self._sending.begin()
        if context is not None:
            update_as_one(context)
            while_ray_is_up(context)
        if acts is not None:
            self._workers = 1
            self._lead(acts, 0, context)
        self._tell(context)

    def _setup_connection_and_weights_on_sender_impl(self, **_: Any) -> None:
        """Nothing is left to do: whoever joins gets the version that the beginning made."""

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """TorchRL's rendezvous: once a collector."""
        if self._initialized_on_sender and self.synchronized_on_sender:
            raise RuntimeError(self._taken())
        super().connect(worker_idx=worker_idx, weights=weights)

    def send(self, weights: Any = None, worker_ids: Any = None) -> PushReport:
        """Push, and wait until each worker that is addressed acts with it from its next policy call (or as ``wait``
        says).

        Args:
            weights: Module, TensorDict, state dict, mapping from worker to any of these; ``None``: the collector's.
            worker_ids: index, device, or a list; ``None``: all.

        Raises what :meth:`weightwire.WeightUpdater.push` raises, and ``ClosedError`` after the collector's shutdown.
        """
        sending = self._sender()
        context = self.context
        if self._left():
            raise ClosedError(f"{self!r}: the collector was shut down, so there is nobody to update")
        if isinstance(weights, dict) and weights and all(isinstance(key, int) for key in weights):
            weights = {worker: self._named(each) for worker, each in weights.items()}
        weights = self._named(weights)
        ids = ids_of(worker_ids, getattr(context, "policy_device", None))
        if ids is not None and says_ranks(context):
            ids = [worker - 1 for worker in ids]
        if weights is sending.source:
            weights = None
        report = sending.push(weights, ids, count=self._workers)
        self._tell(context)
        return report

    def _named(self, weights: Any) -> Any:
        """What is to be pushed, where it may be the name of a model in the collector."""
        if not isinstance(weights, str):
            return weights
        model = model_of(self.context, weights)
        if model is None:
            raise ValueError(
                f"weights is the text {weights!r}, and the collector has no model of that name; hand over the weights "
                "themselves, or leave them out for the collector's own"
            )
        return model

    def update_weights(self, weights: Any = None) -> None:
        """What TorchRL's ``UpdateWeights(sender=...)`` calls."""
        self.send(weights)

    def _find(self, worker: int, workers: Mapping[str, int]) -> list[str]:
        name = f"{self.model_id}-{worker}"
        return [known for known in workers if known == name or known.startswith(f"{name}.")]

    def _tell(self, context: Any) -> None:
        """The trainer's own count, where it is no worker's: what ``collector.policy_version`` says."""
        tracker: Any = getattr(context, "policy_version_tracker", None)
        counts = getattr(tracker, "version_type", None) in (int, "int")
        if counts and self._leaf is None and self.model_id == "policy":
            tracker.version = self.version

    def _sender(self) -> Sending:
        if self._sending is None:
            raise ClosedError(f"{self!r} has no trainer's end: it was shut down, or no collector has it yet")
        return self._sending

    def _left(self) -> bool:
        """Whether the collector that it served is gone."""
        if self._context_ref is None:
            return False
        context = self.context
        # While a collector of processes is being made it says that it is closed.
        return context is None or (self.synchronized_on_sender and bool(getattr(context, "closed", False)))

    def _taken(self) -> str:
        return (
            f"{self!r} serves a collector already, and one object serves one at a time: shut that one down first, or "
            "make another scheme, with a location of its own"
        )

    # -- a worker's end ----------------------------------------------------------------------------------------------

    @property
    def initialized_on_receiver(self) -> bool:
        """Not before the collector is known: TorchRL then initialises again, with the collector."""
        return bool(self._initialized_on_receiver) and (self._leaf is None or self.context is not None)

    def init_on_receiver(self, *, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """TorchRL's first call in a worker: with the policy, or with the collector, or with one after the other."""
        if self._sending is not None and self._process == os.getpid():
            raise RuntimeError(f"{self!r} is the trainer's end; give the worker in this process a scheme of its own")
        super().init_on_receiver(model_id=model_id, context=context, **kwargs)

    def _init_on_receiver_impl(
        self, *, model_id: str, context: Any = None, model: Any = None, worker_idx: int | None = None, **_: Any
    ) -> None:
        self.model_id = model_id
        if context is not None:
            self.context = context
        if context is not None and hasattr(context, "procs"):  # it does not act itself
            self._check_nested(context, model_id)
            return
        context = self.context
        if model is None and context is not None:
            model = model_of(context, model_id)
        _check_module(model, model_id, context)
        if worker_idx is None:
            worker_idx = getattr(context, "_worker_idx", None)
        self._worker_idx = worker_idx
        index = None if worker_idx is None else worker_idx - self._first_index
        self._lead(model, index, context)

    def _lead(self, model: torch.nn.Module, index: int | None, context: Any) -> None:
        """Feed ``model``, before each call of the policy of ``context``, or else of its own."""
        if self._leaf is None:
            label = index if self._nested is None else f"{self._nested}.{index}"
            self._leaf = Leaf(self._feed, None if index is None else f"{self.model_id}-{label}")
            self._leaf.start(model)
            self._leaf.hook(model)
        self._follow(context)

    def _follow(self, context: Any) -> None:
        """Pull where the collector acts, and mark its frames."""
        leaf = self._leaf
        if leaf is None or context is None:
            return
        if hasattr(context, "_mark_weight_update"):  # an inference server, which counts for itself
            leaf.notify = context._mark_weight_update
            if self.version:
                leaf.notify(self.version)
            return
        policy = getattr(context, "policy", None)
        if self.model_id != "policy" and isinstance(policy, torch.nn.Module):
            leaf.hook_beside(policy)
        leaf.follow(context, counts=self.model_id == "policy")
        leaf.pull()

    def _check_nested(self, context: Any, model_id: str) -> None:
        inner = (getattr(context, "_weight_sync_schemes", None) or {}).get(model_id)
        if not isinstance(inner, WeightwireScheme) or inner._nested is None:
            raise TypeError(
                f"the collector within this worker, {type(context).__name__}, has processes of its own, which connect "
                f"straight to the trainer: give it collector_kwargs=[{{'weight_sync_schemes': {{{model_id!r}: "
                "scheme.leaves(n)}} for n in range(number of workers)]"
            )

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        """Nothing is left to do: the beginning has connected."""

    def receive(self, timeout: float | None = None) -> Any:
        """Apply what is here, without waiting; the model where something was, else ``None``."""
        leaf = self._leaf
        return None if leaf is None or leaf.pull() is None else leaf.module

    @property
    def model(self) -> Any:
        """In a worker, the module that is fed."""
        return None if self._leaf is None else self._leaf.module

    @model.setter
    def model(self, model: Any) -> None:
        if self._leaf is not None and isinstance(model, torch.nn.Module):
            self._leaf.module = model
            self._follow(self.context)

    @property
    def weights(self) -> Any:
        return None

    def create_transport(self, **_: Any) -> Any:
        """Abstract in the base class, and needed by none of the methods here."""
        raise NotImplementedError(f"{self!r} has no transports: Weightwire's updater and receiver take their place")

    # -- the end, and the way ----------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Say goodbye on either side. Idempotent; a collector may be given the scheme again afterwards."""
        super().shutdown()
        if getattr(self, "_process", None) != os.getpid():
            return
        self._close_leaf()
        self._close_sending()
        self._initialized_on_sender = self._initialized_on_receiver = False
        self.synchronized_on_sender = self.synchronized_on_receiver = False

    def _close_leaf(self) -> None:
        leaf, self._leaf = self._leaf, None
        if leaf is not None:
            leaf.close()

    def _close_sending(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.close()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | {"_sending": None, "_leaf": None, "_mapping": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<WeightwireScheme {self._model_id or ''} at {self._feed.endpoint}>"


def _check_module(model: Any, model_id: str, context: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        where = "" if context is None else f" of this {type(context).__name__}"
        raise TypeError(
            f"model {model_id!r}{where} is no Module but {model!r:.200}: it has no weights to be updated. Give the "
            "collector a Module as its policy, or leave out this scheme"
        )
