/* cli/commands/command_quantize.c: `opaq quantize`: which weights, in which format and layout. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_try.h"
#include "cli/commands/commands.h"
#include "cli/read/name_pattern.h"
#include "cli/write/checkpoint_job.h"

/* Modules that engines expect unquantized: heads, embeddings, norms, routers, convolutions, vision and audio encoders. */
static const char *const usually_ignored[] = {
    "*lm_head",
    "*embed*",
    "*norm*",
    "*router*",
    "gate",
    "*.gate",
    "*.gate.wg",
    "*shared_expert_gate",
    "*conv1d",
    "*.wte",
    "*.wpe",
    "wte",
    "wpe",
    "shared",
    "*vision*",
    "*visual*",
    "*audio*",
    "*mm_projector*",
    "*multi_modal_projector*",
    "*relative_attention_bias",
};
static const char *const ignored_by_modelopt[] = {"*proj_out", "*output_layer", "output", "*.output"};
static const char *const ignored_by_deepseek[] = {"*eh_proj", "*shared_head*", "*weights_proj", "*kv_norm*"};

struct choice {
    const struct opaq_layout_row *scheme;
    struct opaq_spec spec;
    struct name_patterns usual; /* not quantized by default */
    struct name_patterns ignored;
    struct name_patterns included;
    bool splits_experts;
    enum opaq_activations activations;
};

static enum opaq_status add_all(struct name_patterns *patterns, const char *const *texts, size_t count,
                                struct opaq_error *error) {
    for (size_t i = 0; i < count; ++i) {
        CLI_TRY(patterns_add(patterns, texts[i], error));
    }
    return OPAQ_OK;
}

static enum opaq_status add_given(struct name_patterns *patterns, const char *const *texts,
                                  struct opaq_error *error) {
    for (; *texts != NULL; ++texts) {
        CLI_TRY(patterns_add(patterns, *texts, error));
    }
    return OPAQ_OK;
}

static enum opaq_status add_default_ignores(struct choice *choice, struct opaq_error *error) {
    CLI_TRY(
        add_all(&choice->usual, usually_ignored, sizeof usually_ignored / sizeof usually_ignored[0], error));
    if (choice->scheme->layout == OPAQ_LAYOUT_MODELOPT) {
        return add_all(&choice->usual, ignored_by_modelopt,
                       sizeof ignored_by_modelopt / sizeof ignored_by_modelopt[0], error);
    }
    if (choice->scheme->layout == OPAQ_LAYOUT_DEEPSEEK) {
        return add_all(&choice->usual, ignored_by_deepseek,
                       sizeof ignored_by_deepseek / sizeof ignored_by_deepseek[0], error);
    }
    return OPAQ_OK;
}

static void list_formats(enum opaq_layout layout, struct text *list) {
    const struct opaq_layout_row *scheme = NULL;
    for (int i = 0; (scheme = opaq_layout_row(i)) != NULL; ++i) {
        if (scheme->layout == layout && layout_is_written(scheme)) {
            text_print(list, "%s%s", list->length == 0 ? "" : ", ", opaq_format_row(scheme->format)->name);
        }
    }
}

static int find_rule(const char *name) {
    for (int i = 0; i < OPAQ_RULE_COUNT; ++i) {
        if (strcmp(opaq_rule_name((enum opaq_rule)i), name) == 0) {
            return i;
        }
    }
    return -1;
}

static enum opaq_status choose_spec(const struct command_call *call, struct choice *choice,
                                    struct opaq_error *error) {
    const char *const rule = call_value(call, "rule", opaq_rule_name(choice->scheme->rule));
    CLI_TRY(opaq_spec_make(choice->scheme->format, &choice->spec, error));
    const int number = find_rule(rule);
    if (number < 0) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "there is no scale rule \"%s\"", rule);
    }
    choice->spec.rule = (uint8_t)number;
    if (choice->scheme->format == OPAQ_NVFP4 &&
        (number == OPAQ_RULE_COMPRESSED_TENSORS || number == OPAQ_RULE_MODELOPT)) {
        choice->spec.options |= OPAQ_GLOBAL;
    }
    return opaq_spec_check(&choice->spec, error);
}

static enum opaq_status choose_activations(const struct command_call *call, struct choice *choice,
                                           struct opaq_error *error) {
    const struct opaq_layout_row *const scheme = choice->scheme;
    const char *const name = call_value(call, "activations", activations_name(activations_default(scheme)));
    choice->activations = strcmp(name, "none") == 0 ? OPAQ_ACTIVATIONS_NONE : OPAQ_ACTIVATIONS_DYNAMIC;
    if (activations_fit(scheme, choice->activations)) {
        return OPAQ_OK;
    }
    return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                     "the layout %s has no form of %s with activations %s%s; it has %s",
                     opaq_layout_name(scheme->layout), opaq_format_row(scheme->format)->name, name,
                     scheme->format == OPAQ_NVFP4 ? ", which need scales from a calibration" : "",
                     activations_name(activations_default(scheme)));
}

static enum opaq_status choose(const struct command_call *call, struct choice *choice,
                               struct opaq_error *error) {
    const char *const format = call_value(call, "format", "nvfp4");
    const char *const layout = call_value(call, "layout", "compressed-tensors");
    choice->scheme = opaq_layout_find((enum opaq_layout)opaq_layout_number(layout),
                                      (enum opaq_format)opaq_format_find(format));
    if (choice->scheme == NULL || !layout_is_written(choice->scheme)) {
        struct text list = {0};
        list_formats((enum opaq_layout)opaq_layout_number(layout), &list);
        const enum opaq_status status =
            opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "the layout %s does not have the format %s; it has %s",
                      layout, format, text_get(&list));
        text_free(&list);
        return status;
    }
    choice->splits_experts = strcmp(call_value(call, "experts", "split"), "split") == 0;
    CLI_TRY(choose_spec(call, choice, error));
    CLI_TRY(choose_activations(call, choice, error));
    if (!call_has(call, "no-default-ignore")) {
        CLI_TRY(add_default_ignores(choice, error));
    }
    CLI_TRY(add_given(&choice->ignored, call_values(call, "ignore"), error));
    return add_given(&choice->included, call_values(call, "include"), error);
}

/* Engines need whole blocks, except for the 128 x 128 blocks of fp8. */
static bool has_whole_blocks(const struct choice *choice, int64_t columns) {
    const int64_t block = opaq_format_row(choice->scheme->format)->block_columns;
    return choice->scheme->format == OPAQ_FP8BLK2 || block == 0 || columns % block == 0;
}

/* Whether a matrix of this module is selected and can be stored, or why not. */
static enum coverage judge(const struct choice *choice, const char *module, int64_t columns) {
    return patterns_match(&choice->usual, module)                                      ? SKIPPED_BY_DEFAULT
           : patterns_match(&choice->ignored, module)                                  ? SKIPPED_IGNORED
           : choice->included.count != 0 && !patterns_match(&choice->included, module) ? SKIPPED_NOT_INCLUDED
           : !has_whole_blocks(choice, columns)                                        ? SKIPPED_RAGGED
                                                                                       : COVERED;
}

static char *module_of(const char *weight) {
    const size_t length = module_length(weight);
    return copy_text(weight, length == 0 ? strlen(weight) : length);
}

static void keep(struct checkpoint_job *job, const struct weight *weight, enum coverage why) {
    coverage_add(&job->coverages, why, weight);
    if (weight->scheme != NULL) { /* weights that are not selected become plain */
        manifest_decode(job->manifest, weight, OPAQ_BF16);
        const size_t length = module_length(weight->name);
        module_list_add(&job->ignored, weight->name, length == 0 ? strlen(weight->name) : length);
        return;
    }
    manifest_copy(job->manifest, weight->data, NULL, NULL, 0);
    if (looks_linear(weight)) {
        module_list_add(&job->ignored, weight->name, module_length(weight->name));
    }
}

/* Adds a stack of experts to the manifest, as single weights or as a stack. If any of its matrices is not selected,
 * nothing is added and `why` is the reason. */
static enum opaq_status add_experts(const struct choice *choice, struct checkpoint_job *job,
                                    const struct weight *weight, enum coverage *why, struct opaq_error *error) {
    struct weight_slice *slices = NULL;
    const size_t count = weight_slices(job->manifest->weights->model, weight, &slices);
    *why = count != 0                                                ? COVERED
           : is_gpt_oss_stack(job->manifest->weights->model, weight) ? SKIPPED_INTERLEAVED
                                                                     : SKIPPED_OTHER;
    for (size_t i = 0; i < count && *why == COVERED; ++i) {
        char *const module = module_of(slices[i].name);
        *why = judge(choice, module, slices[i].columns);
        free(module);
    }
    enum opaq_status status = OPAQ_OK;
    if (*why == COVERED && choice->splits_experts) {
        for (size_t i = 0; i < count && status == OPAQ_OK; ++i) {
            struct weight_slice slice = slices[i];
            slice.name = copy_text(slice.name, strlen(slice.name));
            status = manifest_quantize(job->manifest, slice, choice->scheme, &choice->spec, error);
        }
    } else if (*why == COVERED && !slices[0].is_transposed) {
        status =
            manifest_quantize_stack(job->manifest, weight_whole(weight), choice->scheme, &choice->spec, error);
    } else if (*why == COVERED) {
        *why = SKIPPED_STACKED;
    }
    if (*why == COVERED && job->manifest->weights->model->config == NULL && !job->has_guessed_stacks) {
        job->has_guessed_stacks = true;
        job_note(job,
                 "without config.json stacked experts are assumed to be [experts, out, in], gate before up: %s",
                 weight->name);
    }
    weight_slices_free(slices, count);
    return status;
}

/* The same for a weight that is not a stack of experts. */
static enum coverage judge_weight(const struct choice *choice, const struct weight *weight) {
    if (weight->scheme == NULL && looks_like_embedding(weight)) {
        return SKIPPED_EMBEDDING;
    }
    if (weight->scheme != NULL && weight->stack != 1) {
        return SKIPPED_STACKED;
    }
    if ((weight->scheme == NULL && !looks_linear(weight)) || weight->rows <= 0 || weight->columns <= 0) {
        return SKIPPED_OTHER;
    }
    char *const module = module_of(weight->name);
    const enum coverage found = judge(choice, module, weight->columns);
    free(module);
    return found;
}

/* The gpt-oss layout stores the experts of a layer together or not at all; their module is "....mlp.experts". */
static enum opaq_status add_gpt_oss(const struct choice *choice, struct checkpoint_job *job,
                                    const struct weight *weight, struct opaq_error *error) {
    if (!is_gpt_oss_stack(job->manifest->weights->model, weight)) {
        keep(job, weight,
             looks_like_embedding(weight) ? SKIPPED_EMBEDDING
             : looks_linear(weight)       ? SKIPPED_NOT_EXPERTS
                                          : SKIPPED_OTHER);
        return OPAQ_OK;
    }
    const struct weight_slice slice = gpt_oss_slice(weight);
    char *const module = copy_text(weight->name, (size_t)(strrchr(weight->name, '.') - weight->name));
    const enum coverage why = judge(choice, module, slice.columns);
    enum opaq_status status = OPAQ_OK;
    if (why == COVERED) {
        status = manifest_quantize_stack(job->manifest, slice, choice->scheme, &choice->spec, error);
        coverage_add(&job->coverages, COVERED, weight);
    } else {
        free(slice.name);
        keep(job, weight, why);
        const size_t last = job->ignored.count; /* the stacks of a layer are adjacent */
        if (last == 0 || strcmp(job->ignored.names[last - 1], module) != 0) {
            module_list_add(&job->ignored, module, strlen(module));
        }
    }
    if (why == SKIPPED_RAGGED) {
        status =
            opaq_fail(error, OPAQ_ERROR_SHAPE,
                      "%.160s has inputs of size %" PRId64 ", expected a multiple of %d for the layout gpt-oss",
                      weight->name, weight->rows, (int)opaq_format_row(choice->scheme->format)->block_columns);
    }
    free(module);
    return status;
}

static enum opaq_status add_weight(const struct choice *choice, struct checkpoint_job *job,
                                   const struct weight *weight, struct opaq_error *error) {
    enum coverage why = SKIPPED_OTHER;
    if (choice->scheme->layout == OPAQ_LAYOUT_GPT_OSS) {
        return add_gpt_oss(choice, job, weight, error);
    }
    if (weight->scheme == NULL && weight->data->tensor->rank > 2) {
        const enum opaq_status status = add_experts(choice, job, weight, &why, error);
        if (status != OPAQ_OK || why == COVERED) {
            coverage_add(&job->coverages, COVERED, weight);
            return status;
        }
    } else {
        why = judge_weight(choice, weight);
    }
    if (why != COVERED) {
        keep(job, weight, why);
        return OPAQ_OK;
    }
    coverage_add(&job->coverages, COVERED, weight);
    return manifest_quantize(job->manifest, weight_whole(weight), choice->scheme, &choice->spec, error);
}

/* A head tied to the embedding is a module without a tensor. */
static void ignore_tied_head(struct checkpoint_job *job) {
    for (size_t i = 0; i < job->manifest->target_count; ++i) {
        if (strstr(job->manifest->targets[i].slice.name, "lm_head.weight") != NULL) {
            return;
        }
    }
    for (size_t i = 0; i < job->ignored.count; ++i) {
        if (strstr(job->ignored.names[i], "lm_head") != NULL) {
            return;
        }
    }
    module_list_add(&job->ignored, "lm_head", strlen("lm_head"));
}

static void describe(const struct command_call *call, const struct choice *choice, struct checkpoint_job *job) {
    char spec[OPAQ_SPEC_TEXT_BYTES] = "";
    opaq_spec_print(&choice->spec, spec, sizeof spec, NULL);
    text_print(&job->settings, "quantize %s %s activations=%s experts=%d defaults=%d", spec,
               opaq_layout_name(choice->scheme->layout), activations_name(choice->activations),
               choice->splits_experts, !call_has(call, "no-default-ignore"));
    for (size_t i = 0; i < 2; ++i) {
        const char *const option = i == 0 ? "ignore" : "include";
        for (const char *const *value = call_values(call, option); *value != NULL; ++value) {
            text_print(&job->settings, " %s=%s", option, *value);
        }
    }
}

/* A source in the gpt-oss layout is rejected: no loader accepts two layouts in one checkpoint. */
static enum opaq_status check_source(const struct choice *choice, const struct weights *weights,
                                     struct opaq_error *error) {
    for (size_t i = 0; i < weights->count; ++i) {
        const struct weight *const weight = &weights->items[i];
        if (weight->scheme != NULL && weight->scheme->layout == OPAQ_LAYOUT_GPT_OSS) {
            return opaq_fail(
                error, OPAQ_ERROR_UNSUPPORTED,
                "%s has its experts quantized already, as mxfp4 in gpt-oss's layout (%.120s); 'opaq "
                "convert --layout plain' decodes them",
                weights->model->path, weight->data->tensor->name);
        }
    }
    if (choice->scheme->layout == OPAQ_LAYOUT_GPT_OSS && !model_is_gpt_oss(weights->model)) {
        return opaq_fail(
            error, OPAQ_ERROR_UNSUPPORTED,
            "the layout gpt-oss is for models whose config.json has the model_type gpt_oss, which %s "
            "does not have",
            weights->model->path);
    }
    return OPAQ_OK;
}

static bool matches_module(const struct name_patterns *patterns, const char *weight) {
    char *const module = module_of(weight);
    const bool is_match = patterns_match(patterns, module);
    free(module);
    return is_match;
}

/* Whether a pattern matches a module: of a weight, of an expert of a stack that is quantized, or an ignored one. */
static bool is_used(const struct name_patterns *pattern, const struct weights *weights,
                    const struct checkpoint_job *job) {
    bool is_match = false;
    for (size_t i = 0; i < weights->count && !is_match; ++i) {
        is_match = matches_module(pattern, weights->items[i].name);
    }
    for (size_t i = 0; i < job->manifest->target_count && !is_match; ++i) {
        is_match = matches_module(pattern, job->manifest->targets[i].slice.name);
    }
    for (size_t i = 0; i < job->ignored.count && !is_match; ++i) {
        is_match = patterns_match(pattern, job->ignored.names[i]);
    }
    return is_match;
}

/* Notes patterns of an option that match nothing. */
static enum opaq_status note_unmatched(const struct command_call *call, const char *option,
                                       const struct weights *weights, struct checkpoint_job *job,
                                       struct opaq_error *error) {
    for (const char *const *value = call_values(call, option); *value != NULL; ++value) {
        struct name_patterns pattern = {0};
        CLI_TRY(patterns_add(&pattern, *value, error));
        if (!is_used(&pattern, weights, job)) {
            job_note(job, "--%s %s matches none of the modules of %zu weights", option, *value, weights->count);
        }
        patterns_free(&pattern);
    }
    return OPAQ_OK;
}

/* Notes how many quantized weights are decoded and quantized again. */
static void note_quantized(const struct weights *weights, struct checkpoint_job *job) {
    const struct weight *first = NULL;
    size_t count = 0;
    for (size_t i = 0; i < job->manifest->target_count; ++i) {
        const struct manifest_target *const target = &job->manifest->targets[i];
        if (target->scheme != NULL && target->slice.weight->scheme != NULL) {
            first = first == NULL ? target->slice.weight : first;
            ++count;
        }
    }
    if (first != NULL) {
        job_note(job,
                 "%zu of %zu matrices are quantized already in %s, the first is %s (%s): they are decoded and "
                 "quantized "
                 "again, which adds a second rounding error; 'opaq convert' changes the layout without one",
                 count, job->manifest->target_count, weights->model->path, first->name, weight_kind(first));
    }
}

static enum opaq_status fill_manifest(const struct command_call *call, const struct choice *choice,
                                      const struct weights *weights, struct checkpoint_job *job,
                                      struct opaq_error *error) {
    manifest_begin(job->manifest, weights);
    CLI_TRY(check_source(choice, weights, error));
    for (size_t i = 0; i < weights->count; ++i) {
        CLI_TRY(add_weight(choice, job, &weights->items[i], error));
    }
    if (job->manifest->target_count == 0) {
        return opaq_fail(
            error, OPAQ_ERROR_ARGUMENT,
            "%s has no weight to quantize: of %zu tensors none is a matrix called \"weight\" that is "
            "selected and has whole blocks",
            weights->model->path, weights->model->tensor_count);
    }
    job->scheme = choice->scheme;
    job->activations = choice->activations;
    ignore_tied_head(job);
    note_quantized(weights, job);
    CLI_TRY(note_unmatched(call, "ignore", weights, job, error));
    CLI_TRY(note_unmatched(call, "include", weights, job, error));
    describe(call, choice, job);
    return manifest_finish(job->manifest, error);
}

/* command_quantize releases what this opens. */
static enum opaq_status prepare(const struct command_call *call, const struct choice *choice,
                                struct model *model, struct weights *weights, struct checkpoint_job *job,
                                struct opaq_error *error) {
    CLI_TRY(model_open(call->arguments[0], call_has(call, "follow-links"), model, error));
    CLI_TRY(weights_find(model, weights, error));
    return fill_manifest(call, choice, weights, job, error);
}

enum exit_code command_quantize(const struct command_call *call) {
    struct opaq_error error;
    struct model model = {0};
    struct weights weights = {0};
    struct choice choice = {0};
    struct manifest manifest = {0};
    struct checkpoint_job job = {.manifest = &manifest, .allows_nonfinite = call_has(call, "allow-nonfinite")};
    enum exit_code code = EXIT_TROUBLE;
    if (choose(call, &choice, &error) != OPAQ_OK) {
        code = EXIT_USAGE;
        complain(call, "%s", error.text);
    } else if (prepare(call, &choice, &model, &weights, &job, &error) != OPAQ_OK) {
        complain(call, "%s", error.text);
    } else {
        code = checkpoint_run(call, &job, call->arguments[1], "quantizing");
    }
    manifest_free(&manifest);
    job_free(&job);
    patterns_free(&choice.usual);
    patterns_free(&choice.ignored);
    patterns_free(&choice.included);
    weights_free(&weights);
    model_close(&model);
    return code;
}
