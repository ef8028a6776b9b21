"""A version as a safetensors file: https://huggingface.co/docs/safetensors (8 bytes of length, a JSON head, the data).

Whatever safetensors has words for (plain tensors of its dtypes, in no way tied) stands there under its own name, and
any reader of safetensors can load it. Other versions are one tensor of bytes, ``weightwire.payload``. In both, the
head's metadata carry Weightwire's own header, which says everything; the data may only be read by it.
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from weightwire import wire
from weightwire.errors import WireError
from weightwire.weights.arrays import array_of
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.layout import ALIGNMENT, Layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightwire.transport import Deadline, Header
    from weightwire.weights.payload import Payload

__all__ = ["Plan", "plan", "read", "write_blocks", "write_head"]

PAYLOAD = "weightwire.payload"
MAX_HEAD = 100_000_000
"""Bytes: what safetensors allows."""

_WORDS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


class Plan(NamedTuple):
    """Where a layout's blocks lie: offsets from the beginning of the data, bytes of the data, and the JSON for it."""

    layout: Layout
    offsets: tuple[int, ...]
    nbytes: int
    table: dict[str, Any]

    def head_size(self, header: int) -> int:
        """Bytes of the JSON head for a header of at most ``header`` bytes: a multiple of 8, so that data is aligned."""
        bare = len(msgspec.json.encode({**self.table, "__metadata__": _metadata(b"")}))
        return -(-(bare + 4 * -(-header // 3)) // 8) * 8


def plan(layout: Layout) -> Plan:
    """The same for everybody who knows the layout."""
    if not _plain(layout):
        table: dict[str, Any] = {PAYLOAD: _described("U8", (layout.nbytes,), 0, layout.nbytes)}
        return Plan(layout, layout.starts[:-1], layout.nbytes, table)
    # No padding is allowed between tensors, so the widest dtypes come first: then each is aligned to its own width.
    by_width = sorted(layout.entries, key=lambda entry: -DTYPES[entry.dtype])
    offsets, table, end = [0] * len(layout.sizes), {}, 0
    for entry in by_width:
        offsets[entry.block], begin = end, end
        end += layout.sizes[entry.block]
        table[entry.name] = _described(_WORDS[entry.dtype], entry.shape, begin, end)
    return Plan(layout, tuple(offsets), end, table)


def _plain(layout: Layout) -> bool:
    if len(layout.entries) != len(layout.sizes):
        return False  # tied
    return all(
        entry.dtype in _WORDS
        and not entry.strides
        and not entry.offset
        and entry.name not in ("__metadata__", PAYLOAD)
        and layout.sizes[entry.block] == prod(entry.shape) * DTYPES[entry.dtype]
        for entry in layout.entries
    )


def _described(word: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": word, "shape": shape, "data_offsets": (begin, end)}


def _metadata(header: bytes) -> dict[str, str]:
    return {"weightwire": b64encode(header).decode()}


# -- writing -----------------------------------------------------------------------------------------------------------


def write_blocks(fd: int, start: int, plan: Plan, payload: Payload, deadline: Deadline) -> bool:
    """Write all data, which begins at byte ``start`` of the file. ``False`` where the deadline came before the end."""
    for offset, block in zip(plan.offsets, payload.tensors()):
        data = memoryview(array_of(block))  # type: ignore[arg-type]
        done = 0
        while done < len(data):
            if deadline.expired:
                return False
            done += os.pwrite(fd, data[done : done + (64 << 20)], start + offset + done)
    return True


def write_head(fd: int, size: int, plan: Plan, header: bytes) -> None:
    """Write the head, filled up to ``size`` bytes with blanks, as safetensors allows."""
    text = msgspec.json.encode({**plan.table, "__metadata__": _metadata(header)}).ljust(size)
    os.pwrite(fd, size.to_bytes(8, "little") + text, 0)


# -- reading -----------------------------------------------------------------------------------------------------------


class _Head(msgspec.Struct):
    """The rest of the head is for others."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


_HEAD = msgspec.json.Decoder(_Head)


def read(fd: int, cache: wire.LayoutCache, known: Plan | None) -> tuple[Header, NDArray[np.uint8], Plan]:
    """The header and, in new memory laid out as ``Layout.starts`` says, the data. Raises :class:`WireError`."""
    total = os.fstat(fd).st_size
    size = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < size <= min(MAX_HEAD, total - 8):
        raise WireError(f"its head should have {size} bytes, where the file has {total}")
    try:
        coded = _HEAD.decode(os.pread(fd, size, 8)).metadata["weightwire"]
        header = wire.decode_header(b64decode(coded, validate=True), cache)
    except (msgspec.MsgspecError, KeyError, ValueError) as exc:  # WireError is a ValueError
        raise WireError(f"its head is not one of Weightwire's: {exc}") from exc
    layout = header.layout
    where = known if known is not None and known.layout is layout else plan(layout)
    if total != 8 + size + where.nbytes:
        raise WireError(f"it has {total} bytes, where {8 + size + where.nbytes} are announced")
    return header, _data(fd, 8 + size, where), where


def _data(fd: int, start: int, where: Plan) -> NDArray[np.uint8]:
    layout = where.layout
    raw = np.empty(layout.nbytes + ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT
    array = raw[first : first + layout.nbytes]
    for offset, begin, size in zip(where.offsets, layout.starts, layout.sizes):
        into, done = memoryview(array[begin : begin + size]), 0  # type: ignore[arg-type]
        while done < size:
            got = os.preadv(fd, [into[done : done + (64 << 20)]], start + offset + done)
            if not got:
                raise WireError(f"it ended at byte {start + offset + done}")
            done += got
    return array
