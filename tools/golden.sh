#!/usr/bin/env bash
# Makes the files in tests/golden again by running every tests/golden/write_*.py. They use NumPy and other
# people's encoders at pinned versions, and fixed seeds, so the same bytes come out everywhere.
set -euo pipefail
. "$(dirname "$0")/common.sh"

if ! tools/python_env.sh core; then
    say "error: the golden files need requirements/core.txt; nothing was written." >&2
    exit 1
fi
for script in tests/golden/write_*.py; do
    "${PYTHON:-.venv/bin/python}" "$script" tests/golden
done
