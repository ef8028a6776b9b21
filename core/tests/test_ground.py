from __future__ import annotations

import pytest
import torch

from weightwire import PreflightError, Version
from weightwire.ground import REMEMBERED, Ground
from weightwire.weights.layout import Layout
from weightwire.weights.source import Source

V1, V2, V3, V4 = (Version(7, number) for number in (1, 2, 3, 4))
W = frozenset({"w"})


def layout(*names: str, size: int = 2) -> Layout:
    return Source({name: torch.zeros(size) for name in names}).extract().layout


FULL, A, B, AB = layout("a", "b", "c"), layout("a"), layout("b"), layout("a", "b")


def test_a_subset_needs_a_full_version() -> None:
    for to in (None, W):
        with pytest.raises(PreflightError, match="push a full one first"):
            Ground().base_for(A, to)


def test_a_subset_covers_the_ones_before_it() -> None:
    ground = Ground()
    ground.book(V1, None, FULL, None)
    assert ground.base_for(A, None) == V1
    ground.book(V2, V1, A, None)
    with pytest.raises(PreflightError, match=r"\ba\b"):
        ground.base_for(B, None)
    assert ground.base_for(AB, None) == V1
    ground.book(V3, None, FULL, None)
    assert ground.base_for(B, None) == V3


def test_a_subset_brings_nothing_that_its_base_lacks() -> None:
    ground = Ground()
    ground.book(V1, None, FULL, None)
    with pytest.raises(PreflightError, match=r"lacks.*\bd\b"):
        ground.base_for(layout("a", "d"), None)
    with pytest.raises(PreflightError, match=r"shape or dtype.*\ba\b"):
        ground.base_for(layout("a", size=3), None)


def test_workers_on_different_ground_need_a_full_version() -> None:
    ground = Ground()
    ground.book(V1, None, FULL, None)
    ground.book(V2, None, FULL, W)
    assert (ground.base_for(A, W), ground.base_for(A, {"x"})) == (V2, V1)
    for to in (None, {"w", "x"}):
        with pytest.raises(PreflightError, match="differ"):
            ground.base_for(A, to)
    ground.book(V3, None, FULL, None)
    assert ground.base_for(A, None) == V3


def test_a_new_worker_of_an_old_name_stands_on_what_went_to_all() -> None:
    ground = Ground()
    ground.book(V1, None, FULL, W)
    ground.forget("w")
    with pytest.raises(PreflightError, match="push a full one first"):
        ground.base_for(A, W)
    ground.book(V2, None, FULL, None)
    ground.book(V3, None, FULL, W)
    ground.book(V4, V3, A, W)
    ground.forget("w")
    assert ground.base_for(B, W) == ground.base_for(B, None) == V2, "and owes nothing to subsets that it never had"


def test_names_that_come_and_go_leave_nothing_behind() -> None:
    ground = Ground()
    ground.book(V1, None, FULL, None)
    for number in range(300):
        name = f"w{number}"
        base, stamp = Version(7, 2 * number + 2), Version(7, 2 * number + 3)
        ground.book(base, None, FULL, frozenset({name}))
        ground.book(stamp, base, A, frozenset({name}))
        ground.forget(name)
    assert (ground.some, ground.layouts, ground.covered) == ({}, {V1: FULL}, {})


def test_to_whom_a_version_went_is_remembered_for_a_while() -> None:
    ground = Ground()
    for number in range(1, REMEMBERED + 3):
        ground.book(Version(7, number), None, FULL, W)
    assert len(ground.to) == REMEMBERED
    assert ground.addressed(Version(7, REMEMBERED + 2), ["w", "x"]) == ["w"]
    ground.book(Version(7, REMEMBERED + 3), None, FULL, None)
    assert ground.addressed(Version(7, REMEMBERED + 3), ["w", "x"]) == ["w", "x"]


def test_nobody_knows_who_has_what_after_an_interrupt() -> None:
    ground = Ground()
    ground.book(V1, None, FULL, None)
    ground.book(V2, None, FULL, W)
    ground.lose()
    for to in (None, W):
        with pytest.raises(PreflightError, match="push a full one first"):
            ground.base_for(A, to)
    ground.book(V3, None, FULL, None)
    assert ground.base_for(A, W) == V3
