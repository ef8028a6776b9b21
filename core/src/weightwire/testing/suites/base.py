"""What all cases share: the place, the capabilities, the rig, and the gate that skips with a reason."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import pytest

from weightwire.endpoint import Endpoint, parse
from weightwire.hookspecs import BackendInfo
from weightwire.registry import open_backend
from weightwire.testing.rig import Rig

__all__ = ["Cases", "requires"]

Case = TypeVar("Case", bound=Callable[..., None])


def requires(*capabilities: str) -> Callable[[Case], Case]:
    """Mark a case that only makes sense where the backend claims these."""

    def mark(case: Case) -> Case:
        case.__dict__["requires"] = capabilities
        return case

    return mark


class Cases:
    """Base of the mix-ins."""

    endpoint: ClassVar[str]
    options: Mapping[str, Any] = {}  # a fixture of a suite's own may set more on an instance
    skip: ClassVar[Mapping[str, str]] = {}

    def make_location(self) -> str:
        """A location that nobody uses yet. Override it where that takes more than a name or a free port."""
        by_port = self.info().location == "host:port"
        return f"127.0.0.1:{_free_port()}" if by_port else f"kit-{uuid.uuid4().hex[:12]}"

    def make_endpoint(self) -> str:
        """A place for a case, as a text that both sides can be given."""
        endpoint = self._asked()
        return str(endpoint if endpoint.location else replace(endpoint, location=self.make_location()))

    def make_rig(self, capabilities: frozenset[str]) -> Rig:
        """What a case stands on. Override it where workers are to live elsewhere than in processes of this host."""
        return Rig(self.make_endpoint, capabilities)

    def info(self) -> BackendInfo:
        """What the backend says of itself."""
        return open_backend(self._asked()).info

    def _asked(self) -> Endpoint:
        endpoint = parse(self.endpoint)
        return replace(endpoint, options={**endpoint.options, **self.options})

    @pytest.fixture(autouse=True)
    def _gate(self, request: pytest.FixtureRequest) -> None:
        name = request.function.__name__
        reason = self.skip.get(name) or self.skip.get(name.removeprefix("test_"))
        if reason:
            pytest.skip(reason)
        missing = [need for need in getattr(request.function, "requires", ()) if need not in self.info().capabilities]
        if missing:
            pytest.skip(f"{self.endpoint} does not claim {', '.join(missing)}")

    @pytest.fixture
    def rig(self, _gate: None) -> Iterator[Rig]:
        rig = self.make_rig(self.info().capabilities)
        try:
            yield rig
        finally:
            rig.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
