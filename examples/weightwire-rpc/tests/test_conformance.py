from __future__ import annotations

import uuid
from typing import ClassVar

import pytest

from weightwire.testing import BackendSuite
from weightwire.testing.workers import PRELOAD

PRELOAD.append("weightwire_rpc.sender")  # and with it torch's RPC, which takes its time

DEATH = (
    "a dynamic RPC group lets nobody in any more after a member died: test_static_group.py kills one of a static group"
)


class TestRpc(BackendSuite):
    endpoint = "rpc"
    options: ClassVar = {"allow_pickle": True}
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
        self.group = group

    def make_endpoint(self) -> str:
        return f"rpc://kit-{uuid.uuid4().hex[:12]}?allow_pickle=true&join={self.group}"
