#!/usr/bin/env bash
# Runs tests/python/test_transformers.py with the oldest supported transformers, installed into a folder of its own
# under the build folder: tools/test_transformers_range.sh [build]. PYTHON is an interpreter that can run the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(realpath "${1:-build}")
python=${PYTHON:-.venv/bin/python}
folder=$build/transformers_oldest
"$python" -m pip install -q --upgrade --no-deps --target "$folder" -r requirements/transformers_oldest.txt
OPAQ_LIBRARY=$build/libopaq.so PYTHONPATH=$folder:$PWD/python OMP_NUM_THREADS=1 \
    "$python" -m pytest -q tests/python/test_transformers.py
