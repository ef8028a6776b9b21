"""What moves in a trial of a backend, and both of its sides. Imported in the processes of a trial only: needs torch."""

from __future__ import annotations

import contextlib
import ctypes
import time
from multiprocessing.connection import Connection
from typing import Any

import torch  # noqa: TID253 - this module is imported by the processes of a trial only
import xxhash

from weightwire.cli.trial import OPENING, TURN, Crew, serve
from weightwire.endpoint import parse
from weightwire.receiver import WeightReceiver
from weightwire.registry import open_backend
from weightwire.updater import WeightUpdater

__all__ = ["Leader", "Look", "change", "compare", "digest", "make_state"]

SETTLE = 0.002
"""Seconds from a worker's last word to its sleep in the backend's own wait."""

torch.set_num_threads(1)  # of a worker; a trainer takes two


class State(torch.nn.Module):
    """A policy that does nothing with its parameters."""

    def __init__(self, tensors: int, numbers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList([torch.rand(numbers) for _ in range(tensors)]).requires_grad_(False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation


def make_state(tensors: int, nbytes: int) -> torch.nn.Module:
    """``tensors`` float32 parameters, equally large but for rounding, of ``nbytes`` in all."""
    return State(tensors, max(1, nbytes // 4 // tensors))


@torch.no_grad()
def change(module: torch.nn.Module, sentinel: float) -> None:
    """Change every element in place, as an optimizer does, and set the first of every tensor to ``sentinel``."""
    tensors: list[torch.Tensor] = list(module.parameters())
    torch._foreach_add_(tensors, 1.0)
    for tensor in tensors:
        tensor.view(-1)[0] = sentinel


def digest(module: torch.nn.Module) -> str:
    state = xxhash.xxh3_128()
    for tensor in module.parameters():
        state.update(tensor.detach().numpy())  # type: ignore[arg-type]
    return state.hexdigest()


class Look:
    """Looks at the first element of every tensor, in the memory that the module acts with now."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._tensors = list(module.parameters())

    def __call__(self, sentinel: float) -> None:
        read = ctypes.c_float.from_address
        wrong = sum(read(tensor.data_ptr()).value != sentinel for tensor in self._tensors)
        if wrong:
            raise AssertionError(f"{wrong} of {len(self._tensors)} tensors do not hold version {sentinel:g}")


def compare(expected: str, found: list[str]) -> None:
    wrong = [str(number) for number, text in enumerate(found) if text != expected]
    if wrong:
        raise AssertionError(f"the bytes of worker {', '.join(wrong)} are not those that the trainer pushed")


class Leader:
    """The trainer of a trial of a backend."""

    def __init__(self, what: str, *, tensors: int, nbytes: int, workers: int, apply: str) -> None:
        torch.set_num_threads(2)
        self._what, self._state, self._count, self._apply = what, (tensors, nbytes), workers, apply
        self._crew: Crew | None = None
        self._updater: WeightUpdater | None = None
        self._inside: list[tuple[WeightReceiver, torch.nn.Module]] = []

    def start(self) -> dict[str, Any]:
        """Start the workers where the backend reaches processes, before anything is opened here."""
        info = open_backend(parse(self._what)).info
        self._capabilities = sorted(info.capabilities)
        if "processes" in info.capabilities:
            self._crew = Crew(work, [(f"w{number}", *self._state) for number in range(self._count)])
        return {}

    def open(self) -> dict[str, Any]:
        self._module = make_state(*self._state)
        self._updater = updater = WeightUpdater(self._what, self._module, timeout=OPENING)
        if self._crew:
            self._crew.ask("open", updater.endpoint, self._apply, seconds=OPENING)
        else:
            for number in range(self._count):
                module = make_state(*self._state)
                inline = self._apply == "copy" and "inline" in self._capabilities
                receiver = WeightReceiver(
                    updater.endpoint, module, worker=f"w{number}", apply=self._apply, inline=inline
                )
                self._inside.append((receiver, module))
        updater.wait_for_workers(self._count, OPENING)
        return {
            "endpoint": updater.endpoint,
            "capabilities": self._capabilities,
            "processes": self._crew is not None,
            "nbytes": sum(tensor.nbytes for tensor in self._module.parameters()),
            "notes": {name: dict(info.notes) for name, info in updater.workers.items() if info.notes},
        }

    def turn(self) -> dict[str, Any]:
        assert self._updater is not None
        sentinel = float(self._updater.version + 1)
        change(self._module, sentinel)
        if self._crew:
            return self._turn_of_processes(self._updater, self._crew, sentinel)
        begun = time.perf_counter()
        report = self._updater.push(wait="none")
        for receiver, module in self._inside:
            receiver.pull()  # an inline one has it already
            Look(module)(sentinel)
        seconds = time.perf_counter() - begun
        compare(digest(self._module), [digest(module) for _, module in self._inside])
        return {"seconds": seconds, "phases": report.seconds}

    def _turn_of_processes(self, updater: WeightUpdater, crew: Crew, sentinel: float) -> dict[str, Any]:
        crew.ask("take", sentinel)
        time.sleep(SETTLE)
        begun = time.perf_counter()
        report = updater.push(wait="applied", timeout=TURN)
        seconds = time.perf_counter() - begun
        crew.answers(TURN)
        compare(digest(self._module), crew.ask("digest"))
        return {"seconds": seconds, "phases": report.seconds}

    def close(self) -> None:
        for receiver, _ in self._inside:
            receiver.close()
        if self._updater is not None:
            with contextlib.suppress(Exception):
                self._updater.close(5.0)
        if self._crew is not None:
            self._crew.close()


class End:
    """A worker of a trial of a backend."""

    def __init__(self, name: str, tensors: int, nbytes: int) -> None:
        self._name = name
        self._module = make_state(tensors, nbytes)
        self._receiver: WeightReceiver | None = None

    def open(self, endpoint: str, apply: str) -> None:
        self._receiver = WeightReceiver(endpoint, self._module, worker=self._name, apply=apply, timeout=OPENING)
        # Hooks run after the commit and before the trainer hears of it: the look is within the clock.
        self._receiver.on_applied(Look(self._module))
        self._receiver.pull(0.0)

    def take(self, sentinel: float) -> None:
        assert self._receiver is not None
        self._receiver.wait(int(sentinel), TURN)

    def digest(self) -> str:
        return digest(self._module)

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close(2.0)


def work(pipe: Connection, name: str, tensors: int, nbytes: int) -> None:
    """A worker's process."""
    serve(pipe, End(name, tensors, nbytes))
