/* cli/report/model_notes.c: see model_notes.h. Findings of one sort share a note, with their number and the first. */
#include "cli/report/model_notes.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_try.h"
#include "cli/read/config_values.h"
#include "cli/read/json.h"
#include "cli/read/name_pattern.h"
#include "cli/read/weight_slice.h"
#include "cli/texts.h"

static void note(struct model_notes *notes, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void note(struct model_notes *notes, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    const size_t bytes = length < 0 ? 1 : (size_t)length + 1;
    char *const line = alloc_array(bytes, 1);
    va_start(arguments, format);
    vsnprintf(line, bytes, format, arguments);
    va_end(arguments);
    notes->lines = realloc_array(notes->lines, notes->count + 1, sizeof *notes->lines);
    notes->lines[notes->count++] = line;
}

/* Findings of one sort. */
struct finding {
    size_t count;
    const char *first;
};

static const char *plural(size_t count) { return count == 1 ? "" : "s"; }

static void find(struct finding *finding, const char *name) {
    if (finding->count++ == 0) {
        finding->first = name;
    }
}

/* ---- tensors ---- */

static void check_tensors(const struct weights *weights, struct model_notes *notes) {
    struct finding fp8 = {0};
    struct finding packed = {0};
    struct finding scales = {0};
    for (size_t i = 0; i < weights->count; ++i) {
        const struct weight *const weight = &weights->items[i];
        const enum st_dtype dtype = weight->data->tensor->dtype;
        if (weight->scheme != NULL) {
            continue;
        }
        if (dtype == ST_F8_E4M3 || dtype == ST_F8_E5M2) {
            /* block scales have this dtype, too */
            find(ends_with(weight->name, "_scale") ? &scales : &fp8, weight->name);
        } else if (ends_with(weight->name, "_packed") || ends_with(weight->name, "_blocks")) {
            find(&packed, weight->name);
        } else if (strstr(weight->name, "weight_scale") != NULL ||
                   ends_with(weight->name, "weight_global_scale") || ends_with(weight->name, "_scales")) {
            find(&scales, weight->name);
        }
    }
    if (fp8.count != 0) {
        note(notes, "fp8 codes without scales that fit: %zu tensor%s, the first %s", fp8.count,
             plural(fp8.count), fp8.first);
    }
    if (packed.count != 0) {
        note(notes, "packed codes without scales that fit: %zu tensor%s, the first %s", packed.count,
             plural(packed.count), packed.first);
    }
    if (scales.count != 0) {
        note(notes, "scales without codes that fit: %zu tensor%s, the first %s", scales.count,
             plural(scales.count), scales.first);
    }
}

/* ---- the configuration ---- */

static void compare_layouts(const struct weights *weights, yyjson_val *quantization,
                            struct model_notes *notes) {
    const int configured = layout_of_config(quantization);
    const char *const method = json_member_text(quantization, "quant_method");
    if (quantization == NULL) {
        if (weights->layout >= 0 && weights->model->config != NULL) {
            note(notes, "weights are quantized in the layout %s, but config.json has no quantization_config",
                 opaq_layout_name((enum opaq_layout)weights->layout));
        }
    } else if (weights->layout < 0) {
        note(notes, "the configuration declares quantization (%s), but no quantized weight was found",
             configured >= 0  ? opaq_layout_name((enum opaq_layout)configured)
             : method != NULL ? method
                              : "no quant_method");
    } else if (configured != weights->layout) {
        note(notes, "the configuration says %s, but the weights are in the layout %s",
             configured >= 0  ? opaq_layout_name((enum opaq_layout)configured)
             : method != NULL ? method
                              : "no quant_method",
             opaq_layout_name((enum opaq_layout)weights->layout));
    }
}

static void check_ignored(const struct weights *weights, yyjson_val *quantization, struct model_notes *notes) {
    struct ignore_list ignored;
    ignore_list_make(quantization, &ignored);
    struct finding found = {0};
    const char *entry = NULL;
    for (size_t i = 0; i < weights->count; ++i) {
        const struct weight *const weight = &weights->items[i];
        if (weight->scheme == NULL) {
            continue;
        }
        const char *const dot = strrchr(weight->name, '.');
        const bool is_stack = dot == NULL || strcmp(dot, ".weight") != 0;
        char *const module =
            copy_text(weight->name, is_stack ? strlen(weight->name) : (size_t)(dot - weight->name));
        const char *const why = ignore_list_find(&ignored, module);
        free(module);
        if (why != NULL) {
            entry = found.count == 0 ? why : entry;
            find(&found, weight->name);
        }
    }
    if (found.count != 0) {
        note(notes,
             "quantized, but on the configuration's list of modules to ignore: %zu weight%s, the first %s "
             "(by \"%s\")",
             found.count, plural(found.count), found.first, entry);
    }
    if (ignored.refused.status != OPAQ_OK) {
        note(notes, "skipped in the configuration's list of modules to ignore: %s", ignored.refused.text);
    }
    ignore_list_free(&ignored);
}

/* ---- global scales of modules that engines fuse ---- */

/* The weight of the sibling module `other` of `weight`, whose module is `module`. */
static const struct weight *neighbour(const struct weights *weights, const struct weight *weight,
                                      const char *module, const char *other) {
    struct text name = {0};
    const size_t prefix = strlen(weight->name) - strlen(module) - strlen(".weight");
    text_print(&name, "%.*s%s.weight", (int)prefix, weight->name, other);
    const struct weight *const found = weights_named(weights, text_get(&name));
    text_free(&name);
    return found;
}

/* Whether a weight and one that engines fuse with it have different global scales. */
static enum opaq_status has_other_scale(const struct weights *weights, const struct weight *a,
                                        const struct weight *b, bool *is_other, struct opaq_error *error) {
    uint32_t scales[2] = {0, 0}; /* the bits of the floats */
    if (b == NULL || b->global == NULL || a->stack != 1 || b->stack != 1) {
        return OPAQ_OK;
    }
    CLI_TRY(model_read(weights->model, a->global, 0, &scales[0], sizeof scales[0], error));
    CLI_TRY(model_read(weights->model, b->global, 0, &scales[1], sizeof scales[1], error));
    *is_other |= scales[0] != scales[1];
    return OPAQ_OK;
}

static enum opaq_status compare_globals(const struct weights *weights, const char *const *modules,
                                        struct model_notes *notes, struct opaq_error *error) {
    struct finding found = {0};
    struct text ending = {0};
    text_print(&ending, ".%s.weight", modules[0]);
    enum opaq_status status = OPAQ_OK;
    for (size_t i = 0; i < weights->count && status == OPAQ_OK; ++i) {
        const struct weight *const weight = &weights->items[i];
        bool is_other = false;
        if (weight->global == NULL || !ends_with(weight->name, text_get(&ending))) {
            continue;
        }
        for (int other = 1; other < FUSED_MOST && modules[other] != NULL && status == OPAQ_OK; ++other) {
            status = has_other_scale(weights, weight, neighbour(weights, weight, modules[0], modules[other]),
                                     &is_other, error);
        }
        if (is_other) {
            find(&found, weight->name);
        }
    }
    text_free(&ending);
    if (found.count != 0) {
        note(notes, "global scales differ within %s, %s%s%s, which engines fuse: %zu time%s, the first at %s",
             modules[0], modules[1], modules[2] == NULL ? "" : ", ", modules[2] == NULL ? "" : modules[2],
             found.count, plural(found.count), found.first);
    }
    return status;
}

enum opaq_status model_notes_make(const struct checkpoint *checkpoint, struct model_notes *notes,
                                  struct opaq_error *error) {
    const struct weights *const weights = &checkpoint->weights;
    yyjson_val *const quantization = model_quantization(&checkpoint->model);
    *notes = (struct model_notes){NULL, 0};
    compare_layouts(weights, quantization, notes);
    check_ignored(weights, quantization, notes);
    check_tensors(weights, notes);
    const struct model *const model = &checkpoint->model;
    for (size_t i = 0; i < model->outside_count; ++i) {
        note(notes, "%s is not in %s and was not read", model->outside[i], model->index_name);
    }
    enum opaq_status status = OPAQ_OK;
    for (size_t i = 0; i < fused_count && status == OPAQ_OK; ++i) {
        status = compare_globals(weights, fused_projections[i], notes, error);
    }
    if (status != OPAQ_OK) {
        model_notes_free(notes);
    }
    return status;
}

void model_notes_free(struct model_notes *notes) {
    for (size_t i = 0; i < notes->count; ++i) {
        free(notes->lines[i]);
    }
    free(notes->lines);
    *notes = (struct model_notes){NULL, 0};
}
