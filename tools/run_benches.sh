#!/usr/bin/env bash
# run_benches.sh <build folder> [options]: runs the benchmarks, each of which prints a table and writes
# <folder>/bench/<name>.json, and then bench_summary.py, which prints one table of all rows that have a target. Those in
# Python need PyTorch and are skipped without it. Options:
#     --rounds N      rounds of each benchmark, instead of its default
#     --benches LIST  only these, separated by commas: peaks, packed, quant, gemm, linear, backward, moe, llama,
#                     overhead
#     --strict        exit 1 if a row is below its required value
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1
shift

rounds=
wanted=peaks,packed,quant,gemm,linear,backward,moe,llama,overhead
strict=()
while [ $# -gt 0 ]; do
    case $1 in
    --rounds | --benches)
        if [ $# -lt 2 ]; then
            say "error: $1 needs a value." >&2
            exit 2
        fi
        if [ "$1" = --rounds ]; then rounds=$2; else wanted=$2; fi
        shift
        ;;
    --strict) strict=(--strict) ;;
    *)
        say "error: $1 is not an option, expected --rounds N, --benches LIST or --strict." >&2
        exit 2
        ;;
    esac
    shift
done

is_wanted() { [[ ",$wanted," == *",$1,"* ]]; }

# In hundredths of a second: the time that all processors were busy or stolen by a hypervisor, and the part of it that this
# script's children used.
busy() { awk '/^cpu / { printf "%d", $2 + $3 + $4 + $7 + $8 + $9 }' /proc/stat 2>/dev/null || printf 0; }
own() { awk '{ printf "%d", $16 + $17 }' "/proc/$$/stat" 2>/dev/null || printf 0; }

# others <busy> <own> <seconds>: the share of processor time that other programs used since these values were read; 0 if
# the system does not report it.
others() {
    awk -v busy="$(($(busy) - $1))" -v own="$(($(own) - $2))" -v all="$(((SECONDS - $3) * jobs * 100))" \
        'BEGIN { share = all > 0 ? (busy - own) / all : 0; printf "%.3f\n", (share > 0 ? share : 0) }'
}

# bench <name> <rounds> <command>...: removes the results of an earlier run, runs the command, which writes <name>.json, and
# writes the share of processor time that other programs used into <name>.others.
bench() {
    local name=$1 default_rounds=$2 busy_before own_before started=$SECONDS
    shift 2
    title "$name"
    rm -f "$folder/bench/$name.json" "$folder/bench/$name.others"
    busy_before=$(busy)
    own_before=$(own)
    "$@" --rounds "${rounds:-$default_rounds}" --json "$folder/bench/$name.json"
    others "$busy_before" "$own_before" "$started" >"$folder/bench/$name.others"
}

mkdir -p "$folder/bench"
programs=$folder/bench
if is_wanted peaks; then bench bench_peaks 10 "$programs/bench_peaks"; fi
if is_wanted packed; then
    bench bench_packed 8 "$programs/bench_packed"
    OPAQ_CPU=avx2 bench bench_packed_avx2 8 "$programs/bench_packed" --only nvfp4
fi
if is_wanted quant; then bench bench_quant 4 "$programs/bench_quant" --threads 1; fi
if is_wanted gemm; then bench bench_gemm 3 "$programs/bench_gemm" --shape 512x1024x1024; fi

if is_wanted linear || is_wanted backward || is_wanted moe || is_wanted llama || is_wanted overhead; then
    status=0
    tools/python_env.sh torch core || status=$?
    if [ "$status" != 0 ] && [ "$status" != 3 ]; then # 3: it printed what is skipped
        exit "$status"
    fi
    if [ "$status" = 0 ]; then
        python=${PYTHON:-.venv/bin/python}
        OPAQ_LIBRARY=$(absolute "$folder")/libopaq.so
        export OPAQ_LIBRARY PYTHONPATH=$PWD/python
        if is_wanted linear; then bench bench_linear 4 "$python" bench/bench_linear.py; fi
        if is_wanted backward; then bench bench_backward 4 "$python" bench/bench_backward.py; fi
        if is_wanted moe; then bench bench_moe 5 "$python" bench/bench_moe.py; fi
        if is_wanted llama; then bench bench_llama 5 "$python" bench/bench_llama.py --threads "$jobs"; fi
        if is_wanted overhead; then
            bench bench_overhead 20 "$python" bench/bench_overhead.py || say "note: the operators' overhead is too high." >&2
        fi
    fi
fi

title "all rows"
"${PYTHON:-python3}" tools/bench_summary.py "$folder/bench" ${strict[@]+"${strict[@]}"}
