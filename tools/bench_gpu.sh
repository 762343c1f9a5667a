#!/usr/bin/env bash
# bench_gpu.sh <build folder> [arguments]: times the CUDA back end beside PyTorch (bench/bench_gpu.py). Needs an NVIDIA GPU and
# PYTHON, an interpreter with a CUDA build of PyTorch; installs nothing. Builds the libraries into build-cuda, as test_gpu.sh
# does, which needs nvcc of CUDA 13 and cmake; with OPAQ_LIBRARY set to a libopaq.so that has libopaq_torch.so and
# libopaq_cuda.so beside it, it builds nothing. Writes gpu.json to OUT or, if that is not set, to <build folder>/bench.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1
shift

if [ -z "${OPAQ_LIBRARY:-}" ]; then
    TARGETS="opaq_cuda opaq_shared opaq_torch" tools/build.sh build-cuda -DOPAQ_CUDA=ON
    OPAQ_LIBRARY=$PWD/build-cuda/libopaq.so
fi
export OPAQ_LIBRARY PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
exec "${PYTHON:-python3}" bench/bench_gpu.py --json "${OUT:-$folder/bench}/gpu.json" "$@"
