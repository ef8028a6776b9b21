"""The conformance kit over ``ray``: its processes are drivers of one small cluster of their own, to which their ends
connect by the option ``address``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import ray
from ray.cluster_utils import Cluster

from weightwire import WeightUpdater
from weightwire.testing import BackendSuite, Rig
from weightwire.testing.workers import PRELOAD

__all__ = ["QUIET", "STORE", "Suite", "cluster", "nodes"]

PRELOAD.append("ray")

STORE = 512 << 20
QUIET: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": "ERROR"}


@pytest.fixture(scope="session")
def nodes() -> Iterator[Cluster]:
    """A cluster of one node, to which this process is connected."""
    head = {"num_cpus": 4, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, **QUIET)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def cluster(nodes: Cluster) -> str:
    """Its address."""
    address: str = nodes.address
    return address


_nothing = ray.remote(num_cpus=0)(lambda: None)
"""Has Ray start a process, where none is idle."""


class WarmRig(Rig):
    """While a test begins, Ray gets the process ready in which the next updater's mailbox will be."""

    def updater(self, *args: Any, **options: Any) -> WeightUpdater:
        updater = super().updater(*args, **options)
        _nothing.remote()
        return updater


class Suite(BackendSuite):
    endpoint = "ray"
    skip: ClassVar = {
        **dict.fromkeys(
            ("a_thousand_pushes_of_which_fifty_fail", "workers_come_and_go"),
            "counts pages of Ray's shared memory and threads of Ray's that come and go: test_leaks.py counts without",
        ),
        "endpoint_is_handed_on": "a process of the kit is not connected to Ray, and that endpoint has no address: "
        "test_actors.py has this case between actors",
        "nothing_listens_where_others_can_connect": "every process connected to Ray has Ray's own listeners",
        "a_pickle_is_never_loaded": "none of the sockets is ours; Ray's own are behind its token",
        "trainer_forks_and_the_child_ends": "Ray's own exit handler hangs in a forked child of a connected process",
    }

    @pytest.fixture(autouse=True)
    def _connected(self, cluster: str) -> None:
        self.options = {**self.options, "address": cluster, "alias": "force"}

    def make_rig(self, capabilities: frozenset[str]) -> Rig:
        return WarmRig(self.make_endpoint, capabilities)

    # Each updater has a mailbox, which is a process that Ray starts in a second. So there are fewer or shorter cases of
    # some kinds here than over other backends, and the rest of them in the soak.

    def test_histories(self) -> None:
        self._run(mortal=False, capabilities=self.info().capabilities - {"processes"}, examples=8, steps=40)

    def test_histories_with_deaths(self) -> None:
        self._run(mortal=True, capabilities=self.info().capabilities, examples=2, steps=25)

    @pytest.mark.soak
    @pytest.mark.timeout(900)
    def test_long_histories(self) -> None:
        self._run(mortal=True, capabilities=self.info().capabilities, examples=15, steps=50)

    @pytest.mark.parametrize("apply", ["copy", pytest.param("alias", marks=pytest.mark.soak)])
    def test_reader_never_sees_a_mix(self, rig: Rig, apply: str) -> None:
        super().test_reader_never_sees_a_mix(rig, apply)

    @pytest.mark.parametrize(
        ("when", "forked"),
        [
            ("during", True),
            ("after", False),
            *(
                pytest.param(when, forked, marks=pytest.mark.soak)
                for when, forked in [("before", False), ("before", True), ("during", False), ("after", True)]
            ),
        ],
    )
    def test_worker_is_killed(self, rig: Rig, when: str, forked: bool) -> None:
        super().test_worker_is_killed(rig, when, forked)

    @pytest.mark.parametrize(
        "ends", ["both", "both, by sys.exit", *(pytest.param(e, marks=pytest.mark.soak) for e in ("trainer", "worker"))]
    )
    def test_interpreter_exit(self, rig: Rig, ends: str) -> None:
        super().test_interpreter_exit(rig, ends)

    @pytest.mark.soak
    @pytest.mark.timeout(400)
    def test_opening_and_closing(self, rig: Rig) -> None:
        super().test_opening_and_closing(rig)

    @pytest.mark.soak
    def test_half_of_the_workers_die_again_and_again(self, rig: Rig) -> None:
        super().test_half_of_the_workers_die_again_and_again(rig)

    @pytest.mark.soak
    def test_trainer_is_killed_while_pushing(self, rig: Rig) -> None:
        super().test_trainer_is_killed_while_pushing(rig)
