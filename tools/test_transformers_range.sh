#!/usr/bin/env bash
# test_transformers_range.sh <build folder> [pytest's arguments]: tests opaq with the oldest supported transformers
# (requirements/transformers_oldest.txt), by default the quick tests below. It is installed into an environment of its
# own in the build folder, which takes every other package from .venv (or PYTHON's) and changes nothing there.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$(absolute "${1:-build}")
shift || true
quick='test_quantizes_while_it_loads or test_import_opaq or test_experts_keep or test_shards or test_scales_of_other
    or test_configurations or test_versions or test_plain_experts or test_mixed or (test_compiles and mixtral)
    or (test_a_checkpoint and (ct-nvfp4] or modelopt-fp8 or deepseek-fp8 or gpt-oss))'

status=0
tools/python_env.sh core torch peers || status=$?
if [ "$status" = 3 ]; then
    exit 0 # it printed what is skipped
elif [ "$status" != 0 ]; then
    exit "$status"
fi
base=${PYTHON:-.venv/bin/python}
requirements=requirements/transformers_oldest.txt
oldest=$folder/transformers_oldest

install() {
    local stamp
    stamp=$({ "$base" -c 'import sys; print(sys.version, sys.path)' && cat "$requirements"; } | cksum | tr ' ' -)
    stamp=$oldest/stamp-$stamp
    if [ -f "$stamp" ]; then
        return 0
    fi
    say "installing $requirements into $oldest" >&2
    mkdir -p "$folder"
    "$base" -m venv --clear "$oldest" || return 1
    # Packages in site-packages come before those that a .pth file there adds, so the oldest transformers is imported.
    "$base" -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")' \
        >"$("$oldest/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth" || return 1
    "$oldest/bin/python" -m pip install --quiet --disable-pip-version-check --retries 1 --no-deps --requirement \
        "$requirements" >"$oldest/pip.log" 2>&1 || return 1
    touch "$stamp"
}

if ! install; then
    grep -i '^error' "$oldest/pip.log" 2>/dev/null | tail -n 3 >&2 || true
    left_out "$requirements could not be installed, so the tests with the oldest transformers are skipped."
    exit 0
fi
if [ $# = 0 ]; then
    set -- -k "${quick//$'\n'/ }"
fi
OPAQ_LIBRARY=$folder/libopaq.so
OPAQ_COMMAND=$folder/opaq
export OPAQ_LIBRARY OPAQ_COMMAND PYTHONPATH=$PWD/python OMP_NUM_THREADS=1
exec "$oldest/bin/python" -m pytest -q tests/python/test_transformers.py "$@"
