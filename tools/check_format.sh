#!/usr/bin/env bash
# check_format.sh [--fix]: checks the format of C files (.clang-format) and Python files (ruff); --fix reformats them.
set -euo pipefail
. "$(dirname "$0")/common.sh"
fix=${1:-}
if [ "$fix" = --fix ]; then
    tools/python_env.sh dev || [ $? = 3 ]
fi

# Only version 14: other versions format differently.
format=
for candidate in .venv/bin/clang-format clang-format-14 clang-format; do
    if command -v "$candidate" >/dev/null && "$candidate" --version | grep -q 'version 14\.'; then
        format=$candidate
        break
    fi
done
status=0
if [ -z "$format" ]; then
    note_skipped "there is no clang-format 14, so the formatting of C was not checked."
else
    mapfile -t files < <(find include src tests demo examples bench fuzz \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cc' \) 2>/dev/null | sort)
    if [ "$fix" = --fix ]; then
        "$format" -i "${files[@]}"
    elif ! "$format" --dry-run -Werror "${files[@]}" >build-format.log 2>&1; then
        grep -oE '^[^ :]+:[0-9]+' build-format.log | sort -t: -k1,1 -k2,2n -u | head -n 40
        say "These lines are not formatted; run 'make format'."
        status=1
    fi
    rm -f build-format.log
    [ "$status" != 0 ] || say "${#files[@]} C files"
fi

ruff=$(command -v .venv/bin/ruff || command -v ruff || true)
if [ -z "$ruff" ]; then
    note_skipped "there is no ruff, so the formatting of Python was not checked."
elif [ "$fix" = --fix ]; then
    "$ruff" format --quiet .
    "$ruff" check --quiet --fix . || status=1
else
    "$ruff" format --check . || status=1
fi
exit $status
