#!/usr/bin/env bash
# Runs ruff on all Python files and mypy --strict on the package and the tools.
set -euo pipefail
. "$(dirname "$0")/common.sh"

python=${PYTHON:-.venv/bin/python}
ruff=$(command -v .venv/bin/ruff || command -v ruff || true)
if [ -n "$ruff" ]; then
    "$ruff" check .
else
    note_skipped "there is no ruff, so Python was not linted."
fi
if command -v "$python" >/dev/null && "$python" -c 'import mypy' 2>/dev/null; then
    paths=()
    for path in python/opaq tools; do
        if [ -n "$(find "$path" -name '*.py' 2>/dev/null)" ]; then
            paths+=("$path")
        fi
    done
    "$python" -m mypy --strict "${paths[@]}"
else
    note_skipped "there is no mypy, so Python's types were not checked."
fi
