"""Payloads that a worker uses as they lie in the trainer's slots, and how long it does so."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import count
from operator import ne
from typing import TYPE_CHECKING

import numpy as np
import torch

from weightwire.transport import Delivery
from weightwire_ipc.mapping import PAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from weightwire.transport import Header
    from weightwire.weights.layout import Layout
    from weightwire_ipc.leases import Lease
    from weightwire_ipc.mapped import MappedSlot
    from weightwire_ipc.mapping import Mapping

__all__ = ["Loan", "Loans"]


class Loan:
    """A private mapping of one slot, lent for one version after the other.

    Attributes:
        lease: on the version that is lent now.
        array: the payload. Who uses it has it, or tensors that have it.
        views: tensors that are used again for the next version; ``None`` where the end of the array is all that counts.
        delivery: by which it was lent.
    """

    def __init__(self, number: int, slot: MappedSlot) -> None:
        self.number = number
        self.slot = slot
        self.mapping: Mapping = slot.map_private()
        self.lease: Lease | None = None
        self.array: weakref.ref[NDArray[np.uint8]] | None = None
        self.views: _Views | None = None
        self.delivery: weakref.ref[_Steady] | None = None

    @property
    def pending(self) -> bool:
        """Whether it is not known yet what becomes of the delivery."""
        delivery = None if self.delivery is None else self.delivery()
        return delivery is not None and delivery.pending


class _Own:
    """Memory of this process's own, for one small payload after the other."""

    def __init__(self, views: _Views) -> None:
        self.views = views
        self.delivery: weakref.ref[_Steady] | None = None

    @property
    def free(self) -> bool:
        """Whether nobody looks at it, nor will."""
        delivery = None if self.delivery is None else self.delivery()
        return not (delivery is not None and delivery.pending) and not self.views.used


class Loans:
    """All that a worker has on loan. A lease ends when nobody has a view of what is lent any more.

    Where the receiver is ``steady``, the tensors over a slot are made once and handed out again for each version that
    it holds: then their uses are counted when the next version was applied. What somebody else still looks at then is
    made anew, and the lease ends with the last view of it.
    """

    def __init__(self, *, steady: bool) -> None:
        self._steady = steady and _can_count()
        self._numbers = count()
        self._out: dict[int, Loan] = {}
        self._newest = -1
        self._own: list[_Own] = []

    def copy(self, slot: MappedSlot, header: Header, lease: Lease) -> Delivery:
        """The payload of a slot that is leased, in memory of this process's own; the lease ends here."""
        layout = header.layout
        own = next((own for own in self._own if own.views.layout is layout and own.free), None)
        if own is None:
            # By torch, since that aligns it as we do.
            array: NDArray[np.uint8] = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu").numpy()
            slot.copy_to(array)
            lease.release()
            if not self._steady:
                return Delivery(header, array=array, writable=True)
            own = _Own(_Views(layout, array))
            self._own = [*self._own[1 - _OWN :], own]
        else:
            slot.copy_to(own.views.array)
            lease.release()
        delivery = _Steady(header, own.views, _nothing)
        own.delivery = weakref.ref(delivery)
        return delivery

    def lend(self, slot: MappedSlot, header: Header, lease: Lease) -> Delivery:
        """The payload of a slot that is leased, in memory of which nobody sees what is written to it."""
        loan = slot.spare.pop() if slot.spare else Loan(next(self._numbers), slot)
        self._out.pop(loan.number, None)  # where its return was broken off
        views = loan.views
        if views is None or views.layout is not header.layout:
            loan.views = views = None  # an array that was there ends here, before the loan is out
            array = loan.mapping.array(slot.start, slot.size)
            loan.array = weakref.ref(array)
            weakref.finalize(array, _dead, self._out, loan.number).atexit = False
            if self._steady:
                loan.views = views = _Views(header.layout, array)
        loan.lease = lease
        self._out[loan.number] = loan
        self._newest = loan.number
        if views is None:
            return Delivery(header, array=array, writable=True)
        delivery = _Steady(header, views, self.settle)
        loan.delivery = weakref.ref(delivery)
        return delivery

    def settle(self) -> None:
        """End the leases of what nobody uses: after a version was applied or refused."""
        self._settle(list(self._out.values()))

    def sweep(self) -> None:
        """Do what an interrupt has broken off."""
        if self._out.keys() != {self._newest}:
            self._settle([loan for loan in self._out.values() if loan.number != self._newest])

    def _settle(self, loans: list[Loan]) -> None:
        for loan in loans:
            if loan.views is None:
                if loan.array is None or loan.array() is None:
                    _end(self._out, loan)
            elif not loan.pending:
                if not loan.views.used:
                    _end(self._out, loan)
                elif loan.number != self._newest:
                    loan.views = None

    def take_along(self) -> None:
        """Weights that are still in use live on without a lease: make the pages under them this process's own."""
        if threading.main_thread().is_alive():  # at interpreter exit nobody uses them any more
            self.make_private()
        for loan in list(self._out.values()):
            if loan.lease is not None:
                loan.lease.release()
        self._out.clear()
        self._own.clear()

    def make_private(self) -> None:
        """Give this process pages of its own under all that is lent, at the price of one copy."""
        for loan in list(self._out.values()):
            array = None if loan.array is None else loan.array()
            if array is not None:
                page = array[::PAGE]
                np.bitwise_or(page, 0, out=page)


_OWN = 4
"""Pieces of its own memory that a worker keeps: two to take turns, for full versions and for subsets."""


def _nothing() -> None: ...


def _end(out: dict[int, Loan], loan: Loan) -> None:
    if loan.lease is not None:
        loan.lease.release()
    loan.slot.take_back(loan)
    out.pop(loan.number, None)


def _dead(out: dict[int, Loan], number: int) -> None:
    """The last view of what was lent has died. May run anywhere, at any time."""
    loan = out.get(number)
    if loan is not None:
        _end(out, loan)


class _Views:
    """The tensors over one mapping, and whether anybody else has them."""

    def __init__(self, layout: Layout, array: NDArray[np.uint8]) -> None:
        self.layout = layout
        self.array = array
        self.tensors = layout.array_views(array)
        self._uses = _Uses(self.tensors)

    @property
    def used(self) -> bool:
        """Also where the tensors are not what they were: a storage can be moved elsewhere (``share_memory_``)."""
        return self._uses.changed


class _Uses:
    """Tells whether anybody else has some tensors, or memory of theirs that only they had at first."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._storages = list(map(torch.Tensor.untyped_storage, tensors))
        self._addresses = [storage._cdata for storage in self._storages]
        self._first = list(map(list, self._now()))

    @property
    def changed(self) -> bool:
        return any(any(map(ne, now, first)) for now, first in zip(self._now(), self._first))

    def _now(self) -> Iterator[Iterable[int]]:
        yield map(_storage_uses, self._addresses)  # by other tensors
        yield map(sys.getrefcount, self._storages)
        yield map(sys.getrefcount, self._tensors)
        yield map(torch.Tensor.data_ptr, self._tensors)


_storage_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", int)


@cache
def _can_count() -> bool:
    """Whether uses show as :class:`_Uses` understands them: what it asks is not part of torch's public interface."""
    one = torch.from_numpy(np.zeros(2, np.float32))
    uses = _Uses([one])
    for use in (
        torch.Tensor.detach,
        torch.Tensor.numpy,
        torch.Tensor.untyped_storage,
        torch.Tensor.__dlpack__,
        _moved_to,
        lambda tensor: [tensor],
    ):
        used = use(one)
        if not uses.changed:
            return False
        del used
        if uses.changed:
            return False
    return True


def _moved_to(tensor: Tensor) -> Tensor:
    other = torch.zeros(2, device="cpu")
    other.data = tensor
    return other


class _Steady(Delivery):
    """A delivery of tensors that were there before."""

    def __init__(self, header: Header, views: _Views, settle: Callable[[], None]) -> None:
        super().__init__(header, writable=True, release=settle)
        self._lent = views

    @property
    def pending(self) -> bool:
        return self._release is not None

    @property
    def on_host(self) -> bool:
        return True

    def tensors(self) -> list[Tensor]:
        return self.header.layout.array_blocks(self._lent.array)

    def views(self) -> list[Tensor]:
        return self._lent.tensors
