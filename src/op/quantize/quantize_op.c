/* op/quantize/quantize_op.c: opaq_quantize: check, choose, compose. */
#include <string.h>

#include "base/checked.h"
#include "base/forced_kernels.h"
#include "base/fp_environment.h"
#include "base/parallel_run.h"
#include "format/proto_layout.h"
#include "op/quantize/amax_op.h"
#include "op/table/kernel_list.h"
#include "op/quantize/quantize_op.h"
#include "op/table/tensor_check.h"
#include "opaq/status.h"
#include "cpu/quant/quant_table.h"
#include "cpu/quant/ref/scale_rules.h"
#include "cpu/quant/through_rows.h"

static enum opaq_status check_args(const struct opaq_view *out, const struct opaq_quantize_args *args,
                                   struct opaq_error *error) {
    const struct opaq_spec *spec = &out->proto.spec;
    const char *format = opaq_format_row((enum opaq_format)spec->format)->name;
    const bool is_delayed = (spec->options & OPAQ_DELAYED) != 0;
    if (is_delayed != (args->scale != NULL)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "quantize: args.scale is %s, but the spec is %s",
                         is_delayed ? "NULL" : "given", is_delayed ? "delayed" : "not delayed");
    }
    const bool takes_amax = (spec->format == OPAQ_FP8 && !is_delayed) || spec->format == OPAQ_NVFP4;
    if (!takes_amax && (args->amax_rowwise != NULL || args->amax_columnwise != NULL)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "quantize: an amax is given, but %s takes none",
                         is_delayed ? "delayed scaling" : format);
    }
    const bool stray_rowwise = args->amax_rowwise != NULL && (spec->usage & OPAQ_ROWWISE) == 0;
    const bool stray_columnwise = args->amax_columnwise != NULL && (spec->usage & OPAQ_COLUMNWISE) == 0;
    if (stray_rowwise || stray_columnwise) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "quantize: amax_%s is given, but the quantizer makes no %s copy",
                         stray_rowwise ? "rowwise" : "columnwise", stray_rowwise ? "rowwise" : "columnwise");
    }
    if (args->amax != NULL && spec->format != OPAQ_FP8) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "quantize: args.amax asks for the amax, but %s returns none", format);
    }
    if (args->random.offset >> 63) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "quantize: random.offset is %llu, expected less than 2^63",
                         (unsigned long long)args->random.offset);
    }
    return OPAQ_OK;
}

/* Scale padding is zero by definition, so the scales are cleared whole and blocks written over that. */
static void clear_scales(const struct opaq_view *out) {
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    const int count = proto_buffers(&out->proto, buffers);
    for (int i = 0; i < count; ++i) {
        if (buffers[i].role == OPAQ_ROLE_SCALE && buffers[i].bytes > 0) {
            memset(out->buffer[i].data, 0, buffers[i].bytes);
        }
    }
}

/* fp8: the tensor's scale, from the given one, a given amax, or the data. */
static void settle_tensor_scale(const struct quant_job *job, const struct opaq_quantize_args *args,
                                struct fp8_scale *scale) {
    const struct quant_copy *copy = &job->copy[0];
    const float *given = args->amax_rowwise != NULL ? args->amax_rowwise : args->amax_columnwise;
    float amax = given != NULL ? *given : 0.0f;
    if (given == NULL && (args->scale == NULL || args->amax != NULL)) {
        amax_compute(copy, &job->spec, args->parallel, &amax, 0);
    }
    if (args->amax != NULL) {
        *args->amax = amax;
    }
    if (args->scale != NULL) {
        *scale = fp8_scale_given(&job->spec, *args->scale);
    } else {
        *scale = fp8_scale_from_amax(&job->spec, amax, fp8_scale_limit(&job->spec, copy->operand.dtype));
    }
}

/* nvfp4: each copy's amax, or the global scale that follows from it, into its buffer. A square block shares it
 * between the copies, as does the data. What is given is stored as it is. */
static void settle_amax(const struct quant_job *job, const struct opaq_quantize_args *args) {
    for (int i = 0; i < job->copy_count; ++i) {
        const struct quant_copy *copy = &job->copy[i];
        const float *given = copy->usage == OPAQ_ROWWISE ? args->amax_rowwise : args->amax_columnwise;
        const int64_t count = copy->amax_step == 0 ? 1 : copy->operand.rows;
        const struct quant_copy *other = &job->copy[0];
        const bool is_shared =
            i > 0 && copy->amax_step == 0 && !copy->is_hadamard && args->amax_rowwise == NULL;
        if (given == NULL && is_shared) {
            copy->amax[0] = other->amax[0];
        } else if (given == NULL) {
            amax_compute(copy, &job->spec, args->parallel, copy->amax, copy->amax_step);
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
    bool goes_through_rows; /* the kernel knows rows, and codes lie in tiles */
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

/* Every copy that has anything to do. Without columns there are no codes; only fp8row's scales, which stand for whole
 * rows, are there nevertheless, when they are to be written. */
static void run_copies(const struct quant_job *job, bool is_quantizing, const struct opaq_parallel *parallel) {
    const enum opaq_format format = (enum opaq_format)job->spec.format;
    for (int i = 0; i < job->copy_count; ++i) {
        const struct quant_kernel *kernel = is_quantizing ? quantize_kernel_for(&job->copy[i], format)
                                                          : dequantize_kernel_for(&job->copy[i], format);
        const struct quant_matrix *operand = &job->copy[i].operand;
        if (operand->columns == 0 && !(is_quantizing && job->spec.format == OPAQ_FP8ROW)) {
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

/* Where both copies' amaxes have to be there first. False if they are not as usual. */
static bool find_amaxes(struct quant_job *job, const struct both_amaxes *amaxes,
                        const struct opaq_parallel *parallel) {
    const struct opaq_body body = {run_amaxes, job};
    parallel_run(parallel, ceil_div(job->copy[0].operand.rows, QUANT_BOTH_ROWS), &body);
    const uint64_t saved = fp_environment_enter();
    const bool are_usual = amaxes->are_usual(job);
    fp_environment_leave(saved);
    return are_usual;
}

/* Both copies in one pass, if there is a kernel for it and nobody asks for that of single copies. */
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

enum opaq_status quantize_checked(const struct opaq_view *x, const struct opaq_quantize_args *args,
                                  const struct opaq_view *out, struct opaq_error *error) {
    const enum opaq_status status = check_args(out, args, error);
    if (status != OPAQ_OK) {
        return status;
    }
    struct quant_job job;
    quant_job_make(x, out, out->proto.spec.usage, &job);
    job.random = args->random;
    clear_scales(out);
    if (job.spec.format == OPAQ_FP8) {
        struct fp8_scale scale;
        const uint64_t saved = fp_environment_enter();
        settle_tensor_scale(&job, args, &scale);
        fp_environment_leave(saved);
        job.tensor_scale = scale.apply;
        *(float *)job.copy[0].scale = scale.stored;
    } else if (job.spec.format == OPAQ_NVFP4) {
        settle_amax(&job, args);
    }
    if (!quantize_both(&job, args->parallel)) {
        run_copies(&job, true, args->parallel);
    }
    return OPAQ_OK;
}

enum opaq_status opaq_quantize(const struct opaq_view *x, const struct opaq_quantize_args *args,
                               const struct opaq_view *out, struct opaq_error *error) {
    static const struct opaq_quantize_args no_args = {0};
    enum opaq_status status = check_plain_tensor("quantize", "x", x, error);
    if (status == OPAQ_OK) {
        status = check_quantized_tensor("quantize", "out", out, error);
    }
    if (status == OPAQ_OK) {
        status = check_pair("quantize", x, out, error);
    }
    if (status == OPAQ_OK) {
        status = kernel_list_check(error);
    }
    return status == OPAQ_OK ? quantize_checked(x, args == NULL ? &no_args : args, out, error) : status;
}

void dequantize_job(const struct quant_job *job, const struct opaq_parallel *parallel) {
    run_copies(job, false, parallel);
}

enum opaq_status dequantize_checked(const struct opaq_view *q, int usage, const struct opaq_parallel *parallel,
                                    const struct opaq_view *y, struct opaq_error *error) {
    int from;
    const enum opaq_status status = check_usage("dequantize", q, usage, &from, error);
    if (status != OPAQ_OK) {
        return status;
    }
    struct quant_job job;
    quant_job_make(y, q, from, &job);
    dequantize_job(&job, parallel);
    return OPAQ_OK;
}

enum opaq_status opaq_dequantize(const struct opaq_view *q, int usage, const struct opaq_parallel *parallel,
                                 const struct opaq_view *y, struct opaq_error *error) {
    enum opaq_status status = check_quantized_tensor("dequantize", "q", q, error);
    if (status == OPAQ_OK) {
        status = check_plain_tensor("dequantize", "y", y, error);
    }
    if (status == OPAQ_OK) {
        status = check_pair("dequantize", y, q, error);
    }
    if (status == OPAQ_OK) {
        status = kernel_list_check(error);
    }
    return status == OPAQ_OK ? dequantize_checked(q, usage, parallel, y, error) : status;
}

int64_t opaq_rows_together(const struct opaq_spec *spec) {
    static const int64_t shape[2] = {1, 1};
    struct opaq_view view = {.row_stride = 1};
    struct opaq_view plain = {.row_stride = 1};
    struct quant_job job;
    struct opaq_spec rowwise;
    if (opaq_spec_check(spec, NULL) != OPAQ_OK) {
        return 0;
    }
    rowwise = *spec;
    rowwise.usage |= OPAQ_ROWWISE;
    if (opaq_proto_make(shape, 2, OPAQ_BF16, &rowwise, (struct opaq_device){0}, &view.proto, NULL) != OPAQ_OK ||
        opaq_proto_make(shape, 2, OPAQ_BF16, NULL, (struct opaq_device){0}, &plain.proto, NULL) != OPAQ_OK) {
        return 0;
    }
    quant_job_make(&plain, &view, OPAQ_ROWWISE, &job);
    return quant_copy_rows_together(&job.copy[0]);
}

const char *opaq_quantize_kernel(const struct opaq_spec *spec) {
    return opaq_spec_check(spec, NULL) == OPAQ_OK ? quantize_kernel((enum opaq_format)spec->format)->name
                                                  : NULL;
}

const char *opaq_dequantize_kernel(const struct opaq_spec *spec) {
    return opaq_spec_check(spec, NULL) == OPAQ_OK ? dequantize_kernel((enum opaq_format)spec->format)->name
                                                  : NULL;
}
