#!/usr/bin/env bash
# demo.sh <build folder>: every demonstration: the C programs, then those that need PyTorch.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1

tools/run_programs.sh "$folder/demo"
status=0
tools/python_env.sh torch core || status=$?
if [ "$status" = 3 ]; then
    exit 0 # it said what is left out
elif [ "$status" != 0 ]; then
    exit "$status"
fi
OPAQ_LIBRARY=$(absolute "$folder")/libopaq.so
export OPAQ_LIBRARY PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}
for program in demo/demo_*.py; do
    title "$(basename "$program")"
    "${PYTHON:-.venv/bin/python}" "$program"
done
