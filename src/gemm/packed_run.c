/* gemm/packed_run.c: a product whose b is a tiled weight: what the kernels of packed.h are given, and who does which
 * tiles. */
#include "gemm/packed_run.h"

#include <assert.h>
#include <string.h>

#include "base/checked.h"
#include "base/forced_kernels.h"
#include "base/fp_environment.h"
#include "base/parallel_run.h"
#include "gemm/packed_rows.h"
#include "gemm/packed_weight.h"
#include "gemm/plain_row.h"

enum {
    CHUNK_ROWS = 512, /* of a, prepared and multiplied at a time */
    STRETCH = 512     /* columns of a result that are finished at a time */
};

/* `a` NULL: plain, of `dtype`. */
static enum packed_precision precision_for(const struct opaq_spec *b, const struct opaq_spec *a,
                                           enum opaq_element dtype, enum packed_precision wanted) {
    const enum packed_format format = packed_format_of(b);
    if (a != NULL) {
        return packed_format_is_4_bit(format) && a->format == b->format ? PACKED_CODES : PACKED_EXACT;
    }
    if (packed_format_is_4_bit(format) && wanted != PACKED_EXACT) {
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

/* Where there is only the reference's kernel, an exact product is faster with those for any weight. One in integers is
 * still made with it, for what is said of its result. */
static bool is_worth_it(enum packed_format format, enum packed_precision precision) {
    const struct packed_kernel *kernel = packed_kernel(format, precision);
    return precision != PACKED_EXACT || !packed_is_reference(kernel) || kernel_is_forced(kernel->name);
}

bool packed_can_run(const struct gemm_job *job, enum packed_precision wanted) {
    return packed_weight_can_run(&job->b) && !job->accumulate &&
           (job->a.copy == NULL || (!job->a.copy->is_hadamard && job->a.copy->usage == OPAQ_ROWWISE)) &&
           is_worth_it(packed_format_of(job->b.spec), packed_precision_of(job, wanted));
}

const char *packed_kernel_name(const struct opaq_spec *b, const struct opaq_spec *a, enum opaq_element dtype,
                               enum packed_precision wanted) {
    const enum packed_format format = packed_format_of(b);
    const enum packed_precision precision = precision_for(b, a, dtype, wanted);
    return is_worth_it(format, precision) ? packed_kernel(format, precision)->name : NULL;
}

/* ---- memory ---- */

/* The pieces of the workspace. */
struct pieces {
    size_t rows, row_factors, results, panels, all;
};

static int64_t units_of(const struct gemm_job *job, const struct packed_kernel *kernel) {
    return ceil_div(ceil_div(job->c.columns, packed_tile_rows(packed_format_of(job->b.spec))), kernel->unit);
}

/* Whether kernels can write where the result is wanted. */
static bool is_direct(const struct gemm_job *job) {
    return job->c.dtype == OPAQ_F32 && job->c.column_step == 1 && job->bias == NULL;
}

static struct pieces pieces_of(const struct packed_kernel *kernel, const struct gemm_job *job,
                               enum packed_precision precision) {
    const int64_t rows = min_int64(job->c.rows, CHUNK_ROWS);
    struct pieces pieces;
    pieces.rows = 0;
    pieces.row_factors = packed_rows_bytes(precision, rows, packed_padded_columns(&job->b));
    pieces.results = pieces.row_factors + (size_t)packed_row_factor_bytes(&job->b);
    pieces.panels = pieces.results + (is_direct(job) ? 0 : (size_t)round_up(rows * job->c.columns * 4, 64));
    pieces.all = pieces.panels + (size_t)(units_of(job, kernel) * round_up(kernel->panel_bytes, 64));
    return pieces;
}

size_t packed_workspace_bytes(const struct gemm_job *job, enum packed_precision wanted) {
    const enum packed_precision precision = packed_precision_of(job, wanted);
    return job->c.rows == 0 || job->c.columns == 0
               ? 0
               : pieces_of(packed_kernel(packed_format_of(job->b.spec), precision), job, precision).all;
}

/* ---- running ---- */

struct packed_task {
    const struct packed_kernel *kernel;
    const struct gemm_job *job;
    const struct packed_weight *weight;
    const struct packed_rows *x;
    float *y;
    int64_t y_step;
    char *panels;
    int64_t first_row; /* of c */
};

/* Unit: kernel->unit tiles of rows. A piece of units uses the memory of its first. */
static void run_units(void *argument, int64_t begin, int64_t end) {
    const struct packed_task *task = argument;
    const struct packed_kernel *kernel = task->kernel;
    const int64_t tiles = ceil_div(task->weight->rows, packed_tile_rows(task->weight->format));
    void *const panel = task->panels + begin * round_up(kernel->panel_bytes, 64);
    kernel->run(task->weight, task->x, begin * kernel->unit, min_int64(end * kernel->unit, tiles), task->y,
                task->y_step, panel);
}

/* Bias, rounding, and into place. */
static void finish_rows(void *argument, int64_t begin, int64_t end) {
    const struct packed_task *task = argument;
    const struct gemm_job *job = task->job;
    float bias[STRETCH];
    for (int64_t row = begin; row < end; ++row) {
        for (int64_t n = 0; n < job->c.columns; n += STRETCH) {
            const int count = (int)min_int64(STRETCH, job->c.columns - n);
            float *const from = task->y + row * task->y_step + n;
            if (job->bias != NULL) {
                plain_row_load(job->bias, job->bias_dtype, n, 1, count, bias);
                for (int i = 0; i < count; ++i) {
                    from[i] += bias[i];
                }
            }
            const int64_t start = (task->first_row + row) * job->c.row_step + n * job->c.column_step;
            plain_row_store(job->c.data, job->c.dtype, start, job->c.column_step, count, from);
        }
    }
}

/* Whether waking threads would cost more than it saves. */
static bool is_small(const struct packed_task *task) {
    const double worth = 1 << 18; /* products; some 0.01 ms */
    return (double)task->x->rows * (double)task->weight->rows * (double)task->weight->columns < worth;
}

void packed_run_with(const struct packed_kernel *kernel, const struct gemm_job *job,
                     enum packed_precision wanted, void *workspace, const struct opaq_parallel *parallel) {
    const enum packed_precision precision = packed_precision_of(job, wanted);
    if (job->c.rows == 0 || job->c.columns == 0) {
        return;
    }
    const struct pieces pieces = pieces_of(kernel, job, precision);
    char *const memory = workspace;
    const uint64_t saved = fp_environment_enter();
    float *const row_factors = (float *)(void *)(memory + pieces.row_factors);
    const struct packed_weight weight = packed_weight_of(&job->b, row_factors);
    packed_row_factors(&job->b, 0, weight.rows, row_factors);
    fp_environment_leave(saved);
    struct packed_rows x;
    struct packed_task task = {.kernel = kernel, .job = job, .weight = &weight, .x = &x};
    const bool direct = is_direct(job);
    task.panels = memory + pieces.panels;
    task.y_step = direct ? job->c.row_step : job->c.columns;
    const struct opaq_body run = {run_units, &task};
    const struct opaq_body finish = {finish_rows, &task};
    for (int64_t first = 0; first < job->c.rows; first += CHUNK_ROWS) {
        const int64_t rows = min_int64(CHUNK_ROWS, job->c.rows - first);
        packed_rows_make(&job->a, first, rows, packed_padded_columns(&job->b), weight.format, precision, memory,
                         parallel, &x);
        task.first_row = first;
        task.y = direct ? (float *)job->c.data + first * job->c.row_step
                        : (float *)(void *)(memory + pieces.results);
        parallel_run(is_small(&task) ? NULL : parallel, units_of(job, kernel), &run);
        if (!direct) {
            parallel_run(parallel_if_worth(parallel, rows * job->c.columns), rows, &finish);
        }
    }
}

void packed_run(const struct gemm_job *job, enum packed_precision wanted, void *workspace,
                const struct opaq_parallel *parallel) {
    const enum packed_precision precision = packed_precision_of(job, wanted);
    packed_run_with(packed_kernel(packed_format_of(job->b.spec), precision), job, wanted, workspace, parallel);
}
