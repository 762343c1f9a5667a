#!/usr/bin/env bash
# Prints the cmake to use: the one on the PATH if it is new enough, else the pinned one from PyPI, installed into .venv.
set -euo pipefail
. "$(dirname "$0")/common.sh"

new_enough() { # 3.20 or later
    local version
    version=$("$1" --version 2>/dev/null | sed -n 's/^cmake version \([0-9]*\)\.\([0-9]*\).*/\1 \2/p')
    # shellcheck disable=SC2086  # two words on purpose
    set -- $version
    [ $# = 2 ] && { [ "$1" -gt 3 ] || { [ "$1" = 3 ] && [ "$2" -ge 20 ]; }; }
}

for candidate in cmake .venv/bin/cmake; do
    if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done
say "note: there is no cmake 3.20 or later on the PATH; installing the pinned version into .venv." >&2
if ! PYTHON='' tools/python_env.sh build >&2 || [ ! -x .venv/bin/cmake ]; then
    say "error: cmake could not be installed; install cmake 3.20 or later yourself." >&2
    exit 1
fi
echo .venv/bin/cmake
