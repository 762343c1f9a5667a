#!/usr/bin/env bash
# Builds everything with gcc and with clang, with warnings as errors. Later checks use build-gcc and build-clang.
set -euo pipefail
. "$(dirname "$0")/common.sh"
for compiler in gcc clang; do
    if command -v "$compiler" >/dev/null; then
        CC=$compiler tools/build.sh "build-$compiler" -DOPAQ_WERROR=ON -DOPAQ_CUDA=OFF >"build-$compiler.log" 2>&1 || {
            grep -vE '^\[[0-9]+/[0-9]+\] (Building|Linking|Re-checking|Creating)' "build-$compiler.log"
            rm -f "build-$compiler.log"
            exit 1
        }
        rm -f "build-$compiler.log"
        say "$compiler: no warnings"
    else
        note_skipped "there is no $compiler, so its warnings were not checked."
    fi
done
