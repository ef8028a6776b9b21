"""Payloads that are applied bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weightwire.transport
from weightwire import ApplyError, PreflightError, UpdaterLostError, WeightReceiver, WeightUpdater
from weightwire.errors import DigestError, RefusedError, WireError
from weightwire.transport import Delivery, Header, Version
from weightwire.weights.layout import Layout
from weightwire.weights.payload import Payload
from weightwire.weights.source import Source
from weightwire.weights.stream import StreamPlan, pour
from weightwire.weights.target import make_target

STATE = {
    "a": torch.arange(300, dtype=torch.float32).reshape(20, 15),
    "none": torch.zeros(0, 3),
    "b": torch.arange(7, dtype=torch.int64),
    "half": torch.arange(33, dtype=torch.bfloat16),
    "flag": torch.tensor(True),
    "c": torch.arange(1000, dtype=torch.float64).reshape(10, 100).t(),
    "scale": torch.tensor(0.5),
    "eight": torch.arange(50, dtype=torch.float32).to(torch.float8_e4m3fn),
    "empty": torch.zeros(0),
}


def zeros(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(-1).view(torch.uint8), flat(other))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def packed(state: Any, *, digest: bool = True) -> tuple[Header, torch.Tensor]:
    payload = Payload(Source(state).extract(), stamp=Version(1, 1), digest=digest)
    memory = torch.empty(payload.nbytes, dtype=torch.uint8)
    payload.pack(memory)
    return payload.header, memory


def cut(memory: torch.Tensor, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    scratch = torch.empty(size, dtype=torch.uint8)
    for start in range(0, memory.numel(), size):
        part = memory[start : start + size]
        scratch[: part.numel()].copy_(part)
        yield start, scratch[: part.numel()]
        scratch.fill_(255)  # valid until the next is asked for, and no longer


def poured(state: Any, into: Any, size: int, group: Any = None) -> int:
    header, memory = packed(state)
    target = make_target(into)
    layout = target.admit(header)
    return pour(header, cut(memory, size), target, StreamPlan(layout, group)).tensors


@pytest.mark.parametrize("group", [None, lambda name: "one", lambda name: name in ("a", "scale") or None])
@pytest.mark.parametrize("size", [64, 128, 1024, 4096, 1 << 20])
def test_all_bytes_arrive_whatever_the_buckets(size: int, group: Any) -> None:
    into = zeros(STATE)
    assert poured(STATE, into, size, group) == len(STATE)
    assert all(same(into[name], STATE[name]) for name in STATE)


def test_ties_stay_ties() -> None:
    base = torch.arange(4096, dtype=torch.float32)
    state = {"all": base, "head": base[:100], "again": base, "other": torch.ones(5)}
    memory = torch.zeros(4096)
    into = {"all": memory, "head": memory[:100], "again": memory, "other": torch.zeros(5)}
    poured(state, into, 256)
    assert torch.equal(into["head"], base[:100])
    assert torch.equal(into["again"], base)
    assert into["all"].data_ptr() == into["again"].data_ptr()


def test_what_belongs_together_is_handed_over_together() -> None:
    calls: list[set[str]] = []
    poured(STATE, lambda tensors: calls.append(set(tensors)), 64, lambda name: name in ("a", "scale") or None)
    assert len(calls) > 2
    assert set().union(*calls) == set(STATE)
    assert sum(map(len, calls)) == len(STATE)
    assert all(("a" in call) == ("scale" in call) for call in calls)


def test_memory_is_bounded_by_the_bucket_not_by_the_largest_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    empty = torch.empty
    state = {"large": torch.rand(1 << 18), "small": torch.rand(10)}
    into = zeros(state)
    header, memory = packed(state)
    target = make_target(into)
    plan = StreamPlan(target.admit(header), None)

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        made.append(tensor.nbytes)
        return tensor

    buckets = [(start, part.clone()) for start, part in cut(memory, 4096)]
    monkeypatch.setattr(torch, "empty", counted)
    pour(header, buckets, target, plan)
    assert max(made, default=0) <= 4096
    assert torch.equal(into["large"], state["large"])


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda buckets: [(s, b + 1 if s == 256 else b) for s, b in buckets], DigestError),
        (lambda buckets: buckets[:-1], WireError),
        (lambda buckets: buckets[:2] + buckets[3:], WireError),
        (lambda buckets: [*buckets, (buckets[-1][0] + 64, torch.zeros(64, dtype=torch.uint8))], WireError),
        (lambda buckets: [buckets[1], buckets[0], *buckets[2:]], WireError),
    ],
    ids=["damaged", "cut off", "a gap", "too much", "out of order"],
)
def test_other_bytes_are_found_out(spoil: Any, error: type[Exception]) -> None:
    header, memory = packed(STATE)
    target = make_target(zeros(STATE))
    plan = StreamPlan(target.admit(header), None)
    buckets = [(start, part.clone()) for start, part in cut(memory, 64)]
    with pytest.raises(error):
        pour(header, spoil(buckets), target, plan)


def test_a_payload_that_does_not_fit_is_refused_before_its_first_byte() -> None:
    header, _ = packed(STATE)
    into = zeros(STATE) | {"a": torch.zeros(15, 20)}
    with pytest.raises(PreflightError, match="a"):
        make_target(into).admit(header)


# -- the receiver ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weightwire.transport, "BUCKET", 4096)


def net(value: float) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 40))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module.eval()


def agree(module: nn.Module, other: nn.Module) -> bool:
    pairs = zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("backend", ["vanilla", "ipc"])
@pytest.mark.usefixtures("small_buckets")
def test_versions_and_subsets_are_poured(backend: str) -> None:
    source, target = net(1.0), net(0.0)
    places = [parameter.data_ptr() for parameter in target.parameters()]
    seen: list[int] = []
    with (
        WeightUpdater(backend, source, digest="on") as updater,
        WeightReceiver(updater.endpoint, target, stream=True, worker="w") as receiver,
    ):
        receiver.on_applied(seen.append)
        for number in range(1, 4):
            updater.push()
            assert receiver.pull() == number
            assert agree(source, target)
            with torch.no_grad():
                source[0].weight.add_(1.0)
        updater.push(select_of(source, "0."), partial=True)
        assert receiver.pull() == 4
        assert torch.equal(source[0].weight, target[0].weight)
        assert seen == [1, 2, 3, 4]
        assert "bucket" in updater.workers["w"].notes["stream"]
        assert updater.wait().receipts["w"].state == "applied"
    assert places == [parameter.data_ptr() for parameter in target.parameters()]


def select_of(module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in module.state_dict().items() if name.startswith(prefix)}


@pytest.mark.usefixtures("small_buckets")
def test_other_bytes_than_were_sent_are_the_same_error_as_without_streaming() -> None:
    source, target = net(1.0), net(0.0)
    with (
        WeightUpdater("vanilla?keep=true", source, digest="on") as updater,
        WeightReceiver(updater.endpoint, target, stream=True, worker="w") as receiver,
    ):
        updater.push()
        (item,) = updater._sender._place.shelf.kept()  # type: ignore[attr-defined]
        item.arena.tensor[7] ^= 1
        with pytest.raises(DigestError, match="unusable until the next full version"):
            receiver.pull()
        assert not receiver.ready
        with pytest.raises(ApplyError, match="digest"):  # it is told as what it is to the trainer: no version acts
            updater.push()
        assert receiver.pull() == 2
        assert agree(source, target)


@pytest.mark.usefixtures("small_buckets")
def test_a_failure_halfway_makes_the_policy_refuse_to_act() -> None:
    source, target = net(1.0), net(0.0)
    x = torch.zeros(2, 40)
    with (
        WeightUpdater("vanilla", source) as updater,
        WeightReceiver(updater.endpoint, target, stream=True, worker="w") as receiver,
    ):
        updater.push()
        assert receiver.pull() == 1
        target(x)
        updater.push()
        receiver._receiver = Failing(receiver._receiver, RuntimeError("the wire broke"))
        with pytest.raises(ApplyError, match="unusable until the next full version"):
            receiver.pull()
        assert not receiver.ready
        assert receiver.version == 0
        with pytest.raises(ApplyError, match=r"mixture.*the wire broke"):
            target(x)
        assert receiver.pull(0.0) is None  # not offered again
        with pytest.raises(ApplyError, match="the wire broke"):
            updater.push(select_of(source, "0."), partial=True)
        updater.push()
        assert receiver.pull() == 4
        assert receiver.ready
        target(x)
        assert agree(source, target)


@pytest.mark.usefixtures("small_buckets")
def test_a_trainer_lost_halfway_is_no_refusal() -> None:
    source, target = net(1.0), net(0.0)
    with (
        WeightUpdater("vanilla", source) as updater,
        WeightReceiver(updater.endpoint, target, stream=True) as receiver,
    ):
        updater.push()
        inner = receiver._receiver
        receiver._receiver = Failing(inner, UpdaterLostError("gone"))
        assert receiver.pull(0.0) is None
        assert not receiver.ready
        with pytest.raises(ApplyError, match="gone"):
            target(torch.zeros(2, 40))
        assert receiver.pull(0.0) == 1  # the same version, again
        target(torch.zeros(2, 40))


class Failing:
    """A backend's receiver whose next delivery breaks off after so many buckets."""

    def __init__(self, inner: Any, error: Exception, after: int = 1) -> None:
        self._inner = inner
        self._after = after
        self._error: Exception | None = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def poll(self, *args: Any) -> Delivery | None:
        delivery: Delivery | None = self._inner.poll(*args)
        if delivery is not None and self._error is not None:
            whole, error = delivery.buckets(), self._error
            self._error = None

            def buckets() -> Iterator[tuple[int, torch.Tensor]]:
                for _ in range(self._after):
                    yield next(iter(whole))
                raise error

            delivery.buckets = buckets  # type: ignore[method-assign]
        return delivery


@pytest.mark.parametrize("error", [UpdaterLostError("gone"), RuntimeError("the wire broke")])
@pytest.mark.usefixtures("small_buckets")
def test_what_breaks_before_the_first_bucket_costs_nothing(error: Exception) -> None:
    source, target = net(1.0), net(0.0)
    with (
        WeightUpdater("vanilla", source) as updater,
        WeightReceiver(updater.endpoint, target, stream=True) as receiver,
    ):
        updater.push()
        receiver.pull()
        updater.push()
        receiver._receiver = Failing(receiver._receiver, error, after=0)
        if isinstance(error, UpdaterLostError):
            assert receiver.pull(0.0) is None
        else:
            with pytest.raises(ApplyError, match="the wire broke"):
                receiver.pull(0.0)
        assert receiver.ready
        assert receiver.version == 1
        target(torch.zeros(2, 40))
        if not isinstance(error, UpdaterLostError):
            with pytest.raises(ApplyError, match="the wire broke"):
                updater.push()


def test_a_version_that_does_not_fit_leaves_the_old_one_acting() -> None:
    target = net(0.0)
    with (
        WeightUpdater("vanilla", net(1.0)) as updater,
        WeightReceiver(updater.endpoint, target, stream=True, select=lambda name: True) as receiver,
    ):
        updater.push()
        receiver.pull()
        updater.push({"0.weight": torch.zeros(3)})
        with pytest.raises(PreflightError):
            receiver.pull()
        assert receiver.ready
        assert receiver.version == 1
        target(torch.zeros(2, 40))
        with pytest.raises(RefusedError):
            updater.push()


@pytest.mark.parametrize(
    "options", [{"stream": True}, {"weights": {}, "group": str}, {"stream": True, "weights": net(0), "apply": "alias"}]
)
def test_what_cannot_be_streamed_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="stream"):
        WeightReceiver("vanilla://x", **options)


def test_pieces_keep_their_layout_objects() -> None:
    layout = Layout.__call__ if False else packed(STATE)[0].layout
    plan = StreamPlan(layout, None)
    assert plan.piece((0, 2)) is plan.piece((0, 2))
