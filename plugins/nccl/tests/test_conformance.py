from __future__ import annotations

import pytest

from weightwire.testing import BackendSuite
from weightwire.testing.suites.roster import RosterCases
from weightwire.testing.suites.tensors import TensorCases

SCATTER = {"algorithm": "scatter_allgather", "bucket": "16KiB"}  # small, so that there are many; large enough to be cut


class TestNccl(BackendSuite):
    endpoint = "nccl"


class TestScatterAllgather(TensorCases, RosterCases):
    endpoint = "nccl"
    options = SCATTER


@pytest.mark.soak
class TestAllOverScatterAllgather(BackendSuite):
    endpoint = "nccl"
    options = SCATTER
