/* cpu/quant/x86/quant_tables_x86.c: the tables for AVX2 and AVX-512, which have the same entries. */
#include <stddef.h>

#include "cpu/quant/x86/quant_kernels_x86.h"
#include "opaq/cpu.h"

#if defined(__x86_64__)
/* A format's entries, and the family of its kernels. */
#define QUANTIZE(format, family, isa) \
    { "quantize_" #format "_" #isa, quantize_##family##_##isa }
#define DEQUANTIZE(format, isa) \
    { "dequantize_" #format "_" #isa, dequantize_##isa }
#define BOTH(format, family, isa, amaxes) \
    { "quantize_both_" #format "_" #isa, covers_both_##family##_##isa, quantize_both_##family##_##isa, amaxes }

/* clang-format off */
#define QUANT_TABLE(isa, feature)                                                                        \
    const struct quant_table quant_table_##isa = {                                                       \
        .name = #isa,                                                                                    \
        .features = (feature),                                                                           \
        .quantize = {                                                                                    \
            QUANTIZE(fp8, fp8, isa), QUANTIZE(fp8row, fp8, isa), QUANTIZE(fp8blk1, fp8, isa),            \
            QUANTIZE(fp8blk2, fp8, isa), QUANTIZE(mxfp8, mx, isa), QUANTIZE(mxfp4, mx, isa),             \
            QUANTIZE(nvfp4, nvfp4, isa),                                                                 \
        },                                                                                               \
        .dequantize = {                                                                                  \
            DEQUANTIZE(fp8, isa), DEQUANTIZE(fp8row, isa), DEQUANTIZE(fp8blk1, isa),                     \
            DEQUANTIZE(fp8blk2, isa), DEQUANTIZE(mxfp8, isa), DEQUANTIZE(mxfp4, isa),                    \
            DEQUANTIZE(nvfp4, isa),                                                                      \
        },                                                                                               \
        .both = {                                                                                        \
            BOTH(fp8, fp8, isa, NULL), BOTH(fp8row, fp8, isa, &amaxes_fp8row_##isa),                     \
            BOTH(fp8blk1, fp8, isa, NULL), BOTH(fp8blk2, fp8, isa, NULL), BOTH(mxfp8, mx, isa, NULL),    \
            BOTH(mxfp4, mx, isa, NULL), BOTH(nvfp4, nvfp4, isa, NULL),                                   \
        },                                                                                               \
        .amax = {"amax_" #isa, amax_##isa},                                                              \
        .decode_row = {"decode_row_" #isa, decode_row_##isa},                                            \
    }
/* clang-format on */

QUANT_TABLE(avx2, OPAQ_CPU_AVX2);
QUANT_TABLE(avx512, OPAQ_CPU_AVX512);
#endif
