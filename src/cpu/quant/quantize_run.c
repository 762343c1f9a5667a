/* cpu/quant/quantize_run.c: quantize and dequantize on the CPU: first tensor-wide scales and amaxes, then
 * kernels on panels of rows. */
#include <string.h>

#include "base/checked.h"
#include "base/forced_kernels.h"
#include "base/fp_environment.h"
#include "base/parallel_run.h"
#include "cpu/cpu_functions.h"
#include "cpu/quant/quant_table.h"
#include "cpu/quant/through_rows.h"
#include "definition/scale_rules.h"
#include "format/format_traits.h"

/* Clears all scales, since their padding must be zero; kernels then write the blocks' entries. */
static void clear_scales(const struct quant_job *job) {
    for (int i = 0; i < job->copy_count; ++i) {
        if (job->copy[i].scale_buffer_bytes > 0) {
            memset(job->copy[i].scale, 0, job->copy[i].scale_buffer_bytes);
        }
    }
}

/* fp8: computes the tensor's scale from the given one, a given amax, or the data. */
static void settle_tensor_scale(const struct quant_job *job, const struct quantize_figures *figures,
                                const struct opaq_parallel *parallel, struct fp8_scale *scale) {
    const struct quant_copy *copy = &job->copy[0];
    const float *given = figures->amax_rowwise != NULL ? figures->amax_rowwise : figures->amax_columnwise;
    float amax = given != NULL ? *given : 0.0f;
    if (given == NULL && (figures->scale == NULL || figures->amax != NULL)) {
        amax_compute(copy, &job->spec, parallel, &amax, 0);
    }
    if (figures->amax != NULL) {
        *figures->amax = amax;
    }
    if (figures->scale != NULL) {
        *scale = fp8_scale_given(&job->spec, *figures->scale);
    } else {
        *scale = fp8_scale_from_amax(&job->spec, amax, fp8_scale_limit(&job->spec, copy->operand.dtype));
    }
}

/* nvfp4: stores each copy's amax, or the global scale computed from it. Copies without a Hadamard transform
 * have the same amax. Given values are stored unchanged. */
static void settle_amax(const struct quant_job *job, const struct quantize_figures *figures,
                        const struct opaq_parallel *parallel) {
    for (int i = 0; i < job->copy_count; ++i) {
        const struct quant_copy *copy = &job->copy[i];
        const float *given = copy->usage == OPAQ_ROWWISE ? figures->amax_rowwise : figures->amax_columnwise;
        const int64_t count = copy->amax_step == 0 ? 1 : copy->operand.rows;
        const struct quant_copy *other = &job->copy[0];
        const bool is_shared =
            i > 0 && copy->amax_step == 0 && !copy->is_hadamard && figures->amax_rowwise == NULL;
        if (given == NULL && is_shared) {
            copy->amax[0] = other->amax[0];
        } else if (given == NULL) {
            amax_compute(copy, &job->spec, parallel, copy->amax, copy->amax_step);
            const uint64_t saved = fp_environment_enter();
            for (int64_t k = 0; k < count; ++k) {
                copy->amax[k] = nvfp4_stored(&job->spec, copy->amax[k]);
            }
            fp_environment_leave(saved);
        } else if (count > 0) {
            memcpy(copy->amax, given, (size_t)count * sizeof *given);
        }
    }
}

struct panel_task {
    const struct quant_job *job;
    const struct quant_copy *copy;
    const struct quant_kernel *kernel;
    int64_t panel_rows;
    bool is_quantizing;
    bool goes_through_rows; /* the kernel supports row-major codes only, and the codes are tiled */
};

static void run_panels(void *argument, int64_t begin, int64_t end) {
    const struct panel_task *task = argument;
    const int64_t r = begin * task->panel_rows;
    const int64_t r_end = min_int64(task->copy->operand.rows, end * task->panel_rows);
    if (!task->goes_through_rows) {
        task->kernel->run(task->job, task->copy, r, r_end);
    } else if (task->is_quantizing) {
        quantize_through_rows(task->kernel, task->job, task->copy, r, r_end);
    } else {
        dequantize_through_rows(task->kernel, task->job, task->copy, r, r_end);
    }
}

/* Runs the kernel on every copy that has work. Without columns there are no codes, but fp8row's scales, one per
 * row, must still be written. */
static void run_copies(const struct quant_job *job, bool is_quantizing, const struct opaq_parallel *parallel) {
    const enum opaq_format format = (enum opaq_format)job->spec.format;
    for (int i = 0; i < job->copy_count; ++i) {
        const struct quant_kernel *kernel = is_quantizing ? quantize_kernel_for(&job->copy[i], format)
                                                          : dequantize_kernel_for(&job->copy[i], format);
        const struct quant_matrix *operand = &job->copy[i].operand;
        if (operand->columns == 0 && !(is_quantizing && spec_has_row_scales(&job->spec))) {
            continue;
        }
        const bool goes_through_rows =
            !quant_is_reference(kernel) && through_rows_can_run(job, &job->copy[i], is_quantizing);
        struct panel_task task = {job,           &job->copy[i],    kernel, quant_panel_rows(&job->copy[i]),
                                  is_quantizing, goes_through_rows};
        const struct opaq_body body = {run_panels, &task};
        parallel_run(parallel_if_worth(parallel, operand->rows * operand->columns),
                     ceil_div(operand->rows, task.panel_rows), &body);
    }
}

static void run_both(void *argument, int64_t begin, int64_t end) {
    const struct quant_job *job = argument;
    const int64_t rows = job->copy[0].operand.rows;
    both_kernel((enum opaq_format)job->spec.format)
        ->run(job, begin * QUANT_BOTH_ROWS, min_int64(rows, end * QUANT_BOTH_ROWS));
}

static void run_amaxes(void *argument, int64_t begin, int64_t end) {
    const struct quant_job *job = argument;
    const int64_t rows = job->copy[0].operand.rows;
    both_kernel((enum opaq_format)job->spec.format)
        ->amaxes->find(job, begin * QUANT_BOTH_ROWS, min_int64(rows, end * QUANT_BOTH_ROWS));
}

/* First pass: row and column amaxes. Returns false if the kernel does not support them. */
static bool find_amaxes(struct quant_job *job, const struct both_amaxes *amaxes,
                        const struct opaq_parallel *parallel) {
    const struct opaq_body body = {run_amaxes, job};
    parallel_run(parallel, ceil_div(job->copy[0].operand.rows, QUANT_BOTH_ROWS), &body);
    const uint64_t saved = fp_environment_enter();
    const bool amaxes_in_range = amaxes->amaxes_in_range(job);
    fp_environment_leave(saved);
    return amaxes_in_range;
}

/* Quantizes both copies in one pass, if there is a kernel for it and no kernel for single copies is forced. */
static bool quantize_both(struct quant_job *job, const struct opaq_parallel *parallel) {
    const struct quant_matrix *x = &job->copy[0].operand;
    const struct both_kernel *kernel = both_kernel((enum opaq_format)job->spec.format);
    if (job->copy_count < 2 || quant_copy_is_narrow(&job->copy[0]) || quant_copy_is_narrow(&job->copy[1]) ||
        kernel->run == NULL || kernel_is_forced(quantize_kernel((enum opaq_format)job->spec.format)->name)) {
        return false;
    }
    const uint64_t saved = fp_environment_enter();
    const bool is_covered = kernel->covers(job);
    fp_environment_leave(saved);
    if (!is_covered) {
        return false;
    }
    const struct opaq_parallel *threads = parallel_if_worth(parallel, x->rows * x->columns);
    if (kernel->amaxes != NULL && !find_amaxes(job, kernel->amaxes, threads)) {
        return false;
    }
    const struct opaq_body body = {run_both, job};
    parallel_run(threads, ceil_div(x->rows, QUANT_BOTH_ROWS), &body);
    if (kernel->amaxes != NULL) {
        const uint64_t entered = fp_environment_enter();
        kernel->amaxes->finish(job);
        fp_environment_leave(entered);
    }
    return true;
}

static struct opaq_random random_of(const struct random_source *source) {
    const uint64_t offset = source->state == NULL ? source->offset : (uint64_t)source->state[1];
    return (struct opaq_random){source->state == NULL ? source->seed : (uint64_t)source->state[0],
                                (offset + (uint64_t)source->stream) & (UINT64_MAX >> 1)};
}

enum opaq_status cpu_quantize(const struct quant_job *given, const struct quantize_figures *figures,
                              const struct opaq_execution *execution, struct opaq_error *error) {
    const struct opaq_parallel *parallel = execution->parallel;
    struct quant_job job = *given;
    (void)error;
    if (job.spec.options & OPAQ_STOCHASTIC) {
        job.random = random_of(&figures->random);
    }
    clear_scales(&job);
    if (spec_has_tensor_scale(&job.spec)) {
        struct fp8_scale scale;
        const uint64_t saved = fp_environment_enter();
        settle_tensor_scale(&job, figures, parallel, &scale);
        fp_environment_leave(saved);
        job.tensor_scale = scale.apply;
        *(float *)job.copy[0].scale = scale.stored;
    } else if (spec_has_second_scale(&job.spec)) {
        settle_amax(&job, figures, parallel);
    }
    if (!quantize_both(&job, parallel)) {
        run_copies(&job, true, parallel);
    }
    return OPAQ_OK;
}

enum opaq_status cpu_dequantize(const struct quant_job *job, const struct opaq_execution *execution,
                                struct opaq_error *error) {
    (void)error;
    run_copies(job, false, execution->parallel);
    return OPAQ_OK;
}
