#!/usr/bin/env bash
# build_wheel.sh [<build folder>]: builds the wheel into <build folder>/wheel/dist: one file for every Python 3 of this
# platform. On Linux auditwheel gives it a manylinux tag, that of the oldest C library that it runs with; a build on an
# older system runs with older ones. The CUDA back end is in it if there is an nvcc of CUDA 13, as in `make`; OPAQ_CUDA=OFF
# leaves it out, OPAQ_CUDA=ON makes a missing nvcc an error. Takes a minute of CPU time and as much for the CUDA back end,
# every time, because pip uses a new environment for each build. Exit 3: the wheel needs packages that cannot be downloaded;
# a note says which.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$(absolute "${1:-build}")/wheel

can_repair=no
if [ "$(uname -s)" = Linux ]; then
    status=0
    tools/python_env.sh wheel || status=$?
    case $status in
    0) can_repair=yes ;;
    3) ;; # it printed what is skipped
    *) exit "$status" ;;
    esac
fi
python=${PYTHON:-$PWD/.venv/bin/python}
[ -x "$python" ] || command -v "$python" >/dev/null || exit 3
rm -rf "$folder/built" "$folder/dist"
mkdir -p "$folder"
backend=$(sed -n 's/^requires = \["\(.*\)"\]$/\1/p' pyproject.toml)
if ! "$python" -m pip download --quiet --disable-pip-version-check --retries 1 --dest "$folder/backend" "$backend" \
    >"$folder/pip.log" 2>&1; then
    grep -i '^error' "$folder/pip.log" | tail -n 3 >&2 || true
    note_skipped "$backend cannot be downloaded, so the wheel was not built."
    exit 3
fi
if ! "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --config-settings=build-dir="$folder/build" \
    --config-settings=cmake.define.OPAQ_CUDA="${OPAQ_CUDA:-AUTO}" --wheel-dir "$folder/built" . >"$folder/pip.log" 2>&1; then
    tail -n 40 "$folder/pip.log" >&2
    exit 1
fi

# PyTorch's library is the user's own: libopaq_torch.so finds it in the process.
if [ "$can_repair" = yes ]; then
    if ! PATH=$(dirname "$python"):$PATH "$python" -m auditwheel repair --exclude libtorch_cpu.so \
        --wheel-dir "$folder/dist" "$folder"/built/opaq-*.whl >"$folder/auditwheel.log" 2>&1; then
        cat "$folder/auditwheel.log" >&2
        exit 1
    fi
else
    mv "$folder/built" "$folder/dist"
fi
if grep -q '^OPAQ_CUDA_BUILT:INTERNAL=OFF$' "$folder/build/CMakeCache.txt"; then
    say "The wheel has no CUDA back end; make says why."
fi
say "$(echo "$folder"/dist/opaq-*.whl): $(wc -c <"$(echo "$folder"/dist/opaq-*.whl)") bytes"
