/* cpu/quant/x86/quant_table_avx2.c: the table for AVX2; what it leaves out, a slower one has. */
#include "cpu/quant/x86/quant_table_avx2.h"

#include <stddef.h>

#include "opaq/cpu.h"

#if defined(__x86_64__)
const struct quant_table quant_table_avx2 = {
    .name = "avx2",
    .features = OPAQ_CPU_AVX2,
    .quantize =
        {
            {"quantize_fp8_avx2", quantize_fp8_avx2},
            {"quantize_fp8row_avx2", quantize_fp8_avx2},
            {"quantize_fp8blk1_avx2", quantize_fp8_avx2},
            {"quantize_fp8blk2_avx2", quantize_fp8_avx2},
            {"quantize_mxfp8_avx2", quantize_mx_avx2},
            {"quantize_mxfp4_avx2", quantize_mx_avx2},
            {"quantize_nvfp4_avx2", quantize_nvfp4_avx2},
        },
    .dequantize =
        {
            {"dequantize_fp8_avx2", dequantize_avx2},
            {"dequantize_fp8row_avx2", dequantize_avx2},
            {"dequantize_fp8blk1_avx2", dequantize_avx2},
            {"dequantize_fp8blk2_avx2", dequantize_avx2},
            {"dequantize_mxfp8_avx2", dequantize_avx2},
            {"dequantize_mxfp4_avx2", dequantize_avx2},
            {"dequantize_nvfp4_avx2", dequantize_avx2},
        },
    .both =
        {
            {"quantize_both_fp8_avx2", covers_both_fp8_avx2, quantize_both_fp8_avx2, NULL},
            {"quantize_both_fp8row_avx2", covers_both_fp8_avx2, quantize_both_fp8_avx2, &amaxes_fp8row_avx2},
            {"quantize_both_fp8blk1_avx2", covers_both_fp8_avx2, quantize_both_fp8_avx2, NULL},
            {"quantize_both_fp8blk2_avx2", covers_both_fp8_avx2, quantize_both_fp8_avx2, NULL},
            {"quantize_both_mxfp8_avx2", covers_both_mx_avx2, quantize_both_mx_avx2, NULL},
            {"quantize_both_mxfp4_avx2", covers_both_mx_avx2, quantize_both_mx_avx2, NULL},
            {"quantize_both_nvfp4_avx2", covers_both_nvfp4_avx2, quantize_both_nvfp4_avx2, NULL},
        },
    .amax = {"amax_avx2", amax_avx2},
    .decode_row = {"decode_row_avx2", decode_row_avx2},
};
#endif
