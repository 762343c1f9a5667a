/* cpu/gemm/x86/packed_table_avx512.c: the list of AVX-512 kernels for tiled weights. */
#include "cpu/gemm/packed.h"
#include "cpu/gemm/x86/packed_kernels_avx512.h"
#include "opaq/cpu.h"

#if defined(__x86_64__)
/* clang-format off */
#define ENTRY(format, precision, run) \
    {"packed_" #format "_" #precision "_avx512", packed_##format##_##run##_avx512, PACKED_SCRATCH_AVX512, \
     PACKED_FEW_SCRATCH_AVX512, 4}

const struct packed_table packed_table_avx512 = {
    "avx512", OPAQ_CPU_AVX512 | OPAQ_CPU_AVX512_VBMI | OPAQ_CPU_AVX512_VNNI, {
        {ENTRY(nvfp4, exact, exact), ENTRY(nvfp4, near, near),
         ENTRY(nvfp4, fast, fast),
         ENTRY(nvfp4, fast32, fast32), ENTRY(nvfp4, codes, fast32)},
        {ENTRY(mxfp4, exact, exact), ENTRY(mxfp4, near, near),
         ENTRY(mxfp4, fast, fast),
         ENTRY(mxfp4, fast32, fast32), ENTRY(mxfp4, codes, fast32)},
    },
};

const struct packed_table packed_table_avx512_bf16 = {
    "avx512", OPAQ_CPU_AVX512 | OPAQ_CPU_AVX512_VBMI | OPAQ_CPU_AVX512_VNNI | OPAQ_CPU_AVX512_BF16, {
        {[PACKED_BF16] = ENTRY(nvfp4, bf16, bf16)},
        {[PACKED_BF16] = ENTRY(mxfp4, bf16, bf16)},
    },
};
/* clang-format on */
#endif
