"""Selection: each way in which a plugin can be missing or broken has an error of its own, and harms nobody else."""

from __future__ import annotations

import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weightwire import registry
from weightwire.endpoint import parse
from weightwire.errors import (
    AmbiguousBackendError,
    BackendLoadError,
    CapabilityError,
    EndpointError,
    IncompatibleBackendError,
    InvalidBackendError,
    StorageFullError,
    UnknownBackendError,
    WeightwireError,
)
from weightwire.hookspecs import API, CAPABILITIES
from weightwire.registry import Backend, available, open_backend, require
from weightwire.transport import Deadline, Joined, Receiver, ReceiverContext, Sender, SenderContext

FakeDist = Callable[..., Path]

GOOD = """
from weightwire import BackendInfo, Receiver, Sender, hookimpl

class MySender(Sender):
    def __init__(self, endpoint, epoch):
        self.endpoint, self.epoch = endpoint, epoch
    def stage(self, payload, to, deadline): pass
    def events(self, deadline): return []
    def close(self, deadline): pass

class MyReceiver(Receiver):
    def poll(self, have, deadline): return None
    def report(self, event): pass
    def close(self, deadline): pass

@hookimpl
def weightwire_backend():
    return BackendInfo(summary="good", capabilities=frozenset({"processes"}))

@hookimpl
def weightwire_make_sender(endpoint, context):
    return MySender(str(endpoint), context.epoch)

@hookimpl
def weightwire_make_receiver(context):
    return MyReceiver()
"""


def sender_context() -> SenderContext:
    return SenderContext(epoch=5, deadline=Deadline.after(1))


def receiver_context() -> ReceiverContext:
    return ReceiverContext(joined=Joined(worker="w"), have=lambda: None, deadline=Deadline.after(1))  # type: ignore[arg-type,return-value]


def opened(text: str) -> Backend:
    return open_backend(parse(text))


def refusal(kind: type[WeightwireError], text: str) -> str:
    """The message with which opening fails: exactly this kind of error."""
    with pytest.raises(kind) as caught:
        opened(text)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.fixture(autouse=True)
def neighbour(fake_dist: FakeDist) -> str:
    """A healthy plugin beside every broken one."""
    fake_dist("weightwire-neighbour", {"neighbour": "neighbour_mod"}, neighbour_mod=GOOD)
    return "neighbour"


# -- a healthy plugin --------------------------------------------------------------------------------------------------


def test_a_plugin_is_found_described_and_opened(fake_dist: FakeDist) -> None:
    fake_dist("weightwire-good", {"good": "good_mod"}, version="2.3", good_mod=GOOD)
    backend = opened("good://policy")
    assert (backend.name, backend.distribution, backend.version) == ("good", "weightwire-good", "2.3")
    assert backend.info.summary == "good"
    sender = backend.make_sender(parse("good://policy"), None, sender_context())
    assert isinstance(sender, Sender)
    assert (sender.endpoint, sender.epoch) == ("good://policy", 5)
    assert isinstance(backend.make_receiver(parse("good"), None, receiver_context()), Receiver)


def test_discovery_reads_metadata_only_and_is_sorted(fake_dist: FakeDist) -> None:
    fake_dist("weightwire-zz", {"zz": "zz_mod", "aa": "zz_mod:thing [extra]"}, zz_mod="raise RuntimeError")
    mine = [record for record in available() if record.distribution == "weightwire-zz"]
    assert [(r.name, r.value, r.version, r.summary, r.fault) for r in mine] == [
        ("aa", "zz_mod:thing", "1.0", "fake weightwire-zz", ""),
        ("zz", "zz_mod", "1.0", "fake weightwire-zz", ""),
    ]
    assert "zz_mod" not in sys.modules
    assert available() == sorted(available())


def test_an_object_of_a_module_can_be_the_plugin(fake_dist: FakeDist) -> None:
    source = GOOD.replace("@hookimpl\ndef ", "    @hookimpl\n    def ").replace("    return", "        return")
    source = source.replace("    @hookimpl", "class Plugin:\n    @hookimpl", 1)
    source = source.replace("backend()", "backend(self)").replace("sender(endpoint", "sender(self, endpoint")
    source = source.replace("receiver(context", "receiver(self, context") + "\nplugin = Plugin()\n"
    fake_dist("weightwire-obj", {"obj": "obj_mod:plugin", "cls": "obj_mod:Plugin"}, obj_mod=source)
    assert opened("obj").make_sender(parse("obj"), None, sender_context()).endpoint == "obj"
    assert "is a class; name a module, or an instance" in refusal(InvalidBackendError, "cls")


def test_a_module_under_development_needs_no_distribution(fake_dist: FakeDist) -> None:
    fake_dist("unrelated", "", developed_mod=GOOD)
    backend = opened("import:developed_mod://x?allow_pickle=false")
    assert (backend.name, backend.distribution, backend.version) == ("import:developed_mod", "", "")
    message = refusal(BackendLoadError, "import:not_there.at_all")
    assert "its own module 'not_there' is not there" in message
    assert "sys.path" in message


def test_opening_twice_gives_two_independent_backends(neighbour: str) -> None:
    first, second = opened(neighbour), opened(neighbour)
    assert first._manager is not second._manager


# -- not installed, installed twice ------------------------------------------------------------------------------------


def test_not_installed() -> None:
    message = refusal(UnknownBackendError, "neighbor://policy")
    assert "no backend 'neighbor' is installed" in message
    assert "neighbour (weightwire-neighbour 1.0)" in message
    assert "Did you mean 'neighbour'?" in message
    message = refusal(UnknownBackendError, "quite-different")
    assert "Did you mean" not in message
    assert "import:package.module" in message


def test_not_installed_but_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.distributions", list)
    message = refusal(UnknownBackendError, "nccl://10.0.0.1:29500")
    assert "Installed backends: none." in message
    assert "pip install weightwire-nccl" in message
    assert "pip install weightwire-ray" in refusal(UnknownBackendError, "RAY")


def test_two_distributions_claim_one_name(fake_dist: FakeDist) -> None:
    fake_dist("weightwire-twin", {"twin": "twin_a"}, version="1.2", twin_a=GOOD)
    fake_dist("other_twin", {"twin": "twin_b"}, version="3.4", twin_b=GOOD)
    message = refusal(AmbiguousBackendError, "twin://x")
    assert "weightwire-twin 1.2" in message
    assert "other_twin 3.4" in message
    assert "'twin@weightwire-twin'" in message
    assert not {"twin_a", "twin_b"} & set(sys.modules)
    assert opened("twin@weightwire-twin").version == "1.2"
    assert opened("twin@Other.Twin://x").distribution == "other_twin"  # names of distributions are normalised
    message = refusal(UnknownBackendError, "twin@third")
    assert "'third' offers no backend 'twin'; it is offered by other_twin 3.4, weightwire-twin 1.2" in message


def test_a_shadowed_copy_of_a_distribution_does_not_count(fake_dist: FakeDist) -> None:
    fake_dist("weightwire-copy", {"copy": "copy_mod"}, version="1.0", copy_mod="raise RuntimeError('old')")
    fake_dist("Weightwire_Copy", {"copy": "copy_mod"}, version="2.0", copy_mod=GOOD)  # earlier on sys.path
    assert opened("copy").version == "2.0"


# -- broken metadata ---------------------------------------------------------------------------------------------------


def test_metadata_that_name_no_module(fake_dist: FakeDist) -> None:
    fake_dist("weightwire-nomod", {"nomod": "not a module!"})
    message = refusal(BackendLoadError, "nomod")
    assert "its metadata name no module, but 'not a module!'" in message
    assert "pip install --force-reinstall weightwire-nomod" in message


def test_metadata_that_name_two_modules(fake_dist: FakeDist) -> None:
    fake_dist("weightwire-two", "[weightwire.backends]\ntwo = a\ntwo = b\n# comment\n\n[other]\nthree = c\n")
    assert "its metadata name two objects: a, b" in refusal(BackendLoadError, "two")
    assert "no backend 'three'" in refusal(UnknownBackendError, "three")


@pytest.mark.parametrize(
    "entry_points", ["[weightwire.backends]\nbytes = \xff\xfe", "[weightwire.backends\nno section", "\0"]
)
def test_metadata_that_cannot_be_read_harm_only_their_plugin(entry_points: str, fake_dist: FakeDist) -> None:
    fake_dist("weightwire-bytes", entry_points)
    assert opened("neighbour").name == "neighbour"
    message = refusal(UnknownBackendError, "bytes")
    assert "A distribution weightwire-bytes is there, but its metadata do not name the plugin" in message


@pytest.mark.parametrize("metadata", ["", "Name weightwire-nameless\n\n\n", None])
def test_metadata_without_a_name(metadata: str | None, fake_dist: FakeDist) -> None:
    site = fake_dist("weightwire-nameless", {"nameless": "nameless_mod"}, metadata=metadata or "", nameless_mod=GOOD)
    if metadata is None:
        site.joinpath("weightwire_nameless-1.0.dist-info", "METADATA").unlink()
    assert opened("neighbour").name == "neighbour"
    backend = opened("nameless")
    assert (backend.distribution, backend.version) == ("weightwire_nameless", "")


def test_a_distribution_that_vanishes(fake_dist: FakeDist) -> None:
    site = fake_dist("weightwire-gone", {"gone": "gone_mod"}, gone_mod=GOOD)
    shutil.rmtree(site)
    assert "no backend 'gone'" in refusal(UnknownBackendError, "gone")


# -- import fails ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (None, ["is broken: its own module 'mod_{n}' is not there", "--force-reinstall weightwire-x{n}"]),
        ("import mod_{n}.part", ["is broken"]),
        ("raise ValueError('oh no')", ["is broken", "ValueError: oh no"]),
        ("def broken(:", ["is broken", "SyntaxError"]),
        ("import sys; sys.exit(3)", ["is broken", "SystemExit: 3"]),
        ("import json; json.loads('oops')", ["is broken", "JSONDecodeError"]),
        ("import no_such_dep.part", ["needs the module 'no_such_dep'", "not installed", "pip install no_such_dep"]),
        ("from json import no_such_name", ["needs 'json'", "cannot be imported as it should", "no_such_name"]),
        ("import dep_{n}", ["needs 'dep_{n}'", "RuntimeError: no driver", "Repair or upgrade 'dep_{n}'"]),
    ],
)
def test_import_fails(
    source: str | None, parts: list[str], fake_dist: FakeDist, request: pytest.FixtureRequest
) -> None:
    n = abs(hash(request.node.name))
    modules = {f"dep_{n}": "raise RuntimeError('no driver')"}
    if source is not None:
        modules[f"mod_{n}"] = source.replace("{n}", str(n))
    fake_dist(f"weightwire-x{n}", {"x": f"mod_{n}"}, **modules)
    message = refusal(BackendLoadError, "x")
    for part in ["backend 'x'", f"weightwire-x{n} 1.0", *parts]:
        assert part.replace("{n}", str(n)) in message
    assert opened("neighbour").name == "neighbour"


def test_the_module_lacks_the_object(fake_dist: FakeDist) -> None:
    fake_dist("weightwire-attr", {"attr": "attr_mod:plugin.inner"}, attr_mod="")
    message = refusal(BackendLoadError, "attr")
    assert "loading 'attr_mod:plugin.inner' raised AttributeError" in message


# -- hooks -------------------------------------------------------------------------------------------------------------


def test_wrong_api_number(fake_dist: FakeDist) -> None:
    # A later API may have other hooks: that it is later is what has to be said.
    later = GOOD.replace('summary="good"', f'summary="", api={API + 1}') + "\n@hookimpl\ndef weightwire_new(): pass\n"
    fake_dist("weightwire-later", {"later": "later_mod"}, later_mod=later)
    message = refusal(IncompatibleBackendError, "later")
    assert f"written for API {API + 1}" in message
    assert "pip install --upgrade weightwire" in message
    fake_dist("weightwire-old", {"old": "old_mod"}, old_mod=GOOD.replace('"good"', '"", api=0'))
    assert "Upgrade the plugin: weightwire-old 1.0" in refusal(IncompatibleBackendError, "old")


def test_every_supported_api_opens() -> None:
    assert registry.SUPPORTED_APIS[0] == API
    assert sorted(registry.SUPPORTED_APIS, reverse=True) == list(registry.SUPPORTED_APIS)


FAULTS = {
    "missing": (GOOD.partition("@hookimpl\ndef weightwire_make_receiver")[0], ["weightwire_make_receiver is missing"]),
    "unmarked": (
        GOOD.replace("@hookimpl\ndef weightwire_make_sender", "def weightwire_make_sender"),
        ["weightwire_make_sender is missing", "weightwire_make_sender lacks the @hookimpl mark"],
    ),
    "misspelt": (
        GOOD.replace("weightwire_make_sender", "weightwire_make_sendr"),
        ["unknown hook weightwire_make_sendr", "Did you mean weightwire_make_sender?"],
    ),
    "unknown": (GOOD + "\n@hookimpl\ndef zzz(): pass\n", ["unknown hook zzz", "There are: weightwire_backend"]),
    "arguments": (GOOD.replace("receiver(context)", "receiver(cntext)"), ["cannot be registered", "cntext"]),
    "empty": ("", ["required hook weightwire_backend, weightwire_make_receiver, weightwire_make_sender is missing"]),
    "no_info": (GOOD.replace("return BackendInfo", "return dict"), ["weightwire_backend gave an object of type dict"]),
    "none_info": (
        GOOD.replace("return BackendInfo", "BackendInfo"),
        ["weightwire_backend gave an object of type NoneType"],
    ),
    "capability": (GOOD.replace('{"processes"}', '{"teleport"}'), ["capabilities has teleport", "late_join"]),
    "capabilities": (GOOD.replace('frozenset({"processes"})', '"cuda"'), ["capabilities is of type str"]),
    "pickles": (GOOD.replace('"good"', '"", pickles="some"'), ["pickles is 'some'", "none, engine, own"]),
    "options": (GOOD.replace('"good"', '"", options=dict'), ["options is <class 'dict'>", "msgspec.Struct"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plugin_that_breaks_the_spec(fault: str, fake_dist: FakeDist) -> None:
    source, parts = FAULTS[fault]
    fake_dist(f"weightwire-{fault}", {fault: f"fault_{fault}"}, **{f"fault_{fault}": source})
    message = refusal(InvalidBackendError, fault)
    for part in [f"backend '{fault}' (weightwire-{fault} 1.0)", *parts]:
        assert part in message
    assert opened("neighbour").name == "neighbour"


def test_a_describe_hook_that_raises(fake_dist: FakeDist) -> None:
    source = GOOD.replace("return BackendInfo", "raise OSError('no device')\n    return BackendInfo")
    fake_dist("weightwire-raises", {"raises": "raises_mod"}, raises_mod=source)
    message = refusal(BackendLoadError, "raises")
    assert "backend 'raises' (weightwire-raises 1.0): its hook weightwire_backend raised OSError: no device" in message
    assert opened("neighbour").name == "neighbour"


# -- what the factory hooks give ---------------------------------------------------------------------------------------


def with_sender(body: str) -> str:
    return GOOD.replace("return MySender(str(endpoint), context.epoch)", body)


def make_sender(fake_dist: FakeDist, name: str, body: str) -> Sender:
    fake_dist(f"weightwire-{name}", {name: f"sender_{name}"}, **{f"sender_{name}": with_sender(body)})
    return opened(name).make_sender(parse(name), None, sender_context())


@pytest.mark.parametrize(
    ("name", "body", "part"),
    [
        ("s_none", "return None", "gave an object of type NoneType, not a weightwire.transport.Sender"),
        ("s_type", "return MyReceiver()", "gave an object of type MyReceiver, not a weightwire.transport.Sender"),
        ("s_class", "return MySender", "not a weightwire.transport.Sender"),
        ("s_place", "return MySender(None, 7)", "endpoint is None and its epoch 7; text"),
        ("s_epoch", "return MySender('x', 4)", "its epoch 4; text to hand to workers and at least 5"),
    ],
)
def test_a_wrong_sender(name: str, body: str, part: str, fake_dist: FakeDist) -> None:
    with pytest.raises(InvalidBackendError) as caught:
        make_sender(fake_dist, name, body)
    assert part in str(caught.value)
    assert f"weightwire-{name} 1.0" in str(caught.value)


def test_a_wrong_receiver(fake_dist: FakeDist) -> None:
    fake_dist("weightwire-r", {"r": "r_mod"}, r_mod=GOOD.replace("return MyReceiver()", "return 3"))
    with pytest.raises(
        InvalidBackendError, match=r"weightwire_make_receiver gave an object of type int, not a .*Receiver"
    ):
        opened("r").make_receiver(parse("r"), None, receiver_context())


def test_a_factory_that_raises(fake_dist: FakeDist) -> None:
    with pytest.raises(BackendLoadError, match=r"its hook weightwire_make_sender raised OSError: .*taken") as caught:
        make_sender(fake_dist, "s_raises", "raise OSError('taken')")
    assert isinstance(caught.value.__cause__, OSError)
    assert "weightwire-s_raises 1.0" in str(caught.value)


def test_our_own_errors_pass_unchanged(fake_dist: FakeDist) -> None:
    with pytest.raises(StorageFullError, match=r"^just so$"):
        make_sender(fake_dist, "s_ours", "import weightwire; raise weightwire.StorageFullError('just so')")


# -- capabilities ------------------------------------------------------------------------------------------------------


def test_what_is_not_claimed_is_refused(neighbour: str) -> None:
    backend = opened(neighbour)
    require(backend, "processes")
    for capability in CAPABILITIES - {"processes"}:
        with pytest.raises(CapabilityError, match=f"does not support '{capability}'; it supports: processes"):
            require(backend, capability)
    with pytest.raises(ValueError, match="no capability 'teleport'"):
        require(backend, "teleport")


def test_own_pickles_must_be_allowed(fake_dist: FakeDist) -> None:
    fake_dist("weightwire-pkl", {"pkl": "pkl_mod"}, pkl_mod=GOOD.replace('"good"', '"", pickles="own"'))
    assert "allow_pickle=true" in refusal(CapabilityError, "pkl")
    assert "allow_pickle=true" in refusal(CapabilityError, "pkl?allow_pickle=false")
    assert opened("pkl?allow_pickle=true").info.pickles == "own"
    with pytest.raises(EndpointError):
        opened("pkl?allow_pickle=yes")


def test_out_of_descriptors_is_not_taken_for_not_installed() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(BackendLoadError, match=r"'vanilla' cannot be looked for, .*Too many open files"):
            registry.find(parse("vanilla"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
