"""A ``torch.distributed.Store`` over a :class:`~weightwire_nccl.board.Board`: what an engine asks for its rendezvous.

The engines call it from threads of their own, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from weightwire_nccl.board import Board

__all__ = ["BoardStore"]

c10d: Any = distributed_c10d  # torch types it in parts only
TIMEOUT = timedelta(seconds=30)


class BoardStore(c10d.Store):  # type: ignore[misc]
    """Whoever builds a group on it holds on to it: torch keeps only the half that is C++."""

    def __init__(self, board: Board, timeout: timedelta = TIMEOUT) -> None:
        super().__init__()
        self._board = board
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._board.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._board.get(key, self._timeout.total_seconds())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._board.wait(list(keys), (timeout or self._timeout).total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return self._board.has(list(keys))

    def add(self, key: str, amount: int) -> int:
        return self._board.add(key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        raise NotImplementedError("no engine that is used here asks for it")

    def delete_key(self, key: str) -> bool:
        return False  # a board lives no longer than its generation

    def num_keys(self) -> int:
        raise NotImplementedError("no engine that is used here asks for it")

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> Any:
        return self
