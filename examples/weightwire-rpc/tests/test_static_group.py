"""In the user's own static group: workers in other processes, one of which is killed; and what is refused."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from weightwire import WeightReceiver, WeightUpdater
from weightwire.errors import CapabilityError, EndpointError


def test_a_killed_member_is_named_and_costs_the_others_nothing() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    members = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("member.py")), str(rank), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    trainer, worker, dead = members
    try:
        assert trainer.stdout is not None
        assert trainer.stdin is not None
        assert trainer.stdout.readline() == "all have version 1\n"
        dead.kill()
        dead.wait(30)
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        worked, _ = worker.communicate(timeout=60)
        trained, _ = trainer.communicate("\n", timeout=30)
    finally:
        for member in members:
            member.kill()
            member.communicate()
    told = json.loads(trained)
    assert told["lost"] == "w2"
    assert told["states"] == [{"w1": "applied", "w2": "applied"}, {"w1": "applied"}]
    versions = json.loads(worked)["versions"]
    assert versions == sorted(set(versions))
    assert versions[-1] == 3


@pytest.mark.parametrize("end", [WeightUpdater, WeightReceiver])
def test_pickles_have_to_be_allowed(end: type[WeightUpdater] | type[WeightReceiver]) -> None:
    for place in ("rpc://policy", "rpc://policy?allow_pickle=false"):
        with pytest.raises(CapabilityError, match="allow_pickle=true"):
            end(place)


def test_a_process_in_no_group_is_told_so() -> None:
    """In a process of its own: this one may be in the kit's group."""
    script = """
        from weightwire import WeightReceiver
        try:
            WeightReceiver("rpc://policy?allow_pickle=true&join=here")
        except Exception as exc:
            print(type(exc).__name__, exc)
    """
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(line[8:] for line in script.splitlines())],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout.startswith(EndpointError.__name__)
    assert "init_rpc()" in run.stdout
    assert "join='here'" in run.stdout
