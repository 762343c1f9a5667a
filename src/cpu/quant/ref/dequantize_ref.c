/* cpu/quant/ref/dequantize_ref.c: reference for dequantizing every format. Specification: docs/formats.md. */
#include "cpu/quant/ref/quant_table_ref.h"
#include "definition/decode_ref.h"

void dequantize_ref(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end) {
    const int n = (int)min_int64(copy->block_columns, SEGMENT);
    for (int64_t row = r; row < r_end; ++row) {
        for (int64_t c = 0; c < copy->operand.columns; c += n) {
            dequantize_segment(&job->spec, copy, row, c, n);
        }
    }
}
