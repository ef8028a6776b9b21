"""``weightwire conformance BACKEND``: every case of :mod:`weightwire.testing`, by pytest, with nothing to write."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from weightwire.cli.text import complain
from weightwire.endpoint import Endpoint, parse
from weightwire.errors import WeightwireError
from weightwire.registry import open_backend

__all__ = ["run", "suite_of"]

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
from weightwire.endpoint import parse
from weightwire.registry import open_backend
from weightwire.testing import BackendSuite


class {name}(BackendSuite):
    endpoint = {endpoint!r}
    options = {options!r}

    def info(self):
        return open_backend(parse({given!r})).info
"""


def run(text: str, arguments: Sequence[str] = (), *, soak: bool = False) -> int:
    """Run the suite over a backend, with more arguments for pytest.

    The status: 0, every case passed or was skipped with its reason; 1, one failed; 2, the backend or an argument is not
    known, no case was chosen, or pytest is missing; 130, Ctrl-C.
    """
    here = os.getcwd()
    # As `python -m` has it: a module of this folder can be named, here and in the processes that the cases start.
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    try:
        endpoint = parse(text)
        open_backend(endpoint)
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
        suite.write_text(suite_of(endpoint))
        chosen = [] if soak else ["-m", "not soak", "--hypothesis-seed=0"]  # the same examples in every run
        status = pytest.main([str(suite), "-c", str(settings), "--rootdir", folder, *chosen, *arguments])
    return {0: 0, 1: 1, 2: 130}.get(int(status), 2)


def suite_of(endpoint: Endpoint) -> str:
    """The source of a test module that runs all cases over this endpoint."""
    bare = Endpoint(endpoint.backend, endpoint.distribution)
    words = re.sub(r"\W+", " ", endpoint.backend.removeprefix("import:")).title().replace(" ", "")
    return _SUITE.format(
        name=f"Test{words}",
        endpoint=str(endpoint if endpoint.location else bare),
        options={} if endpoint.location else dict(endpoint.options),
        given=str(endpoint),
    )
