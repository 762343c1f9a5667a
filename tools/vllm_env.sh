#!/usr/bin/env bash
# vllm_env.sh: creates .venv-vllm with requirements/vllm.txt and this checkout of opaq in it, entry points included, so that
# vLLM finds the plug-in. Takes about two minutes and 2.5 GB; an environment that is up to date is kept. With PYTHON set
# nothing is created: the script only checks that that interpreter has vLLM.
#
# Exit 3: vLLM is missing; a note was printed. With CI=true that is an error if packages can be downloaded, but not without
# network or with too little disk space.
set -euo pipefail
. "$(dirname "$0")/common.sh"
needed_mb=5000
requirements=requirements/vllm.txt
python=.venv-vllm/bin/python

skip() { # <sentence>
    say "note: $*, so vLLM is not tested." >&2
    exit 3
}

if [ -n "${PYTHON:-}" ]; then
    "$PYTHON" -c 'import importlib.util as u; raise SystemExit(u.find_spec("vllm") is None)' ||
        skip "$PYTHON has no vllm"
    exit 0
fi
python3 -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' || skip "vLLM needs Python 3.11 or later"
stamp=.venv-vllm/stamp-$({ python3 -V && cat "$requirements"; } | cksum | tr ' ' -)
if [ ! -f "$stamp" ]; then
    free_mb=$(df -Pm . | awk 'NR == 2 { print $4 }')
    [ "$free_mb" -ge "$needed_mb" ] || skip "there are $free_mb MB of disk, $needed_mb are needed"
    say "installing $requirements into .venv-vllm" >&2
    python3 -m venv --clear .venv-vllm || skip "python3 -m venv does not work here"
    if ! "$python" -m pip install --quiet --disable-pip-version-check --retries 1 --no-deps --no-compile --requirement \
        "$requirements" >.venv-vllm/pip.log 2>&1; then
        grep -i '^error' .venv-vllm/pip.log | tail -n 3 >&2 || true
        if "$python" -m pip download --quiet --disable-pip-version-check --retries 1 --no-deps --no-cache-dir --dest \
            .venv-vllm/probe "$(grep -m 1 '^packaging==' "$requirements")" >/dev/null 2>&1; then
            note_skipped "$requirements could not be installed though packages can be downloaded, so vLLM is not tested."
            exit 3
        fi
        skip "$requirements could not be installed, and no package can be downloaded here"
    fi
    touch "$stamp"
fi
"$python" - "$PWD" <<'PYTHON'
"""Writes what an installation of this checkout would: the package's path and its entry points."""
import re, sys, sysconfig, tomllib
from pathlib import Path

root, site = Path(sys.argv[1]), Path(sysconfig.get_path("purelib"))
numbers = re.findall(r"_(?:MAJOR|MINOR|PATCH) (\d+)", (root / "include/opaq/version.h").read_text())
points = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
info = site / "opaq.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: opaq\nVersion: {'.'.join(numbers[:3])}\n")
groups = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in rows.items()) for group, rows in points.items())
(info / "entry_points.txt").write_text("\n".join(groups))
(site / "opaq.pth").write_text(f"{root / 'python'}\n")
PYTHON
