"""The closed list of dtypes that travel, by name. No torch is imported to look at names and sizes."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "code_of", "dtype_name", "needs_bit_copy", "torch_dtype"]

DTYPES: dict[str, int] = {
    # name -> bytes an element. The order is the wire's: append only.
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bits8": 1,
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    **{f"{sign}{bits}": 1 for sign in ("int", "uint") for bits in range(1, 8)},
}
"""Every dtype of torch but the quantised ones, which carry their scale outside of their bytes."""

_CODES = {name: code for code, name in enumerate(DTYPES)}


def code_of(name: str) -> int:
    """The number that stands for a dtype on the wire."""
    return _CODES[name]


@cache
def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``. Raises ``LookupError`` where the name is unknown or this torch lacks it."""
    import torch

    dtype = getattr(torch, name, None) if name in DTYPES else None
    if not isinstance(dtype, torch.dtype):
        raise LookupError(f"dtype {name!r} is not one of {', '.join(DTYPES)}, or torch {torch.__version__} lacks it")
    return dtype


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``; also for dtypes outside the closed list, so that errors can name them."""
    return str(dtype).removeprefix("torch.")


@cache
def needs_bit_copy(dtype: torch.dtype) -> bool:
    """Whether torch has no copy kernel for this dtype (its sub-byte integers): one copies ``view(uint8)`` instead."""
    name = dtype_name(dtype)
    return name in DTYPES and name[:-1] in ("int", "uint") and name[-1] != "8"
