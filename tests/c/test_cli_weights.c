/* test_cli_weights.c: the grouping of a checkpoint's tensors into weights, for every scheme of the table of
 * layouts and for names that only resemble one. The models here are headers without files. */
#include <stdlib.h>

#include "check.h"
#include "cli/read/config_values.h"
#include "cli/read/weights.h"

enum { MOST = 8 };

/* A tensor as a test writes it; its byte count follows from it. */
struct given {
    const char *name;
    const char *dtype;
    int rank;
    int64_t shape[4];
};

struct made {
    struct model model;
    struct st_tensor tensors[MOST];
    struct model_tensor places[MOST];
};

static int compare_names(const void *first, const void *second) {
    return strcmp(((const struct model_tensor *)first)->tensor->name,
                  ((const struct model_tensor *)second)->tensor->name);
}

static void make_model(const struct given *given, size_t count, struct made *made) {
    static char path[] = "m";
    memset(made, 0, sizeof *made);
    made->model = (struct model){.path = path, .tensors = made->places, .tensor_count = count};
    for (size_t i = 0; i < count; ++i) {
        struct st_tensor *const tensor = &made->tensors[i];
        tensor->name = given[i].name;
        tensor->dtype = (enum st_dtype)st_dtype_find(given[i].dtype);
        tensor->rank = given[i].rank;
        memcpy(tensor->shape, given[i].shape, sizeof given[i].shape);
        CHECK(st_bytes(tensor->dtype, tensor->shape, tensor->rank, &tensor->bytes));
        made->places[i] = (struct model_tensor){tensor, 0};
    }
    qsort(made->places, count, sizeof made->places[0], compare_names);
}

/* ---- every scheme ---- */

static void first_word(const char *words, char *word, size_t size) {
    const size_t length = strcspn(words, " ");
    (void)snprintf(word, size, "%.*s", (int)length, words);
}

/* The scales' shape by its letters, for 256 x 384. */
static int shape_of(const struct opaq_layout_row *scheme, int64_t *shape) {
    const struct opaq_format_row *const format = opaq_format_row(scheme->format);
    int rank = 0;
    for (const char *letter = scheme->scale_shape; *letter != '\0'; ++letter) {
        const int64_t block_rows = format->block_rows == 0 ? 256 : format->block_rows;
        const int64_t block_columns = format->block_columns == 0 ? 384 : format->block_columns;
        shape[rank++] = *letter == 'R'   ? 256
                        : *letter == 'r' ? (256 + block_rows - 1) / block_rows
                        : *letter == 'c' ? (384 + block_columns - 1) / block_columns
                                         : 1;
    }
    return rank;
}

static void every_row_is_found(void) {
    const struct opaq_layout_row *scheme = NULL;
    int count = 0;
    for (int i = 0; (scheme = opaq_layout_row(i)) != NULL; ++i, ++count) {
        const bool is_gpt_oss = scheme->layout == OPAQ_LAYOUT_GPT_OSS;
        const char *const plain = is_gpt_oss ? "x.experts.down_proj" : "x.weight";
        char names[4][80];
        char dtypes[2][16];
        (void)snprintf(names[0], sizeof names[0], "%s%s", plain, scheme->data);
        (void)snprintf(names[1], sizeof names[1], "%s%s", plain, scheme->scale);
        (void)snprintf(names[2], sizeof names[2], "%s%s", plain, scheme->global);
        (void)snprintf(names[3], sizeof names[3], "x.%s", scheme->input);
        first_word(scheme->data_dtypes, dtypes[0], sizeof dtypes[0]);
        first_word(scheme->scale_dtypes, dtypes[1], sizeof dtypes[1]);
        const bool is_packed = strcmp(dtypes[0], "U8") == 0;
        struct given given[4] = {{names[0], dtypes[0], 2, {256, is_packed ? 192 : 384}},
                                 {names[1], dtypes[1], 0, {0}}};
        if (is_gpt_oss) {
            given[0] = (struct given){names[0], dtypes[0], 3, {256, 12, 16}};
        }
        given[1].rank = shape_of(scheme, given[1].shape);
        size_t tensors = 2;
        if (*scheme->global != '\0') {
            given[tensors++] = (struct given){names[2], "F32", *scheme->global_shape == '1', {1}};
        }
        if (*scheme->input != '\0') {
            given[tensors++] = (struct given){names[3], "F32", 0, {0}};
        }
        struct made made;
        struct weights weights;
        struct opaq_error error = {OPAQ_OK, ""};
        make_model(given, tensors, &made);
        if (weights_find(&made.model, &weights, &error) != OPAQ_OK || weights.count != 1) {
            CHECK_FAIL("scheme %d: %zu weights: %s", i, weights.count, error.text);
            continue;
        }
        const struct weight *const weight = &weights.items[0];
        CHECK_EQ_STR(weight->name, plain);
        CHECK_EQ_STR(weight_kind(weight), opaq_format_row(scheme->format)->name);
        CHECK(weight->stack == 1 && weight->rows == 256 && weight->columns == 384);
        CHECK((weight->global != NULL) == (*scheme->global != '\0'));
        CHECK((weight->input != NULL) == (*scheme->input != '\0'));
        /* some rows of two layouts have the same tensors: then the first layout is assumed, or that of the
         * configuration */
        CHECK(weights.layout == (int)scheme->layout || *scheme->global == '\0');
        struct opaq_config_scheme stored = {0};
        for (int k = 0; opaq_layout_scheme(weight->scheme->layout, k, &stored); ++k) {
            CHECK(stored.row != weight->scheme || opaq_spec_equal(&stored.weight, &weight->spec));
        }
        CHECK_EQ_INT(opaq_spec_check(&weight->spec, NULL), OPAQ_OK);
        weights_free(&weights);
    }
    CHECK(count > 10);
}

/* ---- mismatches ---- */

static void expect_refusal(const struct given *given, size_t count, const char *sentence) {
    struct made made;
    struct weights weights;
    struct opaq_error error = {OPAQ_OK, ""};
    make_model(given, count, &made);
    CHECK(weights_find(&made.model, &weights, &error) != OPAQ_OK);
    CHECK_EQ_STR(error.text, sentence);
    CHECK(weights.items == NULL && weights.count == 0);
}

static void expect_kind(const struct given *given, size_t count, const char *name, const char *kind) {
    struct made made;
    struct weights weights;
    struct opaq_error error = {OPAQ_OK, ""};
    make_model(given, count, &made);
    if (weights_find(&made.model, &weights, &error) != OPAQ_OK) {
        CHECK_FAIL("%s: %s", given[0].name, error.text);
        return;
    }
    const struct weight *const weight = weights_named(&weights, name);
    CHECK_EQ_STR(weight == NULL ? "none" : weight_kind(weight), kind);
    weights_free(&weights);
}

static void scales_that_do_not_fit(void) {
    const struct given transposed[] = {{"x.weight", "F8_E4M3", 2, {4, 256}},
                                       {"x.weight_scale", "U8", 2, {8, 4}}};
    expect_refusal(
        transposed, 2,
        "m: x.weight is F8_E4M3 [4, 256] with scales U8 [8, 4], which matches no format that opaq supports");
    const struct given flat[] = {{"x.weight", "F8_E4M3", 2, {4, 256}}, {"x.weight_scale", "U8", 1, {32}}};
    expect_refusal(
        flat, 2,
        "m: x.weight is F8_E4M3 [4, 256] with scales U8 [32], which matches no format that opaq supports");
    const struct given empty[] = {{"x.weight", "F8_E4M3", 2, {0, 64}}, {"x.weight_scale", "F32", 2, {5, 1}}};
    expect_refusal(
        empty, 2,
        "m: x.weight is F8_E4M3 [0, 64] with scales F32 [5, 1], which matches no format that opaq supports");
    const struct given wide[] = {{"x.experts.down_proj_blocks", "U8", 3, {4, 2, 32}},
                                 {"x.experts.down_proj_scales", "U8", 2, {4, 2}}};
    expect_refusal(
        wide, 2,
        "m: x.experts.down_proj_blocks is U8 [4, 2, 32] with scales U8 [4, 2], which matches no format "
        "that opaq supports");
    const struct given rows[] = {{"x.experts.down_proj_blocks", "U8", 2, {4, 16}},
                                 {"x.experts.down_proj_scales", "U8", 2, {4, 1}}};
    expect_refusal(rows, 2,
                   "m: x.experts.down_proj_blocks is U8 [4, 16] with scales U8 [4, 1], which matches no format "
                   "that opaq supports");
    const struct given alone[] = {{"x.weight_packed", "U8", 2, {4, 16}},
                                  {"x.weight_scale", "F8_E4M3", 2, {4, 2}}};
    expect_refusal(
        alone, 2,
        "m: x.weight_packed is U8 [4, 16] with scales F8_E4M3 [4, 2], but without weight_global_scale");
    const struct given twice[] = {{"x.weight_packed", "U8", 2, {4, 16}},
                                  {"x.weight_scale", "U8", 2, {4, 1}},
                                  {"x.weight", "BF16", 2, {4, 32}}};
    expect_refusal(twice, 3, "m has x.weight twice: as x.weight_packed and as x.weight");
}

static void odd_shapes_that_fit(void) {
    const struct given ones[] = {{"x.weight", "F8_E4M3", 2, {4, 64}}, {"x.weight_scale", "F32", 3, {1, 4, 1}}};
    expect_kind(ones, 2, "x.weight", "fp8row");
    const struct given none[] = {{"x.weight", "F8_E4M3", 2, {4, 64}}, {"x.weight_scale", "BF16", 0, {0}}};
    expect_kind(none, 2, "x.weight", "fp8");
    const struct given stack[] = {{"x.weight", "F8_E4M3", 3, {2, 130, 64}},
                                  {"x.weight_scale_inv", "F32", 3, {2, 2, 1}}};
    expect_kind(stack, 2, "x.weight", "fp8blk2");
    const struct given nothing[] = {{"x.weight_packed", "U8", 3, {0, 4, 16}},
                                    {"x.weight_scale", "F8_E4M3", 3, {0, 4, 2}},
                                    {"x.weight_global_scale", "F32", 2, {0, 1}}};
    expect_kind(nothing, 3, "x.weight", "nvfp4");
}

static void plain_weights(void) {
    const struct given codes[] = {{"x.weight", "F8_E4M3", 2, {4, 64}}};
    expect_kind(codes, 1, "x.weight", "F8_E4M3");
    const struct given others[] = {{"x.weight", "F8_E4M3", 2, {4, 64}}, {"x.weight_scale", "F64", 2, {4, 1}}};
    expect_kind(others, 2, "x.weight_scale", "F64");
    const struct given integers[] = {{"x.weight_packed", "I32", 2, {4, 8}},
                                     {"x.weight_scale", "BF16", 2, {4, 2}}};
    expect_kind(integers, 2, "x.weight_packed", "I32");
    const struct given vector[] = {{"x.weight", "F8_E4M3", 1, {64}}, {"x.weight_scale", "F32", 1, {1}}};
    expect_kind(vector, 2, "x.weight", "F8_E4M3");
}

static void an_input_has_one_weight(void) {
    /* a scale of integers is not an input scale, and only the module's own weight gets one */
    const struct given given[] = {{"x.weight", "F8_E4M3", 2, {4, 64}},   {"x.weight_scale", "F32", 1, {1}},
                                  {"x.b_weight", "F8_E4M3", 2, {4, 64}}, {"x.b_weight_scale", "F32", 1, {1}},
                                  {"x.input_scale", "F32", 0, {0}},      {"y.weight", "F8_E4M3", 2, {4, 64}},
                                  {"y.weight_scale", "F32", 1, {1}},     {"y.input_scale", "I32", 0, {0}}};
    struct made made;
    struct weights weights;
    struct opaq_error error = {OPAQ_OK, ""};
    make_model(given, 8, &made);
    if (!CHECK_EQ_INT(weights_find(&made.model, &weights, &error), OPAQ_OK)) {
        return;
    }
    CHECK(weights_named(&weights, "x.weight")->input != NULL);
    CHECK(weights_named(&weights, "x.b_weight")->input == NULL);
    CHECK(weights_named(&weights, "y.weight")->input == NULL);
    CHECK_EQ_STR(weight_kind(weights_named(&weights, "y.input_scale")), "I32");
    CHECK_EQ_INT(weights.count, 4);
    weights_free(&weights);
}

static void configurations_choose(void) {
    static const struct {
        const char *json;
        int layout;
    } rows[] = {
        {"{\"quant_method\":\"compressed-tensors\"}", OPAQ_LAYOUT_COMPRESSED_TENSORS},
        {"{\"quant_method\":\"modelopt\"}", OPAQ_LAYOUT_MODELOPT},
        {"{\"quant_method\":\"modelopt_fp4\"}", OPAQ_LAYOUT_MODELOPT},
        {"{\"quant_algo\":\"NVFP4\"}", OPAQ_LAYOUT_MODELOPT},
        {"{\"quant_method\":\"fp8\"}", OPAQ_LAYOUT_DEEPSEEK},
        {"{\"quant_method\":\"mxfp4\"}", OPAQ_LAYOUT_GPT_OSS},
        {"{\"quant_method\":\"fp8\\u0000\"}", -1},
        {"{\"quant_method\":[\"fp8\"]}", -1},
        {"{\"quant_method\":7,\"quant_algo\":null}", -1},
        {"[]", -1},
        {"\"fp8\"", -1},
        {"null", -1},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        yyjson_doc *const document = yyjson_read(rows[i].json, strlen(rows[i].json), 0);
        CHECK_EQ_INT(layout_of_config(yyjson_doc_get_root(document)), rows[i].layout);
        yyjson_doc_free(document);
    }
    CHECK_EQ_INT(layout_of_config(NULL), -1);
}

static const struct test_case tests[] = {
    TEST(every_row_is_found), TEST(scales_that_do_not_fit),  TEST(odd_shapes_that_fit),
    TEST(plain_weights),      TEST(an_input_has_one_weight), TEST(configurations_choose),
};
TEST_MAIN(tests)
