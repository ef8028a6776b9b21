"""Headers, layouts and events <-> bytes: what one end reads of the other without having to trust it.

Every message is one frame: a fixed prefix (magic, format, lengths, checksum), a msgpack head of a closed type, and a
body. Nothing is unpickled or called, and nothing is allocated out of proportion to the bytes that came: counts, ranges
and sums are checked on the raw columns before the first object is made. Whatever is wrong, it is a ``WireError``.

The layout is a frame of its own, column by column, so that ten thousand tensors are nine arrays. It is the body of
every header; a receiver compares it with those that it knows (:class:`LayoutCache`) and decodes only what is new.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from weightwire.errors import WireError
from weightwire.transport import Event, Header, Joined, Version
from weightwire.weights.dtypes import DTYPES, code_of
from weightwire.weights.layout import ALIGNMENT, Entry, Layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "FORMAT",
    "MAX_BYTES",
    "MAX_DIMS",
    "MAX_EVENT",
    "MAX_HEADER",
    "MAX_LABEL",
    "MAX_METADATA",
    "MAX_NAME",
    "MAX_NAMES",
    "MAX_RANK",
    "MAX_TENSORS",
    "MAX_TEXT",
    "LayoutCache",
    "decode_event",
    "decode_header",
    "decode_layout",
    "decode_metadata",
    "encode_event",
    "encode_header",
    "encode_layout",
    "encode_metadata",
    "header_size_bound",
]

FORMAT = 1
"""The number of this format. It grows when a reader of the old one could not read the new one."""

MAX_HEADER = 32 * 2**20
"""Bytes of a header, layout included; also of what a worker says that it needs."""
MAX_TENSORS = 2**17
MAX_RANK = 64
MAX_DIMS = 2**19
"""Dimensions of all tensors of one layout together."""
MAX_NAME = 1024
"""Bytes (UTF-8) of one tensor's name."""
MAX_NAMES = 8 * 2**20
"""Bytes of all names of one layout together."""
MAX_BYTES = 2**46
"""Of a payload (64 TiB), and so of each block, offset, stride and dimension. Small enough to be exact in a float64."""
MAX_METADATA = 2**16
"""Bytes of the caller's metadata, as JSON."""
MAX_EVENT = 2**20
"""Bytes of an event, without what a worker says that it needs."""
MAX_LABEL = 256
"""Characters of a worker's name, a host's, a phase's."""
MAX_TEXT = 2**17
"""Characters of an error's text; a longer one is cut when it is sent."""

_HEADER, _LAYOUT, _EVENT = b"WWHD", b"WWLY", b"WWEV"
_KINDS = {_HEADER: "header", _LAYOUT: "layout", _EVENT: "event"}
_PREFIX = struct.Struct("<4sIIIQ")  # magic, format, bytes of the head, bytes of the body, xxh3-64 of the head


# -- frames ------------------------------------------------------------------------------------------------------------


def _frame(magic: bytes, head: bytes, body: bytes = b"") -> bytes:
    frame = b"".join((_PREFIX.pack(magic, FORMAT, len(head), len(body), xxh3_64_intdigest(head)), head, body))
    if len(frame) > MAX_HEADER:
        raise WireError(f"{_KINDS[magic]}: {len(frame)} bytes are more than the {MAX_HEADER} that the wire takes")
    return frame


def _open(magic: bytes, data: memoryview) -> tuple[memoryview, memoryview]:
    """Head and body of a frame, without copying. The head is checked against its sum; the body vouches for itself."""
    kind, size = _KINDS[magic], len(data)
    if not _PREFIX.size <= size <= MAX_HEADER:
        raise WireError(f"{kind}: {size} bytes, expected {_PREFIX.size} to {MAX_HEADER}")
    found, version, head, body, check = _PREFIX.unpack_from(data)
    if found != magic:
        raise WireError(f"{kind}: not one of Weightwire's: it begins with {found!r} instead of {magic!r}")
    if version != FORMAT:
        what = "a newer" if version > FORMAT else "an unknown"
        raise WireError(
            f"{kind}: of {what} format, {version}; this side reads format {FORMAT}. "
            "Install the same release of weightwire on both sides"
        )
    if _PREFIX.size + head + body != size:
        raise WireError(f"{kind}: truncated or too long: {size} bytes, {_PREFIX.size + head + body} were announced")
    middle = _PREFIX.size + head
    if xxh3_64_intdigest(data[_PREFIX.size : middle]) != check:
        raise WireError(f"{kind}: damaged on the way: the checksum does not fit")
    return data[_PREFIX.size : middle], data[middle:]


HeadT = TypeVar("HeadT")


def _decode(kind: str, decoder: msgspec.msgpack.Decoder[HeadT], head: memoryview) -> HeadT:
    try:
        return decoder.decode(head)
    # Python's own kinds come from bad UTF-8, from numbers beyond 64 bits and from absurd nesting.
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as exc:
        raise WireError(f"{kind}: malformed: {exc}") from exc


def _encode(kind: str, head: Any) -> bytes:
    try:
        return _ENCODER.encode(head)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, TypeError) as exc:
        raise WireError(f"{kind}: cannot be sent: {exc}") from exc


def _flat(kind: str, data: bytes | bytearray | memoryview) -> bytes:
    """As bytes, so that nobody changes them meanwhile, and comparing them with a known layout is one memcmp."""
    if isinstance(data, bytes):
        return data
    size = memoryview(data).nbytes
    if size > MAX_HEADER:
        raise WireError(f"{kind}: {size} bytes, at most {MAX_HEADER} are taken")
    return bytes(data)


_ENCODER = msgspec.msgpack.Encoder()


# -- layouts -----------------------------------------------------------------------------------------------------------

_NAMES = list(DTYPES)
_ITEMSIZES = np.array(list(DTYPES.values()), dtype=np.int64)
# For one pass over all names: control characters become NULs, slashes become the newlines that also part the names.
_CONTROLS = bytes(code for code in (*range(32), 127) if code != ord("\n"))
_PLAIN = bytes.maketrans(_CONTROLS + b"/\\", bytes(len(_CONTROLS)) + b"\n\n")


class _Columns(msgspec.Struct, array_like=True, frozen=True):
    """A layout as it travels. Little-endian; the views look into the message itself."""

    names: memoryview  # UTF-8, joined by newlines
    dtypes: memoryview  # u8 an entry, the position in DTYPES
    ranks: memoryview  # u8 an entry
    strided: memoryview  # u8 an entry: 1 where strides are given
    blocks: memoryview  # u32 an entry
    offsets: memoryview  # i64 an entry, bytes
    dims: memoryview  # i64, those of all entries in a row
    strides: memoryview  # i64, those of the strided entries in a row, elements
    sizes: memoryview  # i64 a block, bytes


_COLUMNS = msgspec.msgpack.Decoder(_Columns)
_TYPES = ("<u1", "<u1", "<u1", "<u4", "<i8", "<i8", "<i8", "<i8")


class _Table(NamedTuple):
    """The same, as arrays."""

    names: bytes
    dtypes: NDArray[Any]
    ranks: NDArray[Any]
    strided: NDArray[Any]
    blocks: NDArray[Any]
    offsets: NDArray[Any]
    dims: NDArray[Any]
    strides: NDArray[Any]
    sizes: NDArray[Any]


def encode_layout(layout: Layout) -> bytes:
    """The layout as a frame; ``Layout.wire`` keeps it. Raises :class:`WireError` for what no receiver would take."""
    table = _table(layout)
    _check(table)
    columns = [column.astype(kind).tobytes() for column, kind in zip(table[1:], _TYPES)]
    return _frame(_LAYOUT, _ENCODER.encode([table.names, *columns]))


def decode_layout(data: bytes | bytearray | memoryview) -> Layout:
    """The layout in a frame. Raises :class:`WireError`. Its ``wire`` is the bytes that were given."""
    data = _flat("layout", data)
    head, body = _open(_LAYOUT, memoryview(data))
    if len(body):
        raise WireError("layout: followed by something")
    columns = _decode("layout", _COLUMNS, head)
    names, *raw = (getattr(columns, field) for field in _Columns.__struct_fields__)
    # By nbytes: before msgspec 0.20 the views that it hands out have the wrong len.
    if names.nbytes > MAX_NAMES:
        raise WireError(f"layout: {names.nbytes} bytes of names, at most {MAX_NAMES} are taken")
    if any(column.nbytes % int(kind[2]) for column, kind in zip(raw, _TYPES)):
        raise WireError("layout: malformed: a column ends within a number")
    table = _Table(bytes(names), *(np.frombuffer(*pair) for pair in zip(raw, _TYPES)))
    _check(table)
    layout = Layout(entries=tuple(_entries(table)), sizes=tuple(table.sizes.tolist()))
    layout.__dict__["wire"] = data
    return layout


def _table(layout: Layout) -> _Table:
    entries = layout.entries
    unknown = next((entry for entry in entries if entry.dtype not in DTYPES), None)
    if unknown is not None:
        raise WireError(f"layout: tensor {unknown.name!r}: dtype {unknown.dtype!r} is not one of {', '.join(DTYPES)}")
    for entry in entries:
        if "\n" in entry.name:
            raise WireError(f"layout: tensor {entry.name!r} has a line break in its name")
        if len(entry.strides) not in (0, len(entry.shape)):
            raise WireError(f"layout: tensor {entry.name!r} has strides of another rank")
    columns = (
        [code_of(entry.dtype) for entry in entries],
        [len(entry.shape) for entry in entries],
        [1 if entry.strides else 0 for entry in entries],
        [entry.block for entry in entries],
        [entry.offset for entry in entries],
        list(chain.from_iterable(entry.shape for entry in entries)),
        list(chain.from_iterable(entry.strides for entry in entries)),
        layout.sizes,
    )
    try:
        names = "\n".join(entry.name for entry in entries).encode()
        return _Table(names, *(np.array(column, dtype=np.int64) for column in columns))
    except UnicodeEncodeError as exc:
        name = exc.object[exc.object.rfind("\n", 0, exc.start) + 1 :].split("\n", 1)[0]
        raise WireError(f"layout: tensor {name!a} has a lone surrogate in its name, which is no text") from exc
    except OverflowError as exc:  # a number beyond 64 bits
        raise WireError(f"layout: cannot be sent: {exc}") from exc


def _entries(table: _Table) -> Iterator[Entry]:
    dims, strides = iter(table.dims.tolist()), iter(table.strides.tolist())
    # For no entries there is one name, the empty one, which zip leaves out.
    columns = (table.dtypes, table.ranks, table.strided, table.blocks, table.offsets)
    rows = zip(*(column.tolist() for column in columns), table.names.decode().split("\n"))
    for code, rank, strided, block, offset, name in rows:
        shape = tuple(islice(dims, rank))
        yield Entry(name, _NAMES[code], shape, block, offset, tuple(islice(strides, rank)) if strided else ())


def _check(table: _Table) -> None:
    """Refuse a table that is no layout, without making an object for each entry of it (but for its name, bounded)."""
    _check_counts(table)
    _check_ranges(table)
    _check_names(table)


def _check_counts(table: _Table) -> None:
    count = len(table.dtypes)
    if count > MAX_TENSORS or len(table.sizes) > MAX_TENSORS:
        raise WireError(f"layout: {max(count, len(table.sizes))} tensors, at most {MAX_TENSORS} are taken")
    if any(len(column) != count for column in (table.ranks, table.strided, table.blocks, table.offsets)):
        raise WireError(f"layout: its columns disagree on how many of the {count} tensors there are")
    _refuse(table, table.ranks > MAX_RANK, f"more than {MAX_RANK} dimensions")
    if len(table.dims) > MAX_DIMS:
        raise WireError(f"layout: {len(table.dims)} dimensions, at most {MAX_DIMS} are taken")
    _refuse(table, table.strided > 1, "neither strided nor not")
    ranks = table.ranks.astype(np.int64)
    if len(table.dims) != ranks.sum() or len(table.strides) != (ranks * table.strided).sum():
        raise WireError("layout: the ranks do not add up to the dimensions or strides that are there")
    _refuse(table, table.dtypes >= len(DTYPES), "a dtype of an unknown code")


def _check_names(table: _Table) -> None:
    count, names = len(table.dtypes), table.names
    if len(names) > MAX_NAMES:
        raise WireError(f"layout: {len(names)} bytes of names, at most {MAX_NAMES} are taken")
    if names.count(b"\n") != max(count - 1, 0) or (names and not count):
        raise WireError(f"layout: there are not {count} names for {count} tensors")
    if not count:
        return
    plain = b"\n%b\n" % names.translate(_PLAIN)
    _refuse_name(names, plain.find(b"\0") - 1, "has a control character")
    _refuse_name(names, plain.find(b"\n..\n"), "goes up with '..'; names are labels, never paths")
    if b"\xc2" in names:  # the control characters beyond ASCII are C2 80 to C2 9F
        raw = np.frombuffer(names, np.uint8)
        _refuse_name(names, _first((raw[:-1] == 0xC2) & (raw[1:] < 0xA0)), "has a control character or is not UTF-8")
    pieces = names.split(b"\n")
    if not all(pieces):
        raise WireError(f"layout: tensor {pieces.index(b'')} has no name")
    if max(map(len, pieces)) > MAX_NAME:
        raise WireError(f"layout: a name is longer than {MAX_NAME} bytes: {_shown(max(pieces, key=len))}")
    if not names.isascii():
        _check_utf8(pieces)
    if len(set(pieces)) != count:
        seen: set[bytes] = set()
        again = next(piece for piece in pieces if piece in seen or seen.add(piece))  # type: ignore[func-returns-value]
        raise WireError(f"layout: the name {_shown(again)} is there twice")


def _refuse_name(names: bytes, at: int, why: str) -> None:
    if at >= 0:
        start, end = names.rfind(b"\n", 0, at) + 1, names.find(b"\n", at)
        raise WireError(f"layout: the name {_shown(names[start : end if end >= 0 else None])} {why}")


def _check_utf8(pieces: list[bytes]) -> None:
    for piece in pieces:  # one by one: the whole column as one text may take four times its size
        try:
            piece.decode()
        except UnicodeDecodeError as exc:
            raise WireError(f"layout: the name {piece!r} is not UTF-8") from exc


def _check_ranges(table: _Table) -> None:
    """Each entry lies within its block, each block is used, and no number can overflow.

    In float64, where a product of non-negative numbers that exceeds :data:`MAX_BYTES` stays above it, to infinity.
    """
    bounded = (table.dims, table.strides, table.offsets, table.sizes, table.blocks)
    if any(len(column) and (column.min() < 0 or column.max() > MAX_BYTES) for column in bounded):
        raise WireError(f"layout: a dimension, stride, offset or size is negative or above {MAX_BYTES}")
    if (-(-table.sizes // ALIGNMENT)).sum() > MAX_BYTES // ALIGNMENT:
        raise WireError(f"layout: more than {MAX_BYTES} bytes in all")
    _refuse(table, table.blocks >= len(table.sizes), "a block that is not there")
    used = np.zeros(len(table.sizes), dtype=bool)
    used[table.blocks] = True
    if not used.all():
        raise WireError("layout: a block that no tensor uses")

    itemsizes = _ITEMSIZES[table.dtypes]
    elements = _per_entry(np.multiply, np.maximum(table.dims, 1).astype(np.float64), table.ranks, 1.0)
    _refuse(table, elements > MAX_BYTES, f"more than {MAX_BYTES} elements")
    _refuse(table, table.offsets % itemsizes != 0, "an offset that is no multiple of its element's size")
    ends = _extents(table, elements) * itemsizes + table.offsets
    _refuse(table, ends > table.sizes[table.blocks], "bytes outside of its block")


def _extents(table: _Table, elements: NDArray[Any]) -> NDArray[Any]:
    """From the first element of each entry to behind its last, in elements."""
    extents: NDArray[Any] = elements.copy()
    given = table.strided.astype(bool)
    if given.any():
        ranks = table.ranks[given]
        dims = table.dims[np.repeat(given, table.ranks)]
        steps = np.maximum(dims - 1, 0).astype(np.float64) * table.strides
        extents[given] = 1 + _per_entry(np.add, steps, ranks, 0.0)
    if not table.dims.all():
        extents[_per_entry(np.minimum, table.dims, table.ranks, 1) == 0] = 0
    return extents


def _per_entry(reduce: np.ufunc, values: NDArray[Any], ranks: NDArray[Any], scalar: float) -> NDArray[Any]:
    """Reduce each entry's run of values; ``scalar`` for those of rank 0."""
    result: NDArray[Any] = np.full(len(ranks), scalar, dtype=np.float64)
    filled = ranks > 0
    if len(values):
        starts = np.cumsum(ranks, dtype=np.int64) - ranks
        with np.errstate(over="ignore"):
            result[filled] = reduce.reduceat(values, starts[filled])
    return result


def _refuse(table: _Table, bad: NDArray[Any], what: str) -> None:
    position = _first(bad)
    if position >= 0:
        name = table.names.split(b"\n", position + 1)[: position + 1][-1]
        raise WireError(f"layout: tensor {position} ({_shown(name)}) has {what}")


def _first(bad: NDArray[Any]) -> int:
    return int(bad.argmax()) if bad.any() else -1


def _shown(name: bytes) -> str:
    return repr(name[:MAX_NAME].decode(errors="replace"))


class LayoutCache:
    """The layouts seen last. Equal bytes give the *same* object, and so whatever is kept with it, without decoding."""

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._layouts: list[Layout] = []

    def find(self, data: bytes, start: int = 0) -> Layout | None:
        """The known layout whose frame is ``data[start:]``."""
        for layout in self._layouts:
            if len(layout.wire) == len(data) - start and data.startswith(layout.wire, start):
                if layout is not self._layouts[0]:
                    self.keep(layout)
                return layout
        return None

    def keep(self, layout: Layout) -> None:
        """Remember a layout; the one used longest ago is forgotten."""
        others = [known for known in self._layouts if known is not layout]
        self._layouts = [layout, *others[: self._size - 1]]


# -- headers -----------------------------------------------------------------------------------------------------------


class _Head(msgspec.Struct, array_like=True, frozen=True):
    stamp: Version
    base: Version | None
    digest: bytes
    metadata: bytes
    encoding: str


_HEAD = msgspec.msgpack.Decoder(_Head)
_MAX_DIGEST, _MAX_ENCODING = 32, 32
_HEAD_ROOM = 512  # more bytes than two stamps, a digest and an encoding take at their largest


def encode_header(header: Header) -> bytes:
    """The header as a frame: at most :func:`header_size_bound` bytes. Raises :class:`WireError`."""
    head = _Head(header.stamp, header.base, header.digest, header.metadata, header.encoding)
    _check_head(head)
    return _frame(_HEADER, _encode("header", head), header.layout.wire)


def decode_header(data: bytes | bytearray | memoryview, cache: LayoutCache | None = None) -> Header:
    """The header in a frame. Raises :class:`WireError`.

    With a cache, a layout that it knows costs one comparison of its bytes, and the same ``Layout`` comes out.
    """
    data = _flat("header", data)
    raw, body = _open(_HEADER, memoryview(data))
    head = _decode("header", _HEAD, raw)
    _check_head(head)
    layout = cache.find(data, len(data) - len(body)) if cache is not None else None
    if layout is None:
        layout = decode_layout(body)
        if cache is not None:
            cache.keep(layout)
    return Header(head.stamp, layout, head.base, head.digest, head.metadata, head.encoding)


def header_size_bound(layout: Layout, metadata: bytes = b"{}") -> int:
    """Bytes that a header of this layout and metadata never exceeds, whatever its stamp, base and digest."""
    return _PREFIX.size + _HEAD_ROOM + len(metadata) + len(layout.wire)


def _check_head(head: _Head) -> None:
    stamp, base = head.stamp, head.base
    if not 0 <= min(stamp) <= max(stamp) < 2**63:
        raise WireError(f"header: {stamp} is no stamp")
    if base is not None:
        if not 0 <= min(base) <= max(base) < 2**63:
            raise WireError(f"header: {base} is no stamp")
        if not base < stamp:
            raise WireError(f"header: a subset at {stamp} cannot lie on {base}, which is not older")
    if len(head.digest) > _MAX_DIGEST or not head.encoding or len(head.encoding) > _MAX_ENCODING:
        raise WireError("header: a digest or encoding of an unknown kind")
    if head.metadata != b"{}":
        decode_metadata(head.metadata)


def encode_metadata(metadata: Mapping[str, Any] | None) -> bytes:
    """The caller's metadata as JSON. Raises :class:`WireError` for what would come out of JSON as something else."""
    if not isinstance(metadata, (Mapping, type(None))):
        raise TypeError(f"metadata is {metadata!r:.100}; it is a mapping with text as keys, or None")
    plain = dict(metadata or {})
    for key, value in plain.items():
        try:
            kept = _same({key: value}, msgspec.json.decode(msgspec.json.encode({key: value})))
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, TypeError) as exc:
            raise WireError(f"metadata: {key!r} cannot be sent as JSON: {exc}") from exc
        if not kept:
            raise WireError(
                f"metadata: {key!r} would not come out of JSON as it went in ({value!r:.100}); "
                "use text, finite numbers, booleans, None, lists, and mappings with text as keys"
            )
    data = msgspec.json.encode(plain)
    if len(data) > MAX_METADATA:
        raise WireError(f"metadata: {len(data)} bytes as JSON, at most {MAX_METADATA} are taken")
    return data


def decode_metadata(data: bytes) -> dict[str, Any]:
    """What :func:`encode_metadata` was given. Raises :class:`WireError`."""
    if len(data) > MAX_METADATA:
        raise WireError(f"metadata: {len(data)} bytes as JSON, at most {MAX_METADATA} are taken")
    try:
        return _METADATA.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as exc:
        raise WireError(f"metadata: malformed: {exc}") from exc


_METADATA = msgspec.json.Decoder(dict[str, Any])


def _same(value: Any, other: Any) -> bool:
    """Equal, and of the same JSON types: ``1``, ``1.0`` and ``True`` are three values, a tuple is no list."""
    if isinstance(value, dict):
        return (
            isinstance(other, dict)
            and value.keys() == other.keys()
            and all(isinstance(key, str) and _same(item, other[key]) for key, item in value.items())
        )
    if isinstance(value, list):
        return isinstance(other, list) and len(value) == len(other) and all(map(_same, value, other))
    return type(value) is type(other) and bool(value == other)


# -- events ------------------------------------------------------------------------------------------------------------

_EVENTS = msgspec.msgpack.Decoder(Event)
_LABELS = ("worker", "host", "kind", "phase", "digest")
_TEXTS = {"error": MAX_TEXT, "reason": MAX_TEXT, "tensor": MAX_NAME}
_COUNTED = ("notes", "seconds")
_MAX_NOTES = 256


class _Bounded(NamedTuple):
    """The fields of one kind of event that have bounds."""

    labels: tuple[str, ...]
    texts: tuple[tuple[str, int], ...]
    counted: tuple[str, ...]

    @classmethod
    def of(cls, kind: type[msgspec.Struct]) -> _Bounded:
        fields = kind.__struct_fields__
        return cls(
            tuple(field for field in _LABELS if field in fields),
            tuple((field, limit) for field, limit in _TEXTS.items() if field in fields),
            tuple(field for field in _COUNTED if field in fields),
        )


_BOUNDED = {kind: _Bounded.of(kind) for kind in get_args(Event)}


def encode_event(event: Event) -> bytes:
    """The event as a frame. Long error texts are cut; anything else out of bounds raises :class:`WireError`."""
    needs = b""
    if isinstance(event, Joined):  # what the worker needs may be long: it travels behind the head, which stays small
        needs, event = event.needs, msgspec.structs.replace(event, needs=b"")
    for field, limit in _BOUNDED[type(event)].texts:
        if text := getattr(event, field):
            event = msgspec.structs.replace(event, **{field: _sendable(text, limit)})
    _check_event(event)
    head = _encode("event", event)
    if len(head) > MAX_EVENT:
        raise WireError(f"event: {len(head)} bytes, at most {MAX_EVENT} are taken")
    return _frame(_EVENT, head, needs)


def decode_event(data: bytes | bytearray | memoryview) -> Event:
    """The event in a frame. Raises :class:`WireError`."""
    head, needs = _open(_EVENT, memoryview(_flat("event", data)))
    if len(head) > MAX_EVENT:
        raise WireError(f"event: {len(head)} bytes, at most {MAX_EVENT} are taken")
    event = _decode("event", _EVENTS, head)
    _check_event(event)
    if isinstance(event, Joined):
        return msgspec.structs.replace(event, needs=bytes(needs))
    if len(needs):
        raise WireError("event: followed by something")
    return event


def _check_event(event: Event) -> None:
    bounded = _BOUNDED[type(event)]
    for field in bounded.labels:
        label = getattr(event, field)
        if len(label) > MAX_LABEL or (not label.isprintable() and _has_control(label)):
            raise WireError(f"event: {field} has control characters, or more than {MAX_LABEL} of any: {label!r:.100}")
    if not event.worker:
        raise WireError("event: nobody's: the worker's name is empty")
    for field, limit in bounded.texts:
        if len(getattr(event, field)) > limit:
            raise WireError(f"event: its {field} is too long")
    for field in bounded.counted:
        if len(getattr(event, field)) > _MAX_NOTES:
            raise WireError(f"event: more than {_MAX_NOTES} {field}")


def _sendable(text: str, limit: int) -> str:
    """Any text, cut and made valid UTF-8: a report must not get lost over the words of an error."""
    if len(text) > limit:
        more = f" ... ({len(text) - limit} characters and more)"
        text = text[: limit - len(more)] + more
    return text.encode(errors="replace").decode()


def _has_control(text: str) -> bool:
    return any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in text)
