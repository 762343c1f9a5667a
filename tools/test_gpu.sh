#!/usr/bin/env bash
# test_gpu.sh <build folder>: the tests that involve PyTorch, on a machine with a GPU. The fixtures add the device cuda
# where PyTorch has one, so these are the same tests as on the CPU. Needs PYTHON, an interpreter with a CUDA PyTorch.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1
python=${PYTHON:-python3}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    say "error: $python has no PyTorch that sees a GPU; make test-gpu PYTHON=... needs one." >&2
    exit 1
fi
"$python" -c 'import torch; print("PyTorch", torch.__version__, "on", torch.cuda.get_device_name())'
OPAQ_LIBRARY=$(absolute "$folder")/libopaq.so
export OPAQ_LIBRARY PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}
# Without the AOTInductor host: loading a package, of any model, crashed in a CUDA build of PyTorch 2.11.
mapfile -t files < <(ls tests/python/test_{torch,linear}_*.py \
    tests/python/test_{autocast,moe,moe_compile,moe_training,quantized_tensor,recipe,runner,tensor_proto,tiled}.py | grep -v test_torch_aoti)
exec "$python" -m pytest -q "${files[@]}"
