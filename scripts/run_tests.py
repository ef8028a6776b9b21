"""The tests, in two processes side by side: they wait for each other's processes far more than they compute.

``python scripts/run_tests.py [pytest's arguments]``. What the first part says is printed at once, what the others say
when all have ended. Where folders or files are named, these are run, in one process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]
ELSEWHERE = ("tests/collectors", "tests/test_sharded.py", "tests/test_interrupts.py")
PARTS = (
    ["core/tests", "plugins/ipc/tests", "tests", *(f"--ignore={path}" for path in ELSEWHERE)],
    ["plugins/vanilla/tests", "plugins/ray/tests", "plugins/nccl/tests", *ELSEWHERE],
)
NOTHING = 5  # pytest's exit status where nothing was selected


def main(arguments: list[str]) -> int:
    pytest = [sys.executable, "-m", "pytest", "-m", "not soak", "--durations=15", "--budget", *arguments]
    if any((ROOT / argument.partition("::")[0]).exists() for argument in arguments if not argument.startswith("-")):
        return subprocess.call(pytest, cwd=ROOT)
    begun = time.monotonic()
    with ExitStack() as stack:
        runs = []
        for number, part in enumerate(PARTS):
            said = stack.enter_context(tempfile.TemporaryFile()) if number else None
            cache = ["-o", f"cache_dir=.pytest_cache/{number}"]
            run = subprocess.Popen([*pytest, *cache, *part], cwd=ROOT, stdout=said, stderr=said and subprocess.STDOUT)
            stack.callback(run.wait)
            stack.callback(run.kill)
            runs.append((run, said))
        found = [run.wait() for run, _ in runs]
        for _, said in runs:
            if said is not None:
                said.seek(0)
                sys.stdout.flush()
                sys.stdout.buffer.write(said.read())
    print(f"all parts: {time.monotonic() - begun:.0f} s", flush=True)
    failed = [status for status in found if status not in (0, NOTHING)]
    return failed[0] if failed else min(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
