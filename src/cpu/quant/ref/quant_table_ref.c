/* cpu/quant/ref/quant_table_ref.c: the reference table: complete, and the definition of every result. */
#include "cpu/quant/ref/quant_table_ref.h"

/* Rows in the order of enum opaq_format. */
const struct quant_table quant_table_ref = {
    .name = "ref",
    .features = 0,
    .quantize =
        {
            {"quantize_fp8_ref", quantize_fp8_tensor_ref},
            {"quantize_fp8row_ref", quantize_fp8_blocks_ref},
            {"quantize_fp8blk1_ref", quantize_fp8_blocks_ref},
            {"quantize_fp8blk2_ref", quantize_fp8_blocks_ref},
            {"quantize_mxfp8_ref", quantize_mx_ref},
            {"quantize_mxfp4_ref", quantize_mx_ref},
            {"quantize_nvfp4_ref", quantize_nvfp4_ref},
        },
    .dequantize =
        {
            {"dequantize_fp8_ref", dequantize_ref},
            {"dequantize_fp8row_ref", dequantize_ref},
            {"dequantize_fp8blk1_ref", dequantize_ref},
            {"dequantize_fp8blk2_ref", dequantize_ref},
            {"dequantize_mxfp8_ref", dequantize_ref},
            {"dequantize_mxfp4_ref", dequantize_ref},
            {"dequantize_nvfp4_ref", dequantize_ref},
        },
    .amax = {"amax_ref", amax_ref},
};
