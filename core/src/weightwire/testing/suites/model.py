"""Random histories of pushes, pulls, joins, leaves, deaths and restarts, held against a trivially right model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

from weightwire.errors import EndpointInUseError, PreflightError, WorkerLostError
from weightwire.testing.rig import Rig
from weightwire.testing.suites.base import Cases, requires
from weightwire.testing.workers import ProcessWorker, Worker, until

__all__ = ["ModelCases"]

NAMES = ("a", "b", "c", "d")
Values = dict[str, int]


@dataclass
class ModelWorker:
    """What a worker must have. ``full`` and ``part`` are the newest versions meant for it: (number, values)."""

    have: int = 0
    values: Values = field(default_factory=lambda: dict.fromkeys(NAMES, 0))
    full: tuple[int, Values] | None = None
    part: tuple[int, Values] | None = None

    def pull(self) -> int | None:
        """Take the newest full version, and the newest subset on it."""
        if self.full is None:
            return None
        number, values = self.full
        if self.part is not None:
            number, values = self.part[0], {**values, **self.part[1]}
        if number <= self.have:
            return None
        self.have, self.values = number, dict(values)
        return number


class Model:
    """The trainer and its workers as plain data."""

    def __init__(self) -> None:
        self.workers: dict[str, ModelWorker] = {}
        self.restart()

    def restart(self) -> None:
        """A new trainer begins at version 1, and its versions are newer than any old one."""
        self.number = 0
        self.full: tuple[int, Values] | None = None
        self.part: tuple[int, Values] | None = None
        for worker in self.workers.values():
            worker.have, worker.full, worker.part = 0, None, None

    @property
    def split(self) -> bool:
        """Whether some worker was given a full version that not all were given."""
        return any(worker.full != self.full for worker in self.workers.values())

    @property
    def covered(self) -> set[str]:
        """Names of the subsets since the last full version."""
        return set(self.part[1]) if self.part else set()

    def join(self, name: str) -> None:
        self.workers[name] = ModelWorker(full=self.full, part=self.part)

    def push(self, values: Values, to: list[str] | None) -> int:
        self.number += 1
        names = to if to is not None else list(self.workers)
        if to is None:
            self.full, self.part = (self.number, values), None
        for name in names:
            self.workers[name].full, self.workers[name].part = (self.number, values), None
        return self.number

    def push_part(self, values: Values) -> int:
        self.number += 1
        self.part = (self.number, values)
        for worker in self.workers.values():
            worker.part = self.part
        return self.number


def state_of(values: Values) -> dict[str, Tensor]:
    return {name: torch.full((40,), value, dtype=torch.int64) for name, value in values.items()}


def blank() -> dict[str, Tensor]:
    """What a new worker's policy holds."""
    return state_of(dict.fromkeys(NAMES, 0))


class Machine(RuleBasedStateMachine):
    """Rules over the real ends and the model; set ``make_rig`` and ``mortal`` in a subclass."""

    make_rig: Callable[[], Rig]
    mortal: bool
    """Whether workers and the trainer are processes, and may be killed."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = type(self).make_rig()
        self.model = Model()
        self.workers: dict[str, Worker] = {}
        self.values = 0
        self.joined = 0
        self.updater = self.rig.updater()
        self.add_worker()

    def teardown(self) -> None:
        self.rig.close()

    def fresh(self, names: list[str]) -> Values:
        self.values += 1
        return {name: 100 * self.values + position for position, name in enumerate(names)}

    # -- the trainer -------------------------------------------------------------------------------------------------

    @rule()
    def push_full(self) -> None:
        values = self.fresh(list(NAMES))
        assert self.updater.push(state_of(values), on_lost="drop").version == self.model.push(values, None)

    @precondition(lambda self: self.model.full is not None and not self.model.split)
    @rule(names=st.sets(st.sampled_from(NAMES), min_size=1))
    def push_subset(self, names: set[str]) -> None:
        values = self.fresh(sorted(names | self.model.covered))
        report = self.updater.push(state_of(values), partial=True, on_lost="drop")
        assert report.version == self.model.push_part(values)

    @precondition(lambda self: self.model.full is None or self.model.split or self.model.covered)
    @rule(names=st.sets(st.sampled_from(NAMES), min_size=1))
    def push_a_subset_that_is_refused(self, names: set[str]) -> None:
        if self.model.full is not None and not self.model.split:
            names -= {min(self.model.covered)}
        if names:
            with pytest.raises(PreflightError, match="full"):
                self.updater.push(state_of(self.fresh(sorted(names))), partial=True, on_lost="drop")

    @precondition(lambda self: self.workers and "subset_workers" in self.rig.capabilities)
    @rule(data=st.data())
    def push_to_some(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.workers)), min_size=1, unique=True))
        self.updater.wait_for_workers(len(self.workers), timeout=10.0)
        values = self.fresh(list(NAMES))
        assert self.updater.push(state_of(values), workers=names, on_lost="drop").version == self.model.push(
            values, names
        )

    @precondition(lambda self: self.model.number >= 4)
    @rule()
    def restart_trainer(self) -> None:
        """No rival gets the place before the old trainer has said goodbye, which ends the workers' streams too."""
        run = self.updater.run
        with pytest.raises(EndpointInUseError):
            self.rig.updater()
        with contextlib.suppress(WorkerLostError):  # of a death that nobody has been told of yet
            self.updater.close()
        self.updater = self.rig.updater()
        assert self.updater.run > run
        self.model.restart()
        for name in list(self.workers):
            self.leave(name)
        self.add_worker()

    # -- the workers -------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.workers) < 4)
    @rule()
    def join(self) -> None:
        self.add_worker()

    def add_worker(self) -> None:
        self.joined += 1
        name = f"w{self.joined}"
        self.workers[name] = self.rig.worker(name, blank)
        self.model.join(name)
        # Pushes to all reach whoever has joined; be sure that it has.
        self.updater.wait_for_workers(len(self.workers), timeout=10.0)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        self.take(data.draw(st.sampled_from(sorted(self.workers))))

    @rule()
    def all_pull(self) -> None:
        for name in self.workers:
            self.take(name)

    def take(self, name: str) -> None:
        expected = self.model.workers[name].pull()
        assert self.workers[name].pull(0.0 if expected is None else 5.0) == expected

    @precondition(lambda self: len(self.workers) > 1)
    @rule(data=st.data())
    def goodbye(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(sorted(self.workers))))

    @precondition(lambda self: self.mortal and len(self.workers) > 1)
    @rule(data=st.data())
    def death(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        worker = self.workers[name]
        assert isinstance(worker, ProcessWorker)
        worker.kill()
        self.leave(name)

    def leave(self, name: str) -> None:
        self.workers.pop(name).end()
        del self.model.workers[name]
        until(lambda: name not in self.updater.workers, f"{name} is gone", 10)

    @invariant()
    def all_are_as_the_model_says(self) -> None:
        for name, worker in self.workers.items():
            expected, look = self.model.workers[name], worker.look()
            assert (look.version, look.ready) == (expected.have, expected.have > 0)
            contents = worker.do("contents")
            assert {key: int.from_bytes(bits.data[:8], "little") for key, bits in contents.items()} == expected.values
            assert all(bits.data == bits.data[:8] * 40 for bits in contents.values())


class ModelCases(Cases):
    def _run(self, *, mortal: bool, capabilities: frozenset[str], examples: int, steps: int) -> None:
        class Here(Machine):
            make_rig = staticmethod(lambda: Rig(self.make_endpoint, capabilities))

        Here.mortal = mortal
        run_state_machine_as_test(
            Here,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                phases=[Phase.generate],  # a shorter history is not worth the many waits for what never comes
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

    def test_histories(self) -> None:
        """Workers in threads of this process, whatever the backend: many short histories."""
        self._run(mortal=False, capabilities=self.info().capabilities - {"processes"}, examples=40, steps=30)

    @requires("processes")
    def test_histories_with_deaths(self) -> None:
        self._run(mortal=True, capabilities=self.info().capabilities, examples=8, steps=20)

    @pytest.mark.soak
    @pytest.mark.timeout(900)
    def test_long_histories(self) -> None:
        processes = "processes" in self.info().capabilities
        self._run(mortal=processes, capabilities=self.info().capabilities, examples=60, steps=50)
