from __future__ import annotations

import time
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from weightwire.transport import Deadline, Delivery, Have, Offer, Shelf, Version, choose


def v(number: int) -> Version:
    return Version(1, number)


def test_stamps_are_ordered_by_epoch_first() -> None:
    assert Version(2, 1) > Version(1, 99) > Version(1, 98)


def test_deadline() -> None:
    assert Deadline.after(-1).expired
    assert Deadline.after(-1).remaining == 0.0
    later = Deadline.after(100)
    assert not later.expired
    assert 0 < later.sooner(1).remaining <= 1
    assert Deadline.after(0.5).sooner(1000).remaining <= 0.5
    assert abs(later.at - time.monotonic() - 100) < 1


def test_choose_full_only() -> None:
    assert choose(Have(), None, None) is None
    full = Offer(v(3))
    assert choose(Have(), full, None) is full
    assert choose(Have(v(2), v(2)), full, None) is full
    assert choose(Have(v(3), v(3)), full, None) is None
    assert choose(Have(Version(2, 1), Version(2, 1)), full, None) is None  # of an older run


def test_choose_base_before_subset_and_subset_alone_where_the_base_is_there() -> None:
    full, subset = Offer(v(3)), Offer(v(5), base=v(3))
    assert choose(Have(), full, subset) is full
    assert choose(Have(v(3), v(3)), full, subset) is subset
    assert choose(Have(v(4), v(3)), full, subset) is subset
    assert choose(Have(v(5), v(3)), full, subset) is None
    assert choose(Have(v(4), v(2)), full, subset) is full  # refused 4, stands on another base: both again


def test_choose_ignores_a_subset_of_a_former_full_version() -> None:
    full, old = Offer(v(6)), Offer(v(5), base=v(3))
    assert choose(Have(v(3), v(3)), full, old) is full
    assert choose(Have(v(6), v(6)), full, old) is None


class Push(NamedTuple):
    to: tuple[str, ...] | None
    subset: bool


@given(st.lists(st.builds(Push, st.none() | st.sampled_from([("a",), ("b",), ("a", "b")]), st.booleans())))
def test_shelf_against_a_history(pushes: list[Push]) -> None:
    """What a shelf gives each worker is what looking through the whole history gives."""
    shelf: Shelf[Offer] = Shelf()
    history: list[tuple[Offer, tuple[str, ...] | None]] = []

    def full_of(worker: str) -> Offer | None:
        meant = [o for o, to in history if o.base is None and (to is None or worker in to)]
        return meant[-1] if meant else None

    for number, push in enumerate(pushes, 1):
        bases = {full_of(w) for w in ("a", "b", "c") if push.to is None or w in push.to}
        if push.subset and (None in bases or len(bases) > 1):
            continue  # the core does not let these through
        base = next(iter(bases)).stamp if push.subset else None  # type: ignore[union-attr]
        offer = Offer(v(number), base)
        history.append((offer, push.to))
        shelf.put(offer, push.to)
        for worker in ("a", "b", "c"):
            full = full_of(worker)
            subsets = [o for o, to in history if full and o.base == full.stamp and (to is None or worker in to)]
            assert shelf.of(worker) == (full, subsets[-1] if subsets else None)
            assert full is None or full in shelf.kept()
    shelf.forget("a")
    assert shelf.of("a") == shelf.of("a newcomer")


def test_a_delivery_is_released_once() -> None:
    released: list[int] = []
    delivery = Delivery(None, release=lambda: released.append(1))  # type: ignore[arg-type]
    delivery.release()
    delivery.release()
    assert released == [1]
