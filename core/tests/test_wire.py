"""The wire format: what goes in comes out, and whatever else comes in is a WireError, soon and in little memory."""

from __future__ import annotations

import itertools
import math
import random
import resource
import secrets
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from weightwire import wire
from weightwire.errors import WireError
from weightwire.transport import Applied, Event, Have, Header, Joined, Left, Lost, Noted, Refused, Staged, Version
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.layout import Entry, Layout, dense_strides

SECONDS = 0.1
MEMORY = 64 * 2**20

# -- a second hand that knows the format, to write what the encoder would not ------------------------------------------

PREFIX = struct.Struct("<4sIIIQ")
HEADER, LAYOUT, EVENT = b"WWHD", b"WWLY", b"WWEV"


def frame(magic: bytes, head: bytes, body: bytes = b"", *, version: int = 1) -> bytes:
    return PREFIX.pack(magic, version, len(head), len(body), xxh3_64_intdigest(head)) + head + body


def parts(data: bytes) -> tuple[bytes, bytes]:
    size = PREFIX.unpack_from(data)[2]
    return data[PREFIX.size : PREFIX.size + size], data[PREFIX.size + size :]


def columns(count: int = 2, **changed: Any) -> bytes:
    """A layout of ``count`` float32 tensors of shape (4,), each in a block of its own, but for what is changed."""
    plain: dict[str, Any] = {
        "names": b"\n".join(b"w%d" % i for i in range(count)),
        "dtypes": np.full(count, 1, "<u1"),
        "ranks": np.ones(count, "<u1"),
        "strided": np.zeros(count, "<u1"),
        "blocks": np.arange(count, dtype="<u4"),
        "offsets": np.zeros(count, "<i8"),
        "dims": np.full(count, 4, "<i8"),
        "strides": np.zeros(0, "<i8"),
        "sizes": np.full(count, 16, "<i8"),
    }
    kinds = {name: value.dtype for name, value in plain.items() if name != "names"}
    values = (plain | changed).items()
    raw = [value if isinstance(value, bytes) else np.array(value, kinds[name]).tobytes() for name, value in values]
    return frame(LAYOUT, msgspec.msgpack.encode(raw))


def head(**changed: Any) -> bytes:
    """A header over one small layout, but for what is changed in its head."""
    plain = {"stamp": (5, 7), "base": None, "digest": b"", "metadata": b"{}", "encoding": "plain"}
    return frame(HEADER, msgspec.msgpack.encode(list((plain | changed).values())), columns())


def refusal(decode: Callable[[bytes], Any], data: bytes) -> str:
    """The message of the WireError, which must come in time and in little memory."""
    begun = time.thread_time()  # this thread's own: a busy machine is not the decoder's fault
    with pytest.raises(WireError) as refused:
        decode(data)
    assert time.thread_time() - begun < SECONDS
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    return str(refused.value)


def assert_sound(layout: Layout) -> None:
    """What the rest of Weightwire relies on, checked entry by entry in plain integers."""
    assert len({entry.name for entry in layout.entries}) == len(layout.entries)
    assert {entry.block for entry in layout.entries} == set(range(len(layout.sizes)))
    assert layout.nbytes <= wire.MAX_BYTES
    for entry in layout.entries:
        assert entry.name
        assert entry.name.isprintable() or not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in entry.name)
        assert ".." not in PurePosixPath(entry.name).parts
        strides = entry.strides or dense_strides(entry.shape)
        assert len(strides) == len(entry.shape)
        assert min((*entry.shape, *strides, entry.offset), default=0) >= 0
        extent = 1 + sum((size - 1) * step for size, step in zip(entry.shape, strides))
        extent = extent if math.prod(entry.shape) else 0
        assert entry.offset % DTYPES[entry.dtype] == 0
        assert entry.offset + extent * DTYPES[entry.dtype] <= layout.sizes[entry.block]


# -- round trips -------------------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=40).filter(
    lambda name: ".." not in name.replace("\\", "/").split("/")
)
STAMPS = st.builds(Version, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Blocks with one to three entries each: dense, or strided with gaps, overlaps and repeats."""
    entries: list[Entry] = []
    sizes: list[int] = []
    for names in draw(st.lists(st.lists(NAMES, min_size=1, max_size=3), max_size=5)):
        size = 0
        for name in names:
            dtype = draw(st.sampled_from(list(DTYPES)))
            shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
            strides = tuple(draw(st.integers(0, 9)) for _ in shape) if draw(st.booleans()) else ()
            steps = strides or dense_strides(shape)
            extent = 1 + sum((n - 1) * step for n, step in zip(shape, steps)) if 0 not in shape else 0
            offset = draw(st.integers(0, 3)) * DTYPES[dtype]
            size = max(size, offset + extent * DTYPES[dtype])
            entries.append(Entry(name, dtype, shape, len(sizes), offset, strides))
        sizes.append(size + draw(st.integers(0, 3)))
    unique = [msgspec.structs.replace(entry, name=f"{i}{entry.name}") for i, entry in enumerate(entries)]
    return Layout(tuple(draw(st.permutations(unique))), tuple(sizes))


@given(layouts())
def test_a_layout_comes_out_as_it_went_in(layout: Layout) -> None:
    decoded = wire.decode_layout(wire.encode_layout(layout))
    assert decoded == layout
    assert decoded.wire == layout.wire
    assert_sound(decoded)


HEADERS = st.builds(
    lambda layout, stamps, digest, metadata, encoding: Header(
        max(stamps), layout, None if stamps[0] == stamps[1] else min(stamps), digest, metadata, encoding
    ),
    layouts(),
    st.tuples(STAMPS, STAMPS),
    st.sampled_from([b"", bytes(range(16))]),
    st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text(), max_size=3).map(
        wire.encode_metadata
    ),
    st.sampled_from(["plain", "x" * 32]),
)


@given(HEADERS, st.sampled_from([bytes, bytearray, memoryview]))
def test_a_header_comes_out_as_it_went_in(header: Header, kind: Callable[[bytes], Any]) -> None:
    data = wire.encode_header(header)
    assert wire.decode_header(kind(data)) == header
    assert len(data) <= wire.header_size_bound(header.layout, header.metadata)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_metadata_comes_out_as_it_went_in(metadata: dict[str, Any]) -> None:
    assert wire.decode_metadata(wire.encode_metadata(metadata)) == metadata


def test_no_metadata_is_empty_metadata() -> None:
    assert wire.decode_metadata(wire.encode_metadata(None)) == {}


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, (1, 2), {1: 2}, {1, 2}, b"bytes", "\ud800", object(), np.float32(1), 10**5000, 1j],
    ids=["nan", "inf", "tuple", "int key", "set", "bytes", "surrogate", "object", "numpy", "huge", "complex"],
)
def test_metadata_that_json_would_change_is_refused_by_key(value: Any) -> None:
    with pytest.raises(WireError, match="'loss'"):
        wire.encode_metadata({"ok": 1, "loss": value})
    with pytest.raises(WireError, match="'outer'"):
        wire.encode_metadata({"outer": {"list": [value]}})


def test_metadata_is_bounded() -> None:
    with pytest.raises(WireError, match="65536"):
        wire.encode_metadata({"text": "x" * wire.MAX_METADATA})
    for raw in (b"{" + b" " * wire.MAX_METADATA + b"}", b"[" * 60_000, b"[]", b'{"a":', b"\xff"):
        assert "metadata" in refusal(wire.decode_metadata, raw)
        assert "metadata" in refusal(wire.decode_header, head(metadata=raw))


EVENTS: list[Event] = [
    Joined(worker="w", incarnation=3, host="h", pid=9, have=Have(Version(5, 2), Version(5, 1)), needs=b"\0n"),
    Joined(worker="w", notes={"key": "value"}),
    Staged(worker="w", stamp=Version(5, 1)),
    Applied(worker="w", stamp=Version(5, 1), digest="ab", tensors=3, nbytes=12, seconds={"wait": 0.5}, error="hook"),
    Refused(worker="w", stamp=Version(5, 1), kind="apply", phase="commit", error="so\nlong", tensor="a.b"),
    Lost(worker="w", reason="killed"),
    Left(worker="w"),
    Noted(worker="w", incarnation=3, notes={"key": "value"}),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_an_event_comes_out_as_it_went_in(event: Event, kind: Callable[[bytes], Any]) -> None:
    assert wire.decode_event(kind(wire.encode_event(event))) == event


def test_a_report_is_not_lost_over_the_words_of_its_error() -> None:
    event = Refused(
        worker="w", stamp=Version(5, 1), kind="apply", phase="commit", error="\ud800" * 10**6, tensor="é" * 5000
    )
    decoded = wire.decode_event(wire.encode_event(event))
    assert isinstance(decoded, Refused)
    assert decoded.error.endswith(f"({10**6 - wire.MAX_TEXT} characters and more)")
    assert len(decoded.error) == wire.MAX_TEXT
    assert len(decoded.tensor) == wire.MAX_NAME


@pytest.mark.parametrize(
    "event",
    [
        Left(worker=""),
        Left(worker="x" * 257),
        Left(worker="a\nb"),
        Left(worker="a\x1b[2Jb"),
        Left(worker="\ud800"),
        Left(worker="w", incarnation=2**64),
        Joined(worker="w", host="\0"),
        Joined(worker="w", notes={str(i): "" for i in range(1000)}),
        Joined(worker="w", notes={"a": "x" * 2**20}),
        Joined(worker="w", needs=bytes(wire.MAX_HEADER)),
    ],
    ids=["nameless", "long", "break", "escape", "surrogate", "int", "NUL", "notes", "note", "needs"],
)
def test_an_event_out_of_bounds_is_neither_sent_nor_taken(event: Event) -> None:
    with pytest.raises(WireError, match="event: "):
        wire.encode_event(event)
    try:
        raw = frame(EVENT, msgspec.msgpack.encode(event))
    except (UnicodeEncodeError, OverflowError):
        return  # not even msgpack writes it
    refusal(wire.decode_event, raw)


# -- the cache ---------------------------------------------------------------------------------------------------------


def many(count: int) -> Layout:
    return wire.decode_layout(columns(count))


def test_equal_layouts_are_one_object() -> None:
    cache = wire.LayoutCache()
    first, second = (wire.decode_header(wire.encode_header(Header(Version(5, n), many(3))), cache) for n in (1, 2))
    assert first.layout is second.layout
    assert (first.stamp, second.stamp) == (Version(5, 1), Version(5, 2))


def test_the_cache_forgets_what_was_used_longest_ago() -> None:
    cache = wire.LayoutCache(size=2)
    full, subset, third = (wire.encode_header(Header(Version(5, 1), many(n))) for n in (1, 2, 3))
    kept = wire.decode_header(full, cache).layout
    dropped = wire.decode_header(subset, cache).layout
    assert wire.decode_header(full, cache).layout is kept
    wire.decode_header(third, cache)
    assert wire.decode_header(full, cache).layout is kept
    assert wire.decode_header(subset, cache).layout is not dropped


def test_a_damaged_layout_is_not_taken_for_a_known_one() -> None:
    cache = wire.LayoutCache()
    data = wire.encode_header(Header(Version(5, 1), many(3)))
    wire.decode_header(data, cache)
    for position in range(len(data) - len(many(3).wire), len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(WireError):
            wire.decode_header(damaged, cache)


def test_ten_thousand_tensors_cost_little() -> None:
    layout = many(10_000)
    begun = time.thread_time()
    data = wire.encode_layout(layout)
    wire.decode_layout(data)
    assert time.thread_time() - begun < 0.12

    header, cache = wire.encode_header(Header(Version(5, 1), layout)), wire.LayoutCache()
    wire.decode_header(header, cache)
    begun = time.thread_time()
    for _ in range(100):
        wire.decode_header(header, cache)
    assert (time.thread_time() - begun) / 100 < 200e-6  # one comparison of 400 KB; building it anew takes 5 ms


# -- hostile input, by name --------------------------------------------------------------------------------------------

HOSTILE_LAYOUTS: dict[str, tuple[bytes, str]] = {
    "a million empty tensors": (
        columns(10**6, names=b"\n" * (10**6 - 1), dims=np.zeros(10**6), sizes=np.zeros(10**6)),
        "1000000 tensors",
    ),
    "a million scalars over one block": (columns(2, blocks=bytes(4 * 10**6), ranks=bytes(10**6)), "columns disagree"),
    "rank 100,000": (columns(2, dims=np.ones(100_000)), "do not add up"),
    "rank 255": (columns(2, ranks=[1, 255], dims=np.ones(256)), "'w1'.*more than 64 dimensions"),
    "65 dimensions": (columns(2, ranks=[1, 65], dims=np.ones(66)), "'w1'.*more than 64 dimensions"),
    "more dimensions than come": (columns(2, ranks=[1, 3]), "do not add up"),
    "dimensions in all": (columns(2**16, ranks=np.full(2**16, 9), dims=np.ones(9 * 2**16)), "589824 dimensions"),
    "a negative dimension": (columns(2, dims=[4, -1]), "negative"),
    "dimensions whose product overflows": (columns(2, ranks=[1, 4], dims=[4, 2**32, 2**32, 2, 2]), "'w1'.*elements"),
    "dimensions whose product is 0 modulo 2**64": (columns(2, ranks=[1, 2], dims=[4, 2**32, 2**32]), "'w1'.*elements"),
    "64 huge dimensions": (columns(2, ranks=[1, 64], dims=[4, *[2**46] * 64]), "'w1'.*elements"),
    "huge dimensions and a zero": (columns(2, ranks=[1, 4], dims=[4, 2**46, 2**46, 2**46, 0]), "'w1'.*elements"),
    "a dimension above every bound": (columns(2, dims=[4, 2**63 - 1]), "above"),
    "a tensor larger than its block": (columns(2, dims=[4, 5]), "'w1'.*outside"),
    "an offset beyond the block": (columns(2, offsets=[0, 4]), "'w1'.*outside"),
    "an offset far beyond": (columns(2, offsets=[0, 2**46]), "'w1'.*outside"),
    "an offset beyond 64 bits, nearly": (columns(2, offsets=[0, 2**63 - 4]), "above"),
    "a negative offset": (columns(2, offsets=[0, -4]), "negative"),
    "an empty tensor behind its block": (columns(2, dims=[4, 0], offsets=[0, 20]), "'w1'.*outside"),
    "an offset off the element": (columns(2, offsets=[0, 2], sizes=[16, 18]), "'w1'.*multiple"),
    "a tensor reaching over into the next block": (columns(2, dims=[8, 4]), "'w0'.*outside"),
    "strides out of the block": (columns(2, strided=[0, 1], strides=[2]), "'w1'.*outside"),
    "strides that overflow": (columns(2, strided=[0, 1], dims=[4, 2**40], strides=[2**46]), "'w1'.*outside"),
    "a negative stride": (columns(2, strided=[0, 1], strides=[-1]), "negative"),
    "strides missing": (columns(2, strided=[0, 1]), "do not add up"),
    "strides for nobody": (columns(2, strides=[1]), "do not add up"),
    "strided, more or less": (columns(2, strided=[0, 2], strides=[1, 1]), "strided nor not"),
    "a block that is not there": (columns(2, blocks=[0, 2]), "'w1'.*not there"),
    "a block far away": (columns(2, blocks=[0, 2**32 - 1]), "'w1'.*not there"),
    "a block that nobody uses": (columns(2, blocks=[0, 0]), "no tensor uses"),
    "blocks without tensors": (columns(0, sizes=[16]), "no tensor uses"),
    "a negative block size": (columns(2, dims=[4, 0], sizes=[16, -16]), "negative"),
    "more bytes than there can be": (columns(2, sizes=[2**46, 2**46]), "bytes in all"),
    "sizes whose sum overflows": (columns(2**17, sizes=np.full(2**17, 2**46)), "bytes in all"),
    "an unknown dtype": (columns(2, dtypes=[1, len(DTYPES)]), "'w1'.*dtype"),
    "a name twice": (columns(3, names=b"a\nb\na"), "'a' is there twice"),
    "a name twice, far on": (
        columns(2**17, names=b"\n".join(b"%063d" % i for i in [*range(2**17 - 1), 2**17 - 2])),
        "131070' is there twice",
    ),
    "a NUL in a name": (columns(2, names=b"a\nb\0c"), r"'b\\x00c' has a control"),
    "an escape in a name": (columns(2, names=b"a\x1b[2J\nb"), "control"),
    "a DEL in a name": (columns(2, names=b"a\x7f\nb"), "control"),
    "a C1 control in a name": (columns(2, names="a\nb\x9b".encode()), "control"),
    "control characters, nearly, in millions": (columns(1, names=b"\xc2\xa9" * 2**22), "longer than 1024"),
    "no UTF-8, in millions": (columns(2**13, names=b"\n".join([b"\xc2" * 1023] * 2**13)), "not UTF-8"),
    "a line break in a name": (columns(2, names=b"a\nb\nc"), "not 2 names"),
    "too few names": (columns(2, names=b"a"), "not 2 names"),
    "an empty name": (columns(2, names=b"a\n"), "tensor 1 has no name"),
    "names without tensors": (columns(0, names=b"a"), "not 0 names"),
    "a path upwards": (columns(2, names=b"a\n../../etc/passwd"), "'../../etc/passwd' goes up"),
    "a path upwards, inside": (columns(2, names=b"a/../../b\nc"), "goes up"),
    "a path upwards, at the end": (columns(2, names=b"c\na/.."), "goes up"),
    "a path upwards, the other slash": (columns(2, names=b"c\na\\..\\b"), "goes up"),
    "only dots": (columns(1, names=b".."), "goes up"),
    "a name that is not UTF-8": (columns(2, names=b"a\nb\xff"), "not UTF-8"),
    "a character across two names": (columns(2, names=b"a\xc3\n\xa9b"), "not UTF-8"),
    "an overlong name": (columns(2, names=b"a\n" + b"x" * 1025), "longer than 1024"),
    "overlong names in all": (columns(2, names=b"a" * (8 * 2**20) + b"\nb"), "bytes of names"),
    "columns of other lengths": (columns(3, dtypes=[1, 1]), "columns disagree"),
    "a column that ends within a number": (columns(2, dims=bytes(15)), "within a number"),
    "more than a frame": (columns(2) + b"x", "too long"),
    "another body": (frame(LAYOUT, parts(columns(2))[0], b"x"), "followed"),
    "more than its columns": (frame(LAYOUT, parts(columns(2))[0] + b"\xc0"), "malformed"),
    "fewer columns": (frame(LAYOUT, msgspec.msgpack.encode([b"", b"", b""])), "malformed"),
    "no columns": (frame(LAYOUT, msgspec.msgpack.encode({"names": []})), "malformed"),
    "an array of 4 billion": (frame(LAYOUT, b"\xdd\xff\xff\xff\xff"), "malformed"),
    "a column of 4 GB": (frame(LAYOUT, b"\x99\xc6\xff\xff\xff\xff"), "malformed"),
    "nested without end": (frame(LAYOUT, b"\x9a" + msgspec.msgpack.encode(b"") * 9 + b"\x91" * 10**5), "malformed"),
    "a pickle": (frame(LAYOUT, b"\x80\x04\x8c\x02os\x8c\x06system\x93."), "malformed"),
    "nothing": (b"", "0 bytes"),
    "32 MiB and more": (columns(2) + bytes(wire.MAX_HEADER), "bytes, expected"),
}


@pytest.mark.parametrize("name", HOSTILE_LAYOUTS)
def test_hostile_layout(name: str) -> None:
    data, message = HOSTILE_LAYOUTS[name]
    with pytest.raises(WireError, match=message):
        wire.decode_layout(data)
    refusal(wire.decode_layout, data)
    if len(data) < wire.MAX_HEADER:
        refusal(wire.decode_header, frame(HEADER, parts(head())[0], data))


HOSTILE_HEADERS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "0 bytes"),
    "truncated in the prefix": (head()[:20], "20 bytes"),
    "truncated in the head": (head()[:30], "truncated"),
    "truncated in the layout": (head()[:-1], "truncated"),
    "followed by something": (head() + b"\0", "too long"),
    "larger than a header may be": (head() + bytes(wire.MAX_HEADER), "bytes, expected"),
    "lengths beyond the data": (b"WWHD" + struct.pack("<IIIQ", 1, 2**32 - 1, 2**32 - 1, 0), "truncated"),
    "of another kind": (columns(2), "not one of Weightwire's.*WWLY"),
    "a pickle": (b"\x80\x04\x95" + b"c__builtin__\neval\n" * 3, "not one of Weightwire's"),
    "HTTP": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "not one of Weightwire's"),
    "of a future format": (frame(HEADER, b"", version=2), "a newer format, 2; this side reads format 1.*same release"),
    "of no format": (frame(HEADER, b"", version=0), "an unknown format, 0"),
    "a damaged head": (head()[:24] + b"\x94" + head()[25:], "damaged"),
    "no head": (frame(HEADER, b"", columns(2)), "malformed"),
    "a negative epoch": (head(stamp=(-1, 7)), "no stamp"),
    "a number beyond 63 bits": (head(stamp=(5, 2**63)), "no stamp"),
    "a stamp of three": (head(stamp=(5, 6, 7)), "malformed"),
    "a stamp of text": (head(stamp="57"), "malformed"),
    "a base that is not older": (head(base=(5, 7)), "not older"),
    "a base of a newer epoch": (head(base=(6, 1)), "not older"),
    "a long digest": (head(digest=bytes(33)), "digest"),
    "a long encoding": (head(encoding="x" * 33), "encoding"),
    "no encoding": (head(encoding=""), "encoding"),
    "no layout": (frame(HEADER, parts(head())[0]), "layout: 0 bytes"),
    "a layout that is a header": (frame(HEADER, parts(head())[0], head()), "layout: not one"),
}


@pytest.mark.parametrize("name", HOSTILE_HEADERS)
@pytest.mark.parametrize("cached", [False, True])
def test_hostile_header(name: str, cached: bool) -> None:
    data, message = HOSTILE_HEADERS[name]
    cache = wire.LayoutCache() if cached else None
    wire.decode_header(head(), cache)
    with pytest.raises(WireError, match=message):
        wire.decode_header(data, cache)
    refusal(lambda raw: wire.decode_header(raw, cache), data)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout((Entry("a", "float32", (1,) * 100_000, 0),), (4,)), "'a'.*64 dimensions"),
        (Layout((Entry("a", "quint8", (1,), 0),), (1,)), "'a'.*'quint8'"),
        (Layout((Entry("a\nb", "int8", (1,), 0),), (1,)), "line break"),
        (Layout((Entry("a\0b", "int8", (1,), 0),), (1,)), "control"),
        (Layout((Entry("../a", "int8", (1,), 0),), (1,)), "goes up"),
        (Layout((Entry("", "int8", (1,), 0),), (1,)), "no name"),
        (Layout((Entry("\ud800", "int8", (1,), 0),), (1,)), "lone surrogate"),
        (Layout((Entry("a", "int8", (2**70,), 0),), (1,)), "cannot be sent"),
        (Layout((Entry("a", "int8", (2,), 0),), (1,)), "outside"),
        (Layout((Entry("a", "int8", (2, 2), 0, 0, (1,)),), (9,)), "strides"),
        (Layout((Entry("a", "int8", (1,), 0),) * 2, (1,)), "twice"),
        (Layout((Entry("a", "int8", (1,), -1),), (1,)), "negative"),
    ],
)
def test_what_a_worker_would_refuse_is_not_sent(layout: Layout, message: str) -> None:
    with pytest.raises(WireError, match=message):
        wire.encode_layout(layout)


def test_the_limits_themselves_are_taken() -> None:
    names = [f"{'x' * 1023}{i}" for i in range(10)]
    layout = Layout(tuple(Entry(name, "uint8", (1,) * 64, i) for i, name in enumerate(names)), (1,) * 10)
    assert wire.decode_layout(layout.wire) == layout
    huge = Layout((Entry("a", "uint8", (wire.MAX_BYTES,), 0),), (wire.MAX_BYTES,))
    assert wire.decode_layout(huge.wire) == huge
    assert len(many(wire.MAX_TENSORS).entries) == wire.MAX_TENSORS


# -- mutations ---------------------------------------------------------------------------------------------------------


def originals() -> list[bytes]:
    plain = Layout((Entry("weight", "float32", (4, 3), 0), Entry("bias", "bfloat16", (4,), 1)), (48, 8))
    tied = Layout(
        (
            Entry("encoder.weight", "float32", (4, 3), 0),
            Entry("decoder.weight", "float32", (3, 4), 0, 0, (1, 3)),
            Entry("row", "float32", (3,), 0, 12),
            Entry("steps", "int64", (), 1),
            Entry("größe/λ", "bool", (0, 8), 2),
            Entry("expanded", "complex64", (5, 2), 3, 8, (0, 1)),
        ),
        (48, 8, 0, 24),
    )
    base = Version(1_700_000_000_000, 40)
    return [
        wire.encode_header(Header(base, many(1))),
        wire.encode_header(
            Header(Version(base.epoch, 41), plain, base, bytes(range(16)), b'{"step": 41, "lr": [0.1]}')
        ),
        wire.encode_header(Header(base, tied, None, b"", b"{}", "delta")),
        wire.encode_header(Header(base, many(40))),
    ]


EDGES = [
    b"",
    b"\0" * 8,
    b"\xff" * 8,
    b"\xff" * 7 + b"\x7f",
    b"\0" * 7 + b"\x80",
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
]


def mutated(rng: random.Random, data: bytes) -> bytes:
    """One change of a random kind."""
    start = rng.randrange(len(data) + 1)
    stop = min(len(data), start + rng.choice((0, 1, 1, 2, 4, 8, 8, 64)))
    kind = rng.randrange(7)
    if kind == 0 and data:  # a bit
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == 1:  # a byte or a few
        return data[:start] + rng.randbytes(stop - start) + data[stop:]
    if kind == 2:  # an extreme number, in place or pushed in
        return data[:start] + rng.choice(EDGES) + data[rng.choice((start, stop)) :]
    if kind == 3:  # truncated
        return data[:start]
    if kind == 4:  # a part twice, or missing
        return data[:stop] + data[rng.randrange(stop + 1) :]
    if kind == 5:  # exchanged
        return data[:start] + data[stop:] + data[start:stop]
    return rng.randbytes(rng.choice((0, 1, 24, 100, 1000)))


def resealed(rng: random.Random, data: bytes) -> bytes:
    """A change behind the checksums, as somebody makes it who knows them."""
    head, layout = parts(data)
    inside = parts(layout)[0]
    if rng.random() < 0.25:
        return frame(HEADER, mutated(rng, head), layout)
    if rng.random() < 0.5:
        return frame(HEADER, head, frame(LAYOUT, mutated(rng, inside)))
    raw = msgspec.msgpack.decode(inside)  # within one column, so that the columns stay columns
    column = rng.randrange(len(raw))
    raw[column] = mutated(rng, raw[column])
    return frame(HEADER, head, frame(LAYOUT, msgspec.msgpack.encode(raw)))


def fuzz(count: int, seed: int) -> None:
    """Mutate headers: each is refused with a WireError, or a sound one where it was sealed anew; all in time."""
    rng, known, cache = random.Random(seed), originals(), wire.LayoutCache()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for turn in range(count):
        original = rng.choice(known)
        sealed = bool(turn % 2)
        data = (resealed if sealed else mutated)(rng, original)
        traced = turn % 100 < 2
        if traced:
            tracemalloc.start()
        begun = time.thread_time()
        try:
            header = wire.decode_header(data, cache if turn % 4 < 2 else None)
        except WireError:
            header = None
        spent = time.thread_time() - begun
        where = f"seed {seed}, turn {turn}: {data.hex()}"
        if traced:
            assert tracemalloc.get_traced_memory()[1] < MEMORY, where
            tracemalloc.stop()
        assert spent < SECONDS, where
        if header is not None:
            assert sealed or data == original, where
            assert_sound(header.layout)
            assert wire.decode_header(wire.encode_header(header)) == header, where
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY


def test_mutated_headers() -> None:
    fuzz(100_000, seed=20)


@pytest.mark.soak
def test_mutated_headers_anew() -> None:
    fuzz(300_000, seed=secrets.randbits(64))


def test_every_single_bit_of_a_header_is_guarded() -> None:
    for original in originals():
        for position, bit in itertools.product(range(len(original)), range(8)):
            flipped = bytearray(original)
            flipped[position] ^= 1 << bit
            with pytest.raises(WireError):
                wire.decode_header(flipped)


def test_mutated_events() -> None:
    rng = random.Random(21)
    raw = [wire.encode_event(event) for event in EVENTS]
    for turn in range(20_000):
        data = rng.choice(raw)
        head, needs = parts(data)
        data = frame(EVENT, mutated(rng, head), needs) if turn % 2 else mutated(rng, data)
        begun = time.thread_time()
        try:
            event = wire.decode_event(data)
        except WireError:
            continue
        finally:
            assert time.thread_time() - begun < SECONDS
        assert wire.decode_event(wire.encode_event(event)) == event
