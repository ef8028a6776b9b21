"""``stream=True``: versions that are applied bucket by bucket."""

from __future__ import annotations

import pytest
import torch

from weightwire.errors import ApplyError, CapabilityError, RefusedError
from weightwire.testing.rig import Rig
from weightwire.testing.states import Tied, arrange, counters, fill, makeable, snapshot, tie_groups
from weightwire.testing.suites.base import Cases, requires
from weightwire.testing.workers import ProcessWorker

__all__ = ["StreamCases"]

MANY = 1_200_000
"""Elements of each of six tensors: 43 MB, more than a bucket."""


def every_dtype(seed: int) -> dict[str, torch.Tensor]:
    """A tensor of each dtype, a strided one, one without elements."""
    state = {dtype: arrange(dtype, (5, 7), "contiguous", seed) for dtype in makeable()}
    across = torch.arange(seed, seed + 12).reshape(3, 4).t()
    return {**state, "none": torch.zeros(0, 3), "scalar": torch.tensor(float(seed)), "across": across}


class StreamCases(Cases):
    def test_unclaimed_streaming_is_refused(self, rig: Rig) -> None:
        if "stream" in rig.capabilities:
            pytest.skip(f"{self.endpoint} claims stream")
        with pytest.raises(CapabilityError, match="stream"):
            rig.receiver(counters(0), stream=True)

    @requires("stream")
    def test_streamed_beside_whole(self, rig: Rig) -> None:
        """Large versions, one after the other, to one worker that streams and one that does not."""
        state = counters(1, 6, MANY)
        updater = rig.updater(state)
        streaming = rig.worker("streaming", counters, 0, 6, MANY, stream=True)
        whole = rig.worker("whole", counters, 0, 6, MANY)
        updater.wait_for_workers(2)
        for version in (1, 2):
            fill(state, version)
            updater.push()
            assert streaming.pull(10.0) == streaming.seen() == version
            assert whole.pull(10.0) == whole.seen() == version
        assert updater.workers["streaming"].notes["stream"]
        assert "stream" not in updater.workers["whole"].notes

    @requires("stream")
    def test_streamed_bit_for_bit(self, rig: Rig) -> None:
        state = every_dtype(1)
        updater, worker = rig.updater(state), rig.worker("w", every_dtype, 2, stream=True)
        updater.push()
        assert worker.pull(10.0) == 1
        assert worker.do("contents") == snapshot(state)

    @requires("stream")
    def test_streamed_ties(self, rig: Rig) -> None:
        module = Tied()
        updater, worker = rig.updater(module), rig.worker("w", Tied, stream=True)
        updater.push()
        assert worker.pull(10.0) == 1
        assert worker.do("contents") == snapshot(module.state_dict())
        assert worker.do("ties") == tie_groups(module.state_dict())

    @requires("stream", "late_join")
    def test_streamed_subset_on_its_base(self, rig: Rig) -> None:
        updater = rig.updater()
        updater.push(counters(1))
        updater.push({"layer0.weight": torch.full((512,), 2.0)}, partial=True)
        receiver = rig.receiver(state := counters(0), stream=True)
        while receiver.version < 2:
            receiver.pull(10.0)
        assert float(state["layer0.weight"][0]) == 2
        assert int(state["layer1.weight"][0]) == 1

    @requires("stream")
    def test_streamed_misfits_are_refused_whole(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w", counters, 0, stream=True)
        updater.push(counters(1))
        assert worker.pull(10.0) == 1
        with pytest.raises(RefusedError, match=r"layer0\.weight"):
            updater.push(counters(2, 6, 100))
        assert worker.pull(0.0) is None
        assert worker.seen() == 1

    @requires("stream")
    def test_a_stream_that_breaks_leaves_no_usable_policy(self, rig: Rig) -> None:
        """A function that raises at its second bucket: not ready, told, and healed by the next full version."""
        calls: list[int] = []

        def take(tensors: object) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("no more")

        updater, receiver = rig.updater(), rig.receiver(take, stream=True, worker="w")
        updater.push(counters(1, 6, MANY), wait="none")
        with pytest.raises(ApplyError, match="no more"):
            receiver.pull(10.0)
        assert (receiver.ready, receiver.version) == (False, 0)
        with pytest.raises(ApplyError, match="no more"):
            updater.push(counters(2, 6, MANY), wait="none")
        assert receiver.pull(10.0) == 2
        assert receiver.ready

    @requires("stream", "processes")
    def test_a_streaming_worker_that_is_killed_costs_nobody(self, rig: Rig) -> None:
        updater = rig.updater()
        doomed, other = rig.worker("doomed", counters, 0, 6, MANY, stream=True), rig.worker("w", counters, 0, 6, MANY)
        updater.wait_for_workers(2)
        updater.push(counters(1, 6, MANY))
        assert isinstance(doomed, ProcessWorker)
        pulling = doomed.start("pull", 10.0)
        doomed.kill()
        del pulling
        updater.push(counters(2, 6, MANY), on_lost="drop")
        assert other.pull(10.0) == other.seen() == 2
