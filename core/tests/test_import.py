"""`import weightwire` costs next to nothing: names are imported when they are first used."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

import weightwire

HEAVY = {"torch", "numpy", "ray", "tensordict", "torchrl", "typer", "rich", "weightwire_ipc", "weightwire_vanilla"}


def modules_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has after this code."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stderr))


@pytest.mark.parametrize(
    "code",
    [
        "import weightwire",
        "import weightwire; dir(weightwire); weightwire.PushError; weightwire.WireError",
        "import weightwire; weightwire.Endpoint; weightwire.hookimpl; weightwire.BackendInfo",
        "import weightwire; weightwire.Sender; weightwire.Receiver; weightwire.Version; weightwire.__version__",
        "from weightwire.registry import available; assert available()",
        "from weightwire.cli import main; assert main(['backends']) == 0",
        "from weightwire.cli import main; assert main(['backends', '--json']) == 0",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    assert not modules_after(code) & HEAVY


def test_importing_the_package_imports_nothing_more_of_it() -> None:
    extra = modules_after("import weightwire") - modules_after("pass")
    assert {name for name in extra if name.startswith("weightwire")} == {"weightwire"}
    assert not extra & {"msgspec", "pluggy", "importlib.metadata"}


@pytest.mark.parametrize("name", weightwire.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(weightwire, name) is not None
    assert name in dir(weightwire)


def test_all_is_sorted_and_names_are_real_objects() -> None:
    assert list(weightwire.__all__) == sorted(weightwire.__all__)
    assert weightwire.__version__ == version("weightwire")
    assert weightwire.parse_endpoint("ipc") == weightwire.Endpoint("ipc")


def test_type_checkers_see_the_same_names() -> None:
    import ast
    import inspect

    block = next(n for n in ast.parse(inspect.getsource(weightwire)).body if isinstance(n, ast.If))
    seen = {alias.asname or alias.name for n in block.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    assert seen | {"__version__"} == set(weightwire.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'WeightUpdatr'"):
        _ = weightwire.WeightUpdatr  # type: ignore[attr-defined]
