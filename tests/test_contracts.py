"""What third parties can rely on: API numbers are negotiated, old ones stay for a while, and API 1 stays what it is."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from weightwire import WeightReceiver, WeightUpdater, hookspecs, registry, transport
from weightwire.endpoint import parse
from weightwire.errors import IncompatibleBackendError
from weightwire.registry import OldApi, open_backend
from weightwire.transport import Deadline, Delivery, Event, Have, Receiver, Sender, choose

PLUGIN = '''
"""A backend within one thread, written for API 0: its trainer's end knew ``send`` and ``listen`` only."""

from weightwire.hookspecs import BackendInfo, hookimpl
from weightwire.transport import Deadline

PLACE = {"full": None, "events": [], "joined": None}


class OldSender:
    def __init__(self, endpoint, epoch):
        self.endpoint, self.epoch = str(endpoint), epoch

    def send(self, header, blocks):
        PLACE["full"] = header, blocks

    def listen(self, seconds):
        events, PLACE["events"] = PLACE["events"], []
        return events

    def stop(self):
        PLACE["full"] = None


class OldReceiver:
    def __init__(self, joined):
        PLACE["events"].append(joined)

    def newest(self):
        return PLACE["full"]

    def say(self, event):
        PLACE["events"].append(event)


@hookimpl
def weightwire_backend():
    return BackendInfo(summary="old", api=APIS)


@hookimpl
def weightwire_make_sender(endpoint, context):
    return OldSender(endpoint, context.epoch)


@hookimpl
def weightwire_make_receiver(context):
    return OldReceiver(context.joined)
'''


class SenderOfOld(Sender):
    """API 1 over API 0, as the core would keep it for a while."""

    def __init__(self, old: Any) -> None:
        self.old, self.endpoint, self.epoch = old, old.endpoint, old.epoch

    def stage(self, payload: Any, to: frozenset[str] | None, deadline: Deadline) -> None:
        blocks = [block.clone() for block in payload.tensors()]
        self.old.send(payload.header, blocks)

    def events(self, deadline: Deadline) -> list[Event]:
        found: list[Event] = self.old.listen(deadline.remaining)
        return found

    def close(self, deadline: Deadline) -> None:
        self.old.stop()


class ReceiverOfOld(Receiver):
    def __init__(self, old: Any) -> None:
        self.old, self.connected = old, True

    def poll(self, have: Have, deadline: Deadline | None) -> Delivery | None:
        newest = self.old.newest()
        if newest is None or choose(have, newest[0], None) is None:
            return None
        return Delivery(newest[0], blocks=newest[1])

    def report(self, event: Any) -> None:
        self.old.say(event)

    def close(self, deadline: Deadline) -> None:
        self.closed = True


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """``plugin(name, apis)``: the endpoint of the module above, which says that it was written for these."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, apis: str) -> str:
        (tmp_path / f"{name}.py").write_text(f"APIS = {apis}\n{PLUGIN}")
        return f"import:{name}://here"

    return write


@pytest.fixture
def speaks_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that has moved on from API 0 to API 1, and still speaks it."""
    monkeypatch.setattr(registry, "SUPPORTED_APIS", (1, 0))
    monkeypatch.setitem(registry.OLD_APIS, 0, OldApi("0.9", SenderOfOld, ReceiverOfOld))


@pytest.mark.usefixtures("speaks_0")
def test_a_plugin_of_api_0_works_and_is_told_that_it_is_old(plugin: Callable[[str, str], str]) -> None:
    place = plugin("contract_old", "0")
    with pytest.warns(DeprecationWarning, match=r"contract_old.* API 0 .* Weightwire 0\.9 no longer speaks") as warned:
        updater = WeightUpdater(place)
    assert warned[0].filename == __file__, "it points at whoever opened the end"
    policy = {"w": torch.zeros(3)}
    with pytest.warns(DeprecationWarning, match="Upgrade the plugin") as warned:
        receiver = WeightReceiver(place, policy, worker="a")
    assert warned[0].filename == __file__
    updater.push({"w": torch.ones(3)}, wait="none")
    assert receiver.pull() == 1
    assert torch.equal(policy["w"], torch.ones(3))
    assert updater.wait(1).receipts["a"].state == "applied"
    receiver.close()
    updater.close()


@pytest.mark.usefixtures("speaks_0")
def test_the_newest_number_that_both_speak_is_spoken(plugin: Callable[[str, str], str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_backend(parse(plugin("contract_both", "(0, 1)"))).api == 1
        assert open_backend(parse(plugin("contract_next", "(2, 1)"))).api == 1
    with pytest.warns(DeprecationWarning, match="API 0"):
        assert open_backend(parse(plugin("contract_older", "(-1, 0)"))).api == 0


@pytest.mark.parametrize(
    ("apis", "said"),
    [
        ("0", r"written for API 0 .* speaks 1\. Upgrade the plugin"),
        ("2", r"written for API 2 .* speaks 1\. Upgrade it: pip install --upgrade weightwire"),
        ("(0, 2)", r"written for API 0 and 2 .* pip install --upgrade weightwire"),
        ("()", "written for API no number"),
    ],
)
def test_numbers_that_do_not_meet_are_refused(plugin: Callable[[str, str], str], apis: str, said: str) -> None:
    name = "contract_refused_" + "".join(c if c.isalnum() else "_" for c in apis)
    with pytest.raises(IncompatibleBackendError, match=said):
        open_backend(parse(plugin(name, apis)))


def test_every_old_number_says_how_long_it_stays() -> None:
    assert tuple(sorted(registry.SUPPORTED_APIS, reverse=True)) == registry.SUPPORTED_APIS
    assert registry.SUPPORTED_APIS[0] == hookspecs.API
    assert set(registry.OLD_APIS) == set(registry.SUPPORTED_APIS[1:])


# -- API 1 -------------------------------------------------------------------------------------------------------------


def parameters(function: Callable[..., Any]) -> str:
    return " ".join(name for name in inspect.signature(function).parameters if name != "self")


def test_what_a_backend_of_api_1_is_called_with() -> None:
    """Taking something away here, or giving it another meaning, is a new API number; adding needs a default."""
    hooks = {name: parameters(hook) for name, hook in vars(hookspecs.BackendSpec).items() if name.startswith("weight")}
    assert hooks == {
        "weightwire_backend": "",
        "weightwire_make_sender": "endpoint options context",
        "weightwire_make_receiver": "endpoint options context",
    }
    hooks = {name: parameters(hook) for name, hook in vars(hookspecs.ObserverSpec).items() if name.startswith("weight")}
    assert hooks == {
        "weightwire_worker_joined": "endpoint worker host pid",
        "weightwire_worker_lost": "endpoint worker reason",
        "weightwire_before_push": "endpoint version workers",
        "weightwire_after_push": "endpoint report",
        "weightwire_after_pull": "endpoint receipt",
    }
    methods = {
        (kind.__name__, name): parameters(getattr(kind, name))
        for kind in (Sender, Receiver)
        for name in kind.__abstractmethods__
    }
    assert methods == {
        ("Sender", "stage"): "payload to deadline",
        ("Sender", "events"): "deadline",
        ("Sender", "close"): "deadline",
        ("Receiver", "poll"): "have deadline",
        ("Receiver", "report"): "event",
        ("Receiver", "close"): "deadline",
    }


def test_what_a_backend_of_api_1_gives_and_is_given() -> None:
    """These may grow, at the end and with defaults; nothing may go."""
    records: dict[Any, set[str]] = {
        hookspecs.BackendInfo: {"summary", "api", "capabilities", "options", "pickles", "location"},
        transport.SenderContext: {"epoch", "deadline", "logger"},
        transport.ReceiverContext: {
            "joined",
            "have",
            "apply",
            "stream",
            "deliver",
            "trained",
            "device",
            "deadline",
            "logger",
        },
    }
    for record, promised in records.items():
        assert promised <= {field.name for field in fields(record)}
    events: dict[Any, set[str]] = {
        transport.Joined: {"worker", "incarnation", "host", "pid", "have", "needs", "notes"},
        transport.Staged: {"worker", "incarnation", "stamp"},
        transport.Applied: {"worker", "incarnation", "stamp", "digest", "tensors", "nbytes", "seconds", "error"},
        transport.Refused: {"worker", "incarnation", "stamp", "kind", "phase", "error", "tensor"},
        transport.Lost: {"worker", "incarnation", "reason"},
        transport.Left: {"worker", "incarnation"},
        transport.Noted: {"worker", "incarnation", "notes"},
    }
    for event, promised in events.items():
        assert promised <= {field.name for field in msgspec.structs.fields(event)}
    assert transport.Have._fields == ("stamp", "base", "acting")
    assert transport.Header._fields == ("stamp", "layout", "base", "digest", "metadata", "encoding")
    promised = {
        "processes",
        "hosts",
        "alias",
        "inline",
        "late_join",
        "subset_workers",
        "stream",
        "sharded_target",
        "cuda",
    }
    assert promised <= hookspecs.CAPABILITIES
