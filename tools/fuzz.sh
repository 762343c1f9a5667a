#!/usr/bin/env bash
# fuzz.sh <seconds> [<seed>]: runs every libFuzzer target fuzz/fuzz_*.c for that long, under ASan and UBSan. The generated
# corpus is kept in build-fuzz/corpus. With a seed, and from an empty corpus, the inputs are the same in every run; without one
# they are random. Seed inputs are fuzz/seeds/<target>, which are in the repository, and the invalid checkpoints of
# tests/cli/make_hostile.py, written to build-fuzz/seeds.
set -euo pipefail
. "$(dirname "$0")/common.sh"
seconds=$1
seed=${2:-0}
if ! compgen -G 'fuzz/fuzz_*.c' >/dev/null; then
    say "error: there are no fuzz targets, fuzz/fuzz_*.c." >&2
    exit 1
fi

clang=${FUZZ_CC:-clang}
probe=$(mktemp -d)
trap 'rm -rf "$probe"' EXIT
cat >"$probe/probe.c" <<'END'
#include <stddef.h>
#include <stdint.h>
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) { return data == 0 && size != 0; }
END
if ! "$clang" -fsanitize=fuzzer,address,undefined "$probe/probe.c" -o "$probe/probe" >/dev/null 2>&1; then
    note_skipped "there is no clang with libFuzzer, so fuzzing was skipped."
    exit 0
fi

CC=$clang tools/build.sh build-fuzz -DOPAQ_FUZZ=ON -DOPAQ_TESTS=OFF \
    -DCMAKE_BUILD_TYPE=Debug -DCMAKE_C_FLAGS_DEBUG="-O1 -g"
rm -rf build-fuzz/seeds
python3 tests/cli/make_hostile.py --seeds build-fuzz/seeds

# run_target <name>: runs one target with its output in a log, and prints one line of statistics.
run_target() {
    local name=$1 corpus=build-fuzz/corpus/$1 seeds=() folder
    mkdir -p "$corpus" build-fuzz/findings
    for folder in "fuzz/seeds/$name" "build-fuzz/seeds/$name"; do
        if [ -d "$folder" ]; then
            seeds+=("$folder")
        fi
    done
    if ! "build-fuzz/fuzz/$name" -seed="$seed" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="build-fuzz/findings/$name-" "$corpus" ${seeds[@]+"${seeds[@]}"} \
        >"build-fuzz/$name.log" 2>&1; then
        tail -n 60 "build-fuzz/$name.log" >&2
        say "error: $name failed; the input is in build-fuzz/findings, the log is build-fuzz/$name.log." >&2
        return 1
    fi
    say "$name: $(sed -n 's/^stat::number_of_executed_units: */runs: /p' "build-fuzz/$name.log")" \
        "$(sed -n 's/^#[0-9]*\tDONE *//p' "build-fuzz/$name.log")"
}
export -f run_target say
export seconds seed

title "every target for $seconds seconds, $jobs at a time"
find fuzz -name 'fuzz_*.c' | sed 's|.*/||; s|[.]c$||' | sort | xargs -n 1 -P "$jobs" bash -c 'run_target "$1"' run
