"""The conformance kit over ``rpc``: a dynamic group on loopback, whose first member is the test process; the kit's
processes join it."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

from weightwire.testing import BackendSuite
from weightwire.testing.workers import PRELOAD

__all__ = ["Suite", "group"]

# For this process and all that the cases start.
PRELOAD.append("weightwire_rpc.sender")  # and with it torch's RPC, which takes its time
os.environ["TP_SOCKET_IFNAME"] = "lo"  # where torch listens
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns of every member that leaves
# Each of torch's threads has an arena of malloc's own, between which resident memory wanders more than the kit takes.
os.environ["MALLOC_ARENA_MAX"] = "2"
ctypes.CDLL(None).mallopt(-8, 2)  # M_ARENA_MAX, which is read from there only when a process starts

TIMEOUT = 20

DEATH = (
    "a dynamic RPC group lets nobody in any more after a member died: test_static_group.py kills one of a static group"
)


@pytest.fixture(scope="session")
def group() -> Iterator[str]:
    """``host:port`` of its store."""
    from torch.distributed import rpc

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{place}", rpc_timeout=TIMEOUT)
    rpc.init_rpc("first", rank=0, rpc_backend_options=options)
    yield place
    rpc.shutdown(graceful=False)


class Suite(BackendSuite):
    endpoint = "rpc"
    options: Mapping[str, Any] = {"allow_pickle": True}
    skip: ClassVar = {
        "nothing_listens_where_others_can_connect": "the sockets are torch's, which asks nobody who he is",
        **dict.fromkeys(
            (
                "worker_is_killed",
                "lost_worker_may_be_dropped",
                "stopped_then_killed",
                "trainer_is_killed",
                "trainer_is_killed_while_pushing",
                "staged_needs_no_trainer",
                "half_of_the_workers_die_again_and_again",
                "workers_come_and_go",
                "histories_with_deaths",
                "long_histories",
            ),
            DEATH,
        ),
    }

    @pytest.fixture(autouse=True)
    def _joined(self, group: str) -> None:
        self.options = {**self.options, "join": group}
