"""RayCollector over ray: what TorchRL's own scheme gets wrong there. In a process of its own, which shuts Ray down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def told(parts: ModuleType) -> dict[str, Any]:
    """What the script saw."""
    if find_spec("weightwire_ray") is None or find_spec("ray") is None:
        pytest.skip("weightwire-ray is not installed")
    if find_spec("torchrl.weight_update") is None:
        pytest.skip("this torchrl has no weight sync schemes (they came with 0.11)")
    environment = {
        **os.environ,
        "PYTHONPATH": str(FOLDER),
        "PYTHONWARNINGS": "ignore",
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }
    done = subprocess.run(
        [sys.executable, str(FOLDER / "torchrl_ray.py")], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "skip" in found:
        pytest.skip(found["skip"])
    return found


def versions_of(told: dict[str, Any], key: str, parts: ModuleType) -> list[list[float]]:
    return [[low, high, *([version] if parts.VERSIONED else [])] for low, high, version in told[key]]


def test_actors_act_with_what_was_pushed_to_them(told: dict[str, Any], parts: ModuleType) -> None:
    def rows(*expected: tuple[float, int]) -> list[list[float]]:
        return [[value, value, *([version] if parts.VERSIONED else [])] for value, version in expected]

    assert versions_of(told, "first", parts) == rows((1.0, 1))
    assert versions_of(told, "trained", parts) == rows((1.0, 1))
    assert [row[:2] for row in versions_of(told, "updated", parts)] == [[2.0, 2.0]]
    each = versions_of(told, "each", parts)
    assert [row[:2] for row in each] == [[3.0, 3.0], [4.0, 4.0]]
    if parts.VERSIONED:
        assert {f"policy-{worker}": row[2] for worker, row in enumerate(each)} == told["versions"]
    assert told["unharmed"] == told["each"]


@pytest.mark.parametrize(
    ("misfit", "named"),
    [
        ("transposed", "shape of layers.0.weight"),
        ("float64", "dtype of layers.0.bias"),
        ("extra", "unknown"),
        ("missing", "layers.0.bias"),
    ],
)
def test_weights_that_do_not_fit_are_refused_at_once(told: dict[str, Any], misfit: str, named: str) -> None:
    kind, text, seconds = told["misfits"][misfit]
    assert kind == "RefusedError"
    assert named in text
    assert seconds < 30


def test_a_killed_actor_is_named(told: dict[str, Any]) -> None:
    kind, text, seconds = told["killed"]
    assert (kind, "policy-1" in text) == ("WorkerLostError", True)
    assert seconds < 30


def test_forgetting_the_collector_after_the_shutdown_starts_no_ray(told: dict[str, Any]) -> None:
    assert told["ray is up"] is False
