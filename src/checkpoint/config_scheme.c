/* checkpoint/config_scheme.c: the tables behind opaq/checkpoint_config.h: what each layout's configuration calls the formats
 * of weights and inputs. Specification: docs/checkpoints.md. */
#include "checkpoint/config_scheme.h"

#include <stdio.h>
#include <string.h>

#include "base/try.h"
#include "opaq/status.h"

static char lower(char letter) { return letter >= 'A' && letter <= 'Z' ? (char)(letter - 'A' + 'a') : letter; }

bool is_same_name(const char *a, const char *b) {
    for (; *a != '\0' && lower(*a) == lower(*b); ++a, ++b) {
    }
    return *a == *b;
}

bool has_prefix(const char *name, const char *prefix) {
    for (; *prefix != '\0' && lower(*name) == lower(*prefix); ++name, ++prefix) {
    }
    return *prefix == '\0';
}

/* ---- quantizers ---- */

static struct opaq_spec make_spec(enum opaq_format format, unsigned options, enum opaq_rule rule) {
    struct opaq_spec spec;
    (void)opaq_spec_make(format, &spec, NULL);
    spec.options = (uint16_t)options;
    spec.rule = (uint8_t)rule;
    return spec;
}

/* Stacked weights with one scale each are stored with one scale per row. */
static void set_weight(const struct opaq_layout_row *row, struct opaq_config_scheme *scheme) {
    const bool is_fp8 = row->format == OPAQ_FP8;
    const unsigned global = row->format == OPAQ_NVFP4 ? OPAQ_GLOBAL : 0;
    memset(scheme, 0, sizeof *scheme);
    scheme->row = row;
    scheme->weight = make_spec(row->format, global, row->rule);
    scheme->stacked =
        make_spec(is_fp8 ? OPAQ_FP8ROW : row->format, global ? global | OPAQ_ROWSCALED : 0, row->rule);
    scheme->input_scale = "";
}

static void set_input(enum opaq_format format, enum opaq_rule rule, struct opaq_config_scheme *scheme) {
    scheme->has_input = 1;
    scheme->input = make_spec(format, format == OPAQ_NVFP4 ? OPAQ_GLOBAL : 0, rule);
}

/* Uses the scale of the checkpoint; call after set_input. */
static void set_given(const char *name, struct opaq_config_scheme *scheme) {
    scheme->has_input_given = 1;
    scheme->input_given = scheme->input;
    scheme->input_given.options |= scheme->input.format == OPAQ_FP8 ? OPAQ_DELAYED : 0;
    scheme->input_scale = name;
}

/* DeepSeek's layout with one scale for a weight, which only transformers writes: not a row of the table, because opaq
 * does not. */
static const struct opaq_layout_row deepseek_tensor = {
    .layout = OPAQ_LAYOUT_DEEPSEEK,
    .format = OPAQ_FP8,
    .method = "fp8",
    .data = "",
    .scale = "_scale_inv",
    .global = "",
    .input = "",
    .data_dtypes = "F8_E4M3",
    .scale_dtypes = "F32 BF16",
    .scale_shape = "",
    .global_shape = "",
    .rule = OPAQ_RULE_MODELOPT,
    .data_shape = "RC",
    .global_dtypes = "F32",
    .input_dtypes = "F32 BF16",
};

int opaq_layout_scheme(enum opaq_layout layout, int index, struct opaq_config_scheme *scheme) {
    const struct opaq_layout_row *row = NULL;
    int seen = 0;
    for (int i = 0; (row = opaq_layout_row(i)) != NULL; ++i) {
        if (row->layout == layout && seen++ == index) {
            break;
        }
    }
    row = row == NULL && layout == OPAQ_LAYOUT_DEEPSEEK && index == seen ? &deepseek_tensor : row;
    if (row == NULL || scheme == NULL) {
        return 0;
    }
    set_weight(row, scheme);
    scheme->input_scale = row->input;
    return 1;
}

/* ---- compressed-tensors ---- */

static const struct opaq_config_row rows[] = {
    {OPAQ_NVFP4, 4, "tensor_group", 16, "torch.float8_e4m3fn", OPAQ_NVFP4, "tensor_group", 16},
    {OPAQ_MXFP4, 4, "group", 32, "torch.uint8", OPAQ_MXFP4, "group", 32},
    {OPAQ_MXFP8, 8, "group", 32, "torch.uint8", OPAQ_MXFP8, "group", 32},
    {OPAQ_FP8, 8, "tensor", 0, NULL, OPAQ_FP8, "tensor", 0},
    {OPAQ_FP8ROW, 8, "channel", 0, NULL, OPAQ_FP8ROW, "token", 0},
    {OPAQ_FP8BLK2, 8, "block", 0, NULL, OPAQ_FP8BLK1, "group", 128},
};
enum { ROW_COUNT = sizeof rows / sizeof rows[0] };

const struct opaq_config_row *opaq_config_row(enum opaq_format format) {
    for (int i = 0; i < ROW_COUNT; ++i) {
        if (rows[i].format == format) {
            return &rows[i];
        }
    }
    return NULL;
}

/* The fields of an entry that determine the format. */
struct entry {
    int64_t bits;
    const char *strategy; /* NULL: none */
    int64_t group;        /* 0: none */
    int64_t block;        /* its index in the tree, or -1 */
};

static enum opaq_status read_entry(const struct config_tree *tree, int64_t object, const char *what,
                                   struct entry *entry, struct opaq_error *error) {
    const char *type = NULL;
    int64_t is_symmetric = 1;
    TRY(tree_integer(tree, object, "symmetric", OPAQ_JSON_BOOLEAN, 1, &is_symmetric, error));
    TRY(tree_string(tree, object, "type", &type, error));
    if (type == NULL || strcmp(type, "float") != 0 || !is_symmetric) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "the checkpoint's %s are %s %.32s numbers, expected symmetric float ones", what,
                         is_symmetric ? "symmetric" : "asymmetric", type == NULL ? "null" : type);
    }
    TRY(tree_field(tree, object, "block_structure", OPAQ_JSON_LIST, &entry->block, error));
    TRY(tree_integer(tree, object, "num_bits", OPAQ_JSON_INTEGER, 0, &entry->bits, error));
    TRY(tree_string(tree, object, "strategy", &entry->strategy, error));
    return tree_integer(tree, object, "group_size", OPAQ_JSON_INTEGER, 0, &entry->group, error);
}

static enum opaq_status refuse_entry(const struct config_tree *tree, const struct entry *entry,
                                     const char *what, struct opaq_error *error) {
    char size[SHOWN_BYTES + 16] = "";
    char shown[SHOWN_BYTES];
    if (entry->group != 0) {
        (void)snprintf(size, sizeof size, ", group %lld", (long long)entry->group);
    } else if (entry->block >= 0) {
        (void)snprintf(size, sizeof size, ", block %s", tree_show(tree, entry->block, shown));
    }
    return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                     "the checkpoint's %s are floats of %lld bits, strategy %.32s%s, which no opaq format is",
                     what, (long long)entry->bits, entry->strategy == NULL ? "null" : entry->strategy, size);
}

static bool weights_are(const struct config_tree *tree, const struct entry *entry,
                        const struct opaq_config_row *row) {
    const struct opaq_format_row *const format = opaq_format_row(row->format);
    const bool is_block = strcmp(row->strategy, "block") == 0;
    return entry->bits == row->bits && entry->strategy != NULL && strcmp(entry->strategy, row->strategy) == 0 &&
           (row->group == 0 || entry->group == row->group) &&
           (!is_block || tree_is_pair(tree, entry->block, format->block_rows, format->block_columns));
}

static bool inputs_are(const struct entry *entry, const struct opaq_config_row *row) {
    return entry->bits == row->bits && entry->strategy != NULL &&
           strcmp(entry->strategy, row->input_strategy) == 0 && entry->group == row->input_group;
}

/* Whether scales are computed from the data: true, or "local", where the checkpoint supplies the second-level
 * scale. */
static enum opaq_status read_dynamic(const struct config_tree *tree, int64_t object, bool *is_dynamic,
                                     struct opaq_error *error) {
    const int64_t value = tree_find(tree, object, "dynamic");
    *is_dynamic = tree_holds(tree, value);
    const struct opaq_config_value *const found = *is_dynamic ? &tree->values[value] : NULL;
    if (found == NULL || found->kind == OPAQ_JSON_BOOLEAN ||
        (found->kind == OPAQ_JSON_STRING && strcmp(found->text, "local") == 0)) {
        return OPAQ_OK;
    }
    char shown[SHOWN_BYTES];
    return opaq_fail(error, OPAQ_ERROR_TEXT,
                     "the quantization_config's dynamic is %s, %s, expected a boolean or \"local\"",
                     tree_show(tree, value, shown), tree_kind_name(tree, value));
}

static enum opaq_status read_input(const struct config_tree *tree, int64_t object,
                                   struct opaq_config_scheme *scheme, struct opaq_error *error) {
    const struct opaq_config_row *row = NULL;
    struct entry entry = {0, NULL, 0, -1};
    bool is_dynamic = true;
    TRY(read_entry(tree, object, "input activations", &entry, error));
    for (int i = 0; i < ROW_COUNT && row == NULL; ++i) {
        row = inputs_are(&entry, &rows[i]) ? &rows[i] : NULL;
    }
    if (row == NULL) {
        return refuse_entry(tree, &entry, "input activations", error);
    }
    set_input(row->input_format, OPAQ_RULE_COMPRESSED_TENSORS, scheme);
    const struct opaq_layout_row *const named = opaq_layout_find(OPAQ_LAYOUT_COMPRESSED_TENSORS, row->format);
    if (row->input_format == OPAQ_NVFP4) { /* block scales are computed, the second-level scale may be given */
        set_given(named->input, scheme);
        return OPAQ_OK;
    }
    TRY(read_dynamic(tree, object, &is_dynamic, error));
    if (is_dynamic) {
        return OPAQ_OK;
    }
    if (row->input_format != OPAQ_FP8) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "the checkpoint's input activations are static %s, expected dynamic ones",
                         opaq_format_row(row->input_format)->name);
    }
    set_given(named->input, scheme);
    return OPAQ_OK;
}

enum opaq_status scheme_of_group(const struct config_tree *tree, int64_t group,
                                 struct opaq_config_scheme *scheme, struct opaq_error *error) {
    const struct opaq_config_row *row = NULL;
    struct entry entry = {0, NULL, 0, -1};
    int64_t weights = -1;
    int64_t inputs = -1;
    TRY(tree_field(tree, group, "weights", OPAQ_JSON_OBJECT, &weights, error));
    TRY(read_entry(tree, weights, "weights", &entry, error));
    TRY(tree_field(tree, group, "input_activations", OPAQ_JSON_OBJECT, &inputs, error));
    for (int i = 0; i < ROW_COUNT && row == NULL; ++i) {
        row = weights_are(tree, &entry, &rows[i]) ? &rows[i] : NULL;
    }
    if (row == NULL) {
        return refuse_entry(tree, &entry, "weights", error);
    }
    set_weight(opaq_layout_find(OPAQ_LAYOUT_COMPRESSED_TENSORS, row->format), scheme);
    if (inputs >= 0) {
        TRY(read_input(tree, inputs, scheme, error));
    }
    if (tree_holds(tree, tree_find(tree, group, "output_activations"))) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "the checkpoint quantizes output activations, which opaq does not");
    }
    return OPAQ_OK;
}

/* ---- ModelOpt ---- */

/* How an algorithm stores weights, and the format of quantized inputs; -1: not quantized. */
static const struct algorithm {
    const char *name; /* NULL: the method of the layout's row */
    enum opaq_format stored;
    int input;
} algorithms[] = {
    {NULL, OPAQ_NVFP4, OPAQ_NVFP4},   {NULL, OPAQ_MXFP4, -1},
    {NULL, OPAQ_MXFP8, OPAQ_MXFP8},   {NULL, OPAQ_FP8, OPAQ_FP8},
    {NULL, OPAQ_FP8ROW, OPAQ_FP8ROW}, {NULL, OPAQ_FP8BLK2, -1},
    {"W4A16_NVFP4", OPAQ_NVFP4, -1},  {"W4A8_MXFP4_FP8", OPAQ_MXFP4, OPAQ_FP8},
};
enum { ALGORITHM_COUNT = sizeof algorithms / sizeof algorithms[0] };

static const char *algorithm_name(const struct algorithm *algorithm) {
    return algorithm->name != NULL ? algorithm->name
                                   : opaq_layout_find(OPAQ_LAYOUT_MODELOPT, algorithm->stored)->method;
}

static enum opaq_status refuse_algorithm(const char *algorithm, struct opaq_error *error) {
    char known[256] = "";
    size_t used = 0;
    for (int i = 0; i < ALGORITHM_COUNT; ++i) {
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i == 0 ? "" : ", ",
                                 algorithm_name(&algorithms[i]));
    }
    return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                     "the checkpoint's quant_algo is %s%.64s%s, expected one of %s or MIXED_PRECISION",
                     algorithm == NULL ? "" : "\"", algorithm == NULL ? "null" : algorithm,
                     algorithm == NULL ? "" : "\"", known);
}

enum opaq_status scheme_of_algorithm(const char *algorithm, struct opaq_config_scheme *scheme,
                                     struct opaq_error *error) {
    const struct algorithm *found = NULL;
    for (int i = 0; algorithm != NULL && i < ALGORITHM_COUNT; ++i) {
        if (is_same_name(algorithm_name(&algorithms[i]), algorithm)) {
            found = &algorithms[i];
        }
    }
    if (found == NULL) {
        return refuse_algorithm(algorithm, error);
    }
    const struct opaq_layout_row *const row = opaq_layout_find(OPAQ_LAYOUT_MODELOPT, found->stored);
    set_weight(row, scheme);
    if (found->input >= 0) {
        set_input((enum opaq_format)found->input, OPAQ_RULE_MODELOPT, scheme);
        if (found->input == OPAQ_NVFP4 || found->input == OPAQ_FP8) {
            set_given(row->input, scheme);
        }
    }
    return OPAQ_OK;
}

/* ---- DeepSeek, and what transformers writes under the same name: one scale, or MXFP8 ---- */

/* The row whose format has blocks of this size; no size means one scale. NULL if there is none. */
static const struct opaq_layout_row *deepseek_row(const struct config_tree *tree, int64_t block) {
    const struct opaq_layout_row *row = NULL;
    for (int i = 0; block >= 0 && (row = opaq_layout_row(i)) != NULL; ++i) {
        const struct opaq_format_row *const format = opaq_format_row(row->format);
        if (row->layout == OPAQ_LAYOUT_DEEPSEEK &&
            tree_is_pair(tree, block, format->block_rows, format->block_columns)) {
            return row;
        }
    }
    return block < 0 ? &deepseek_tensor : NULL;
}

static enum opaq_status refuse_block(const struct config_tree *tree, int64_t block, struct opaq_error *error) {
    char shown[SHOWN_BYTES];
    char known[64] = "";
    size_t used = 0;
    const struct opaq_layout_row *row = NULL;
    for (int i = 0; (row = opaq_layout_row(i)) != NULL; ++i) {
        if (row->layout == OPAQ_LAYOUT_DEEPSEEK) {
            const struct opaq_format_row *const format = opaq_format_row(row->format);
            used += (size_t)snprintf(known + used, sizeof known - used, "%s[%d, %d]", used == 0 ? "" : " or ",
                                     format->block_rows, format->block_columns);
        }
    }
    return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "the checkpoint's weight_block_size is %s, expected %s",
                     tree_show(tree, block, shown), known);
}

enum opaq_status scheme_of_deepseek(const struct config_tree *tree, struct opaq_config_scheme *scheme,
                                    struct opaq_error *error) {
    const char *activations = NULL;
    const char *scales = NULL;
    int64_t block = -1;
    char shown[SHOWN_BYTES];
    const bool is_said = tree_find(tree, 0, "weight_block_size") >= 0;
    TRY(tree_field(tree, 0, "weight_block_size", OPAQ_JSON_LIST, &block, error));
    TRY(tree_string(tree, 0, "activation_scheme", &activations, error));
    TRY(tree_string(tree, 0, "scale_fmt", &scales, error));
    const bool is_dynamic = activations == NULL || strcmp(activations, "dynamic") == 0;
    const struct opaq_layout_row *const row =
        is_said ? deepseek_row(tree, block) : opaq_layout_find(OPAQ_LAYOUT_DEEPSEEK, OPAQ_FP8BLK2);
    if (row == NULL) {
        return refuse_block(tree, block, error);
    }
    set_weight(row, scheme);
    if (row->format == OPAQ_FP8BLK2) {
        const bool has_exponents = scales != NULL && strcmp(scales, "ue8m0") == 0;
        set_input(OPAQ_FP8BLK1, has_exponents ? OPAQ_RULE_TE : OPAQ_RULE_MODELOPT, scheme);
        scheme->input.options |= has_exponents ? OPAQ_POW2 : 0;
    } else {
        set_input(row->format, row->rule, scheme);
    }
    if (row == &deepseek_tensor && !is_dynamic) {
        set_given("activation_scale", scheme);
    }
    if (!is_dynamic && (!is_said || block >= 0)) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "the checkpoint's activation_scheme is static, expected dynamic for blocks");
    }
    const int64_t experts = tree_find(tree, 0, "expert_dtype");
    if (experts >= 0 &&
        (tree->values[experts].kind != OPAQ_JSON_STRING || strcmp(tree->values[experts].text, "fp8") != 0)) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "the checkpoint's expert_dtype is %s, expected \"fp8\"",
                         tree_show(tree, experts, shown));
    }
    return OPAQ_OK;
}

void scheme_of_gpt_oss(struct opaq_config_scheme *scheme) {
    set_weight(opaq_layout_find(OPAQ_LAYOUT_GPT_OSS, OPAQ_MXFP4), scheme);
}

/* ---- the forms that a layout can describe ---- */

/* Inputs in NVFP4 need a scale from a calibration. */
static bool can_be_dynamic(int input) { return input >= 0 && input != OPAQ_NVFP4; }

static const char *modelopt_method(const struct opaq_layout_row *row, enum opaq_activations activations) {
    for (int i = 0; i < ALGORITHM_COUNT; ++i) {
        const bool fits = activations == OPAQ_ACTIVATIONS_NONE      ? algorithms[i].input < 0
                          : activations == OPAQ_ACTIVATIONS_DYNAMIC ? can_be_dynamic(algorithms[i].input)
                                                                    : algorithms[i].input >= 0;
        if (algorithms[i].stored == row->format && fits) {
            return algorithm_name(&algorithms[i]);
        }
    }
    return NULL;
}

const char *opaq_layout_method(const struct opaq_layout_row *row, enum opaq_activations activations) {
    if (row == NULL || (int)activations < 0 || activations > OPAQ_ACTIVATIONS_GIVEN ||
        (activations == OPAQ_ACTIVATIONS_GIVEN && *row->input == '\0')) {
        return NULL;
    }
    const bool is_none = activations == OPAQ_ACTIVATIONS_NONE;
    switch (row->layout) {
    case OPAQ_LAYOUT_COMPRESSED_TENSORS:
        return activations == OPAQ_ACTIVATIONS_DYNAMIC &&
                       !can_be_dynamic(opaq_config_row(row->format)->input_format)
                   ? NULL
                   : row->method;
    case OPAQ_LAYOUT_MODELOPT:
        return modelopt_method(row, activations);
    case OPAQ_LAYOUT_DEEPSEEK:
        return is_none ? NULL : row->method;
    case OPAQ_LAYOUT_GPT_OSS:
        return is_none ? row->method : NULL;
    }
    return NULL;
}
