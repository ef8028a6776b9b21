"""The store's memory is read-only: which policies must not point at it unless somebody insists."""

from __future__ import annotations

from weightwire.errors import CapabilityError

__all__ = ["refuse_alias"]


def refuse_alias(why: str) -> None:
    """Raises :class:`~weightwire.CapabilityError` where there is a reason not to."""
    if why:
        raise CapabilityError(
            "apply='alias' over ray points the policy at the object store's memory, which is read-only. The policy "
            f"looks like one that is written to: {why}; the first write in place (an optimizer's step, say) would kill "
            "this process. Call policy.eval() and policy.requires_grad_(False), or use apply='copy'; to insist, write "
            "alias=force into the endpoint."
        )
