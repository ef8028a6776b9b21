"""Select, rename, cast, and whether a payload fits."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import PreflightError, WireError
from weightwire.weights.layout import Entry, Layout
from weightwire.weights.names import (
    NameMap,
    Needs,
    canonical,
    canonical_all,
    decode_needs,
    encode_needs,
    match,
    preflight,
)
from weightwire.weights.source import Source
from weightwire.weights.target import make_target

Spec = tuple[str, tuple[int, ...]]


def layout(**tensors: Spec) -> Layout:
    """``layout(w=("float32", (2, 3)))``; sizes do not matter here."""
    entries = tuple(Entry(name.replace("__", "."), *spec, block) for block, (name, spec) in enumerate(tensors.items()))
    return Layout(entries, (64,) * len(entries))


def named(*names: str) -> Layout:
    return Layout(tuple(Entry(name, "float32", (2,), block) for block, name in enumerate(names)), (8,) * len(names))


def needs(*names: str, select: object = None, rename: object = None, cast: object = None) -> Needs:
    mapping = NameMap(select, rename, cast)  # type: ignore[arg-type]
    return Needs(names, ("float32",) * len(names), ((2,),) * len(names), mapping)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_orig_mod.a.w", "a.w"),
        ("a._orig_mod.w", "a.w"),
        ("a._fsdp_wrapped_module._checkpoint_wrapped_module.b._orig_mod.w", "a.b.w"),
        ("a_orig_mod.w", "a_orig_mod.w"),
        ("_orig_mod_.w", "_orig_mod_.w"),
        ("module.w", "module.w"),
    ],
)
def test_wrappers_are_seen_through(name: str, expected: str) -> None:
    assert canonical(name) == expected


def test_canonical_names_never_merge_two() -> None:
    assert canonical_all(["_orig_mod.w", "b"]) == ["w", "b"]
    assert canonical_all(["_orig_mod.w", "w"]) == ["_orig_mod.w", "w"]
    assert canonical_all(["_orig_mod", "b"]) == ["_orig_mod", "b"], "a name is never empty"


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (None, ["actor.w", "actor.b", "critic.w"]),
        ("actor.*", ["actor.w", "actor.b"]),
        (["actor.w", "critic.*"], ["actor.w", "critic.w"]),
        ("!critic.*", ["actor.w", "actor.b"]),
        (["actor.*", "!*.b"], ["actor.w"]),
        (["!*.b", "actor.*"], ["actor.w"]),
        (lambda name: name.endswith(".b"), ["actor.b"]),
        ("_orig_mod.actor.*", ["actor.w", "actor.b"]),
    ],
)
def test_select(select: object, expected: list[str]) -> None:
    taken = NameMap(select).apply(["actor.w", "_orig_mod.actor.b", "critic.w"])  # type: ignore[arg-type]
    assert [name for _, name in taken] == expected


def test_select_minds_case() -> None:
    assert NameMap("A.*").apply(["A.w", "a.w"]) == [(0, "A.w")]


@pytest.mark.parametrize("select", ["actr.*", [], "!*", lambda name: False])
def test_selecting_nothing_is_an_error(select: object) -> None:
    with pytest.raises(PreflightError, match="selects none of 2 names"):
        NameMap(select).apply(["actor.w", "critic.w"])  # type: ignore[arg-type]
    assert NameMap(select).apply([]) == []  # type: ignore[arg-type]


def test_select_error_names_pattern_and_close_names() -> None:
    with pytest.raises(PreflightError, match=r"actr\.w.*close.*actor\.w"):
        NameMap("actr.w").apply(["actor.w", "zzz"])


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({"actor.": ""}, ["w", "l.b", "critic.w"]),
        ({"": "policy."}, ["policy.actor.w", "policy.actor.l.b", "policy.critic.w"]),
        ({"actor.": "a.", "actor.l.": "l."}, ["a.w", "l.b", "critic.w"]),
        ({"actor.w": "weight"}, ["weight", "actor.l.b", "critic.w"]),
        ({"actor": "x"}, ["actor.w", "actor.l.b", "critic.w"]),
        (str.upper, ["ACTOR.W", "ACTOR.L.B", "CRITIC.W"]),
    ],
)
def test_rename(rename: object, expected: list[str]) -> None:
    taken = NameMap(rename=rename).apply(["actor.w", "actor.l.b", "critic.w"])  # type: ignore[arg-type]
    assert [name for _, name in taken] == expected


def test_two_names_renamed_to_one() -> None:
    with pytest.raises(PreflightError, match=r"'actor\.w' and 'critic\.w' would both become one"):
        NameMap(rename={"actor.": "", "critic.": ""}).apply(["actor.w", "critic.w"])


def test_one_name_twice() -> None:
    with pytest.raises(PreflightError, match="'a' and 'a' occur twice"):
        NameMap().apply(["a", "b", "a"])


@pytest.mark.parametrize("rename", [lambda name: 3, lambda name: "", {"w": "a\0b"}, {"w": ""}, ["w"], {"w": 1}])
def test_bad_renames(rename: object) -> None:
    with pytest.raises(PreflightError, match="rename"):
        NameMap(rename=rename).apply(["w"])  # type: ignore[arg-type]


# -- casts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_one_dtype_casts_what_is_floating(cast: object) -> None:
    names = NameMap(cast=cast)  # type: ignore[arg-type]
    before = ["float32", "float8_e5m2", "int64", "bool", "complex64", "uint8"]
    assert [names.dtype("w", d) for d in before] == ["bfloat16", "bfloat16", "int64", "bool", "complex64", "uint8"]


def test_globs_cast_what_they_name() -> None:
    names = NameMap(cast={"*.count": torch.int32, "a.*": "float16"})
    assert names.dtype("a.count", "int64") == "int32"
    assert names.dtype("a.w", "float32") == "float16"
    assert names.dtype("b.w", "float32") == "float32"


def test_target_takes_what_the_target_has_but_keeps_the_kind() -> None:
    names = NameMap(cast="target")
    assert names.dtype("w", "float32", "bfloat16") == "bfloat16"
    assert names.dtype("w", "int64", "float32") == "float32"
    assert names.dtype("w", "float32", "int64") == "float32", "digits may be lost, fractions may not"
    assert names.dtype("w", "complex64", "float32") == "complex64"
    assert names.dtype("w", "float32") == "float32"


@pytest.mark.parametrize("cast", ["float31", {"*": "uint4"}, "qint8", torch.uint3, {"*": 4}])
def test_bad_casts(cast: object) -> None:
    with pytest.raises(PreflightError, match="cast"):
        NameMap(cast=cast)  # type: ignore[arg-type]


def test_casts_that_torch_lacks_or_that_lose_more_than_digits() -> None:
    with pytest.raises(PreflightError, match="imaginary"):
        NameMap(cast={"*": "float32"}).dtype("w", "complex64")
    with pytest.raises(PreflightError, match="uint4"):
        NameMap(cast={"*": "float32"}).dtype("w", "uint4")


# -- what fits ---------------------------------------------------------------------------------------------------------


def test_all_differences_are_listed_at_once() -> None:
    payload = layout(a=("float32", (3,)), b=("float64", (2,)), c=("float32", ()), e=("float32", (2,)))
    target = Needs(("a", "b", "c", "d"), ("float32",) * 4, ((4, 3), (2,), (), (1,)), NameMap())
    difference = preflight(payload, target)
    assert difference
    assert difference.common == 3
    assert difference.missing == ("d",)
    assert difference.unexpected == ("e",)
    assert difference.shapes == (("a", (3,), (4, 3)),)
    assert difference.dtypes == (("b", "float64", "float32"),)
    message = difference.message()
    for part in (
        "1 missing from the payload: d",
        "1 unexpected in the payload: e",
        "shape of a",
        "dtype of b",
        "cast=",
    ):
        assert part in message


@pytest.mark.parametrize(("got", "want"), [((3,), (4, 3)), ((1,), ()), ((), (1,)), ((2, 3), (3, 2)), ((0, 8), (8, 0))])
def test_nothing_broadcasts(got: tuple[int, ...], want: tuple[int, ...]) -> None:
    difference = preflight(layout(w=("float32", got)), Needs(("w",), ("float32",), (want,), NameMap()))
    assert difference.shapes == (("w", got, want),)


def test_a_fit_is_no_difference() -> None:
    pairs, difference = match(named("b", "a"), needs("a", "b"))
    assert pairs == [(0, 1), (1, 0)]
    assert not difference


def test_long_lists_are_cut() -> None:
    message = preflight(named("x"), needs(*(f"layer{i}" for i in range(1000)))).message()
    assert "1000 missing" in message
    assert "and 980 more" in message
    assert len(message) < 2000


def test_subsets_may_leave_out_but_not_add() -> None:
    assert not preflight(named("a"), needs("a", "b"), subset=True)
    assert preflight(named("c"), needs("a", "b"), subset=True).unexpected == ("c",)
    assert "no names in common" in preflight(named("c"), needs("a", "b"), subset=True).message()


def test_zero_names_in_common_never_fits() -> None:
    for payload, target in ((named("a"), needs("b")), (named("a"), needs())):
        for subset in (False, True):
            assert preflight(payload, target, subset=subset)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (["module.a.w", "module.b"], ["a.w", "b"]),
        (["a.w", "b"], ["module.a.w", "module.b"]),
        (["module._orig_mod.a.w", "module.b"], ["_orig_mod.module.a.w", "b"]),
        (["m.module.w", "n.w"], ["m.w", "n.module.w"]),
        (["m._checkpoint_wrapped_module.w"], ["_fsdp_wrapped_module.m.w"]),
    ],
)
def test_wrappers_on_either_side(theirs: list[str], ours: list[str]) -> None:
    pairs, difference = match(named(*theirs), needs(*canonical_all(ours)))
    assert not difference
    assert pairs == [(i, i) for i in range(len(theirs))]


def test_module_is_kept_where_users_mean_it() -> None:
    assert not preflight(named("module.w", "w"), needs("module.w", "w"))
    difference = preflight(named("module.w", "w"), needs("w", "v"))
    assert (difference.missing, difference.unexpected) == (("v",), ("module.w",))


def test_one_missing_name_behind_ddp_is_named_alone() -> None:
    difference = preflight(named("module.a", "module.b"), needs("a", "b", "c"))
    assert (difference.missing, difference.unexpected) == (("c",), ())


@pytest.mark.parametrize(
    ("theirs", "ours", "option"),
    [
        (["actor.net.w", "actor.net.b"], ["net.w", "net.b"], 'rename={"actor.": ""}'),
        (["net.w", "net.b"], ["actor.net.w", "actor.net.b"], 'rename={"": "actor."}'),
        (["a.x.w", "a.x.b"], ["b.x.w", "b.x.b"], 'rename={"a.x.": "b.x."}'),
        (["actor.w", "actor.b", "critic.w"], ["w", "b"], 'select="actor.*", rename={"actor.": ""}'),
    ],
)
def test_other_prefixes_are_hinted_at_and_the_hint_works(theirs: list[str], ours: list[str], option: str) -> None:
    difference = preflight(named(*theirs), needs(*ours))
    assert difference
    assert option in difference.hint
    assert not preflight(named(*theirs), needs(*ours, **eval(f"dict({option})")))


def test_hints_on_shapes_and_dtypes() -> None:
    target = Needs(("w",), ("float32",), ((2, 3),), NameMap())
    assert "transposed" in preflight(layout(w=("float32", (3, 2))), target).hint
    assert "elements agree" in preflight(layout(w=("float32", (6,))), target).hint
    assert 'cast="target"' in preflight(layout(w=("float64", (2, 3))), target).hint
    whole = Needs(("w",), ("int64",), ((2, 3),), NameMap())
    assert 'cast={"w": "int64"}' in preflight(layout(w=("float32", (2, 3))), whole).hint


def test_what_is_not_selected_is_neither_missing_nor_unexpected() -> None:
    assert not preflight(named("actor.w", "critic.w"), needs("actor.w", "head.w", select="actor.*"))
    assert not preflight(named("actor.w", "critic.w"), needs("w", "head.w", select="actor.w", rename={"actor.": ""}))
    assert not preflight(named("a", "step"), needs("a", "step", select="!step"))


def test_select_excuses_nothing_that_it_selects() -> None:
    difference = preflight(named("actor.w", "critic.w"), needs("w", "b", select="actor.*", rename={"actor.": ""}))
    assert difference.missing == ("b",), "the payload should have had actor.b"
    difference = preflight(named("module.a.w", "module.c.w"), needs("a.w", "a.b", "c.w", select="module.a.*"))
    assert difference.missing == ("a.b",)
    difference = preflight(named("a.w", "c.w"), needs("module.a.w", "module.a.b", "module.c.w", select="a.*"))
    assert difference.missing == ("module.a.b",)


def test_functions_select_and_rename_alike() -> None:
    def strip(name: str) -> str:
        return {"actor.w": "w"}[name]

    target = needs("w", "other", select=lambda name: name.startswith("actor."), rename=strip)
    assert preflight(named("actor.w", "critic.w"), target).missing == ("other",)
    assert not preflight(named("actor.w", "critic.w"), target._replace(names=("w",)))


def test_casts_are_part_of_the_fit() -> None:
    payload = layout(w=("float32", (2,)), n=("int64", (1,)))
    target = Needs(("w", "n"), ("bfloat16", "int64"), ((2,), (1,)), NameMap())
    assert preflight(payload, target).dtypes == (("w", "float32", "bfloat16"),)
    assert not preflight(payload, target._replace(map=NameMap(cast="target")))
    assert not preflight(payload, target._replace(map=NameMap(cast="bfloat16")))
    assert preflight(payload, target._replace(map=NameMap(cast="float16"))).dtypes == (("w", "float16", "bfloat16"),)


names = st.lists(
    st.lists(st.sampled_from(["a", "b", "net", "0", "module", "_orig_mod"]), min_size=1, max_size=4).map(".".join),
    min_size=1,
    max_size=6,
    unique=True,
)


@given(names, st.randoms(use_true_random=False))
def test_any_order_of_the_same_names_fits(chosen: list[str], shuffle: random.Random) -> None:
    other = list(chosen)
    shuffle.shuffle(other)
    pairs, difference = match(named(*chosen), needs(*canonical_all(other)))
    assert not difference
    assert [chosen[entry] for entry, _ in pairs] == [other[leaf] for _, leaf in pairs]


@given(names, names)
def test_every_name_is_paired_or_told_of(theirs: list[str], ours: list[str]) -> None:
    pairs, difference = match(named(*theirs), needs(*canonical_all(ours)))
    assert len(pairs) + len(difference.unexpected) == len(theirs)
    assert len(pairs) + len(difference.missing) == len(ours)
    assert len({leaf for _, leaf in pairs}) == len({entry for entry, _ in pairs}) == len(pairs)
    assert bool(difference) == (len(pairs) < max(len(theirs), len(ours)))


# -- over the wire -----------------------------------------------------------------------------------------------------


def test_needs_travel() -> None:
    mapping = NameMap(["actor.*", "!*.b"], {"actor.": ""}, {"*": "bfloat16", "n": "target"})
    before = Needs(("w", "n"), ("bfloat16", "int64"), ((2, 3), ()), mapping)
    after = decode_needs(encode_needs(before))
    assert after is not None
    assert after[:3] == before[:3]
    assert after.map.plain == mapping.plain


@pytest.mark.parametrize("option", [{"select": lambda name: True}, {"rename": str.lower}])
def test_needs_with_functions_do_not_travel(option: dict[str, object]) -> None:
    assert encode_needs(needs("w", **option)) == b""
    assert decode_needs(b"") is None


@given(st.binary(min_size=1, max_size=200))
def test_random_needs_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_needs(data)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_changed_needs_decode_or_are_refused(place: int, value: int) -> None:
    data = bytearray(encode_needs(needs("a", "b.c", select="a*", rename={"a": "b"}, cast="float16")))
    data[place % len(data)] = value
    try:
        found = decode_needs(bytes(data))
    except WireError:
        return
    assert found is not None
    preflight_or_refuse(found)


def preflight_or_refuse(found: Needs) -> None:
    with contextlib.suppress(PreflightError):
        preflight(named("a", "b.c"), found).message()


@pytest.mark.parametrize(
    "columns",
    [
        (["w", "w"], [1, 1], [[1], [1]]),
        (["w"], [1, 1], [[1]]),
        (["w"], [1], []),
        (["w"], [1], [[-1]]),
        (["w"], [-1], [[1]]),
        (["w"], [999], [[1]]),
        (["w"], [1], [[1] * 100_000]),
        (["w" * 5000], [1], [[1]]),
        ([f"{i}" for i in range(200_000)], [1] * 200_000, [[]] * 200_000),
    ],
)
def test_impossible_needs_are_refused(columns: tuple[Sequence[object], ...]) -> None:
    with pytest.raises(WireError):
        decode_needs(msgspec.msgpack.encode([*columns, None, None, None]))


@pytest.mark.parametrize(
    "option", [{"cast": {"actr.*": "float16"}}, {"rename": {"actr.": "x."}}, {"rename": {"b": "c"}}]
)
def test_tables_that_name_nothing_are_an_error(option: dict[str, Any]) -> None:
    (kind,) = option
    state = {"actor.w": torch.ones(1), "actor.v": torch.ones(1)}
    with pytest.raises(PreflightError, match=f"{kind}s none of 2 names.*actor"):
        Source(state, **option).extract()
    sent, taken = named(*state), needs(*state, **option)
    with pytest.raises(PreflightError, match=f"{kind}s none of 2 names"):
        preflight(sent, taken)
    assert not preflight(sent, taken, subset=True), "the rest may have been sent before"


def test_tables_of_which_some_name_something_are_none() -> None:
    state = {"actor.w": torch.ones(1)}
    cast = {"critic.*": "float16", "actor.*": "bfloat16"}
    assert Source(state, cast=cast).extract().layout.entries[0].dtype == "bfloat16"
    assert Source(state, rename={"module.": ""}).extract().layout.names == state.keys()
    Source({"a": state}, cast=cast).extract({"b": torch.ones(1)})  # another object may be a part


def test_patterns_are_text() -> None:
    with pytest.raises(PreflightError, match="patterns are str"):
        NameMap(cast={3: "float16"})  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ["\ud800", "a\tb", "a\nb", "a\x9fb", "a" * 1025, "\u00e9" * 600])
def test_names_that_cannot_travel_are_refused_on_both_sides(name: str) -> None:
    for refuse in (lambda: Source({name: torch.ones(1)}).extract(), lambda: make_target({name: torch.ones(1)})):
        with pytest.raises(PreflightError, match=r"surrogate|control character|line break|longer than 1024"):
            refuse()


@pytest.mark.parametrize("name", ["a" * 1024, "\u00e9" * 512, "a b", "\u00a0", "\u2028"])
def test_names_that_travel_are_taken_on_both_sides(name: str) -> None:
    assert Source({name: torch.ones(1)}).extract().layout.wire
    make_target({name: torch.ones(1)})
