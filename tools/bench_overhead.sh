#!/usr/bin/env bash
# bench_overhead.sh <build folder> [arguments]: measures the overhead of operator calls from PyTorch, with the libraries in
# that folder. Prints a table and writes <folder>/bench/bench_overhead.json.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1
shift

prepare tools/python_env.sh torch
OPAQ_LIBRARY=$(absolute "$folder")/libopaq.so
export OPAQ_LIBRARY PYTHONPATH=$PWD/python
exec "${PYTHON:-.venv/bin/python}" bench/bench_overhead.py --json "$folder/bench/bench_overhead.json" "$@"
