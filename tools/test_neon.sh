#!/usr/bin/env bash
# test_neon.sh: builds for AArch64 with a cross compiler into build-neon, and runs the C tests under emulation: all of them
# with QEMU_CPU=max, and those that depend on the kernel also on a processor without 8-bit dot products. Needs gcc and a C
# library for AArch64 (NEON_CC: aarch64-linux-gnu-gcc) and qemu-aarch64.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cc=${NEON_CC:-aarch64-linux-gnu-gcc}

skip() { # <what is missing>
    note_skipped "there is no $1, so the kernels for AArch64 were not tested."
    exit 0
}

if [ "$(uname -m)" = aarch64 ]; then
    say "This processor runs the kernels for AArch64 itself: make test-c tests them."
    exit 0
fi
command -v "$cc" >/dev/null || skip "cross compiler for AArch64 ($cc)"
qemu=$(command -v qemu-aarch64 || command -v qemu-aarch64-static) || skip "qemu-aarch64"
loader=$("$cc" -print-file-name=ld-linux-aarch64.so.1)
[ -e "$loader" ] || skip "C library for AArch64"
QEMU_LD_PREFIX=$(cd "$(dirname "$loader")/.." && pwd -P)
export QEMU_LD_PREFIX

title "the build for AArch64"
tools/build.sh build-neon -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_C_COMPILER="$cc" \
    -DCMAKE_CROSSCOMPILING_EMULATOR="$qemu" -DOPAQ_WERROR=ON

# Skipped: test_never_slower, because it measures time; test_install, which runs installed programs without the emulator;
# test_quant_kernels, which needs at least two tables of quantizers, and AArch64 has only the reference.
title "the C tests with NEON and dot products"
QEMU_CPU=max tools/run_ctest.sh build-neon --exclude-regex '^test_(never_slower|install|quant_kernels)$'
title "the tests of kernels with NEON alone"
QEMU_CPU=cortex-a53 tools/run_ctest.sh build-neon --tests-regex '^test_(packed|dispatch|kernel_force|experts_tiled|runner)'
