"""Random histories of pushes, pulls, joins, leaves, deaths and restarts, held against a trivially right model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from weightwire.errors import EndpointInUseError, PreflightError, WorkerLostError
from weightwire.testing.rig import Rig
from weightwire.testing.suites.base import Cases, requires
from weightwire.testing.workers import ProcessWorker, Worker, until

__all__ = ["ModelCases"]

NAMES = ("a", "b", "c", "d")
NAMED = ("w1", "w2", "w3", "w4")
MOST = 8
"""Versions that somebody may still ask for, at most. A backend that keeps them in few slots needs one more to write."""

Values = dict[str, int]
Stamped = tuple[int, Values]  # a version's number and values


@dataclass
class ModelWorker:
    """What a worker must have. ``full`` and ``part`` are the newest versions meant for it, ``have`` the one that it
    acts with, of the trainer ``epoch``."""

    inline: bool = False
    epoch: int = 0
    have: int = 0
    values: Values = field(default_factory=lambda: dict.fromkeys(NAMES, 0))
    full: Stamped | None = None
    part: Stamped | None = None

    def pull(self, epoch: int) -> int | None:
        """Take the newest full version of the trainer ``epoch``, and the newest subset on it."""
        if self.full is None:
            return None
        number, values = self.full
        if self.part is not None:
            number, values = self.part[0], {**values, **self.part[1]}
        if (epoch, number) <= (self.epoch, self.have):
            return None
        self.epoch, self.have, self.values = epoch, number, dict(values)
        return number


class Model:
    """The trainer and its workers as plain data."""

    def __init__(self) -> None:
        self.workers: dict[str, ModelWorker] = {}
        self.epoch = 0
        self.restart()

    def restart(self) -> None:
        """A new trainer begins at version 1, and its versions are newer than any old one."""
        self.epoch += 1
        self.number = 0
        self.full: Stamped | None = None
        self.part: Stamped | None = None
        self.covered: dict[int, set[str]] = {}  # by the number of the full version: names of the subsets on it
        for worker in self.workers.values():
            worker.full = worker.part = None

    def ground(self, to: list[str] | None) -> int | None:
        """The full version on which a subset for these workers lies, or ``None`` where there is not just one."""
        some = [self.workers[name].full for name in (self.workers if to is None else to)]
        numbers = {full and full[0] for full in (*some, *([self.full] if to is None else []))}
        return numbers.pop() if len(numbers) == 1 else None

    @property
    def kept(self) -> set[int]:
        """The versions that somebody may still ask for."""
        pairs = [(self.full, self.part), *((worker.full, worker.part) for worker in self.workers.values())]
        return {stamped[0] for pair in pairs for stamped in pair if stamped}

    def join(self, name: str, *, inline: bool) -> None:
        self.workers[name] = ModelWorker(inline, full=self.full, part=self.part)

    def push(self, values: Values, to: list[str] | None) -> int:
        self.number += 1
        if to is None:
            self.full, self.part = (self.number, values), None
        return self._give((self.number, values), None, to)

    def push_part(self, values: Values, to: list[str] | None) -> int:
        base = self.ground(to)
        assert base is not None
        self.covered.setdefault(base, set()).update(values)
        self.number += 1
        if to is None:
            self.part = (self.number, values)
        return self._give(None, (self.number, values), to)

    def _give(self, full: Stamped | None, part: Stamped | None, to: list[str] | None) -> int:
        for name in self.workers if to is None else to:
            worker = self.workers[name]
            worker.full, worker.part = full or worker.full, part
            if worker.inline:
                worker.pull(self.epoch)
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
        self.start_trainer()
        self.add_worker(NAMED[0], inline=False)

    def teardown(self) -> None:
        self.rig.close()

    def fresh(self, names: Collection[str]) -> Values:
        self.values += 1
        return {name: 100 * self.values + position for position, name in enumerate(sorted(names))}

    # -- the trainer -------------------------------------------------------------------------------------------------

    def start_trainer(self) -> None:
        self.trainer = self.rig.process("trainer") if self.mortal else self.rig.thread("trainer")
        self.lead()

    def lead(self) -> None:
        _, self.run = self.trainer.do("lead", self.rig.endpoint, timeout=10.0)

    def push(self, values: Values, to: list[str] | None, *, partial: bool = False) -> int:
        number: int = self.trainer.do("push_made", state_of, values, workers=to, partial=partial, on_lost="drop")
        return number

    @property
    def selective(self) -> bool:
        """Whether a version may go to some workers only."""
        return "subset_workers" in self.rig.capabilities and len(self.model.kept) < MOST

    def some(self, data: st.DataObject) -> list[str]:
        return data.draw(st.lists(st.sampled_from(sorted(self.workers)), min_size=1, unique=True))

    def push_full_to(self, to: list[str] | None) -> None:
        values = self.fresh(NAMES)
        assert self.push(values, to) == self.model.push(values, to)

    @initialize(begun=st.booleans())
    def begin(self, begun: bool) -> None:
        if begun:
            self.push_full_to(None)

    @rule()
    def push_full(self) -> None:
        self.push_full_to(None)

    @precondition(lambda self: self.selective)
    @rule(data=st.data())
    def push_to_some(self, data: st.DataObject) -> None:
        self.push_full_to(self.some(data))

    @rule(data=st.data(), names=st.sets(st.sampled_from(NAMES), min_size=1))
    def push_subset(self, data: st.DataObject, names: set[str]) -> None:
        self.push_part(data, names, None)

    @precondition(lambda self: self.selective)
    @rule(data=st.data(), names=st.sets(st.sampled_from(NAMES), min_size=1))
    def push_subset_to_some(self, data: st.DataObject, names: set[str]) -> None:
        self.push_part(data, names, self.some(data))

    def push_part(self, data: st.DataObject, names: set[str], to: list[str] | None) -> None:
        """On one ground, with the names of earlier subsets on it; else it is refused, and says what to push."""
        ground = self.model.ground(to)
        covered = self.model.covered.get(ground or 0, set())
        if ground is not None and data.draw(st.booleans()):
            names = names | covered
        values = self.fresh(names)
        if ground is None or not covered <= names:
            with pytest.raises(PreflightError, match="full"):
                self.push(values, to, partial=True)
        else:
            assert self.push(values, to, partial=True) == self.model.push_part(values, to)

    @precondition(lambda self: self.model.number >= 4)
    @rule()
    def restart_trainer(self) -> None:
        """No rival gets the place before the old trainer has said goodbye, which ends the workers' streams too."""
        run = self.run
        with pytest.raises(EndpointInUseError):
            self.rig.updater()
        with contextlib.suppress(WorkerLostError):  # of a death that nobody has been told of yet
            self.trainer.do("close")
        self.lead()
        assert self.run > run
        self.model.restart()
        for name in list(self.workers):
            self.leave(name)
        self.add_worker(NAMED[0], inline=False)

    @precondition(lambda self: self.mortal and self.model.number >= 2)
    @rule()
    def kill_trainer(self) -> None:
        """The workers act on with what they have, find the next trainer by themselves, and take its versions."""
        self.all_pull()  # whether they could still get at what they have not taken is the backend's own affair
        run, trainer = self.run, self.trainer
        assert isinstance(trainer, ProcessWorker)
        trainer.kill()
        self.start_trainer()
        assert self.run > run
        self.model.restart()
        for name, worker in self.workers.items():
            until(lambda w=worker, n=name: w.pull(0.0) is None and n in self.there(), f"{name} is back", 10)  # type: ignore[misc]

    # -- the workers -------------------------------------------------------------------------------------------------

    def there(self) -> set[str]:
        names: set[str] = self.trainer.do("names")
        return names

    @precondition(lambda self: len(self.workers) < len(NAMED))
    @rule(data=st.data(), inline=st.booleans())
    def join(self, data: st.DataObject, inline: bool) -> None:
        """Under a new name, or one of those that have left or died."""
        name = data.draw(st.sampled_from([name for name in NAMED if name not in self.workers]))
        self.add_worker(name, inline=inline and "inline" in self.rig.capabilities)

    def add_worker(self, name: str, *, inline: bool) -> None:
        # What went straight into a policy need not be kept for others.
        alone = len(self.workers) == 1 and all(worker.inline for worker in self.model.workers.values())
        options: dict[str, Any] = {"inline": True} if inline else {}  # a word that not every backend is asked
        self.workers[name] = self.rig.worker(name, blank, **options)
        self.model.join(name, inline=inline)
        # Pushes to all reach whoever has joined; be sure that it has.
        self.trainer.do("wait_for_workers", len(self.workers), 10.0)
        if alone:
            self.push_full_to(None)
        elif inline:  # a late one has to pull for what was pushed before
            self.take(name)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        self.take(data.draw(st.sampled_from(sorted(self.workers))))

    @rule()
    def all_pull(self) -> None:
        for name in self.workers:
            self.take(name)

    def take(self, name: str) -> None:
        expected = self.model.workers[name].pull(self.model.epoch)
        assert self.workers[name].pull(0.0 if expected is None else 5.0) == expected

    @precondition(lambda self: len(self.workers) > 1)
    @rule(data=st.data())
    def goodbye(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(sorted(self.workers))))

    @precondition(lambda self: len(self.workers) > 1)
    @rule(data=st.data(), served=st.booleans())
    def restart_worker(self, data: st.DataObject, served: bool) -> None:
        """A new one under its name knows nothing, and stands on what went to all, whatever the old one was given."""
        name = data.draw(st.sampled_from(sorted(self.workers)))
        if served and self.selective:
            self.push_full_to([name])
        inline = self.model.workers[name].inline
        self.leave(name)
        self.add_worker(name, inline=inline)

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
        until(lambda: name not in self.there(), f"{name} is gone", 10)

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
            make_rig = staticmethod(lambda: self.make_rig(capabilities))

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
        capabilities = self.info().capabilities
        examples, steps = (
            (40, 30) if "processes" in capabilities else (80, 40)
        )  # more where a push costs next to nothing
        self._run(mortal=False, capabilities=capabilities - {"processes"}, examples=examples, steps=steps)

    @requires("processes")
    def test_histories_with_deaths(self) -> None:
        self._run(mortal=True, capabilities=self.info().capabilities, examples=8, steps=20)

    @pytest.mark.soak
    @pytest.mark.timeout(900)
    def test_long_histories(self) -> None:
        processes = "processes" in self.info().capabilities
        self._run(mortal=processes, capabilities=self.info().capabilities, examples=60, steps=50)
