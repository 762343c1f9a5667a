#!/usr/bin/env bash
# test_gpu.sh: runs everything that needs a GPU. Needs an NVIDIA GPU, nvcc of CUDA 13, cmake, and PYTHON, an interpreter with a
# CUDA build of PyTorch and pytest; installs nothing. In this order, so that what is cut off by the time limit matters least:
#   1. builds the CUDA back end and the test programs into build-cuda (OPAQ_GPU_BUILD=OFF: takes what is there);
#   2. the C tests of operators and quantizers on the GPU, against the CPU byte for byte (OPAQ_CUDA_PRODUCT=fma), or within bounds;
#      some again with the quantizers that are not the default (OPAQ_CUDA_QUANTIZER=parts);
#   3. the PyTorch tests, whose fixtures add the device cuda, and the demonstration's training on the GPU;
#   4. some C tests through captured CUDA graphs, and all with the PTX for other GPUs only (OPAQ_CUDA=portable);
#   5. some C tests under compute-sanitizer, one run for each of its tools.
# After the build, OPAQ_GPU_JOBS programs run at the same time. A failure stops nothing; its last lines are printed at once. The end of the
# output is one line for each program; the exit status is 0 if all passed. Everything they print goes to test_gpu.log, and the
# summary to test_gpu.txt, in OUT or, if that is not set, in build-cuda. After OPAQ_GPU_SECONDS (450) what runs is stopped.
set -uo pipefail
. "$(dirname "$0")/common.sh"
python=${PYTHON:-python3}
folder=build-cuda
limit=${OPAQ_GPU_SECONDS:-450}
at_once=${OPAQ_GPU_JOBS:-$((jobs > 4 ? jobs * 3 / 4 : jobs))}
SECONDS=0
logs=$folder/logs
results=${OUT:-$folder}
rm -rf "$logs"
mkdir -p "$logs" "$results"
: >"$logs/summary"

# run <seconds> <name> <command>...: runs a program in the background with a time limit. Waits while the maximum number of
# programs is running.
run() {
    local seconds=$1 name=$2 left
    shift 2
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do
        wait -n
    done
    left=$((limit - SECONDS))
    if [ "$left" -le 5 ]; then
        say "NOT RUN  $name (no time was left)" | tee -a "$logs/summary"
        return
    fi
    run_one "$((seconds < left ? seconds : left))" "$name" "$@" &
}

run_one() { # <seconds> <name> <command>...
    local seconds=$1 name=$2 begin=$SECONDS status=0 result last
    local log=$logs/${2//[^A-Za-z0-9_.-]/_}.log
    shift 2
    printf '+ %s\n' "$*" >"$log"
    timeout --kill-after=5 "$seconds" "$@" >>"$log" 2>&1 </dev/null || status=$?
    last=$(grep -v '^[[:space:]]*$' "$log" | tail -n 1 | cut -c 1-110)
    case $status in
    0) result="ok      " ;;
    124 | 137) result="TIME OUT" ;;
    *) result="FAILED  " ;;
    esac
    say "$result $name, $((SECONDS - begin)) s: $last" >>"$logs/summary"
    if [ "$status" != 0 ]; then
        { # in one write, so that the lines of two programs do not mix
            printf '\n-- %s %s (exit status %d), the end of %s:\n' "$result" "$name" "$status" "$log"
            grep -vE '^(ok |\.+ )' "$log" | tail -n 25 | cut -c 1-220
        } >"$log.end"
        cat "$log.end"
    fi
    return "$status"
}

part() { # <title>
    title "$1 ($SECONDS s)"
}

finish() {
    wait
    for log in "$logs"/*.log; do
        printf '\n==== %s\n' "$log"
        head -c 300000 "$log"
    done >"$results/test_gpu.log"
    {
        printf '\n== summary: %d s\n' "$SECONDS"
        LC_ALL=C sort -k 1,1 -s -r "$logs/summary" # what failed comes last
        printf '%d passed, %d failed or not run; logs: %s\n' "$(grep -c '^ok ' "$logs/summary")" \
            "$(grep -vc '^ok ' "$logs/summary")" "$results/test_gpu.log"
    } | tee "$results/test_gpu.txt"
    ! grep -qv '^ok ' "$logs/summary" && [ -s "$logs/summary" ]
    exit
}
trap 'exit 130' INT TERM

# ---- the machine, and the build
title "machine"
nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total --format=csv,noheader
PATH=$PATH:/usr/local/cuda/bin nvcc --version | sed -n 's/.*\(release.*\)/nvcc \1/p'
say "$(uname -sm), $jobs processors, $($python --version 2>&1)"
# in the background, because the first import reads gigabytes
run 120 "PyTorch" "$python" -c 'import torch, numpy, pytest; x = torch.ones(1, device="cuda"); print("torch", torch.__version__,
    "CUDA", torch.version.cuda, "numpy", numpy.__version__, "pytest", pytest.__version__, torch.cuda.get_device_name())'

# The programs that run on the emulated GPU too.
list_of() { # <variable of cmake/cuda.cmake>
    sed -n "/^set($1 /,/)\$/p" cmake/cuda.cmake | tr -d '()\n' | sed "s/^set$1//"
}
tests=$(list_of OPAQ_EMULATED_TESTS)
bound_tests=$(list_of OPAQ_EMULATED_MMA_TESTS)
parts_tests=$(list_of OPAQ_EMULATED_PARTS_TESTS)
if [ "${OPAQ_GPU_BUILD:-ON}" != OFF ]; then
    # shellcheck disable=SC2086  # a list
    run 240 "build" env "TARGETS=opaq_cuda opaq_products $(printf 'test_%s ' $tests $bound_tests)" tools/build.sh "$folder" -DOPAQ_CUDA=ON
    run 240 "build, PTX only" env TARGETS=opaq_cuda tools/build.sh "$folder-portable" -DOPAQ_CUDA=portable -DOPAQ_TESTS=OFF
fi
wait
cat "$logs/summary"
library=$(absolute "$folder")/libopaq_cuda.so
if [ -z "$tests" ] || [ ! -f "$library" ]; then
    finish
fi

# ---- C tests
on_gpu=(env OPAQ_TEST_DEVICE=cuda "OPAQ_TEST_CUDA_LIBRARY=$library" "OPAQ_GOLDEN_DIR=$PWD/tests/golden")
part "C tests"
for name in $tests; do
    run 120 "test_$name" "${on_gpu[@]}" OPAQ_CUDA_PRODUCT=fma "$folder/tests/c/test_$name"
done
for name in $parts_tests; do # the quantizers that are not the default
    run 120 "parts: test_$name" "${on_gpu[@]}" OPAQ_CUDA_PRODUCT=fma OPAQ_CUDA_QUANTIZER=parts "$folder/tests/c/test_$name"
done
for name in $bound_tests; do # products in an order of their own, compared within bounds
    run 120 "within bounds: test_$name" "${on_gpu[@]}" "$folder/tests/c/test_$name"
done

# ---- PyTorch
part "PyTorch tests"
export OPAQ_LIBRARY="$PWD/$folder/libopaq.so" OPAQ_COMMAND="$PWD/$folder/opaq" PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=2 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
if grep -q '^ok .*PyTorch' "$logs/summary"; then
    # The tests that take the device as a parameter, one process for each file, the longest first. Without the AOTInductor
    # host: loading a package, of any model, crashed in a CUDA build of PyTorch 2.11.
    # shellcheck disable=SC2046  # a list of names without spaces
    mapfile -t files < <(ls -S $(grep -lE 'def test_[a-z0-9_]*\(.*\bdevice\b' tests/python/test_*.py) | grep -vE 'test_(gpu|gpu_graphs|gpu_models|torch_aoti)\.')
    for file in tests/python/test_gpu_graphs.py tests/python/test_gpu_models.py tests/python/test_gpu.py "${files[@]}"; do
        name=${file##*/}
        marks="not slow"
        [ "$name" = test_gpu_models.py ] && marks="" # whole models, of which the CPU's tests run some only
        run 150 "${name%.py}" "$python" -m pytest -q -p no:cacheprovider --tb=short -m "$marks" -k cuda "$file"
    done
    run 200 "demo: training" "$python" demo/run_demo.py --build "$folder" --parts training --device cuda
fi

# ---- other ways to the same bytes
part "C tests in CUDA graphs, and with PTX only"
for name in linear grouped_linear experts experts_backward; do
    run 90 "in a graph: test_$name" "${on_gpu[@]}" OPAQ_TEST_CAPTURE=1 "$folder/tests/c/test_$name"
done
# its quantized results are compared byte for byte
run 90 "in a graph: test_linear_delayed" "${on_gpu[@]}" OPAQ_TEST_CAPTURE=1 OPAQ_CUDA_PRODUCT=fma "$folder/tests/c/test_linear_delayed"
on_ptx=("${on_gpu[@]}" "OPAQ_TEST_CUDA_LIBRARY=$(absolute "$folder-portable")/libopaq_cuda.so")
for name in $tests; do
    run 120 "PTX only: test_$name" "${on_ptx[@]}" OPAQ_CUDA_PRODUCT=fma "$folder/tests/c/test_$name"
done
for name in $bound_tests; do
    run 120 "PTX only, within bounds: test_$name" "${on_ptx[@]}" "$folder/tests/c/test_$name"
done

# ---- memory and races
part "compute-sanitizer"
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
sanitize() { # <tool> <program> [<tests>]
    local tool=$1 program=$2 more=()
    shift 2
    [ "$tool" = memcheck ] && more=(--leak-check no)
    run 220 "$tool: $program${*:+ $*}${OPAQ_CUDA_QUANTIZER:+, $OPAQ_CUDA_QUANTIZER}" "${on_gpu[@]}" "$sanitizer" --tool "$tool" ${more[@]+"${more[@]}"} --error-exitcode 9 \
        --print-limit 20 "$folder/tests/c/$program" "$@"
}
if [ -n "$sanitizer" ]; then
    for tool in racecheck memcheck initcheck synccheck; do # the slowest first
        sanitize "$tool" test_op_rearrange
        sanitize "$tool" test_experts_composed
        sanitize "$tool" test_device_quantize given_figures
        OPAQ_CUDA_QUANTIZER=parts sanitize "$tool" test_device_quantize given_figures
        sanitize "$tool" test_hiding delayed
        sanitize "$tool" test_linear_given
        sanitize "$tool" test_device_product long_sums
    done
else
    say "NOT RUN  compute-sanitizer (it is not installed)" | tee -a "$logs/summary"
fi
finish
