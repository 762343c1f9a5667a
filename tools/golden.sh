#!/usr/bin/env bash
# Regenerates tests/golden by running every tests/golden/write_*.py. The scripts use NumPy and ml_dtypes at pinned versions
# and fixed seeds, so the files are the same on every machine.
set -euo pipefail
. "$(dirname "$0")/common.sh"

if ! tools/python_env.sh core; then
    say "error: the golden files need requirements/core.txt; nothing was written." >&2
    exit 1
fi
for script in tests/golden/write_*.py; do
    "${PYTHON:-.venv/bin/python}" "$script" tests/golden
done
