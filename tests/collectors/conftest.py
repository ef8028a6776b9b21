"""For the tests of the TorchRL adapter: worker processes that start quickly, and what is handed to them."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PRELOAD = [
    "torchrl.collectors.distributed",
    "torchrl.collectors",
    "torchrl.envs",
    "weightwire.collectors.torchrl.updaters",
    "weightwire.collectors.torchrl.leaf",
    "weightwire_ipc.receiver",
]


@pytest.fixture(scope="session")
def quick_start() -> Iterator[None]:
    """TorchRL's worker processes come from a forkserver of their own, which has imported what they need."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(PRELOAD)
    names = ("connect_to_new_process", "ensure_running", "get_inherited_fds")
    before = {name: getattr(forkserver, name) for name in names}
    for name in names:
        setattr(forkserver, name, getattr(server, name))
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(method, force=True)
    for name, function in before.items():
        setattr(forkserver, name, function)
    server._stop()


@pytest.fixture(scope="session")
def parts() -> Iterator[ModuleType]:
    """The module of policies and environments, which workers can import by name."""
    if find_spec("torchrl") is None:
        pytest.skip("torchrl is not installed")
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchRL's own, while it is imported
        module = importlib.import_module("torchrl_parts")
    yield module
    sys.path.remove(folder)


@pytest.fixture
def schemes(parts: ModuleType) -> ModuleType:
    """The same, where this TorchRL has weight sync schemes."""
    if find_spec("torchrl.weight_update") is None:
        pytest.skip("this torchrl has no weight sync schemes (they came with 0.11)")
    return parts


@pytest.fixture
def make(quick_start: None) -> Iterator[Callable[..., Any]]:
    """``make(class, ...)``: a collector, or anything with ``shutdown()`` or ``close()``, that ends with the test."""
    made: list[Any] = []

    def build(kind: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thing = kind(*args, **kwargs)
        made.append(thing)
        return thing

    yield build
    for thing in reversed(made):
        with suppress(RuntimeError, ValueError):  # releases differ in what they say of a worker that the test killed
            (getattr(thing, "shutdown", None) or thing.close)()


class Checks:
    """What the frames of a batch say."""

    def __init__(self, parts: ModuleType) -> None:
        self.versioned: bool = parts.VERSIONED
        self.tracked: dict[str, bool] = {"track_policy_version": True} if self.versioned else {}

    def acts(self, batch: Any, *expected: tuple[float, int]) -> None:
        """Each process acts with one value, and puts one version on its frames: those."""
        assert (("next", "policy_version") in batch.keys(True)) == self.versioned
        versions = batch["next", "policy_version"].flatten().tolist() if self.versioned else [None] * batch.numel()
        columns = (batch[key].flatten().tolist() for key in ("pid", "low", "high"))
        rows: dict[float, set[tuple[float, int | None]]] = {}
        for pid, low, high, version in zip(*columns, versions, strict=True):
            assert low == high
            rows.setdefault(pid, set()).add((low, version))
        assert all(len(found) == 1 for found in rows.values()), rows
        found = sorted(found.pop() for found in rows.values())
        assert found == sorted((value, version if self.versioned else None) for value, version in expected)

    def seen(self, batch: Any, *keys: str) -> list[float]:
        """What the frames have under these keys, each value once."""
        return sorted({value for key in keys or ("low", "high") for value in batch[key].flatten().tolist()})


@pytest.fixture
def checks(parts: ModuleType) -> Checks:
    return Checks(parts)
