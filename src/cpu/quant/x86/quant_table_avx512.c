/* cpu/quant/x86/quant_table_avx512.c: the table for AVX-512; what it leaves out, a slower one has. */
#include "cpu/quant/x86/quant_table_avx512.h"

#include <stddef.h>

#include "opaq/cpu.h"

#if defined(__x86_64__)
const struct quant_table quant_table_avx512 = {
    .name = "avx512",
    .features = OPAQ_CPU_AVX512,
    .quantize =
        {
            {"quantize_fp8_avx512", quantize_fp8_avx512},
            {"quantize_fp8row_avx512", quantize_fp8_avx512},
            {"quantize_fp8blk1_avx512", quantize_fp8_avx512},
            {"quantize_fp8blk2_avx512", quantize_fp8_avx512},
            {"quantize_mxfp8_avx512", quantize_mx_avx512},
            {"quantize_mxfp4_avx512", quantize_mx_avx512},
            {"quantize_nvfp4_avx512", quantize_nvfp4_avx512},
        },
    .dequantize =
        {
            {"dequantize_fp8_avx512", dequantize_avx512},
            {"dequantize_fp8row_avx512", dequantize_avx512},
            {"dequantize_fp8blk1_avx512", dequantize_avx512},
            {"dequantize_fp8blk2_avx512", dequantize_avx512},
            {"dequantize_mxfp8_avx512", dequantize_avx512},
            {"dequantize_mxfp4_avx512", dequantize_avx512},
            {"dequantize_nvfp4_avx512", dequantize_avx512},
        },
    .both =
        {
            {"quantize_both_fp8_avx512", covers_both_fp8_avx512, quantize_both_fp8_avx512, NULL},
            {"quantize_both_fp8row_avx512", covers_both_fp8_avx512, quantize_both_fp8_avx512,
             &amaxes_fp8row_avx512},
            {"quantize_both_fp8blk1_avx512", covers_both_fp8_avx512, quantize_both_fp8_avx512, NULL},
            {"quantize_both_fp8blk2_avx512", covers_both_fp8_avx512, quantize_both_fp8_avx512, NULL},
            {"quantize_both_mxfp8_avx512", covers_both_mx_avx512, quantize_both_mx_avx512, NULL},
            {"quantize_both_mxfp4_avx512", covers_both_mx_avx512, quantize_both_mx_avx512, NULL},
            {"quantize_both_nvfp4_avx512", covers_both_nvfp4_avx512, quantize_both_nvfp4_avx512, NULL},
        },
    .amax = {"amax_avx512", amax_avx512},
    .decode_row = {"decode_row_avx512", decode_row_avx512},
};
#endif
