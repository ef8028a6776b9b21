"""The conformance kit: the tests that a backend has to pass, whoever wrote it.

Install it with ``pip install "weightwire[testing]"``. This is a complete ``test_mine.py``; run it with
``pytest test_mine.py``::

    from weightwire.testing import BackendSuite
    class TestMine(BackendSuite):
        endpoint = "mine"

``endpoint`` is the name under which the backend is installed, or ``"import:package.module"`` while it is not.

BackendSuite
    All cases: every dtype and shape, all or nothing, joining, leaving, dying and restarting, hostile bytes, leaks,
    random histories against a model. A case that needs a capability which the backend does not claim is skipped, and
    the reason is told (``pytest -rs``). What a subclass may set:

    ``options``
        A mapping of options that go into every endpoint's text: ``options = {"slots": 3}``.
    ``skip``
        A mapping of a case's name, with or without ``test_``, to the reason why it does not apply to this backend:
        ``skip = {"interpreter_exit": "..."}``. The reason is shown with each run.
    ``make_location(self)``
        Gives a location that nobody uses yet, for each case. The default makes up a name, or takes a free port of this
        machine where the backend's locations are ``host:port``. Override it where a location takes more than that;
        where ``endpoint`` has one of its own (``"mine://there"``), all cases use that.

    A plugin that needs any of these puts them where ``weightwire conformance mine`` finds them too: into a class
    ``Suite`` in the module ``conformance`` of its package, beside the pytest fixtures that it asks for; its own test is
    ``class TestMine(Suite): pass`` then.

Rig
    What each case stands on (the fixture ``rig``), for further cases of your own: ``rig.updater(...)`` and
    ``rig.receiver(...)`` open the two ends at one place, ``rig.worker(name, make, *args)`` a worker in a process of
    its own (a thread, where the backend reaches no processes), ``rig.victim(...)`` one that can be killed and stopped.
    Whatever happens in the case, all of them are ended after it.

The suite of a backend between processes takes about a minute on two cores, at most 150 s; pytest says at the end what
it took. ``-m "not soak"`` leaves out the long random histories, which take minutes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightwire.testing.rig import Rig
    from weightwire.testing.suite import BackendSuite

__all__ = ["BackendSuite", "Rig"]

_HOMES = {"BackendSuite": "weightwire.testing.suite", "Rig": "weightwire.testing.rig"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "BackendSuite":
        import pytest

        # The suites are test modules in all but their names: let pytest explain their assertions too.
        pytest.register_assert_rewrite("weightwire.testing.suites")
    return getattr(import_module(_HOMES[name]), name)
