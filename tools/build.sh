#!/usr/bin/env bash
# build.sh <folder> [cmake options]: configures and builds into the folder, with Ninja if it is installed, else with make.
# TARGETS, if set, lists the targets to build instead of all; with opaq_products among them it says whether the CUDA back end
# is built. OPAQ_CUDA (AUTO) is passed to cmake.
set -euo pipefail
. "$(dirname "$0")/common.sh"
folder=$1
shift

if [ -z "${CC:-}" ] && ! command -v cc >/dev/null; then
    for candidate in gcc clang; do
        if command -v "$candidate" >/dev/null; then
            export CC=$candidate
            break
        fi
    done
    if [ -z "${CC:-}" ]; then
        say "error: there is no C compiler: install gcc or clang, or set CC." >&2
        exit 1
    fi
fi
cmake=$(tools/find_cmake.sh)

generator=()
if [ ! -f "$folder/CMakeCache.txt" ] && command -v ninja >/dev/null; then
    generator=(-G Ninja)
fi
mkdir -p "$folder"
if ! "$cmake" -S . -B "$folder" ${generator[@]+"${generator[@]}"} "-DOPAQ_CUDA=${OPAQ_CUDA:-AUTO}" "$@" >"$folder/configure.log" 2>&1; then
    cat "$folder/configure.log" >&2
    exit 1
fi
if [[ ${TARGETS:-} == *opaq_products* ]]; then
    sed -n 's/^-- \(CUDA back end: .*\)/\1/p' "$folder/configure.log"
fi
# shellcheck disable=SC2086  # TARGETS is a list
exec "$cmake" --build "$folder" --parallel "$jobs" ${TARGETS:+--target $TARGETS}
