"""The conformance kit with the trainer on one node and the workers, as actors, on another."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from typing import Any, ClassVar

import psutil
import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from weightwire.testing import BackendSuite, Rig
from weightwire.testing.body import Body
from weightwire.testing.workers import PATIENCE, Pending, ProcessWorker, WorkerGone, until


@ray.remote(num_cpus=0, resources={"far": 1})
class Puppet:
    """Carries out what the kit's workers are told."""

    def __init__(self) -> None:
        self.body = Body()

    def pid(self) -> int:
        return os.getpid()

    def carry_out(self, environment: dict[str, str], command: str, args: Any, options: Any) -> tuple[bool, Any]:
        os.environ.pop("WEIGHTWIRE_JOB", None)
        os.environ.update(environment)
        try:
            return True, getattr(self.body, command)(*args, **options)
        except Exception as exc:
            return False, exc


class ActorWorker(ProcessWorker):
    """A worker of the kit in an actor on the other node."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.actor = Puppet.remote()
        self._pid = ray.get(self.actor.pid.remote(), timeout=PATIENCE)
        self._forked = []
        self._since = psutil.Process(self._pid).create_time()

    @property
    def pid(self) -> int:
        return self._pid

    def start(self, command: str, *args: Any, **options: Any) -> Pending:
        environment = {key: value for key, value in os.environ.items() if key == "WEIGHTWIRE_JOB"}
        call = self.actor.carry_out.remote(environment, command, args, options)

        def receive(timeout: float) -> tuple[bool, Any]:
            try:
                answer: tuple[bool, Any] = ray.get(call, timeout=timeout)
            except GetTimeoutError:
                raise AssertionError(f"worker {self.name!r} did not answer {command!r} in {timeout} s") from None
            except RayActorError as exc:
                raise WorkerGone(f"worker {self.name!r} died during {command!r}") from exc
            return answer

        return Pending(receive)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        until(lambda: not psutil.pid_exists(self.pid) or self.process.status() == "zombie", f"{self.name} is gone")

    def end(self) -> None:
        for pid in self._forked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.process.create_time() == self._since:
                self.cont()
                with contextlib.suppress(Exception):
                    self.start("close", 1.0).result(5)
        ray.kill(self.actor)


class FarRig(Rig):
    """The trainer here, the workers there."""

    def process(self, name: str) -> ProcessWorker:
        worker = ActorWorker(name)
        self._add(worker)
        return worker


@pytest.mark.soak
@pytest.mark.usefixtures("far")
class TestTwoNodes(BackendSuite):
    endpoint = "ray"
    skip: ClassVar = {
        **dict.fromkeys(
            ("a_thousand_pushes_of_which_fifty_fail", "workers_come_and_go"),
            "counts pages of Ray's shared memory and threads of Ray's: test_leaks.py counts without them",
        ),
        **dict.fromkeys(
            ("nothing_listens_where_others_can_connect", "a_pickle_is_never_loaded"),
            "all sockets are Ray's, behind its token",
        ),
        **dict.fromkeys(
            ("trainer_forks_and_the_child_ends", "ends_are_of_no_use_in_a_forked_child"),
            "Ray's own exit handler hangs in a forked child of a connected process",
        ),
        "interpreter_exit": "has no second node: TestRay has it",
    }

    def make_endpoint(self) -> str:
        return f"ray://kit-{uuid.uuid4().hex[:12]}?alias=force"

    @pytest.mark.parametrize("when", ["before", "during", "after"])
    def test_worker_is_killed(self, rig: Rig, when: str) -> None:  # type: ignore[override]
        """Without forked children: on another node they keep Ray from noticing, and silence tells after ten seconds."""
        super().test_worker_is_killed(rig, when, False)

    @pytest.fixture
    def rig(self, _gate: None) -> Iterator[Rig]:
        rig = FarRig(self.make_endpoint, self.info().capabilities)
        try:
            yield rig
        finally:
            rig.close()
