#!/usr/bin/env bash
# test_transformers_range.sh <build folder> [pytest's arguments]: tests opaq with the oldest supported transformers
# (requirements/transformers_oldest.txt), by default the quick tests below. It is installed into a separate environment in
# the build folder, which takes every other package from .venv (or PYTHON's); .venv is not changed.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$(absolute "${1:-build}")
shift || true
quick='test_quantizes_while_it_loads or test_import_opaq or test_experts_keep or test_shards or test_scales_of_other
    or test_configurations or test_versions or test_plain_experts or test_mixed or (test_compiles and mixtral)
    or (test_a_checkpoint and (ct-nvfp4] or modelopt-fp8 or deepseek-fp8 or gpt-oss))'

oldest=$folder/transformers_oldest
prepare tools/overlay_env.sh "$oldest" requirements/transformers_oldest.txt "the tests with the oldest transformers"
if [ $# = 0 ]; then
    set -- -k "${quick//$'\n'/ }"
fi
OPAQ_LIBRARY=$folder/libopaq.so
OPAQ_COMMAND=$folder/opaq
export OPAQ_LIBRARY OPAQ_COMMAND PYTHONPATH=$PWD/python OMP_NUM_THREADS=1
exec "$oldest/bin/python" -m pytest -q tests/python/test_transformers.py "$@"
