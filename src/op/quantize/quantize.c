/* op/quantize/quantize.c: opaq_quantize, opaq_dequantize, opaq_amax, opaq_noise_measure, opaq_delayed_update: check,
 * and call the back end. */
#include "op/quantize/quantize.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/try.h"
#include "format/format_traits.h"
#include "op/table/tensor_check.h"
#include "opaq/noise.h"

/* ---- quantize ---- */

static enum opaq_status check_figures(const struct opaq_view *out, const struct quantize_figures *figures,
                                      struct opaq_error *error) {
    const struct opaq_spec *spec = &out->proto.spec;
    const char *format = opaq_format_row((enum opaq_format)spec->format)->name;
    const bool is_delayed = (spec->options & OPAQ_DELAYED) != 0;
    if (is_delayed != (figures->scale != NULL)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "args.scale is %s, but the spec is %s",
                         is_delayed ? "NULL" : "given", is_delayed ? "delayed" : "not delayed");
    }
    const bool takes_amax = !is_delayed && spec_has_tensor_figure(spec);
    if (!takes_amax && (figures->amax_rowwise != NULL || figures->amax_columnwise != NULL)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "an amax is given, but %s takes none",
                         is_delayed ? "delayed scaling" : format);
    }
    const bool stray_rowwise = figures->amax_rowwise != NULL && (spec->usage & OPAQ_ROWWISE) == 0;
    const bool stray_columnwise = figures->amax_columnwise != NULL && (spec->usage & OPAQ_COLUMNWISE) == 0;
    if (stray_rowwise || stray_columnwise) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "amax_%s is given, but the quantizer makes no %s copy",
                         stray_rowwise ? "rowwise" : "columnwise", stray_rowwise ? "rowwise" : "columnwise");
    }
    if (figures->amax != NULL && !spec_has_tensor_scale(spec)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "args.amax asks for the amax, but %s returns none",
                         format);
    }
    return OPAQ_OK;
}

enum opaq_status quantize_view(struct work *work, const struct opaq_view *x,
                               const struct quantize_figures *figures, const struct opaq_view *out,
                               struct opaq_error *error) {
    struct quant_job job;
    TRY(check_figures(out, figures, error));
    quant_job_make(x, out, out->proto.spec.usage, &job);
    return work->backend->quantize(&job, figures, work->execution, error);
}

static enum opaq_status quantize(const struct opaq_view *x, const struct opaq_quantize_args *args,
                                 const struct opaq_execution *given, const struct opaq_view *out,
                                 struct opaq_error *error) {
    struct opaq_execution execution;
    struct work work;
    TRY(check_plain_tensor("x", x, error));
    TRY(check_quantized_tensor("out", out, error));
    TRY(check_pair(x, out, error));
    TRY(work_of(given, x->proto.device, &execution, &work, error));
    struct quantize_figures figures = {0};
    if (args != NULL) {
        figures =
            (struct quantize_figures){.scale = args->scale,
                                      .amax_rowwise = args->amax_rowwise,
                                      .amax_columnwise = args->amax_columnwise,
                                      .amax = args->amax,
                                      .random = {.seed = args->random.seed, .offset = args->random.offset}};
        if (args->random.offset >> 63) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "random.offset is %llu, expected less than 2^63",
                             (unsigned long long)args->random.offset);
        }
    }
    return quantize_view(&work, x, &figures, out, error);
}

enum opaq_status opaq_quantize(const struct opaq_view *x, const struct opaq_quantize_args *args,
                               const struct opaq_execution *execution, const struct opaq_view *out,
                               struct opaq_error *error) {
    TRY_AS("quantize", error, quantize(x, args, execution, out, error));
    return OPAQ_OK;
}

/* ---- dequantize ---- */

enum opaq_status dequantize_view(struct work *work, const struct opaq_view *q, int usage,
                                 const struct opaq_view *y, struct opaq_error *error) {
    int from;
    struct quant_job job;
    TRY(check_usage(q, usage, &from, error));
    quant_job_make(y, q, from, &job);
    return work->backend->dequantize(&job, work->execution, error);
}

static enum opaq_status dequantize(const struct opaq_view *q, int usage, const struct opaq_execution *given,
                                   const struct opaq_view *y, struct opaq_error *error) {
    struct opaq_execution execution;
    struct work work;
    TRY(check_quantized_tensor("q", q, error));
    TRY(check_plain_tensor("y", y, error));
    TRY(check_pair(y, q, error));
    TRY(work_of(given, q->proto.device, &execution, &work, error));
    return dequantize_view(&work, q, usage, y, error);
}

enum opaq_status opaq_dequantize(const struct opaq_view *q, int usage, const struct opaq_execution *execution,
                                 const struct opaq_view *y, struct opaq_error *error) {
    TRY_AS("dequantize", error, dequantize(q, usage, execution, y, error));
    return OPAQ_OK;
}

/* ---- amax ---- */

int64_t opaq_amax_count(const struct opaq_proto *proto, enum opaq_usage usage) {
    if (proto == NULL || !proto->is_quantized || (proto->spec.usage & (int)usage) == 0) {
        return 0;
    }
    if (spec_has_tensor_scale(&proto->spec)) {
        return proto->spec.options & OPAQ_DELAYED ? 0 : 1;
    }
    struct opaq_buffer buffer;
    const int index = opaq_proto_find(proto, OPAQ_ROLE_AMAX, usage);
    return index < 0 || opaq_proto_buffer(proto, index, &buffer, NULL) != OPAQ_OK ? 0 : buffer.shape[0];
}

enum opaq_status amax_view(struct work *work, const struct opaq_view *x, const struct opaq_spec *spec,
                           enum opaq_usage usage, bool is_stored, float *amax, struct opaq_error *error) {
    struct quant_copy copy = {.usage = usage, .operand = quant_matrix_make(x)};
    if (usage == OPAQ_COLUMNWISE) {
        copy.operand = quant_matrix_transposed(copy.operand);
        copy.is_hadamard = (spec->options & OPAQ_HADAMARD) != 0;
    }
    return work->backend->amax(&copy, spec, is_stored, (spec->options & OPAQ_ROWSCALED) != 0, amax,
                               work->execution, error);
}

static enum opaq_status amax_of(const struct opaq_view *x, const struct opaq_spec *spec, enum opaq_usage usage,
                                const struct opaq_execution *given, float *amax, int64_t count,
                                struct opaq_error *error) {
    struct opaq_execution execution;
    struct work work;
    struct opaq_proto proto;
    TRY(check_plain_tensor("x", x, error));
    TRY(work_of(given, x->proto.device, &execution, &work, error));
    if (spec == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "spec is NULL");
    }
    TRY(opaq_proto_make(x->proto.shape, x->proto.rank, (enum opaq_element)x->proto.dtype, spec, x->proto.device,
                        &proto, error));
    if (spec->options & OPAQ_GLOBAL) {
        return opaq_fail(
            error, OPAQ_ERROR_ARGUMENT,
            "the quantizer keeps a global scale (global), not an amax; ask for the amax of the one "
            "without \"global\"");
    }
    if (usage != OPAQ_ROWWISE && usage != OPAQ_COLUMNWISE) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "usage is %d, expected 1 (rowwise) or 2 (columnwise)",
                         (int)usage);
    }
    const int64_t expected = opaq_amax_count(&proto, usage);
    const bool takes_none =
        expected == 0 && opaq_proto_find(&proto, OPAQ_ROLE_AMAX, usage) < 0; /* not: no rows */
    if ((amax == NULL && expected > 0) || count != expected || takes_none) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "got room for %lld floats%s, a %s has %lld of this usage",
                         (long long)count, amax == NULL ? " (NULL)" : "",
                         opaq_format_row((enum opaq_format)spec->format)->name, (long long)expected);
    }
    return amax_view(&work, x, spec, usage, false, amax, error);
}

enum opaq_status opaq_amax(const struct opaq_view *x, const struct opaq_spec *spec, enum opaq_usage usage,
                           const struct opaq_execution *execution, float *amax, int64_t count,
                           struct opaq_error *error) {
    TRY_AS("amax", error, amax_of(x, spec, usage, execution, amax, count, error));
    return OPAQ_OK;
}

/* ---- noise ---- */

static enum opaq_status noise_of(const struct opaq_view *x, const struct opaq_view *q, int usage,
                                 const struct opaq_execution *given, struct opaq_noise *noise,
                                 struct opaq_error *error) {
    struct opaq_execution execution;
    struct work work;
    struct quant_job job;
    int from = 0;
    TRY(check_plain_tensor("x", x, error));
    TRY(check_quantized_tensor("q", q, error));
    TRY(check_pair(x, q, error));
    TRY(check_usage(q, usage, &from, error));
    TRY(work_of(given, x->proto.device, &execution, &work, error));
    if (noise == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "the place for the result is NULL");
    }
    quant_job_make(x, q, from, &job);
    return work.backend->noise(&job, noise, &execution, error);
}

enum opaq_status opaq_noise_measure(const struct opaq_view *x, const struct opaq_view *q, int usage,
                                    const struct opaq_execution *execution, struct opaq_noise *noise,
                                    struct opaq_error *error) {
    TRY_AS("noise", error, noise_of(x, q, usage, execution, noise, error));
    return OPAQ_OK;
}

double opaq_noise_sqnr(const struct opaq_noise *noise) {
    if (noise == NULL) {
        return 0.0;
    }
    return noise->noise == 0.0 ? HUGE_VAL : 10.0 * log10(noise->signal / noise->noise);
}

/* ---- delayed scaling ---- */

static enum opaq_status delayed_update(const struct opaq_delayed_state *state, const float *reduced_amax,
                                       const struct delayed_rule *rule, const struct opaq_execution *given,
                                       struct opaq_error *error) {
    const struct opaq_device cpu = {OPAQ_DEVICE_CPU, 0};
    struct opaq_execution execution;
    struct work work;
    int64_t floats;
    if (state == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "state is NULL");
    }
    if (state->length < 1 || state->count < 0 || !checked_multiply(state->length, state->count, &floats)) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "the history is [%lld][%lld], expected at least [1][0]",
                         (long long)state->length, (long long)state->count);
    }
    if (floats > 0 && (state->amax_history == NULL || state->scale == NULL)) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "%s is NULL",
                         state->scale == NULL ? "scale" : "amax_history");
    }
    if (rule->element != OPAQ_E4M3 && rule->element != OPAQ_E5M2) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "element is %d, expected e4m3 (%d) or e5m2 (%d)",
                         (int)rule->element, OPAQ_E4M3, OPAQ_E5M2);
    }
    if (rule->margin < -64 || rule->margin > 64) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "margin is %d, expected -64 to 64", rule->margin);
    }
    if (rule->algorithm != OPAQ_AMAX_MAX && rule->algorithm != OPAQ_AMAX_MOST_RECENT) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "algorithm is %d, expected 0 or 1", (int)rule->algorithm);
    }
    TRY(work_of(given, given == NULL ? cpu : given->device, &execution, &work, error));
    return work.backend->delayed_update(state, NULL, reduced_amax, rule, &execution, error);
}

enum opaq_status opaq_delayed_update(const struct opaq_delayed_state *state, const float *reduced_amax,
                                     enum opaq_element element, int margin, enum opaq_amax_algorithm algorithm,
                                     const struct opaq_execution *execution, struct opaq_error *error) {
    const struct delayed_rule rule = {element, margin, algorithm, true};
    TRY_AS("delayed_update", error, delayed_update(state, reduced_amax, &rule, execution, error));
    return OPAQ_OK;
}

/* ---- properties of a spec ---- */

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

/* The back end whose kernels serve a spec on the CPU; NULL if the spec is invalid. */
static const struct backend *backend_for(const struct opaq_spec *spec) {
    const struct backend *backend;
    const struct opaq_device cpu = {OPAQ_DEVICE_CPU, 0};
    return opaq_spec_check(spec, NULL) == OPAQ_OK && backend_of(cpu, &backend, NULL) == OPAQ_OK ? backend
                                                                                                : NULL;
}

const char *opaq_quantize_kernel(const struct opaq_spec *spec) {
    const struct backend *const backend = backend_for(spec);
    return backend == NULL ? NULL : backend->quantize_kernel(spec);
}

const char *opaq_dequantize_kernel(const struct opaq_spec *spec) {
    const struct backend *const backend = backend_for(spec);
    return backend == NULL ? NULL : backend->dequantize_kernel(spec);
}
