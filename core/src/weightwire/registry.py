"""Endpoint -> backend: discover by metadata, load the one that is named, check it, explain failures.

Discovery reads metadata only, so that a broken plugin harms nobody but those who select it. Each step is a function
over small records, sorted, so that the result never depends on the order of directories. Every opened backend has a
plugin manager of its own: nothing is registered for the process, and opening twice gives two independent backends.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from weightwire.errors import (
    AmbiguousBackendError,
    BackendLoadError,
    CapabilityError,
    IncompatibleBackendError,
    InvalidBackendError,
    UnknownBackendError,
    WeightwireError,
)

if TYPE_CHECKING:
    from importlib.metadata import Distribution
    from types import TracebackType

    import pluggy

    from weightwire.endpoint import Endpoint
    from weightwire.hookspecs import BackendInfo
    from weightwire.transport import Receiver, ReceiverContext, Sender, SenderContext

__all__ = [
    "BACKENDS",
    "OBSERVERS",
    "OLD_APIS",
    "SUPPORTED_APIS",
    "Backend",
    "BackendRecord",
    "OldApi",
    "available",
    "discover",
    "find",
    "load",
    "open_backend",
    "register",
    "remedy",
    "require",
]

log = logging.getLogger(__name__)

BACKENDS = "weightwire.backends"
OBSERVERS = "weightwire.observers"

SUPPORTED_APIS: tuple[int, ...] = (1,)
"""API numbers that this core speaks, newest first. A plugin is spoken to in the newest one that it knows too."""


class OldApi(NamedTuple):
    """How an older API number is still spoken, until a release drops it.

    ``sender`` and ``receiver`` make what the core calls today out of what the plugin's hooks give.
    """

    until: str  # the release of weightwire that no longer speaks it
    sender: Callable[[Any], Any]
    receiver: Callable[[Any], Any]


OLD_APIS: dict[int, OldApi] = {}
"""One for each number in :data:`SUPPORTED_APIS` but the first."""

_OURS = ("vanilla", "ipc", "ray", "nccl")  # only to say what to install; the core treats no name in a special way
_PICKLES = ("none", "engine", "own")


@dataclass(frozen=True, order=True)
class BackendRecord:
    """What metadata say of one backend (or observer). ``fault`` is set where they are too broken to load it."""

    name: str
    distribution: str
    version: str
    summary: str
    value: str  # the entry point's "package.module" or "package.module:object"
    kind: str = "backend"
    fault: str = ""

    @property
    def source(self) -> str:
        """For messages: the distribution and its version."""
        return f"{self.distribution} {self.version}".strip() if self.distribution else f"module {self.value}"

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} ({self.source})"


# -- discover ----------------------------------------------------------------------------------------------------------


def available() -> list[BackendRecord]:
    """Every installed backend, by name. Imports no plugin. One name may have two records: selecting it fails."""
    return discover(BACKENDS)


def discover(group: str) -> list[BackendRecord]:
    """The records of an entry-point group, sorted. A distribution that is shadowed on ``sys.path`` does not count."""
    from importlib import metadata

    found: dict[str, list[BackendRecord]] = {}
    for candidate in metadata.distributions():
        if group not in _entry_points(candidate):
            continue
        name = _label(candidate)
        if _normal(name) not in found:
            try:
                dist = metadata.distribution(name)  # the first on sys.path, which need not be the candidate
            except (metadata.PackageNotFoundError, ValueError):
                dist = candidate
            found[_normal(name)] = _records(group, name, dist)
    return sorted(record for records in found.values() for record in records)


def _records(group: str, label: str, dist: Distribution) -> list[BackendRecord]:
    version, summary = _header(dist, "Version"), " ".join(_header(dist, "Summary").split())
    values: dict[str, set[str]] = {}
    section = ""
    for line in map(str.strip, _entry_points(dist).splitlines()):
        if line.startswith("["):
            section = line.strip("[] ")
        elif section == group and line and line[0] not in "#;":
            name, _, value = line.partition("=")
            values.setdefault(name.strip(), set()).add(value.strip())
    records = []
    for name, choices in values.items():
        value = min(choices)
        target = value.partition("[")[0].strip()  # extras mean nothing here
        fault = ""
        if len(choices) > 1:
            fault = f"its metadata name two objects: {', '.join(sorted(choices))}"
        elif not re.fullmatch(r"[^\W\d][\w.]*(:[\w.]+)?", target):
            fault = f"its metadata name no module, but {value!r}"
        records.append(BackendRecord(name, label, version, summary, target, _kind(group), fault))
    return records


def _kind(group: str) -> str:
    return group.rpartition(".")[2].rstrip("s")


def _entry_points(dist: Distribution) -> str:
    # Any distribution of the environment may be broken in any way, and is then simply not one of ours.
    try:
        return dist.read_text("entry_points.txt") or ""
    except Exception as exc:
        log.debug("cannot read the entry points of %r: %s", dist, exc)
        return ""


def _header(dist: Distribution, key: str) -> str:
    try:
        return str((dist.metadata.get_all(key) or [""])[0])
    except Exception as exc:  # no METADATA, or not readable
        log.debug("cannot read %s of %r: %s", key, dist, exc)
        return ""


def _label(dist: Distribution) -> str:
    """The distribution's name; where the metadata have none, that of its folder."""
    folder = str(getattr(getattr(dist, "_path", None), "name", ""))
    return _header(dist, "Name") or folder.partition("-")[0] or "unnamed"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()  # packaging's rule for names of distributions (PEP 503)


# -- select ------------------------------------------------------------------------------------------------------------


def find(endpoint: Endpoint, group: str = BACKENDS) -> BackendRecord:
    """The one record that the endpoint names. Imports nothing.

    Raises:
        UnknownBackendError: says what is installed, what is close, and what to install.
        AmbiguousBackendError: names every distribution that claims the name, and how to choose.
    """
    kind = _kind(group)
    if endpoint.module is not None:
        return BackendRecord(endpoint.backend, "", "", "", endpoint.module, kind)
    records = discover(group)
    named = [record for record in records if record.name == endpoint.backend]
    wanted = endpoint.distribution
    chosen = [r for r in named if wanted is None or _normal(r.distribution) == _normal(wanted)]
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        raise AmbiguousBackendError(
            f"{kind} {endpoint.backend!r} is claimed by {len(chosen)} distributions: {_sources(chosen)}. "
            f"Uninstall all but one, or choose: {' or '.join(repr(f'{r.name}@{r.distribution}') for r in chosen)}."
        )
    if named:
        raise UnknownBackendError(
            f"distribution {wanted!r} offers no {kind} {endpoint.backend!r}; it is offered by {_sources(named)}."
        )
    if not records:
        _check_sight(kind, endpoint.backend)
    raise UnknownBackendError(_unknown(kind, endpoint.backend, records))


def _check_sight(kind: str, name: str) -> None:
    """Raise where nothing can be opened: folders that cannot be read look empty to ``importlib.metadata``."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as exc:
        raise BackendLoadError(f"{kind} {name!r} cannot be looked for, as no file can be opened: {exc}") from exc


def _sources(records: Iterable[BackendRecord]) -> str:
    return ", ".join(record.source for record in records)


def _unknown(kind: str, name: str, records: list[BackendRecord]) -> str:
    installed = ", ".join(f"{r.name} ({r.source})" for r in records) or "none"
    ours = _OURS if kind == "backend" else ()
    names = {candidate.lower(): candidate for candidate in (*ours, *(r.name for r in records))}
    close = [names[lower] for lower in difflib.get_close_matches(name.lower(), names, n=2) if names[lower] != name]
    missing = [n for n in (name, *close) if n in ours and all(n != r.name for r in records)]
    message = f"no {kind} {name!r} is installed. Installed {kind}s: {installed}."
    if close:
        message += f" Did you mean {' or '.join(map(repr, close))}?"
    if missing:
        message += " To install it: " + " or ".join(map(remedy, missing)) + "."
    elif not close:
        message += " Install the distribution that offers it, or name a module directly: 'import:package.module'."
    return message if close else message + _silent_distribution(name)


def remedy(name: str) -> str:
    """How to install a backend of ours."""
    return f"pip install weightwire-{name} (in a checkout: pip install ./plugins/{name})"


def _silent_distribution(name: str) -> str:
    """A hint where the distribution that should offer a plugin is there, but its metadata do not name it."""
    from importlib import metadata

    try:
        metadata.distribution(f"weightwire-{name}")
    except (metadata.PackageNotFoundError, ValueError):
        return ""
    return (
        f" (A distribution weightwire-{name} is there, but its metadata do not name the plugin or cannot be read: "
        f"pip install --force-reinstall weightwire-{name})"
    )


# -- load --------------------------------------------------------------------------------------------------------------


def load(record: BackendRecord) -> object:
    """Import exactly this plugin.

    Raises:
        BackendLoadError: says whether the plugin itself is missing or broken, or something that it needs.
    """
    if record.fault:
        raise BackendLoadError(f"{record} cannot be loaded: {record.fault}. {_reinstall(record)}")
    module, _, path = record.value.partition(":")
    try:
        plugin: object = importlib.import_module(module)
        return attrgetter(path)(plugin) if path else plugin
    except (Exception, SystemExit) as exc:  # some libraries end the process where what they need is not there
        raise BackendLoadError(_import_failure(record, module, exc)) from exc


def _import_failure(record: BackendRecord, module: str, exc: BaseException) -> str:
    root = module.partition(".")[0]
    what = f"{type(exc).__name__}: {exc}"
    missing = (exc.name or "") if isinstance(exc, ImportError) else ""
    need = missing.partition(".")[0] or _being_imported(exc.__traceback__) or root
    if isinstance(exc, ModuleNotFoundError) and missing:
        if need == root:
            todo = _reinstall(record) if record.distribution else "Is the folder that holds it on sys.path?"
            return f"{record} is broken: its own module {missing!r} is not there. {todo}"
        return f"{record} needs the module {missing!r}, which is not installed. Install it: pip install {need}"
    if need != root:
        return f"{record} needs {need!r}, which cannot be imported as it should: {what}. Repair or upgrade {need!r}."
    return f"{record} is broken: loading {record.value!r} raised {what}. {_reinstall(record)}"


def _being_imported(traceback: TracebackType | None) -> str:
    """The package whose module was being run when the import failed: the plugin's own, or one that it needs."""
    name = ""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == "<module>":
            name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        traceback = traceback.tb_next
    return name


def _reinstall(record: BackendRecord) -> str:
    if record.distribution:
        return f"Reinstall or upgrade it: pip install --force-reinstall {record.distribution}"
    return "Mend the module, or name another one."


# -- check -------------------------------------------------------------------------------------------------------------


def register(plugin: object, record: BackendRecord, spec: type) -> pluggy.PluginManager:
    """A fresh plugin manager with this spec and this one plugin.

    Raises:
        InvalidBackendError: a hook takes arguments that the spec does not have, or the plugin is a class.
    """
    import pluggy

    from weightwire.hookspecs import PROJECT

    if isinstance(plugin, type):
        raise InvalidBackendError(f"{record}: {record.value} is a class; name a module, or an instance.")
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(spec)
    try:
        manager.register(plugin, record.name)
    except Exception as exc:  # pluggy's own, or of a property: pluggy 1.6 runs them here
        raise InvalidBackendError(f"{record} cannot be registered: {exc}") from exc
    return manager


def misspelt(manager: pluggy.PluginManager, plugin: object) -> str:
    """What is wrong with the names of a plugin's hooks; empty where nothing is."""
    import pluggy

    try:
        manager.check_pending()
    except pluggy.PluginValidationError:
        callers = manager.get_hookcallers(plugin) or []
        unknown = sorted(caller.name for caller in callers if not caller.has_spec())
        specs = _spec_names(manager)
        close = [match for name in unknown for match in difflib.get_close_matches(name, specs, n=1)]
        hint = f"Did you mean {', '.join(close)}?" if close else f"There are: {', '.join(specs)}."
        return f"unknown hook {', '.join(unknown)}. {hint}"
    return ""


def _spec_names(manager: pluggy.PluginManager) -> list[str]:
    callers = (getattr(manager.hook, name) for name in vars(manager.hook) if name.startswith("weightwire_"))
    return sorted(caller.name for caller in callers if caller.has_spec())


def _missing(manager: pluggy.PluginManager, plugin: object) -> str:
    """Which required hooks are not there, which pluggy does not ask; empty where all are."""
    missing = [name for name in _spec_names(manager) if not getattr(manager.hook, name).get_hookimpls()]
    unmarked = [name for name in missing if callable(getattr(plugin, name, None))]
    if not missing:
        return ""
    hint = f" ({', '.join(unmarked)} lacks the @hookimpl mark)" if unmarked else ""
    return f"required hook {', '.join(missing)} is missing{hint}."


def _check(manager: pluggy.PluginManager, plugin: object, record: BackendRecord) -> BackendInfo:
    fault = misspelt(manager, plugin) or _missing(manager, plugin)
    info: BackendInfo | None = None
    # The API number comes before the hooks' names: a plugin of another API may well have other hooks.
    if manager.hook.weightwire_backend.get_hookimpls():
        try:
            info = _described(manager, record)
        except WeightwireError as exc:
            if not fault or isinstance(exc, IncompatibleBackendError):
                raise
    if fault or info is None:
        raise InvalidBackendError(f"{record}: {fault}")
    _check_info(info, record)
    return info


def _described(manager: pluggy.PluginManager, record: BackendRecord) -> BackendInfo:
    from weightwire.hookspecs import BackendInfo

    info = _call(manager, record, "weightwire_backend")
    if not isinstance(info, BackendInfo):
        raise InvalidBackendError(
            f"{record}: weightwire_backend gave an object of type {type(info).__name__}, not a BackendInfo."
        )
    _agreed(info, record)
    return info


def _agreed(info: BackendInfo, record: BackendRecord) -> int:
    """The newest API number that the plugin and this core both speak.

    Raises:
        IncompatibleBackendError: there is none; says whether the plugin or weightwire is too old.
    """
    theirs: Any = info.api  # a plugin's, not yet what the annotation says
    theirs = theirs if isinstance(theirs, tuple) else (theirs,)
    for number in SUPPORTED_APIS:
        if number in theirs:
            return number
    mine = f"this Weightwire speaks {', '.join(map(str, SUPPORTED_APIS))}"
    written = " and ".join(map(repr, theirs)) or "no number"
    newer = any(isinstance(number, int) and number > SUPPORTED_APIS[0] for number in theirs)
    todo = "Upgrade it: pip install --upgrade weightwire" if newer else f"Upgrade the plugin: {record.source}"
    raise IncompatibleBackendError(f"{record} was written for API {written} of the hook spec; {mine}. {todo}")


def _warn_of_old(number: int, record: BackendRecord) -> None:
    warnings.warn(
        f"{record} was written for API {number} of the hook spec, which Weightwire {OLD_APIS[number].until} no longer "
        f"speaks; this one speaks {SUPPORTED_APIS[0]} too. Upgrade the plugin, or ask its authors to",
        DeprecationWarning,
        stacklevel=4,
    )


def _check_info(info: BackendInfo, record: BackendRecord) -> None:
    import msgspec

    from weightwire.hookspecs import CAPABILITIES

    def invalid(what: str) -> NoReturn:
        raise InvalidBackendError(f"{record}: BackendInfo.{what}")

    if not isinstance(info.capabilities, (frozenset, set)):
        invalid(f"capabilities is of type {type(info.capabilities).__name__}, not a frozenset.")
    unknown = sorted(map(str, info.capabilities - CAPABILITIES))
    if unknown:
        invalid(f"capabilities has {', '.join(unknown)}; there are: {', '.join(sorted(CAPABILITIES))}.")
    if info.pickles not in _PICKLES:
        invalid(f"pickles is {info.pickles!r}; there are: {', '.join(_PICKLES)}.")
    options: Any = info.options  # a plugin's, not yet what the annotation says
    if options is not None and not (isinstance(options, type) and issubclass(options, msgspec.Struct)):
        invalid(f"options is {options!r}; a subclass of msgspec.Struct is needed, or None.")


def _call(manager: pluggy.PluginManager, record: BackendRecord, hook: str, **arguments: Any) -> Any:
    try:
        return getattr(manager.hook, hook)(**arguments)
    except WeightwireError:
        raise
    except Exception as exc:
        raise BackendLoadError(f"{record}: its hook {hook} raised {type(exc).__name__}: {exc}") from exc


# -- open --------------------------------------------------------------------------------------------------------------


class Backend:
    """A checked backend. Its hooks' answers are checked too, so that a caller can rely on the types.

    Attributes:
        api: the API number that it is spoken to in.
    """

    def __init__(self, manager: pluggy.PluginManager, record: BackendRecord, info: BackendInfo) -> None:
        self.info = info
        self.record = record
        self.api = _agreed(info, record)
        self._old = None if self.api == SUPPORTED_APIS[0] else OLD_APIS[self.api]
        self._manager = manager

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def distribution(self) -> str:
        """Empty for ``import:package.module``."""
        return self.record.distribution

    @property
    def version(self) -> str:
        return self.record.version

    def make_sender(self, endpoint: Endpoint, options: Any, context: SenderContext) -> Sender:
        """Open the trainer's end.

        Raises:
            InvalidBackendError: what the hook gave is no ``Sender``, or breaks its contract.
            BackendLoadError: the hook raised something other than a :class:`WeightwireError`, which passes.
        """
        from weightwire.transport import Sender

        hook = "weightwire_make_sender"
        made = _call(self._manager, self.record, hook, endpoint=endpoint, options=options, context=context)
        made = made if self._old is None else self._old.sender(made)
        sender: Sender = self._checked(hook, made, Sender)
        place, epoch = getattr(sender, "endpoint", None), getattr(sender, "epoch", None)
        if isinstance(place, str) and isinstance(epoch, int) and epoch >= context.epoch:
            return sender
        with contextlib.suppress(Exception):  # it is open, but of no use
            sender.close(context.deadline)
        raise InvalidBackendError(
            f"{self.record}: its sender's endpoint is {place!r} and its epoch {epoch!r}; "
            f"text to hand to workers and at least {context.epoch} are due."
        )

    def make_receiver(self, endpoint: Endpoint, options: Any, context: ReceiverContext) -> Receiver:
        """Open a worker's end. Raises as :meth:`make_sender` does."""
        from weightwire.transport import Receiver

        hook = "weightwire_make_receiver"
        made = _call(self._manager, self.record, hook, endpoint=endpoint, options=options, context=context)
        made = made if self._old is None else self._old.receiver(made)
        receiver: Receiver = self._checked(hook, made, Receiver)
        return receiver

    def _checked(self, hook: str, made: Any, kind: type[Any]) -> Any:
        if not isinstance(made, kind):
            raise InvalidBackendError(
                f"{self.record}: its hook {hook} gave an object of type {type(made).__name__}, "
                f"not a {kind.__module__}.{kind.__name__}."
            )
        return made


def open_backend(endpoint: Endpoint) -> Backend:
    """Find, load and check the backend that the endpoint names. Opens no socket and starts nothing."""
    from weightwire.hookspecs import BackendSpec

    record = find(endpoint)
    plugin = load(record)
    manager = register(plugin, record, BackendSpec)
    info = _check(manager, plugin, record)
    if info.pickles == "own" and not endpoint.allow_pickle:
        raise CapabilityError(
            f"{record} loads pickles of its own, which lets whoever can write to it run code in your processes. "
            "If you trust them all, say so in the endpoint: allow_pickle=true"
        )
    backend = Backend(manager, record, info)
    if backend.api != SUPPORTED_APIS[0]:
        _warn_of_old(backend.api, record)
    return backend


def require(backend: Backend, capability: str) -> None:
    """Raise :class:`CapabilityError` unless the backend claims the capability."""
    from weightwire.hookspecs import CAPABILITIES

    if capability not in CAPABILITIES:
        raise ValueError(f"no capability {capability!r}; there are: {', '.join(sorted(CAPABILITIES))}")
    if capability not in backend.info.capabilities:
        claimed = ", ".join(sorted(backend.info.capabilities)) or "none"
        raise CapabilityError(f"{backend.record} does not support {capability!r}; it supports: {claimed}.")
