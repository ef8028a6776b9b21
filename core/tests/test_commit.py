"""All or nothing, whatever interrupts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor

from weightwire.weights.commit import Prepared, Risky, commit


class Box:
    """Something that a last step sets."""

    value = 0


def changes(log: list[Any], *values: object) -> list[partial[Any]]:
    return [partial(log.append, value) for value in values]


def prepared(**fields: Any) -> Prepared:
    return Prepared(tensors=1, nbytes=1, **fields)


def fail() -> None:
    raise RuntimeError("no")


def test_steps_run_in_order_and_then_the_last_one() -> None:
    log: list[Any] = []
    box = Box()
    commit(
        [prepared(steps=changes(log, 1, 2)), prepared(steps=changes(log, 3))], then=partial(setattr, box, "value", 7)
    )
    assert (log, box.value) == ([1, 2, 3], 7)


@pytest.mark.parametrize("broken", range(5))
def test_a_risky_step_that_fails_undoes_the_others(broken: int) -> None:
    log: list[Any] = []
    values = dict.fromkeys(range(5), "old")

    def set_new(key: int) -> None:
        if key == broken:
            raise RuntimeError(f"no {key}")
        values[key] = "new"

    def undo(key: int) -> partial[Any]:
        return partial(values.__setitem__, key, "old")

    risky = [Risky(str(key), partial(set_new, key), restore=undo(key)) for key in values]
    one = prepared(risky=risky, steps=changes(log, "never"))
    with pytest.raises(RuntimeError, match="no") as caught:
        commit([one], then=partial(log.append, "never"))
    assert caught.value.tensor == str(broken)  # type: ignore[attr-defined]
    assert set(values.values()) == {"old"}
    assert log == []
    assert not one.ruined


def test_what_only_code_can_undo_is_mended_or_the_target_is_ruined() -> None:
    log: list[Any] = []
    sound = prepared(risky=[Risky("a", partial(log.append, 1), mend=log.clear), Risky("b", fail)])
    with pytest.raises(RuntimeError, match="no"):
        commit([sound])
    assert (log, sound.ruined) == ([], False)
    broken = prepared(risky=[Risky("a", partial(log.append, 1), mend=fail), Risky("b", fail)])
    with pytest.raises(RuntimeError, match="no"):
        commit([broken])
    assert broken.ruined


def test_a_callable_gets_a_version_and_its_subset_in_one_call() -> None:
    calls: list[Mapping[str, Any]] = []
    one, two = prepared(call=(calls.append, {"a": 1, "b": 1})), prepared(call=(calls.append, {"b": 2}))
    commit([one, two])
    assert calls == [{"a": 1, "b": 2}]
    assert not one.ruined
    assert not two.ruined


@pytest.mark.parametrize("exception", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_callable_that_raises_ruins(exception: type[BaseException]) -> None:
    def load(tensors: Mapping[str, Any]) -> None:
        raise exception("full")

    box, one = Box(), prepared(call=(load, {}))
    with pytest.raises(exception):
        commit([one], then=partial(setattr, box, "value", 7))
    assert one.ruined
    assert box.value == 0


def test_no_function_mode_of_torch_sees_the_steps(request: pytest.FixtureRequest) -> None:
    seen: list[object] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    into, value = torch.zeros(3), torch.ones(3, requires_grad=True)
    step = partial(torch._foreach_copy_, [into], [value])
    with Mode():
        commit([prepared(steps=[step])])
    assert torch._foreach_copy_ not in seen
    assert torch.is_grad_enabled()
    assert not into.requires_grad
    assert torch.equal(into, value)


def test_inference_tensors_are_written() -> None:
    with torch.inference_mode():
        into = torch.zeros(3)
    commit([prepared(steps=[partial(torch._foreach_copy_, [into], [torch.ones(3)])], inference=True)])
    assert not torch.is_inference_mode_enabled()
    assert into.tolist() == [1, 1, 1]


def test_done_lets_the_old_tensors_go() -> None:
    old: list[Tensor] = [torch.zeros(1)]
    one = prepared(keep=old, steps=changes([], 1))
    one.done()
    one.done()
    assert one.keep is None
    assert not one.steps


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------

STORM = dedent(
    """
    import gc, random, signal, sys
    from functools import partial
    import torch
    from weightwire.transport import Header, Version
    from weightwire.weights.commit import commit
    from weightwire.weights.source import Source
    from weightwire.weights.target import make_target

    kind, apply, count, tries = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

    class Careful(torch.Tensor):
        pass

    def fresh():
        tensors = {f"p{i}": torch.zeros(4) for i in range(count)}
        if kind == "module":
            return torch.nn.ParameterDict(tensors)
        return {name: tensor.as_subclass(Careful) for name, tensor in tensors.items()}

    class Receiver:
        state = 0

    weights, receiver = fresh(), Receiver()
    target = make_target(weights, apply=apply)
    layout = Source({f"p{i}": torch.zeros(4) for i in range(count)}).extract().layout
    header = Header(Version(1, 1), layout)
    buffers = [torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2)]
    views = [layout.views(layout.slice(buffer)) for buffer in buffers]

    places = {}

    def version(number):
        free = places[number] = 1 - places.get(receiver.state, 1)  # not the one that is pointed at
        buffers[free].view(torch.float32).fill_(number)
        return target.prepare(header, views[free])

    def acting():
        with torch.no_grad():
            whole = torch.cat(list(weights.values()))
        assert whole.min() == whole.max(), f"a mix of {whole.unique()}"
        return int(whole[0])

    armed = False

    def interrupt(number, frame):
        if armed:  # one that another thread has taken may be heard of late
            raise KeyboardInterrupt

    gc.disable()  # so that the time to interrupt at can be told
    signal.signal(signal.SIGALRM, interrupt)
    import time
    took = []
    for number in range(3):
        prepared = version(number)
        begun = time.perf_counter()
        commit([prepared], then=partial(setattr, receiver, "state", number))
        took.append(time.perf_counter() - begun)
        prepared.done()
    span, hits, finished, undone = min(took), 0, 0, 0
    dice = random.Random(0)
    old = acting()
    for number in range(3, 3 + tries):
        prepared = version(number)
        try:
            # Again and again, so that undoing is hit as well.
            first, again = span * dice.uniform(0.02, 1.0) + 1e-6, span * dice.uniform(0.05, 0.5) + 1e-6
            armed = True
            signal.setitimer(signal.ITIMER_REAL, first, again)
            commit([prepared], then=partial(setattr, receiver, "state", number))
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            hits += 1
        while True:
            try:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
                break
            except KeyboardInterrupt:
                pass
        now = acting()
        assert now in (old, number), (now, old, number)
        assert now == receiver.state, (now, receiver.state)
        assert not prepared.ruined
        finished, undone, old = finished + (now == number), undone + (now != number), now
        prepared.done()
    prepared = version(-1)  # usable afterwards
    commit([prepared])
    assert acting() == -1
    assert torch.is_grad_enabled()
    print(hits, finished, undone)
    """
)


@pytest.mark.parametrize("apply", ["copy", "alias"])
def test_interrupts_never_leave_a_mix(apply: str) -> None:
    hits, _, _ = storm("module", apply, 10_000, 120)
    assert hits >= 50, "the interrupts are to hit the commit"


def test_interrupts_of_code_of_the_users_never_leave_a_mix() -> None:
    hits, _, undone = storm("careful", "copy", 300, 200)
    assert hits >= 50
    assert undone >= 20, "some are to hit before the commit is through"


def storm(kind: str, apply: str, count: int, tries: int) -> list[int]:
    command = [sys.executable, "-c", STORM, kind, apply, str(count), str(tries)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


def test_a_signal_raised_by_a_step_is_seen_after_all_of_them() -> None:
    """Python looks at a signal only when the commit is through."""
    code = """
        import ctypes, signal
        from functools import partial
        from weightwire.weights.commit import Prepared, commit

        log = []
        send = getattr(ctypes.CDLL(None), "raise")  # signal.raise_signal looks at signals by itself
        steps = [partial(log.append, 1), partial(send, signal.SIGINT), partial(log.append, 2)]
        try:
            commit([Prepared(tensors=1, nbytes=1, steps=steps)], then=partial(log.append, 3))
        except KeyboardInterrupt:
            log.append("interrupted")
        print(log)
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[1, 2, 3, 'interrupted']"
