/* cli/commands/command_convert.c: `opaq convert`: stores a quantized checkpoint in another layout without rounding, or
 * decodes it. */
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_try.h"
#include "cli/commands/commands.h"
#include "cli/write/checkpoint_job.h"
#include "cli/write/scale_forms.h"

/* ---- to another layout ---- */

static void name_of(const struct weight *weight, const char *ending, struct text *name) {
    text_print(name, "%s%s", weight->name, ending);
}

static void input_name(const struct weight *weight, const char *input, struct text *name) {
    const char *const dot = strrchr(weight->name, '.');
    text_print(name, "%.*s%s", dot == NULL ? 0 : (int)(dot - weight->name + 1), weight->name, input);
}

static void convert_codes(struct manifest *manifest, const struct weight *weight,
                          const struct opaq_layout_row *scheme) {
    struct text name = {0};
    name_of(weight, scheme->data, &name);
    manifest_copy(manifest, weight->data, text_get(&name), NULL, 0);
    text_free(&name);
}

/* Shape of the scales in the layout, after the dimensions of a stack. */
static int scale_shape(const struct weight *weight, const struct opaq_layout_row *scheme, int64_t *shape) {
    const int extra = weight->data->tensor->rank - 2;
    for (int i = 0; i < extra; ++i) {
        shape[i] = weight->data->tensor->shape[i];
    }
    struct opaq_layout_shape inner = {0};
    opaq_layout_shape(scheme->scale_shape, scheme->format, weight->rows, weight->columns, &inner);
    memcpy(shape + extra, inner.size, sizeof inner.size);
    return extra + inner.rank;
}

static enum opaq_status convert_scales(struct manifest *manifest, const struct weight *weight,
                                       const struct opaq_layout_row *scheme, struct opaq_error *error) {
    int64_t shape[ST_RANK_LIMIT];
    const int rank = scale_shape(weight, scheme, shape);
    struct text name = {0};
    name_of(weight, scheme->scale, &name);
    const enum opaq_status status =
        scale_form_convert(manifest, weight->scale, scheme->scale_dtypes, text_get(&name), shape, rank, error);
    text_free(&name);
    return status;
}

/* A global scale or an input's scale, under the name that the layout gives it. */
static enum opaq_status convert_global(struct manifest *manifest, const struct model_tensor *global,
                                       struct text *name, const struct weight *weight,
                                       const struct opaq_layout_row *scheme, struct opaq_error *error) {
    const bool inverts = scheme->format == OPAQ_NVFP4 && scheme->rule != weight->scheme->rule;
    const enum opaq_status status = scale_form_global(manifest, global, scheme, inverts, text_get(name), error);
    text_free(name);
    return status;
}

static enum opaq_status convert_weight(struct manifest *manifest, const struct weight *weight,
                                       const struct opaq_layout_row *scheme, struct opaq_error *error) {
    struct text name = {0};
    convert_codes(manifest, weight, scheme);
    CLI_TRY(convert_scales(manifest, weight, scheme, error));
    if (weight->global != NULL) {
        name_of(weight, scheme->global, &name);
        CLI_TRY(convert_global(manifest, weight->global, &name, weight, scheme, error));
    }
    if (weight->input != NULL && *scheme->input != '\0') {
        input_name(weight, scheme->input, &name);
        CLI_TRY(convert_global(manifest, weight->input, &name, weight, scheme, error));
    }
    return OPAQ_OK;
}

/* The one format that all quantized weights have. */
static enum opaq_status common_format(const struct weights *weights, const struct opaq_layout_row **scheme,
                                      struct opaq_error *error) {
    *scheme = NULL;
    for (size_t i = 0; i < weights->count; ++i) {
        const struct weight *const weight = &weights->items[i];
        if (weight->scheme != NULL && *scheme != NULL && weight->scheme->format != (*scheme)->format) {
            return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                             "%s mixes formats: %s is %s, others are %s; only --layout plain accepts it",
                             weights->model->path, weight->name, weight_kind(weight),
                             opaq_format_row((*scheme)->format)->name);
        }
        *scheme = weight->scheme != NULL ? weight->scheme : *scheme;
    }
    return *scheme != NULL ? OPAQ_OK
                           : opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                                       "%s has no quantized weight that opaq supports; use 'opaq quantize'",
                                       weights->model->path);
}

/* Keeps the activations of the source if the layout supports them. */
static void choose_activations(struct checkpoint_job *job, const struct weights *weights, bool has_scales) {
    enum opaq_activations wanted = activations_default(job->scheme);
    activations_of_config(model_quantization(weights->model), &wanted);
    wanted = has_scales ? OPAQ_ACTIVATIONS_GIVEN : wanted;
    job->activations = activations_fit(job->scheme, wanted) ? wanted : activations_default(job->scheme);
    if (job->activations != wanted) {
        job_note(job,
                 "the source's activations are %s, for which the layout %s has no form of %s: they become %s",
                 activations_name(wanted), opaq_layout_name(job->scheme->layout),
                 opaq_format_row(job->scheme->format)->name, activations_name(job->activations));
    }
}

static enum opaq_status fill_layout(struct checkpoint_job *job, const struct weights *weights,
                                    const char *layout, struct opaq_error *error) {
    const struct opaq_layout_row *from = NULL;
    CLI_TRY(common_format(weights, &from, error));
    assert(from != NULL);
    job->scheme = opaq_layout_find((enum opaq_layout)opaq_layout_number(layout), from->format);
    if (job->scheme == NULL || !layout_is_written(job->scheme) || from->layout == OPAQ_LAYOUT_GPT_OSS) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "%s is %s in the layout %s, which cannot become %s",
                         weights->model->path, opaq_format_row(from->format)->name,
                         opaq_layout_name(from->layout), layout);
    }
    bool has_scales = false;
    for (size_t i = 0; i < weights->count; ++i) {
        const struct weight *const weight = &weights->items[i];
        if (weight->scheme == NULL) {
            manifest_copy(job->manifest, weight->data, NULL, NULL, 0);
        } else {
            has_scales |= weight->input != NULL;
            CLI_TRY(convert_weight(job->manifest, weight, job->scheme, error));
        }
    }
    choose_activations(job, weights, has_scales);
    return OPAQ_OK;
}

/* ---- to floats ---- */

static enum opaq_element element_of(const char *name) {
    return strcmp(name, "f32") == 0 ? OPAQ_F32 : strcmp(name, "f16") == 0 ? OPAQ_F16 : OPAQ_BF16;
}

static enum opaq_status fill_plain(struct checkpoint_job *job, const struct weights *weights, const char *dtype,
                                   struct opaq_error *error) {
    size_t decoded = 0;
    for (size_t i = 0; i < weights->count; ++i) {
        const struct weight *const weight = &weights->items[i];
        if (weight->scheme != NULL) {
            manifest_decode(job->manifest, weight, element_of(dtype));
            ++decoded;
        } else {
            manifest_copy(job->manifest, weight->data, NULL, NULL, 0);
        }
    }
    return decoded != 0 ? OPAQ_OK
                        : opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s has no quantized weight that opaq supports",
                                    weights->model->path);
}

/* ---- the command ---- */

static void list_ignored(struct checkpoint_job *job, const struct weights *weights) {
    bool has_head = false;
    for (size_t i = 0; i < weights->count; ++i) {
        const struct weight *const weight = &weights->items[i];
        coverage_add(&job->coverages, weight->scheme != NULL ? COVERED : SKIPPED_SOURCE, weight);
        has_head |= strstr(weight->name, "lm_head.weight") != NULL;
        if (looks_linear(weight)) {
            module_list_add(&job->ignored, weight->name, module_length(weight->name));
        }
    }
    if (!has_head) {
        module_list_add(&job->ignored, "lm_head", strlen("lm_head"));
    }
}

static enum opaq_status fill_manifest(const struct command_call *call, const struct weights *weights,
                                      struct checkpoint_job *job, struct opaq_error *error) {
    const char *const layout = call_value(call, "layout", "plain");
    const char *const dtype = call_value(call, "dtype", "bf16");
    const bool is_plain = strcmp(layout, "plain") == 0;
    manifest_begin(job->manifest, weights);
    scale_forms_forget(job->manifest);
    CLI_TRY(is_plain ? fill_plain(job, weights, dtype, error) : fill_layout(job, weights, layout, error));
    if (!is_plain) {
        list_ignored(job, weights);
    }
    text_print(&job->settings, "convert %s %s", layout, is_plain ? dtype : "");
    return manifest_finish(job->manifest, error);
}

/* command_convert releases what this opens. */
static enum opaq_status prepare(const struct command_call *call, struct model *model, struct weights *weights,
                                struct checkpoint_job *job, struct opaq_error *error) {
    CLI_TRY(model_open(call->arguments[0], call_has(call, "follow-links"), model, error));
    CLI_TRY(weights_find(model, weights, error));
    return fill_manifest(call, weights, job, error);
}

enum exit_code command_convert(const struct command_call *call) {
    struct opaq_error error;
    struct model model = {0};
    struct weights weights = {0};
    struct manifest manifest = {0};
    struct checkpoint_job job = {.manifest = &manifest};
    enum exit_code code = EXIT_TROUBLE;
    if (prepare(call, &model, &weights, &job, &error) != OPAQ_OK) {
        complain(call, "%s", error.text);
    } else {
        code = checkpoint_run(call, &job, call->arguments[1], "converting");
    }
    manifest_free(&manifest);
    job_free(&job);
    weights_free(&weights);
    model_close(&model);
    return code;
}
