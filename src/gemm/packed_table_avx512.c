/* gemm/packed_table_avx512.c: the list of AVX-512 kernels for tiled weights. */
#include <stddef.h>

#include "gemm/packed_kernels_avx512.h"
#include "gemm/packed_tables.h"
#include "opaq/cpu.h"

#if defined(__x86_64__)
/* clang-format off */
#define INT8(format, precision, run) \
    {"packed_" #format "_" #precision "_avx512", packed_##format##_##run##_avx512, PACKED_INT8_BYTES_AVX512, 4}
#define NONE {NULL, NULL, 0, 0}

const struct packed_table packed_table_avx512 = {
    "avx512", OPAQ_CPU_AVX512 | OPAQ_CPU_AVX512_VBMI | OPAQ_CPU_AVX512_VNNI, {
        {NONE, NONE, INT8(nvfp4, fast, fast), INT8(nvfp4, fast32, fast32), INT8(nvfp4, codes, fast32)},
        {NONE, NONE, INT8(mxfp4, fast, fast), INT8(mxfp4, fast32, fast32), INT8(mxfp4, codes, fast32)},
    },
};
/* clang-format on */
#endif
