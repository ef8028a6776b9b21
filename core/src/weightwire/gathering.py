"""Sharded tensors come to one rank, bucket by bucket, each part straight from the rank that holds it.

Pieces of tensors are boxes; a bucket is a list of them (:class:`Cut`), which the leading rank says to the others. Each
that holds something of it sends one message. All of that happens in a thread of its own (:class:`Gatherer`), so that
the next bucket comes while the one before is sent, and because a message from a rank that has died may never come.
"""

from __future__ import annotations

import mmap
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from weightwire.transport import BUCKET
from weightwire.weights.blocks import bits
from weightwire.weights.layout import aligned
from weightwire.weights.pieces import Piece, Want, gathered, whole_piece
from weightwire.weights.scaled import amax_of
from weightwire.weights.shards import Box, boxes, common, cut, extent_of, first_of, holders, is_spread
from weightwire.weights.walk import is_dtensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from weightwire.weights.source import State

__all__ = ["Cut", "Gatherer", "Job", "Shards"]

MOST = BUCKET // 2
"""Bytes of a bucket here. There are three at the most: the one that is sent, the one that comes meanwhile, and the
messages in which it does; together less than two buckets of a delivery."""
SMALL = 1 << 20
"""Bytes below which memory is taken from where torch takes it."""


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a tensor. ``whole``: all of it, for it lies in no boxes (sums that are not added up yet, say), so that
    torch has to gather it. ``amax``: with the largest magnitude of the whole tensor."""

    leaf: int
    name: str
    box: Box
    whole: bool = False
    amax: bool = False


class Shards:
    """Who holds what, and who sends which of it to rank ``leader``."""

    def __init__(self, leader: int, rank: int) -> None:
        self._leader, self._rank = leader, rank
        self._known: dict[Any, dict[int, Box] | None] = {}

    def of(self, tensor: Any) -> dict[int, Box] | None:
        """The box of each rank that sends of a tensor; ``None`` where it lies in no boxes."""
        key = (tensor.shape, tensor.device_mesh, tensor.placements)
        if key not in self._known:
            found = holders(tensor, self._leader)
            self._known[key] = None if found is None else dict(found)
        return self._known[key]

    def plan(self, state: State, wants: Sequence[Want]) -> Iterator[Want | list[Cut]]:
        """What is wanted, in that order: buckets of what is spread over ranks, and by itself what is not."""
        bucket: list[Cut] = []
        room, kind = MOST, None
        for want in wants:
            tensor: Any = state.tensors[want.leaf]
            if not is_dtensor(tensor) or not is_spread(tensor):
                if bucket:
                    yield bucket
                bucket, kind = [], None
                yield want
                continue
            for piece in self._cuts(state, want, tensor):
                nbytes = extent_of(piece.box) * tensor.element_size()
                own = (tensor.device_mesh, tensor.device, piece.whole)
                if bucket and (nbytes > room or own != kind or piece.whole):
                    yield bucket
                    bucket = []
                if not bucket:
                    room, kind = MOST, own
                bucket.append(piece)
                room -= nbytes
        if bucket:
            yield bucket

    def _cuts(self, state: State, want: Want, tensor: Any) -> Iterator[Cut]:
        name = state.layout.entries[want.leaf].name
        if self.of(tensor) is None:
            yield Cut(want.leaf, name, tuple((0, size) for size in tensor.shape), True, want.amax)
            return
        amax = want.amax
        for box in boxes(tensor.shape, max(MOST // tensor.element_size(), 1)):
            yield Cut(want.leaf, name, box, amax=amax)
            amax = False

    def against(self, cuts: Iterable[Cut], state: State) -> str:
        """Why this rank cannot take part; empty where it can."""
        for piece in cuts:
            if [entry.name for entry in state.layout.entries[piece.leaf :][:1]] != [piece.name]:
                return f"has no tensor {piece.name!r} at place {piece.leaf}"
            tensor: Any = state.tensors[piece.leaf]
            if not is_dtensor(tensor) or len(tensor.shape) != len(piece.box):
                return f"has another tensor {piece.name!r}"
            here = (self.of(tensor) or {}).get(self._rank)
            if here is not None and tuple(tensor._local_tensor.shape) != tuple(stop - start for start, stop in here):
                return f"holds {piece.name!r} in shape {tuple(tensor._local_tensor.shape)}, not as its placements say"
        return ""

    def deliver(self, cuts: Sequence[Cut], tensors: Sequence[Any], tag: int) -> None:
        """On a rank that follows: send what it holds of a bucket."""
        import torch.distributed as dist

        if cuts[0].whole:
            gathered(tensors[cuts[0].leaf])
            return
        shares, nbytes = self._message(cuts, tensors, self._rank)
        if not nbytes:
            return
        message = _memory(nbytes, tensors[cuts[0].leaf].device)
        for share in shares:
            share.of(message).copy_(bits(share.read(tensors)))
        work = dist.isend(message, self._leader, _group(tensors[cuts[0].leaf]), tag)
        if work is not None:
            work.wait()

    def collect(self, cuts: Sequence[Cut], tensors: Sequence[Any], tag: int, job: Job) -> list[Piece]:
        """On the rank that leads: a bucket. ``job.missing``: the rank that is waited for."""
        import torch.distributed as dist

        first = tensors[cuts[0].leaf]
        if cuts[0].whole:
            return [whole_piece(Want(cuts[0].leaf, cuts[0].amax), first)]
        senders = sorted({rank for piece in cuts for rank in self.of(tensors[piece.leaf]) or {}} - {self._rank})
        coming = []
        for rank in senders:
            shares, nbytes = self._message(cuts, tensors, rank)
            if nbytes:
                message = _memory(nbytes, first.device)
                coming.append((rank, shares, message, dist.irecv(message, rank, _group(first), tag)))
        whole = self._room(cuts, tensors)
        largest: dict[int, Tensor] = {}
        for share in self._message(cuts, tensors, self._rank)[0]:
            share.put(share.read(tensors), whole, largest)
        for rank, shares, message, work in coming:
            job.missing = rank
            if work is not None:
                work.wait()
            for share in shares:
                share.put(share.of(message), whole, largest)
        return [
            Piece(p.leaf, at, at + extent_of(p.box), flat.reshape(-1), largest.get(number))
            for number, (p, flat) in enumerate(zip(cuts, whole))
            for at in [first_of(p.box, tensors[p.leaf].shape)]
        ]

    def _room(self, cuts: Sequence[Cut], tensors: Sequence[Any]) -> list[Tensor]:
        """A tensor for each piece, all in one stretch of memory."""
        sizes = [extent_of(piece.box) * tensors[piece.leaf].element_size() for piece in cuts]
        starts = list(accumulate(map(aligned, sizes), initial=0))
        memory = _memory(starts[-1], tensors[cuts[0].leaf].device)
        return [
            memory[start : start + size].view(tensors[p.leaf].dtype).view([b - a for a, b in p.box])
            for p, start, size in zip(cuts, starts, sizes)
        ]

    def _message(self, cuts: Sequence[Cut], tensors: Sequence[Any], rank: int) -> tuple[list[_Share], int]:
        """What a rank sends of a bucket, and in how many bytes."""
        shares: list[_Share] = []
        at = 0
        for number, piece in enumerate(cuts):
            tensor = tensors[piece.leaf]
            held = (self.of(tensor) or {}).get(rank)
            part = None if held is None else common(held, piece.box)
            if held is not None and part is not None:
                shares.append(_Share(number, piece, tensor.dtype, held, part, at))
                at += aligned(extent_of(part) * tensor.element_size())
            if held is not None and piece.amax:
                shares.append(_Share(number, piece, None, held, (), at))
                at += aligned(4)
        return shares, at


class _Share(NamedTuple):
    """What one rank has of a piece, and where it lies in its message; without a dtype: its largest magnitude."""

    number: int
    piece: Cut
    dtype: Any
    held: Box
    part: Box
    at: int

    def read(self, tensors: Sequence[Any]) -> Tensor:
        local: Tensor = tensors[self.piece.leaf]._local_tensor.detach()
        return amax_of(local) if self.dtype is None else cut(local, self.held, self.part)

    def of(self, message: Tensor) -> Tensor:
        import torch

        dtype = self.dtype or torch.float32
        flat = message[self.at : self.at + extent_of(self.part) * dtype.itemsize].view(dtype)
        return bits(flat.view([stop - start for start, stop in self.part]))

    def put(self, values: Tensor, whole: Sequence[Tensor], largest: dict[int, Tensor]) -> None:
        if self.dtype is None:
            known = largest.get(self.number)
            largest[self.number] = values if known is None else values.maximum(known)
        else:
            bits(cut(whole[self.number], self.piece.box, self.part)).copy_(bits(values))


def _memory(nbytes: int, device: torch.device) -> Tensor:
    """Flat bytes that go back to the system at once when they are forgotten. malloc keeps what is smaller than 32 MiB,
    and finds no use for it: where torch asks for aligned memory again, it takes the next."""
    import numpy as np
    import torch

    if device.type != "cpu" or nbytes < SMALL:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.from_numpy(np.frombuffer(pages, np.uint8))


def _group(tensor: Any) -> Any:
    """A process group in which all ranks of a tensor's mesh are."""
    mesh = tensor.device_mesh
    return mesh.get_group() if mesh.ndim == 1 else None


class Job:
    """Something that the gatherer does: ``wait(seconds)`` for its result, or what it has raised; ``queue.Empty``."""

    def __init__(self, run: Callable[[Job], Any], tensor: Any) -> None:
        self.run = run
        self.missing: int | None = None
        self.cancelled = False
        self.stream = _stream_of(tensor)
        self._done: SimpleQueue[Any] = SimpleQueue()

    def wait(self, seconds: float) -> Any:
        return self._done.get(timeout=max(seconds, 0.001))

    def end(self, result: Any) -> None:
        self._done.put(result)


class Gatherer:
    """Does jobs one by one, in a thread of its own."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, run: Callable[[Job], Any], tensor: Any) -> Job:
        """``tensor``: one that is read, whose stream (on a GPU) is that of the calling thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="weightwire-gather", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None).atexit = False
        job = Job(run, tensor)
        self._jobs.put(job)
        return job

    def abandon(self) -> None:
        """The thread may never come back from what it does."""
        self._jobs.put(None)
        self._thread, self._jobs = None, SimpleQueue()

    def settle(self, job: Job, seconds: float) -> None:
        """Nobody wants this job any more; when this returns, nothing is read for it."""
        job.cancelled = True
        try:
            job.wait(seconds)
        except queue.Empty:
            self.abandon()


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    import torch

    while (job := jobs.get()) is not None:
        try:
            with nullcontext() if job.stream is None else torch.cuda.stream(job.stream), torch.no_grad():
                result = None if job.cancelled else job.run(job)
            if job.stream is not None:
                job.stream.synchronize()
        except BaseException as exc:
            job.end(exc)
        else:
            job.end(result)
            del result
        del job


def _stream_of(tensor: Any) -> Any:
    """The stream on which a tensor may still be written, and on which what is gathered is read."""
    import torch

    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
