"""The moment at which a policy changes: all of it, or nothing, whatever interrupts.

Python runs signal handlers (Ctrl-C) between bytecodes of the main thread, and nowhere else. So everything that changes
the policy happens within *one* call from bytecode into C: a ``deque`` that drains a ``map`` over steps, each of them a
partial of a built-in between operands that were checked before. A signal is then seen before or after, never inside.

Steps that run Python code (custom tensor classes, setters, callables) can fail. They come first in the same call, and
the restoring of what they changed is the next call into C, with no bytecode in between that looks at signals.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Prepared", "Risky", "Step", "commit"]

logger = logging.getLogger(__name__)

Step = partial[Any]
"""A partial of a built-in: runs no Python code and cannot fail."""


class Risky(NamedTuple):
    """A change that may run Python code and fail, and the way back from it.

    ``restore`` brings the old value back in C. Where there is only Python code for that, ``mend`` does it.
    """

    name: str
    do: Callable[[], object]
    restore: Step | None = None
    mend: Callable[[], object] | None = None


class Prepared:
    """One payload, made ready for one target: what can fail has been done, nothing of the target was touched.

    Attributes:
        tensors, nbytes: what the target takes, ties counted once in bytes.
        ruined: after a failed commit, whether the target's state is unknown: a callable that was handed the tensors has
            raised, or a setter could not be undone.
    """

    __slots__ = ("call", "inference", "keep", "nbytes", "risky", "ruined", "steps", "streams", "tensors")

    def __init__(
        self,
        *,
        tensors: int,
        nbytes: int,
        steps: Sequence[Step] = (),
        risky: Sequence[Risky] = (),
        call: tuple[Callable[[Mapping[str, Tensor]], object], Mapping[str, Tensor]] | None = None,
        inference: bool = False,
        keep: object = None,
        streams: Sequence[torch.device] = (),
    ) -> None:
        self.tensors = tensors
        self.nbytes = nbytes
        self.steps = steps
        self.risky = risky
        self.call = call
        self.inference = inference  # a step writes into inference tensors
        self.keep = keep  # the old tensors, so that no finaliser of theirs runs within the commit
        self.streams = streams  # devices on which the payload's memory is read
        self.ruined = False

    def done(self) -> None:
        """Let go of everything, the old tensors too, when the payload's memory is read no more. Idempotent."""
        if self.streams:
            _synchronize(self.streams)
        self.streams = ()
        self.steps = self.risky = ()
        self.call = self.keep = None


def _synchronize(devices: Sequence[torch.device]) -> None:
    import torch

    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        else:
            torch.accelerator.synchronize(device)


def commit(prepared: Sequence[Prepared], *, then: Step | None = None) -> None:
    """Apply all that was prepared, in order, and ``then`` one step more: all of it or, when anything raises, nothing.

    Raises what a risky step or callable raises, with the tensor's name in its attribute ``tensor``.
    """
    import torch

    last = prepared[-1]
    odd = len(prepared) > 1 or last.risky or last.call or last.streams
    if not (odd or torch._C._is_torch_function_mode_enabled()):
        _commit_plain(last.steps, then, torch._C._InferenceMode(True))
        return
    risky = list(chain.from_iterable(one.risky for one in prepared))
    undo: list[Step] = []  # what is to be done when a step raises; empty when all are through
    if restores := [r.restore for r in reversed(risky) if r.restore is not None]:
        undo += _without_modes(restores)
    # The grad mode is part of the state that leaving this mode brings back.
    mode = torch._C._InferenceMode(any(one.inference for one in prepared))
    leave: Step = partial(mode.__exit__, None, None, None)
    steps: list[Step] = [
        *_calls(prepared),
        partial(mode.__enter__),
        partial(undo.append, leave),
        partial(torch._C._set_grad_enabled, False),
        *(partial(_try, r.name, r.do) for r in risky),
        partial(setattr, last, "ruined", True),  # nothing below can fail, but a device may
        *_without_modes(chain.from_iterable(one.steps for one in prepared), undo),
        *(() if then is None else (then,)),
        partial(setattr, last, "ruined", False),
        leave,
        partial(list.clear, undo),
        partial(list.clear, risky),
    ]
    run: Step = partial(deque, map(partial.__call__, steps), 0)
    restore: Step = partial(deque, map(partial.__call__, undo), 0)
    try:
        run()
    finally:
        restore()
        if risky:
            _mend(risky, last)


def _commit_plain(steps: Sequence[Step], then: Step | None, mode: Any) -> None:
    """The usual case, in less time: nothing in it can fail. Nor is it asked what sort of tensors are written to: the
    inference mode lets one write to all of them, and keeps no books for autograd."""
    leave: Step = partial(mode.__exit__, None, None, None)
    ending = (leave,) if then is None else (then, leave)
    try:
        deque(map(_CALL, (partial(mode.__enter__), *steps, *ending)), 0)
    finally:
        leave()  # where a step has raised; a second time it does nothing


_CALL = partial.__call__


def _without_modes(steps: Iterable[Step], undo: list[Step] | None = None) -> list[Step]:
    """The steps out of reach of torch's function modes (``torch.set_default_device`` is one), which are Python code."""
    import torch

    guard = torch._C.DisableTorchFunction()
    leave: Step = partial(guard.__exit__, None, None, None)
    return [partial(guard.__enter__), *([] if undo is None else [partial(undo.append, leave)]), *steps, leave]


def _calls(prepared: Sequence[Prepared]) -> list[Step]:
    """One call of the callable target, with the tensors of a full version and of the subset on top of it as one."""
    tensors: dict[str, Tensor] = {}
    for one in prepared:
        tensors.update(one.call[1] if one.call else {})
    last = prepared[-1]
    if last.call is None:
        return []
    return [
        partial(setattr, last, "ruined", True),
        partial(last.call[0], tensors),
        partial(setattr, last, "ruined", False),
    ]


def _try(name: str, do: Callable[[], object]) -> None:
    try:
        do()
    except Exception as exc:
        with suppress(AttributeError):  # an exception with slots
            exc.tensor = name  # type: ignore[attr-defined]
        raise


def _mend(risky: Sequence[Risky], owner: Prepared) -> None:
    """Undo what only Python code can undo. Whether that worked is not known until it has."""
    mending = [r for r in reversed(risky) if r.mend is not None]
    if not mending:
        return
    owner.ruined = True
    for r in mending:
        try:
            assert r.mend is not None
            r.mend()
        except Exception:
            logger.exception("the old value of %r could not be brought back", r.name)
            return
    owner.ruined = False
