#!/usr/bin/env bash
# test_python.sh <build folder> [slow]: runs the Python tests that are not marked slow, or those that are, with the shared
# library and the command in that folder.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1
selection=${2:-not slow}

prepare tools/python_env.sh core torch peers peft
OPAQ_LIBRARY=$(absolute "$folder")/libopaq.so
OPAQ_COMMAND=$(absolute "$folder")/opaq
export OPAQ_LIBRARY OPAQ_COMMAND PYTHONPATH=$PWD/python
# One process per processor, each with one thread: more threads than processors would wait for each other.
export OMP_NUM_THREADS=1
exec "${PYTHON:-.venv/bin/python}" -m pytest -q -n "$jobs" --dist worksteal -m "$selection" tests/python
