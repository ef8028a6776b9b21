"""A thread that fails again and again, and goes on, is heard of once for each kind."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from weightwire import complaints
from weightwire.complaints import Complaints

Failure = tuple[Callable[[type[Exception]], None], type[Exception]]
Told = Callable[..., list[str]]


def fail(kind: type[Exception]) -> None:
    raise kind("again")


def elsewhere(kind: type[Exception]) -> None:
    raise kind("again")


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """What was logged as an error, with a traceback, of some failures in their order."""
    own = Complaints(logging.getLogger("weightwire.complaints.test"))

    def run(*failures: Failure) -> list[str]:
        caplog.clear()
        for failing, kind in failures:
            try:
                failing(kind)
            except Exception:
                own.log("%s fails", kind.__name__)
        return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR and record.exc_info]

    return run


def test_each_kind_is_told_once(told: Told) -> None:
    assert told((fail, OSError), (fail, OSError), (fail, ValueError), (fail, OSError)) == [
        "OSError fails",
        "ValueError fails",
    ]
    assert told((elsewhere, OSError), (fail, OSError)) == ["OSError fails"], "another line is another kind"


def test_what_comes_back_after_a_calm_is_told_again(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(told((fail, OSError))) == 1
    monkeypatch.setattr(complaints, "CALM", 0.0)
    assert len(told((fail, OSError))) == 1
