#!/usr/bin/env bash
# bench_vllm.sh <build folder> [options of bench/bench_vllm.py]: measures vLLM's speed and memory with and without opaq; takes
# about 15 minutes. Checkpoints (5 GB) stay in <folder>/bench/vllm; figures also go to <folder>/bench/bench_vllm.json.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$(absolute "${1:-build}")
shift || true

prepare tools/vllm_env.sh
OPAQ_LIBRARY=$folder/libopaq.so
export OPAQ_LIBRARY PYTHONPATH=$PWD/python
exec "${PYTHON:-.venv-vllm/bin/python}" bench/bench_vllm.py --command "$folder/opaq" --folder "$folder/bench/vllm" \
    --json "$folder/bench/bench_vllm.json" "$@"
