"""From users' objects to named tensors: what is found, what is refused, and when a layout is the same one."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from weightwire.errors import PreflightError
from weightwire.testing.states import Tied, bits, snapshot
from weightwire.weights import walk
from weightwire.weights.source import Source, State


def extract(weights: Any, **mapping: Any) -> dict[str, Tensor]:
    state = Source(weights, **mapping).extract()
    return dict(zip(state.layout.names, state.tensors))


def refusal(weights: Any, **mapping: Any) -> str:
    with pytest.raises(PreflightError) as info:
        Source(weights, **mapping).extract()
    return str(info.value)


class Extra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Wrapper(nn.Module):
    """What checkpoint and FSDP wrappers look like from outside."""

    def __init__(self, attribute: str, inner: nn.Module) -> None:
        super().__init__()
        setattr(self, attribute, inner)


def policy() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2, bias=False), nn.Tanh()))


# -- kinds of sources --------------------------------------------------------------------------------------------------


def test_a_module_gives_what_its_state_dict_has() -> None:
    model = policy()
    assert snapshot(extract(model)) == snapshot(model.state_dict())
    assert extract(model)["1.num_batches_tracked"].dtype == torch.int64


def test_tensors_are_the_caller_s_own() -> None:
    model = policy()
    assert extract(model)["0.weight"] is model[0].weight


def test_buffers_that_do_not_persist_stay_at_home() -> None:
    model = nn.Module()
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("own", torch.ones(1), persistent=False)
    model.register_buffer("none", None)
    model.register_parameter("absent", None)
    assert list(extract(model)) == ["kept"]


def test_tied_parameters_come_under_both_names() -> None:
    state = Source(Tied()).extract()
    assert list(state.layout.names) == ["mean", "tail", "embed.weight", "head.weight"]
    assert [entry.block for entry in state.layout.entries] == [0, 0, 1, 1]
    shared = nn.Linear(2, 2)
    assert len(Source(nn.ModuleDict({"a": shared, "b": shared})).extract().layout.sizes) == 2


def test_hooks_of_state_dict_decide_nothing_and_are_run_only_for_a_new_layout() -> None:
    model, runs = nn.Linear(2, 2), []
    model.register_state_dict_post_hook(lambda module, state, *_: runs.append(1) or state.clear())
    source = Source(model)
    for _ in range(3):
        assert list(source.extract().layout.names) == ["weight", "bias"]
    assert len(runs) == 1


def test_extra_state_that_is_a_tensor_is_sent() -> None:
    module = nn.ModuleDict({"x": Extra(torch.tensor([1.0, 2.0]))})
    source = Source(module)
    assert source.extract().layout.names == {"x._extra_state": 0, "x.layer.weight": 1, "x.layer.bias": 2}.keys()
    module["x"].extra = torch.tensor([3.0, 4.0])
    assert torch.equal(source.extract().tensors[0], torch.tensor([3.0, 4.0]))
    module["x"].extra = {"step": 1}
    with pytest.raises(PreflightError, match=r"x\._extra_state"):
        source.extract()


def test_extra_state_that_is_no_tensor_is_refused_unless_left_out() -> None:
    module = nn.ModuleDict({"x": Extra({"step": 1})})
    message = refusal(module)
    assert "x._extra_state" in message
    assert "dict" in message
    assert list(extract(module, select=["!*._extra_state"])) == ["x.layer.weight", "x.layer.bias"]
    module["x"].get_extra_state = lambda: pytest.fail("called")  # what is not selected is not asked for


def test_mappings_nest_and_may_hold_anything_of_the_kind() -> None:
    critic, normaliser = nn.Linear(2, 1), {"mean": np.zeros(3), "count": np.array(7)}
    state = {"actor": {"w": torch.ones(2), "deep": {"b": torch.zeros(())}}, "critic": critic, "norm": normaliser}
    got = extract(state)
    assert list(got) == ["actor.w", "actor.deep.b", "critic.weight", "critic.bias", "norm.mean", "norm.count"]
    assert got["norm.count"].shape == ()
    assert got["norm.mean"].dtype == torch.float64


def test_an_empty_level_is_nothing() -> None:
    assert list(extract({"a": {}, "b": torch.ones(1), "c": nn.Identity()})) == ["b"]


def test_a_function_is_asked_each_time() -> None:
    states = iter([{"w": torch.ones(2)}, nn.Linear(2, 2), {"w": torch.zeros(2)}])
    source = Source(lambda: next(states))
    first, second, third = source.extract(), source.extract(), source.extract()
    assert list(second.layout.names) == ["weight", "bias"]
    assert first.layout is third.layout
    assert third.tensors[0].tolist() == [0.0, 0.0]


def test_a_function_must_return_weights() -> None:
    assert "function" in refusal(lambda: dict)
    assert "NoneType" in refusal(lambda: None)


@pytest.mark.parametrize("weights", [torch.ones(1), np.ones(1), [torch.ones(1)], 3, None])
def test_what_is_no_state_is_refused(weights: Any) -> None:
    assert type(weights).__name__ in refusal(weights)


def test_other_weights_may_be_read_with_the_same_options() -> None:
    source = Source(policy(), select="0.*", rename={"0.": "first."})
    other = nn.Sequential(nn.Linear(1, 1))
    own = source.extract()
    assert list(source.extract(other).layout.names) == ["first.weight", "first.bias"]
    assert source.extract().layout is own.layout


class TestTensorDict:
    @pytest.fixture(autouse=True)
    def _import(self) -> None:
        self.td = pytest.importorskip("tensordict")

    def test_nested_and_locked(self) -> None:
        td = self.td.TensorDict(a=torch.ones(2), b=self.td.TensorDict(c=torch.zeros(3), d={"e": torch.ones(())}))
        for state in (td, td.lock_(), {"x": td}):
            assert [name.removeprefix("x.") for name in extract(state)] == ["a", "b.c", "b.d.e"]
        assert extract(td)["b.c"] is td["b", "c"]

    def test_params_and_modules_with_params(self) -> None:
        params = self.td.TensorDictParams(self.td.TensorDict(a=torch.ones(2), b=self.td.TensorDict(c=torch.zeros(3))))
        module = nn.ModuleDict({"p": params})
        assert sorted(extract(params)) == ["a", "b.c"]
        assert snapshot(extract(module)) == snapshot(module.state_dict())

    def test_batched_stacks_are_stacked(self) -> None:
        one = self.td.TensorDict(a=torch.ones(2))
        assert extract(self.td.lazy_stack([one, one]))["a"].shape == (2, 2)

    def test_what_is_no_tensor_is_refused(self) -> None:
        assert "label" in refusal(self.td.TensorDict(a=torch.ones(2), label="text"))


INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


class TestNumpy:
    @pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "complex128", "complex64", "bool", *INTEGERS])
    def test_dtypes_are_kept_and_memory_is_shared(self, dtype: str) -> None:
        array = np.arange(6).reshape(2, 3).astype(dtype)
        got = extract({"x": array})["x"]
        assert str(got.dtype) == f"torch.{dtype}"
        assert got.data_ptr() == array.ctypes.data
        assert got.numpy().tobytes() == array.tobytes()

    def test_any_strides(self) -> None:
        base = np.arange(24.0).reshape(4, 6)
        records = np.zeros(5, dtype=[("a", "i1"), ("b", "f4")])
        records["b"] = np.arange(5)
        arrays = {
            "t": base.T,
            "s": base[::2, 1::2],
            "back": base[::-1, ::-2],
            "field": records["b"],
            "scalar": base[0, 0:1],
        }
        for name, got in extract(arrays).items():
            assert np.array_equal(got.numpy(), arrays[name])

    def test_read_only_arrays_are_read(self) -> None:
        array = np.arange(4.0)
        array.setflags(write=False)
        got = extract({"x": array, "y": np.broadcast_to(array, (3, 4)), "z": np.frombuffer(b"\1\2", np.uint8)})
        assert got["x"].data_ptr() == array.ctypes.data
        assert got["y"].shape == (3, 4)
        assert not array.flags.writeable

    def test_new_values_in_the_same_array_are_seen(self) -> None:
        state = {"x": np.zeros(3), "r": np.zeros(3)[::-1]}
        source = Source(state)
        layout = source.extract().layout
        state["x"][:], state["r"][:] = 1, 2
        again = source.extract()
        assert [t.tolist() for t in again.tensors] == [[1.0] * 3, [2.0] * 3]
        assert again.layout is layout

    def test_bfloat16_as_ml_dtypes_makes_it(self) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        array = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16).T
        got = extract({"x": array, "u": np.arange(3, dtype=np.uint16)})
        assert got["x"].dtype == torch.bfloat16
        assert got["x"].float().tolist() == [[0, 3], [1, 4], [2, 5]]
        assert got["u"].dtype == torch.uint16

    @pytest.mark.parametrize(
        ("array", "word"),
        [
            (np.arange(3, dtype=">f4"), "byte order"),
            (np.array([object()]), "object"),
            (np.array(["a"]), "U1"),
            (np.zeros(2, dtype=[("a", "f4")]), "dtype"),
            (np.zeros(2, dtype="M8[s]"), "datetime64"),
            (np.ma.masked_array([1.0], mask=[True]), "mask"),
        ],
    )
    def test_what_torch_has_no_dtype_for_is_refused(self, array: Any, word: str) -> None:
        message = refusal({"fine": torch.ones(1), "odd": array})
        assert "odd" in message
        assert "fine" not in message
        assert word in message


@pytest.fixture
def mesh(tmp_path: Any) -> Iterator[Any]:
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh

    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_dtensors_are_sent_whole(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from weightwire.transport import Version
    from weightwire.weights.payload import Payload

    full = {"a": torch.randn(6, 4), "b": torch.randn(3), "plain": torch.randn(2)}
    state: dict[str, Any] = {
        "a": distribute_tensor(full["a"], mesh, [Shard(0)]),
        "b": nn.Parameter(distribute_tensor(full["b"], mesh, [Replicate()])),
        "plain": full["plain"],
    }
    state["tied"], full["tied"] = state["a"], full["a"]
    source = Source(state)
    extracted = source.extract()
    assert [entry.block for entry in extracted.layout.entries] == [0, 1, 2, 0]
    for size in (0, 64):
        payload = Payload(source.extract(), stamp=Version(1, 1))
        out = torch.zeros(payload.nbytes, dtype=torch.uint8)
        for start, stop in payload.buckets(size) if size else [(0, payload.nbytes)]:
            payload.pack(out[start:stop], start, stop)
        got = dict(zip(payload.layout.names, payload.layout.views(payload.layout.slice(out))))
        assert snapshot(got) == snapshot(full)
        assert snapshot(dict(zip(payload.layout.names, payload.entries()))) == snapshot(full)
        blocks = [block.numpy().tobytes() for block in payload.tensors()]
        assert blocks == [full[name].numpy().tobytes() for name in ("a", "b", "plain")]
    assert source.extract().layout is extracted.layout
    state["a"] = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
    assert source.extract().layout.entries[0].shape == (8, 4)


# -- names -------------------------------------------------------------------------------------------------------------


def test_wrappers_are_seen_through() -> None:
    inner = policy()
    plain = list(extract(inner))
    compiled = Wrapper("_orig_mod", Wrapper("_fsdp_wrapped_module", Wrapper("_checkpoint_wrapped_module", inner)))
    assert list(extract(compiled)) == plain
    assert list(extract(nn.DataParallel(compiled))) == plain
    assert list(extract({"actor": nn.DataParallel(inner)})) == [f"actor.{name}" for name in plain]
    assert list(extract(Wrapper("module", inner))) == [f"module.{name}" for name in plain]  # a name of the user's


def test_distributed_data_parallel_is_seen_through(mesh: Any) -> None:
    model = nn.parallel.DistributedDataParallel(policy())
    assert list(extract(model)) == list(extract(model.module))


def test_the_same_name_twice_is_refused() -> None:
    message = refusal({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})
    assert "'a.b'" in message
    assert "twice" in message
    assert "become one" in refusal({"a": torch.ones(1), "b": torch.ones(1)}, rename=lambda name: "same")


@pytest.mark.parametrize("key", [0, None, ("a", "b"), "", "a\0b"])
def test_keys_that_are_no_names_are_refused(key: Any) -> None:
    assert repr(key) in refusal({"deep": {key: torch.ones(1)}})


@pytest.mark.parametrize("name", ["line\nbreak", "../up", "x" * 2000])
def test_names_that_do_not_travel_are_refused_at_once(name: str) -> None:
    assert repr(name)[1:40] in refusal({name: torch.ones(1)})


def test_an_empty_state_is_refused() -> None:
    for empty in ({}, nn.Identity(), {"a": {}}, {}.copy):
        assert "empty" in refusal(empty)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {"w": torch.ones(1)}
    state["self"] = state
    assert "contain themselves" in refusal(state)


def test_select_rename_and_cast() -> None:
    state = Source(policy(), select=["*.weight", "1.*"], rename={"0.": "first."}, cast=torch.bfloat16).extract()
    assert {entry.name: entry.dtype for entry in state.layout.entries} == {
        "first.weight": "bfloat16",
        "1.weight": "bfloat16",
        "1.bias": "bfloat16",
        "1.running_mean": "bfloat16",
        "1.running_var": "bfloat16",
        "1.num_batches_tracked": "int64",
        "2.0.weight": "bfloat16",
    }


def test_what_is_not_selected_may_be_anything() -> None:
    state = {"w": torch.ones(1), "step": 3, "meta": torch.empty(2, device="meta")}
    assert list(extract(state, select="w")) == ["w"]


# -- what cannot be sent -----------------------------------------------------------------------------------------------


def faults() -> dict[str, tuple[Any, str]]:
    offloaded = torch.ones(4)
    offloaded.untyped_storage().resize_(0)
    shrunk = torch.ones(4)
    shrunk.untyped_storage().resize_(8)
    return {
        "meta": (torch.empty(2, device="meta"), "meta device"),
        "lazy": (nn.LazyLinear(2).weight, "not initialised"),
        "sparse": (torch.ones(2, 2).to_sparse(), "to_dense"),
        "nested": (nested(), "nested"),
        "offloaded": (offloaded, "without memory"),
        "shrunk": (shrunk, "without memory"),
        "float": (1.5, "torch.tensor"),
        "bool": (True, "torch.tensor"),
        "numpy scalar": (np.float32(1), "torch.tensor"),
        "none": (None, "NoneType"),
        "list": ([torch.ones(1)], "list"),
        "text": ("text", "str"),
        "function": (torch.relu, "function"),
    }


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


@pytest.mark.parametrize("kind", faults())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_sent_is_named(kind: str) -> None:
    leaf, word = faults()[kind]
    message = refusal({"fine": torch.ones(1), "deep": {"odd": leaf}})
    assert "deep.odd" in message
    assert "fine" not in message
    assert word in message


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantised_tensors_are_named() -> None:
    try:
        leaf = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    except RuntimeError as exc:
        pytest.skip(f"this torch cannot quantise: {exc}")
    assert "qint8" in refusal({"odd": leaf})


def test_all_faults_are_listed_up_to_a_bound() -> None:
    message = refusal({f"bad{n}": n for n in range(100)})
    assert "bad0:" in message
    assert "and 80 more" in message


def test_a_tensor_that_goes_bad_later_is_named_then() -> None:
    model = nn.ModuleDict({"x": nn.Linear(2, 2)})
    source = Source(model)
    source.extract()
    model["x"].weight.data.untyped_storage().resize_(0)
    with pytest.raises(PreflightError, match=r"x\.weight"):
        source.extract()


# -- unchanged, or not -------------------------------------------------------------------------------------------------


def test_an_unchanged_module_keeps_its_layout_while_its_values_change() -> None:
    model = policy()
    source = Source(model)
    first = source.extract()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    second = source.extract()
    assert second.plan is first.plan
    assert second.layout is first.layout


def replace_data(m: Any) -> None:
    m[0].weight.data = torch.full((4, 3), 5.0)


def transpose(m: Any) -> None:
    m[2][0].weight.data = m[2][0].weight.data.t()


def view_as_ints(m: Any) -> None:
    m[1].running_mean = m[1].running_mean.view(torch.int32)


def resize(m: Any) -> None:
    m[1].running_mean.resize_(3)


def halve(m: Any) -> None:
    m.half()


def replace_module(m: Any) -> None:
    m[2] = nn.Linear(4, 2)


def rename_module(m: Any) -> None:
    m._modules["x"] = m._modules.pop("2")


def swap_modules(m: Any) -> None:
    m._modules["0"], m._modules["2"] = m._modules["2"], m._modules["0"]


def tie(m: Any) -> None:
    m[1].weight = m[1].bias


def tie_data(m: Any) -> None:
    m[1].weight.data = m[1].bias.data


def add_buffer(m: Any) -> None:
    m[0].register_buffer("extra", torch.ones(1))


def hide_buffer(m: Any) -> None:
    m[1]._non_persistent_buffers_set.add("running_mean")


def drop_bias(m: Any) -> None:
    m[0].bias = None


def parameter_to_buffer(m: Any) -> None:
    weight = m[0]._parameters.pop("weight")
    m[0].register_buffer("weight", weight.data.clone())


def move_up(m: Any) -> None:
    m._modules["up"] = m[2]._modules.pop("0")


def rename_in_place(m: Any) -> None:
    children = {"first" if name == "0" else name: child for name, child in m._modules.items()}
    m._modules.clear()
    m._modules.update(children)


def replace_by_an_equal_one(m: Any) -> None:
    m[0] = Equal(3, 4)


def replace_table(m: Any) -> None:
    m[0]._parameters = {name: nn.Parameter(torch.zeros_like(p)) for name, p in m[0]._parameters.items()}


def drop_module(m: Any) -> None:
    del m._modules["1"]


class Equal(nn.Linear):
    """Says that it is equal to all of its kind."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = nn.Linear.__hash__


@pytest.mark.parametrize(
    "change",
    [
        replace_data,
        transpose,
        view_as_ints,
        resize,
        halve,
        replace_module,
        rename_module,
        swap_modules,
        tie,
        tie_data,
        add_buffer,
        hide_buffer,
        drop_bias,
        parameter_to_buffer,
        move_up,
        rename_in_place,
        replace_by_an_equal_one,
        replace_table,
        drop_module,
    ],
)
@pytest.mark.parametrize("more", [0, 3, 12], ids=["few tensors", "more", "many children"])
def test_every_change_is_noticed(change: Callable[[Any], None], more: int) -> None:
    model = policy()
    model[0] = Equal(3, 4)
    for number in range(more):
        model.append(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)) if more < 4 else nn.Linear(2, 2))
        assert len(model) == 4 + number
    source = Source(model)
    source.extract()
    change(model)
    got, fresh = source.extract(), Source(model).extract()
    assert got.layout == fresh.layout
    assert got.plan.same_as(fresh.plan)
    assert [id(t) for t in got.tensors] == [id(t) for t in fresh.tensors]
    assert values(got) == values(fresh)
    assert source.extract().plan is got.plan


@pytest.mark.parametrize("more", [2, 12])
def test_another_order_of_the_same_modules(more: int) -> None:
    model = policy()
    for _ in range(more):
        model.append(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)))
    source = Source(model)
    source.extract()
    model._modules["0"] = model._modules.pop("0")
    got, expected = source.extract(), model.state_dict()
    found = {entry.name: tensor for entry, tensor in zip(got.layout.entries, got.tensors)}
    assert snapshot(found) == snapshot(expected)


def values(state: State) -> list[bytes]:
    from weightwire.transport import Version
    from weightwire.weights.payload import Payload

    return [block.numpy().tobytes() for block in Payload(state, stamp=Version(1, 1)).tensors()]


def test_other_memory_of_the_same_look_has_the_same_layout() -> None:
    model = policy()
    source = Source(model)
    first = source.extract()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert source.extract().plan is first.plan
    assert source.extract(copy.deepcopy(model)).plan is first.plan


def test_what_a_function_makes_anew_is_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    source = Source(lambda: {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    first, want = source.extract(), values(Source(model).extract())
    monkeypatch.setattr("weightwire.weights.source.make_plan", lambda *_: pytest.fail("laid out again"))
    for _ in range(3):
        again = source.extract()
        assert again.plan is first.plan
        assert values(again) == want


def test_tensors_that_move_on_top_of_one_another_are_noticed() -> None:
    state = {"a": torch.ones(6), "b": torch.ones(6), "c": torch.ones(3)}
    source = Source(state)
    assert len(source.extract().layout.sizes) == 3
    base = torch.arange(12.0)
    state.update(a=base[:6], b=base[6:], c=torch.ones(3))
    assert len(source.extract().layout.sizes) == 3
    state.update(a=base[:6], b=base[4:10])
    assert len(source.extract().layout.sizes) == 2
    state.update(a=torch.ones(6), b=torch.ones(6))
    assert len(source.extract().layout.sizes) == 3
    state["c"].untyped_storage().resize_(0)
    with pytest.raises(PreflightError, match="c: a Tensor without memory"):
        source.extract()


def test_a_conjugate_view_put_in_the_place_of_a_tied_tensor_is_noticed() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    state = {"a": z, "b": z}
    source = Source(state)
    assert len(source.extract().layout.sizes) == 1
    state["b"] = z.conj()
    assert len(source.extract().layout.sizes) == 2


def test_states_that_are_pushed_in_turn_are_all_remembered() -> None:
    model = policy()
    source = Source(model)
    heads = [{"2.0.weight": model[2][0].weight}, {"0.bias": model[0].bias}]
    plans = [source.extract(w).plan for w in (None, *heads)]
    for _ in range(3):
        assert [source.extract(w).plan for w in (None, *heads)] == plans


def test_no_tensor_is_kept_alive() -> None:
    model = policy()
    source = Source()
    layout = source.extract(model).layout
    parameter, module = weakref.ref(model[0].weight), weakref.ref(model[0])
    del model
    gc.collect()
    assert parameter() is None
    assert module() is None
    assert source.extract(policy()).layout is layout


def test_a_tensor_class_is_not_asked_for_its_opinion() -> None:
    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            pytest.fail(f"{func} was called")

    state = {"w": torch.ones(3).as_subclass(Loud), "v": torch.ones(3)}
    source = Source(state)
    extracted = source.extract()
    assert source.extract().plan is extracted.plan
    from weightwire.transport import Version
    from weightwire.weights.payload import Payload

    payload = Payload(extracted, stamp=Version(1, 1))
    out = torch.zeros(payload.nbytes, dtype=torch.uint8)
    payload.pack(out)
    assert bits(payload.layout.views(payload.layout.slice(out))[0]) == bits(torch.ones(3))
    assert len(list(payload.tensors())) == 2


def test_looking_again_is_much_cheaper_than_looking_first() -> None:
    model = nn.ModuleList([nn.Linear(2, 2) for _ in range(500)])
    source = Source(model)
    begun = time.perf_counter()
    source.extract()
    first = time.perf_counter() - begun
    again = min(_seconds(source.extract) for _ in range(20))
    assert again < first / 4


def _seconds(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


@pytest.mark.parametrize("guarded", [True, False], ids=["guards", "no guards"])
def test_every_change_of_a_tensor_is_noticed_with_and_without_torch_s_guards(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if guarded:
        assert walk._tensor_guards() is not None, "this torch's guards are not what they were: looking costs more"
    else:
        monkeypatch.setattr(walk, "_tensor_guards", lambda: None)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    weight = model[3].weight
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda data: data.t(),
        lambda data: data.view(2, 8),
        lambda data: data[:2],
        lambda data: data.view(torch.int32),
        lambda data: data.double(),
    ]
    for change in changes:
        kept = weight.data
        guard, known = walk.Guard(), walk.signature(list(model.parameters()))
        assert all(guard.unchanged(known, list(model.parameters())) for _ in range(3))
        weight.requires_grad_(False)
        weight.data = change(kept)
        assert not guard.unchanged(known, list(model.parameters()))
        weight.data = kept
        assert guard.unchanged(known, list(model.parameters()))
        weight.requires_grad_()
        assert guard.unchanged(known, list(model.parameters()))


def test_parameters_in_a_new_dictionary_are_found() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    source = Source(model)
    source.extract()
    model[1]._parameters = dict(model[1]._parameters)
    source.extract()
    model[1].weight = nn.Parameter(torch.full((2, 2), 5.0))
    state = source.extract()
    assert state.tensors[state.layout.index["1.weight"]] is model[1].weight


def test_parameters_in_another_order_keep_their_names() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    source = Source(model)
    source.extract()
    weight = model[1].weight
    del model[1].weight
    model[1].weight = weight
    for _ in range(2):
        state = source.extract()
        assert state.tensors[state.layout.index["1.weight"]] is weight


# -- what is likely to be meant otherwise ------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [nn.Linear, dict])
def test_a_class_is_no_policy(weights: Any) -> None:
    with pytest.raises(PreflightError, match=r"the class .*; an instance of it is wanted"):
        Source(weights)


@pytest.mark.parametrize("cast", ["int8", {"weight": torch.int32}, {"*": "bool"}])
def test_floats_are_not_cut_down_to_integers(cast: Any) -> None:
    with pytest.raises(PreflightError, match=r"'weight' is float32; as .* it would lose its fractions"):
        Source(nn.Linear(2, 2), cast=cast).extract()


@pytest.mark.parametrize("cast", ["target", {"weight": "target"}])
def test_what_the_target_has_is_known_to_workers_only(cast: Any) -> None:
    with pytest.raises(PreflightError, match="WeightReceiver takes it"):
        Source(nn.Linear(2, 2), cast=cast)


@pytest.mark.parametrize(
    ("option", "given", "told"),
    [
        ("select", ["wieght", "bias"], "'wieght' of it matches none of 2 names; close ones: weight"),
        ("select", "!wieght", "'!wieght' of it"),
        ("rename", {"weight": "w", "bais": "b"}, "'bais' of it"),
        ("cast", {"weight": "bfloat16", "b": "bfloat16"}, "'b' of it"),
    ],
)
def test_a_pattern_beside_others_that_matches_nothing_is_told_once(
    option: str, given: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = nn.Linear(2, 2)
    source = Source(policy, **{option: given})
    for _ in range(2):
        source.extract()
        policy.weight = nn.Parameter(torch.zeros(2, 2))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{option}: ")
    assert told in said
