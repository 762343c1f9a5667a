/* cpu/quant/ref/quantize_fp8_ref.c: reference for fp8, fp8row, fp8blk1, fp8blk2: bytes times one float32 scale per
 * tensor, row, 1x128 or 128x128. Specification: docs/formats.md. */
#include "cpu/quant/ref/quant_table_ref.h"
#include "definition/block_ref.h"

/* Encodes rows r to r_end of the block at (r, c). */
static void encode_block(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end,
                         int64_t c, float apply) {
    const int64_t c_end = min_int64(c + copy->block_columns, copy->operand.columns);
    for (int64_t row = r; row < r_end; ++row) {
        for (int64_t column = c; column < c_end; column += SEGMENT) {
            encode_fp8_segment(job, copy, row, column, (int)min_int64(SEGMENT, c_end - column), apply);
        }
    }
}

/* One scale for the tensor, already computed and stored. */
void quantize_fp8_tensor_ref(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                             int64_t r_end) {
    copy_clear(copy, r, r_end - r);
    encode_block(job, copy, r, r_end, 0, job->tensor_scale);
}

void quantize_fp8_blocks_ref(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                             int64_t r_end) {
    const float limit = fp8_scale_limit(&job->spec, copy->operand.dtype);
    copy_clear(copy, r, r_end - r);
    for (int64_t row = r; row < r_end; row += copy->block_rows) {
        /* a row without elements still has a scale, but a tensor without columns has no 128-blocks */
        int64_t c = 0;
        const bool whole_row = job->spec.format == OPAQ_FP8ROW;
        for (; c < copy->operand.columns || (whole_row && c == 0); c += copy->block_columns) {
            const float amax = block_amax(copy, &job->spec, row, c);
            const struct fp8_scale scale = fp8_scale_from_amax(&job->spec, amax, limit);
            ((float *)copy->scale)[scale_index(copy, row, c)] = scale.stored;
            encode_block(job, copy, row, min_int64(row + copy->block_rows, r_end), c, scale.apply);
        }
    }
}
