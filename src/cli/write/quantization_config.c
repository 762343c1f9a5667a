/* cli/write/quantization_config.c: see quantization_config.h. What the readers of each layout require:
 * docs/checkpoints.md. */
#include "cli/write/quantization_config.h"

#include <string.h>

#include "cli/cli_memory.h"
#include "cli/read/config_values.h"
#include "opaq/element.h"
#include "opaq/version.h"

static yyjson_mut_val *names(yyjson_mut_doc *document, const struct quantization *quantization) {
    yyjson_mut_val *const list = yyjson_mut_arr(document);
    for (size_t i = 0; i < quantization->ignored_count; ++i) {
        yyjson_mut_arr_add_strcpy(document, list, quantization->ignored[i]);
    }
    return list;
}

/* ---- inputs ---- */

static int format_bits(enum opaq_format format) {
    return opaq_element_info(opaq_format_row(format)->element_default)->bits;
}

bool activations_fit(const struct opaq_layout_row *scheme, enum opaq_activations activations) {
    return opaq_layout_method(scheme, activations) != NULL;
}

enum opaq_activations activations_default(const struct opaq_layout_row *scheme) {
    const enum opaq_activations wanted =
        format_bits(scheme->format) == 4 ? OPAQ_ACTIVATIONS_NONE : OPAQ_ACTIVATIONS_DYNAMIC;
    const enum opaq_activations other =
        wanted == OPAQ_ACTIVATIONS_NONE ? OPAQ_ACTIVATIONS_DYNAMIC : OPAQ_ACTIVATIONS_NONE;
    return activations_fit(scheme, wanted) ? wanted : other;
}

const char *activations_name(enum opaq_activations activations) {
    static const char *const all[] = {"none", "dynamic", "given"};
    return all[activations];
}

bool activations_of_config(yyjson_val *quantization, enum opaq_activations *activations) {
    struct opaq_config *const config = config_of_json(quantization);
    const struct opaq_config_scheme *const first = opaq_config_scheme(config, 0);
    const bool is_said = first != NULL && first->row->layout == OPAQ_LAYOUT_COMPRESSED_TENSORS;
    if (is_said) {
        *activations = first->has_input ? OPAQ_ACTIVATIONS_DYNAMIC : OPAQ_ACTIVATIONS_NONE;
    }
    opaq_config_destroy(config);
    return is_said;
}

/* ---- compressed-tensors ---- */

static void add_group(yyjson_mut_doc *document, yyjson_mut_val *to, int group) {
    if (group == 0) {
        yyjson_mut_obj_add_null(document, to, "group_size");
    } else {
        yyjson_mut_obj_add_int(document, to, "group_size", group);
    }
}

static yyjson_mut_val *ct_arguments(yyjson_mut_doc *document, const struct opaq_config_row *ct,
                                    const char *strategy, int group) {
    const struct opaq_format_row *const format = opaq_format_row(ct->format);
    yyjson_mut_val *const to = yyjson_mut_obj(document);
    yyjson_mut_obj_add_null(document, to, "actorder");
    const int32_t blocks[] = {format->block_rows, format->block_columns};
    yyjson_mut_val *const block = strcmp(strategy, "block") == 0
                                      ? yyjson_mut_arr_with_sint32(document, blocks, 2)
                                      : yyjson_mut_null(document);
    yyjson_mut_obj_add_val(document, to, "block_structure", block);
    add_group(document, to, group);
    yyjson_mut_obj_add_int(document, to, "num_bits", ct->bits);
    if (ct->scale_dtype != NULL) {
        yyjson_mut_obj_add_str(document, to, "scale_dtype", ct->scale_dtype);
        yyjson_mut_obj_add_str(document, to, "zp_dtype", ct->scale_dtype);
    }
    yyjson_mut_obj_add_str(document, to, "strategy", strategy);
    yyjson_mut_obj_add_bool(document, to, "symmetric", true);
    yyjson_mut_obj_add_str(document, to, "type", "float");
    return to;
}

static yyjson_mut_val *ct_input(yyjson_mut_doc *document, const struct opaq_config_row *ct,
                                enum opaq_activations activations) {
    if (activations == OPAQ_ACTIVATIONS_NONE) {
        return yyjson_mut_null(document);
    }
    yyjson_mut_val *const input = ct_arguments(document, ct, ct->input_strategy, ct->input_group);
    if (ct->format == OPAQ_NVFP4) { /* block scales are dynamic, the global scale is given */
        yyjson_mut_obj_add_str(document, input, "dynamic", "local");
        yyjson_mut_obj_add_str(document, input, "observer", "static_minmax");
    } else {
        yyjson_mut_obj_add_bool(document, input, "dynamic", activations == OPAQ_ACTIVATIONS_DYNAMIC);
    }
    return input;
}

static yyjson_mut_val *ct_config(yyjson_mut_doc *document, const struct quantization *quantization) {
    const struct opaq_config_row *const ct = opaq_config_row(quantization->scheme->format);
    yyjson_mut_val *const config = yyjson_mut_obj(document);
    yyjson_mut_val *const groups = yyjson_mut_obj_add_obj(document, config, "config_groups");
    yyjson_mut_val *const group = yyjson_mut_obj_add_obj(document, groups, "group_0");
    yyjson_mut_obj_add_str(document, group, "format", quantization->scheme->method);
    yyjson_mut_obj_add_val(document, group, "input_activations",
                           ct_input(document, ct, quantization->activations));
    yyjson_mut_obj_add_null(document, group, "output_activations");
    yyjson_mut_val *const targets = yyjson_mut_obj_add_arr(document, group, "targets");
    yyjson_mut_arr_add_str(document, targets, "Linear");
    yyjson_mut_val *const weights = ct_arguments(document, ct, ct->strategy, ct->group);
    yyjson_mut_obj_add_bool(document, weights, "dynamic", false);
    yyjson_mut_obj_add_val(document, group, "weights", weights);
    yyjson_mut_obj_add_str(document, config, "format", quantization->scheme->method);
    yyjson_mut_obj_add_null(document, config, "global_compression_ratio");
    yyjson_mut_obj_add_val(document, config, "ignore", names(document, quantization));
    yyjson_mut_obj_add_null(document, config, "kv_cache_scheme");
    yyjson_mut_obj_add_str(document, config, "quant_method", "compressed-tensors");
    yyjson_mut_obj_add_str(document, config, "quantization_status", "compressed");
    return config;
}

/* ---- ModelOpt ---- */

static const char *method_of(const struct quantization *quantization) {
    return opaq_layout_method(quantization->scheme, quantization->activations);
}

static void add_producer(yyjson_mut_doc *document, yyjson_mut_val *to) {
    yyjson_mut_val *const producer = yyjson_mut_obj_add_obj(document, to, "producer");
    yyjson_mut_obj_add_str(document, producer, "name",
                           "modelopt"); /* engines recognize the layout by this name */
    struct text version = {0};
    text_print(&version, "opaq %s", opaq_version());
    yyjson_mut_obj_add_strcpy(document, producer, "version", text_get(&version));
    text_free(&version);
}

static yyjson_mut_val *modelopt_numbers(yyjson_mut_doc *document, int bits, int group, bool is_dynamic) {
    yyjson_mut_val *const to = yyjson_mut_obj(document);
    yyjson_mut_obj_add_bool(document, to, "dynamic", is_dynamic);
    yyjson_mut_obj_add_int(document, to, "num_bits", bits);
    yyjson_mut_obj_add_str(document, to, "type", "float");
    if (group != 0) {
        yyjson_mut_obj_add_int(document, to, "group_size", group);
    }
    return to;
}

static yyjson_mut_val *modelopt_quantization(yyjson_mut_doc *document,
                                             const struct quantization *quantization) {
    const enum opaq_format format = quantization->scheme->format;
    const int bits = format_bits(format);
    const int group = opaq_format_row(format)->block_columns;
    yyjson_mut_val *const config = yyjson_mut_obj(document);
    yyjson_mut_val *const groups = yyjson_mut_obj_add_obj(document, config, "config_groups");
    yyjson_mut_val *const only = yyjson_mut_obj_add_obj(document, groups, "group_0");
    if (quantization->activations != OPAQ_ACTIVATIONS_NONE) {
        const bool is_dynamic = *quantization->scheme->input == '\0';
        yyjson_mut_obj_add_val(document, only, "input_activations",
                               modelopt_numbers(document, bits, group, is_dynamic));
    }
    yyjson_mut_obj_add_val(document, only, "weights", modelopt_numbers(document, bits, group, false));
    yyjson_mut_val *const targets = yyjson_mut_obj_add_arr(document, only, "targets");
    yyjson_mut_arr_add_str(document, targets, "Linear");
    yyjson_mut_obj_add_val(document, config, "ignore", names(document, quantization));
    yyjson_mut_obj_add_str(document, config, "quant_algo", method_of(quantization));
    if (group != 0) {
        yyjson_mut_obj_add_int(document, config, "group_size", group);
    }
    add_producer(document, config);
    yyjson_mut_obj_add_str(document, config, "quant_method", "modelopt");
    return config;
}

yyjson_mut_val *modelopt_config(yyjson_mut_doc *document, const struct quantization *quantization) {
    yyjson_mut_val *const root = yyjson_mut_obj(document);
    add_producer(document, root);
    yyjson_mut_val *const inner = yyjson_mut_obj_add_obj(document, root, "quantization");
    yyjson_mut_obj_add_str(document, inner, "quant_algo", method_of(quantization));
    yyjson_mut_obj_add_null(document, inner, "kv_cache_quant_algo");
    const int group = opaq_format_row(quantization->scheme->format)->block_columns;
    if (group != 0) {
        yyjson_mut_obj_add_int(document, inner, "group_size", group);
    }
    yyjson_mut_obj_add_val(document, inner, "exclude_modules", names(document, quantization));
    return root;
}

/* ---- DeepSeek, also used by transformers ---- */

static yyjson_mut_val *deepseek_config(yyjson_mut_doc *document, const struct quantization *quantization) {
    const struct opaq_format_row *const format = opaq_format_row(quantization->scheme->format);
    const int32_t block[2] = {format->block_rows, format->block_columns};
    yyjson_mut_val *const config = yyjson_mut_obj(document);
    yyjson_mut_obj_add_str(document, config, "activation_scheme", "dynamic");
    yyjson_mut_obj_add_str(document, config, "fmt", "e4m3");
    yyjson_mut_obj_add_str(document, config, "quant_method", quantization->scheme->method);
    if (quantization->has_exponents) {
        yyjson_mut_obj_add_str(document, config, "scale_fmt", "ue8m0");
    }
    yyjson_mut_obj_add_val(document, config, "weight_block_size",
                           yyjson_mut_arr_with_sint32(document, block, 2));
    yyjson_mut_obj_add_val(document, config, "modules_to_not_convert", names(document, quantization));
    return config;
}

/* ---- gpt-oss ---- */

static yyjson_mut_val *gpt_oss_config(yyjson_mut_doc *document, const struct quantization *quantization) {
    yyjson_mut_val *const config = yyjson_mut_obj(document);
    yyjson_mut_obj_add_val(document, config, "modules_to_not_convert", names(document, quantization));
    yyjson_mut_obj_add_str(document, config, "quant_method", quantization->scheme->method);
    return config;
}

yyjson_mut_val *quantization_config(yyjson_mut_doc *document, const struct quantization *quantization) {
    switch (quantization->scheme->layout) {
    case OPAQ_LAYOUT_COMPRESSED_TENSORS:
        return ct_config(document, quantization);
    case OPAQ_LAYOUT_MODELOPT:
        return modelopt_quantization(document, quantization);
    case OPAQ_LAYOUT_DEEPSEEK:
        return deepseek_config(document, quantization);
    case OPAQ_LAYOUT_GPT_OSS:
        return gpt_oss_config(document, quantization);
    }
    return NULL;
}
