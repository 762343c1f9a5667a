#!/usr/bin/env bash
# Builds everything with gcc and with clang, warnings being errors. The builds stay in build-gcc and build-clang;
# later checks use them.
set -euo pipefail
. "$(dirname "$0")/common.sh"
for compiler in gcc clang; do
    if command -v "$compiler" >/dev/null; then
        CC=$compiler tools/build.sh "build-$compiler" -DOPAQ_WERROR=ON >"build-$compiler.log" 2>&1 || {
            grep -vE '^\[[0-9]+/[0-9]+\] (Building|Linking|Re-checking|Creating)' "build-$compiler.log"
            rm -f "build-$compiler.log"
            exit 1
        }
        rm -f "build-$compiler.log"
        say "$compiler: no warnings"
    else
        left_out "there is no $compiler, so its warnings were not seen."
    fi
done
