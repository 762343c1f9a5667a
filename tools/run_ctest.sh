#!/usr/bin/env bash
# run_ctest.sh <build folder> [ctest options]: runs the C tests of a build. The last line is the total over all test
# programs, "N passed, N failed".
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1
shift
ctest=$(dirname "$(tools/find_cmake.sh)")/ctest
status=0
"$ctest" --test-dir "$folder" --parallel "$jobs" --output-on-failure --no-tests=error "$@" || status=$?
awk '/^[0-9]+ passed, [0-9]+ failed$/ { passed += $1; failed += $3 }
    END { printf "%d passed, %d failed\n", passed, failed }' "$folder/Testing/Temporary/LastTest.log"
exit $status
