#!/usr/bin/env bash
# overlay_env.sh <environment> <requirements file> <what is skipped without it>: creates a virtual environment that takes
# every package from .venv (or PYTHON's), except those of the requirements file, which are installed into it without their
# dependencies; .venv is not changed. An environment that is up to date is kept. Exit 3: it could not be created; a note was
# printed.
set -euo pipefail
. "$(dirname "$0")/common.sh"
environment=$1 requirements=$2 skipped=$3

tools/python_env.sh core torch peers
base=${PYTHON:-.venv/bin/python}

install() {
    local stamp
    stamp=$({ "$base" -c 'import sys; print(sys.version, sys.path)' && cat "$requirements"; } | cksum | tr ' ' -)
    stamp=$environment/stamp-$stamp
    if [ -f "$stamp" ]; then
        return 0
    fi
    say "installing $requirements into $environment" >&2
    mkdir -p "$(dirname "$environment")"
    "$base" -m venv --clear "$environment" || return 1
    # Packages in site-packages come before those that a .pth file there adds, so the requirements' packages win.
    "$base" -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")' \
        >"$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth" || return 1
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --retries 1 --no-deps --requirement \
        "$requirements" >"$environment/pip.log" 2>&1 || return 1
    touch "$stamp"
}

if ! install; then
    grep -i '^error' "$environment/pip.log" 2>/dev/null | tail -n 3 >&2 || true
    note_skipped "$requirements could not be installed, so $skipped are skipped."
    exit 3
fi
