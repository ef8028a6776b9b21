"""Functions whose call runs nothing: what they return would have to be awaited, or iterated over, and nobody does."""

from __future__ import annotations

import inspect
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

__all__ = ["check_ran", "check_runs"]

_IDLE = (CoroutineType, GeneratorType, AsyncGeneratorType)
_KINDS = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def check_runs(function: Any, what: str) -> None:
    """Raise ``TypeError`` for an ``async def`` or a generator function, bound, partial or an object's ``__call__``."""
    call = getattr(type(function), "__call__", None)  # noqa: B004
    if any(kind(one) for kind in _KINDS for one in (function, call)):
        raise TypeError(f"{what} is {function!r}, an async or generator function: to call it runs nothing of it")


def check_ran(returned: Any, what: str) -> None:
    """Raise ``TypeError`` where a call has returned what is still to be run."""
    if isinstance(returned, _IDLE):
        if isinstance(returned, CoroutineType):
            returned.close()  # else Python warns that nobody has awaited it
        raise TypeError(f"{what} returned a {type(returned).__name__}, of which nothing has run")
