"""Workers that stage nothing: they fetch a version while they apply it, in less memory than two buckets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from weightwire.errors import CapabilityError, UpdaterLostError
from weightwire.testing import Rig
from weightwire.testing.states import counters, seen
from weightwire.transport import Deadline, Delivery, Have, Staged

Bench = Any  # of conftest.py, which cannot be imported
BUCKET = 16384


def soon() -> Deadline:
    return Deadline.after(10)


def packed(delivery: Delivery) -> torch.Tensor:
    """All its bytes, which have to come in order and without gaps."""
    found, at = [], 0
    for start, data in delivery.buckets():
        assert start == at
        assert data.numel() <= BUCKET // 2
        found.append(data.clone())
        at += data.numel()
    assert at == delivery.header.layout.nbytes
    return torch.cat(found)


def value(delivery: Delivery) -> int:
    """The number that the content says."""
    layout = delivery.header.layout
    views = dict(zip(layout.names, layout.views(layout.slice(packed(delivery)))))
    assert (views["value"] == views["n"]).all()
    return int(views["n"])


@pytest.mark.parametrize("staging", ["thread", "inline"])
def test_pieces_come_as_they_are_asked_for(bench: Bench, gather: Callable[..., Any], staging: str) -> None:
    sender = bench.sender(bucket=BUCKET)
    receiver = bench.receiver(stream=True, bucket=BUCKET, staging=staging)
    have = Have()
    for number in (1, 2, 3):
        stamp = bench.stage(sender, number, size=20_000)
        delivery = receiver.poll(have, soon())
        assert value(delivery) == number
        have = Have(stamp, stamp, stamp)
        gather(sender, lambda event, stamp=stamp: event == Staged(worker="w", stamp=stamp))
    assert sender._crews.all() == [], "nothing was broadcast"


def test_a_subset_after_its_base(bench: Bench) -> None:
    sender = bench.sender(bucket=BUCKET)
    full = bench.stage(sender, 1, size=20_000)
    subset = bench.stage(sender, 2, size=20_000, base=full)
    receiver = bench.receiver(stream=True, bucket=BUCKET)
    assert value(receiver.poll(Have(), soon())) == 1
    found = receiver.poll(Have(full, full, full), soon())
    assert found.header.stamp == subset
    assert value(found) == 2


def test_a_version_that_was_taken_may_be_fetched_while_newer_ones_come(bench: Bench) -> None:
    sender = bench.sender(bucket=BUCKET)
    bench.stage(sender, 1, size=20_000)
    receiver = bench.receiver(stream=True, bucket=BUCKET)
    delivery = receiver.poll(Have(), soon())
    buckets = delivery.buckets()
    start, data = next(buckets)
    first = data.clone()
    for number in range(2, 8):
        bench.stage(sender, number, size=20_000)
    rest = [data.clone() for _, data in buckets]
    views = delivery.header.layout.views(delivery.header.layout.slice(torch.cat([first, *rest])))
    assert {float(view.max()) for view in views} == {1.0}
    assert start == 0


def test_a_version_that_is_gone(bench: Bench, gather: Callable[..., Any]) -> None:
    sender = bench.sender(bucket=BUCKET)
    bench.stage(sender, 1)
    receiver = bench.receiver(stream=True, bucket=BUCKET)
    delivery = receiver.poll(Have(), soon())
    for number in range(2, 6):
        stamp = bench.stage(sender, number)
        gather(sender, lambda event, stamp=stamp: event == Staged(worker="w", stamp=stamp))
    with pytest.raises(UpdaterLostError, match="newer versions"):
        packed(delivery)
    assert value(receiver.poll(Have(), soon())) == 5


def test_what_was_given_up_is_begun_anew(bench: Bench) -> None:
    sender = bench.sender(bucket=BUCKET)
    bench.stage(sender, 1, size=50_000)
    receiver = bench.receiver(stream=True, bucket=BUCKET)
    for _ in range(3):
        for _ in receiver.poll(Have(), soon()).buckets():
            break
    assert value(receiver.poll(Have(), soon())) == 1


def test_the_trainer_is_lost_halfway(make_rig: Callable[..., Rig]) -> None:
    """The policy is no good, and is healed by the same version when the trainer is back."""
    rig = make_rig(f"?bucket={BUCKET}")
    updater = rig.updater(counters(1, 6, 20_000))
    policy = counters(0, 6, 20_000)
    receiver = rig.receiver(policy, stream=True, endpoint=updater.endpoint)
    updater.wait_for_workers(1)
    updater.push()
    session = receiver._receiver._station._session  # type: ignore[attr-defined]
    link, streams = session.link, session.intake._streams
    ask = streams.ask

    def hang_up(fetch: Any) -> None:
        ask(fetch)
        if fetch.start > BUCKET:
            with suppress(OSError):
                link._sock.shutdown(socket.SHUT_RDWR)

    streams.ask = hang_up
    assert receiver.pull(0.0) is None
    assert not receiver.ready
    assert receiver.pull(10.0) == seen(policy) == 1
    assert receiver.ready


class Trickle:
    """Between a worker and its trainer: what the trainer says passes at once up to so many bytes, then a few at a
    time, for ever."""

    def __init__(self, endpoint: str, freely: int) -> None:
        host, _, port = endpoint.removeprefix("nccl://").partition("?")[0].rpartition(":")
        self._trainer = host, int(port)
        self._freely = freely
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"nccl://127.0.0.1:{self._server.getsockname()[1]}?bucket={BUCKET}"
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        while True:
            worker, _ = self._server.accept()
            if self._over.is_set():
                worker.close()
                return
            trainer = socket.create_connection(self._trainer)
            for way in ((worker, trainer, False), (trainer, worker, True)):
                self._threads.append(threading.Thread(target=self._pass_on, args=way))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket, slowly: bool) -> None:
        passed = 0
        with source, suppress(OSError):
            source.settimeout(0.05)
            while not self._over.is_set():
                with suppress(TimeoutError):
                    data = source.recv(256 if slowly and passed > self._freely else 4096)
                    if not data:
                        break
                    target.sendall(data)
                    passed += len(data)
                    if slowly and passed > self._freely:
                        self._over.wait(0.01)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._over.set()
        with suppress(OSError), socket.create_connection(self._server.getsockname()):
            pass
        for thread in self._threads:
            thread.join(10)
        self._server.close()


@pytest.fixture
def trickle() -> Iterator[Callable[..., Trickle]]:
    opened: list[Trickle] = []

    def trickle(endpoint: str, freely: int) -> Trickle:
        opened.append(Trickle(endpoint, freely))
        return opened[-1]

    yield trickle
    for one in opened:
        one.close()


@pytest.mark.parametrize("staging", ["thread", "inline"])
def test_a_trickle_is_not_waited_for_without_end(bench: Bench, trickle: Callable[..., Trickle], staging: str) -> None:
    """Bytes come all the time, no piece takes long, and all of them many seconds: the receiver's timeout bounds it."""
    sender = bench.sender(bucket=BUCKET)
    bench.stage(sender, 1, size=50_000)
    slow = trickle(sender.endpoint, 3 * BUCKET)
    receiver = bench.receiver(stream=True, bucket=BUCKET, staging=staging, endpoint=slow.endpoint, patience=1.0)
    buckets = receiver.poll(Have(), soon()).buckets()
    begun, sizes = time.monotonic(), []
    with pytest.raises(UpdaterLostError, match=r"of 200\d\d\d bytes had come when they had been waited for 1 s"):
        sizes.extend(data.numel() for _, data in buckets)
    assert sum(sizes) >= BUCKET, "some pieces came"
    assert time.monotonic() - begun < 4.0


def test_there_has_to_be_a_copy_to_fetch_from(bench: Bench) -> None:
    bench.sender(keep=False)
    with pytest.raises(CapabilityError, match="keep=false"):
        bench.receiver(stream=True).poll(Have(), soon())


def test_memory_stays_under_two_buckets(make_rig: Callable[..., Rig]) -> None:
    """Of a worker in a process of its own, at its peak, beyond the policy."""
    rig = make_rig("?bucket=8MiB")
    updater = rig.updater({name: torch.ones(4_000_000) for name in "abcdef"})
    script = f"""
        import resource, torch
        from weightwire import WeightReceiver
        policy = {{name: torch.ones(4_000_000) for name in "abcdef"}}
        small = WeightReceiver({updater.endpoint!r}, {{name: policy[name] for name in "abcdef"}}, stream=True)
        small.wait(1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        small.wait(4)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
        small.close()
    """
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        updater.wait_for_workers(1)
        for _ in range(4):
            updater.push(wait="applied")
        out, _ = worker.communicate(timeout=60)
    finally:
        worker.kill()
        worker.wait()
    assert float(out) < 16
