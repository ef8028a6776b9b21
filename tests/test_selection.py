"""Each process resolves its backend from the endpoint's text: nothing but that text crosses to a worker."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent

import pytest

SECONDS = 60.0

# A fake installed distribution, and the function that a worker runs: importable there, as a user's own module is.
PLUGIN = """
    from weightwire import BackendInfo, hookimpl

    @hookimpl
    def weightwire_backend():
        return BackendInfo(summary="chosen by its text")

    @hookimpl
    def weightwire_make_sender(): ...

    @hookimpl
    def weightwire_make_receiver(): ...
"""
WORKER = """
    import json
    import os
    import sys

    def resolve(text):
        from weightwire import WeightwireError, parse_endpoint
        from weightwire.registry import open_backend

        try:
            backend = open_backend(parse_endpoint(text))
        except WeightwireError as exc:
            return {"pid": os.getpid(), "error": type(exc).__name__}
        return {"pid": os.getpid(), "name": backend.name, "distribution": backend.distribution,
                "version": backend.version, "summary": backend.info.summary}

    def resolve_into(connection, text):
        connection.send_bytes(json.dumps(resolve(text)).encode())

    if __name__ == "__main__":
        with open(f"{sys.argv[2]}.{os.environ['RANK']}", "w") as file:
            json.dump(resolve(sys.argv[1]), file)
"""
INFO = "Metadata-Version: 2.1\nName: weightwire-chosen\nVersion: 4.2\nSummary: fake\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    info = tmp_path / "weightwire_chosen-4.2.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(INFO)
    info.joinpath("entry_points.txt").write_text("[weightwire.backends]\nchosen = selection_plugin\n")
    tmp_path.joinpath("selection_plugin.py").write_text(dedent(PLUGIN))
    tmp_path.joinpath("selection_worker.py").write_text(dedent(WORKER))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "selection_worker", raising=False)
    return tmp_path


def resolved_by_spawn(text: str) -> dict[str, object]:
    import selection_worker  # type: ignore[import-not-found]

    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    worker = spawn.Process(target=selection_worker.resolve_into, args=(there, text), daemon=True)
    worker.start()
    there.close()
    try:
        assert here.poll(SECONDS), f"no answer from the worker in {SECONDS} s"
        answer: dict[str, object] = json.loads(here.recv_bytes())
        worker.join(SECONDS)
        assert worker.exitcode == 0
        assert answer.pop("pid") == worker.pid
        return answer
    finally:
        worker.kill()
        worker.join()
        here.close()


CHOSEN = {"name": "chosen", "distribution": "weightwire-chosen", "version": "4.2", "summary": "chosen by its text"}


@pytest.mark.parametrize("text", ["chosen://policy?allow_pickle=true", "chosen@weightwire-chosen"])
def test_chosen_in_a_spawned_worker(text: str, site: Path) -> None:
    assert resolved_by_spawn(text) == CHOSEN
    assert "selection_plugin" not in sys.modules, "the trainer did not need it"


def test_chosen_by_its_module_in_a_spawned_worker(site: Path) -> None:
    answer = resolved_by_spawn("import:selection_plugin://policy")
    assert answer == CHOSEN | {"name": "import:selection_plugin", "distribution": "", "version": ""}


def test_not_there_in_a_spawned_worker(site: Path) -> None:
    assert resolved_by_spawn("chosn://policy") == {"error": "UnknownBackendError"}


@pytest.mark.parametrize("name", ["vanilla", "ipc"])
def test_installed_backends_in_a_spawned_worker(name: str, site: Path) -> None:
    answer = resolved_by_spawn(f"{name}://policy")
    assert (answer["name"], answer["version"]) == (name, version(f"weightwire-{name}"))


def test_chosen_under_torchrun(site: Path) -> None:
    answers = site / "answer"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += [str(site / "selection_worker.py"), "chosen://policy", str(answers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(Path(f"{answers}.{rank}").read_text()) for rank in range(2)]
    assert found[0].pop("pid") != found[1].pop("pid")
    assert found == [CHOSEN, CHOSEN]
