"""What is sent comes out bit for bit, whatever its dtype, shape, strides and ties."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from weightwire.errors import WaitTimeout
from weightwire.report import PushReport
from weightwire.testing import strategies
from weightwire.testing.rig import Rig, took
from weightwire.testing.states import (
    ARRANGEMENTS,
    Tied,
    arrange,
    counters,
    makeable,
    random_bits,
    snapshot,
    special_values,
    tie_groups,
)
from weightwire.testing.suites.base import Cases, requires
from weightwire.weights.dtypes import dtype_name

__all__ = ["TensorCases"]


def carry(rig: Rig, state: Mapping[str, Tensor]) -> PushReport:
    """Push a state to a worker and compare what it then has."""
    updater = rig.updater()
    worker = rig.worker("w")
    report = updater.push(state)
    assert worker.pull(10.0) == report.version == 1
    assert worker.do("contents") == snapshot(state)
    assert worker.do("ties") == tie_groups(state)
    return report


class TensorCases(Cases):
    @pytest.mark.parametrize("change", ["in place", "freed", "resized", "replaced"])
    def test_trainer_changes_tensors_after_push(self, rig: Rig, change: str) -> None:
        state = {"a": torch.arange(5000.0), "b": torch.arange(7)}
        sent = snapshot({name: tensor.clone() for name, tensor in state.items()})  # NumPy's views pin a storage's size
        updater, worker = rig.updater(), rig.worker("w")
        updater.push(state)
        if change == "in place":
            state["a"].fill_(-1)
            state["b"].zero_()
        elif change == "freed":
            state.clear()
            torch.full((5000,), -1.0)  # likely to be given the memory that was just freed
        elif change == "resized":
            state["a"].untyped_storage().resize_(0)
            state["b"].resize_(100).fill_(-1)
        else:
            state["a"].data = torch.zeros(5000)
        worker.pull(10.0)
        assert worker.do("contents") == sent

    @requires("alias")
    def test_kept_views_are_not_overwritten(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("keeper", apply="alias")
        kept = []
        for _ in range(24):
            state = counters(updater.version + 1)
            blocked = ""
            with took(at_most=5.0):
                try:
                    updater.push(state, timeout=1.0)
                except WaitTimeout as exc:
                    blocked = str(exc)
            if blocked:
                assert "keeper" in blocked, "the error says whom it waits for"
                break
            worker.pull(10.0)
            worker.do("keep")
            kept.append(snapshot(state))
        assert worker.do("kept_contents") == kept
        assert len(kept) >= 2
        worker.do("drop")
        report = updater.push(counters(updater.version + 1))
        assert worker.pull(10.0) == report.version
        assert worker.seen() == report.version

    @requires("alias")
    def test_views_outlive_the_receiver(self, rig: Rig) -> None:
        updater, receiver = rig.updater(), rig.receiver(apply="alias")
        updater.push(counters(1))
        receiver.pull(10.0)
        views = dict(receiver.weights)
        receiver.close()
        for version in range(2, 12):
            updater.push(counters(version))
        updater.close()
        del receiver, updater
        assert snapshot(views) == snapshot(counters(1))

    @pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 8), (8, 0), (3, 5), (2, 3, 4, 5), (1, 1, 1, 7)], ids=str)
    def test_shapes_and_strides(self, rig: Rig, shape: tuple[int, ...]) -> None:
        carry(
            rig, {f"{kind}.{d}": arrange(d, shape, kind) for kind in ARRANGEMENTS for d in ("float32", "int16", "bool")}
        )

    @pytest.mark.parametrize("small", ["bool", "uint8", "float8_e5m2"])
    def test_odd_size_before_a_wider_dtype(self, rig: Rig, small: str) -> None:
        carry(
            rig,
            {
                "odd": random_bits(small, (13,)),
                "wide": random_bits("float64", (7,)),
                "odd.again": random_bits(small, (1,)),
                "widest": random_bits("complex128", (3,)),
                "odd.scalar": random_bits(small, ()),
                "int": random_bits("int64", (5,)),
            },
        )

    def test_sizes_around_buckets(self, rig: Rig) -> None:
        state = {
            "huge": random_bits("float32", (3, 1 << 19), 1),  # 6 MiB, a row of 2 MiB
            **{f"tiny{i}": random_bits("int16", (3,), i) for i in range(20)},
            "row": random_bits("uint8", (1, (4 << 20) + 1), 2),
            "last": random_bits("bool", (1,), 3),
        }
        report = carry(rig, state)
        total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        assert report.nbytes <= total + 64 * len(state), "no bucket is padded to its full size"

    def test_all_dtypes_in_one_state(self, rig: Rig) -> None:
        state = {name: random_bits(name, (5,), seed) for seed, name in enumerate(makeable())}
        state["above 2**53"] = torch.tensor([2**53 + 1, -(2**53) - 1])
        carry(rig, state)
        assert dtype_name(state["uint16"].dtype) == "uint16"

    def test_special_values(self, rig: Rig) -> None:
        carry(rig, special_values())

    @pytest.mark.parametrize("apply", ["copy", "alias"])
    def test_special_values_into_tensors_that_are_there(self, rig: Rig, apply: str) -> None:
        if apply == "alias" and apply not in rig.capabilities:
            pytest.skip(f"{self.endpoint} does not claim alias")
        state = special_values()
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        updater, receiver = rig.updater(state), rig.receiver(target, apply=apply)
        updater.push()
        receiver.pull(10.0)
        assert snapshot(target) == snapshot(state)

    def test_tied_tensors_travel_once(self, rig: Rig) -> None:
        big = torch.randn(300, 100)
        state = {"embed": big, "head": big, "rows": big[10:20], "column": big[:, 3], "other": torch.randn(8)}
        report = carry(rig, state)
        assert report.nbytes <= big.numel() * 4 + 8 * 4 + 128

    @pytest.mark.parametrize("apply", ["copy", "alias"])
    def test_tied_modules_stay_tied(self, rig: Rig, apply: str) -> None:
        if apply == "alias" and apply not in rig.capabilities:
            pytest.skip(f"{self.endpoint} does not claim alias")
        policy, copy = Tied(seed=1), Tied(seed=2)
        updater, receiver = rig.updater(policy), rig.receiver(copy, apply=apply)
        for _ in range(3):
            with torch.no_grad():
                policy.embed.weight.mul_(1.5)
            updater.push()
            receiver.pull(10.0)
            assert copy.head.weight is copy.embed.weight
            state = copy.state_dict()
            assert snapshot(state) == snapshot(policy.state_dict())
            assert tie_groups(state) == tie_groups(policy.state_dict())

    def test_a_state_changes_its_layout(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w")
        for state in (counters(1, 2), counters(2, 5), counters(3, 5, 2048), {"only": torch.tensor(4)}):
            updater.push(state)
            worker.pull(10.0)
            assert worker.do("contents") == snapshot(state)

    def test_random_states(self, rig: Rig) -> None:
        updater, receiver = rig.updater(), rig.receiver()

        @settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
        @given(strategies.states())
        def every_state(state: dict[str, Tensor]) -> None:
            report = updater.push(state)
            assert receiver.pull(10.0) == report.version
            assert snapshot(receiver.weights) == snapshot(state)
            assert tie_groups(receiver.weights) == tie_groups(state)

        every_state()
