#!/usr/bin/env bash
# test_vllm.sh <build folder> [pytest's arguments]: tests the vLLM plug-in (tests/vllm) with the vLLM of
# requirements/vllm.txt, in a separate environment, .venv-vllm, or with PYTHON's.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$(absolute "${1:-build}")
shift || true

prepare tools/vllm_env.sh
OPAQ_LIBRARY=$folder/libopaq.so
OPAQ_COMMAND=$folder/opaq
export OPAQ_LIBRARY OPAQ_COMMAND PYTHONPATH=$PWD/python
exec "${PYTHON:-.venv-vllm/bin/python}" -m pytest -q -p no:cacheprovider tests/vllm "$@"
