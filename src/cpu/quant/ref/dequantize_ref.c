/* cpu/quant/ref/dequantize_ref.c: reference for bytes to floats, every format. Specification: docs/formats.md. */
#include "cpu/quant/ref/decode_ref.h"
#include "cpu/quant/ref/quant_table_ref.h"

void dequantize_ref(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end) {
    uint8_t codes[SEGMENT];
    float values[SEGMENT];
    const int n = (int)min_int64(copy->block_columns, SEGMENT);
    assert(n > 0 && (!copy->is_hadamard || n == HADAMARD_SIZE));
    for (int64_t row = r; row < r_end; ++row) {
        for (int64_t c = 0; c < copy->operand.columns; c += n) {
            copy_load_codes(copy, row, c, n, codes);
            decode_codes(&job->spec, codes, n, decode_factor(&job->spec, copy, row, c), values);
            if (copy->is_hadamard) {
                hadamard_inverse(values, job->spec.hadamard_mask);
            }
            segment_store(&copy->operand, row, c, n, values);
        }
    }
}
