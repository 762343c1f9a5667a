/* cpu/gemm/column_sum.c: the sums of a matrix's columns. */
#include "cpu/gemm/gemm_run.h"

#include "base/parallel_run.h"
#include "definition/segment_ref.h"

enum { BLOCK_ROWS = 256 };

struct sum_task {
    const struct quant_matrix *matrix;
    const struct quant_matrix *sums;
};

static void add(float *to, const float *from) {
    for (int i = 0; i < SEGMENT; ++i) {
        to[i] += from[i];
    }
}

/* Columns of SEGMENT at a time. */
static void sum_segments(void *argument, int64_t begin, int64_t end) {
    const struct sum_task *task = argument;
    for (int64_t segment = begin; segment < end; ++segment) {
        float total[SEGMENT] = {0.0f};
        for (int64_t first = 0; first < task->matrix->rows; first += BLOCK_ROWS) {
            const int64_t last = min_int64(first + BLOCK_ROWS, task->matrix->rows);
            float block[SEGMENT] = {0.0f};
            for (int64_t r = first; r < last; ++r) {
                float values[SEGMENT];
                segment_load(task->matrix, r, segment * SEGMENT, SEGMENT, values);
                add(block, values);
            }
            add(total, block);
        }
        segment_store(task->sums, 0, segment * SEGMENT, SEGMENT, total);
    }
}

void column_sum(const struct quant_matrix *matrix, const struct quant_matrix *sums,
                const struct opaq_parallel *parallel) {
    struct sum_task task = {matrix, sums};
    const struct opaq_body body = {sum_segments, &task};
    parallel_run(parallel_if_worth(parallel, matrix->rows * matrix->columns),
                 ceil_div(matrix->columns, SEGMENT), &body);
}
