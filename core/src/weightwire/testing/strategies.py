"""Hypothesis strategies for states: every dtype, awkward shapes and strides, ties, views, names."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from weightwire.testing.states import ARRANGEMENTS, arrange, makeable

__all__ = ["arrangements", "dtypes", "names", "shapes", "states", "tensors"]

_WRAPPERS = {
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
}  # seen through, so never a name

dtypes: st.SearchStrategy[str] = st.deferred(lambda: st.sampled_from(makeable()))
"""Names of all dtypes that this torch can make."""

shapes: st.SearchStrategy[tuple[int, ...]] = st.one_of(
    st.sampled_from([(), (1,), (0,), (0, 8), (8, 0), (2, 3, 4, 5), (1, 1, 1, 1), (65,)]),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
)
"""0-dim, zero-size, and odd sizes up to four dimensions."""

arrangements = st.sampled_from(ARRANGEMENTS)
"""How a tensor lies in memory."""

_component = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="./"), min_size=1, max_size=12
).filter(lambda text: text not in _WRAPPERS)

names: st.SearchStrategy[str] = st.lists(_component, min_size=1, max_size=4).map(".".join)
"""Dotted names with components in any script."""


@st.composite
def tensors(draw: st.DrawFn, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
    """One tensor of random bits, strided in one of :data:`~weightwire.testing.states.ARRANGEMENTS`."""
    return arrange(
        dtype or draw(dtypes),
        draw(shapes) if shape is None else shape,
        draw(arrangements),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def states(draw: st.DrawFn, *, min_size: int = 1, max_size: int = 8, ties: bool = True) -> dict[str, Tensor]:
    """A flat state: name -> tensor. Some names may be ties of others (the same tensor, or a view of its first row)."""
    chosen = draw(st.lists(names, min_size=min_size, max_size=max_size, unique=True))
    state: dict[str, Tensor] = {}
    for name in chosen:
        kind = draw(st.sampled_from(["new", "new", "tie", "view"])) if ties and state else "new"
        other: Any = state[draw(st.sampled_from(sorted(state)))] if kind != "new" else None
        if kind == "tie":
            state[name] = other
        elif kind == "view" and isinstance(other, torch.Tensor) and other.dim() and other.shape[0]:
            state[name] = other[0]
        else:
            state[name] = draw(tensors())
    return state
