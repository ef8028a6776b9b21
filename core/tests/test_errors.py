"""Every error is public, has its promised bases, and crosses a process boundary whole."""

from __future__ import annotations

import inspect
import pickle

import pytest

import weightwire
from weightwire import errors

BASES = {
    "EndpointError": ValueError,
    "UnknownBackendError": LookupError,
    "PreflightError": ValueError,
    "WaitTimeout": TimeoutError,
    "UpdaterLostError": ConnectionError,
    "UnknownWorkerError": LookupError,
    "WireError": ValueError,
    "RefusedError": errors.PushError,
    "ApplyError": errors.PushError,
    "WorkerLostError": errors.PushError,
}
ALL = [getattr(errors, name) for name in errors.__all__]


def test_all_is_complete() -> None:
    defined = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__}
    assert set(errors.__all__) == defined
    assert list(errors.__all__) == sorted(errors.__all__)


@pytest.mark.parametrize("kind", ALL)
def test_public_documented_and_of_the_family(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.WeightwireError)
    assert issubclass(kind, BASES.get(kind.__name__, Exception))
    assert kind.__doc__
    assert getattr(weightwire, kind.__name__) is kind
    assert kind.__name__ in weightwire.__all__


@pytest.mark.parametrize("kind", ALL)
def test_pickles(kind: type[Exception]) -> None:
    error = kind("what was asked")
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is kind
    assert str(copied) == "what was asked"


@pytest.mark.parametrize("kind", [kind for kind in ALL if issubclass(kind, errors.PushError)])
def test_push_errors_keep_what_they_carry(kind: type[errors.PushError]) -> None:
    error = kind("why", version=3, worker="w", phase="commit", tensor="layer.weight")
    copied = pickle.loads(pickle.dumps(error))
    assert vars(copied) == vars(error)
    assert (copied.version, copied.worker, copied.phase, copied.tensor) == (3, "w", "commit", "layer.weight")
    assert copied.report is None
