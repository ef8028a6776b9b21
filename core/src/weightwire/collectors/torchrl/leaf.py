"""A worker's end: a policy that acts, and the receiver that feeds it before each of its calls.

Weights change only here, in the thread that acts, between two calls of the policy: no forward can see two versions.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightwire.collectors.torchrl.host import caller, gate
from weightwire.collectors.torchrl.modules import Kept, settle, without_constants
from weightwire.errors import (
    ApplyError,
    DigestError,
    EndpointInUseError,
    PreflightError,
    WaitTimeout,
    WeightwireError,
    WireError,
)
from weightwire.receiver import WeightReceiver

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["Feed", "Leaf"]

logger = logging.getLogger(__name__)

NOT_TAKEN = (PreflightError, DigestError, ApplyError, WireError)
"""A version that was not taken: the trainer has been told, and the old one acts on."""
STEP = 0.05
"""Seconds. Waits for the trainer are cut into steps, between which it is seen whether it is there."""


@dataclass(frozen=True, kw_only=True)
class Feed:
    """Where a worker gets its weights: plain data, which TorchRL carries to the worker process.

    ``first``: the trainer has pushed a version already, and the worker does not act before it has one.
    """

    endpoint: str
    apply: str = "copy"
    timeout: float = 60.0
    first: bool = False
    kept: Kept = field(default_factory=Kept)


class Leaf:
    """One policy and its receiver. The object itself is the forward pre-hook that pulls.

    It feeds whichever module calls it: TorchRL may copy a policy to another device after the hook was set, and the copy
    acts then. It may travel within a policy, by pickle or fork, and starts anew in the process where it finds itself.
    ``home`` is the process in which it stays idle: the trainer's, whose policy it travels in.
    """

    def __init__(self, feed: Feed, worker: str | None = None, *, home: int | None = None) -> None:
        self.feed = feed
        self.worker = worker
        self.home = home
        self.tracker: Any = None
        self.notify: Callable[[int], object] | None = None
        self.receiver: WeightReceiver | None = None
        self._fed: weakref.ref[Module] | None = None
        self._collector: weakref.ref[Any] | None = None
        self._beside: weakref.ref[Module] | None = None
        self._followed = self._over = False
        self._last = 0  # the number that was told
        self._here = (0, 0)  # process and thread that the receiver belongs to

    def __call__(self, module: Module, args: Any) -> None:
        """The pre-hook. In compiled code it is nothing: whoever calls that code pulls, see ``host.gate``."""
        import torch

        if not torch.compiler.is_compiling():
            self.pull(module)

    def pull(self, module: Module | None = None) -> int | None:
        """Apply the newest version that is here, without waiting; its number, else ``None``."""
        module = self.module if module is None else module
        here = (os.getpid(), threading.get_ident())
        if module is None or self._over or self.home == here[0]:
            return None
        receiver = self.receiver
        if receiver is None or self._here != here or self.module is not module:
            receiver = self._open(module)
        before = self._last
        try:
            receiver.pull(0.0)
        except NOT_TAKEN as exc:
            if before and not receiver.ready:  # half a version may be in there
                raise
            logger.warning("%s; version %d acts on", exc, before)
        number = self._last = receiver.version
        if number != before and self.home is not None and not self._followed:
            self.follow(caller())
        if self.tracker is None:
            self._find_tracker()
        if self.tracker is not None and number:
            _mark(self.tracker, receiver)
        if number == before:
            return None
        if self.notify is not None:
            self.notify(number)
        return number

    def start(self, module: Module) -> None:
        """Join the trainer and apply what it has, before the policy acts. Waits up to the feed's timeout."""
        receiver = self._open(module)
        deadline = time.monotonic() + self.feed.timeout
        while not receiver.connected:
            left = deadline - time.monotonic()
            try:
                receiver.pull(max(min(STEP, left), 1e-3))
            except WaitTimeout:
                if left <= 0:
                    raise

    def follow(self, collector: Any, *, counts: bool = True) -> None:
        """Act for ``collector``: mark its frames with the version (where ``counts``), and reach its compiled code."""
        if collector is None:
            return
        if counts:
            self._collector = weakref.ref(collector)
        if not self._followed:
            gate(collector, self.pull)
        self._followed = True

    def _find_tracker(self) -> None:
        """Where the collector reads the version of each frame: some have it only after they have a policy."""
        collector = None if self._collector is None else self._collector()
        tracker = getattr(collector, "policy_version_tracker", None)
        if hasattr(tracker, "version"):
            self.tracker = tracker

    @property
    def module(self) -> Module | None:
        """The module that acts."""
        return None if self._fed is None else self._fed()

    @module.setter
    def module(self, module: Module) -> None:
        if self.receiver is None or self.module is not module:
            self._open(module)
            self.hook(module)

    def hook(self, module: Module) -> None:
        """Have ``module`` pull before each of its calls; once, however often it is asked for."""
        if self not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(self)

    def unhook(self, module: Module) -> None:
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is self]:
            del module._forward_pre_hooks[key]

    def hook_beside(self, policy: Module) -> None:
        """Have ``policy`` pull our module, which it acts beside, before each of its own calls; once, likewise."""
        self._beside = weakref.ref(policy)
        if not any(isinstance(hook, _Beside) and hook.leaf is self for hook in policy._forward_pre_hooks.values()):
            policy.register_forward_pre_hook(_Beside(self))

    def close(self) -> None:
        """Say goodbye, for good. Idempotent; the weights live on."""
        self._over = True
        module = self.module
        if module is not None:
            self.unhook(module)
        policy = None if self._beside is None else self._beside()
        if policy is not None:
            hooks = policy._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Beside) and hook.leaf is self]:
                del hooks[key]
        self._let_go()

    def _let_go(self) -> None:
        receiver, self.receiver = self.receiver, None
        if receiver is not None and self._here[0] == os.getpid():
            receiver.close()

    def _open(self, module: Module) -> WeightReceiver:
        """A receiver for this module and thread. One of before is closed: it belongs to another of either."""
        again = self.receiver is not None and self._here[0] == os.getpid()
        self._let_go()
        bare = settle(module, self.feed.kept)
        deadline = time.monotonic() + self.feed.timeout
        while True:
            receiver = WeightReceiver(
                self.feed.endpoint,
                module,
                worker=self.worker,
                apply=self.feed.apply,
                select=without_constants(module),
                timeout=self.feed.timeout,
            )
            try:
                if self.feed.first or bare:
                    receiver.pull()
                elif again:
                    receiver.pull(0.0)
                break
            except EndpointInUseError:  # the trainer may not have read our own goodbye yet
                receiver.close()
                if not again or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            except WeightwireError:
                receiver.close()
                raise
        self.worker = receiver.worker
        self.receiver, self._fed = receiver, weakref.ref(module)
        self._here = (os.getpid(), threading.get_ident())
        return receiver

    def __deepcopy__(self, memo: dict[int, Any]) -> Leaf:
        return self  # a copied policy is fed by the same receiver, as soon as it is the one that acts

    def __getstate__(self) -> dict[str, Any]:
        return {"feed": self.feed, "worker": self.worker, "home": self.home}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["feed"], state["worker"], home=state["home"])  # type: ignore[misc]


class _Beside:
    """The pre-hook of a policy beside which a leaf's module acts. It may travel within the policy, as the leaf may."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf

    def __call__(self, _: Module, __: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self.leaf.pull()


def _mark(tracker: Any, receiver: WeightReceiver) -> None:
    """Put the version that acts where TorchRL reads it for each frame: a number, or a text where it counts in those."""
    if getattr(tracker, "version_type", int) in (str, "uuid"):
        tracker.version = f"{receiver.run}-{receiver.version}"
    else:
        tracker.version = receiver.version
