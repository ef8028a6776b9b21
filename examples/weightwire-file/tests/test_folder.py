"""What is in the folder: readable by others, whole, bounded, and safe from two trainers at once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from weightwire import WeightReceiver, WeightUpdater
from weightwire.errors import EndpointError, StaleUpdaterError, WaitTimeout, WireError
from weightwire.testing.states import Tied, counters, makeable, random_bits, seen, snapshot


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run1"


@pytest.fixture
def updater(folder: Path) -> Iterator[WeightUpdater]:
    with WeightUpdater(f"file://{folder}?keep=3", timeout=10.0) as updater:
        yield updater


def versions(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*/*.safetensors"))


def test_any_reader_of_safetensors_reads_a_plain_version(folder: Path, updater: WeightUpdater) -> None:
    state = {f"of.{name}": random_bits(name, (3, 5), seed) for seed, name in enumerate(makeable())}
    plain = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool")
    plain += tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
    state = {name: tensor for name, tensor in state.items() if name.removeprefix("of.") in plain}
    state |= {"0-dim": torch.tensor(7, dtype=torch.int16), "empty": torch.zeros(0, 8), "odd": torch.ones(13) > 0}
    assert len(state) == len(plain) + 3
    updater.push(state)
    (path,) = folder.glob("*/*.safetensors")
    assert snapshot(load_file(path)) == snapshot(state)


def test_what_safetensors_has_no_words_for_is_bytes(folder: Path, updater: WeightUpdater) -> None:
    policy = Tied()
    updater.push(policy)
    updater.push({"wave": torch.zeros(3, dtype=torch.complex128)})
    for path in folder.glob("*/*.safetensors"):
        loaded = load_file(path)
        assert list(loaded) == ["weightwire.payload"]
        assert loaded["weightwire.payload"].dtype == torch.uint8


def test_only_the_newest_are_kept(folder: Path, updater: WeightUpdater) -> None:
    for version in range(1, 8):
        updater.push(counters(version))
    assert versions(folder) == [f"{number:012d}.safetensors" for number in (5, 6, 7)]


def test_a_version_that_is_read_is_not_removed(folder: Path, updater: WeightUpdater) -> None:
    from weightwire_file.locks import take

    updater.push(counters(1))
    (first,) = folder.glob("*/*.safetensors")
    lease = take(first, shared=True)
    assert lease is not None
    for version in range(2, 8):
        updater.push(counters(version))
    assert first.exists()
    os.close(lease)
    updater.push(counters(8))
    assert not first.exists()
    assert len(versions(folder)) == 3


def test_what_somebody_may_still_ask_for_is_kept(folder: Path) -> None:
    place = f"file://{folder}"
    with (
        WeightUpdater(place) as updater,
        WeightReceiver(place, worker="a") as a,
        WeightReceiver(place, worker="b") as b,
    ):
        updater.wait_for_workers(2, 10.0)
        updater.push(counters(1))
        updater.push(counters(2), workers=["a"])
        updater.push(counters(3), workers=["a"])
        assert [int(name[:12]) for name in versions(folder)] == [1, 3]
        assert (a.pull(10.0), b.pull(10.0)) == (3, 1)


def test_two_trainers_are_fenced_by_epoch(folder: Path, updater: WeightUpdater) -> None:
    """The lock of the first is lost, as on a network that was cut: it may not disturb the second any more."""
    receiver = WeightReceiver(f"file://{folder}", counters(0), timeout=10.0)
    updater.push(counters(1))
    assert receiver.pull() == 1
    (folder / "trainer.lock").unlink()
    with WeightUpdater(f"file://{folder}", start_version=10) as second:
        assert second.run > updater.run
        with pytest.raises(StaleUpdaterError, match=str(second.run)):
            updater.push(counters(2))
        second.push(counters(11))
        assert receiver.pull(10.0) == seen(receiver.weights) == 11
        assert receiver.run == second.run
    receiver.close()


def test_half_written_files_are_never_read(folder: Path, updater: WeightUpdater) -> None:
    updater.push(counters(1))
    home = next(folder.glob("*/manifest.json")).parent
    (home / "000000000009.safetensors.part").write_bytes(b"half")
    (home / "manifest.json.part").write_text("{")
    (home / "workers" / f"{'0' * 32}-1.hello.part").write_bytes(b"half")
    with WeightReceiver(f"file://{folder}", counters(0)) as receiver:
        assert receiver.pull() == 1
        updater.push(counters(2))
        assert receiver.pull(10.0) == 2


@pytest.mark.parametrize("damage", ["truncated", "no head", "another version"])
def test_damaged_files_are_named(folder: Path, updater: WeightUpdater, damage: str) -> None:
    updater.push(counters(1))
    (first,) = folder.glob("*/*.safetensors")
    updater.push(counters(2))
    second = first.with_name("000000000002.safetensors")
    data = second.read_bytes()
    second.write_bytes(
        {"truncated": data[:-1], "no head": bytes(len(data)), "another version": first.read_bytes()}[damage]
    )
    with WeightReceiver(f"file://{folder}", counters(0)) as receiver:
        with pytest.raises(WireError, match=second.name):
            receiver.pull()
        updater.push(counters(3))
        assert receiver.pull(10.0) == seen(receiver.weights) == 3


def test_a_full_disk_is_said_before_anything_moves(folder: Path) -> None:
    """The limit on the size of files stands in for it: the same error from the same calls."""
    script = f"""
        import resource
        from weightwire import WeightReceiver, WeightUpdater
        from weightwire.errors import StorageFullError
        from weightwire.testing.states import counters, seen

        updater = WeightUpdater("file://{folder}")
        receiver = WeightReceiver("file://{folder}")
        updater.push(counters(1))
        assert receiver.pull() == 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            updater.push(counters(2, 6, 1 << 20))
        except StorageFullError as exc:
            print(exc)
        assert updater.version == 1 and receiver.pull() is None
        updater.push(counters(2))
        assert receiver.pull() == seen(receiver.weights) == updater.version == 2
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "no room for" in run.stdout
    assert "bytes are free" in run.stdout
    assert not list(folder.glob("*/*.part"))


def test_who_cannot_say_hello_tries_again(folder: Path) -> None:
    script = f"""
        import resource, time
        from weightwire import WeightReceiver, WeightUpdater
        from weightwire.errors import StorageFullError
        from weightwire.testing.states import counters, seen

        early = WeightReceiver("file://{folder}", counters(0), worker="early")
        updater = WeightUpdater("file://{folder}")
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
        refused = 0
        for call in (lambda: early.pull(10.0), lambda: WeightReceiver("file://{folder}", worker="late")):
            try:
                call()
            except StorageFullError:
                refused += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        assert refused == 2 and not updater.workers
        late = WeightReceiver("file://{folder}", counters(0), worker="late")
        updater.push(counters(1))
        assert early.pull(10.0) == late.pull(10.0) == seen(early.weights) == 1
        assert sorted(updater.workers) == ["early", "late"]
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr


def test_old_trainers_are_swept_but_nothing_else(folder: Path) -> None:
    for version in range(1, 4):
        with WeightUpdater(f"file://{folder}") as updater:
            updater.push(counters(version))
            if version == 1:
                stranger = next(folder.glob("*/manifest.json")).with_name("notes.txt")
                stranger.write_text("mine")
    assert stranger.exists()
    assert len(list(folder.glob("*/manifest.json"))) == 1
    assert sorted(path.name for path in folder.iterdir() if path.is_dir())[1] == str(updater.run)


def test_a_closed_run_stays_until_the_next_one_has_pushed(folder: Path) -> None:
    with WeightUpdater(f"file://{folder}") as updater:
        updater.push(counters(1))
    assert seen(load_file(next(folder.glob("*/*.safetensors")))) == 1
    with WeightUpdater(f"file://{folder}") as updater:
        assert versions(folder) == ["000000000001.safetensors"]
        updater.push(counters(2))
        assert seen(load_file(next(folder.glob("*/*.safetensors")))) == 2


def test_errors_name_the_folder(tmp_path: Path) -> None:
    for place in ("file", "file://run1"):
        with pytest.raises(EndpointError, match="absolute folder"):
            WeightUpdater(place)
    (tmp_path / "taken").write_text("")
    with pytest.raises(EndpointError, match="taken"):
        WeightUpdater(f"file://{tmp_path}/taken")
    with WeightReceiver(f"file://{tmp_path}/nowhere") as receiver:
        with pytest.raises(WaitTimeout, match=r"nobody has been in .*nowhere yet"):
            receiver.pull(0.1)
        assert not (tmp_path / "nowhere").exists()


def test_no_files_are_left_by_workers(folder: Path, updater: WeightUpdater) -> None:
    with WeightReceiver(f"file://{folder}", counters(0)) as receiver:
        updater.push(counters(1))
        assert receiver.pull() == 1
        updater.wait(timeout=10.0)
    assert updater.workers == {}
    assert list(folder.glob("*/workers/*")) == []
