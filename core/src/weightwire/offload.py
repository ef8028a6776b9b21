"""Moves what a trainer holds out of the way while somebody else needs the memory, and back, to the bit.

Everything goes by *storage*: tied tensors, views of one flat buffer and aliases come back as what they were, because
their storage is the same object all the time, emptied in between. Tensor objects stay too, so modules and optimizers
keep their references; whatever uses one while it is away raises :class:`~weightwire.OffloadedError`. Only pushing
does not: a :class:`~weightwire.WeightUpdater` reads the backup.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weightwire.errors import OffloadedError, StorageFullError
from weightwire.weights.arrays import array_of
from weightwire.weights.guarded import guard, is_guarded, release
from weightwire.weights.layout import aligned
from weightwire.weights.walk import is_dtensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

__all__ = ["Memory", "Offload", "OffloadReport"]

PARTS = ("params", "grads", "optimizer")


class Memory(NamedTuple):
    """Bytes in use on one device, or resident in this process for ``"host"``: before, after, and at the most between.

    Peaks are those seen between the steps; on a GPU also those that are higher than any that the process had before.
    """

    before: int
    after: int
    peak: int


class OffloadReport(NamedTuple):
    """What one call did: ``parts`` that moved, bytes and storages of them, seconds, memory by device."""

    parts: tuple[str, ...]
    nbytes: int
    storages: int
    seconds: float
    memory: dict[str, Memory]


class Offload:
    """Takes a model, its gradients and an optimizer's state out of the way and back.

    Args:
        model: parameters, and buffers whether persistent or not. Compiled, DDP and FSDP2 modules too.
        optimizer: its state (nested as may be) and tensors in its groups, such as learning rates.
        to: ``"cpu"``, host memory; or ``"disk"``, a file without a name, in ``directory``, unmapped while it is there.
        pin: host memory is page-locked, which makes copies to and from a GPU faster. Default: where there is CUDA.
        keep: keep the host memory, or the file, for the next round. Default: what is pinned.
        directory: where the file lies; the default is the system's for temporary files.

    ``params()``, ``grads()``, ``optimizer()`` and ``all()`` move; ``reload()`` brings everything back. All of them may
    be called again without harm. As a context manager it is ``all()`` at the beginning and ``reload()`` at the end.
    Gradients are set aside: ``.grad`` is ``None`` until they are back.

    Do not offload between a forward and its backward pass: the backward pass then raises. Every tensor object over
    memory that goes away is refused while it is away, also one that was taken before (``detach()``, ``state_dict()``, a
    flat buffer). What is no tensor cannot be: a NumPy array made by ``tensor.numpy()``, a DLPack export or a bare
    storage must not be touched. Calls from several threads come one at a time. An ``Offload`` that is forgotten brings
    everything back, with a ``ResourceWarning``.

    Raises:
        TypeError: ``model`` is no Module, or ``optimizer`` not one optimizer.
        ValueError: a tensor cannot be moved; all are named, and nothing was.
        StorageFullError: no room for the backup; nothing was moved.
        OffloadedError: what another ``Offload`` has moved.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer | None = None,
        *,
        to: str = "cpu",
        pin: bool | None = None,
        keep: bool | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        import torch

        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is {model!r:.200}; it is a torch.nn.Module")
        if optimizer is not None and not (hasattr(optimizer, "state") and hasattr(optimizer, "param_groups")):
            raise TypeError(
                f"optimizer is {optimizer!r:.200}; it is one optimizer, or None. For a second one make another "
                "Offload, of which you call optimizer()"
            )
        if to not in ("cpu", "disk"):
            raise ValueError(f"to is {to!r}; it is 'cpu' or 'disk'")
        if to == "disk" and pin:
            raise ValueError("pin=True is about host memory; with to='disk' there is none")
        self._model = model
        self._optimizer = optimizer
        pinned = to == "cpu" and (torch.cuda.is_available() if pin is None else pin)
        self._keep = pinned if keep is None else keep
        self._make: Callable[[int], _Host | _Disk] = (
            partial(_Host, pinned=pinned) if to == "cpu" else partial(_Disk, directory=directory)
        )
        self._moved: dict[str, _Moved] = {}
        self._spare: list[_Host | _Disk] = []
        self._hooks: list[Any] = []

    @property
    def offloaded(self) -> frozenset[str]:
        """Which of ``params``, ``grads`` and ``optimizer`` are away."""
        return frozenset(self._moved)

    def params(self) -> OffloadReport:
        """Move parameters and buffers away."""
        return self._away(("params",))

    def grads(self) -> OffloadReport:
        """Set gradients aside, and move them away."""
        return self._away(("grads",))

    def optimizer(self) -> OffloadReport:
        """Move the optimizer's tensors away."""
        return self._away(("optimizer",))

    def all(self) -> OffloadReport:
        """Move all three away."""
        return self._away(PARTS)

    def reload(self) -> OffloadReport:
        """Bring everything back. All of it, or nothing where memory is short (and then it can be called again).

        Raises ``ValueError`` where parameters have got new gradients that the old ones would overwrite.
        """
        with _one_at_a_time:
            return self._reload()

    def _reload(self) -> OffloadReport:
        watch = _Watch(self._devices())
        moved = list(self._moved.values())
        _check_new_gradients(moved)
        pieces = [piece for part in moved for piece in part.pieces]
        _restore(pieces, watch)
        for tensor in (tensor for part in moved for tensor in part.tensors):
            release(tensor.tensor)
        for parameter, grad in (pair for part in moved for pair in part.aside):
            parameter.grad = grad
        parts = tuple(self._moved)
        self._moved.clear()
        self._let_go_of_hooks()
        for part in moved:
            part.backup.rest(self._keep)
            if self._keep:
                self._spare.append(part.backup)
        return watch.report(parts, pieces)

    def __enter__(self) -> Offload:
        self.all()
        return self

    def __exit__(self, *_: object) -> None:
        self.reload()

    def __del__(self) -> None:
        if getattr(self, "_moved", None) and not sys.is_finalizing():
            self.reload()
            warnings.warn(
                f"an Offload of {type(self._model).__name__} was forgotten, so everything was brought back: keep the "
                "object for as long as it is to be away",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        away = ", ".join(part for part in PARTS if part in self._moved)
        return f"<Offload of {type(self._model).__name__}: {away + ' away' if away else 'everything is there'}>"

    # -- away ----------------------------------------------------------------------------------------------------------

    def _away(self, parts: Sequence[str]) -> OffloadReport:
        with _one_at_a_time:
            return self._move(parts)

    def _move(self, parts: Sequence[str]) -> OffloadReport:
        watch = _Watch(self._devices())
        wanted = tuple(part for part in parts if part not in self._moved)
        known = list(self._known())
        moves = self._copied(wanted, known)
        known += _others(moves.values(), known)
        watch.look()
        # From here on reload() undoes whatever has been done, also where an interrupt comes in between.
        for part, moved in moves.items():
            self._moved[part] = moved
            self._guard_module()
            self._hide(part, moved, known)
            for piece in moved.pieces:
                piece.storage.resize_(0)
        _clean_up(self._devices())
        return watch.report(wanted, [piece for moved in moves.values() for piece in moved.pieces])

    def _copied(self, parts: Sequence[str], known: Sequence[_Known]) -> dict[str, _Moved]:
        """Backups of all parts, which are still there."""
        taken = {piece.key for moved in self._moved.values() for piece in moved.pieces}
        moves: dict[str, _Moved] = {}
        for part in parts:
            pieces = _pieces([tensor for tensor in known if tensor.part == part], taken)
            taken |= {piece.key for piece in pieces}
            backup = self._backup(sum(aligned(piece.nbytes) for piece in pieces))
            place = 0
            for piece in pieces:
                piece.backup, piece.place = backup, place
                backup.write(place, piece)
                place += aligned(piece.nbytes)
            moves[part] = _Moved(pieces, backup, [], [])
        return moves

    def _hide(self, part: str, moved: _Moved, known: Sequence[_Known]) -> None:
        """Guard every known tensor over the storages that go, of whichever part it is, and set gradients aside."""
        by_storage = {piece.key: piece for piece in moved.pieces}
        for tensor in known:
            found = by_storage.get(tensor.key)
            if found is not None and not is_guarded(tensor.tensor):
                moved.tensors.append(tensor)
                tensor.guard(found)
            if part == tensor.part == "grads":
                assert tensor.owner is not None
                moved.aside.append((tensor.owner, tensor.tensor))
                with _plainly():
                    tensor.owner.grad = None

    def _backup(self, nbytes: int) -> _Host | _Disk:
        fitting = sorted((spare.nbytes, n) for n, spare in enumerate(self._spare) if spare.nbytes >= nbytes)
        if fitting:
            return self._spare.pop(fitting[0][1])
        if self._spare:
            self._spare.pop().rest(keep=False)
        return self._make(nbytes)

    def _known(self) -> Iterator[_Known]:
        """Every tensor of all parts that has memory and is not set aside. Raises for what cannot be moved."""
        faults: list[str] = []
        for part, name, tensor, owner in self._found():
            if is_guarded(tensor):
                if not any(known.tensor is tensor for moved in self._moved.values() for known in moved.tensors):
                    raise OffloadedError(f"{name!r} is offloaded already, by another Offload")
                yield _Known(part, name, tensor, owner)
                continue
            fault = _fault(tensor)
            if fault:
                faults.append(f"  {name}: {fault}")
            elif not tensor.is_meta:
                yield _Known(part, name, tensor, owner)
        if faults:
            raise ValueError("\n".join(["cannot be offloaded; nothing was:", *faults]))

    def _found(self) -> Iterator[tuple[str, str, Tensor, Tensor | None]]:
        parameters = list(self._model.named_parameters(remove_duplicate=True))
        for name, parameter in parameters:
            yield "params", name, parameter, None
        for name, buffer in self._model.named_buffers(remove_duplicate=True):
            yield "params", name, buffer, None
        for name, parameter in parameters:
            with _plainly():
                grad = parameter.grad
            if grad is not None:
                yield "grads", f"{name}.grad", grad, parameter
        if self._optimizer is not None:
            names = {id(parameter): name for name, parameter in parameters}
            seen: set[int] = set(names)
            for owner, state in self._optimizer.state.items():
                for path, tensor in _tensors(state, f"optimizer[{names.get(id(owner), '?')}]", seen):
                    yield "optimizer", path, tensor, None
            for number, group in enumerate(self._optimizer.param_groups):
                options = {key: value for key, value in group.items() if key != "params"}
                for path, tensor in _tensors(options, f"optimizer group {number}", seen):
                    yield "optimizer", path, tensor, None

    # -- whatever uses the model as a whole ----------------------------------------------------------------------------

    def _guard_module(self) -> None:
        """Some wrappers hold views of their own, which nothing else would stop: FSDP2 does."""
        if self._hooks:
            return
        text = f"{type(self._model).__name__} is offloaded: reload() first"

        # They do not know this object, so that forgetting it ends it.
        refuse, refuse_params = _Refusal(text), _Refusal(text, "params", self._moved)
        for module in self._model.modules():
            self._hooks.append(module.register_forward_pre_hook(refuse_params, prepend=True))
            self._hooks.append(module.register_state_dict_pre_hook(refuse_params))  # type: ignore[no-untyped-call]
            self._hooks.append(module.register_load_state_dict_pre_hook(refuse_params))  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            self._hooks.append(self._optimizer.register_step_pre_hook(refuse))
            refuse_state = _Refusal(text, "optimizer", self._moved)
            self._hooks.append(self._optimizer.register_state_dict_pre_hook(refuse_state))

    def _let_go_of_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _devices(self) -> list[torch.device]:
        found = {tensor.device for tensor in (*self._model.parameters(), *self._model.buffers())}
        return [device for device in found if device.type not in ("cpu", "meta")]


class _Refusal:
    """A hook that refuses: always, or while one part is away."""

    def __init__(self, text: str, part: str = "", moved: Mapping[str, object] | None = None) -> None:
        self._text, self._part, self._moved = text, part, moved

    def __call__(self, *_: Any, **__: Any) -> None:
        if self._moved is None or self._part in self._moved:
            raise OffloadedError(self._text)

    def __reduce__(self) -> str:
        raise OffloadedError(self._text)  # the module that it guards is pickled


_one_at_a_time = threading.RLock()
"""Two threads that move the same storages would each free what the other one fills."""


# -- tensors and storages ----------------------------------------------------------------------------------------------


class _Known:
    """A tensor of one of the parts, and the parameter that it is the gradient of."""

    def __init__(self, part: str, name: str, tensor: Tensor, owner: Tensor | None) -> None:
        self.part, self.name, self.tensor, self.owner = part, name, tensor, owner
        with _plainly():
            self._local = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
            self.storage = self._local.untyped_storage()
        self.key: int = self.storage._cdata  # the storage's own identity; it has no address while it is empty

    def guard(self, piece: _Piece) -> None:
        import torch

        with _plainly():
            torch.autograd.graph.increment_version(self._local)  # a graph that has saved it raises, rather than crash
            local = self._local
            whole: Callable[[], Tensor] = partial(
                piece.read,
                local.dtype,
                int(local.storage_offset()),
                tuple(local.shape),
                local.stride(),
                local.is_conj(),
                local.is_neg(),
            )
            if local is not self.tensor:
                whole = partial(_as_dtensor, whole, _Sharding.of(self.name, self.tensor))
        guard(self.tensor, self.name, whole)


class _Sharding(NamedTuple):
    name: str
    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Any) -> _Sharding:
        return cls(name, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())


def _as_dtensor(read: Callable[[], Tensor], like: _Sharding) -> Tensor:
    from torch.distributed.tensor import DTensor

    if like.mesh.device_type != "cpu":
        raise OffloadedError(
            f"{like.name!r} is offloaded and sharded over {like.mesh.device_type}: its parts cannot be gathered from "
            "host memory; reload() before you push"
        )
    return DTensor.from_local(read(), like.mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride)


class _Piece:
    """One storage: its bytes are there, or in the backup."""

    backup: _Host | _Disk
    place: int

    def __init__(self, known: _Known) -> None:
        self.key, self.storage, self.nbytes = known.key, known.storage, known.storage.nbytes()
        self.device = known.storage.device

    def bytes(self) -> Tensor:
        """The storage's bytes, live."""
        import torch

        flat = torch.empty(0, dtype=torch.uint8, device=self.device)
        return flat.set_(self.storage, 0, (self.storage.nbytes(),), (1,))

    def read(
        self,
        dtype: torch.dtype,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        conj: bool,
        neg: bool,
    ) -> Tensor:
        """A tensor over this storage, as it looks in the backup."""
        import torch

        flat = self.backup.view(self.place, self.nbytes)
        typed = torch.empty(0, dtype=dtype)
        typed.set_(flat.untyped_storage(), flat.storage_offset() // typed.element_size() + offset, shape, strides)
        typed = typed.conj() if conj else typed
        return torch._neg_view(typed) if neg else typed

    @property
    def away(self) -> bool:
        return self.nbytes > 0 and self.storage.nbytes() == 0


class _Moved(NamedTuple):
    """One part that is away: its storages, the tensors that were guarded, and parameters with their gradients."""

    pieces: list[_Piece]
    backup: _Host | _Disk
    tensors: list[_Known]
    aside: list[tuple[Tensor, Tensor]]


def _pieces(tensors: Sequence[_Known], taken: set[int]) -> list[_Piece]:
    """One for each storage under these tensors that is not taken already."""
    pieces: dict[int, _Piece] = {}
    for known in tensors:
        if known.key not in taken and known.key not in pieces and known.storage.nbytes():
            pieces[known.key] = _Piece(known)
    return list(pieces.values())


def _others(moves: Iterable[_Moved], known: Iterable[_Known]) -> list[_Known]:
    """Tensors that somebody else holds over storages that go: to read one afterwards would crash the process."""
    import torch

    going = {piece.key: piece for moved in moves for piece in moved.pieces}
    if not going:
        return []
    names: dict[int, str] = {}
    ours: set[int] = set()
    for one in known:
        names.setdefault(one.key, one.name)
        ours |= {id(one.tensor), id(one._local)}
    others = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and id(thing) not in ours and not is_dtensor(thing):
            with suppress(RuntimeError, NotImplementedError, AttributeError):  # it has no storage
                other = _Known("", "", thing, None)
                if other.key in going:
                    other.name = f"a view of {names[other.key]}"
                    others.append(other)
    return others


def _restore(pieces: Sequence[_Piece], watch: _Watch) -> None:
    """Fill all storages again; where there is no memory for one of them, none is filled."""
    empty = [piece for piece in pieces if piece.away]
    try:
        for piece in empty:
            piece.storage.resize_(piece.nbytes)
        watch.look()
        for piece in empty:
            piece.backup.read_into(piece.place, piece)
    except BaseException:
        for piece in empty:
            piece.storage.resize_(0)
        raise
    _synchronise({piece.device for piece in empty})


def _check_new_gradients(moved: Sequence[_Moved]) -> None:
    new = []
    for part in moved:
        for parameter, grad in part.aside:
            with _plainly():
                if parameter.grad is not None and parameter.grad is not grad:  # that one: a reload was interrupted
                    new.append(tuple(parameter.shape))
    if new:
        raise ValueError(
            f"{len(new)} parameters have new gradients (shapes {', '.join(map(str, new[:5]))}), which those that were "
            "set aside would overwrite: use them, and set them to None, before reload()"
        )


def _fault(tensor: Tensor) -> str:
    """Why a tensor cannot be moved; empty where it can."""
    import torch
    from torch.nn.parameter import is_lazy

    if is_lazy(tensor):
        return "not initialised yet: run its lazy module once"
    local = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    if local.is_meta:
        return ""
    if local.layout is not torch.strided or local.is_nested or local.is_quantized:
        return f"of layout {local.layout}: only strided tensors have one storage to be moved"
    try:
        storage = local.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return f"a {type(tensor).__qualname__} without a storage of its own"
    if local.is_inference():
        return "an inference tensor"
    if storage.nbytes() and not storage.resizable():
        return "in memory that is not torch's alone (NumPy sees it, or a delivery is aliased): clone it first"
    if local.device.type == "cpu" and storage.is_shared():
        return "in shared memory, which others use"
    return ""


def _tensors(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    import torch

    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen.add(id(value))
            yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{path}.{key}", seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for number, inner in enumerate(value):
            yield from _tensors(inner, f"{path}[{number}]", seen)


def _plainly() -> Any:
    """Within, guarded tensors are what they are."""
    import torch

    return torch._C.DisableTorchFunctionSubclass()


# -- backups -----------------------------------------------------------------------------------------------------------


class _Host:
    """One piece of host memory."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        import torch

        self.nbytes = nbytes
        try:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as exc:
            raise StorageFullError(f"no {nbytes:,} bytes of host memory for the backup: {exc}") from exc

    def write(self, place: int, piece: _Piece) -> None:
        self._memory[place : place + piece.nbytes].copy_(piece.bytes(), non_blocking=True)
        _synchronise({piece.device})

    def read_into(self, place: int, piece: _Piece) -> None:
        piece.bytes().copy_(self._memory[place : place + piece.nbytes], non_blocking=True)

    def view(self, place: int, nbytes: int) -> Tensor:
        return self._memory[place : place + nbytes]

    def rest(self, keep: bool) -> None:
        if not keep:
            del self._memory


class _Disk:
    """A file without a name: nothing is left of it when this process ends, however it does."""

    def __init__(self, nbytes: int, *, directory: str | os.PathLike[str] | None) -> None:
        self.nbytes = nbytes
        self._mapped: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()
        where = Path(directory or tempfile.gettempdir())
        self._fd = _nameless(where)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, 0, max(nbytes, 1))
            else:  # macOS
                os.ftruncate(self._fd, max(nbytes, 1))
        except OSError as exc:
            os.close(self._fd)
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StorageFullError(f"no {nbytes:,} bytes on the disk under {where} for the backup") from exc

    def write(self, place: int, piece: _Piece) -> None:
        data = memoryview(array_of(piece.bytes().cpu()))  # type: ignore[arg-type]
        while data:
            done = os.pwrite(self._fd, data[:_CHUNK], place)
            data, place = data[done:], place + done

    def read_into(self, place: int, piece: _Piece) -> None:
        import torch

        whole = piece.bytes()
        host = whole if whole.device.type == "cpu" else torch.empty(piece.nbytes, dtype=torch.uint8)
        data = memoryview(array_of(host))  # type: ignore[arg-type]
        while data:
            done = os.preadv(self._fd, [data[:_CHUNK]], place)
            if not done:
                raise OffloadedError(f"the backup ends {len(data)} bytes too early: its file was cut")
            data, place = data[done:], place + done
        if host is not whole:
            whole.copy_(host)

    def view(self, place: int, nbytes: int) -> Tensor:
        """The bytes, mapped for as long as the tensor lives; writes to them go nowhere."""
        import numpy as np
        import torch

        start = place // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        array = self._mapped.get((place, nbytes))  # ties are known by their addresses: map once
        if array is None:
            mapping = mmap.mmap(self._fd, place - start + nbytes, flags=mmap.MAP_PRIVATE, offset=start)
            array = self._mapped[place, nbytes] = np.frombuffer(mapping, dtype=np.uint8)
        return torch.from_numpy(array)[place - start :]

    def rest(self, keep: bool) -> None:
        if not keep and self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            self.rest(keep=False)


_CHUNK = 1 << 28


def _nameless(where: Path) -> int:
    try:
        return os.open(where, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (AttributeError, OSError):  # another system, or a file system without such files
        fd, name = tempfile.mkstemp(prefix="weightwire-", dir=where)
        os.unlink(name)
        return fd


# -- memory ------------------------------------------------------------------------------------------------------------


class _Watch:
    """Looks at memory in use while something is moved."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        import torch

        self._begun = time.perf_counter()
        self._cuda = [device for device in devices if device.type == "cuda"]
        self._most = {str(device): torch.cuda.max_memory_allocated(device) for device in self._cuda}
        self._before = self._peaks = self._now()

    def look(self) -> None:
        self._peaks = {name: max(self._peaks[name], now) for name, now in self._now().items()}

    def report(self, parts: tuple[str, ...], pieces: Sequence[_Piece]) -> OffloadReport:
        import torch

        self.look()
        after = self._now()
        for device in self._cuda:  # the statistics are the user's, and not ours to reset: they say it where it is new
            most = torch.cuda.max_memory_allocated(device)
            if most > self._most[str(device)]:
                self._peaks[str(device)] = most
        memory = {name: Memory(before, after[name], self._peaks[name]) for name, before in self._before.items()}
        seconds = time.perf_counter() - self._begun
        return OffloadReport(parts, sum(piece.nbytes for piece in pieces), len(pieces), seconds, memory)

    def _now(self) -> dict[str, int]:
        import torch

        return {"host": _resident(), **{str(device): torch.cuda.memory_allocated(device) for device in self._cuda}}


def _resident() -> int:
    """Bytes of this process that are in memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def _clean_up(devices: Sequence[torch.device]) -> None:
    """Give memory back to the system that allocators would keep for later."""
    import torch

    gc.collect()
    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)


def _synchronise(devices: set[torch.device]) -> None:
    import torch

    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        elif device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)
