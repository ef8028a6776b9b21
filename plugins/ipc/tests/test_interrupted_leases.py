"""Leases end whatever interrupts their end; and a forked child keeps the weights that it was forked with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from weightwire import WeightReceiver, WeightUpdater
from weightwire_ipc.leases import ReadLeases, WriteLocks

STORM = """
import random, signal, sys
import torch
from weightwire import WeightReceiver

size, mode = int(sys.argv[2]), sys.argv[3]
weights = {"a": torch.zeros(size)}
receiver = WeightReceiver(sys.argv[1], weights, worker="storm", apply=mode)
receiver.pull(20)
armed = False

def interrupt(number, frame):
    if armed:  # one that another thread has taken may be heard of late
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
print("ready", flush=True)
hits = 0
while hits < 400:
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + random.random() * 0.001)
        for _ in range(3):
            receiver.pull(0.0)
        armed = False
    except KeyboardInterrupt:
        armed, hits = False, hits + 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    first, last = weights["a"][0].item(), weights["a"][-1].item()
    assert first == last == receiver.version, (first, last, receiver.version)
print("calm", flush=True)
while not receiver.closed:
    receiver.pull()
"""


@pytest.mark.parametrize("mode", ["copy", "alias"])
def test_interrupts_in_pull_leave_no_lease_behind(mode: str) -> None:
    size = 50_000
    weights = {"a": torch.ones(size)}
    with WeightUpdater("ipc", weights, timeout=30.0) as updater:
        command = [sys.executable, "-c", textwrap.dedent(STORM), updater.endpoint, str(size), mode]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert worker.stdout is not None
            updater.wait_for_workers(1)
            updater.push()
            assert worker.stdout.readline() == "ready\n"
            os.set_blocking(worker.stdout.fileno(), False)
            calm = ""
            while not calm and worker.poll() is None:
                weights["a"].fill_(updater.version + 1.0)
                updater.push(wait="none", timeout=20.0)
                calm = worker.stdout.readline()
            assert calm == "calm\n"
            for _ in range(6):
                weights["a"].fill_(updater.version + 1.0)
                updater.push(wait="applied", timeout=20.0)
        finally:
            worker.kill()
            worker.wait(10)
            assert worker.stdout is not None
            worker.stdout.close()
            updater.workers  # noqa: B018 - the loss is booked
            updater._roster.take_failures()


def test_a_hold_whose_end_was_broken_off_ends_with_the_next_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    locks = WriteLocks()
    leases = ReadLeases(locks.shared, lane=3)
    try:
        lease = leases.take(0)
        assert lease is not None
        assert not locks.take(0)

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(ReadLeases, "sweep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lease.release()
        monkeypatch.undo()
        assert not locks.take(0)
        leases.sweep()
        assert locks.take(0)
    finally:
        leases.close()
        locks.close()


def test_a_forked_child_keeps_the_weights_that_it_was_forked_with() -> None:
    """The parent goes on and its slot is rewritten; the child must not see that in its aliased weights."""
    size = 2_000_000
    trained = {"a": torch.ones(size)}
    acting = {"a": torch.zeros(size)}
    with WeightUpdater("ipc", trained) as updater, WeightReceiver(updater.endpoint, acting, apply="alias") as receiver:
        updater.push()
        assert receiver.pull() == 1
        ask, told = os.pipe(), os.pipe()
        child = os.fork()
        if not child:  # pragma: no cover
            os.read(ask[0], 1)
            same = bool((acting["a"].numpy() == 1.0).all())  # torch's own threads are not in the child
            os.write(told[1], b"same" if same else b"torn")
            os._exit(0)
        try:
            for version in range(2, 8):
                trained["a"].fill_(version)
                updater.push()
                assert receiver.pull() == version
            os.write(ask[1], b"?")
            assert os.read(told[0], 4) == b"same"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            for fd in (*ask, *told):
                os.close(fd)
