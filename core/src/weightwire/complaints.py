"""What goes wrong again and again in a thread that goes on: each kind is logged once, until it has been calm."""

from __future__ import annotations

import logging
import sys
import time

__all__ = ["CALM", "Complaints"]

CALM = 60.0
"""Seconds without a failure of one kind, after which the next one of it is news."""


class Complaints:
    """Of one thread. A kind is the exception's type and the line that raised it."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last: dict[tuple[object, ...], float] = {}

    def log(self, text: str, *args: object) -> None:
        """Log the exception that is being handled, with its traceback, as an error; a repetition only for debugging."""
        kind, _, place = sys.exc_info()
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = (kind, place.tb_frame.f_code, place.tb_lineno) if place is not None else (kind,)
        now = time.monotonic()
        news = now - self._last.get(where, -CALM) >= CALM
        self._last[where] = now
        self._logger.log(logging.ERROR if news else logging.DEBUG, text, *args, exc_info=news)
