/* test_checkpoint_config.c: quantization_configs as lists of values: the contents for each layout, and invalid
 * ones. Types of every field: tests/python/test_config_types.py. */
#include "check.h"
#include "opaq/checkpoint_config.h"
#include "support_spec.h"

#define OBJECT(depth, key) \
    { depth, OPAQ_JSON_OBJECT, key, NULL, 0 }
#define LIST(depth, key) \
    { depth, OPAQ_JSON_LIST, key, NULL, 0 }
#define STRING(depth, key, text) \
    { depth, OPAQ_JSON_STRING, key, text, 0 }
#define INT(depth, key, number) \
    { depth, OPAQ_JSON_INTEGER, key, NULL, number }
#define BOOL(depth, key, truth) \
    { depth, OPAQ_JSON_BOOLEAN, key, NULL, truth }
#define NONE(depth, key) \
    { depth, OPAQ_JSON_NULL, key, NULL, 0 }
#define READ(values, config, error) opaq_config_read(values, sizeof(values) / sizeof(values)[0], config, error)

static void check_scheme(const struct opaq_config *config, int64_t index, const char *weight,
                         const char *stacked, const char *input, const char *given, const char *scale) {
    const struct opaq_config_scheme *const scheme = opaq_config_scheme(config, index);
    if (!CHECK(scheme != NULL)) {
        return;
    }
    CHECK_EQ_STR(spec_text(&scheme->weight).text, weight);
    CHECK_EQ_STR(spec_text(&scheme->stacked).text, stacked);
    CHECK_EQ_STR(scheme->has_input ? spec_text(&scheme->input).text : "", input);
    CHECK_EQ_STR(scheme->has_input_given ? spec_text(&scheme->input_given).text : "", given);
    CHECK_EQ_STR(scheme->input_scale, scale);
    CHECK_EQ_INT(opaq_spec_check(&scheme->weight, NULL), OPAQ_OK);
    CHECK_EQ_INT(opaq_spec_check(&scheme->stacked, NULL), OPAQ_OK);
}

static void compressed_tensors(void) {
    static const struct opaq_config_value values[] = {
        OBJECT(0, NULL),
        STRING(1, "quant_method", "Compressed-Tensors"),
        OBJECT(1, "config_groups"),
        OBJECT(2, "by_class"),
        LIST(3, "targets"),
        STRING(4, NULL, "Linear"),
        OBJECT(3, "weights"),
        INT(4, "num_bits", 4),
        STRING(4, "type", "float"),
        STRING(4, "strategy", "tensor_group"),
        INT(4, "group_size", 16),
        OBJECT(3, "input_activations"),
        INT(4, "num_bits", 4),
        STRING(4, "type", "float"),
        STRING(4, "strategy", "tensor_group"),
        INT(4, "group_size", 16),
        STRING(4, "dynamic", "local"),
        OBJECT(2, "by_name"),
        LIST(3, "targets"),
        STRING(4, NULL, "re:.*self_attn.*"),
        STRING(4, NULL, "model.embed"),
        OBJECT(3, "weights"),
        INT(4, "num_bits", 8),
        STRING(4, "type", "float"),
        BOOL(4, "symmetric", 1),
        STRING(4, "strategy", "block"),
        LIST(4, "block_structure"),
        INT(5, NULL, 128),
        INT(5, NULL, 128),
        OBJECT(3, "input_activations"),
        INT(4, "num_bits", 8),
        STRING(4, "type", "float"),
        STRING(4, "strategy", "group"),
        INT(4, "group_size", 128),
        BOOL(4, "dynamic", 1),
        LIST(1, "ignore"),
        STRING(2, NULL, "lm_head"),
    };
    struct opaq_config *config = NULL;
    struct opaq_error error = {OPAQ_OK, ""};
    CHECK_EQ_INT(READ(values, &config, &error), OPAQ_OK);
    CHECK_EQ_STR(error.text, "");
    check_scheme(config, 0, "fp8blk2+rule=compressed-tensors", "fp8blk2+rule=compressed-tensors",
                 "fp8blk1+rule=compressed-tensors", "", "");
    check_scheme(config, 1, "nvfp4+global+rule=compressed-tensors",
                 "nvfp4+rowscaled+global+rule=compressed-tensors", "nvfp4+global+rule=compressed-tensors",
                 "nvfp4+global+rule=compressed-tensors", "input_global_scale");
    CHECK(opaq_config_scheme(config, 2) == NULL && opaq_config_scheme(config, -1) == NULL);
    CHECK_EQ_STR(opaq_config_target(config, 0, 0), "re:.*self_attn.*");
    CHECK_EQ_STR(opaq_config_target(config, 0, 1), "model.embed");
    CHECK(opaq_config_target(config, 0, 2) == NULL && opaq_config_target(config, 2, 0) == NULL);
    CHECK_EQ_STR(opaq_config_target(config, 1, 0), "*");
    CHECK_EQ_STR(opaq_config_ignored(config, 0), "lm_head");
    CHECK(opaq_config_ignored(config, 1) == NULL && opaq_config_ignored(NULL, 0) == NULL);
    CHECK_EQ_STR(opaq_config_weight_name(config, 0), "weight");
    CHECK(opaq_config_weight_name(config, 1) == NULL);
    opaq_config_destroy(config);
}

static void modelopt_of_several_algorithms(void) {
    static const struct opaq_config_value values[] = {
        OBJECT(0, NULL),
        STRING(1, "quant_method", "modelopt"),
        STRING(1, "quant_algo", "FP8"), /* the inner one applies */
        OBJECT(1, "quantization"),
        STRING(2, "quant_algo", "mixed_precision"),
        LIST(2, "exclude_modules"),
        STRING(3, NULL, "lm_head"),
        OBJECT(2, "quantized_layers"),
        OBJECT(3, "a.b"),
        STRING(4, "quant_algo", "FP8"),
        OBJECT(3, "c"),
        STRING(4, "quant_algo", "w4a8_mxfp4_fp8"),
        OBJECT(3, "d"),
        STRING(4, "quant_algo", "FP8"),
    };
    struct opaq_config *config = NULL;
    CHECK_EQ_INT(READ(values, &config, NULL), OPAQ_OK);
    check_scheme(config, 0, "fp8+rule=modelopt", "fp8row+rule=modelopt", "fp8+rule=modelopt",
                 "fp8+delayed+rule=modelopt", "input_scale");
    check_scheme(config, 1, "mxfp4+rule=modelopt", "mxfp4+rule=modelopt", "fp8+rule=modelopt",
                 "fp8+delayed+rule=modelopt", "input_scale");
    CHECK_EQ_STR(opaq_config_target(config, 0, 0), "a.b");
    CHECK_EQ_STR(opaq_config_target(config, 0, 1), "d");
    CHECK_EQ_STR(opaq_config_target(config, 1, 0), "c");
    CHECK_EQ_STR(opaq_config_ignored(config, 0), "lm_head");
    opaq_config_destroy(config);
}

static void deepseek_and_gpt_oss(void) {
    static const struct opaq_config_value blocks[] = {
        OBJECT(0, NULL),
        STRING(1, "quant_method", "fp8"),
        STRING(1, "scale_fmt", "ue8m0"),
        NONE(1, "modules_to_not_convert"),
        LIST(1, "ignored_layers"),
        STRING(2, NULL, "x"),
    };
    static const struct opaq_config_value tensor[] = {
        OBJECT(0, NULL),
        STRING(1, "quant_method", "fp8"),
        NONE(1, "weight_block_size"),
        STRING(1, "activation_scheme", "static"),
    };
    static const struct opaq_config_value stacks[] = {OBJECT(0, NULL), STRING(1, "quant_method", "mxfp4")};
    struct opaq_config *config = NULL;
    CHECK_EQ_INT(READ(blocks, &config, NULL), OPAQ_OK);
    check_scheme(config, 0, "fp8blk2+rule=modelopt", "fp8blk2+rule=modelopt", "fp8blk1+pow2", "", "");
    CHECK_EQ_STR(opaq_config_ignored(config, 0), "x");
    opaq_config_destroy(config);
    CHECK_EQ_INT(READ(tensor, &config, NULL), OPAQ_OK);
    check_scheme(config, 0, "fp8+rule=modelopt", "fp8row+rule=modelopt", "fp8+rule=modelopt",
                 "fp8+delayed+rule=modelopt", "activation_scale");
    CHECK_EQ_STR(opaq_config_scheme(config, 0)->row->scale, "_scale_inv");
    opaq_config_destroy(config);
    CHECK_EQ_INT(READ(stacks, &config, NULL), OPAQ_OK);
    check_scheme(config, 0, "mxfp4+rule=ocp", "mxfp4+rule=ocp", "", "", "");
    CHECK_EQ_STR(opaq_config_weight_name(config, 1), "down_proj");
    opaq_config_destroy(config);
}

static void refusals(void) {
    static const struct opaq_config_value number[] = {INT(0, NULL, 7)};
    static const struct opaq_config_value method[] = {OBJECT(0, NULL), LIST(1, "quant_method"),
                                                      STRING(2, NULL, "fp8"), OBJECT(2, NULL), BOOL(3, "a", 0)};
    static const struct opaq_config_value size[] = {OBJECT(0, NULL), STRING(1, "quant_method", "fp8"),
                                                    LIST(1, "weight_block_size"), INT(2, NULL, 64)};
    static const struct opaq_config_value kind[] = {OBJECT(0, NULL), STRING(1, "quant_method", "fp8"),
                                                    INT(1, "weight_block_size", 128)};
    static const struct {
        const struct opaq_config_value *values;
        int64_t count;
        const char *says;
    } all[] = {
        {number, 1, "the quantization_config is 7, an integer, expected an object"},
        {method, 5,
         "the checkpoint's quant_method is [\"fp8\", {\"a\": false}], expected one of compressed-tensors, "
         "modelopt, fp8, mxfp8, mxfp4"},
        {size, 4, "the checkpoint's weight_block_size is [64], expected [128, 128] or [1, 32]"},
        {kind, 3, "the quantization_config's weight_block_size is 128, an integer, expected a list"},
        {NULL, 1, "config_read: there are no values of depth 0"},
        {number, 0, "config_read: there are no values of depth 0"},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
        struct opaq_config *config = NULL;
        struct opaq_error error = {OPAQ_OK, ""};
        CHECK(opaq_config_read(all[i].values, all[i].count, &config, &error) != OPAQ_OK && config == NULL);
        CHECK_EQ_STR(error.text, all[i].says);
    }
    CHECK_EQ_INT(opaq_config_read(size, 2, NULL, NULL), OPAQ_ERROR_ARGUMENT);
    opaq_config_destroy(NULL);
}

/* The method alone decides, even where no other field is valid. */
static void layouts(void) {
    static const struct {
        const char *method, *algorithm; /* NULL: null */
        int layout;
        bool is_read; /* with no other field */
    } rows[] = {
        {"Compressed-Tensors", NULL, OPAQ_LAYOUT_COMPRESSED_TENSORS, true},
        {"modelopt", NULL, OPAQ_LAYOUT_MODELOPT, false},
        {"ModelOpt_fp4", "NVFP4", OPAQ_LAYOUT_MODELOPT, true},
        {"modelop", "NVFP4", -1, false},
        {NULL, "FP8", OPAQ_LAYOUT_MODELOPT, true}, /* hf_quant_config.json */
        {NULL, NULL, -1, false},
        {"fp8", NULL, OPAQ_LAYOUT_DEEPSEEK, true},
        {"fp8_other", NULL, -1, false},
        {"mxfp8", NULL, OPAQ_LAYOUT_DEEPSEEK, true},
        {"mxfp4", "FP8", OPAQ_LAYOUT_GPT_OSS, true},
        {"", "FP8", -1, false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        const char *const texts[] = {rows[i].method, rows[i].algorithm};
        struct opaq_config_value values[] = {OBJECT(0, NULL), NONE(1, "quant_method"), NONE(1, "quant_algo")};
        for (int k = 0; k < 2; ++k) {
            values[1 + k].kind = texts[k] == NULL ? OPAQ_JSON_NULL : OPAQ_JSON_STRING;
            values[1 + k].text = texts[k];
        }
        struct opaq_config *config = NULL;
        CHECK_EQ_INT(opaq_config_layout(values, 3), rows[i].layout);
        CHECK_EQ_INT(READ(values, &config, NULL) == OPAQ_OK, rows[i].is_read);
        if (config != NULL) {
            CHECK_EQ_INT(opaq_config_scheme(config, 0) == NULL
                             ? rows[i].layout
                             : (int)opaq_config_scheme(config, 0)->row->layout,
                         rows[i].layout);
        }
        opaq_config_destroy(config);
    }
    static const struct opaq_config_value number[] = {OBJECT(0, NULL), INT(1, "quant_method", 7),
                                                      STRING(1, "quant_algo", "FP8")};
    CHECK_EQ_INT(opaq_config_layout(number, 3), -1);
    CHECK_EQ_INT(opaq_config_layout(number + 1, 1), -1);
    CHECK_EQ_INT(opaq_config_layout(number, 0), -1);
    CHECK_EQ_INT(opaq_config_layout(NULL, 1), -1);
}

/* Lists that no JSON document produces. */
static void values_that_do_not_belong(void) {
    static const struct opaq_config_value all[][3] = {
        {OBJECT(0, NULL), OBJECT(0, NULL), OBJECT(1, "a")},       /* two roots */
        {OBJECT(0, NULL), OBJECT(2, "a"), OBJECT(1, "a")},        /* too deep */
        {OBJECT(0, NULL), INT(1, "a", 1), OBJECT(2, "b")},        /* inside a number */
        {OBJECT(0, NULL), OBJECT(1, NULL), OBJECT(2, "b")},       /* no key */
        {OBJECT(0, NULL), STRING(1, "a", NULL), OBJECT(1, "b")},  /* no text */
        {OBJECT(0, NULL), {1, 99, "a", NULL, 0}, OBJECT(1, "b")}, /* no kind */
        {OBJECT(0, NULL), OBJECT(-1, "a"), OBJECT(1, "b")},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
        struct opaq_config *config = NULL;
        CHECK_EQ_INT(opaq_config_read(all[i], 3, &config, NULL), OPAQ_ERROR_ARGUMENT);
    }
}

static void schemes_of_layouts(void) {
    struct opaq_config_scheme scheme;
    int count = 0;
    for (int layout = 0; layout < OPAQ_LAYOUT_COUNT; ++layout) {
        for (int i = 0; opaq_layout_scheme((enum opaq_layout)layout, i, &scheme); ++i) {
            CHECK_EQ_INT(opaq_spec_check(&scheme.weight, NULL), OPAQ_OK);
            CHECK(scheme.row->layout == (enum opaq_layout)layout && !scheme.has_input);
            ++count;
        }
    }
    int rows = 0;
    while (opaq_layout_row(rows) != NULL) {
        ++rows;
    }
    CHECK_EQ_INT(count, rows + 1); /* and that of transformers in DeepSeek's form */
    CHECK(!opaq_layout_scheme(OPAQ_LAYOUT_GPT_OSS, 0, NULL) &&
          !opaq_layout_scheme((enum opaq_layout)9, 0, &scheme));
    CHECK(opaq_config_row(OPAQ_FP8BLK1) == NULL && opaq_config_row(OPAQ_FP8BLK2)->input_format == OPAQ_FP8BLK1);
}

/* The names of a row's weights with inputs that are not quantized, dynamic, given. */
static void methods(void) {
    static const struct {
        enum opaq_layout layout;
        enum opaq_format format;
        const char *names[3];
    } all[] = {
        {OPAQ_LAYOUT_COMPRESSED_TENSORS, OPAQ_NVFP4, {"nvfp4-pack-quantized", NULL, "nvfp4-pack-quantized"}},
        {OPAQ_LAYOUT_COMPRESSED_TENSORS, OPAQ_MXFP4, {"mxfp4-pack-quantized", "mxfp4-pack-quantized", NULL}},
        {OPAQ_LAYOUT_COMPRESSED_TENSORS, OPAQ_FP8, {"float-quantized", "float-quantized", "float-quantized"}},
        {OPAQ_LAYOUT_COMPRESSED_TENSORS, OPAQ_FP8BLK2, {"float-quantized", "float-quantized", NULL}},
        {OPAQ_LAYOUT_MODELOPT, OPAQ_NVFP4, {"W4A16_NVFP4", NULL, "NVFP4"}},
        {OPAQ_LAYOUT_MODELOPT, OPAQ_MXFP4, {"mxfp4", "W4A8_MXFP4_FP8", "W4A8_MXFP4_FP8"}},
        {OPAQ_LAYOUT_MODELOPT, OPAQ_MXFP8, {NULL, "MXFP8", NULL}},
        {OPAQ_LAYOUT_MODELOPT, OPAQ_FP8, {NULL, "FP8", "FP8"}},
        {OPAQ_LAYOUT_MODELOPT, OPAQ_FP8ROW, {NULL, "FP8_PER_CHANNEL_PER_TOKEN", NULL}},
        {OPAQ_LAYOUT_MODELOPT, OPAQ_FP8BLK2, {"fp8_pb_wo", NULL, NULL}},
        {OPAQ_LAYOUT_DEEPSEEK, OPAQ_FP8BLK2, {NULL, "fp8", NULL}},
        {OPAQ_LAYOUT_DEEPSEEK, OPAQ_MXFP8, {NULL, "mxfp8", NULL}},
        {OPAQ_LAYOUT_GPT_OSS, OPAQ_MXFP4, {"mxfp4", NULL, NULL}},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
        const struct opaq_layout_row *const row = opaq_layout_find(all[i].layout, all[i].format);
        for (int k = 0; k < 3; ++k) {
            const char *const found = opaq_layout_method(row, (enum opaq_activations)k);
            CHECK_EQ_STR(found == NULL ? "none" : found, all[i].names[k] == NULL ? "none" : all[i].names[k]);
        }
        CHECK(opaq_layout_method(row, (enum opaq_activations)3) == NULL);
    }
    CHECK(opaq_layout_method(NULL, OPAQ_ACTIVATIONS_NONE) == NULL);
}

/* compressed-tensors describes what the format table says. */
static void descriptions(void) {
    for (int i = 0; opaq_format_row((enum opaq_format)i) != NULL; ++i) {
        const struct opaq_config_row *const row = opaq_config_row((enum opaq_format)i);
        if (row != NULL) {
            const struct opaq_format_row *const format = opaq_format_row(row->format);
            const struct opaq_format_row *const input = opaq_format_row(row->input_format);
            CHECK_EQ_INT(row->bits, opaq_element_info(format->element_default)->bits);
            CHECK_EQ_INT(row->bits, opaq_element_info(input->element_default)->bits);
            CHECK_EQ_INT(row->group, strcmp(row->strategy, "block") == 0 ? 0 : format->block_columns);
            CHECK_EQ_INT(row->input_group, input->block_columns);
        }
    }
}

static void check_shape(const char *letters, enum opaq_format format, int64_t rows, int64_t columns,
                        const char *expected) {
    struct opaq_layout_shape shape;
    char text[96] = "";
    if (!CHECK(opaq_layout_shape(letters, format, rows, columns, &shape))) {
        return;
    }
    int used = 0;
    for (int i = 0; i < OPAQ_LAYOUT_RANK_LIMIT; ++i) {
        if (i < shape.rank) {
            used += snprintf(text + used, sizeof text - (size_t)used, "%lld ", (long long)shape.size[i]);
        } else {
            CHECK_EQ_INT(shape.size[i], 0);
        }
    }
    (void)snprintf(text + used, sizeof text - (size_t)used, "rows %d columns %d", shape.rows_dim,
                   shape.columns_dim);
    CHECK_EQ_STR(text, expected);
}

static void shapes(void) {
    check_shape("", OPAQ_FP8, 3, 5, "rows -1 columns -1");
    check_shape("1", OPAQ_FP8, 3, 5, "1 rows -1 columns -1");
    check_shape("R", OPAQ_FP8ROW, 3, 5, "3 rows 0 columns -1");
    check_shape("R1", OPAQ_FP8ROW, 0, 5, "0 1 rows 0 columns -1");
    check_shape("Rc", OPAQ_NVFP4, 3, 33, "3 3 rows 0 columns 1");
    check_shape("Rc", OPAQ_MXFP8, 3, 33, "3 2 rows 0 columns 1");
    check_shape("rc", OPAQ_FP8BLK2, 129, 128, "2 1 rows 0 columns 1");
    check_shape("r1c1", OPAQ_FP8BLK2, 128, 0, "1 1 0 1 rows 0 columns 2");
    check_shape("cR", OPAQ_MXFP4, 2, INT64_MAX, "288230376151711744 2 rows 1 columns 0");
    check_shape("RC", OPAQ_NVFP4, 3, 33, "3 17 rows 0 columns 1");
    check_shape("RC", OPAQ_FP8, 3, 33, "3 33 rows 0 columns 1");
    check_shape("Rcb", OPAQ_MXFP4, 3, 64, "3 2 16 rows 0 columns 1");
    struct opaq_layout_shape shape = {.rank = 7};
    CHECK(!opaq_layout_shape(NULL, OPAQ_FP8, 1, 1, &shape) && !opaq_layout_shape("1", OPAQ_FP8, 1, 1, NULL));
    CHECK(!opaq_layout_shape("Rx", OPAQ_FP8, 1, 1, &shape) &&
          !opaq_layout_shape("RRRRR", OPAQ_FP8, 1, 1, &shape));
    CHECK(!opaq_layout_shape("R", OPAQ_FP8, -1, 1, &shape) && !opaq_layout_shape("R", OPAQ_FP8, 1, -1, &shape));
    CHECK(!opaq_layout_shape("R", (enum opaq_format)99, 1, 1, &shape) && shape.rank == 7);
}

static const struct test_case tests[] = {TEST(compressed_tensors),
                                         TEST(modelopt_of_several_algorithms),
                                         TEST(deepseek_and_gpt_oss),
                                         TEST(refusals),
                                         TEST(layouts),
                                         TEST(values_that_do_not_belong),
                                         TEST(schemes_of_layouts),
                                         TEST(methods),
                                         TEST(descriptions),
                                         TEST(shapes)};
TEST_MAIN(tests)
