"""Versions on their way into a worker, and the whole ones, ready to be handed out."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

from weightwire import wire
from weightwire.errors import StorageFullError, WireError
from weightwire.transport import Have, ReceiverContext, Staged
from weightwire_nccl.messages import Done, Got, Offer, Parcel, Plan, Ready, Report, Trouble
from weightwire_nccl.stream import Streamed, Streams

if TYPE_CHECKING:
    from torch import Tensor

    from weightwire.transport import Header, Version
    from weightwire_nccl.link import Chunk, Link
    from weightwire_nccl.pool import Lease, Pool

__all__ = ["Filling", "Intake", "Shelved", "Shelves"]


class Shelved:
    """A whole version that can be handed out."""

    def __init__(self, header: Header, lease: Lease) -> None:
        self.header = header
        self.stamp = header.stamp
        self.base = header.base
        self.lease = lease
        self._given = False

    def own_blocks(self) -> list[Tensor]:
        """Each block with a storage of its own, over the buffer; the buffer's lease ends with the last of them."""
        layout, buffer = self.header.layout, self.lease.buffer
        if buffer.device.type != "cpu":  # no two storages can share device memory
            return [block.clone() for block in layout.slice(buffer)]
        if self._given:  # somebody may write to the first ones
            buffer = buffer[: layout.nbytes].clone()
        self._given = True
        base = np.frombuffer(memoryview(buffer.numpy()), dtype=np.uint8)  # type: ignore[arg-type]
        weakref.finalize(base, [self.lease].clear).atexit = False
        return [torch.from_numpy(base[start : start + size]) for start, size in zip(layout.starts, layout.sizes)]


class Shelves:
    """The newest whole versions: the station puts them there, ``poll`` takes them. ``lock`` guards them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # "with" a Condition is Python code: Ctrl-C in it would leave it locked
        self.changed = threading.Condition(self.lock)
        self.full: Shelved | Streamed | None = None
        self.subset: Shelved | Streamed | None = None
        self.settled: Have | None = None
        """For whoever has this, there is nothing new."""

    def stir(self) -> None:
        """The next ``poll`` has to look, and one that waits now."""
        with self.lock:
            self.settled = None
            self.changed.notify_all()

    def put(self, *items: Shelved | Streamed) -> None:
        """Let ``poll`` see all of these in one step, where they are newer."""
        with self.lock:
            self.stir()
            for item in items:
                if item.base is None:
                    if self.full is None or item.stamp > self.full.stamp:
                        self.full = item
                elif self.subset is None or item.stamp > self.subset.stamp:
                    self.subset = item
            if self.full is not None and self.subset is not None and self.subset.stamp < self.full.stamp:
                self.subset = None

    def withdraw(self) -> None:
        """What was only offered cannot be had any more."""
        with self.lock:
            self.full = None if isinstance(self.full, Streamed) else self.full
            self.subset = None if isinstance(self.subset, Streamed) else self.subset

    def clear(self) -> None:
        with self.lock:
            self.full = self.subset = None


class Filling:
    """A version whose bytes are coming; of ``missing`` ones nothing is known yet."""

    def __init__(self, plan: Plan | Parcel, stops: tuple[int, ...], engine: str, lease: Lease) -> None:
        self.stamp, self.base, self.nbytes = plan.stamp, plan.base, plan.nbytes
        self.stops = stops
        self.engine = engine
        self.lease = lease
        self.missing = plan.nbytes

    def buckets(self) -> list[Tensor]:
        return self.lease.memory.slices(list(zip((0, *self.stops), self.stops)))


class Intake:
    """What comes over one connection. ``device``: where NCCL's buffers are. Methods raise
    :class:`~weightwire.WireError` where what the trainer says makes no sense."""

    def __init__(
        self,
        link: Link,
        shelves: Shelves,
        pool: Pool,
        cache: wire.LayoutCache,
        context: ReceiverContext,
        device: str,
        streams: Streams,
    ) -> None:
        self._link, self._shelves, self._pool, self._cache = link, shelves, pool, cache
        self._context = context
        self._device = device
        self._streams = streams
        self._fillings: dict[int, Filling] = {}
        self._headers: dict[int, Done] = {}  # of rounds whose header came before the last byte
        self._held_back: Shelved | None = None  # a full version on which a subset is to follow at once

    def of(self, round_: int) -> Filling | None:
        return self._fillings.get(round_)

    def hear_plan(self, plan: Plan | Parcel) -> None:
        """Make room for a version."""
        if self._context.stream:
            raise WireError("a plan, for a worker that streams")
        stops, engine = (plan.stops, plan.engine) if isinstance(plan, Plan) else ((plan.nbytes,), "gloo")
        stops = stops if plan.nbytes else ()
        _check(plan.nbytes, stops)
        try:
            lease = self._pool.take(plan.nbytes, self._device if engine == "nccl" else "cpu")
        except StorageFullError as exc:
            self._context.logger.error("worker %s: %s", self._context.worker, exc)
            self._link.send(Trouble(plan.round, str(exc)))
            return
        self._fillings[plan.round] = Filling(plan, stops, engine, lease)
        if isinstance(plan, Plan):
            self._link.send(Ready(plan.round))

    def hear_offer(self, offer: Offer) -> None:
        """A version that can be fetched."""
        if not self._context.stream:
            raise WireError("an offer, to a worker that does not stream")
        self._shelves.put(Streamed(wire.decode_header(offer.header, self._cache), offer.round, self._streams))
        self._say_staged()

    def hear_chunk(self, chunk: Chunk) -> None:
        """Chunks come in order, and without gaps."""
        if self._context.stream:
            self._streams.take(chunk.round, chunk.start, chunk.data)
            return
        filling = self._fillings.get(chunk.round)
        if filling is None:
            return
        length = len(chunk.data)
        if chunk.start != filling.nbytes - filling.missing or length > filling.missing:
            raise WireError(
                f"bytes {chunk.start} to {chunk.start + length} of a version of {filling.nbytes}, of which "
                f"{filling.missing} were missing"
            )
        filling.lease.buffer.numpy()[chunk.start : chunk.start + length] = chunk.data
        filling.missing -= length

    def complete(self, round_: int) -> None:
        """All bytes were received by a broadcast; the header may be here, too."""
        self._fillings[round_].missing = 0
        self._link.send(Got(round_))
        done = self._headers.pop(round_, None)
        if done is not None:
            self._shelve(done)

    def hear_done(self, done: Done) -> None:
        filling = self._fillings.get(done.round)
        if filling is not None and filling.missing:
            self._headers[done.round] = done
        elif filling is not None:
            self._shelve(done)

    def forget(self, round_: int) -> None:
        """Nothing more will come of it."""
        self._fillings.pop(round_, None)
        self._headers.pop(round_, None)
        if self._context.stream:
            self._streams.refuse(round_)

    def end(self, why: str) -> None:
        """The connection is over: what was held back will not get its subset, and what was offered will not come."""
        self._streams.end(why)
        self._shelves.withdraw()
        if self._held_back is not None:
            self._shelves.put(self._held_back)
            self._held_back = None

    def _shelve(self, done: Done) -> None:
        """A version is whole."""
        filling = self._fillings[done.round]
        self.forget(done.round)
        header = wire.decode_header(done.header, self._cache)
        if (header.stamp, header.base, header.layout.nbytes) != (filling.stamp, filling.base, filling.nbytes):
            raise WireError(f"the header of version {header.stamp.number} does not fit what was announced of it")
        item = Shelved(header, filling.lease)
        if done.more:
            self._held_back = item
            return
        held, self._held_back = self._held_back, None
        self._shelves.put(*([] if held is None else [held]), item)
        self._say_staged()

    def _say_staged(self) -> None:
        staged = self._newest()
        if staged is not None:
            joined = self._context.joined
            event = Staged(worker=joined.worker, incarnation=joined.incarnation, stamp=staged)
            self._link.send(Report(wire.encode_event(event)))

    def _newest(self) -> Version | None:
        """The newest version that this worker can apply."""
        full, subset = self._shelves.full, self._shelves.subset
        if subset is not None and subset.base in (full.stamp if full else None, self._context.have().base):
            return subset.stamp
        return full.stamp if full else None


def _check(nbytes: int, stops: tuple[int, ...]) -> None:
    ascending = all(before < stop for before, stop in zip((0, *stops), stops))
    if not 0 <= nbytes <= wire.MAX_BYTES or not ascending or (stops[-1] if stops else 0) != nbytes:
        raise WireError(f"a plan of {nbytes} bytes in {len(stops)} buckets is malformed")
