#!/usr/bin/env bash
# demo.sh <build folder>: the demonstration. Builds, runs the program that needs no Python, so that something is shown early,
# then demo/run_demo.py with the parts of PyTorch, transformers and matplotlib that can be installed. The page is
# <build folder>/demo/index.html. Ctrl-C ends it with one sentence.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1
formats=$folder/demo/formats.json

trap 'say "Interrupted; run \`make demo\` again to start from the beginning." >&2; exit 130' INT
export OPAQ_INTERRUPT_SILENT=1 # the scripts below print nothing

# Builds targets. The filter of error messages removes those about the interrupt, which it ignores itself. Standard output
# stays the terminal.
build() { # <target>...
    {
        TARGETS="$*" tools/build.sh "$folder" 2>&1 >&3 | {
            trap '' INT
            grep --line-buffered -vE '^(ninja: build stopped: interrupted|g?make(\[[0-9]+\])?: \*\*\* .*Interrupt)' >&2 || true
        }
    } 3>&1
}
if [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ]; then # the CUDA back end takes half of the time
    export OPAQ_CUDA=${OPAQ_CUDA:-OFF}
fi
build opaq_demos
title "every format on one weight"
"$folder/demo/demo_formats" --json "$formats"
build opaq_products
title "the page"
parts="torch core demo"
[ -n "${PYTHON:-}" ] || parts="$parts peers" # transformers is in it; run_demo.py checks for transformers alone
# shellcheck disable=SC2086  # a list of names
tools/python_env.sh $parts || [ $? = 3 ]
trap - INT # run_demo.py prints it itself
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
exec "$python" demo/run_demo.py --build "$folder" --formats "$formats"
