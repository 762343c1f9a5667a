#!/usr/bin/env bash
# compile_cuda.sh <nvcc> <source> <object> <flags>...: compiles one file. The output, which has ptxas's report of registers,
# stack frames and spills, goes to <object>.log and is printed only if the compilation fails.
set -euo pipefail
nvcc=$1 source=$2 object=$3
shift 3
mkdir -p "$(dirname "$object")"
if ! "$nvcc" "$@" -Xptxas=-v -c "$source" -o "$object" >"$object.log" 2>&1; then
    cat "$object.log" >&2
    exit 1
fi
