"""The suite that any backend runs: ``class TestMine(BackendSuite): endpoint = "mine"``."""

from __future__ import annotations

from weightwire.testing.suites.applying import ApplyingCases
from weightwire.testing.suites.capabilities import CapabilityCases
from weightwire.testing.suites.claims import ClaimCases
from weightwire.testing.suites.ends import EndCases
from weightwire.testing.suites.failures import FailureCases
from weightwire.testing.suites.hostile import HostileCases
from weightwire.testing.suites.leaks import LeakCases
from weightwire.testing.suites.model import ModelCases
from weightwire.testing.suites.roster import RosterCases
from weightwire.testing.suites.streaming import StreamCases
from weightwire.testing.suites.tensors import TensorCases

__all__ = ["BackendSuite"]


class BackendSuite(
    TensorCases,
    ApplyingCases,
    RosterCases,
    EndCases,
    FailureCases,
    HostileCases,
    LeakCases,
    CapabilityCases,
    ClaimCases,
    StreamCases,
    ModelCases,
):
    """All cases. A case that needs a capability which the backend does not claim is skipped, with that as the reason.

    Attributes:
        endpoint: the backend's name, or an endpoint with a location of its own.
        options: options that go into the endpoint's text.
        skip: name of a case, with or without ``test_`` -> why it does not apply; shown with each run.

    :meth:`make_location` gives each case its place; :mod:`weightwire.testing` says when to override it.
    """
