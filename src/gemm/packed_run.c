/* gemm/packed_run.c: a product whose b is a tiled weight: what the kernels of packed.h are given, and who does which
 * tiles. */
#include "gemm/packed_run.h"

#include <assert.h>
#include <string.h>

#include "base/checked.h"
#include "base/fp_environment.h"
#include "base/parallel_run.h"
#include "gemm/packed_rows.h"
#include "gemm/plain_row.h"

enum {
    CHUNK_ROWS = 512, /* of a, prepared and multiplied at a time */
    STRETCH = 512     /* columns of a result that are finished at a time */
};

static enum packed_format format_of(const struct opaq_spec *spec) {
    switch ((enum opaq_format)spec->format) {
    case OPAQ_NVFP4:
        return PACKED_NVFP4;
    case OPAQ_MXFP4:
        return PACKED_MXFP4;
    case OPAQ_MXFP8:
        return PACKED_MXFP8;
    case OPAQ_FP8BLK2:
        return PACKED_FP8BLK;
    case OPAQ_FP8:
    case OPAQ_FP8ROW:
    case OPAQ_FP8BLK1:
        break;
    }
    return PACKED_FP8;
}

static bool is_4_bit(enum packed_format format) { return format <= PACKED_MXFP4; }
static int64_t tile_rows(enum packed_format format) { return is_4_bit(format) ? TILE4_ROWS : TILE8_ROWS; }

/* `a` NULL: plain, of `dtype`. */
static enum packed_precision precision_for(const struct opaq_spec *b, const struct opaq_spec *a,
                                           enum opaq_element dtype, enum packed_precision wanted) {
    const enum packed_format format = format_of(b);
    if (a != NULL) {
        return is_4_bit(format) && a->format == b->format ? PACKED_CODES : PACKED_EXACT;
    }
    if (is_4_bit(format) && wanted != PACKED_EXACT) {
        return wanted;
    }
    return dtype == OPAQ_BF16 && !packed_is_reference(packed_kernel(format, PACKED_BF16)) ? PACKED_BF16
                                                                                          : PACKED_EXACT;
}

enum packed_precision packed_precision_of(const struct gemm_job *job, enum packed_precision wanted) {
    const bool is_plain = job->a.copy == NULL;
    return precision_for(job->b.spec, is_plain ? NULL : job->a.spec, job->a.plain.dtype, wanted);
}

/* Where there is only the reference's kernel, an exact product is faster with those for any weight. One in integers is
 * still made with it, for what is said of its result. */
static bool is_worth_it(enum packed_format format, enum packed_precision precision) {
    return precision != PACKED_EXACT || !packed_is_reference(packed_kernel(format, precision));
}

bool packed_can_run(const struct gemm_job *job, enum packed_precision wanted) {
    const struct quant_copy *b = job->b.copy;
    return b != NULL && b->tile_rows != 0 && (uintptr_t)b->data % 64 == 0 && !job->accumulate &&
           (job->a.copy == NULL || (!job->a.copy->is_hadamard && job->a.copy->usage == OPAQ_ROWWISE)) &&
           is_worth_it(format_of(job->b.spec), packed_precision_of(job, wanted));
}

const char *packed_kernel_name(const struct opaq_spec *b, const struct opaq_spec *a, enum opaq_element dtype,
                               enum packed_precision wanted) {
    const enum packed_format format = format_of(b);
    const enum packed_precision precision = precision_for(b, a, dtype, wanted);
    return is_worth_it(format, precision) ? packed_kernel(format, precision)->name : NULL;
}

/* ---- the weight ---- */

/* NVFP4's float beside the scales: what it multiplies with. */
static float nvfp4_factor(const struct opaq_spec *spec, float number) {
    if (spec->options & OPAQ_GLOBAL) {
        return spec->rule == OPAQ_RULE_MODELOPT ? number : 1.0f / number;
    }
    return number * (1.0f / (6.0f * (float)spec->e4m3_max));
}

static struct packed_weight weight_of(const struct gemm_job *job, float *row_factors) {
    const struct quant_copy *copy = job->b.copy;
    const struct opaq_spec *spec = job->b.spec;
    const enum packed_format format = format_of(spec);
    struct packed_weight weight = {.format = format,
                                   .is_e5m2 = spec->element == OPAQ_E5M2,
                                   .rows = job->b.plain.rows,
                                   .columns = job->b.plain.columns,
                                   .tile_columns =
                                       copy->data_columns / (is_4_bit(format) ? TILE4_COLUMNS : TILE8_COLUMNS),
                                   .data = copy->data,
                                   .scale = copy->scale,
                                   .block_scale = copy->scale,
                                   .block_scale_step = copy->scale_layout.row_step,
                                   .factor = 1.0f};
    if (format == PACKED_NVFP4 && copy->amax_step == 0) {
        weight.factor = nvfp4_factor(spec, copy->amax[0]);
    } else if (format == PACKED_NVFP4) {
        for (int64_t n = 0; n < weight.rows; ++n) {
            row_factors[n] = nvfp4_factor(spec, copy->amax[n]);
        }
        weight.row_factor = row_factors;
    } else if (format == PACKED_FP8 && copy->scale_layout.row_step == 0) {
        weight.factor = *(const float *)copy->scale;
    } else if (format == PACKED_FP8) {
        weight.row_factor = copy->scale;
    }
    return weight;
}

/* ---- memory ---- */

/* The pieces of the workspace. */
struct pieces {
    size_t rows, row_factors, results, panels, all;
};

static int64_t units_of(const struct gemm_job *job, const struct packed_kernel *kernel) {
    return ceil_div(ceil_div(job->c.columns, tile_rows(format_of(job->b.spec))), kernel->unit);
}

static int64_t padded_columns(const struct gemm_job *job) { return round_up(job->b.copy->data_columns, 64); }

/* Whether kernels can write where the result is wanted. */
static bool is_direct(const struct gemm_job *job) {
    return job->c.dtype == OPAQ_F32 && job->c.column_step == 1 && job->bias == NULL;
}

static struct pieces pieces_of(const struct packed_kernel *kernel, const struct gemm_job *job,
                               enum packed_precision precision) {
    const int64_t rows = min_int64(job->c.rows, CHUNK_ROWS);
    const bool has_row_factors = format_of(job->b.spec) == PACKED_NVFP4 && job->b.copy->amax_step != 0;
    struct pieces pieces;
    pieces.rows = 0;
    pieces.row_factors = packed_rows_bytes(precision, rows, padded_columns(job));
    pieces.results = pieces.row_factors + (has_row_factors ? (size_t)round_up(job->c.columns * 4, 64) : 0);
    pieces.panels = pieces.results + (is_direct(job) ? 0 : (size_t)round_up(rows * job->c.columns * 4, 64));
    pieces.all = pieces.panels + (size_t)(units_of(job, kernel) * round_up(kernel->panel_bytes, 64));
    return pieces;
}

size_t packed_workspace_bytes(const struct gemm_job *job, enum packed_precision wanted) {
    const enum packed_precision precision = packed_precision_of(job, wanted);
    return job->c.rows == 0 || job->c.columns == 0
               ? 0
               : pieces_of(packed_kernel(format_of(job->b.spec), precision), job, precision).all;
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
    const int64_t tiles = ceil_div(task->weight->rows, tile_rows(task->weight->format));
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
    const struct packed_weight weight = weight_of(job, (float *)(void *)(memory + pieces.row_factors));
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
        packed_rows_make(&job->a, first, rows, padded_columns(job), weight.format, precision, memory, parallel,
                         &x);
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
    packed_run_with(packed_kernel(format_of(job->b.spec), precision), job, wanted, workspace, parallel);
}
