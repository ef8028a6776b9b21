"""States to push, and ways to compare what came out with what went in, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weightwire.weights.dtypes import DTYPES, dtype_name, needs_bit_copy, torch_dtype

__all__ = [
    "ARRANGEMENTS",
    "Bits",
    "Brittle",
    "Tied",
    "arrange",
    "bits",
    "brittle",
    "counters",
    "fill",
    "makeable",
    "random_bits",
    "seen",
    "snapshot",
    "special_values",
    "tie_groups",
]


class Bits(NamedTuple):
    """All of a tensor that has to arrive: equal only if every bit is, signs of zeros and NaN payloads included."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def bits(tensor: Tensor) -> Bits:
    """The value of ``tensor`` as plain data, whatever its strides."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype == torch.complex32:  # of which torch makes none without a warning
        plain = plain.view(torch.int32)
    if not plain.is_contiguous():
        plain = plain.contiguous()
    data = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return Bits(dtype_name(tensor.dtype), tuple(tensor.shape), data)


def snapshot(state: Mapping[str, Tensor]) -> dict[str, Bits]:
    """:func:`bits` of each tensor of a state."""
    return {name: bits(tensor) for name, tensor in state.items()}


def tie_groups(state: Mapping[str, Tensor]) -> set[frozenset[str]]:
    """Names whose tensors share memory, as sets of two or more."""
    spans: list[tuple[int, int, str]] = []
    for name, tensor in state.items():
        if tensor.numel():
            reach = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride()))
            spans.append((tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size(), name))
    groups: list[set[str]] = []
    end = 0
    for start, stop, name in sorted(spans):
        if groups and start < end:
            groups[-1].add(name)
        else:
            groups.append({name})
        end = max(end, stop)
    return {frozenset(group) for group in groups if len(group) > 1}


# -- states whose content says which version they are ------------------------------------------------------------------


def counters(version: int, tensors: int = 6, size: int = 512) -> dict[str, Tensor]:
    """A state in which every element is ``version``: a mix of two versions shows wherever one looks."""
    kinds = (torch.float32, torch.float64, torch.int64, torch.int32)
    return {f"layer{i}.weight": torch.full((size,), version, dtype=kinds[i % len(kinds)]) for i in range(tensors)}


def fill(state: Mapping[str, Tensor], version: int) -> None:
    """Make a state of :func:`counters` say ``version``, in place."""
    for tensor in state.values():
        tensor.fill_(version)


def seen(state: Mapping[str, Tensor]) -> int:
    """Which version a state of :func:`counters` holds. Raises ``AssertionError`` where it is a mix."""
    values = {int(value) for tensor in state.values() for value in torch.unique(torch.as_tensor(tensor).detach())}
    if len(values) != 1:
        raise AssertionError(f"a mix of versions {sorted(values)} in {len(state)} tensors")
    return values.pop()


class Brittle(Tensor):
    """A tensor that refuses to be written to while ``fails`` is set: a target that raises halfway."""

    fails: bool = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("copy_", "_foreach_copy_", "__set__", "set_"):
            targets = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            if any(isinstance(target, cls) and target.fails for target in targets):
                raise RuntimeError("this tensor is brittle")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def brittle(version: int, tensors: int = 6, size: int = 512) -> dict[str, Tensor]:
    """:func:`counters` made of :class:`Brittle` tensors."""
    return {name: tensor.as_subclass(Brittle) for name, tensor in counters(version, tensors, size).items()}


class Tied(torch.nn.Module):
    """Tied parameters, and a buffer that is a view of another one."""

    mean: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.nn.Linear(32, 64, bias=False)
        self.head = torch.nn.Linear(32, 64, bias=False)
        self.embed.weight = self.head.weight = torch.nn.Parameter(torch.randn(64, 32, generator=generator))
        self.register_buffer("mean", torch.randn(48, generator=generator))
        self.register_buffer("tail", self.mean[16:])


# -- hard tensors ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def makeable() -> tuple[str, ...]:
    """The dtypes of the closed list that this torch can make on the CPU."""
    names = []
    for name in DTYPES:
        try:
            random_bits(name, (2,))
        except (LookupError, RuntimeError, TypeError):
            continue
        names.append(name)
    return tuple(names)


def random_bits(dtype: str, shape: Sequence[int], seed: int = 0) -> Tensor:
    """A dense tensor with random bit patterns: NaNs with payloads, subnormals and infinities among them."""
    count = 1
    for size in shape:
        count *= size
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * DTYPES[dtype],), dtype=torch.uint8, generator=generator)
    if dtype == "bool":
        raw &= 1  # any other byte is no bool
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        if not count:
            return torch.empty(tuple(shape), dtype=torch_dtype(dtype))
        return raw.view(torch_dtype(dtype)).view(tuple(shape))


def special_values() -> dict[str, Tensor]:
    """Zeros of both signs, infinities, subnormals, quiet and signalling NaNs with payloads, integers above 2**53."""
    doubles = [
        0,
        1 << 63,
        0x7FF << 52,
        0xFFF << 52,
        1,
        (1 << 63) + 1,
        0x7FF8DEADBEEF0001,
        0x7FF0000000000001,
        0xFFF8000000000123,
    ]
    singles = [0, 1 << 31, 0xFF << 23, 0x1FF << 23, 1, (1 << 31) + 1, 0x7FC0BEEF, 0x7F800001, 0xFFC00123]
    halves = [0, 0x8000, 0x7F80, 0xFF80, 1, 0x8001, 0x7FC1, 0x7F81, 0xFFFF, 0x7C00, 0xFC00, 0x7E01, 0x7C01]
    signed = [value - (1 << 64) if value >> 63 else value for value in doubles]
    return {
        "float64": torch.tensor(signed, dtype=torch.int64).view(torch.float64),
        "float32": torch.tensor([v - (1 << 32) if v >> 31 else v for v in singles], dtype=torch.int32).view(
            torch.float32
        ),
        "float16": torch.tensor(halves, dtype=torch.uint16).view(torch.float16),
        "bfloat16": torch.tensor(halves, dtype=torch.uint16).view(torch.bfloat16),
        "uint16": torch.tensor(halves, dtype=torch.uint16),
        "int64": torch.tensor([2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)], dtype=torch.int64),
        "minus zero": torch.tensor(-0.0),
    }


ARRANGEMENTS = ("dense", "transposed", "sliced", "expanded", "channels_last", "offset")


def arrange(dtype: str, shape: Sequence[int], arrangement: str, seed: int = 0) -> Tensor:
    """A tensor that lies in memory as ``arrangement`` says, or dense where the shape or dtype does not allow that."""
    rank, shape = len(shape), tuple(shape)
    if needs_bit_copy(torch_dtype(dtype)):
        return random_bits(dtype, shape, seed)
    if arrangement == "transposed" and rank >= 2:
        return random_bits(dtype, (*shape[:-2], shape[-1], shape[-2]), seed).transpose(-1, -2)
    if arrangement == "sliced" and rank:
        return random_bits(dtype, (*shape[:-1], 2 * shape[-1] + 1), seed)[..., 1::2]
    if arrangement == "expanded" and rank:
        return random_bits(dtype, (1, *shape[1:]), seed).expand(shape)
    if arrangement == "channels_last" and rank == 4:
        return random_bits(dtype, (shape[0], shape[2], shape[3], shape[1]), seed).permute(0, 3, 1, 2)
    if arrangement == "offset":
        count = torch.Size(shape).numel()
        return random_bits(dtype, (count + 3,), seed)[3:].view(shape)
    return random_bits(dtype, shape, seed)
