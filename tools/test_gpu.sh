#!/usr/bin/env bash
# test_gpu.sh: runs everything that needs a GPU. Needs an NVIDIA GPU, nvcc of CUDA 13 and PYTHON, an interpreter with a CUDA
# build of PyTorch. Builds the CUDA back end, then runs
#   - the C tests of operators and quantizers on the GPU, against the CPU byte for byte (OPAQ_TEST_DEVICE=cuda);
#   - some of them under compute-sanitizer, if it is installed;
#   - the PyTorch tests, whose fixtures add the device cuda if PyTorch has one.
# Every step is timed and printed, the next one runs even if it fails, and the last lines list the failures. After
# OPAQ_GPU_SECONDS (470) the running step is stopped; it and the steps not run count as failed.
set -uo pipefail
. "$(dirname "$0")/common.sh"
python=${PYTHON:-python3}
folder=build-cuda
limit=${OPAQ_GPU_SECONDS:-470}
SECONDS=0
failed=()

step() { # <title> <command>...
    local name=$1 begin=$SECONDS left status=0
    shift
    left=$((limit - SECONDS))
    title "$name"
    printf '+ %s\n' "$*"
    if [ "$left" -le 0 ]; then
        say "no time is left"
        failed+=("$name (not run: no time was left)")
        return 1
    fi
    timeout "$left" "$@" || status=$?
    if [ "$status" != 0 ]; then
        failed+=("$name (exit status $status)")
    fi
    say "-- $name: $((SECONDS - begin)) s, exit status $status, $SECONDS s in all"
    return "$status"
}

finish() {
    printf '\n%d s in all\n' "$SECONDS"
    if [ ${#failed[@]} != 0 ]; then
        printf 'steps that failed:\n'
        printf '  %s\n' "${failed[@]}"
        exit 1
    fi
    say "all steps on the GPU passed"
    exit 0
}

step "machine" bash -c 'nvidia-smi -L; nvidia-smi --query-gpu=driver_version,compute_cap --format=csv; nvcc --version | tail -n 2; uname -sm'
# The programs that run on the emulated GPU too.
tests=$(sed -n '/^set(OPAQ_EMULATED_TESTS/,/)$/p' cmake/cuda.cmake | tr -d '()\n' | sed 's/^setOPAQ_EMULATED_TESTS//')
[ -n "$tests" ] || failed+=("the list of tests in cmake/cuda.cmake")
# shellcheck disable=SC2086  # a list
step "build" env "TARGETS=opaq_cuda opaq_shared opaq_torch $(printf 'test_%s ' $tests)" tools/build.sh "$folder" \
    -DOPAQ_CUDA=ON || finish

# ---- C tests
library=$(absolute "$folder")/libopaq_cuda.so
on_gpu=(env OPAQ_TEST_DEVICE=cuda "OPAQ_TEST_CUDA_LIBRARY=$library" "OPAQ_GOLDEN_DIR=$PWD/tests/golden")
for name in $tests; do
    step "C test $name" "${on_gpu[@]}" timeout 120 "$folder/tests/c/test_$name"
done

# ---- memory and races
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
if [ -n "$sanitizer" ]; then
    sanitize() { # <tool> <program> [<tests>]
        step "compute-sanitizer $*" "${on_gpu[@]}" timeout 90 "$sanitizer" --tool "$1" --error-exitcode 9 "$folder/tests/c/$2" "${@:3}"
    }
    sanitize memcheck test_op_rearrange
    sanitize memcheck test_experts_composed
    sanitize memcheck test_device_quantize given_figures
    sanitize racecheck test_experts_composed
    sanitize racecheck test_linear_options
else
    say "note: there is no compute-sanitizer, so memory and races were not checked."
fi

# ---- PyTorch
export OPAQ_LIBRARY="$PWD/$folder/libopaq.so" PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}
if step "PyTorch" "$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'; then
    # Without the AOTInductor host: loading a package, of any model, crashed in a CUDA build of PyTorch 2.11.
    mapfile -t files < <(ls tests/python/test_{torch,linear}_*.py \
        tests/python/test_{autocast,moe,moe_compile,moe_training,quantized_tensor,recipe,runner,tensor_proto,tiled}.py | grep -v test_torch_aoti)
    step "Python tests" "$python" -m pytest -q -m "not slow" "${files[@]}"
fi
finish
