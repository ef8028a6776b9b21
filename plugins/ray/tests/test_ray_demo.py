from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[3] / "examples" / "cartpole.py"


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_the_demo_learns_over_ray_and_takes_it_down_again() -> None:
    pytest.importorskip("gymnasium")
    done = subprocess.run(
        [sys.executable, str(DEMO), "--backend", "ray", "--seconds", "120"],
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Reached: mean return" in done.stdout
    assert "versions pushed to 2 workers over ray://" in done.stdout
