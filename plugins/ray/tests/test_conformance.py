from __future__ import annotations

import uuid
from typing import ClassVar

import pytest
import ray

from weightwire.testing import BackendSuite


@pytest.mark.usefixtures("cluster")
class TestRay(BackendSuite):
    """The kit's processes are drivers of one cluster, to which their ends connect by the option ``address``."""

    endpoint = "ray"
    skip: ClassVar = {
        "a_thousand_pushes_of_which_fifty_fail": "counts pages of Ray's shared memory and threads of Ray's that come "
        "and go: test_leaks.py counts without them",
        "endpoint_is_handed_on": "a process of the kit is not connected to Ray, and that endpoint has no address: "
        "test_actors.py has this case between actors",
        "nothing_listens_where_others_can_connect": "every process connected to Ray has Ray's own listeners",
        "a_pickle_is_never_loaded": "none of the sockets is ours; Ray's own are behind its token",
        "trainer_forks_and_the_child_ends": "Ray's own exit handler hangs in a forked child of a connected process",
    }

    def make_endpoint(self) -> str:
        return f"ray://kit-{uuid.uuid4().hex[:12]}?address={ray.get_runtime_context().gcs_address}&alias=force"
