/* cpu/quant/noise.c: compares a tensor with its quantized form. Sums are computed in slots of rows that depend
 * on the shape only, so that the result does not depend on the number of threads. */
#include <stddef.h>

#include "base/checked.h"
#include "base/parallel_run.h"
#include "cpu/cpu_functions.h"
#include "cpu/gemm/gemm_decode.h"
#include "cpu/gemm/gemm_table.h"

enum { SLOTS = 64 };

struct noise_task {
    struct gemm_operand x;
    struct gemm_operand q;
    struct opaq_noise slot[SLOTS];
};

/* Adds the sums of a panel, given both tensors decoded to floats. */
static void add_panel(const float *x, const float *q, int rows, int columns, struct opaq_noise *sum) {
    for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < columns; ++c) {
            const double value = (double)x[r * GEMM_BLOCK + c];
            const double difference = (double)q[r * GEMM_BLOCK + c] - value;
            sum->signal += value * value;
            sum->noise += difference * difference;
        }
    }
}

static void noise_slots(void *argument, int64_t begin, int64_t end) {
    float x[GEMM_DECODE_ROWS * GEMM_BLOCK];
    float q[GEMM_DECODE_ROWS * GEMM_BLOCK];
    struct gemm_decoder decode_x;
    struct gemm_decoder decode_q;
    struct noise_task *task = argument;
    const struct quant_matrix *matrix = &task->x.plain;
    const int64_t share = ceil_div(matrix->rows, SLOTS);
    gemm_decoder_make(&task->x, &decode_x);
    gemm_decoder_make(&task->q, &decode_q);
    for (int64_t i = begin; i < end; ++i) {
        struct opaq_noise sum = {0.0, 0.0};
        const int64_t row_end = min_int64(matrix->rows, (i + 1) * share);
        for (int64_t row = min_int64(matrix->rows, i * share); row < row_end; row += GEMM_DECODE_ROWS) {
            const int rows = (int)min_int64(GEMM_DECODE_ROWS, row_end - row);
            for (int64_t k = 0; k < matrix->columns; k += GEMM_BLOCK) {
                const int columns = (int)min_int64(GEMM_BLOCK, matrix->columns - k);
                gemm_decode(&decode_x, row, rows, k, columns, x);
                gemm_decode(&decode_q, row, rows, k, columns, q);
                add_panel(x, q, rows, columns, &sum);
            }
        }
        task->slot[i] = sum;
    }
}

enum opaq_status cpu_noise(const struct quant_job *job, struct opaq_noise *noise,
                           const struct opaq_execution *execution, struct opaq_error *error) {
    const struct quant_copy *copy = &job->copy[0];
    const struct quant_matrix plain = copy->operand; /* x, or x transposed */
    struct noise_task task = {
        .x = {.plain = plain},
        .q = {.plain = plain, .spec = &job->spec, .copy = copy, .undo_hadamard = true},
    };
    const struct opaq_body body = {noise_slots, &task};
    (void)error;
    parallel_run(parallel_if_worth(execution->parallel, plain.rows * plain.columns), SLOTS, &body);
    struct opaq_noise sum = {0.0, 0.0};
    for (int i = 0; i < SLOTS; ++i) {
        sum.signal += task.slot[i].signal;
        sum.noise += task.slot[i].noise;
    }
    *noise = sum;
    return OPAQ_OK;
}
