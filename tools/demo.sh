#!/usr/bin/env bash
# demo.sh <build folder>: the demonstration. Builds, runs the program that needs no Python, so that something is shown early,
# then demo/run_demo.py with the parts of PyTorch, transformers and matplotlib that can be installed. The page is
# <build folder>/demo/index.html. Ctrl-C ends it with one sentence.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1
formats=$folder/demo/formats.json

# Packages are installed while the libraries are built: mostly, that waits for the network. In a process group of its own, so
# that it ends when this script does; what it prints is shown when the build is done.
packages=$folder/demo/packages.log
parts="torch core demo"
[ -n "${PYTHON:-}" ] || parts="$parts peers" # transformers is in it; run_demo.py checks for transformers alone
installer=
trap '[ -z "$installer" ] || kill -- "-$installer" 2>/dev/null || true' EXIT
trap 'say "Interrupted; run \`make demo\` again to start from the beginning." >&2; exit 130' INT
export OPAQ_INTERRUPT_SILENT=1 # the scripts below print nothing

start_installer() {
    mkdir -p "$folder/demo"
    : >"$packages"
    set -m
    # shellcheck disable=SC2086  # a list of names
    nice -n 19 tools/python_env.sh $parts >"$packages" 2>&1 & # or it would delay the first table by 15 s
    installer=$!
    set +m
}

# Prints what the installer prints, and waits until it ends.
finish_installer() {
    local shown=0 lines is_running=1
    while [ $is_running = 1 ]; do
        kill -0 "$installer" 2>/dev/null || is_running=0
        lines=$(wc -l <"$packages")
        sed -n "$((shown + 1)),${lines}p" "$packages" >&2
        shown=$lines
        [ $is_running = 0 ] || sleep 0.3
    done
    wait "$installer" || [ $? = 3 ]
    installer=
}

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
start_installer
build opaq_demos
title "every format on one weight"
"$folder/demo/demo_formats" --json "$formats"
build opaq_products
title "the page"
finish_installer
trap - INT # run_demo.py prints it itself
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
exec "$python" demo/run_demo.py --build "$folder" --formats "$formats"
