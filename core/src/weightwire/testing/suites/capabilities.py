"""What a backend does not claim is refused; what it claims is tried by the other cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weightwire.endpoint import parse
from weightwire.errors import CapabilityError, EndpointError, WaitTimeout
from weightwire.testing.rig import Rig
from weightwire.testing.states import counters
from weightwire.testing.suites.base import Cases

__all__ = ["CapabilityCases"]


class CapabilityCases(Cases):
    @pytest.mark.parametrize(
        ("capability", "asked"),
        [("alias", {"apply": "alias"}), ("inline", {"inline": True})],
        ids=["alias", "inline"],
    )
    def test_unclaimed_modes_are_refused(self, rig: Rig, capability: str, asked: dict[str, Any]) -> None:
        if capability in rig.capabilities:
            pytest.skip(f"{self.endpoint} claims {capability}")
        with pytest.raises(CapabilityError, match=capability):
            rig.receiver(counters(0), **asked)

    def test_unclaimed_push_to_some_is_refused(self, rig: Rig) -> None:
        if "subset_workers" in rig.capabilities:
            pytest.skip(f"{self.endpoint} claims subset_workers")
        updater = rig.updater()
        rig.worker("w", counters, 0)
        updater.wait_for_workers(1)
        with pytest.raises(CapabilityError, match="subset_workers"):
            updater.push(counters(1), workers=["w"])

    def test_unclaimed_processes_are_not_served(self, rig: Rig) -> None:
        if "processes" in rig.capabilities:
            pytest.skip(f"{self.endpoint} claims processes")
        updater = rig.updater()
        updater.push(counters(1))
        stranger = rig.process("stranger")
        stranger.do("open", rig.endpoint, counters, 0, worker="stranger")
        with pytest.raises((WaitTimeout, CapabilityError, EndpointError)):
            stranger.pull(0.3)
        assert dict(updater.workers) == {}

    def test_endpoint_is_handed_on(self, rig: Rig) -> None:
        """An updater at an empty location names a unique one, which is all that a worker needs."""
        if self.info().location != "name":
            pytest.skip(f"the location of {self.endpoint} is {self.info().location}, which cannot be left out")
        bare = str(replace(parse(rig.endpoint), location=""))
        one, two = rig.updater(endpoint=bare), rig.updater(endpoint=bare)
        assert one.endpoint != two.endpoint
        worker = rig.worker("w", counters, 0, endpoint=one.endpoint)
        one.push(counters(1))
        two.push(counters(2))
        assert worker.pull() == worker.seen() == 1

    def test_own_pickles_are_refused_unless_allowed(self, rig: Rig) -> None:
        if self.info().pickles != "own":
            pytest.skip(f"{self.endpoint} loads no pickles of its own")
        endpoint = parse(rig.endpoint)
        options = {key: value for key, value in endpoint.options.items() if key != "allow_pickle"}
        for refused in (options, {**options, "allow_pickle": "false"}):
            for end in (rig.updater, rig.receiver):
                with pytest.raises(CapabilityError, match="allow_pickle=true"):
                    end(endpoint=str(replace(endpoint, options=refused)))

    def test_unknown_options_are_errors(self) -> None:
        place = self.make_endpoint()
        rig = Rig(lambda: f"{place}{'&' if '?' in place else '?'}no_such_option=1", frozenset())
        with pytest.raises(EndpointError, match="no_such_option"):
            rig.updater()
