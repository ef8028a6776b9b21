"""Observers hear everything and disturb nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightwire.errors import (
    AmbiguousBackendError,
    BackendLoadError,
    EndpointError,
    InvalidBackendError,
    UnknownBackendError,
)
from weightwire.hookspecs import hookimpl
from weightwire.observers import MAX_ERRORS, Observers

FakeDist = Callable[..., Path]


class Listener:
    """Hears all hooks, some with fewer arguments than the spec has."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    @hookimpl
    def weightwire_worker_joined(self, endpoint: str, worker: str, host: str, pid: int) -> None:
        self.heard.append(("joined", endpoint, worker, host, pid))

    @hookimpl
    def weightwire_worker_lost(self, worker: str, reason: str) -> None:
        self.heard.append(("lost", worker, reason))

    @hookimpl
    def weightwire_before_push(self, version: int, workers: frozenset[str] | None) -> None:
        self.heard.append(("before", version, workers))

    @hookimpl
    def weightwire_after_push(self, report: Any) -> None:
        self.heard.append(("after", report))

    @hookimpl
    def weightwire_after_pull(self, receipt: Any) -> None:
        self.heard.append(("pull", receipt))


class Faulty:
    @hookimpl
    def weightwire_before_push(self, version: int) -> None:
        raise ValueError(f"no {version}")

    @hookimpl
    def weightwire_worker_lost(self) -> None:
        raise KeyboardInterrupt


REPORT: Any = SimpleNamespace()


def call_all(observers: Observers) -> None:
    observers.worker_joined(endpoint="e", worker="w", host="h", pid=1)
    observers.before_push(endpoint="e", version=1, workers=None)
    observers.after_push(endpoint="e", report=REPORT)
    observers.after_pull(endpoint="e", receipt=REPORT)


def test_every_hook_is_heard_in_order() -> None:
    first, second = Listener(), Listener()
    observers = Observers([first, second])
    call_all(observers)
    observers.worker_lost(endpoint="e", worker="w", reason="gone")
    expected = [
        ("joined", "e", "w", "h", 1),
        ("before", 1, None),
        ("after", REPORT),
        ("pull", REPORT),
        ("lost", "w", "gone"),
    ]
    assert first.heard == second.heard == expected
    assert observers
    assert observers.errors == []


@pytest.mark.parametrize("nobody", [None, [], ()])
def test_nobody_listens(nobody: Any) -> None:
    observers = Observers(nobody)
    call_all(observers)
    assert not observers
    assert observers.take_errors() == []


def test_an_error_is_contained_named_logged_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    before, after = Listener(), Listener()
    observers = Observers([before, Faulty(), after])
    with caplog.at_level(logging.ERROR, "weightwire"):
        call_all(observers)
    assert before.heard == after.heard
    assert len(after.heard) == 4
    assert "observer Faulty failed in weightwire_before_push" in caplog.text
    assert "ValueError: no 1" in caplog.text
    assert observers.errors == ["observer Faulty, weightwire_before_push: ValueError: no 1"]
    assert observers.take_errors() == ["observer Faulty, weightwire_before_push: ValueError: no 1"]
    assert observers.errors == []


def test_an_interrupt_is_not_contained() -> None:
    with pytest.raises(KeyboardInterrupt):
        Observers([Faulty()]).worker_lost(endpoint="e", worker="w", reason="")


def test_kept_errors_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    observers = Observers([Faulty()])
    with caplog.at_level(logging.CRITICAL, "weightwire"):
        for version in range(MAX_ERRORS + 5):
            observers.before_push(endpoint="e", version=version, workers=None)
    assert len(observers.errors) == MAX_ERRORS
    assert observers.errors[-1].endswith(f"no {MAX_ERRORS + 4}")


# -- by name -----------------------------------------------------------------------------------------------------------

SOURCE = """
from weightwire import hookimpl
heard = []
@hookimpl
def weightwire_before_push(version):
    heard.append(version)
"""


@pytest.fixture
def installed(fake_dist: FakeDist) -> Iterator[Callable[..., None]]:
    before = set(sys.modules)

    def install(name: str, source: str = SOURCE, distribution: str = "") -> None:
        module = f"{(distribution or name).replace('-', '_')}_observer"
        fake_dist(distribution or f"obs-{name}", {name: module}, group="weightwire.observers", **{module: source})

    yield install
    for name in set(sys.modules) - before:
        if name.endswith("_observer"):
            del sys.modules[name]


@pytest.mark.parametrize("wanted", [["csv"], "csv", ["csv@obs-csv"], ["import:csv_observer"]])
def test_an_observer_by_name(wanted: Any, installed: Callable[..., None]) -> None:
    installed("csv")
    installed("broken", "raise RuntimeError")  # not selected, so it harms nobody
    observers = Observers(wanted)
    observers.before_push(endpoint="e", version=7, workers=None)
    assert sys.modules["csv_observer"].heard == [7]
    assert "broken_observer" not in sys.modules


def test_names_that_cannot_be_resolved(installed: Callable[..., None]) -> None:
    installed("csv")
    installed("broken", "import no_such_dependency")
    installed("twin", distribution="twin-a")
    installed("twin", distribution="twin-b")
    with pytest.raises(UnknownBackendError, match=r"no observer 'csw' is installed.*Did you mean 'csv'"):
        Observers(["csw"])
    with pytest.raises(UnknownBackendError, match="no observer 'ipc' is installed"):  # a backend is no observer
        Observers(["ipc"])
    with pytest.raises(BackendLoadError, match=r"observer 'broken' .*needs the module 'no_such_dependency'"):
        Observers(["broken"])
    with pytest.raises(AmbiguousBackendError, match=r"twin-a 1\.0, twin-b 1\.0"):
        Observers(["twin"])
    with pytest.raises(EndpointError, match="a name without location and options"):
        Observers(["csv?path=x"])


class Misspelt:
    @hookimpl
    def weightwire_before_pusch(self) -> None: ...


class WrongArgument:
    @hookimpl
    def weightwire_before_push(self, versoin: int) -> None: ...


@pytest.mark.parametrize(
    ("plugin", "why"),
    [
        (Misspelt(), "unknown hook weightwire_before_pusch. Did you mean weightwire_before_push?"),
        (WrongArgument(), "versoin"),
        (Listener, "is a class"),
        (print, "it has no hook"),
    ],
)
def test_objects_that_are_no_observers(plugin: object, why: str) -> None:
    with pytest.raises(InvalidBackendError, match=r"observer '\w+'") as caught:
        Observers([plugin])
    assert why in str(caught.value)
