#!/usr/bin/env bash
# evidence.sh <build folder>: the cosine of each projection's output to that of bf16; figures also go to
# <build folder>/demo/projections.json.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1

prepare tools/python_env.sh torch core
OPAQ_LIBRARY=$(absolute "$folder")/libopaq.so
export OPAQ_LIBRARY PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-.venv/bin/python}" demo/demo_projections.py --out "$folder/demo"
