#!/usr/bin/env bash
# same_results.sh <program> <test> <variable=value>...: runs tests of a C test program (all if <test> is empty), and once more with
# the variables set; fails if one of them fails, or if they print different hashes of their results (tests/c/support_device.h).
set -euo pipefail
program=$1 test=$2
shift 2
first=$("$program" "$test")
second=$(env "$@" "$program" "$test")
printf '%s\n' "$second"
first=$(grep 'results have the hash' <<<"$first")
second=$(grep 'results have the hash' <<<"$second")
if [ "$first" != "$second" ]; then
    echo "error: $program $test: $first; with $*: $second"
    exit 1
fi
