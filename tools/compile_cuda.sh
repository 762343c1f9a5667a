#!/usr/bin/env bash
# compile_cuda.sh <nvcc> <source> <object> <flags>...: compiles one file. The output, which has ptxas's report of registers,
# stack frames and spills, goes to <object>.log and is printed only if the compilation fails. The PTX for each architecture,
# which check_cuda.sh reads, goes to <object>.<architecture>.ptx.
set -euo pipefail
nvcc=$1 source=$2 object=$3
shift 3
steps=$object.steps
rm -rf "$steps"
mkdir -p "$steps"
trap 'rm -rf "$steps"' EXIT
if ! "$nvcc" "$@" -Xptxas=-v --keep --keep-dir "$steps" -c "$source" -o "$object" >"$object.log" 2>&1; then
    cat "$object.log" >&2
    exit 1
fi
# nvcc names the files <stem>.compute_<N>.ptx, or <stem>.ptx if there is one architecture only.
only=$(printf '%s\n' "$@" | sed -n 's/.*arch=compute_\([0-9a-z]*\).*/\1/p' | tail -n 1)
for ptx in "$steps"/*.ptx; do
    name=${ptx##*/}
    case $name in
    *.compute_*) architecture=${name##*.compute_} && architecture=${architecture%.ptx} ;;
    *) architecture=$only ;;
    esac
    mv "$ptx" "$object.compute_$architecture.ptx"
done
