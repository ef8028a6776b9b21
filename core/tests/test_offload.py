"""Offloading a colocated trainer: bit-exact, by storage, and a clear error for whoever uses what is away."""

from __future__ import annotations

import copy
import errno
import gc
import io
import os
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from xxhash import xxh3_128_digest

import weightwire.offload
from weightwire import OffloadedError, StorageFullError, WeightReceiver, WeightUpdater
from weightwire.offload import Offload
from weightwire.weights.arrays import array_of
from weightwire.weights.guarded import is_guarded, stand_in

WAYS = ("cpu", "disk")


class Net(nn.Module):
    """BatchNorm, a tie, parameters that are views of one flat buffer, a buffer that is not saved."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.first.weight
        flat = torch.randn(2 * width * width)
        self.a = nn.Parameter(flat[: width * width].view(width, width))
        self.b = nn.Parameter(flat[width * width :].view(width, width).t())
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.low = nn.Linear(width, width, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(self.norm(self.first(x))) @ self.a @ self.b
        return self.low(x.bfloat16()).float()


def trained(width: int = 24) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    optimizer.state["extra"] = {"nested": [torch.randn(4), {"deep": (torch.randn(2),)}]}  # type: ignore[index]
    for _ in range(2):
        train(model, optimizer)
    model(torch.randn(8, width)).sum().backward()
    return model, optimizer


def train(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, model.first.in_features)).square().mean().backward()
    optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for state in optimizer.state.values():
        tensors += [leaf for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    return [*tensors, optimizer.param_groups[0]["lr"]]


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [bytes(t.detach().contiguous().view(-1).view(torch.uint8).tolist()) for t in tensors]


def geometry(tensors: list[torch.Tensor]) -> list[Any]:
    """Shapes, strides and offsets, and who shares a storage with whom."""
    first: dict[int, int] = {}
    return [
        (t.shape, t.stride(), t.storage_offset(), first.setdefault(t.untyped_storage()._cdata, n), type(t))
        for n, t in enumerate(tensors)
    ]


@pytest.mark.parametrize("to", WAYS)
def test_all_comes_back_to_the_bit_and_training_goes_on(to: str) -> None:
    model, optimizer = trained()
    twin, its_optimizer = copy.deepcopy((model, optimizer))
    offload = Offload(model, optimizer, to=to)
    for round_ in range(3):
        tensors = everything(model, optimizer)
        ids, before, looks = list(map(id, tensors)), bits(tensors), geometry(tensors)
        sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        report = offload.all()
        assert offload.offloaded == {"params", "grads", "optimizer"}
        assert (report.nbytes, report.storages) == (sum(sizes.values()), len(sizes))
        offload.reload()
        assert offload.offloaded == frozenset()
        tensors = everything(model, optimizer)
        assert (list(map(id, tensors)), bits(tensors), geometry(tensors)) == (ids, before, looks)
        torch.manual_seed(round_)
        train(model, optimizer)
        torch.manual_seed(round_)
        train(twin, its_optimizer)
        assert bits(everything(model, optimizer)) == bits(everything(twin, its_optimizer))


@pytest.mark.parametrize("to", WAYS)
def test_memory_is_given_up_storage_by_storage(to: str) -> None:
    model, optimizer = trained()
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in everything(model, optimizer)}
    sizes = {key: storage.nbytes() for key, storage in storages.items()}
    with Offload(model, optimizer, to=to) as offload:
        assert all(storage.nbytes() == 0 for storage in storages.values())
        assert repr(offload).endswith("params, grads, optimizer away>")
    assert {key: storage.nbytes() for key, storage in storages.items()} == sizes


USES: dict[str, Callable[[Net, torch.optim.Optimizer], object]] = {
    "forward": lambda model, _: model(torch.zeros(8, 24)),
    "a child's forward": lambda model, _: model.first(torch.zeros(8, 24)),
    "state_dict": lambda model, _: model.state_dict(),
    "load_state_dict": lambda model, _: model.load_state_dict(Net().state_dict()),
    "norm": lambda model, _: model.first.weight.norm(),
    "torch.norm": lambda model, _: torch.norm(model.a),
    "arithmetic": lambda model, _: model.b + 1,
    "in place": lambda model, _: model.norm.running_mean.zero_(),  # type: ignore[union-attr, operator]
    "an index": lambda model, _: model.a[0, 0],
    "a view": lambda model, _: model.a.view(-1),
    "detach": lambda model, _: model.a.detach(),
    "data": lambda model, _: model.a.data,
    "numpy": lambda model, _: model.scratch.numpy(),  # type: ignore[union-attr, operator]
    "item": lambda model, _: model.norm.num_batches_tracked.item(),  # type: ignore[union-attr, operator]
    "tolist": lambda model, _: model.scratch.tolist(),  # type: ignore[union-attr, operator]
    "data_ptr": lambda model, _: model.a.data_ptr(),
    "to": lambda model, _: model.to(torch.float64),
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "save": lambda model, _: torch.save(model.a, os.devnull),
    "a foreach": lambda model, _: torch._foreach_norm([model.a, model.b]),
    "out": lambda model, _: torch.add(torch.ones(24, 24), 1, out=model.a),
    "clip_grad_norm_": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "step": lambda _, optimizer: optimizer.step(),
    "zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "the optimizer's state_dict": lambda _, optimizer: optimizer.state_dict(),
    "an optimizer's tensor": lambda model, optimizer: optimizer.state[model.a]["exp_avg"].sum(),
    "a learning rate": lambda _, optimizer: optimizer.param_groups[0]["lr"] * 2,
}


@pytest.mark.parametrize("use", USES)
def test_misuse_is_a_clear_error(use: str) -> None:
    model, optimizer = trained()
    before = bits(everything(model, optimizer))
    offload = Offload(model, optimizer)
    offload.all()
    with pytest.raises(OffloadedError, match=r"offloaded.*reload\(\)"):
        USES[use](model, optimizer)
    offload.reload()
    assert bits(everything(model, optimizer)) == before


def test_looks_are_free() -> None:
    model, optimizer = trained()
    with Offload(model, optimizer):
        weight = model.first.weight
        assert (weight.shape, weight.dtype, weight.device.type, weight.requires_grad) == (
            (24, 24),
            torch.float32,
            "cpu",
            True,
        )
        assert weight.numel() == 576
        assert isinstance(weight, nn.Parameter)
        assert "first.weight" in repr(weight)
        assert "offloaded" in repr(weight)
        assert "Linear" in repr(model)
        assert sum(p.numel() for p in model.parameters()) > 0


@pytest.mark.parametrize("to", WAYS)
@pytest.mark.parametrize("backend", ["vanilla", "ipc"])
def test_pushing_reads_the_backup(to: str, backend: str) -> None:
    model, optimizer = trained()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with WeightUpdater(backend, model) as updater, WeightReceiver(updater.endpoint) as receiver:
        updater.push()
        receiver.pull()
        with Offload(model, optimizer, to=to) as offload:
            for _ in range(2):
                updater.push()
                receiver.pull()
                assert receiver.weights.keys() == expected.keys()
                assert bits(list(receiver.weights.values())) == bits(list(expected.values()))
            assert (receiver.weights["first.weight"].data_ptr()) == receiver.weights["tied.weight"].data_ptr()
            assert offload.offloaded
        train(model, optimizer)
        updater.push()
        receiver.pull()
        assert bits(list(receiver.weights.values())) == bits(list(model.state_dict().values()))


def test_an_offloaded_target_is_refused_by_name() -> None:
    model = Net()
    with Offload(model), pytest.raises(weightwire.PreflightError, match=r"first\.weight.*reload"):
        WeightReceiver("vanilla://x", model)


def test_parts_are_moved_one_by_one_and_calls_are_idempotent() -> None:
    model, optimizer = trained()
    tensors = everything(model, optimizer)
    before = bits(tensors)
    offload = Offload(model, optimizer)
    assert offload.grads().parts == ("grads",)
    assert all(p.grad is None for p in model.parameters())
    assert offload.grads().parts == ()
    with pytest.raises(OffloadedError):
        optimizer.step()
    model.eval()(torch.zeros(2, 24))  # the parameters are there
    assert offload.params().parts == ("params",)
    assert offload.all().parts == ("optimizer",)
    assert offload.all().parts == ()
    assert offload.reload().parts == ("grads", "params", "optimizer")
    assert offload.reload().parts == ()
    assert bits(everything(model, optimizer)) == before
    assert not any(map(is_guarded, tensors))
    optimizer.step()


def test_new_gradients_are_not_overwritten() -> None:
    model, optimizer = trained()
    offload = Offload(model, optimizer)
    offload.grads()
    model(torch.randn(8, 24)).sum().backward()
    with pytest.raises(ValueError, match="new gradients"):
        offload.reload()
    assert offload.offloaded == {"grads"}
    optimizer.zero_grad()
    offload.reload()
    assert model.a.grad is not None


def test_a_storage_that_two_parts_share_moves_once() -> None:
    flat = torch.randn(20)
    model = nn.Module()
    model.weight = nn.Parameter(flat[:10])
    model.weight.grad = flat[10:]
    offload = Offload(model)
    assert offload.grads().nbytes == 80
    with pytest.raises(OffloadedError):
        model.weight.sum()  # its memory went with the gradient's
    assert offload.params().nbytes == 0
    offload.reload()
    assert torch.equal(model.weight, flat[:10])
    assert torch.equal(model.weight.grad, flat[10:])
    assert model.weight.untyped_storage()._cdata == model.weight.grad.untyped_storage()._cdata


def test_a_view_from_outside_is_whole_again() -> None:
    model = nn.Linear(3, 3)
    view = model.weight.data[1]
    values = view.clone()
    with Offload(model):
        pass
    assert torch.equal(view, values)
    assert view.data_ptr() == model.weight[1].data_ptr()


def test_two_offloads_of_one_model_do_not_mix() -> None:
    model = nn.Linear(3, 3)
    with Offload(model), pytest.raises(OffloadedError, match="another Offload"):
        Offload(model).all()
    model(torch.zeros(2, 3))


def test_a_graph_over_what_was_moved_raises() -> None:
    model = Net()
    loss = model(torch.randn(8, 24)).sum()
    with Offload(model):
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_cannot_be_moved_is_named_and_nothing_moves(tmp_path: Path) -> None:
    import numpy as np

    model = Net()
    model.first.bias.data = torch.from_numpy(np.zeros(24, dtype=np.float32))
    model.norm.weight.data.share_memory_()
    with pytest.raises(ValueError, match=r"first\.bias.*NumPy[\s\S]*norm\.weight.*shared") as caught:
        Offload(model).all()
    assert "nothing was" in str(caught.value)
    model.state_dict()
    with pytest.raises(ValueError, match="lazy module"):
        Offload(nn.LazyLinear(3)).all()
    with pytest.raises(ValueError, match="'gpu'"):
        Offload(model, to="gpu")
    with pytest.raises(ValueError, match="pin"):
        Offload(model, to="disk", pin=True)
    with pytest.raises(FileNotFoundError):
        Offload(nn.Linear(2, 2), to="disk", directory=tmp_path / "missing").all()


def test_no_room_on_the_disk_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    before = bits(everything(model, optimizer))
    calls: list[int] = []

    def allocate(fd: int, start: int, size: int) -> None:
        calls.append(size)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(StorageFullError, match="disk"):
        Offload(model, optimizer, to="disk").all()
    assert bits(everything(model, optimizer)) == before


def test_no_memory_to_reload_leaves_it_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    before = bits(everything(model, optimizer))
    offload = Offload(model, optimizer, to="disk")
    offload.all()
    read = weightwire.offload._Disk.read_into
    calls: list[int] = []

    def fail(self: Any, place: int, piece: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise OSError(errno.EIO, "Input/output error")
        read(self, place, piece)

    with monkeypatch.context() as patch:
        patch.setattr(weightwire.offload._Disk, "read_into", fail)
        with pytest.raises(OSError, match="Input/output"):
            offload.reload()
    assert offload.offloaded == {"params", "grads", "optimizer"}
    with pytest.raises(OffloadedError):
        model.first.weight.sum()
    offload.reload()
    assert bits(everything(model, optimizer)) == before


def test_an_interrupt_on_the_way_is_undone_by_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    before = bits(everything(model, optimizer))
    guard = weightwire.offload.guard
    for moment in range(1, 40, 3):
        calls: list[int] = []

        def interrupted(*args: Any, moment: int = moment, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) == moment:
                raise KeyboardInterrupt
            guard(*args)

        offload = Offload(model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(weightwire.offload, "guard", interrupted)
            with suppress(KeyboardInterrupt):
                offload.all()
        offload.reload()
        assert bits(everything(model, optimizer)) == before
        model.eval()(torch.zeros(2, 24))
    assert not any(map(is_guarded, everything(model, optimizer)))


def test_what_was_taken_before_is_refused_while_it_is_away_and_whole_afterwards() -> None:
    model, optimizer = trained()
    state, view, flat = model.state_dict(), model.a.detach()[1:], model.a.data.as_strided((2 * 24 * 24,), (1,), 0)
    expected = bits([*state.values(), view, flat])
    with Offload(model, optimizer):
        for use in (
            lambda: state["norm.weight"].sum(),
            lambda: view.clone(),
            lambda: flat.add_(1),
            lambda: torch.save(state, io.BytesIO()),
            lambda: copy.deepcopy(view),
        ):
            with pytest.raises(OffloadedError, match="a view of"):
                use()
        with WeightUpdater("vanilla", state) as updater, WeightReceiver(updater.endpoint) as receiver:
            updater.push()  # reads the backup
            receiver.pull()
            assert bits([receiver.weights["a"], stand_in(view)]) == bits([stand_in(model.a), stand_in(model.a)[1:]])
    assert bits([*state.values(), view, flat]) == expected
    assert not any(map(is_guarded, [*state.values(), view, flat]))


def test_a_model_that_is_away_cannot_be_pickled() -> None:
    model, optimizer = trained()
    offload = Offload(model, optimizer)
    for part in (offload.grads, offload.params):
        part()
        with pytest.raises(OffloadedError, match=r"offloaded.*reload"):
            pickle.dumps(model)
    offload.reload()
    assert pickle.loads(pickle.dumps(model)).a.equal(model.a)


def test_threads_take_turns() -> None:
    model, _ = trained()
    before = bits(list(model.parameters()))
    offload, failed = Offload(model), []

    def rounds() -> None:
        try:
            for _ in range(5):
                offload.params()
                offload.reload()
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=rounds) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    offload.reload()
    assert bits(list(model.parameters())) == before


def test_an_offload_that_is_forgotten_brings_everything_back() -> None:
    model, optimizer = trained()
    before = bits(everything(model, optimizer))
    offload = Offload(model, optimizer)
    offload.all()
    with pytest.warns(ResourceWarning, match="was forgotten.*keep the object"):
        del offload
    assert bits(everything(model, optimizer)) == before
    model.eval()(torch.zeros(2, 24))


def test_what_is_no_module_or_not_one_optimizer_is_refused() -> None:
    model, optimizer = trained()
    with pytest.raises(TypeError, match="one optimizer, or None"):
        Offload(model, [optimizer, optimizer])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one optimizer, or None"):
        Offload(model, "x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"it is a torch\.nn\.Module"):
        Offload(model.state_dict())  # type: ignore[arg-type]


@pytest.mark.parametrize("to", WAYS)
@pytest.mark.parametrize("keep", [True, False])
def test_backups_are_kept_for_the_next_round_or_let_go(to: str, keep: bool) -> None:
    model, optimizer = trained()
    offload = Offload(model, optimizer, to=to, keep=keep)
    fds = set(os.listdir("/proc/self/fd"))
    made: list[Any] = []
    for _ in range(3):
        offload.all()
        made += [id(moved.backup) for moved in offload._moved.values()]
        backups = [moved.backup for moved in offload._moved.values()]
        offload.reload()
        assert len(offload._spare) == (3 if keep else 0)
        del backups
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(fds) + (3 if keep and to == "disk" else 0)
    if keep:
        assert len(set(made)) == 3


def test_wrapped_modules() -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Offload(compiled), pytest.raises(OffloadedError):
        compiled(torch.zeros(8, 24))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    compiled.eval()(torch.zeros(8, 24))


def test_peaks_are_told_without_touching_the_users_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    now, most = [100], [900]  # bytes on a GPU that is not there
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: now[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: most[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: pytest.fail("they are the user's"))
    watch = weightwire.offload._Watch([torch.device("cuda:0")])
    now[0] = 300
    watch.look()
    now[0] = 50
    assert watch.report((), []).memory["cuda:0"] == (100, 50, 300)
    most[0] = 1200  # so there was more than ever before
    assert watch.report((), []).memory["cuda:0"] == (100, 50, 1200)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("to", WAYS)
def test_fifty_rounds_of_a_gigabyte(to: str, tmp_path: Path) -> None:
    """1 GB of model, gradients and Adam's state; RSS falls by 90 % of what goes to disk, and nothing grows."""
    model, optimizer = trained(4300)
    before = digests(everything(model, optimizer))
    offload = Offload(model, optimizer, to=to, directory=tmp_path if to == "disk" else None)
    resident: list[int] = []
    for _ in range(50):
        report = offload.all()
        host = report.memory["host"]
        assert report.nbytes > 1_000_000_000
        if to == "disk":
            assert host.before - host.after >= 0.9 * report.nbytes
        offload.reload()
        resident.append(weightwire.offload._resident())
    assert digests(everything(model, optimizer)) == before
    assert max(resident[5:]) - resident[4] < 0.05 * report.nbytes


def digests(tensors: list[torch.Tensor]) -> list[bytes]:
    """Of all bytes, without NumPy's pinning the storages."""
    return [xxh3_128_digest(array_of(t.detach().contiguous().view(-1).view(torch.uint8))) for t in tensors]
