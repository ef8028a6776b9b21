"""A collector that acts in the trainer's own process: it needs a policy of its own."""

from __future__ import annotations

import copy
from typing import Any

from weightwire.errors import CapabilityError

__all__ = ["own_policy"]

WRAPPERS = ("_wrapped_policy_uncompiled", "_wrapped_policy")
"""Where a collector has what it calls, which may be its policy in a wrapper; none of them before 0.9."""


def own_policy(collector: Any, model_id: str, source: Any) -> tuple[Any, Any]:
    """The module with which the collector acts, and the trainer's, which is pushed (``None``: only what is said).

    TorchRL lets such a collector act with the trainer's own Module where devices agree. Then training would reach it
    without an update, and an update that it takes would undo training: it gets a copy.
    """
    if model_id != "policy":
        return source, None
    acting = collector.policy
    if source is not None and acting is not source:
        return acting, source
    wrapper = next((name for name in WRAPPERS if name in vars(collector)), "policy")
    memo: dict[int, Any] = {}
    try:
        wrapped = copy.deepcopy(getattr(collector, wrapper), memo)
    except Exception as exc:
        raise CapabilityError(
            f"the collector acts with the trainer's own policy, which cannot be copied ({type(exc).__name__}: {exc}): "
            "give it one of its own, policy_factory=make_policy, or tell the updater which is the trainer's"
        ) from exc
    mine = memo.get(id(acting))
    if mine is None:
        mine = copy.deepcopy(acting, memo)
    if getattr(collector, "_policy_w_state_dict", None) is acting:
        collector._policy_w_state_dict = mine
    collector.policy = mine
    if wrapper != "policy":
        collector._wrapped_policy = wrapped
    return mine, source
