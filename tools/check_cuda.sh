#!/usr/bin/env bash
# check_cuda.sh [--print]: compiles the CUDA back end with nvcc into build-nvcc, with warnings as errors; prints the kernels
# that have stack frames or spills (--print: all kernels, with their registers); checks the PTX for approximate arithmetic;
# checks the exports and dependencies of libopaq_cuda.so; and runs test_backend_library, which expects an error message on a
# machine without a driver. Without nvcc it is skipped with a note.
set -euo pipefail
. "$(dirname "$0")/common.sh"

if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    say "note: there is no nvcc, so libopaq_cuda.so was not built. src/cuda was compiled for the emulated GPU only."
    exit 0
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! TARGETS=opaq_cuda tools/build.sh build-nvcc -DOPAQ_CUDA=ON -DOPAQ_TESTS=OFF -DOPAQ_WERROR=ON >"$log" 2>&1 ||
    ! TARGETS=test_backend_library tools/build.sh build >>"$log" 2>&1; then
    cat "$log"
    exit 1
fi

# A line for each kernel of sm_90a: name, registers, bytes of the stack frame, bytes of spill stores and loads.
kernels=$(cat build-nvcc/cuda/*.o.log | awk '
    /Compiling entry function/ { split($0, quoted, "\x27"); name = quoted[2] }
    /bytes stack frame/ { frame = $1; spill = $5 + $9 }
    /Used [0-9]+ registers/ { for (i = 1; i <= NF; i++) if ($i == "registers" || $i == "registers,") print name, $(i - 1), frame, spill }' |
    if command -v c++filt >/dev/null; then c++filt; else cat; fi | sed 's/^void //; s/, /,/g; s/([a-z_ ]*)//' | sort)
say "$(printf '%s\n' "$kernels" | wc -l) kernels for sm_90a, and PTX for compute_80; no warnings"
if [ "${1:-}" = --print ]; then
    printf '%s\n' "$kernels" | awk '{ printf "  %-32s %3d registers, stack frame %4d bytes, spills %d bytes\n", $1, $2, $3, $4 }'
else
    printf '%s\n' "$kernels" | awk '$3 > 0 || $4 > 0 { printf "  %-32s stack frame %4d bytes, spills %d bytes\n", $1, $3, $4 }'
fi

# Results are defined with one rounding per operation: no fused multiply-add except __fmaf_rn() in product.cu, no approximate
# instruction, no flushing of subnormal numbers. (Only f32 is checked: f64 division and square root use approximate
# instructions and correct the result.)
begin=$SECONDS
for source in $(find src/cuda -name '*.cu' | sort); do
    if grep -qE '__global__' "$source"; then
        PATH=$PATH:/usr/local/cuda/bin nvcc -std=c++20 -O2 -DNDEBUG -fmad=false -arch=compute_80 -Iinclude -Isrc -ptx "$source" -o "$log"
        wrong=$(grep -E '\.(ftz|approx)[.a-z]*\.f32|fma\.rn\.f32' "$log" | sort | uniq -c | sort -rn | head -n 3 || true)
        if [ -n "$wrong" ] && ! { [ "${source##*/}" = product.cu ] && ! grep -vq 'fma\.rn\.f32' <<<"$wrong"; }; then
            say "$source: approximate or contracted instructions in the PTX:" "$wrong"
            exit 1
        fi
    fi
done
say "no approximate or contracted arithmetic in the PTX ($((SECONDS - begin)) s)"

exported=$(nm -D --defined-only build-nvcc/libopaq_cuda.so | awk '{ print $3 }')
needed=$(readelf -d build-nvcc/libopaq_cuda.so | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
unexpected=$(printf '%s\n' "$needed" | grep -vE '^(libc|libm|libdl|librt|libpthread|ld-linux[-a-z0-9_]*)\.so' || true)
if [ "$exported" != opaq_cuda_open ] || [ -n "$unexpected" ]; then
    say "libopaq_cuda.so exports: $exported; needs beyond the C library: $unexpected"
    exit 1
fi
say "libopaq_cuda.so exports opaq_cuda_open only and needs only:" $needed
OPAQ_TEST_REAL_CUDA_LIBRARY=$PWD/build-nvcc/libopaq_cuda.so build/tests/c/test_backend_library
