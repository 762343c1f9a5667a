#!/usr/bin/env bash
# bench_overhead.sh <build folder> [arguments]: measures the overhead of operator calls from PyTorch, with the libraries in
# that folder. Prints a table and writes <folder>/bench/bench_overhead.json.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1
shift

status=0
tools/python_env.sh torch || status=$?
if [ "$status" = 3 ]; then
    exit 0 # it printed what is skipped
elif [ "$status" != 0 ]; then
    exit "$status"
fi
OPAQ_LIBRARY=$(absolute "$folder")/libopaq.so
export OPAQ_LIBRARY PYTHONPATH=$PWD/python
exec "${PYTHON:-.venv/bin/python}" bench/bench_overhead.py --json "$folder/bench/bench_overhead.json" "$@"
