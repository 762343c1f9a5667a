/* cpu/gemm/packed_run.c: products with a tiled weight b: prepares the arguments of packed.h's kernels and
 * distributes tiles to threads. */
#include "cpu/gemm/packed_run.h"

#include <string.h>

#include "base/checked.h"
#include "base/forced_kernels.h"
#include "cpu/gemm/packed_batch.h"
#include "cpu/gemm/packed_weight.h"
#include "cpu/gemm/plain_convert.h"

enum {
    PANEL_ROWS = 512,    /* of a, prepared and multiplied at a time */
    RESULT_SEGMENT = 512 /* columns of a row of the result that are finished at a time */
};

/* `a` NULL: plain, of `dtype`. */
static enum packed_precision precision_for(const struct opaq_spec *b, const struct opaq_spec *a,
                                           enum opaq_element dtype, enum packed_precision wanted) {
    const enum packed_format format = packed_format_of(b);
    if (a != NULL) {
        return packed_is_4_bit(format) && a->format == b->format ? PACKED_CODES : PACKED_EXACT;
    }
    if (packed_is_4_bit(format) && wanted != PACKED_EXACT) {
        return wanted;
    }
    if (dtype != OPAQ_BF16 || kernel_is_forced(packed_kernel(format, PACKED_EXACT)->name)) {
        return PACKED_EXACT;
    }
    const struct packed_kernel *kernel = packed_kernel(format, PACKED_BF16);
    return packed_is_reference(kernel) && !kernel_is_forced(kernel->name) ? PACKED_EXACT : PACKED_BF16;
}

enum packed_precision packed_precision_of(const struct gemm_job *job, enum packed_precision wanted) {
    const bool is_plain = job->a.copy == NULL;
    return precision_for(job->b.spec, is_plain ? NULL : job->a.spec, job->a.plain.dtype, wanted);
}

/* Where only the reference kernel is available, exact products are faster with the kernels for any operands.
 * Integer products still use it, because their precision defines the result. */
static bool is_worth_it(enum packed_format format, enum packed_precision precision) {
    const struct packed_kernel *kernel = packed_kernel(format, precision);
    return precision != PACKED_EXACT || !packed_is_reference(kernel) || kernel_is_forced(kernel->name);
}

bool packed_can_run(const struct gemm_job *job, enum packed_precision wanted) {
    return packed_weight_can_run(&job->b) && packed_could_run(job, wanted);
}

bool packed_could_run(const struct gemm_job *job, enum packed_precision wanted) {
    return job->b.copy != NULL && job->b.copy->tile_rows != 0 && !job->b.is_across && !job->accumulate &&
           (job->a.copy == NULL || (!job->a.copy->is_hadamard && job->a.copy->usage == OPAQ_ROWWISE)) &&
           is_worth_it(packed_format_of(job->b.spec), packed_precision_of(job, wanted));
}

const char *packed_kernel_name(const struct opaq_spec *b, const struct opaq_spec *a, enum opaq_element dtype,
                               enum packed_precision wanted) {
    const enum packed_format format = packed_format_of(b);
    const enum packed_precision precision = precision_for(b, a, dtype, wanted);
    return is_worth_it(format, precision) ? packed_kernel(format, precision)->name : NULL;
}

/* ---- running ---- */

/* Whether kernels can write to c directly. */
static bool is_direct(const struct gemm_job *job) {
    return job->c.dtype == OPAQ_F32 && job->c.column_step == 1 && job->bias == NULL;
}

/* Some rows of the result, and the buffer in which they are computed. */
struct packed_task {
    const struct gemm_job *job;
    const float *y;
    int64_t y_step;
    int64_t first; /* row of c */
};

/* Adds the bias, rounds, and stores. */
static void finish_columns(void *argument, const struct packed_member *member, int64_t begin, int64_t end) {
    const struct packed_task *task = argument;
    const struct gemm_job *job = task->job;
    float values[RESULT_SEGMENT];
    float bias[RESULT_SEGMENT];
    for (int64_t n = begin; n < end; n += RESULT_SEGMENT) {
        const int count = (int)min_int64(RESULT_SEGMENT, end - n);
        if (job->bias != NULL) {
            plain_load(job->bias, job->bias_dtype, n, 1, count, bias);
        }
        for (int64_t row = 0; row < member->rows; ++row) {
            memcpy(values, task->y + row * task->y_step + n, (size_t)count * sizeof *values);
            for (int i = 0; job->bias != NULL && i < count; ++i) {
                values[i] += bias[i];
            }
            const int64_t start = (task->first + row) * job->c.row_step + n * job->c.column_step;
            plain_store(job->c.data, job->c.dtype, start, job->c.column_step, count, values);
        }
    }
}

/* Rows [first, first + rows) of the product. */
static struct packed_batch batch_of(const struct gemm_job *job, enum packed_precision wanted,
                                    struct packed_member *member, int64_t first, int64_t rows) {
    *member = (struct packed_member){.b = job->b, .rows = rows};
    return (struct packed_batch){
        .a = job->a, .first = first, .rows = rows, .members = member, .count = 1, .wanted = wanted};
}

static size_t result_bytes(const struct gemm_job *job, int64_t rows) {
    return is_direct(job) ? 0 : (size_t)round_up(rows * job->c.columns * (int64_t)sizeof(float), 64);
}

size_t packed_workspace_bytes(const struct gemm_job *job, enum packed_precision wanted) {
    const int64_t rows = min_int64(job->c.rows, PANEL_ROWS);
    struct packed_member member;
    const struct packed_batch batch = batch_of(job, wanted, &member, 0, rows);
    return job->c.rows == 0 || job->c.columns == 0 ? 0 : result_bytes(job, rows) + packed_batch_bytes(&batch);
}

void packed_run(const struct gemm_job *job, enum packed_precision wanted, void *workspace,
                const struct opaq_parallel *parallel) {
    const bool direct = is_direct(job);
    for (int64_t first = 0; first < job->c.rows && job->c.columns > 0; first += PANEL_ROWS) {
        const int64_t rows = min_int64(PANEL_ROWS, job->c.rows - first);
        struct packed_member member;
        struct packed_batch batch = batch_of(job, wanted, &member, first, rows);
        batch.y = direct ? (float *)job->c.data + first * job->c.row_step : workspace;
        batch.y_step = direct ? job->c.row_step : job->c.columns;
        struct packed_task task = {job, batch.y, batch.y_step, first};
        batch.finish = finish_columns;
        batch.argument = &task;
        packed_batch_run(&batch, (char *)workspace + result_bytes(job, rows), parallel);
    }
}
