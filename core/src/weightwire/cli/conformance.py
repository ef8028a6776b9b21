"""``weightwire conformance BACKEND``: every case of :mod:`weightwire.testing`, by pytest, with nothing to write."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from weightwire.cli.text import complain
from weightwire.endpoint import Endpoint, parse
from weightwire.errors import WeightwireError
from weightwire.registry import find, load, open_backend

if TYPE_CHECKING:
    import pytest

__all__ = ["run", "shipped_with", "suite_of"]

NEEDS = 'it runs with pytest and a few more packages: pip install "weightwire[testing]"'

# Settings of its own, so that those of the folder in which it is run do not matter.
_SETTINGS = """\
[pytest]
addopts = --import-mode=importlib --strict-markers -p no:cacheprovider
timeout = 120
filterwarnings =
    error
    # pytest is to explain this package as a whole, and parts of it are imported by now; the suites are not.
    ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning
"""

_SUITE = """\
{source}


class {name}(Suite):
    endpoint = {endpoint!r}
    options = {{**Suite.options, **{options!r}}}
"""

_OUR_OWN = "from weightwire.testing import BackendSuite as Suite"
_SHIPPED = "from {module} import *  # the fixtures\nfrom {module} import Suite"


def run(text: str, arguments: Sequence[str] = (), *, soak: bool = False) -> int:
    """Run the suite over a backend, with more arguments for pytest.

    The status: 0, every case passed or was skipped with its reason; 1, one failed, or the backend's own suite is
    broken; 2, the backend or an argument is not known, no case was chosen, or pytest is missing; 130, Ctrl-C.
    """
    here = os.getcwd()
    # As `python -m` has it: a module of this folder can be named, here and in the processes that the cases start.
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    try:
        endpoint = parse(text)
        shipped = shipped_with(endpoint)
        # What a backend's own suite tries may be allowed by that suite.
        open_backend(endpoint if shipped is None else replace(endpoint, options={"allow_pickle": "true"}))
    except WeightwireError as exc:
        complain(str(exc))
        return 2
    missing = [name for name in ("pytest", "pytest_timeout", "hypothesis", "psutil") if find_spec(name) is None]
    if missing:
        complain(f"{', '.join(missing)} not installed; {NEEDS}")
        return 2
    import pytest

    with tempfile.TemporaryDirectory(prefix="weightwire-conformance-") as folder:
        settings, suite = Path(folder, "pytest.ini"), Path(folder, "test_conformance.py")
        settings.write_text(_SETTINGS)
        suite.write_text(suite_of(endpoint, shipped))
        chosen = [] if soak else ["-m", "not soak", "--hypothesis-seed=0"]  # the same examples in every run
        told = [str(suite), "-c", str(settings), "--rootdir", folder, *chosen, *arguments]
        watch = _Watch()
        status = int(pytest.main(told, plugins=[watch]))
    return 130 if watch.ctrl_c else {0: 0, 1: 1, 2: 1}.get(status, 2)


class _Watch:
    """Sees a Ctrl-C: pytest's status is 2 then, but also where a suite cannot be imported."""

    ctrl_c = False

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.ctrl_c = type(excinfo.value) is KeyboardInterrupt  # what pytest stops by itself for is a subclass


def shipped_with(endpoint: Endpoint) -> str | None:
    """The module in which the plugin that the endpoint names has a suite of its own: ``conformance``, in the package of
    its hooks."""
    record = find(endpoint)
    load(record)
    spec = sys.modules[record.value.partition(":")[0]].__spec__
    module = f"{spec.parent}.conformance" if spec is not None and spec.parent else ""
    return module if module and find_spec(module) is not None else None


def suite_of(endpoint: Endpoint, shipped: str | None = None) -> str:
    """The source of a test module that runs all cases over this endpoint, as the suite in the module ``shipped`` has
    them."""
    words = re.sub(r"[\W_]+", " ", endpoint.backend.removeprefix("import:")).title().replace(" ", "")
    return _SUITE.format(
        source=_OUR_OWN if shipped is None else _SHIPPED.format(module=shipped),
        name=f"Test{words}",
        endpoint=str(replace(endpoint, options={})),
        options=dict(endpoint.options),
    )
