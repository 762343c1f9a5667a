#!/usr/bin/env bash
# bench_checkpoint.sh <build folder> [options of bench/bench_checkpoint.py]: runs that benchmark; the figures also go to
# <folder>/bench/bench_checkpoint.json.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1
shift

prepare tools/python_env.sh torch peers core
mkdir -p "$folder/bench"
OPAQ_LIBRARY=$(absolute "$folder")/libopaq.so PYTHONPATH=$PWD/python \
    "${PYTHON:-.venv/bin/python}" bench/bench_checkpoint.py --command "$folder/opaq" --folder "$folder/bench" \
    --json "$folder/bench/bench_checkpoint.json" "$@"
