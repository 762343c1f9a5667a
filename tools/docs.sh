#!/usr/bin/env bash
# docs.sh [folder]: builds the site of README.md and docs/ into build/site. A broken link or a page that the navigation does
# not list is an error.
set -euo pipefail
. "$(dirname "$0")/common.sh"
site=${1:-build/site}

status=0
tools/python_env.sh docs || status=$?
if [ "$status" = 3 ]; then
    exit 0 # a note was printed
elif [ "$status" != 0 ]; then
    exit "$status"
fi
python=${PYTHON:-.venv/bin/python}
mkdir -p build
"$python" tools/docs_stage.py build/site-sources
"$python" -m mkdocs build --quiet --strict --config-file mkdocs.yml --site-dir "$(absolute "$site")"
say "the site is $site/index.html"
