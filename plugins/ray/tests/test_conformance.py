from __future__ import annotations

import uuid
from typing import Any, ClassVar

import pytest
import ray

from weightwire import WeightUpdater
from weightwire.testing import BackendSuite, Rig
from weightwire.testing.workers import PRELOAD

PRELOAD.append("ray")


@ray.remote(num_cpus=0)
def nothing() -> None:
    """Has Ray start a process, where none is idle."""


class WarmRig(Rig):
    """While a test begins, Ray gets the process ready in which the next updater's mailbox will be."""

    def updater(self, *args: Any, **options: Any) -> WeightUpdater:
        updater = super().updater(*args, **options)
        nothing.remote()
        return updater


@pytest.mark.usefixtures("cluster")
class TestRay(BackendSuite):
    """The kit's processes are drivers of one cluster, to which their ends connect by the option ``address``."""

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

    def make_endpoint(self) -> str:
        return f"ray://kit-{uuid.uuid4().hex[:12]}?address={ray.get_runtime_context().gcs_address}&alias=force"

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
