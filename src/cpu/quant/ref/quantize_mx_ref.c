/* cpu/quant/ref/quantize_mx_ref.c: reference for mxfp8 and mxfp4: codes under one power of two per 1x32 or 32x32.
 * Specification: docs/formats.md. */
#include "cpu/quant/ref/quant_table_ref.h"
#include "cpu/quant/ref/segment_ref.h"

enum { BLOCK = 32 };

static void encode_block(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t c,
                         float factor) {
    float values[BLOCK];
    uint8_t random[BLOCK];
    uint8_t codes[BLOCK];
    const int64_t r_end = min_int64(r + copy->block_rows, copy->operand.rows);
    const int n = (int)min_int64(BLOCK, copy->operand.columns - c);
    for (int64_t row = r; row < r_end; ++row) {
        segment_load(&copy->operand, row, c, n, values);
        segment_scale(values, n, factor, false); /* a power of two: the same as dividing by its inverse */
        if (job->spec.options & OPAQ_STOCHASTIC) {
            segment_random(job, copy, row, c, n, random);
        }
        segment_encode(&job->spec, values, random, n, codes);
        copy_store(copy, row, c, n, codes);
    }
}

void quantize_mx_ref(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end) {
    copy_clear(copy, r, r_end - r);
    for (int64_t row = r; row < r_end; row += copy->block_rows) {
        for (int64_t c = 0; c < copy->operand.columns; c += BLOCK) {
            const uint32_t exponent = mx_exponent(&job->spec, block_amax(copy, &job->spec, row, c));
            scale_store_byte(copy, row, c, exponent);
            encode_block(job, copy, row, c, mx_factor(exponent));
        }
    }
}
