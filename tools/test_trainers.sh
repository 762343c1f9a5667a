#!/usr/bin/env bash
# test_trainers.sh <build folder>: tests opaq inside torchtitan and Megatron-core (requirements/trainers.txt). They are
# installed into an environment of its own in the build folder, which takes every other package from .venv (or PYTHON's)
# and changes nothing there.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$(absolute "${1:-build}")

status=0
tools/python_env.sh core torch peers || status=$?
if [ "$status" = 3 ]; then
    exit 0 # it printed what is skipped
elif [ "$status" != 0 ]; then
    exit "$status"
fi
base=${PYTHON:-.venv/bin/python}
requirements=requirements/trainers.txt
trainers=$folder/trainers

install() {
    local stamp
    stamp=$({ "$base" -c 'import sys; print(sys.version, sys.path)' && cat "$requirements"; } | cksum | tr ' ' -)
    stamp=$trainers/stamp-$stamp
    if [ -f "$stamp" ]; then
        return 0
    fi
    say "installing $requirements into $trainers" >&2
    mkdir -p "$folder"
    "$base" -m venv --clear "$trainers" || return 1
    "$base" -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")' \
        >"$("$trainers/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth" || return 1
    "$trainers/bin/python" -m pip install --quiet --disable-pip-version-check --retries 1 --no-deps --requirement \
        "$requirements" >"$trainers/pip.log" 2>&1 || return 1
    touch "$stamp"
}

if ! install; then
    grep -i '^error' "$trainers/pip.log" 2>/dev/null | tail -n 3 >&2 || true
    left_out "$requirements could not be installed, so the tests with torchtitan and Megatron-core are skipped."
    exit 0
fi
OPAQ_LIBRARY=$folder/libopaq.so
OPAQ_COMMAND=$folder/opaq
export OPAQ_LIBRARY OPAQ_COMMAND PYTHONPATH=$PWD/python OMP_NUM_THREADS=1
exec "$trainers/bin/python" -m pytest -q tests/python/test_torchtitan.py tests/python/test_megatron.py
