#!/usr/bin/env bash
# Runs all C tests under AddressSanitizer and UndefinedBehaviorSanitizer, then the tests that use threads under
# ThreadSanitizer. Assertions are enabled, unlike in Release builds.
set -euo pipefail
. "$(dirname "$0")/common.sh"

# works <flags>: whether this compiler can build a program with them that runs.
works() {
    local folder status=0
    folder=$(mktemp -d)
    echo 'int main(void) { return 0; }' >"$folder/probe.c"
    { "${CC:-cc}" "$@" "$folder/probe.c" -o "$folder/probe" && "$folder/probe"; } >/dev/null 2>&1 || status=1
    rm -rf "$folder"
    return $status
}

sanitized_build() { # <folder> <sanitizers>
    tools/build.sh "$1" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_C_FLAGS_DEBUG="-O1 -g" -DOPAQ_SANITIZE="$2"
}

title "ASan and UBSan"
if works -fsanitize=address,undefined; then
    sanitized_build build-asan address,undefined
    ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1:strict_string_checks=1} \
        UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1} tools/run_ctest.sh build-asan
else
    note_skipped "${CC:-cc} cannot build with -fsanitize=address,undefined, so the tests were not run under ASan and UBSan."
fi

title "TSan"
if works -fsanitize=thread; then
    threaded='intern|pool|parallel|cli_progress|cli_output_file'
    TARGETS=$(find tests/c -name 'test_*.c' | sed 's|.*/||; s|[.]c$||' | grep -E "$threaded" | tr '\n' ' ') \
        sanitized_build build-tsan thread
    TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1} tools/run_ctest.sh build-tsan --tests-regex "$threaded"
else
    note_skipped "${CC:-cc} cannot build or run with -fsanitize=thread, so the tests were not run under TSan."
fi
