#!/usr/bin/env bash
# Runs every test that is marked `cuda`, in all packages, and prints what a GPU was found and what came of it: the text
# to be kept in docs/gpu.md. Ends within eight minutes, whatever hangs.
#
#   scripts/gpu_check.sh                  with the python that has torch (CUDA build) and the packages' test extras
#   PYTHON=.venv/bin/python scripts/gpu_check.sh
#   LIMIT=300 scripts/gpu_check.sh        seconds in all
#
# Packages that are not installed are taken from this tree.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-460}

# Entry points are metadata: what is not installed is installed without its dependencies, which this image must have.
missing=()
for folder in core plugins/*/; do
    name=$(sed -n 's/^name = "\(.*\)"/\1/p' "$folder/pyproject.toml" | head -n 1)
    [ -n "$name" ] || continue
    "$PYTHON" -c "import importlib.metadata as m, sys; m.version(sys.argv[1])" "$name" 2>/dev/null || missing+=(-e "$folder")
done
if [ ${#missing[@]} -gt 0 ]; then
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation "${missing[@]}" || exit 2
fi

echo "== machine"
date -u +"%Y-%m-%d %H:%M UTC"
uname -srm
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
"$PYTHON" - <<'END'
import platform

import torch

nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
print(f"python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}")
print(f"{torch.cuda.device_count()} CUDA devices")
raise SystemExit(0 if torch.cuda.is_available() else 3)
END
found=$?

echo "== tests marked cuda"
folders=()
for folder in core/tests plugins/*/tests tests; do
    [ -d "$folder" ] && folders+=("$folder")
done
# Without a GPU they are all skipped, with that reason: still a check that they can be collected.
timeout --signal=INT --kill-after=15 "$LIMIT" \
    "$PYTHON" -m pytest -m cuda -ra --timeout=90 --durations=10 -p no:cacheprovider "${folders[@]}"
status=$?

echo "== summary"
case $status in
    0) if [ $found -eq 0 ]; then echo "passed"; else echo "nothing ran: no CUDA device"; fi ;;
    5) echo "no test is marked cuda" ;;
    124 | 137) echo "not through after $LIMIT s" ;;
    *) echo "failed (pytest $status)" ;;
esac
exit $status
