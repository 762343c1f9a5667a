#!/usr/bin/env bash
# demo.sh <build folder>: the demonstration. First the program that needs nothing, so that something is shown at once; then
# demo/run_demo.py with what can be installed of PyTorch, transformers and matplotlib. Its page is <build folder>/demo/index.html.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1
formats=$folder/demo/formats.json

trap 'say "Interrupted; run \`make demo\` again to start from the beginning." >&2; exit 130' INT
title "every format on one weight"
"$folder/demo/demo_formats" --json "$formats"
title "the page"
parts="torch core demo"
[ -n "${PYTHON:-}" ] || parts="$parts peers" # transformers is in it; run_demo.py checks for transformers alone
# shellcheck disable=SC2086  # a list of names
tools/python_env.sh $parts || [ $? = 3 ]
trap - INT # run_demo.py says it itself
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
exec "$python" demo/run_demo.py --build "$folder" --formats "$formats"
