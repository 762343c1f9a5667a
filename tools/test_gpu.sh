#!/usr/bin/env bash
# test_gpu.sh [--list]: runs everything that needs a GPU. Needs an NVIDIA GPU, nvcc of CUDA 13, cmake, and PYTHON, an interpreter
# with a CUDA build of PyTorch and pytest; installs nothing. Builds the CUDA back end and the test programs into build-cuda
# (OPAQ_GPU_BUILD=OFF: takes what is there), then runs these, the most informative first:
#   1. the C tests of operators and quantizers on the GPU, against the CPU byte for byte (OPAQ_CUDA_PRODUCT=fma), or within bounds;
#      some again with the general quantizers (OPAQ_CUDA_QUANTIZER=general);
#   2. the PyTorch tests of what only a GPU can show;
#   3. C tests under compute-sanitizer, one run for each of its tools;
#   4. the other PyTorch tests, whose fixtures add the device cuda, and the demonstration's training on the GPU;
#   5. some C tests through captured CUDA graphs; all C tests and some PyTorch tests with the PTX for other GPUs only
#      (OPAQ_CUDA=portable).
# After the build, OPAQ_GPU_JOBS programs run at the same time. A failure stops nothing; its last lines are printed at once. The end of the
# output is one line for each program; the exit status is 0 if all passed. Everything they print goes to test_gpu.log, and the
# summary to test_gpu.txt, in OUT or, if that is not set, in build-cuda. After OPAQ_GPU_SECONDS (450) what runs is stopped.
#
# OPAQ_GPU_PARTS, an extended regular expression, selects programs by their names, in which lower and upper case are equal:
# 'general', '^memcheck', 'test_gpu_graphs|within bounds'. --list prints the names of those that would run, and runs nothing.
set -uo pipefail
. "$(dirname "$0")/common.sh"
python=${PYTHON:-python3}
folder=build-cuda
limit=${OPAQ_GPU_SECONDS:-450}
at_once=${OPAQ_GPU_JOBS:-$((jobs > 4 ? jobs * 3 / 4 : jobs))}
SECONDS=0
logs=$folder/logs
results=${OUT:-$folder}
wanted=${OPAQ_GPU_PARTS:-}
is_list=$([ "${1:-}" = --list ] && echo yes || true)
if [ -z "$is_list" ]; then
    rm -rf "$logs"
    mkdir -p "$logs" "$results"
    : >"$logs/summary"
fi

# run <seconds> <name> <command>...: runs a program in the background with a time limit, if OPAQ_GPU_PARTS selects it. Waits while
# the maximum number of programs is running.
run() {
    local seconds=$1 name=$2
    shift 2
    if [ -n "$wanted" ] && ! grep -qiE -e "$wanted" <<<"$name"; then
        return
    elif [ -n "$is_list" ]; then
        say "$name"
        return
    fi
    start "$seconds" "$name" "$@"
}

# The same, whatever is selected.
start() {
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
    [ -n "$is_list" ] || title "$1 ($SECONDS s)"
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

# ---- what there is to run

# The programs that run on the emulated GPU too.
list_of() { # <variable of cmake/cuda.cmake>
    awk -v "start=set($1" '$1 == start { is_in = 1 } is_in { print } is_in && /\)$/ { exit }' cmake/cuda.cmake | tr -d '()\n' | sed "s/^set$1//"
}
tests=$(list_of OPAQ_EMULATED_TESTS)
bound_tests=$(list_of OPAQ_EMULATED_MMA_TESTS)
stream_tests=$(list_of OPAQ_EMULATED_STREAM_TESTS)
general_tests=$(list_of OPAQ_EMULATED_GENERAL_TESTS)
library=$(absolute "$folder")/libopaq_cuda.so
portable=$(absolute "$folder-portable")/libopaq_cuda.so
on_gpu=(env OPAQ_TEST_DEVICE=cuda "OPAQ_TEST_CUDA_LIBRARY=$library" "OPAQ_GOLDEN_DIR=$PWD/tests/golden")
on_ptx=("${on_gpu[@]}" "OPAQ_TEST_CUDA_LIBRARY=$portable")

# PyTorch's files with tests that take the device as a parameter, the largest first: those of what only a GPU can show, and the
# others. Without the AOTInductor host: loading a package, of any model, crashed in a CUDA build of PyTorch 2.11.
gpu_files=(test_gpu_compiled test_gpu_graphs test_gpu_invariance test_gpu test_gpu_models test_gpu_large test_gpu_placement)
# shellcheck disable=SC2046  # a list of names without spaces
mapfile -t files < <(ls -S $(grep -lE 'def test_[a-z0-9_]*\(.*\bdevice\b' tests/python/test_*.py) | sed 's|.*/||; s|\.py$||' |
    grep -vE '^(test_gpu|test_torch_aoti)')

python_test() { # <seconds> <prefix of the name> <file> [<variable=value>...]
    local seconds=$1 name="$2pytest $3" file=tests/python/$3.py marks="not slow"
    case $3 in
    test_gpu_models) marks="" ;;             # whole models, of which the CPU's tests run some only
    test_linear_distributed) seconds=320 ;;  # starts processes, each of which imports PyTorch
    test_gpu_compiled) seconds=260 ;;
    esac
    shift 3
    run "$seconds" "$name" env "$@" "$python" -m pytest -q -p no:cacheprovider --tb=short -m "$marks" -k cuda "$file"
}

# ---- the machine, and the build
if [ -z "$is_list" ]; then
    title "machine"
    nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total --format=csv,noheader
    PATH=$PATH:/usr/local/cuda/bin nvcc --version | sed -n 's/.*\(release.*\)/nvcc \1/p'
    say "$(uname -sm), $jobs processors, $($python --version 2>&1)"
    # in the background, because the first import reads gigabytes
    start 120 "PyTorch" "$python" -c 'import torch, numpy, pytest; x = torch.ones(1, device="cuda"); print("torch", torch.__version__,
    "CUDA", torch.version.cuda, "numpy", numpy.__version__, "pytest", pytest.__version__, torch.cuda.get_device_name())'
    if [ "${OPAQ_GPU_BUILD:-ON}" != OFF ]; then
        # shellcheck disable=SC2086  # a list
        start 240 "build" env "TARGETS=opaq_cuda opaq_products $(printf 'test_%s ' $tests $bound_tests)" tools/build.sh "$folder" -DOPAQ_CUDA=ON
        start 240 "build, PTX only" env TARGETS=opaq_cuda tools/build.sh "$folder-portable" -DOPAQ_CUDA=portable -DOPAQ_TESTS=OFF
    fi
    wait
    cat "$logs/summary"
    if [ -z "$tests" ] || [ ! -f "$library" ]; then
        finish
    fi
fi
has_torch=$is_list
[ -n "$is_list" ] || ! grep -q '^ok .*PyTorch' "$logs/summary" || has_torch=yes
export OPAQ_LIBRARY="$PWD/$folder/libopaq.so" OPAQ_COMMAND="$PWD/$folder/opaq"
export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=2 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

# ---- C tests
part "C tests"
for name in $bound_tests; do # products in an order of their own, compared within bounds
    run 120 "within bounds: test_$name" "${on_gpu[@]}" "$folder/tests/c/test_$name"
done
for item in $stream_tests; do # with OPAQ_CUDA_PRODUCT=stream, and the same bits without it
    run 150 "stream: test_${item/:/ }" "${on_gpu[@]}" tests/same_results.sh "$folder/tests/c/test_${item%%:*}" "$([[ $item != *:* ]] || echo "${item#*:}")" OPAQ_CUDA_PRODUCT=stream
done
for name in $general_tests; do # the quantizers for any tensor
    run 120 "general: test_$name" "${on_gpu[@]}" OPAQ_CUDA_PRODUCT=fma OPAQ_CUDA_QUANTIZER=general "$folder/tests/c/test_$name"
done
for name in $tests; do
    run 120 "test_$name" "${on_gpu[@]}" OPAQ_CUDA_PRODUCT=fma "$folder/tests/c/test_$name"
done

# ---- PyTorch
part "PyTorch tests of what only a GPU can show"
if [ -n "$has_torch" ]; then
    for name in "${gpu_files[@]}"; do
        python_test 150 "" "$name"
    done
fi

# ---- memory and races
part "compute-sanitizer"
sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer || true)
sanitize() { # <tool> <program> [<tests>]
    local tool=$1 program=$2 more=()
    shift 2
    [ "$tool" = memcheck ] && more=(--leak-check no)
    run 220 "$tool: $program${*:+ $*}${OPAQ_CUDA_QUANTIZER:+, $OPAQ_CUDA_QUANTIZER}${OPAQ_CUDA_PRODUCT:+, $OPAQ_CUDA_PRODUCT}" "${on_gpu[@]}" "$sanitizer" --tool "$tool" ${more[@]+"${more[@]}"} --error-exitcode 9 \
        --print-limit 20 "$folder/tests/c/$program" "$@"
}
if [ -n "$sanitizer$is_list" ]; then
    for tool in racecheck memcheck initcheck synccheck; do # the slowest first
        OPAQ_CUDA_QUANTIZER=general sanitize "$tool" test_device_quantize whole_parts
        sanitize "$tool" test_device_product rows_do_not # also more than 128 rows
        OPAQ_CUDA_PRODUCT=stream sanitize "$tool" test_device_product rows_do_not
        sanitize "$tool" test_device_quantize whole_parts
        sanitize "$tool" test_experts_composed
        sanitize "$tool" test_op_rearrange
        sanitize "$tool" test_device_quantize given_figures
        OPAQ_CUDA_QUANTIZER=general sanitize "$tool" test_device_quantize given_figures
        sanitize "$tool" test_hiding delayed
        sanitize "$tool" test_linear_given
        sanitize "$tool" test_device_product long_sums
    done
    sanitize memcheck test_device_order every_case
else
    say "NOT RUN  compute-sanitizer (it is not installed)" | tee -a "$logs/summary"
fi

part "PyTorch tests with the parameter device"
if [ -n "$has_torch" ]; then
    for name in "${files[@]}"; do
        python_test 150 "" "$name"
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
for name in $bound_tests; do
    run 120 "PTX only, within bounds: test_$name" "${on_ptx[@]}" "$folder/tests/c/test_$name"
done
for name in $general_tests; do
    run 120 "PTX only, general: test_$name" "${on_ptx[@]}" OPAQ_CUDA_PRODUCT=fma OPAQ_CUDA_QUANTIZER=general "$folder/tests/c/test_$name"
done
for name in $tests; do
    run 120 "PTX only: test_$name" "${on_ptx[@]}" OPAQ_CUDA_PRODUCT=fma "$folder/tests/c/test_$name"
done
if [ -n "$has_torch" ]; then
    for name in test_gpu_graphs test_gpu_invariance test_gpu; do
        python_test 150 "PTX only: " "$name" "OPAQ_CUDA_LIBRARY=$portable"
    done
fi
[ -z "$is_list" ] || exit 0
finish
