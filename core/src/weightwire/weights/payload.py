"""The trainer's side of one version: a header, and tensors that are read while it is staged, once."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from weightwire.transport import Header, Version
from weightwire.weights.arrays import array_of
from weightwire.weights.blocks import Reader
from weightwire.weights.dtypes import torch_dtype
from weightwire.weights.layout import ALIGNMENT, view

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from weightwire.weights.layout import Layout
    from weightwire.weights.pieces import Piece, Want
    from weightwire.weights.source import State
    from weightwire.weights.windows import Window

__all__ = ["Payload"]


class Payload:
    """What ``Sender.stage`` is given.

    The tensors under it are the caller's own, read in place; they may be strided, tied, on a device, or shards that are
    gathered as they are read. Read all bytes exactly once, with *one* of

    * :meth:`pack`, into memory of your own, whole or range by range in ascending order;
    * :meth:`tensors`, block by block, for engines that take arrays as they are, or :meth:`parts` of them;
    * :meth:`entries`, typed, for a receiver that is right here.

    Then ask for :attr:`header` (or :meth:`header_bytes`), and only when the version becomes visible to workers: from
    then on its number is used up. With ``digest=True`` the header is complete only after all bytes were read.

    Attributes:
        layout: names, dtypes, shapes, and where they lie.
        stamp: the version.
        base: the full version on which a subset lies; ``None`` for a full one.
        nbytes: bytes of the packed payload.
        digest: whether the header will carry a digest.
        announced: whether the header was asked for.
        seconds: time spent, by phase.
    """

    def __init__(
        self,
        state: State,
        *,
        stamp: Version,
        base: Version | None = None,
        metadata: bytes = b"{}",
        digest: bool = False,
        gather: Callable[[State, Sequence[Want]], Iterator[Piece]] | None = None,
    ) -> None:
        self.layout = state.layout
        self.stamp = stamp
        self.base = base
        self.nbytes = state.layout.nbytes
        self.digest = digest
        self.announced = False
        self.seconds: dict[str, float] = {}
        self._metadata = metadata
        self._tensors = state.tensors
        self._plan = state.plan
        self._hash = _Hash(state.layout) if digest else None
        self._header: Header | None = None
        self._reader = Reader(
            state.plan.blocks, state.tensors, state.layout, None if gather is None else partial(gather, state)
        )
        self._cut: tuple[int, Tensor] | None = None  # a block that is being handed out in parts, and its bytes

    @property
    def devices(self) -> frozenset[torch.device]:
        """The devices, other than the CPU, that the tensors lie on."""
        return self._plan.devices

    @property
    def sharded(self) -> bool:
        """Whether some of it is made or gathered only when it is read: to hold much of it at a time costs memory."""
        return any(block.gathered for block in self._plan.blocks)

    @property
    def independent(self) -> bool:
        """Whether ranges of it that end between blocks may be packed in any order, by several threads at once."""
        return self._hash is None and self._plan.independent

    @property
    def header(self) -> Header:
        """The header. Asking for it uses up the version's number."""
        if self._header is None:
            digest = self._hash.digest() if self._hash else b""
            self._header = Header(self.stamp, self.layout, self.base, digest, self._metadata)
            self.announced = True
        return self._header

    def header_bytes(self) -> bytes:
        """The header as it goes over a wire: see :mod:`weightwire.wire`. At most ``header_size`` bytes."""
        from weightwire.wire import encode_header

        return encode_header(self.header)

    @property
    def header_size(self) -> int:
        """An upper bound for ``len(header_bytes())``, known before any byte is read."""
        from weightwire.wire import header_size_bound

        return header_size_bound(self.layout, self._metadata)

    def pack(self, out: Tensor, start: int = 0, stop: int | None = None) -> None:
        """Write bytes ``start`` to ``stop`` of the packed payload to the beginning of ``out``, a flat uint8 tensor.

        One fused copy where the whole payload is asked for. Blocks lie at ``layout.starts``; padding is left as it is.
        Give the same tensor object again and again where you can: its views are kept with it.
        """
        import torch

        stop = self.nbytes if stop is None else stop
        with torch._C.DisableTorchFunctionSubclass():
            self._write(self._plan.windows.of(out, start, stop))
        if self._plan.devices or not out.is_cpu:
            _synchronise(self._plan.devices | {out.device})
        if self._hash:
            self._hash.add_range(out, start, stop)

    def buckets(self, size: int) -> Iterator[tuple[int, int]]:
        """Ranges ``(start, stop)`` of at most ``size`` bytes that cover the packed payload, for :meth:`pack`.

        They end between blocks; a block that is larger than a bucket fills as many as it takes.
        """
        if size < ALIGNMENT:
            raise ValueError(f"buckets of {size} bytes: at least {ALIGNMENT} are needed")
        size -= size % ALIGNMENT
        starts, start = self.layout.starts, 0
        while start < self.nbytes:
            stop = starts[bisect_right(starts, start + size) - 1]
            if stop <= start:
                stop = start + size
            yield start, stop
            start = stop

    def tensors(self) -> Iterator[Tensor]:
        """Each block as a flat, contiguous uint8 tensor on the CPU, in order: the caller's own memory where it is fit.

        It holds what it should for as long as it is held, at most until ``stage`` returns.
        """
        return self.parts(max(self.nbytes, ALIGNMENT))

    def parts(self, size: int) -> Iterator[Tensor]:
        """As :meth:`tensors`; but a block that is gathered from several ranks, and is larger than ``size`` bytes, comes
        in parts of as many, so that nobody has to have all of it. ``size`` is rounded down to a multiple of 64."""
        import torch

        size -= size % ALIGNMENT
        for number, block in enumerate(self._plan.blocks):
            nbytes = self.layout.sizes[number]
            step = size if block.gathered else max(nbytes, 1)
            for start in range(0, max(nbytes, 1), step):
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    if block.gathered:
                        flat = self._gathered(number, start, min(start + step, nbytes)).cpu()
                    else:
                        flat = block.flat(self._tensors, self._reader).cpu()
                if self._hash:
                    self._hash.add_block(number, start, flat)
                yield flat
                del flat

    def entries(self) -> list[Tensor]:
        """The caller's tensors, typed, in the order of ``layout.entries``: to be copied from at once, never kept.

        They may be Parameters, and require grad. What is gathered is there as a whole.
        """
        if self._hash:
            for _ in self.tensors():
                pass
        if not self._plan.unusual:
            return self._tensors
        import torch

        tensors = list(self._tensors)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            whole = {
                number: self._gathered(number, 0, self.layout.sizes[number])
                for number, block in enumerate(self._plan.blocks)
                if block.gathered
            }
            for position in self._plan.unusual:
                entry = self.layout.entries[position]
                block = self._plan.blocks[entry.block]
                if block.gathered:
                    tensors[position] = view(entry, whole[entry.block])
                elif block.scaled:
                    tensors[position] = block.read(self._tensors, self._reader)
                else:
                    tensors[position] = tensors[position].to(torch_dtype(entry.dtype)).resolve_conj().resolve_neg()
        return tensors

    def close(self) -> None:
        """Nothing of the tensors is read any more. Called by the core when ``stage`` has returned or raised."""
        self._reader.close()

    def phase(self, name: str) -> _Phase:
        """``with payload.phase("notify"): ...`` books the time inside under one of :data:`~weightwire.transport.PHASES`
        instead of ``stage``."""
        return _Phase(self.seconds, name)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _write(self, window: Window) -> None:
        import torch

        blocks, tensors = self._plan.blocks, self._tensors
        # Not no_grad: autograd's bookkeeping costs a fifth of copying a small tensor.
        with torch._C._InferenceMode(True):  # which torch.inference_mode() is a slow way to
            if window.into:
                torch._foreach_copy_(window.into, list(map(tensors.__getitem__, window.leaves)))
            for number, into in window.odd:
                into.copy_(blocks[number].read(tensors, self._reader))
            for part in window.parts:
                part.into.copy_(self._bytes_of(part.block)[part.start : part.stop])
            for part in window.streams:
                self._reader.parts(part.block, part.start, part.stop, partial(_put, part.into))
        if self._cut is not None and not window.parts:
            self._cut = None

    def _bytes_of(self, number: int) -> Tensor:
        """The bytes of a block that is cut, made once for all of its parts."""
        if self._cut is None or self._cut[0] != number:
            self._cut = (number, self._plan.blocks[number].flat(self._tensors, self._reader))
        return self._cut[1]

    def _gathered(self, number: int, start: int, stop: int) -> Tensor:
        """Bytes of a gathered block: as they were gathered where they came in one piece."""
        import torch

        made: list[Tensor] = []

        def put(data: Tensor, at: int) -> None:
            if not made:
                alone = data.numel() == stop - start
                made.append(data if alone else torch.empty(stop - start, dtype=torch.uint8, device=data.device))
            if made[0] is not data:
                _put(made[0], data, at)

        if start < stop:
            self._reader.parts(number, start, stop, put)
        return made[0] if made else torch.empty(0, dtype=torch.uint8)


def _put(into: Tensor, data: Tensor, at: int) -> None:
    into[at : at + data.numel()].copy_(data)


class _Phase:
    __slots__ = ("begun", "name", "seconds")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds = seconds
        self.name = name

    def __enter__(self) -> None:
        self.begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + time.perf_counter() - self.begun


class _Hash:
    """xxh3-128 of the blocks' bytes, in order and without padding, while they are read."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._reset()

    def _reset(self) -> None:
        import xxhash

        self._state = xxhash.xxh3_128()
        self._done = 0  # bytes of the packed payload

    def add_range(self, out: Tensor, start: int, stop: int) -> None:
        """Bytes ``start`` to ``stop`` of the packed payload."""
        if start == 0:
            self._reset()
        if start != self._done:
            raise RuntimeError(
                f"bytes from {start} on were read after those before {self._done}: the digest needs order"
            )
        data = memoryview(out.cpu().numpy())  # type: ignore[arg-type]
        for block, first, last in self._layout.within(start, stop):
            begin = self._layout.starts[block] - start
            self._state.update(data[begin + first : begin + last])
        self._done = stop

    def add_block(self, number: int, start: int, flat: Tensor) -> None:
        """A block, or what comes next of it: its bytes from ``start`` on."""
        if number == start == 0:
            self._reset()
        self._state.update(array_of(flat))  # type: ignore[arg-type]
        last = start + flat.numel() == self._layout.sizes[number]
        self._done = self._layout.starts[number + 1] if last else self._layout.starts[number] + start + flat.numel()

    def digest(self) -> bytes:
        if self._done != self._layout.nbytes:
            raise RuntimeError(f"the header was asked for after {self._done} of {self._layout.nbytes} bytes were read")
        return self._state.digest()


def _synchronise(devices: Iterable[torch.device]) -> None:
    """Wait until the devices have done what was asked of them: the caller may write to its tensors again then."""
    import torch

    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        elif device.type != "cpu":
            torch.accelerator.synchronize(device)
