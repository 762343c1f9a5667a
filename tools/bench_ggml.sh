#!/usr/bin/env bash
# bench_ggml.sh <checkout of llama.cpp> [options of peer_ggml]: builds ggml from the checkout for this processor
# (GGML_NATIVE), links bench/peer_ggml.c with it, and runs that. Needs a C++ compiler. Everything is written below
# build/peers.
set -euo pipefail
. "$(dirname "$0")/common.sh"
if [ $# -lt 1 ] || [ ! -f "$1/ggml/CMakeLists.txt" ]; then
    say "usage: tools/bench_ggml.sh <checkout of llama.cpp> [options of peer_ggml; --help shows them]" >&2
    exit 2
fi
checkout=$(absolute "$1")
shift
tools/build.sh build
folder=build/peers/ggml
mkdir -p "$folder"
cmake=$(tools/find_cmake.sh)
"$cmake" -S "$checkout/ggml" -B "$folder" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
    -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF >"$folder/configure.log"
"$cmake" --build "$folder" -j "$jobs" >"$folder/build.log"
${CC:-cc} -O2 -std=c11 -D_POSIX_C_SOURCE=200809L -Iinclude -I"$checkout/ggml/include" bench/peer_ggml.c \
    -o build/peers/peer_ggml build/libopaq.a "$folder/src/libggml.a" "$folder/src/libggml-cpu.a" \
    "$folder/src/libggml-base.a" -lstdc++ -fopenmp -lm -lpthread -ldl
build/peers/peer_ggml "$@"
