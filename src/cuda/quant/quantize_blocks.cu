/* cuda/quant/quantize_blocks.cu: mxfp8, mxfp4 and nvfp4: a thread for each block under a scale, which does what the
 * reference does. Specification: docs/formats.md. */
#include "cuda/quant/quant_kernels.h"
#include "definition/block_ref.h"

/* Rows of codes that a thread writes: those of a block, or two that share bytes. */
OPAQ_DEVICE static inline int64_t unit_rows(const struct quant_copy *copy) {
    const bool share_bytes = copy->is_packed && copy->tile_rows == 0 && copy->data_row_step == 1;
    return max_int64(copy->block_rows, share_bytes ? 2 : 1);
}

static __global__ void quantize_blocks_kernel(struct quant_arguments arguments) {
    const struct quant_copy copy = copy_of_group(&arguments.copy, &arguments.group);
    const struct quant_job job = job_of(&arguments);
    const bool is_nvfp4 = job.spec.format == OPAQ_NVFP4;
    const bool along_rows = copy.operand.column_step == 1; /* adjacent threads read adjacent elements */
    const int64_t rows = unit_rows(&copy);
    const int64_t down = ceil_div(copy.operand.rows, rows);
    const int64_t across = ceil_div(copy.operand.columns, copy.block_columns);
    for (int64_t i = thread_index(); i < down * across; i += thread_count()) {
        const int64_t r = (along_rows ? i / across : i % down) * rows;
        const int64_t c = (along_rows ? i % across : i / down) * copy.block_columns;
        const int64_t r_end = min_int64(r + rows, copy.operand.rows);
        for (int64_t row = r; row < r_end; row += copy.block_rows) {
            if (is_nvfp4) {
                const float amax = copy.amax[row * copy.amax_step];
                quantize_nvfp4_block(&job, &copy, row, c, nvfp4_global_of_stored(&job.spec, amax), amax);
            } else {
                quantize_mx_block(&job, &copy, row, c);
            }
        }
    }
}

enum opaq_status quantize_small_blocks(const struct quant_arguments *arguments,
                                       const struct opaq_execution *execution, struct opaq_error *error) {
    const struct quant_copy *copy = &arguments->copy;
    const int64_t units =
        ceil_div(copy->operand.rows, unit_rows(copy)) * ceil_div(copy->operand.columns, copy->block_columns);
    return launch("quantize_blocks", quantize_blocks_kernel, blocks_for(units, WARP * 4), WARP * 4, *arguments,
                  execution, error);
}
