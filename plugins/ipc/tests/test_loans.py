"""Tensors over a slot that are handed out again, and what keeps them from it: whoever else still looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weightwire_ipc.loans
from weightwire import PreflightError, RefusedError, WaitTimeout, WeightReceiver, WeightUpdater
from weightwire.transport import Deadline
from weightwire_ipc.loans import _can_count

NUMBERS = 1 << 19  # more bytes than are copied in any case
COUNTED = pytest.mark.skipif(not _can_count(), reason="this torch does not tell of uses as others do")


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(NUMBERS), requires_grad=False)
        self.b = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.n = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16), requires_grad=False)
        self.tied = self.b

    def fill(self, value: float) -> None:
        for parameter in self.parameters():
            parameter.data.fill_(value)

    def holds(self, value: float) -> bool:
        return all(bool((parameter == value).all()) for parameter in self.parameters()) and self.tied is self.b


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One item each time that tensors over a slot are made."""
    found: list[Any] = []
    real = weightwire_ipc.loans._Views

    def views(layout: Any, array: Any) -> Any:
        found.append(layout)
        return real(layout, array)

    monkeypatch.setattr(weightwire_ipc.loans, "_Views", views)
    return found


@COUNTED
def test_tensors_are_made_once_a_slot(made: list[Any]) -> None:
    trained, policy = Policy(), Policy()
    with WeightUpdater("ipc", trained) as updater, WeightReceiver(updater.endpoint, policy, apply="alias") as receiver:
        for number in range(1, 9):
            trained.fill(number)
            updater.push(wait="none")
            assert receiver.pull() == number
            assert policy.holds(number)
        assert len(made) == 2
        assert len(updater._sender._slots) == 2  # type: ignore[attr-defined]


KEEPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda tensor: tensor[:5],
    "array": lambda tensor: tensor.numpy(),
    "storage": lambda tensor: tensor.untyped_storage(),
    "buffer": lambda tensor: memoryview(tensor.numpy()),
    "dlpack": lambda tensor: torch.from_dlpack(tensor),
    "graph": torch.enable_grad()(lambda tensor: tensor[:5] * torch.ones(5, requires_grad=True)),  # keeps the factor
    "parameter": lambda tensor: (
        setattr(other := nn.Parameter(torch.zeros(1), requires_grad=False), "data", tensor.data) or other
    ),
}
FIRST: dict[str, Callable[[Any], Any]] = {
    "storage": lambda kept: torch.empty(0).set_(kept)[0],
    "graph": lambda kept: kept.grad_fn._saved_self[0],
}


@COUNTED
@pytest.mark.parametrize("how", KEEPS)
def test_what_somebody_keeps_is_left_to_them_and_then_given_back(how: str, made: list[Any]) -> None:
    trained, policy = Policy(), Policy()
    with (
        WeightUpdater("ipc?max_slots=3", trained, timeout=0.3) as updater,
        WeightReceiver(updater.endpoint, policy, apply="alias") as receiver,
    ):

        def go_on(number: int) -> None:
            trained.fill(number)
            updater.push(wait="none")
            assert receiver.pull() == number
            assert policy.holds(number)

        go_on(1)
        kept = KEEPS[how](policy.w.detach())
        for number in range(2, 6):
            go_on(number)
        assert len(updater._sender._slots) == 3, "one of them is kept"  # type: ignore[attr-defined]
        assert float(FIRST.get(how, lambda kept: kept[0])(kept)) == 1.0
        second = policy.w.detach()[:1]
        go_on(6)
        with pytest.raises(WaitTimeout, match="no free slot"):
            updater.push(wait="none")
        del second, kept  # without a pull
        trained.fill(7)
        updater.push(wait="none")
        assert receiver.pull() == updater.version
        assert policy.holds(7)


@COUNTED
@pytest.mark.parametrize("how", KEEPS)
def test_small_ones_are_copied_to_memory_that_nobody_looks_at(how: str, made: list[Any]) -> None:
    state, kept = {"w": torch.zeros(100), "b": torch.zeros(3)}, []
    with WeightUpdater("ipc") as updater, WeightReceiver(updater.endpoint, state, apply="alias") as receiver:
        for number in range(1, 9):
            updater.push({name: torch.full_like(value, number) for name, value in state.items()})
            assert receiver.pull() == number
            assert all(bool((value == number).all()) for value in state.values())
            if number in (2, 3, 5):
                kept.append((KEEPS[how](state["w"].detach()), number))
            assert [float(FIRST.get(how, lambda kept: kept[0])(one)) for one, _ in kept] == [n for _, n in kept]
        assert len(made) == 5, "two that take turns, and one in the place of each that is kept"
        assert not any(updater._sender._leases.holders(slot) for slot in updater._sender._slots)  # type: ignore[attr-defined]


@COUNTED
def test_what_was_moved_elsewhere_is_not_handed_out_again() -> None:
    trained, policy = Policy(), Policy()
    with WeightUpdater("ipc", trained) as updater, WeightReceiver(updater.endpoint, policy, apply="alias") as receiver:
        for number in range(1, 8):
            trained.fill(number)
            updater.push(wait="none")
            assert receiver.pull() == number
            assert policy.holds(number)
            policy.w.share_memory_()  # puts its storage elsewhere, which is the delivered one
            policy.b.data = torch.full((3,), float(number))
            assert policy.holds(number)


@COUNTED
def test_what_was_handed_out_is_leased_until_it_is_known_what_became_of_it() -> None:
    state = {name: torch.ones_like(value) for name, value in Policy().state_dict().items()}
    with (
        WeightUpdater("ipc") as updater,
        WeightReceiver(updater.endpoint, Policy(), apply="alias") as receiver,
    ):
        updater.push(state)
        backend, leases = receiver._receiver, updater._sender._leases  # type: ignore[attr-defined]
        delivery = backend.poll(receiver._have(), Deadline.after(5))
        backend._loans.settle()
        assert leases.holders(0)
        delivery.release()
        assert not leases.holders(0)


@COUNTED
def test_a_refused_version_is_on_loan_to_nobody() -> None:
    policy = Policy()
    with (
        WeightUpdater("ipc?max_slots=3", timeout=5.0) as updater,
        WeightReceiver(updater.endpoint, policy, apply="alias", select=lambda name: True) as receiver,
    ):
        state = {name: torch.ones_like(value) for name, value in policy.state_dict().items()}
        updater.push(state)
        assert receiver.pull() == 1
        for _ in range(4):
            updater.push({**state, "b": torch.ones(4)}, wait="none")
            with pytest.raises(PreflightError):
                receiver.pull()
            assert policy.holds(1.0)
            assert receiver.version == 1
            with pytest.raises(RefusedError):
                updater.wait()


def test_where_torch_does_not_tell_of_uses_tensors_are_made_each_time(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weightwire_ipc.loans, "_storage_uses", lambda address: 1)
    _can_count.cache_clear()
    try:
        assert not _can_count()
        trained, policy = Policy(), Policy()
        with (
            WeightUpdater("ipc", trained) as updater,
            WeightReceiver(updater.endpoint, policy, apply="alias") as receiver,
        ):
            for number in range(1, 6):
                trained.fill(number)
                updater.push(wait="none")
                assert receiver.pull() == number
                assert policy.holds(number)
        assert not made
    finally:
        _can_count.cache_clear()
