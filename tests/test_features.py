"""What users of TorchRL's updaters and of RLightning's weight buffer have, and keep.

The tables are in docs/moving.md; each row names the tests that prove it: first one of this file that is named after the
row and shows what it is about, then others that go into it. The last tests of this file hold tables and tests together.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

from weightwire import (
    OffloadedError,
    PushReport,
    WaitTimeout,
    WeightReceiver,
    WeightUpdater,
    hookimpl,
)
from weightwire.collectors.gate import GatedReceiver
from weightwire.offload import Offload
from weightwire.testing import Rig
from weightwire.testing.states import counters, seen
from weightwire.transport import PHASES
from weightwire_ipc.device import Handle

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import docs_features

Opened = Callable[..., Any]


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Ends of this process and workers in others, over ipc."""
    rig = Rig(lambda: f"ipc://features-{uuid.uuid4().hex[:12]}", frozenset({"processes"}))
    try:
        yield rig
    finally:
        rig.close()


@pytest.fixture
def updater_of() -> Iterator[Callable[..., WeightUpdater]]:
    made: list[WeightUpdater] = []

    def make(weights: Any = None, endpoint: str = "vanilla", **options: Any) -> WeightUpdater:
        made.append(WeightUpdater(endpoint, weights, timeout=10.0, **options))
        return made[-1]

    yield make
    for updater in made:
        updater.close()


@pytest.fixture
def receiver_of() -> Iterator[Callable[..., WeightReceiver]]:
    made: list[WeightReceiver] = []

    def make(updater: WeightUpdater, weights: Any = None, **options: Any) -> WeightReceiver:
        made.append(WeightReceiver(updater.endpoint, weights, timeout=10.0, **options))
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()


def devices() -> list[Any]:
    """The CPU, and whatever accelerators torch knows; those that are not here are skipped with a reason."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return ["cpu"] + [
        pytest.param(
            name,
            marks=[
                pytest.mark.skipif(not here, reason=f"there is no {name} device"),
                *([pytest.mark.cuda] if name == "cuda" else []),
            ],
        )
        for name, here in there.items()
    ]


# -- TorchRL's updaters ------------------------------------------------------------------------------------------------


def test_torchrl_one_base_class_to_extend(updater_of: Opened, receiver_of: Opened) -> None:
    """Fetch the weights, map them, list the workers: a callable, `select`, `rename`, `cast`, and `updater.workers`."""
    state = {"actor.w": torch.full((2,), 1.5), "critic.w": torch.zeros(2)}
    fetched: list[int] = []

    def fetch() -> Mapping[str, Tensor]:
        fetched.append(len(fetched))
        return state

    updater = updater_of(fetch, select="actor.*", rename={"actor.": "policy."}, cast=torch.float64)
    target = {"policy.w": torch.zeros(2, dtype=torch.float64)}
    receiver = receiver_of(updater, target, worker="collector-0")
    for version in (1, 2):
        state["actor.w"] += 1
        updater.push()
        assert receiver.pull() == version
    assert fetched == [0, 1]
    assert target["policy.w"].tolist() == [3.5, 3.5]
    assert list(updater.workers) == ["collector-0"]


@pytest.mark.parametrize("device", devices())
def test_torchrl_vanilla_updater(device: str, updater_of: Opened, receiver_of: Opened) -> None:
    """The same process, perhaps another device: a copy, which training does not reach before the next push."""
    trained, acting = nn.Linear(4, 2, device=device), nn.Linear(4, 2)
    updater = updater_of(trained)
    receiver = receiver_of(updater, acting)
    updater.push()
    receiver.pull()
    before = trained.weight.detach().cpu().clone()
    with torch.no_grad():
        trained.weight.zero_()
    assert torch.equal(acting.weight, before)


def test_torchrl_multiprocess_updater(rig: Rig) -> None:
    updater = rig.updater(counters(7))
    workers = [rig.worker(name, counters, 0) for name in ("collector-0", "collector-1")]
    updater.wait_for_workers(2)
    updater.push()
    assert [worker.pull() for worker in workers] == [1, 1]
    assert [worker.seen() for worker in workers] == [7, 7]
    assert updater.wait().receipts["collector-1"].state == "applied"


def test_torchrl_ray_updater(ray_cluster: str, updater_of: Opened) -> None:
    """Any actor class: it makes a receiver from the endpoint's text, and nothing else of it is known."""
    import ray

    class Collector:
        def __init__(self, endpoint: str) -> None:
            self.policy = nn.Linear(4, 2)
            self.receiver = WeightReceiver(endpoint, self.policy, worker="collector-0", timeout=30.0)

        def collect(self) -> tuple[int | None, list[list[float]]]:
            return self.receiver.pull(), self.policy.weight.tolist()

    updater = updater_of(trained := nn.Linear(4, 2), f"ray?address={ray_cluster}")
    actor = ray.remote(num_cpus=0)(Collector).remote(updater.endpoint)
    updater.push()
    assert ray.get(actor.collect.remote(), timeout=60) == (1, trained.weight.tolist())
    assert updater.wait(timeout=30.0).receipts["collector-0"].state == "applied"
    ray.kill(actor)


def test_torchrl_distributed_updater(updater_of: Opened, receiver_of: Opened) -> None:
    updater = updater_of(trained := nn.Linear(4, 2), "nccl://127.0.0.1:0")
    acting = {name: nn.Linear(4, 2) for name in ("collector-0", "collector-1")}
    receivers = [receiver_of(updater, policy, worker=name) for name, policy in acting.items()]
    updater.wait_for_workers(2)
    assert updater.push().receipts["collector-1"].state == "staged"
    assert [receiver.pull() for receiver in receivers] == [1, 1]
    assert all(torch.equal(policy.weight, trained.weight) for policy in acting.values())


def test_torchrl_rpc_updater() -> None:
    """Over torch.distributed.rpc, in a process that is its group, by a plugin that is not installed: refused, for it
    pickles, and taken where the endpoint says so."""
    script = """
        import socket
        import torch
        from torch.distributed import rpc
        from weightwire import CapabilityError, WeightReceiver, WeightUpdater

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
        rpc.init_rpc("trainer", rank=0, world_size=1, rpc_backend_options=options)
        trained, acting = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        try:
            WeightUpdater("import:weightwire_rpc://policy", trained)
        except CapabilityError as exc:
            print("refused:", "allow_pickle" in str(exc))
        endpoint = "import:weightwire_rpc://policy?allow_pickle=true"
        with WeightUpdater(endpoint, trained) as updater, WeightReceiver(updater.endpoint, acting) as receiver:
            updater.push()
            print("pulled:", receiver.pull(), torch.equal(trained.weight, acting.weight))
        rpc.shutdown(graceful=False)
    """
    sources = str(Path(__file__).parents[1] / "examples" / "weightwire-rpc" / "src")
    environment = {**os.environ, "PYTHONPATH": sources, "TP_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert run.stdout == "refused: True\npulled: 1 True\n", run.stderr


@pytest.mark.parametrize("endpoint", ["vanilla", "ipc"])
@pytest.mark.parametrize("device", devices())
def test_torchrl_weights_that_cannot_be_shared_over_a_pipe(
    device: str, endpoint: str, updater_of: Opened, receiver_of: Opened
) -> None:
    """No backend asks that the trainer's memory can be shared: it is read, and neither moved nor handed out."""
    trained = nn.Linear(512, 512, device=device)
    place = trained.weight.data_ptr()
    updater = updater_of(trained, endpoint)
    receiver = receiver_of(updater, apply="alias")
    updater.push()
    receiver.pull()
    assert torch.equal(receiver.weights["weight"], trained.weight.detach().cpu())
    assert trained.weight.data_ptr() == place
    assert device != "cpu" or not trained.weight.is_shared()
    assert receiver.weights["weight"].data_ptr() != place


@pytest.mark.parametrize("device", devices())
def test_torchrl_push_to_some_workers(device: str, updater_of: Opened, receiver_of: Opened) -> None:
    updater = updater_of(trained := nn.Linear(4, 2))
    policies = {"a": nn.Linear(4, 2, device=device), "b": nn.Linear(4, 2)}
    receivers = {name: receiver_of(updater, policy, worker=name) for name, policy in policies.items()}
    before = policies["b"].weight.detach().clone()
    report = updater.push(workers=["a"])
    assert list(report.receipts) == ["a"]
    assert (receivers["a"].pull(), receivers["b"].pull(0.0)) == (1, None)
    assert policies["a"].weight.device.type == device
    assert torch.equal(policies["a"].weight.cpu(), trained.weight)
    assert torch.equal(policies["b"].weight, before)
    assert updater.push().version == 2
    assert [receiver.pull() for receiver in receivers.values()] == [2, 2]


def test_torchrl_post_hooks(updater_of: Opened, receiver_of: Opened) -> None:
    heard: list[str] = []

    class Observer:
        @hookimpl
        def weightwire_after_push(self, report: PushReport) -> None:
            heard.append(f"pushed {report.version}")

    updater = updater_of(counters(1), observers=[Observer()])
    receiver = receiver_of(updater)
    receiver.on_applied(lambda version: heard.append(f"applied {version}"))
    updater.push()
    receiver.pull()
    assert heard == ["pushed 1", "applied 1"]


@pytest.mark.filterwarnings("ignore:::torchrl")
@pytest.mark.filterwarnings("ignore:::tensordict")
def test_torchrl_collectors() -> None:
    """The adapter in the simplest of them; each other kind has a test of its own."""
    pytest.importorskip("torchrl.weight_update", reason="weight sync schemes came with torchrl 0.11")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchRL's own, while it is imported
        from tensordict.nn import TensorDictModule
        from torchrl.collectors import Collector
        from torchrl.envs import GymEnv

        from weightwire.collectors.torchrl import scheme

        def constant(value: float) -> Any:
            linear = nn.Linear(4, 2)
            nn.init.zeros_(linear.weight)
            nn.init.constant_(linear.bias, value)
            return TensorDictModule(nn.Sequential(linear, nn.Softmax(-1)), ["observation"], ["action"])

        policy, seen = constant(0.0), []
        collector = Collector(
            lambda: GymEnv("CartPole-v1", categorical_action_encoding=False),
            policy,
            frames_per_batch=4,
            total_frames=8,
            weight_sync_schemes={"policy": scheme("vanilla", timeout=10)},
        )
        try:
            for batch in collector:
                seen.append(batch["action"][0, 0].item())
                with torch.no_grad():
                    policy.module[0].bias[0] += 1.0
                collector.update_policy_weights_()
        finally:
            collector.shutdown()
    assert seen == pytest.approx([0.5, torch.sigmoid(torch.tensor(1.0)).item()])


def test_torchrl_workers_that_ask_for_weights(updater_of: Opened, receiver_of: Opened) -> None:
    """The worker pulls when it likes and takes the newest; the trainer waits only where it asks to."""
    state = counters(1)
    updater = updater_of(state)
    receiver = receiver_of(updater, policy := counters(0), worker="w")
    for version in (1, 2, 3):
        state.update(counters(version))
        assert updater.push(wait="none").version == version
    with pytest.raises(WaitTimeout, match="'w'"):
        updater.wait(timeout=0.05)
    assert receiver.pull() == seen(policy) == 3
    assert updater.wait(3).receipts["w"].state == "applied"


def test_torchrl_several_models(updater_of: Opened, receiver_of: Opened) -> None:
    """Policy, critic and an observation normaliser as named parts under one version."""
    models = {"policy": nn.Linear(4, 2), "critic": nn.Linear(4, 1), "mean": torch.ones(4)}
    acting = {"policy": nn.Linear(4, 2), "critic": nn.Linear(4, 1), "mean": torch.zeros(4)}
    updater = updater_of(models)
    receiver = receiver_of(updater, acting)
    alone = receiver_of(updater, policy := nn.Linear(4, 2), select="policy.*", rename={"policy.": ""})
    updater.push()
    assert (receiver.pull(), alone.pull()) == (1, 1)
    assert torch.equal(acting["mean"], models["mean"])
    assert torch.equal(acting["critic"].weight, models["critic"].weight)
    assert torch.equal(policy.weight, models["policy"].weight)


def test_torchrl_policy_version_on_collected_data(updater_of: Opened, receiver_of: Opened) -> None:
    state = counters(0)
    updater = updater_of(state)
    receiver = receiver_of(updater, policy := counters(-1))
    batches = []
    for version in (1, 2, 3):
        state.update(counters(version))
        updater.push()
        receiver.pull()
        batches.append({"content": seen(policy), "policy_version": receiver.version})
    assert all(batch["content"] == batch["policy_version"] for batch in batches)


# -- RLightning's weight buffer ----------------------------------------------------------------------------------------


def test_rlightning_strategies(updater_of: Opened, receiver_of: Opened) -> None:
    """None: aliased, without a copy. Double: an old version stays while the next is written. Shared: one for all."""
    state = counters(1)
    updater = updater_of(state)
    one, two = (receiver_of(updater, apply="alias") for _ in range(2))
    updater.push()
    one.pull()
    two.pull()
    held = dict(one.weights)
    assert all(one.weights[name].data_ptr() == two.weights[name].data_ptr() for name in state)
    state.update(counters(2))
    updater.push()
    two.pull()
    assert (seen(held), seen(two.weights)) == (1, 2)


def test_rlightning_staging_and_the_gate(updater_of: Opened) -> None:
    """A daemon thread loads while nobody is inferring, and reopens the gate: no event to set, no signal to miss."""
    updater = updater_of(counters(1))
    policy = counters(0)
    with GatedReceiver(updater.endpoint, policy, worker="w", timeout=10.0) as gate:
        thread = gate._keeper.thread
        updater.push()
        assert gate.wait(1, timeout=10.0) == 1
        with gate.acting():
            updater.push(counters(2))
            with pytest.raises(WaitTimeout, match="act"):
                gate.wait(2, timeout=0.2)  # for this block to end
            assert seen(policy) == 1
        assert gate.wait(2, timeout=10.0) == 2
        assert updater.wait(2).receipts["w"].state == "applied"
        with gate.acting():
            assert seen(policy) == 2
    assert not thread.is_alive()  # joined


def test_rlightning_flat_buffers(updater_of: Opened, receiver_of: Opened) -> None:
    """One flat buffer for all dtypes, each tensor at a multiple of 64 bytes, read in buckets of a bounded size."""
    state = {"flag": torch.tensor([True]), "w": torch.randn(100, dtype=torch.float64), "half": torch.ones(7).bfloat16()}
    updater = updater_of(state)
    receiver = receiver_of(updater, apply="alias")
    updater.push()
    receiver.pull()
    layout = updater._source.extract().layout
    assert all(start % 64 == 0 for start in layout.starts)
    places = [receiver.weights[name].data_ptr() for name in state]
    assert [place - places[0] for place in places] == list(layout.starts[:-1])
    assert all(torch.equal(receiver.weights[name], tensor) for name, tensor in state.items())


def test_rlightning_layer_by_layer_sync(updater_of: Opened, receiver_of: Opened) -> None:
    """Layers come one by one, those that belong together at once; the version counts when all are there."""
    calls: list[list[str]] = []
    names = [f"{layer}.{part}" for layer in range(4) for part in ("weight", "bias")]
    updater = updater_of({name: torch.full((1 << 20,), float(n)) for n, name in enumerate(names)})
    receiver = receiver_of(
        updater, lambda tensors: calls.append(list(tensors)), stream=True, group=lambda name: name.split(".")[0]
    )
    applied: list[int] = []
    receiver.on_applied(applied.append)
    updater.push()
    assert receiver.pull() == 1
    assert len(calls) > 1
    assert [name for call in calls for name in call] == names
    assert all(len({name.split(".")[0] for name in call}) * 2 == len(call) for call in calls)
    assert applied == [1]


def test_rlightning_ipc_handles(receiver_of: Opened) -> None:
    """Device memory is lent by typed fields, nothing pickled: here by a device that is none, as a GPU's is."""
    fields = [field.type for field in msgspec.structs.fields(Handle)]
    assert {int, bytes} <= {getattr(kind, "__origin__", kind) for kind in fields} <= {int, bytes, str}
    updater = WeightUpdater("import:weightwire_ipc.fake?together=true", counters(3), timeout=10.0)
    with updater:
        receiver = receiver_of(updater, policy := counters(0), worker="w")
        for version in (1, 2):
            updater.push(counters(version))
            assert receiver.pull() == seen(policy) == version
        assert "reads the memory of device fake-0" in " ".join(updater.workers["w"].notes.values())


def test_rlightning_local_hand_over(updater_of: Opened, receiver_of: Opened) -> None:
    """Always a copy, unless alias is asked for; and an alias is never of the trainer's own memory."""
    trained = nn.Linear(4, 2)
    updater = updater_of(trained)
    copied, aliased = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False).eval()
    own = copied.weight.data_ptr()
    for policy, apply in ((copied, "copy"), (aliased, "alias")):
        receiver = receiver_of(updater, policy, apply=apply)
        updater.push()
        receiver.pull()
        assert torch.equal(policy.weight, trained.weight)
        assert policy.weight.data_ptr() != trained.weight.data_ptr()
    assert copied.weight.data_ptr() == own
    assert aliased.weight.data_ptr() != own


def test_rlightning_numpy_states(updater_of: Opened, receiver_of: Opened) -> None:
    source = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(2**53 + 1)}
    target = {"w": np.zeros((2, 3), np.float32), "n": np.array(0)}
    updater = updater_of(source)
    receiver = receiver_of(updater, target)
    updater.push()
    receiver.pull()
    assert all(np.array_equal(target[name], source[name]) for name in source)
    assert {name: array.dtype for name, array in target.items()} == {n: a.dtype for n, a in source.items()}


def test_rlightning_nested_states(updater_of: Opened, receiver_of: Opened) -> None:
    """Module, then parameter; any depth."""
    updater = updater_of({"actor": {"0": {"weight": torch.ones(2)}}, "critic": {"weight": torch.zeros(1)}})
    receiver = receiver_of(
        updater, nested := {"actor": {"0": {"weight": torch.zeros(2)}}, "critic.weight": torch.ones(1)}
    )
    updater.push()
    receiver.pull()
    assert nested["actor"]["0"]["weight"].tolist() == [1.0, 1.0]
    assert nested["critic.weight"].tolist() == [0.0]


def test_rlightning_ddp_unwrapping(updater_of: Opened, receiver_of: Opened) -> None:
    """On either side, and other wrappers too: they are seen through."""
    trained, acting = nn.Linear(4, 2), nn.Linear(4, 2)
    updater = updater_of(nn.DataParallel(trained))
    receiver = receiver_of(updater, torch.compile(acting, backend="eager"))
    updater.push()
    receiver.pull()
    assert torch.equal(acting.weight, trained.weight)


def test_rlightning_offload_and_reload(updater_of: Opened, receiver_of: Opened) -> None:
    """Model, gradients and optimizer go, a push still sends them, and everything comes back and trains on."""
    trained, acting = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer = torch.optim.Adam(trained.parameters())
    trained(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = trained.weight.detach().clone()
    updater = updater_of(trained)
    receiver = receiver_of(updater, acting)
    with Offload(trained, optimizer) as offload:
        assert offload.offloaded == {"params", "grads", "optimizer"}
        with pytest.raises(OffloadedError):
            trained(torch.ones(1, 4))
        updater.push()
        receiver.pull()
    assert torch.equal(trained.weight, before)
    assert torch.equal(acting.weight, before)
    assert trained.weight.grad is not None
    optimizer.step()
    assert not torch.equal(trained.weight, before)


def test_rlightning_one_buffer_a_node(ray_cluster: str, updater_of: Opened) -> None:
    """Two actors of a node act with the same memory: that of the node's object store."""
    import ray

    class Actor:
        def __init__(self, endpoint: str) -> None:
            self.receiver = WeightReceiver(endpoint, apply="alias", timeout=30.0)

        def place(self) -> tuple[str, int]:
            """The file under the weights, and where in it they lie."""
            self.receiver.pull()
            address = self.receiver.weights["w"].data_ptr()
            for line in Path("/proc/self/maps").read_text().splitlines():
                span, _, offset, device, inode, *_ = line.split()
                start, stop = (int(end, 16) for end in span.split("-"))
                if start <= address < stop:
                    return f"{device} {inode}", int(offset, 16) + address - start
            raise LookupError("nowhere")

    updater = updater_of({"w": torch.randn(1 << 20)}, f"ray?address={ray_cluster}")
    actors = [ray.remote(num_cpus=0)(Actor).remote(updater.endpoint) for _ in range(2)]
    updater.push()
    one, two = ray.get([actor.place.remote() for actor in actors], timeout=60)
    assert one == two
    assert not one[0].endswith(" 0")  # which is nobody's but the process's own
    for actor in actors:
        ray.kill(actor)


def test_rlightning_a_plan_of_who_sends_to_whom(updater_of: Opened, receiver_of: Opened) -> None:
    """There is none to write: groups are made of who is there, and who is addressed."""
    updater = updater_of(state := counters(1), "nccl://127.0.0.1:0")
    policies = {name: counters(0) for name in ("a", "b")}
    receivers = {name: receiver_of(updater, policy, worker=name) for name, policy in policies.items()}
    updater.wait_for_workers(2)
    updater.push(workers=["b"])
    assert receivers["b"].pull() == 1
    assert (seen(policies["a"]), seen(policies["b"])) == (0, 1)
    receivers["c"] = receiver_of(updater, policies.setdefault("c", counters(0)), worker="c")
    updater.wait_for_workers(3)
    state.update(counters(2))
    updater.push()
    assert [receiver.pull() for receiver in receivers.values()] == [2, 2, 2]
    receivers["b"].close()
    state.update(counters(3))
    assert set(updater.push().receipts) == {"a", "c"}


def test_rlightning_consistency_check(updater_of: Opened, receiver_of: Opened) -> None:
    """Exact, where norms are not: two states of one norm have different digests, and equal ones have the same."""
    state = {"w": torch.tensor([3.0, 4.0])}
    updater = updater_of(state, digest="on")
    receiver = receiver_of(updater, worker="w")

    def digest() -> str:
        updater.push()
        receiver.pull()
        return str(updater.wait().receipts["w"].digest)

    first = digest()
    assert first == digest()
    state["w"] = torch.tensor([4.0, 3.0])
    assert digest() not in ("", first)


def test_rlightning_timings(updater_of: Opened, receiver_of: Opened) -> None:
    updater = updater_of(counters(1))
    receiver = receiver_of(updater, counters(0), worker="w")
    report = updater.push()
    receiver.pull()
    receipt = updater.wait().receipts["w"]
    assert {"extract", "encode", "stage", "wait"} <= set(report.seconds) <= set(PHASES)
    assert {"verify", "commit"} <= set(receipt.seconds) <= set(PHASES)
    assert 0.9 * psutil.Process().memory_info().rss < report.memory["host"] < psutil.virtual_memory().total
    assert "peak host" in str(report)
    assert report.nbytes == receipt.nbytes == sum(tensor.nbytes for tensor in counters(1).values())


def test_rlightning_wait_for_update_done(rig: Rig) -> None:
    updater = rig.updater(counters(5))
    worker = rig.worker("w", counters, 0)
    updater.wait_for_workers(1)
    version = updater.push(wait="staged").version
    with pytest.raises(WaitTimeout, match="not applied"):
        updater.wait(version, state="applied", timeout=0.05)
    assert worker.pull() == 1
    assert updater.wait(version, state="applied", timeout=10.0).receipts["w"].state == "applied"


# -- the tables and the tests ------------------------------------------------------------------------------------------

ROWS = list(docs_features.rows())


def test_there_are_two_tables() -> None:
    tables = [row.table for row in ROWS]
    assert len(set(tables)) == 2
    assert (tables.count("From TorchRL's updaters"), tables.count("From RLightning's weight buffer")) == (13, 15)


def test_nothing_is_open() -> None:
    assert [row.feature for row in ROWS if row.open] == []


@pytest.mark.parametrize("row", ROWS, ids=[row.feature[:40] for row in ROWS])
def test_each_row_names_tests_that_exist(row: docs_features.Row) -> None:
    assert row.tests or row.open, f"{row.feature}: no test is named, and it does not say {docs_features.OPEN!r}"
    for node in row.tests:
        assert "def test_" in docs_features.source_of(node)


@pytest.mark.parametrize("row", ROWS, ids=[row.feature[:40] for row in ROWS])
def test_each_row_has_a_test_that_is_named_after_it(row: docs_features.Row) -> None:
    """Its words are words of the row, in their order."""
    file, _, name = row.tests[0].partition("::")
    assert file == "tests/test_features.py"
    system, *words = name.removeprefix("test_").split("_")
    assert system == ("torchrl" if "TorchRL" in row.table else "rlightning")
    rest = iter(re.findall(r"[a-z]+", row.feature.lower()))
    assert all(word in rest for word in words), f"{name} is not named after {row.feature!r}"


def test_each_test_is_named_by_a_row() -> None:
    named = {node for row in ROWS for node in row.tests}
    mine = [name for name in globals() if name.startswith(("test_torchrl_", "test_rlightning_"))]
    assert mine
    assert {f"tests/test_features.py::{name}" for name in mine} <= named
