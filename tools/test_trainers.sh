#!/usr/bin/env bash
# test_trainers.sh <build folder>: tests opaq inside torchtitan and Megatron-core (requirements/trainers.txt), and runs the
# examples with these. They are installed into a separate environment in the build folder, which takes every other package
# from .venv (or PYTHON's); .venv is not changed.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$(absolute "${1:-build}")

trainers=$folder/trainers
prepare tools/overlay_env.sh "$trainers" requirements/trainers.txt "the tests with torchtitan and Megatron-core"
OPAQ_LIBRARY=$folder/libopaq.so
OPAQ_COMMAND=$folder/opaq
export OPAQ_LIBRARY OPAQ_COMMAND PYTHONPATH=$PWD/python OMP_NUM_THREADS=1
exec "$trainers/bin/python" -m pytest -q tests/python/test_torchtitan.py tests/python/test_megatron.py \
    tests/python/test_examples_trainers.py
