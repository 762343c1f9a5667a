/* cuda/gemm/column_sum.cu: the sums of a matrix's columns, for each group of rows: a thread for each column. In the CPU's
 * order: blocks of 256 rows, whose sums are added in order. */
#include "cuda/cuda_functions.h"
#include "definition/segment_ref.h"
#include "definition/sorted_rows.h"

enum { SUM_BLOCK = 256 };

struct sum_arguments {
    struct quant_matrix rows;
    struct row_groups groups;
    bool has_groups;
    struct quant_matrix sums; /* a row for each group */
};

static __global__ void column_sum_kernel(struct sum_arguments job) {
    const int64_t columns = job.sums.columns;
    for (int64_t i = thread_index(); i < job.sums.rows * columns; i += thread_count()) {
        const int64_t group = i / columns;
        const int64_t c = i % columns;
        const int64_t begin = job.has_groups ? group_begin(&job.groups, group) : 0;
        const int64_t count = job.has_groups ? group_rows(&job.groups, group) : job.rows.rows;
        float total = 0.0f;
        for (int64_t first = 0; first < count; first += SUM_BLOCK) {
            float block = 0.0f;
            for (int64_t r = first; r < min_int64(first + SUM_BLOCK, count); ++r) {
                float value;
                segment_load(&job.rows, begin + r, c, 1, &value);
                block += value;
            }
            total += block;
        }
        segment_store(&job.sums, group, c, 1, &total);
    }
}

enum opaq_status cuda_column_sum(const struct row_groups *groups, const struct quant_matrix *rows,
                                 const struct opaq_view *sums, const struct opaq_execution *execution,
                                 struct opaq_error *error) {
    struct sum_arguments job;
    memset(&job, 0, sizeof job);
    job.rows = *rows;
    job.has_groups = groups != NULL;
    job.sums = quant_matrix_make(sums);
    if (groups != NULL) {
        job.groups = *groups;
    }
    return job.sums.rows * job.sums.columns == 0
               ? OPAQ_OK
               : launch("column_sum", column_sum_kernel, blocks_for(job.sums.rows * job.sums.columns, THREADS),
                        THREADS, job, execution, error);
}
