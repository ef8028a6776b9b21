"""The tests, in two processes side by side: they wait for each other's processes far more than they compute.

``python scripts/run_tests.py [pytest's arguments]``. What the second half says is printed when the first has ended.
Where folders or files are named, these are run, in one process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
HALVES = (
    ["core/tests", "plugins/vanilla/tests", "plugins/ipc/tests", "tests", "--ignore=tests/collectors"],
    ["plugins/ray/tests", "plugins/nccl/tests", "tests/collectors"],
)
NOTHING = 5  # pytest's exit status where nothing was selected


def main(arguments: list[str]) -> int:
    pytest = [sys.executable, "-m", "pytest", "-m", "not soak", "--durations=15", "--budget", *arguments]
    if any((ROOT / argument.partition("::")[0]).exists() for argument in arguments if not argument.startswith("-")):
        return subprocess.call(pytest, cwd=ROOT)
    begun = time.monotonic()
    with tempfile.TemporaryFile() as said:
        cache = ["-o", "cache_dir=.pytest_cache/second"]
        second = subprocess.Popen([*pytest, *cache, *HALVES[1]], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        try:
            found = [subprocess.call([*pytest, *HALVES[0]], cwd=ROOT), second.wait()]
        finally:
            second.kill()
            second.wait()
        said.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(said.read())
    print(f"both halves: {time.monotonic() - begun:.0f} s", flush=True)
    failed = [status for status in found if status not in (0, NOTHING)]
    return failed[0] if failed else min(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
