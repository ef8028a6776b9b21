"""Run directory, sockets, lock files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weightwire import rundir
from weightwire.errors import EndpointError, EndpointInUseError, StaleUpdaterError, WeightwireError
from weightwire.transport import Deadline, Have

NOW = Deadline.after(0)

HOLD = """
import os
import sys
from weightwire.endpoint import parse
from weightwire.transport import Deadline, SenderContext
from weightwire_ipc.options import IpcOptions
from weightwire_ipc.sender import IpcSender
if len(sys.argv) > 3:
    os.setgroups([])
    os.setgid(int(sys.argv[3]))
    os.setuid(int(sys.argv[3]))
sender = IpcSender(parse(sys.argv[1]), IpcOptions(), SenderContext(epoch=int(sys.argv[2]), deadline=Deadline.after(5)))
print(sender.endpoint, flush=True)
sys.stdin.read()
"""


@contextmanager
def updater_elsewhere(
    endpoint: str, epoch: int = 1, user: int | None = None, **more: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process that has a place until it is killed."""
    arguments = [endpoint, str(epoch), *([] if user is None else [str(user)])]
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **more,
    ) as process:
        assert process.stdout is not None
        process.said = process.stdout.readline().strip()  # type: ignore[attr-defined]
        try:
            yield process
        finally:
            process.kill()


def names(private: Path) -> list[str]:
    return sorted(path.suffix for path in private.iterdir())


def test_files_are_private_and_gone_after_close(bench: Any, private: Path) -> None:
    umask = os.umask(0)
    try:
        sender = bench.sender()
    finally:
        os.umask(umask)
    assert names(private) == [".lock", ".sock"]
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in private.iterdir()} == {0o600}
    sender.close(NOW)
    assert names(private) == []


@pytest.mark.parametrize("location", ["../../x", "/etc/passwd", "a/b c", "x" * 2000, "@home", "é", "."])
def test_a_location_is_a_label_and_no_path(bench: Any, private: Path, location: str) -> None:
    sender, receiver = bench.sender(location), bench.receiver(location=location)
    stamp = bench.stage(sender, 1)
    assert receiver.poll(Have(), Deadline.after(5)).header.stamp == stamp
    assert names(private) == [".lock", ".sock"]
    assert {path.parent for path in private.iterdir()} == {private}


def test_locations_that_look_alike_are_two(bench: Any) -> None:
    bench.sender("a/b")
    bench.sender("a-b")
    bench.sender("a_b")


def test_a_run_directory_with_a_long_name(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path.joinpath(*["d" * 100] * 3)
    deep.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    sender, receiver = bench.sender(), bench.receiver()
    bench.stage(sender, 1)
    assert receiver.poll(Have(), Deadline.after(5)) is not None


def test_an_empty_location_leaves_no_name(bench: Any, private: Path) -> None:
    sender = bench.sender("")
    assert sender.endpoint.startswith("ipc://@")
    receiver = bench.receiver(location=sender.endpoint.removeprefix("ipc://"))
    bench.stage(sender, 1)
    assert receiver.poll(Have(), Deadline.after(5)) is not None
    assert not private.exists()
    with pytest.raises(EndpointInUseError, match="another updater listens"):
        bench.sender(sender.endpoint.removeprefix("ipc://"))


def test_a_second_updater_is_refused_and_told_who_is_there(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with updater_elsewhere("ipc://policy") as other:
        with pytest.raises(EndpointInUseError, match=f"process {other.pid} .*WEIGHTWIRE_JOB"):
            bench.sender()
        monkeypatch.setenv("WEIGHTWIRE_JOB", "mine")
        bench.sender()
        with pytest.raises(EndpointInUseError, match="WEIGHTWIRE_JOB=mine"):
            bench.sender()


def test_an_updater_with_another_environment_is_found(bench: Any, private: Path, tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "XDG_RUNTIME_DIR"} | {"TMPDIR": str(tmp_path)}
    with updater_elsewhere("ipc://policy", env=env), pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path))
        with pytest.raises(EndpointInUseError):
            bench.sender()
        receiver = bench.receiver()
        receiver.poll(Have(), None)
        assert str(tmp_path / f"weightwire-{os.geteuid()}") in receiver.whereabouts
        assert "connected" in receiver.whereabouts


def test_a_dead_updater_is_replaced_with_a_newer_epoch(bench: Any, private: Path) -> None:
    with updater_elsewhere("ipc://policy", epoch=5_000_000) as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
    (private / "foreign.sock").touch()
    assert names(private) == [".lock", ".sock", ".sock"]
    sender = bench.sender()
    assert sender.epoch == 5_000_001
    found = json.loads(next(private.glob("*.lock")).read_text())
    assert (found["pid"], found["epoch"]) == (os.getpid(), 5_000_001)
    sender.close(NOW)
    assert [path.name for path in private.iterdir()] == ["foreign.sock"]


def test_an_updater_whose_lock_file_was_replaced_sends_no_more(bench: Any, private: Path) -> None:
    sender = bench.sender()
    lock = next(private.glob("*.lock"))
    lock.unlink()
    bench.stage(sender, 1)
    newer = bench.sender()
    assert newer.epoch > 0
    with pytest.raises(StaleUpdaterError):
        bench.stage(sender, 2)
    sender.close(NOW)
    assert lock.exists(), "it is not ours any more"


def test_an_updater_whose_directory_was_removed_says_so_once_and_is_fenced_off(
    bench: Any, private: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sender, worker = bench.sender(), bench.receiver()
    shutil.rmtree(private)
    for number in (1, 2):
        bench.stage(sender, number)
        assert worker.poll(Have(), Deadline.after(5)) is not None, "who is connected goes on"
    assert [record.message.count("was removed: workers that come now") for record in caplog.records] == [1]
    newer = bench.sender()
    assert newer.epoch > 0
    with pytest.raises(StaleUpdaterError):
        bench.stage(sender, 3)


@pytest.mark.parametrize("suffix", ["lock", "sock"])
@pytest.mark.parametrize("kind", ["directory", "pipe", "link"])
def test_what_is_not_ours_stays_and_is_named(bench: Any, private: Path, kind: str, suffix: str) -> None:
    private.mkdir(mode=0o700)
    path = private / (rundir.file_name("ipc", "policy") + "." + suffix)
    {"directory": Path.mkdir, "pipe": lambda path: os.mkfifo(path), "link": lambda path: path.symlink_to("x")}[kind](
        path
    )
    receiver = bench.receiver()
    assert receiver.poll(Have(), None) is None
    with pytest.raises(EndpointInUseError, match=rf"{path.name} is none of Weightwire's files .*Remove it"):
        bench.sender()
    assert os.path.lexists(path)
    elsewhere = bench.sender("elsewhere")
    assert elsewhere.epoch


def test_a_pipe_in_the_place_of_a_lock_keeps_nobody_waiting(
    bench: Any, private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private.mkdir(mode=0o700)
    os.mkfifo(private / (rundir.file_name("ipc", "policy") + ".lock"))
    other = tmp_path / "tmp"
    other.mkdir()
    monkeypatch.setattr(rundir, "candidates", lambda: [private, other / "weightwire"])
    monkeypatch.setattr(rundir, "create", lambda: (other / "weightwire").mkdir(mode=0o700) or other / "weightwire")
    assert bench.sender().epoch >= 1000


@pytest.mark.parametrize("text", ["", "{", "[]", '{"epoch": "soon"}', "\0" * 100])
def test_a_damaged_lock_file_does_no_harm(bench: Any, private: Path, text: str) -> None:
    bench.sender().close(NOW)
    private.mkdir(mode=0o700, exist_ok=True)
    (private / (rundir.file_name("ipc", "policy") + ".lock")).write_text(text)
    assert bench.sender().epoch >= 1000


def test_a_receiver_says_where_it_looked(bench: Any, private: Path) -> None:
    receiver = bench.receiver()
    assert receiver.poll(Have(), None) is None
    assert not receiver.connected
    for path in rundir.candidates():
        assert str(path) in receiver.whereabouts
    assert f"weightwire-{os.geteuid()}" in receiver.whereabouts
    assert str(private) in receiver.whereabouts


@pytest.mark.parametrize("fault", ["open", "link", "file"])
def test_a_run_directory_that_is_not_ours_alone_is_refused(bench: Any, private: Path, fault: str) -> None:
    if fault == "open":
        private.mkdir()
        private.chmod(0o755)
    elif fault == "link":
        private.symlink_to(private.parent)
    else:
        private.touch()
    with pytest.raises(WeightwireError, match=f"run directory {private} is "):
        bench.sender()
    receiver = bench.receiver()
    assert receiver.poll(Have(), None) is None
    assert "passed over" in receiver.whereabouts or "no such directory" in receiver.whereabouts


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_directory_is_refused(bench: Any, private: Path) -> None:
    private.mkdir(mode=0o700)
    os.chown(private, 65534, 65534)
    with pytest.raises(WeightwireError, match="belongs to user 65534"):
        bench.sender()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("location", ["policy", ""])
def test_another_user_cannot_connect(bench: Any, private: Path, location: str) -> None:
    sender = bench.sender(location)
    bench.stage(sender, 1)
    address = (
        f"\0weightwire-{sender.endpoint.removeprefix('ipc://@')}" if not location else str(next(private.glob("*.sock")))
    )
    script = """
        import os, socket, sys
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(5)
        try:
            sock.connect(sys.argv[1].replace("!", chr(0)))
            print(sock.recv(100))
        except OSError as exc:
            print(type(exc).__name__)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), address.replace("\0", "!")],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout.strip() == ("PermissionError" if location else "b''")
    assert sender.events(NOW) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_updater_is_not_trusted(bench: Any) -> None:
    name = "@" + "0" * 32
    with updater_elsewhere(f"ipc://{name}", user=65534) as other:
        assert other.said.endswith(name)  # type: ignore[attr-defined]
        receiver = bench.receiver(location=name)
        assert receiver.poll(Have(), Deadline.after(0.2)) is None
        assert "belongs to user 65534: not trusted" in receiver.whereabouts


def test_a_worker_cannot_listen_at_a_place_without_a_name(private: Path) -> None:
    import weightwire_ipc
    from weightwire.endpoint import parse

    with pytest.raises(EndpointError, match=r"hand updater\.endpoint on"):
        weightwire_ipc.weightwire_make_receiver(parse("ipc"), weightwire_ipc.IpcOptions(), None)  # type: ignore[arg-type]


def test_sockets_of_others_in_the_same_place_are_no_obstacle(bench: Any, private: Path) -> None:
    """Something that listens there but says nothing sensible."""
    private.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(private / (rundir.file_name("ipc", "policy") + ".sock")))
        other.listen()
        receiver = bench.receiver()
        receiver.poll(Have(), None)
        peer, _ = other.accept()
        with peer:
            peer.send(b"\1\0\0\0\0 no message")
            assert receiver.poll(Have(), Deadline.after(0.2)) is None
            assert not receiver.connected


def test_import_is_light_and_other_systems_are_told() -> None:
    script = """
        import sys
        import weightwire_ipc
        weightwire_ipc.weightwire_backend()
        assert not {"torch", "numpy"} & set(sys.modules), "heavy"
        sys.platform = "darwin"
        try:
            weightwire_ipc.weightwire_make_sender(None, None, None)
        except Exception as exc:
            print(type(exc).__name__, exc)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout.startswith("CapabilityError the backend 'ipc' needs Linux")
