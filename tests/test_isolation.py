"""Environments with the core and a single plugin: it works end to end, the others say what to install, and nobody but
ray's own plugin ever tries to import ray."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

PLUGINS = ("vanilla", "ipc", "ray", "nccl")
PLACES = {"ipc": "ipc", "nccl": "nccl://127.0.0.1:0"}  # any that is free: the trainer says which
LIMIT = 90.0  # seconds that a program here may take

# In every process of an environment without ray: who asks for it, and is of the core or a plugin, is written down.
GUARD = """
    import os, sys

    class Guard:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] != "ray":
                return None
            frame = sys._getframe(1)
            while frame and frame.f_globals.get("__name__", "").startswith("importlib"):
                frame = frame.f_back
            asker = frame.f_globals.get("__name__", "") if frame else ""
            if asker.partition(".")[0].startswith("weightwire"):
                with open(os.environ["RAY_WAS_TRIED_BY"], "a") as file:
                    print(asker, file=file)
                raise RuntimeError(f"{asker} tried to import {name}")

    sys.meta_path.insert(0, Guard())
"""
# Said by a trainer in each environment: all that it finds, and how the others fail.
TRAINER = """
    import sys
    import torch
    from weightwire import UnknownBackendError, WeightUpdater

    def others_fail(mine):
        for name in ("vanilla", "ipc", "ray", "nccl"):
            if name != mine:
                try:
                    WeightUpdater(f"{name}://127.0.0.1:0", {"w": torch.zeros(1)})
                except UnknownBackendError as exc:
                    assert f"pip install weightwire-{name}" in str(exc), exc
                else:
                    raise AssertionError(f"{name} is there")

    def push(endpoint, mine):
        with WeightUpdater(endpoint, {"w": torch.arange(1000.0)}, timeout=60) as updater:
            print(updater.endpoint, flush=True)
            updater.wait_for_workers(1)
            updater.push(wait="applied")
            others_fail(mine)

    if __name__ == "__main__":
        push(sys.argv[1], sys.argv[2])
"""
WORKER = """
    import sys
    import torch
    from weightwire import WeightReceiver

    def pull(endpoint):
        with WeightReceiver(endpoint, {"w": torch.zeros(1000)}, timeout=60) as receiver:
            assert receiver.pull() == 1
            assert torch.equal(receiver.weights["w"], torch.arange(1000.0))
            return 1

    if __name__ == "__main__":
        print(pull(sys.argv[1]))
"""
IN_ONE_PROCESS = """
    import threading
    from trainer import push
    from worker import pull

    pulling = threading.Thread(target=pull, args=("vanilla://here",))
    pulling.start()
    push("vanilla://here", "vanilla")
    pulling.join()
"""
IN_AN_ACTOR = """
    import os
    import ray
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
             object_store_memory=80_000_000, runtime_env={"env_vars": {"PYTHONPATH": os.path.dirname(__file__)}})
    from trainer import push

    @ray.remote(num_cpus=1)
    def act(endpoint):
        from worker import pull
        return pull(endpoint)

    applied = act.remote("ray://policy")
    push("ray://policy", "ray")
    assert ray.get(applied, timeout=60) == 1
    ray.shutdown()
"""
# Every module of the core and of these plugins; one that cannot be imported lacks something that is not ours.
EVERYTHING = """
    import importlib, pkgutil, sys

    for package in ("weightwire", "weightwire_vanilla", "weightwire_ipc", "weightwire_nccl"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                try:
                    importlib.import_module(module.name)
                except ImportError as exc:
                    assert "weightwire" not in (exc.name or ""), (module.name, exc)
"""


class Environment:
    """A virtual environment with everything that this one has, but of ours only the core and these plugins."""

    def __init__(self, folder: Path, *plugins: str) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", folder / "env"], check=True)
        self.python = folder / "env" / "bin" / "python"
        self._folder = folder
        self._tried = folder / "tried"
        (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
        hidden = r"__pycache__|sitecustomize|(_editable_impl_)?weightwire" + ("" if "ray" in plugins else r"|ray\b")
        for entry in (entry for folder in map(Path, site.getsitepackages()) for entry in folder.iterdir()):
            if not re.match(hidden, entry.name):
                (packages / entry.name).symlink_to(entry)
        for name in ("weightwire", *(f"weightwire-{plugin}" for plugin in plugins)):
            _install(distribution(name), packages)
        if "ray" not in plugins:
            (packages / "sitecustomize.py").write_text(dedent(GUARD))
        for name, text in (("trainer", TRAINER), ("worker", WORKER)):
            self.program(name, text)

    def program(self, name: str, text: str) -> Path:
        path = self._folder / f"{name}.py"
        path.write_text(dedent(text))
        return path

    def start(self, program: Path, *arguments: str) -> subprocess.Popen[str]:
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RAY_ADDRESS")
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        return subprocess.Popen(
            [self.python, program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._folder,
            env={**kept, "OMP_NUM_THREADS": "1", "RAY_WAS_TRIED_BY": str(self._tried)},
        )

    def run(self, program: Path, *arguments: str) -> None:
        succeed(self.start(program, *arguments))

    def ray_was_tried_by(self) -> str:
        return self._tried.read_text() if self._tried.exists() else ""


def _install(ours: Distribution, packages: Path) -> None:
    """What a wheel would bring, editable here or not: the package, and the metadata by which it is found."""
    package = ours.name.replace("-", "_")
    found = find_spec(package)
    assert found is not None
    assert found.origin is not None
    (packages / package).symlink_to(Path(found.origin).parent)
    info = packages / f"{package}-{ours.version}.dist-info"
    info.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        text = ours.read_text(name)
        if text:
            (info / name).write_text(text)


def succeed(*programs: subprocess.Popen[str]) -> None:
    try:
        for program in programs:
            out, _ = program.communicate(timeout=LIMIT)
            assert program.returncode == 0, out
    finally:
        for program in programs:
            program.kill()
            program.wait(10)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_core_and_one_plugin(plugin: str, tmp_path: Path) -> None:
    environment = Environment(tmp_path, plugin)
    if plugin == "vanilla":
        environment.run(environment.program("both", IN_ONE_PROCESS))
    elif plugin == "ray":
        environment.run(environment.program("both", IN_AN_ACTOR))
    else:
        trainer = environment.start(tmp_path / "trainer.py", PLACES[plugin], plugin)
        try:
            assert trainer.stdout is not None
            endpoint = trainer.stdout.readline().strip()
            succeed(environment.start(tmp_path / "worker.py", endpoint), trainer)
        finally:
            trainer.kill()
            trainer.wait(10)
    assert environment.ray_was_tried_by() == ""


def test_no_module_tries_ray(tmp_path: Path) -> None:
    """Not even one that is imported only for what the programs above do not do."""
    environment = Environment(tmp_path, "vanilla", "ipc", "nccl")
    environment.run(environment.program("everything", EVERYTHING))
    assert environment.ray_was_tried_by() == ""
