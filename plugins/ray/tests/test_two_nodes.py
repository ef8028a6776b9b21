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

    def renew(self) -> None:
        self.body.close(1.0)
        self.body = Body()

    def carry_out(self, environment: dict[str, str], command: str, args: Any, options: Any) -> tuple[bool, Any]:
        os.environ.pop("WEIGHTWIRE_JOB", None)
        os.environ.update(environment)
        try:
            return True, getattr(self.body, command)(*args, **options)
        except Exception as exc:
            return False, exc


class ActorWorker(ProcessWorker):
    """A worker of the kit in an actor on the other node: in one that is idle, where there is one."""

    def __init__(self, name: str, idle: list[Any]) -> None:
        self.name = name
        self._idle = idle
        self.actor = idle.pop() if idle else Puppet.remote()
        self._pid = ray.get(self.actor.pid.remote(), timeout=PATIENCE)
        self._forked = []
        self._ended = False
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
        if self._ended:  # its actor may be another worker by now
            return
        self._ended = True
        for pid in self._forked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess, RayActorError):
            if self.process.create_time() == self._since:
                self.cont()
                ray.get(self.actor.renew.remote(), timeout=PATIENCE)
                if not self._forked:
                    self._idle.append(self.actor)
                    return
        ray.kill(self.actor)


class FarRig(Rig):
    """The trainer here, the workers there."""

    idle: ClassVar[list[Any]] = []

    def process(self, name: str) -> ProcessWorker:
        worker = ActorWorker(name, self.idle)
        self._add(worker)
        return worker


@pytest.fixture(scope="module")
def crew(far: Any) -> Iterator[None]:
    yield
    while FarRig.idle:
        ray.kill(FarRig.idle.pop())


@pytest.mark.soak
@pytest.mark.usefixtures("crew")
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
        **dict.fromkeys(("interpreter_exit", "opening_and_closing"), "has no second node: TestRay has it"),
    }

    def make_endpoint(self) -> str:
        return f"ray://kit-{uuid.uuid4().hex[:12]}?alias=force"

    def make_rig(self, capabilities: frozenset[str]) -> Rig:
        return FarRig(self.make_endpoint, capabilities)

    # Each history has a mailbox and several actors, which are processes that Ray starts in seconds.

    def test_histories(self) -> None:
        self._run(mortal=False, capabilities=self.info().capabilities - {"processes"}, examples=8, steps=40)

    def test_histories_with_deaths(self) -> None:
        self._run(mortal=True, capabilities=self.info().capabilities, examples=3, steps=25)

    def test_long_histories(self) -> None:
        pytest.skip("TestRay has them; a death costs an actor here")

    def test_trainer_is_killed_while_pushing(self, rig: Rig) -> None:
        crew = [Puppet.remote() for _ in range(8)]  # ready beforehand: readers follow for a minute, not longer
        ray.get([puppet.pid.remote() for puppet in crew], timeout=100)
        FarRig.idle.extend(crew)
        super().test_trainer_is_killed_while_pushing(rig)

    @pytest.mark.parametrize("when", ["before", "during", "after"])
    def test_worker_is_killed(self, rig: Rig, when: str) -> None:  # type: ignore[override]
        """Without forked children: on another node they keep Ray from noticing, and silence tells after ten seconds."""
        super().test_worker_is_killed(rig, when, False)
