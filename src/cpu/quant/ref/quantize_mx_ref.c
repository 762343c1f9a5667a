/* cpu/quant/ref/quantize_mx_ref.c: reference for mxfp8 and mxfp4: one power-of-two scale per 1x32 or 32x32.
 * Specification: docs/formats.md. */
#include "cpu/quant/ref/quant_table_ref.h"
#include "definition/block_ref.h"

void quantize_mx_ref(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end) {
    copy_clear(copy, r, r_end - r);
    for (int64_t row = r; row < r_end; row += copy->block_rows) {
        for (int64_t c = 0; c < copy->operand.columns; c += MX_BLOCK) {
            quantize_mx_block(job, copy, row, c);
        }
    }
}
