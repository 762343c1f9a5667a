/* cpu/quant/ref/quantize_nvfp4_ref.c: reference for nvfp4: E2M1 codes with one E4M3 scale per 1x16 or 16x16 and
 * one float per tensor or row. Specification: docs/formats.md. */
#include "cpu/quant/ref/quant_table_ref.h"
#include "definition/block_ref.h"

void quantize_nvfp4_ref(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end) {
    copy_clear(copy, r, r_end - r);
    for (int64_t row = r; row < r_end; row += copy->block_rows) {
        const float amax = copy->amax[row * copy->amax_step];
        const float global = nvfp4_global_of_stored(&job->spec, amax);
        for (int64_t c = 0; c < copy->operand.columns; c += NVFP4_BLOCK) {
            quantize_nvfp4_block(job, copy, row, c, global, amax);
        }
    }
}
