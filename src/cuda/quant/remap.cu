/* cuda/quant/remap.cu: copies codes and scales between copies, and tensor-wide scales and amaxes. */
#include "cuda/cuda_functions.h"
#include "definition/remap_element.h"

enum { UNIT_ROWS = 2, UNIT_COLUMNS = 8 }; /* codes that may share bytes, in rows, columns or tiles */

struct remap_arguments {
    struct remap remap; /* its copies are these: */
    struct quant_copy from, to;
    int64_t row, row_end;
};

/* A thread for each UNIT_ROWS x UNIT_COLUMNS of the target. */
static __global__ void remap_codes_kernel(struct remap_arguments job) {
    struct remap remap = job.remap;
    remap.from = &job.from;
    remap.to = &job.to;
    const int64_t end = remap_code_end(&remap);
    const int64_t first_row = job.row / UNIT_ROWS;
    const int64_t first_column = remap.column / UNIT_COLUMNS;
    const int64_t down = ceil_div(job.row_end, UNIT_ROWS) - first_row;
    const int64_t across = ceil_div(end, UNIT_COLUMNS) - first_column;
    for (int64_t i = thread_index(); i < down * across; i += thread_count()) {
        const int64_t r = (first_row + i / across) * UNIT_ROWS;
        const int64_t c = (first_column + i % across) * UNIT_COLUMNS;
        for (int64_t row = max_int64(r, job.row); row < min_int64(r + UNIT_ROWS, job.row_end); ++row) {
            for (int64_t column = max_int64(c, remap.column); column < min_int64(c + UNIT_COLUMNS, end);
                 ++column) {
                remap_code(&remap, row, column);
            }
        }
    }
}

/* One thread per row and block scale. Rows that share an entry write the same value to it. */
static __global__ void remap_scales_kernel(struct remap_arguments job) {
    struct remap remap = job.remap;
    remap.from = &job.from;
    remap.to = &job.to;
    const bool per_row = job.to.scale_layout.column_step == 0; /* a row without elements has its entry too */
    const int64_t across =
        max_int64(ceil_div(remap.column_end - remap.column, job.to.block_columns), per_row ? 1 : 0);
    for (int64_t i = thread_index(); i < (job.row_end - job.row) * across; i += thread_count()) {
        remap_scale(&remap, job.row + i / across, remap.column + i % across * job.to.block_columns);
    }
}

enum opaq_status cuda_remap(const struct remap_job *job, const struct opaq_execution *execution,
                            struct opaq_error *error) {
    const struct remap *remap = &job->remap;
    const struct quant_copy *to = remap->to;
    const bool is_empty = remap->column == remap->column_end;
    if (job->amax_count > 0) {
        TRY(queue_copy(remap->from->amax + job->amax_from, to->amax + job->amax_to,
                       (size_t)job->amax_count * sizeof *to->amax, execution, error));
    }
    if (job->has_tensor_scale) {
        TRY(queue_copy(remap->from->scale, to->scale, sizeof(float), execution, error));
    }
    if (job->rows == 0 || (is_empty && to->scale_layout.column_step != 0)) {
        return OPAQ_OK;
    }
    struct remap_arguments arguments = {*remap, *remap->from, *to, job->row, job->row + job->rows};
    if (is_empty && to->scale_layout.row_step == 0) { /* no elements, and one scale for all rows */
        arguments.row_end = job->row + 1;
    }
    const int64_t rows = arguments.row_end - arguments.row;
    const int64_t columns = remap->column_end - remap->column;
    if (!is_empty) {
        const int64_t units = (rows / UNIT_ROWS + 2) * (columns / UNIT_COLUMNS + 4);
        TRY(launch("remap_codes", remap_codes_kernel, blocks_for(units, THREADS), THREADS, arguments, execution,
                   error));
    }
    return remap->scale_bytes == 0
               ? OPAQ_OK
               : launch("remap_scales", remap_scales_kernel,
                        blocks_for(rows * max_int64(1, ceil_div(columns, to->block_columns)), THREADS), THREADS,
                        arguments, execution, error);
}

enum opaq_status cuda_compare_figures(const struct quant_job *a, const struct quant_job *b, bool *are_equal,
                                      const struct opaq_execution *execution, struct opaq_error *error) {
    (void)a;
    (void)b;
    (void)execution;
    (void)error;
    *are_equal = true; /* comparing would mean waiting for the device */
    return OPAQ_OK;
}
