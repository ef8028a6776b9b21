"""Observers hear what happens and may not disturb it: what one raises is contained, logged and kept for the report."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from weightwire import registry
from weightwire.calls import check_ran
from weightwire.errors import EndpointError, InvalidBackendError

if TYPE_CHECKING:
    import pluggy

    from weightwire.endpoint import Endpoint
    from weightwire.report import PushReport, Receipt

__all__ = ["Observers"]

log = logging.getLogger(__name__)

MAX_ERRORS = 100
"""How many errors are kept: the newest. An observer that always fails must not fill the memory of a long run."""


class Observers:
    """The observers of one updater or receiver, called in the order in which they were given.

    Args:
        wanted: names of installed observers (``name``, ``name@distribution``, ``import:package.module``), or objects
            (modules, instances) whose functions are marked with ``hookimpl``. A hook may take fewer arguments than the
            spec has. ``None``: nobody listens, and each call costs an attribute and a truth test.

    Raises:
        UnknownBackendError, AmbiguousBackendError, BackendLoadError, InvalidBackendError: as for backends.
    """

    def __init__(self, wanted: Sequence[object] | None = None) -> None:
        self.errors: list[str] = []
        self._managers: list[tuple[str, pluggy.PluginManager]] = []
        several = [wanted] if isinstance(wanted, str) else () if wanted is None else wanted
        if not isinstance(several, Iterable):
            raise TypeError(f"observers is {wanted!r:.200}; it takes a list of names and plugin objects")
        for one in several:
            self._managers.append(_resolve(one))

    def take_errors(self) -> list[str]:
        """The errors since the last call, for a report."""
        errors, self.errors = self.errors, []
        return errors

    def worker_joined(self, *, endpoint: str, worker: str, host: str, pid: int) -> None:
        if self._managers:
            self._call("weightwire_worker_joined", endpoint=endpoint, worker=worker, host=host, pid=pid)

    def worker_lost(self, *, endpoint: str, worker: str, reason: str) -> None:
        if self._managers:
            self._call("weightwire_worker_lost", endpoint=endpoint, worker=worker, reason=reason)

    def before_push(self, *, endpoint: str, version: int, workers: frozenset[str] | None) -> None:
        if self._managers:
            self._call("weightwire_before_push", endpoint=endpoint, version=version, workers=workers)

    def after_push(self, *, endpoint: str, report: PushReport) -> None:
        if self._managers:
            self._call("weightwire_after_push", endpoint=endpoint, report=report)

    def after_pull(self, *, endpoint: str, receipt: Receipt) -> None:
        if self._managers:
            self._call("weightwire_after_pull", endpoint=endpoint, receipt=receipt)

    def __bool__(self) -> bool:
        return bool(self._managers)

    def _call(self, hook: str, **arguments: Any) -> None:
        for name, manager in self._managers:
            try:
                for returned in getattr(manager.hook, hook)(**arguments):
                    check_ran(returned, "it")
            except Exception as exc:
                log.exception("observer %s failed in %s", name, hook)
                self.errors = [*self.errors, f"observer {name}, {hook}: {type(exc).__name__}: {exc}"][-MAX_ERRORS:]


def _resolve(wanted: str | object) -> tuple[str, pluggy.PluginManager]:
    """A plugin manager for each observer, so that what one raises does not reach the others."""
    from weightwire.hookspecs import ObserverSpec

    if isinstance(wanted, str):
        record = registry.find(_named(wanted), registry.OBSERVERS)
        plugin = registry.load(record)
    else:
        label = getattr(wanted, "__name__", type(wanted).__qualname__)
        record, plugin = registry.BackendRecord(label, "", "", "", label, "observer"), wanted
    manager = registry.register(plugin, record, ObserverSpec)
    fault = registry.misspelt(manager, plugin)
    if not fault and not manager.get_hookcallers(plugin):
        fault = "it has no hook (are they marked with @hookimpl?)"
    if fault:
        raise InvalidBackendError(f"{record}: {fault}")
    return record.name, manager


def _named(text: str) -> Endpoint:
    from weightwire.endpoint import parse

    endpoint = parse(text)
    if endpoint.location or endpoint.options:
        raise EndpointError(f"observer {text!r}: an observer is a name without location and options")
    return endpoint
