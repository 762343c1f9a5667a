#!/usr/bin/env bash
# check_cuda.sh [--print]: compiles the CUDA back end with nvcc, with warnings as errors, into build, where make and the tests
# use it too, and with PTX only into build-portable; fails if a hot kernel has a stack frame or spills; prints the other
# kernels that have any (--print: all kernels, with their registers); checks the PTX for approximate arithmetic; checks the
# exports and dependencies of libopaq_cuda.so; and runs test_backend_library, which expects an error message on a machine
# without a driver. Without nvcc it is skipped with a note.
set -euo pipefail
. "$(dirname "$0")/common.sh"

# Kernels in whose loops a model's time is spent, by their names without template arguments. A new one has to be added.
hot="product_few product_tiles product_stream_kernel product_panels_kernel decode_operand quantize_rows_kernel quantize_fp8_rows_kernel quantize_tiles_kernel amax_parts_kernel amax_hadamard_kernel"

if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    say "note: there is no nvcc, so libopaq_cuda.so was not built. src/cuda was compiled for the emulated GPU only."
    exit 0
fi
built=build
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! TARGETS="opaq_cuda test_backend_library" tools/build.sh "$built" -DOPAQ_CUDA=ON >"$log" 2>&1; then
    cat "$log"
    exit 1
fi

# With PTX for other GPUs only, as `make test-gpu` builds it too.
if ! TARGETS=opaq_cuda tools/build.sh "$built-portable" -DOPAQ_CUDA=portable -DOPAQ_TESTS=OFF >"$log" 2>&1; then
    cat "$log"
    exit 1
fi

# A line for each kernel of sm_90a: name, registers, bytes of the stack frame, bytes of spill stores and loads.
kernels=$(cat "$built"/cuda/*.o.log | awk '
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
if command -v c++filt >/dev/null; then # otherwise the names are not readable
    for name in $hot; do
        found=$(grep -E "(^|::)$name(<| )" <<<"$kernels" || true)
        if [ -z "$found" ]; then
            say "there is no kernel $name: correct the list in tools/check_cuda.sh"
            exit 1
        elif slow=$(awk '$3 > 0 || $4 > 0' <<<"$found") && [ -n "$slow" ]; then
            say "a hot kernel must have no stack frame and no spills (name, registers, bytes of both):" "$slow"
            exit 1
        fi
    done
    say "no stack frame and no spills in: $hot"
fi

# Results are defined with one rounding per operation: no fused multiply-add except where the source, or a
# header that it includes, calls __fmaf_rn(), no
# approximate instruction, no flushing of subnormal numbers. (Only f32 is checked: f64 division and square root use approximate
# instructions and correct the result.)
for source in $(find src/cuda -name '*.cu' | sort); do
    name=${source##*/}
    wrong=$(grep -hE '\.(ftz|approx)[.a-z]*\.f32|fma\.rn\.f32' "$built/cuda/${name%.cu}.o".*.ptx | sed 's/ .*//' | sort | uniq -c || true)
    mapfile -t files < <(echo "$source"; sed -n 's|^#include "\(cuda/.*\)"|src/\1|p' "$source")
    if grep -q '__fmaf_rn' "${files[@]}"; then
        wrong=$(grep -v 'fma\.rn\.f32' <<<"$wrong" || true)
    fi
    if [ -n "$wrong" ]; then
        say "$source: approximate or contracted instructions in the PTX:" "$wrong"
        exit 1
    fi
done
say "no approximate or contracted arithmetic in the PTX"

exported=$(nm -D --defined-only "$built/libopaq_cuda.so" | awk '{ print $3 }')
needed=$(readelf -d "$built/libopaq_cuda.so" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
unexpected=$(printf '%s\n' "$needed" | grep -vE '^(libc|libm|libdl|librt|libpthread|ld-linux[-a-z0-9_]*)\.so' || true)
if [ "$exported" != opaq_cuda_open ] || [ -n "$unexpected" ]; then
    say "libopaq_cuda.so exports: $exported; needs beyond the C library: $unexpected"
    exit 1
fi
say "libopaq_cuda.so exports opaq_cuda_open only and needs only:" $needed
OPAQ_TEST_REAL_CUDA_LIBRARY=$PWD/$built/libopaq_cuda.so "$built"/tests/c/test_backend_library
