from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.endpoint import MAX_LENGTH, Endpoint, Size, options_for, parse, parse_size, scoped
from weightwire.errors import EndpointError
from weightwire.hookspecs import BackendInfo


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ipc", Endpoint("ipc")),
        ("ipc://", Endpoint("ipc")),
        ("ipc://policy", Endpoint("ipc", location="policy")),
        ("ipc?slots=3", Endpoint("ipc", options={"slots": "3"})),
        ("ipc://policy?slots=3&max_slots=9", Endpoint("ipc", None, "policy", {"slots": "3", "max_slots": "9"})),
        ("ipc@weightwire-ipc://policy", Endpoint("ipc", "weightwire-ipc", "policy")),
        ("nccl://10.0.0.1:29500", Endpoint("nccl", location="10.0.0.1:29500")),
        ("nccl://[::1]:29500", Endpoint("nccl", location="[::1]:29500")),
        ("third.party-2://a/b", Endpoint("third.party-2", location="a/b")),
        ("import:package.module", Endpoint("import:package.module")),
        ("import:package.module://x?y=z", Endpoint("import:package.module", None, "x", {"y": "z"})),
        ("ipc://a%20b%3Fc?k=%26%3D%25", Endpoint("ipc", None, "a b?c", {"k": "&=%"})),
        ("ipc://x?url=tcp://h:1?a=b", Endpoint("ipc", None, "x", {"url": "tcp://h:1?a=b"})),
        ("ipc://x?empty=", Endpoint("ipc", None, "x", {"empty": ""})),
    ],
)
def test_text_is_understood_and_comes_back(text: str, expected: Endpoint) -> None:
    assert parse(text) == expected
    assert parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({"backend": "ipc"}, "ipc"),
        ({"backend": "ipc", "location": "policy", "slots": 3}, "ipc://policy?slots=3"),
        ({"backend": "ipc", "distribution": "d", "location": 7}, "ipc@d://7"),
        ({"backend": "ipc", "location": None, "slots": None}, "ipc"),
        ({"backend": "ipc", "eager": True, "late": False, "factor": 0.5}, "ipc?eager=true&factor=0.5&late=false"),
        ({"backend": "import:a.b", "location": "x"}, "import:a.b://x"),
    ],
)
def test_mapping_is_the_same_as_its_text(mapping: Mapping[str, Any], text: str) -> None:
    assert parse(mapping) == parse(text)
    assert str(parse(mapping)) == text


def test_an_endpoint_is_a_value() -> None:
    endpoint = parse("ipc://policy?b=2&a=1")
    assert parse(endpoint) is endpoint
    assert str(endpoint) == "ipc://policy?a=1&b=2"
    assert {endpoint: 1}[parse("ipc://policy?a=1&b=2")] == 1
    assert pickle.loads(pickle.dumps(endpoint)) == copy.deepcopy(endpoint) == endpoint
    assert str(replace(endpoint, location="other")) == "ipc://other?a=1&b=2"


PRINTABLE = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), max_size=40)


@given(
    backend=st.from_regex(r"\w[\w.-]{0,20}", fullmatch=True),
    distribution=st.none() | st.from_regex(r"\w[\w.-]{0,20}", fullmatch=True),
    location=PRINTABLE,
    options=st.dictionaries(
        st.from_regex(r"[a-z][a-z_]{0,9}", fullmatch=True).filter(lambda k: k not in ("backend", "location")),
        PRINTABLE,
        max_size=4,
    ),
)
def test_round_trip(backend: str, distribution: str | None, location: str, options: dict[str, str]) -> None:
    try:
        endpoint = Endpoint(backend, distribution, location, options)
    except EndpointError:
        return  # unprintable, or an option's name that the mapping form needs itself
    assert parse(str(endpoint)) == endpoint
    assert str(endpoint).isprintable()


@given(st.text(max_size=60) | st.text("ipc@:/?=&%.0 ", max_size=30))
def test_any_text_is_understood_or_refused(text: str) -> None:
    try:
        endpoint = parse(text)
    except EndpointError:
        return
    assert parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("", "name is missing"),
        ("://policy", "name is missing"),
        ("?slots=3", "name is missing"),
        ("ipc:policy", "comes after '://'"),
        ("ipc:/policy", "comes after '://'"),
        ("ip c", "cannot be a backend's name"),
        (" ipc", "blanks around it"),
        ("ipc://policy\n", "cannot be printed"),
        ("ipc://a\0b", "cannot be printed"),
        ("ipc://a%00b", "the location holds a character that cannot be printed"),
        ("ipc?a=%1b[31m", "option 'a' holds a character that cannot be printed"),
        ("ipc://\ud800", "cannot be printed"),
        ("ipc://50%", "%25"),
        ("ipc://%ff", "not UTF-8"),
        ("ipc?slots", "'slots' is no option; write key=value"),
        ("ipc?", "is no option"),
        ("ipc?a=1&", "is no option"),
        ("ipc?a=1&a=2", "'a' is given twice"),
        ("ipc?=1", "is no option"),
        ("ipc?location=x", "'location' cannot be an option's name"),
        ("ipc@", "cannot be a distribution's name"),
        ("ipc@a b", "cannot be a distribution's name"),
        ("import:", "does not name a module"),
        ("import:a..b", "does not name a module"),
        ("import:a@d", "does not name a module"),
        ("x" * (MAX_LENGTH + 1), "longer than 4096"),
        ("ipc://" + "é" * 2000, "longer than 4096"),  # as its canonical text
        (None, "not NoneType"),
        (b"ipc", "not bytes"),
        ({}, "key 'backend' is missing"),
        ({"backend": None}, "name is missing"),
        ({"backend": "ipc", "slots": [1, 2]}, "option 'slots' is a list"),
        ({"backend": "ipc", "location": {"host": "h"}}, "the location is a dict"),
        ({"backend": "ipc", 3: 4}, "3 cannot be an option's name"),
        ({"backend": "import:a", "distribution": "d"}, "has no @distribution"),
    ],
)
def test_refusals_say_what_is_wrong_and_what_is_right(wrong: Any, why: str) -> None:
    with pytest.raises(EndpointError) as caught:
        parse(wrong)
    message = str(caught.value)
    assert why in message
    assert repr(wrong)[:100].rstrip("'") in message or len(str(wrong)) > 200
    assert "ipc://policy?slots=3" in message
    assert message.isprintable()
    assert len(message) < 500


def test_module() -> None:
    assert parse("import:package.module://x").module == "package.module"
    assert parse("ipc").module is None


@pytest.mark.parametrize(
    ("text", "allowed"), [("x", False), ("x?allow_pickle=true", True), ("x?allow_pickle=0", False)]
)
def test_allow_pickle_belongs_to_every_endpoint(text: str, allowed: bool) -> None:
    assert parse(text).allow_pickle is allowed
    assert options_for(parse(text), BackendInfo(summary="")) is None


def test_allow_pickle_is_true_or_false() -> None:
    with pytest.raises(EndpointError, match="true or false"):
        _ = parse("x?allow_pickle=maybe").allow_pickle


# -- options -----------------------------------------------------------------------------------------------------------


class Options(msgspec.Struct):
    slots: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    bucket: Size = 32 << 20
    limit: Size | None = None
    bounded: Annotated[Size, msgspec.Meta(ge=4096)] = 4096
    eager: bool = False
    factor: float = 1.0
    mode: Literal["fast", "safe"] = "safe"
    token: str = ""

    def __post_init__(self) -> None:
        if self.slots == 13:
            raise ValueError("slots and luck do not go together")


INFO = BackendInfo(summary="", options=Options)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("x", Options()),
        ("x?slots=3", Options(slots=3)),
        ("x?bucket=64MiB&limit=1GB", Options(bucket=64 << 20, limit=10**9)),
        ("x?bounded=8KiB", Options(bounded=8192)),
        ("x?limit=7", Options(limit=7)),
        ("x?eager=true&factor=1e-3&mode=fast", Options(eager=True, factor=1e-3, mode="fast")),
        ("x?token=123", Options(token="123")),
        ({"backend": "x", "slots": 3, "bucket": 1024, "eager": True}, Options(slots=3, bucket=1024, eager=True)),
        ({"backend": "x", "bucket": "1KiB", "token": 123}, Options(bucket=1024, token="123")),
    ],
)
def test_options_are_typed(given: Any, expected: Options) -> None:
    assert options_for(parse(given), INFO) == expected


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("mine?slot=3", ["no option 'slot'", "'mine'", "bucket", "Did you mean 'slots'?"]),
        ("mine?allow_pickel=true", ["Did you mean 'allow_pickle'?"]),
        ("mine?zzz=3", ["no option 'zzz'", "slots"]),
        ("mine?slots=many", ["'slots'", "'many'", "'mine'", "Expected `int`"]),
        ("mine?slots=0", ["'slots'", "'0'", ">= 1"]),
        ("mine?slots=13", ["luck"]),
        ("mine?bucket=64XB", ["'bucket'", "'64XB'", "as in 64MiB"]),
        ("mine?bounded=1KiB", ["'bounded'", ">= 4096"]),
        ("mine?eager=perhaps", ["'eager'", "Expected `bool`"]),
        ("mine?mode=slow", ["'mode'", "'slow'"]),
    ],
)
def test_wrong_options_are_explained(given: str, parts: list[str]) -> None:
    with pytest.raises(EndpointError) as caught:
        options_for(parse(given), INFO)
    for part in [*parts, repr(given)]:
        assert part in str(caught.value)


def test_a_backend_without_options() -> None:
    with pytest.raises(EndpointError, match="'plain' has no option 'slots'; it takes no options"):
        options_for(parse("plain?slots=3"), BackendInfo(summary=""))


def test_a_required_option_is_missed() -> None:
    class Needs(msgspec.Struct, rename="kebab"):
        key_file: str

    info = BackendInfo(summary="", options=Needs)
    assert options_for(parse("x?key-file=k"), info).key_file == "k"
    with pytest.raises(EndpointError, match="key-file"):
        options_for(parse("x"), info)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("7", 7), ("7B", 7), ("2KB", 2000), ("3 MB", 3000000), ("1kib", 1024), ("64MiB", 64 << 20)],
)
def test_parse_size(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5GiB", "1 TB", "64M", "0x10", "9" * 40, "1\n", "٣"])
def test_no_size(text: str) -> None:
    with pytest.raises(EndpointError, match="as in 64MiB"):
        parse_size(text)


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_jobs_keep_named_locations_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTWIRE_JOB", raising=False)
    assert scoped("policy") == "policy"
    monkeypatch.setenv("WEIGHTWIRE_JOB", "job-7")
    assert scoped("policy") == "job-7@policy"
    assert scoped("") == ""


@given(st.lists(st.tuples(st.text("a@%/é ", max_size=3), st.text("a@%/é ", min_size=1, max_size=3)), unique=True))
def test_no_two_places_have_one_label(places: list[tuple[str, str]]) -> None:
    labels = []
    for job, location in places:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WEIGHTWIRE_JOB", job)
            labels.append(scoped(location))
    assert len(set(labels)) == len(places)


def test_a_job_must_be_printable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_JOB", "a\nb")
    with pytest.raises(EndpointError, match="WEIGHTWIRE_JOB"):
        scoped("policy")


def test_options_without_a_question_mark() -> None:
    with pytest.raises(EndpointError, match=r"options come after '\?'"):
        parse("ipc://x&slots=3")
    assert parse("ipc://x%26slots=3").location == "x&slots=3"
