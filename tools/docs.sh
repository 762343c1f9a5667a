#!/usr/bin/env bash
# docs.sh [folder]: builds the site of README.md and docs/ into build/site. A broken link or a page that the navigation does
# not list is an error.
set -euo pipefail
. "$(dirname "$0")/common.sh"
site=${1:-build/site}

prepare tools/python_env.sh docs
python=${PYTHON:-.venv/bin/python}
mkdir -p build
"$python" tools/docs_stage.py build/site-sources
"$python" -m mkdocs build --quiet --strict --config-file mkdocs.yml --site-dir "$(absolute "$site")"
say "the site is $site/index.html"
