"""A version is applied whole or not at all, once, and whoever pushed it hears what came of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from weightwire.errors import ApplyError, DigestError, PreflightError, RefusedError, WaitTimeout
from weightwire.receiver import WeightReceiver
from weightwire.testing.rig import Rig, interrupted, took
from weightwire.testing.states import brittle, counters, fill, seen, snapshot
from weightwire.testing.suites.base import Cases, requires
from weightwire.transport import Delivery
from weightwire.weights.payload import Payload

__all__ = ["ApplyingCases"]

# Python swallows a KeyboardInterrupt that hits a weakref's or the collector's callback (seen: those of its own WeakSet)
# and pytest tells of it. Any other error there is a fault.
swallowed = pytest.mark.filterwarnings(
    "ignore:(?s).*KeyboardInterrupt:pytest.PytestUnraisableExceptionWarning",
    # Interrupted between the making of a socket and its keeping: Python closes it, with a warning.
    "ignore:unclosed:ResourceWarning",
)


class ApplyingCases(Cases):
    @pytest.mark.parametrize("apply", ["copy", "alias"])
    def test_target_raises_at_each_tensor(self, rig: Rig, apply: str) -> None:
        if apply == "alias" and apply not in rig.capabilities:
            pytest.skip(f"{self.endpoint} does not claim alias")
        updater, worker = rig.updater(), rig.worker("w", brittle, 0, apply=apply)
        updater.wait_for_workers(1)
        updater.push(counters(1))
        good = worker.pull(10.0)
        for name in counters(0):
            worker.do("arm", name)
            pulling = worker.start("pull", 10.0)
            with pytest.raises(ApplyError) as caught:
                updater.push(counters(updater.version + 1), wait="applied")
            with pytest.raises(ApplyError, match=name):
                pulling.result()
            error = caught.value
            assert (error.worker, error.tensor) == ("w", name)
            assert error.phase == "commit"
            assert "'w'" in str(error)
            assert name in str(error)
            assert error.report is not None
            assert error.report.receipts["w"].state == "failed"
            look = worker.look()
            assert (look.version, look.ready, worker.seen()) == (good, True, good)
            worker.do("arm", None)
            following = worker.follow(updater.version + 1)
            good = updater.push(counters(updater.version + 1), wait="applied").version
            following.result()
            assert worker.seen() == good

    def test_callable_target_raises(self, rig: Rig) -> None:
        taken: dict[str, Tensor] = {}
        failing = [False]

        def load(state: dict[str, Tensor]) -> None:
            for name, tensor in state.items():
                if failing[0] and name == "layer3.weight":
                    raise RuntimeError("this engine is full")
                taken[name] = tensor.clone()

        updater, receiver = rig.updater(), rig.receiver(load, worker="engine")
        updater.push(counters(1))
        assert receiver.pull(10.0) == 1
        failing[0] = True
        updater.push(counters(2))
        with pytest.raises(ApplyError, match="this engine is full"):
            receiver.pull(10.0)
        assert not receiver.ready, "the engine may hold a mix"
        with pytest.raises(ApplyError, match="engine"):
            updater.wait(2, timeout=5.0)
        failing[0] = False
        assert receiver.pull(0.0) is None
        assert not receiver.ready
        updater.push(counters(3))
        assert (receiver.pull(10.0), receiver.ready) == (3, True)
        assert seen(taken) == 3

    @pytest.mark.parametrize("way", ["copy", "owned", "function", "alias"])
    def test_what_a_worker_writes_reaches_no_other(self, rig: Rig, way: str) -> None:
        """Into what it copied, was handed, or owns. Aliased: into buffers, which layers write to themselves; parameters
        may be memory that is to be read only."""
        if way == "alias" and way not in rig.capabilities:
            pytest.skip(f"{self.endpoint} does not claim alias")
        sent = {name: torch.full_like(tensor, 3) for name, tensor in _norm().state_dict().items()}
        handed: dict[str, Tensor] = {}
        targets: dict[str, Any] = {"function": handed.update, "owned": None}
        updater = rig.updater(sent)
        apply = "alias" if way == "alias" else "copy"
        writer = rig.receiver(targets.get(way, _norm()), worker="writer", apply=apply)
        others = [rig.receiver(_norm(), worker="other", apply=apply), rig.receiver(worker="another")]
        updater.push()
        assert writer.pull(10.0) == 1
        held = handed or dict(writer.weights if way == "owned" else writer.weights.named_buffers())
        for tensor in held.values():
            tensor.fill_(-1)
        if "late_join" in rig.capabilities:
            others.append(rig.receiver(_norm(), worker="late"))
        for other in others:
            assert other.pull(10.0) == 1
            weights = other.weights if other.worker == "another" else other.weights.state_dict()
            assert snapshot(weights) == snapshot(sent)
        assert all(tensor.eq(-1).all() for tensor in held.values())

    @pytest.mark.parametrize("apply", ["copy", "alias"])
    def test_reader_never_sees_a_mix(self, rig: Rig, apply: str) -> None:
        if apply == "alias" and apply not in rig.capabilities:
            pytest.skip(f"{self.endpoint} does not claim alias")
        updater = rig.updater()
        following = [rig.worker(f"w{i}", counters, 0, apply=apply).follow(1000, timeout=60) for i in range(2)]
        state = counters(0)
        for version in range(1, 1001):
            fill(state, version)
            updater.push(state, wait="none")
        for reader in following:
            followed = reader.result(70)
            assert followed.versions[-1] == 1000
            assert not followed.errors

    def test_hooks_run_once_after_all_tensors(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        worker.do("hook")
        for version in range(1, 6):
            updater.push(counters(version))
            worker.pull(10.0)
            worker.pull(0.0)
        assert worker.do("hooks") == [(version, version) for version in range(1, 6)]

    def test_failing_hook_is_reported(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        updater.wait_for_workers(1)
        worker.do("hook", fails=True)
        pulling = worker.start("pull", 10.0)
        with pytest.raises(ApplyError, match="a hook that fails") as caught:
            updater.push(counters(1), wait="applied")
        with pytest.raises(ApplyError, match="a hook that fails"):
            pulling.result()
        assert (caught.value.worker, caught.value.phase) == ("w", "after-hooks")
        assert worker.look().version == worker.seen() == 1, "the version is applied all the same"

    def test_busy_worker_takes_the_newest_only(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        updater.wait_for_workers(1)
        worker.do("hook")
        for version in range(1, 31):
            updater.push(counters(version))
        assert worker.pull(10.0) == 30
        assert worker.pull(0.0) is None
        assert worker.do("hooks") == [(30, 30)]

    def test_pushing_twice_without_change(self, rig: Rig) -> None:
        state = counters(5)
        updater, worker = rig.updater(state), rig.worker("w", counters, 0)
        for version in (1, 2):
            assert updater.push().version == version
            assert worker.pull(10.0) == version
            assert worker.seen() == 5

    def test_pull_before_there_is_a_trainer(self, rig: Rig) -> None:
        receiver = rig.receiver(counters(0), worker="early")
        with took(at_most=1.0):
            assert receiver.pull(0.0) is None
        with took(at_most=3.0), pytest.raises(WaitTimeout) as caught:
            receiver.pull(0.3)
        assert rig.endpoint in str(caught.value)
        assert not receiver.ready
        impatient = rig.receiver(counters(0), worker="impatient", timeout=0.3)
        with took(at_most=3.0), pytest.raises(WaitTimeout, match=r"0\.3"):
            impatient.pull()
        updater = rig.updater()
        updater.push(counters(1))
        assert receiver.pull() == 1
        assert impatient.pull(10.0) == 1

    @pytest.mark.parametrize("first", ["updater", "receiver"])
    def test_constructors_wait_for_nobody(self, rig: Rig, first: str) -> None:
        with took(at_most=2.0):
            if first == "updater":
                updater = rig.updater()
                receiver = rig.receiver(counters(0))
            else:
                receiver = rig.receiver(counters(0))
                updater = rig.updater()
        updater.push(counters(1))
        assert receiver.pull() == 1

    def test_pull_when_there_is_nothing_new(self, rig: Rig) -> None:
        updater, receiver = rig.updater(), rig.receiver(counters(0))
        updater.push(counters(1))
        assert receiver.pull() == 1
        with took(at_most=1.0):
            assert all(receiver.pull() is None for _ in range(1000)), "once ready, pull() does not wait"
        with took(at_most=2.0):
            assert receiver.pull(0.2) is None

    def test_what_does_not_fit_is_refused_whole(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        updater.wait_for_workers(1)
        updater.push(counters(1))
        worker.pull(10.0)
        wrong = counters(2)
        wrong["layer1.weight"] = torch.zeros(3)
        wrong["layer2.weight"] = torch.zeros(512, dtype=torch.float16)
        del wrong["layer3.weight"]
        wrong["extra.weight"] = torch.zeros(2)
        with pytest.raises(RefusedError) as caught:
            updater.push(wrong)
        for said in ("'w'", "layer1.weight", "layer2.weight", "layer3.weight", "extra.weight"):
            assert said in str(caught.value)
        assert worker.pull(0.0) is None
        assert worker.seen() == 1
        report = updater.push(counters(2))
        assert worker.pull(10.0) == report.version

    def test_one_of_two_refuses(self, rig: Rig) -> None:
        updater = rig.updater()
        good, bad = rig.worker("good", counters, 0), rig.worker("bad", counters, 0, 3)
        updater.wait_for_workers(2)
        following = good.follow(1)
        refused = bad.start("pull", 10.0)
        with pytest.raises(RefusedError) as caught:
            updater.push(counters(1), wait="applied")
        assert following.result().versions == [1]
        with pytest.raises(PreflightError):
            refused.result()
        assert caught.value.report is not None
        states = {name: receipt.state for name, receipt in caught.value.report.receipts.items()}
        assert states == {"good": "applied", "bad": "refused"}
        assert not bad.look().ready
        assert bad.seen() == 0

    def test_digest_catches_a_flipped_bit(self, rig: Rig) -> None:
        updater, receiver = rig.updater(digest="on"), rig.receiver(counters(0), worker="w")
        report = updater.push(counters(1))
        assert receiver.pull(10.0) == 1
        updater.push(counters(2))
        with pytest.MonkeyPatch.context() as patch:
            _corrupt(receiver, patch)
            with pytest.raises(DigestError):
                receiver.pull(10.0)
        assert (receiver.version, seen(receiver.weights)) == (1, 1)
        with pytest.raises(RefusedError, match="'w'"):
            updater.wait(2, timeout=10.0)
        report = updater.push(counters(3))
        assert receiver.pull(10.0) == 3
        report = updater.wait(timeout=10.0)
        assert report.receipts["w"].digest, "the receipt says what was applied"

    def test_source_fails_while_it_is_read(self, rig: Rig) -> None:
        """A shard that cannot be gathered, a device that is gone: the trainer hears of it, the workers do not."""
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        updater.wait_for_workers(1)
        updater.push(counters(1))
        assert worker.pull(10.0) == 1
        with pytest.MonkeyPatch.context() as patch:
            for way in ("pack", "parts", "tensors", "entries"):
                patch.setattr(Payload, way, _unreadable)
            with pytest.raises(ZeroDivisionError, match="cannot be read"):
                updater.push(counters(2), timeout=3.0)
        assert worker.pull(0.0) is None
        assert worker.seen() == 1
        report = updater.push(counters(updater.version + 1))
        assert worker.pull(10.0) == worker.seen() == report.version

    def test_receipts_and_metadata(self, rig: Rig) -> None:
        updater, worker = rig.updater(), rig.worker("w", counters, 0)
        updater.wait_for_workers(1)
        following = worker.follow(1)
        report = updater.push(counters(1), wait="applied", metadata={"step": 7, "tags": ["a", None]})
        following.result()
        state = counters(1)
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        receipt = report.receipts["w"]
        assert (receipt.version, receipt.state, receipt.error) == (1, "applied", "")
        assert (report.tensors, report.nbytes) == (receipt.tensors, receipt.nbytes) == (len(state), nbytes)
        assert (report.version, report.run, report.lost) == (1, updater.run, ())
        assert {"extract", "encode", "stage", "wait"} <= set(report.seconds)
        assert {"verify", "commit"} <= set(receipt.seconds)
        look = worker.look()
        assert (look.version, look.run, look.metadata) == (1, updater.run, {"step": 7, "tags": ["a", None]})
        assert updater.workers["w"].version == 1

    def test_a_receiver_belongs_to_one_thread(self, rig: Rig) -> None:
        updater, receiver = rig.updater(), rig.receiver(counters(0))
        updater.push(counters(1))
        receiver.pull(10.0)
        caught: list[BaseException] = []

        def pull() -> None:
            try:
                receiver.pull(0.0)
            except Exception as exc:
                caught.append(exc)

        thread = threading.Thread(target=pull)
        thread.start()
        thread.join(10)
        assert len(caught) == 1
        assert "thread" in str(caught[0])

    @requires("inline")
    def test_inline_applies_within_push(self, rig: Rig) -> None:
        policy = counters(0)
        updater, receiver = rig.updater(), rig.receiver(policy, inline=True, worker="here")
        report = updater.push(counters(1), wait="applied")
        assert (seen(policy), receiver.version, report.receipts["here"].state) == (1, 1, "applied")
        updater.push(counters(2))
        assert (seen(policy), receiver.version) == (2, 2)
        with pytest.raises(RefusedError):
            updater.push({"layer0.weight": torch.zeros(3)})
        assert (seen(policy), receiver.version) == (2, 2)

    @swallowed
    def test_interrupted_pull_leaves_a_whole_version(self, rig: Rig) -> None:
        policy = counters(0, 400, 64)
        updater, receiver = rig.updater(), rig.receiver(policy)
        state = counters(0, 400, 64)
        hits = 0
        for round_ in range(60):
            fill(state, updater.version + 1)
            updater.push(state, wait="none")
            hits += interrupted(lambda: receiver.pull(0.05), after=round_ % 20 * 0.0001)
            assert seen(policy) == receiver.version
        assert hits, "no pull was hit"
        fill(state, updater.version + 1)
        updater.push(state)
        assert receiver.pull(10.0) == updater.version == seen(policy)

    @swallowed
    def test_interrupted_wait_for_the_first_version(self, rig: Rig) -> None:
        receiver = rig.receiver(counters(0))
        with took(at_most=3.0):
            assert interrupted(receiver.pull, after=0.1)
        updater = rig.updater()
        with took(at_most=3.0):
            assert interrupted(receiver.pull, after=0.1)
        updater.push(counters(1))
        assert receiver.pull() == 1

    @swallowed
    def test_interrupted_push_leaves_a_whole_version(self, rig: Rig) -> None:
        policy = counters(0, 400, 64)
        updater, receiver = rig.updater(), rig.receiver(policy)
        hits = 0
        for round_ in range(60):
            state = counters(updater.version + 1, 400, 64)
            hits += interrupted(lambda sent=state: updater.push(sent, wait="none"), after=round_ % 20 * 0.0002)  # type: ignore[misc]
            receiver.pull(0.0)
            assert not receiver.ready or seen(policy) == receiver.version
        assert hits, "no push was hit"
        report = updater.push(counters(updater.version + 1, 400, 64))
        assert receiver.pull(10.0) == report.version == seen(policy)

    @swallowed
    def test_subsets_after_an_interrupted_push_lie_on_what_the_worker_has(self, rig: Rig) -> None:
        """Or else they are refused, before anything moves, with the word to push a full version."""
        policy = counters(0, 400, 64)
        updater, receiver = rig.updater(), rig.receiver(policy)
        first, *others = policy
        hits = 0
        for round_ in range(40):
            full = counters(updater.version + 1, 400, 64)
            hits += interrupted(lambda sent=full: updater.push(sent, wait="none"), after=round_ % 20 * 0.0002)  # type: ignore[misc]
            number, refused = updater.version + 1, ""
            try:
                updater.push({first: counters(number, 1, 64)[first]}, partial=True)
            except PreflightError as exc:
                refused = str(exc)
            if refused:
                assert "full" in refused
                assert updater.version == number - 1
                receiver.pull(0.0)
                assert not receiver.ready or seen(policy) == receiver.version
                continue
            assert receiver.pull(10.0) == number == int(policy[first][0])
            assert 0 < seen({name: policy[name] for name in others}) < number
            updater.push(counters(number + 1, 400, 64))
            assert receiver.pull(10.0) == number + 1 == seen(policy)
        assert hits, "no push was hit"

    @swallowed
    def test_interrupted_wait_for_workers(self, rig: Rig) -> None:
        updater, receiver = rig.updater(), rig.receiver(counters(0), worker="w")
        updater.wait_for_workers(1)

        def push() -> None:
            updater.push(counters(1), wait="applied")

        with took(at_most=3.0):
            assert interrupted(push, after=0.2)
        with took(at_most=3.0):
            assert interrupted(updater.wait, after=0.2)
        assert receiver.pull(10.0) == updater.version
        assert updater.wait(timeout=10.0).receipts["w"].state == "applied"
        assert snapshot(receiver.weights) == snapshot(counters(1))


def _norm() -> torch.nn.Module:
    """Frozen, and large enough that no backend takes it for small."""
    return torch.nn.BatchNorm1d(2**18).eval().requires_grad_(False)


def _unreadable(*_: Any) -> Any:
    raise ZeroDivisionError("this shard cannot be read")


def _corrupt(receiver: WeightReceiver, patch: pytest.MonkeyPatch) -> None:
    """Flip one bit of whatever the backend delivers from now on."""
    backend = receiver._receiver
    poll = backend.poll

    def flipped(*args: Any) -> Delivery | None:
        delivery = poll(*args)
        if delivery is None:
            return None
        blocks = [block.clone() for block in delivery.tensors()]
        blocks[-1][-1] ^= 1
        return Delivery(delivery.header, blocks=blocks, writable=True, release=delivery.release)

    patch.setattr(backend, "poll", flipped)
