"""What runs in an interpreter of its own: what is imported, what is started, what exit and ``ray.shutdown()`` do."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
import uuid

import pytest
import torch

from weightwire import CapabilityError, WeightReceiver
from weightwire_ray import process
from weightwire_ray.alias import refuse_alias


def run(script: str, *args: str, timeout: float = 60) -> str:
    """What a script says on stdout."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_address_where_no_cluster_answers_is_an_error_in_time() -> None:
    said = run(
        """
        import socket, time
        from weightwire import EndpointError, WeightReceiver, WeightUpdater
        silent = socket.create_server(("127.0.0.1", 0))
        for port in (1, silent.getsockname()[1]):
            for end in (WeightUpdater, WeightReceiver):
                begun = time.monotonic()
                try:
                    end(f"ray://policy?address=127.0.0.1:{port}", timeout=2)
                except EndpointError as exc:
                    print("no cluster answers" in str(exc), "ray status" in str(exc), time.monotonic() - begun < 8)
        try:
            WeightUpdater("ray://policy?address=local")
        except EndpointError as exc:
            print("would start a cluster" in str(exc))
        """
    )
    assert set(said.split()) == {"True"}
    assert len(said.split()) == 13


def test_looking_at_the_plugin_imports_neither_ray_nor_torch() -> None:
    said = run(
        """
        import sys
        from weightwire.endpoint import parse
        from weightwire.registry import open_backend
        info = open_backend(parse("ray://policy")).info
        heavy = [name for name in ("ray", "torch", "numpy") if name in sys.modules]
        print(info.pickles, info.capabilities >= {"alias", "hosts", "late_join", "processes", "subset_workers"}, heavy)
        """
    )
    assert said.strip() == "engine True []"


def test_no_end_starts_ray() -> None:
    said = run(
        """
        import ray
        from weightwire import WeightReceiver, WeightUpdater
        from weightwire.errors import WeightwireError
        for end in (WeightUpdater, WeightReceiver):
            try:
                end("ray://policy")
            except WeightwireError as exc:
                print("ray.init()" in str(exc), ray.is_initialized())
        """
    )
    assert said.split() == ["True", "False"] * 2


def test_nothing_starts_ray_again_after_its_shutdown(cluster: str) -> None:
    said = run(
        """
        import sys, threading, time
        import ray
        from weightwire import WeightReceiver, WeightUpdater
        from weightwire.errors import ClosedError, UpdaterLostError
        from weightwire.testing.states import counters, seen
        ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False, logging_level="ERROR")
        updater = WeightUpdater("ray://shutdown", timeout=60)
        receiver = WeightReceiver("ray://shutdown?alias=force", counters(0), apply="alias", timeout=60)
        updater.wait_for_workers(1)
        updater.push(counters(1))
        receiver.pull()
        ray.shutdown()
        print(receiver.pull(0.0), seen(receiver.weights))
        try:
            updater.push(counters(2))
        except ClosedError as exc:
            print("closed", "Ray was shut down" in str(exc))
        try:
            receiver.wait(2, 1.0)
        except UpdaterLostError as exc:
            print("lost", "Ray was shut down" in str(exc))
        print(updater.workers != None, receiver.connected)
        updater.close(), receiver.close()
        until = time.monotonic() + 10
        while any("weightwire" in t.name for t in threading.enumerate()) and time.monotonic() < until:
            time.sleep(0.01)
        print(ray.is_initialized(), [t.name for t in threading.enumerate() if "weightwire" in t.name])
        ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False, logging_level="ERROR")
        with WeightUpdater("ray://shutdown", timeout=60) as updater:
            with WeightReceiver("ray://shutdown", counters(0), timeout=60) as receiver:
                updater.push(counters(7))
                print(receiver.pull(), seen(receiver.weights))
        """,
        cluster,
    )
    assert said.splitlines() == [
        "None 1",
        "closed True",
        "lost True",
        "True False",
        "False []",
        "1 7",
    ]


def test_a_shutdown_amid_pushes_and_pulls_is_a_typed_error(cluster: str) -> None:
    """Whatever Ray raises then, in whichever of our threads."""
    said = run(
        """
        import logging, sys, threading
        import ray
        from weightwire import WeightReceiver, WeightUpdater
        from weightwire.errors import ClosedError, UpdaterLostError, WaitTimeout
        from weightwire.testing.states import counters, seen
        logging.basicConfig(level=logging.WARNING)
        for round_ in range(3):
            ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False, logging_level="ERROR")
            updater = WeightUpdater("ray://amid", timeout=60)
            receiver = WeightReceiver("ray://amid", counters(0, 6, 100_000), timeout=60)
            updater.push(counters(1, 6, 100_000))
            receiver.pull()
            timer = threading.Timer(0.05 + 0.03 * round_, ray.shutdown)
            timer.start()
            try:
                while True:
                    updater.push(counters(1, 6, 100_000), wait="none")
                    receiver.pull(0.0)
            except ClosedError:
                print("closed")
            timer.join()
            receiver.close(), updater.close()
            print(ray.is_initialized(), seen(receiver.weights))
        """,
        cluster,
    )
    assert said.splitlines() == ["closed", "False 1"] * 3


def test_a_driver_that_ends_says_goodbye(cluster: str, place: str) -> None:
    from weightwire import WeightUpdater
    from weightwire.testing.states import counters
    from weightwire.testing.workers import until

    with WeightUpdater(place, timeout=60) as updater:
        updater.push(counters(1))
        run(
            """
            import sys
            from weightwire import WeightReceiver
            WeightReceiver(sys.argv[1], worker="driver").pull()
            """,
            f"{place}?address={cluster}",
        )
        until(lambda: not updater.workers, "its goodbye")
        assert updater.push(counters(2)).lost == ()


def test_a_full_store_is_a_typed_error_and_the_old_version_lives_on() -> None:
    """A cluster of its own, whose disk counts as full: else Ray would go on there."""
    said = run(
        """
        import ray, torch
        from weightwire import StorageFullError, WeightReceiver, WeightUpdater
        full = {"automatic_object_spilling_enabled": False, "local_fs_capacity_threshold": 0.0}
        ray.init(
            address="local", num_cpus=1, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False,
            configure_logging=False, logging_level="ERROR", _system_config=full,
        )
        updater, receiver = WeightUpdater("ray://full", timeout=60), WeightReceiver("ray://full", timeout=60)
        updater.push({"a": torch.ones(10)})
        receiver.pull()
        try:
            updater.push({f"a{i}": torch.zeros(5 << 20) for i in range(6)})
        except StorageFullError as exc:
            print("of its 125829120 bytes" in str(exc))
        print(updater.version, receiver.pull(0.1), int(receiver.weights["a"][0]))
        print(updater.push({"a": torch.ones(10)}).version)
        updater.close(), receiver.close(), ray.shutdown()
        """
    )
    assert said.splitlines() == ["True", "1 None 1", "2"]


def test_the_kernel_says_who_lives() -> None:
    me = os.getpid()
    assert not process.gone(me, process.started(me))
    assert process.gone(me, process.started(me) - 1), "another one of that number"
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", "pass"], os.environ)
    since = process.started(child)
    deadline = time.monotonic() + 20
    while not process.gone(child, since):
        assert time.monotonic() < deadline, "a zombie counts as gone"
    os.waitpid(child, 0)
    assert process.gone(child, since)
    assert process.started(child) == 0


def test_alias_of_a_policy_that_is_trained_needs_to_be_asked_for_twice() -> None:
    endpoint, policy = f"ray://alias-{uuid.uuid4().hex[:8]}", torch.nn.Linear(2, 2)
    with pytest.raises(CapabilityError, match=r"training mode.*alias=force"):
        WeightReceiver(endpoint, policy, apply="alias")
    policy.eval()
    with pytest.raises(CapabilityError, match="'weight' requires grad"):
        WeightReceiver(endpoint, policy, apply="alias")
    refuse_alias("")
