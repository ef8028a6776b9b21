"""Where tensors lie in memory, and which of them overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from weightwire.weights.dtypes import DTYPES, dtype_name
from weightwire.weights.layout import dense_strides, extent
from weightwire.weights.lora import is_deferred
from weightwire.weights.walk import is_dtensor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Span", "fold", "overlapping", "row_major", "span_of"]


class Span(NamedTuple):
    """One tensor's place in memory: addresses from ``start`` to ``stop``, of which ``used`` bytes are its own."""

    leaf: int
    key: tuple[Any, ...]  # equal for tensors that are the same bytes, seen alike
    device: str
    start: int
    stop: int
    used: int
    shareable: bool
    dtype: str
    sent: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # empty for row-major
    dense: bool
    gathered: bool  # sharded, or made when it is read
    unusual: bool
    scaled: str = ""

    @property
    def sparse(self) -> bool:
        return self.stop - self.start > 2 * self.used


def span_of(leaf: int, tensor: Tensor, sent: str, scaled: str = "") -> Span:
    """``scaled``: a float8 to which the tensor is cast with a scale; ``sent`` is that, or the scale's dtype."""
    dtype = dtype_name(tensor.dtype)
    shape = tuple(tensor.shape)
    if scaled:
        memory = _memory(leaf, tensor)
        key: tuple[Any, ...] = (*memory, shape, dtype, sent, scaled)
        whole = is_dtensor(tensor) or is_deferred(tensor)
        shape = shape if sent == scaled else ()
        return Span(leaf, key, "", 0, 0, 0, False, dtype, sent, shape, (), True, whole, True, scaled)
    if is_deferred(tensor):
        return Span(leaf, (id(tensor), sent), "", 0, 0, 0, False, dtype, sent, shape, (), True, True, True)
    if is_dtensor(tensor):
        local = tensor._local_tensor  # type: ignore[attr-defined]
        spec = (tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
        key = (local.data_ptr() or ~leaf, shape, local.shape, local.stride(), dtype, sent, *spec)
        return Span(leaf, key, "", 0, 0, 0, False, dtype, sent, shape, (), True, True, True)
    bits = (tensor.is_conj(), tensor.is_neg())
    start, stride, size = tensor.data_ptr(), tensor.stride(), tensor.element_size()
    strides = () if not tensor.numel() else row_major(shape, stride)
    device = str(tensor.device)
    # A tensor without elements has no address: nothing is tied to it.
    key = (device, start if tensor.numel() else ~leaf, shape, stride, dtype, sent, *bits)
    used = prod(n for n, s in zip(shape, stride) if s or not n) * size
    shareable = tensor.numel() > 0 and not any(bits)
    stop = start + extent(shape, stride) * size
    dense, unusual = _is_dense(shape, strides), any(bits) or dtype != sent
    return Span(leaf, key, device, start, stop, used, shareable, dtype, sent, shape, strides, dense, False, unusual)


def _memory(leaf: int, tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same bytes."""
    if is_deferred(tensor):
        return (id(tensor),)
    spec: tuple[Any, ...] = ()
    if is_dtensor(tensor):
        spec = (tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    bits = (tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr() or ~leaf, tensor.shape, tensor.stride(), str(tensor.device), *bits, *spec)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill their range, each once, in whatever order."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(shape, strides) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def overlapping(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Groups of spans that are connected by overlapping ranges of addresses; those that cannot share are alone."""
    group: list[Span] = []
    stop = 0
    for span in sorted(spans, key=lambda s: (s.shareable, s.device, s.start, s.stop)):
        if group and span.shareable and span.device == group[0].device and span.start < stop and group[0].shareable:
            group.append(span)
            stop = max(stop, span.stop)
            continue
        if group:
            yield group
        group, stop = [span], span.stop
    if group:
        yield group


def fold(span: Span, owner: Span) -> tuple[int, tuple[int, ...]] | None:
    """Offset and strides, in elements, of a view of ``owner`` once that is packed row-major; ``None`` if it is none."""
    size = DTYPES[owner.dtype]
    packed = dense_strides(owner.shape)
    axes = sorted(((s, n, p) for s, n, p in zip(owner.strides, owner.shape, packed) if s and n > 1), reverse=True)

    def steps(distance: int) -> list[int]:
        """How far one goes along each axis of the owner to get this far in memory."""
        digits = []
        for stride, _, _ in axes:
            digit, distance = divmod(distance, stride)
            digits.append(digit)
        return [*digits, distance]

    offset, rest = divmod(span.start - owner.start, size)
    first = steps(offset)
    last = list(first)
    strides = []
    for n, stride in zip(span.shape, span.strides or dense_strides(span.shape)):
        along = steps(stride) if n > 1 else [0] * len(first)
        last = [at + (n - 1) * step for at, step in zip(last, along)]
        strides.append(sum(step * p for step, (_, _, p) in zip(along, axes)) if n > 1 else 1)
    if rest or last[-1] or any(at >= n for at, (_, n, _) in zip(last, axes)):
        return None
    return sum(at * p for at, (_, _, p) in zip(first, axes)), row_major(span.shape, strides)


def row_major(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """One form of strides for each order: none for row-major, and 1 where any would do, for there is one element."""
    if all(n == 1 or ours == theirs for n, ours, theirs in zip(shape, strides, dense_strides(shape))):
        return ()
    return tuple(1 if n == 1 else s for n, s in zip(shape, strides))
