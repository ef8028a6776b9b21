"""What several modules need: a Ray cluster, and environments to install this checkout's packages into."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

COMMANDS = {
    # What a build needs, and what a package needs, is there already.
    "pip": 'shift; exec python -m pip install --quiet --no-deps --no-build-isolation "$@"',
    "weightwire": 'exec python -m weightwire "$@"',
}
"""As scripts in the environment, which has to be first on the path. Of pip there is ``install`` only."""


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[str]:
    """A running cluster's address; this process is connected to it."""
    import ray
    from ray.cluster_utils import Cluster

    if ray.is_initialized():  # by another module, and lives on
        yield ray.get_runtime_context().gcs_address
        return
    head = {"num_cpus": 3, "object_store_memory": 512 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False, logging_level="ERROR")
    try:
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="session")
def environment() -> Callable[[Path], Path]:
    """``environment(folder)``: the Python of a virtual environment there."""
    return _environment


def _environment(folder: Path) -> Path:
    """It sees what is installed in this one, and keeps to itself what is installed in it; nothing is fetched."""
    venv.create(folder)
    python = folder / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    inside = Path(subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout.strip())
    outside = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    inside.joinpath("outside.pth").write_text("\n".join(f"import site; site.addsitedir({path!r})" for path in outside))
    for command, call in COMMANDS.items():
        script = folder / "bin" / command
        script.write_text(f"#!/bin/sh\n{call}\n")
        script.chmod(0o755)
    return python
