/* test_grouped_linear.c: grouped_linear and its gradients: group by group the same bytes as linear and
 * linear_backward, for every recipe; splits of every kind; initial bytes of memory, the workspace's size,
 * threads, ranks and strides; and linear, which keeps nothing, against linear_forward. */
#include <stdlib.h>

#include "check.h"
#include "support_experts.h"
#include "support_linear.h"
#include "support_quant.h"
#include "support_spec.h"

/* ---- layers and calls ---- */

/* A stack of weights, one per group of rows. */
struct grouped_layer {
    int64_t rows, experts, n, k;
    struct tensor x, w, bias, dy;
    int64_t *splits;
};

static struct grouped_layer layer_make(const int64_t *splits, int64_t experts, int64_t n, int64_t k,
                                       enum opaq_element dtype) {
    struct grouped_layer layer = {.experts = experts, .n = n, .k = k};
    layer.splits = calloc((size_t)experts + 1, sizeof *splits);
    for (int64_t e = 0; e < experts && layer.splits != NULL; ++e) {
        layer.splits[e] = splits[e];
        layer.rows += splits[e];
    }
    const int64_t w_shape[3] = {experts, n, k};
    const int64_t x_shape[2] = {layer.rows, k};
    const int64_t y_shape[2] = {layer.rows, n};
    layer.x = experts_tensor(x_shape, 2, dtype, 1.0, 1);
    layer.w = experts_tensor(w_shape, 3, dtype, 1.0, 2);
    layer.bias = experts_tensor(w_shape, 2, dtype, 1.0, 3);
    layer.dy = experts_tensor(y_shape, 2, dtype, 1.0, 4);
    return layer;
}

static void layer_free(struct grouped_layer *layer) {
    tensor_free(&layer->x);
    tensor_free(&layer->w);
    tensor_free(&layer->bias);
    tensor_free(&layer->dy);
    free(layer->splits);
}

struct grouped_arguments {
    struct opaq_value value[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_tensor x, dy, splits, bias, random;
    struct op_tensors w;
    int64_t w_shape[3];
};

static const int64_t random_numbers[2] = {0x123456789ABCDEF, 1000};

static void arguments_make(const struct grouped_layer *layer, const char *plan, const struct tensor *w,
                           bool is_backward, struct grouped_arguments *arguments) {
    memset(arguments, 0, sizeof *arguments);
    arguments->x = op_tensors_of(&layer->x).tensor[0];
    arguments->dy = op_tensors_of(&layer->dy).tensor[0];
    arguments->bias = op_tensors_of(&layer->bias).tensor[0];
    arguments->w = op_tensors_of(w == NULL ? &layer->w : w);
    arguments->splits = (struct opaq_tensor){
        .data = layer->splits, .dtype = OPAQ_DTYPE_I64, .rank = 1, .shape = {layer->experts}, .strides = {1}};
    arguments->random = (struct opaq_tensor){.data = (void *)(uintptr_t)random_numbers,
                                             .dtype = OPAQ_DTYPE_I64,
                                             .rank = 1,
                                             .shape = {2},
                                             .strides = {1}};
    arguments->w_shape[0] = layer->experts;
    arguments->w_shape[1] = layer->n;
    arguments->w_shape[2] = layer->k;
    struct opaq_value *value = arguments->value;
    if (is_backward) {
        *value++ = op_tensor_value(&arguments->dy);
    }
    *value++ = op_tensor_value(&arguments->x);
    *value++ = op_tensor_value(&arguments->splits);
    *value++ = op_list_value(&arguments->w);
    if (!is_backward) {
        *value++ = op_tensor_value(&arguments->bias);
    }
    *value++ = op_sizes_value(arguments->w_shape, 3);
    if (is_backward) {
        *value++ = op_int_value(layer->w.view.proto.dtype);
    }
    *value++ = op_text_value(plan);
    *value = op_tensor_value(&arguments->random);
}

static const char *name_of(bool is_backward) {
    return is_backward ? "grouped_linear_backward" : "grouped_linear";
}

static struct op_result call(const struct grouped_layer *layer, const char *plan, const struct tensor *w,
                             bool is_backward, const struct opaq_parallel *parallel) {
    struct grouped_arguments arguments;
    struct op_result result;
    struct opaq_error error = {OPAQ_OK, ""};
    const struct op_settings settings = {.parallel = parallel};
    arguments_make(layer, plan, w, is_backward, &arguments);
    if (op_call(name_of(is_backward), arguments.value, &settings, &result, &error) != OPAQ_OK) {
        CHECK_FAIL("%s, \"%s\": %s", name_of(is_backward), plan, error.text);
        memset(&result, 0, sizeof result);
    } else if (parallel == NULL) {
        experts_check_again(name_of(is_backward), arguments.value, &result, plan);
    }
    return result;
}

/* ---- group by group ---- */

/* Bytes of a part of an output. */
static void check_part(const struct op_result *result, int output, int64_t offset_bytes,
                       const struct op_result *expected, int from, const char *what) {
    const struct op_tensors whole = op_result_row(result, output);
    const struct op_tensors part = op_result_row(expected, from);
    if (CHECK_EQ_INT(whole.count, 1) && CHECK_EQ_INT(part.count, 1)) {
        CHECK_BYTES((const char *)whole.tensor[0].data + offset_bytes, part.tensor[0].data,
                    op_tensor_bytes(&part.tensor[0]), "%s, output %d at %lld", what, output,
                    (long long)offset_bytes);
    }
}

static void check_groups(const struct grouped_layer *layer, const struct linear_recipe *recipe,
                         const char *rest) {
    char backward_rest[64];
    (void)snprintf(backward_rest, sizeof backward_rest, "grad=xwb%s", rest);
    const struct linear_text grouped_plan = linear_plan(recipe, backward_rest);
    (void)snprintf(backward_rest, sizeof backward_rest, "grad=xwb save=xw%s", rest);
    const struct linear_text plan =
        linear_plan(recipe, backward_rest); /* which quantizes again, as the operator does */
    struct op_result forward = call(layer, grouped_plan.text, NULL, false, NULL);
    struct op_result backward = call(layer, grouped_plan.text, NULL, true, NULL);
    const int64_t bytes = layer->x.view.proto.dtype == OPAQ_F32 ? 4 : 2;
    int64_t first = 0;
    for (int64_t e = 0; e < layer->experts; ++e) {
        const int64_t rows = layer->splits[e];
        struct linear_layer part = {.m = rows,
                                    .n = layer->n,
                                    .k = layer->k,
                                    .rank = 2,
                                    .x_shape = {rows, layer->k},
                                    .w_shape = {layer->n, layer->k},
                                    .x = experts_rows(&layer->x, first, rows),
                                    .w = experts_rows(&layer->w, e * layer->n, layer->n),
                                    .bias = experts_rows(&layer->bias, e, 1),
                                    .dy = experts_rows(&layer->dy, first, rows)};
        part.bias.view.proto.rank = 1;
        part.bias.view.proto.shape[0] = layer->n;
        part.bias.view.proto.shape[1] = 0;
        const struct linear_given given = {
            .settings = {.random = {random_numbers[0], random_numbers[1] + 64 * e}}};
        struct linear_step step = linear_step(&part, plan.text, &given);
        check_part(&forward, 0, first * layer->n * bytes, &step.forward, LINEAR_Y, grouped_plan.text);
        check_part(&backward, LINEAR_DX, first * layer->k * bytes, &step.backward, LINEAR_DX,
                   grouped_plan.text);
        check_part(&backward, LINEAR_DW, e * layer->n * layer->k * bytes, &step.backward, LINEAR_DW,
                   grouped_plan.text);
        check_part(&backward, LINEAR_DBIAS, e * layer->n * bytes, &step.backward, LINEAR_DBIAS,
                   grouped_plan.text);
        linear_step_free(&step);
        linear_layer_free(&part);
        first += rows;
    }
    op_result_free(&forward);
    op_result_free(&backward);
}

static void every_recipe(void) {
    static const int64_t splits[] = {17, 0, 1, 33, 40};
    static const enum opaq_element dtypes[] = {OPAQ_BF16, OPAQ_F16, OPAQ_F32};
    for (int i = 0; i < linear_recipe_count; ++i) {
        struct grouped_layer layer = layer_make(splits, 5, 29, 50, dtypes[i % 3]);
        check_groups(&layer, &linear_recipes[i], "");
        if (strstr(linear_recipes[i].x, "+sr") == NULL) {
            check_groups(&layer, &linear_recipes[i],
                         i % 2 ? " backward=dequantized" : " backward=high_precision");
        }
        layer_free(&layer);
    }
}

static void splits_of_every_kind(void) {
    static const int64_t splits[][4] = {{0, 0, 0, 0}, {70, 0, 0, 0},     {0, 0, 0, 1},
                                        {1, 1, 1, 1}, {33, 32, 31, 128}, {0, 5, 0, 300}};
    for (int s = 0; s < 6; ++s) {
        for (int i = 0; i < 3; ++i) {
            static const int which[] = {0, 13, 9};
            struct grouped_layer layer = layer_make(splits[s], 4, 16, 33, OPAQ_BF16);
            check_groups(&layer, &linear_recipes[which[i]], "");
            layer_free(&layer);
        }
    }
    int64_t many[300]; /* more groups than a block of a GPU's threads */
    for (int e = 0; e < 300; ++e) {
        many[e] = e % 7 == 3 ? e % 5 : 0;
    }
    struct grouped_layer layer = layer_make(many, 300, 4, 8, OPAQ_BF16);
    check_groups(&layer, &linear_recipes[0], "");
    layer_free(&layer);
}

static void sizes_at_the_edges(void) {
    static const int64_t splits[] = {3, 0, 2};
    static const int64_t sizes[][3] = {{3, 0, 8}, {3, 8, 0}, {0, 4, 4}, {1, 1, 1}, {3, 0, 0}};
    for (int i = 0; i < 5; ++i) {
        struct grouped_layer layer = layer_make(splits, sizes[i][0], sizes[i][1], sizes[i][2], OPAQ_BF16);
        check_groups(&layer, &linear_recipes[0], "");
        check_groups(&layer, &linear_recipes[13], "");
        layer_free(&layer);
    }
}

/* A group's sum over its rows may need more scratch memory than a sum over all rows: panels are cut to whole
 * tiles. */
static void a_group_may_need_more_than_all(void) {
    static const int64_t splits[] = {4096, 1};
    struct grouped_layer layer = layer_make(splits, 2, 33, 512, OPAQ_BF16);
    struct op_result result = call(&layer, "grad=w", NULL, true, NULL);
    op_result_free(&result);
    layer_free(&layer);
}

/* ---- quantized weights ---- */

static void given_weights_are_their_floats(void) {
    static const char *const formats[] = {
        "nvfp4",   "nvfp4+rowscaled+both", "mxfp8", "mxfp4", "fp8", "fp8row", "fp8blk1",
        "fp8blk2", "nvfp4+swizzle"};
    static const int64_t splits[] = {7, 40, 0};
    for (int i = 0; i < 9; ++i) {
        const struct opaq_spec spec = spec_of(formats[i]);
        char plan[96];
        struct grouped_layer layer = layer_make(splits, 3, 128, 40, OPAQ_BF16);
        struct tensor w = quantized(&layer.w, &spec, NULL);
        struct tensor floats = dequantized(&w, OPAQ_ROWWISE);
        (void)snprintf(plan, sizeof plan, "w_given=%s x=mxfp8 dy=fp8 grad=xb", formats[i]);
        for (int is_backward = 0; is_backward < 2; ++is_backward) {
            struct op_result result = call(&layer, plan, &w, is_backward, NULL);
            struct op_result expected = call(&layer, "x=mxfp8 dy=fp8 grad=xb", &floats, is_backward, NULL);
            experts_check_same(&result, &expected, plan);
            op_result_free(&result);
            op_result_free(&expected);
        }
        tensor_free(&floats);
        tensor_free(&w);
        layer_free(&layer);
    }
}

/* ---- splits, ranks, strides, biases ---- */

static void splits_may_have_strides(void) {
    static const int64_t splits[] = {5, 0, 9};
    static const int32_t narrow[] = {5, 77, 0, 77, 9};
    static const int64_t wide[] = {5, -1, -1, 0, -1, -1, 9};
    struct grouped_layer layer = layer_make(splits, 3, 12, 24, OPAQ_BF16);
    struct op_result expected = call(&layer, "x=nvfp4 w=fp8", NULL, false, NULL);
    for (int i = 0; i < 2; ++i) {
        struct grouped_arguments arguments;
        struct op_result result;
        struct opaq_error error = {OPAQ_OK, ""};
        arguments_make(&layer, "x=nvfp4 w=fp8", NULL, false, &arguments);
        arguments.splits.data = i ? (void *)(uintptr_t)wide : (void *)(uintptr_t)narrow;
        arguments.splits.dtype = i ? OPAQ_DTYPE_I64 : OPAQ_DTYPE_I32;
        arguments.splits.strides[0] = i ? 3 : 2;
        CHECK_EQ_INT(op_call("grouped_linear", arguments.value, NULL, &result, &error), OPAQ_OK);
        CHECK_EQ_STR(error.text, "");
        experts_check_same(&result, &expected, "splits");
        op_result_free(&result);
    }
    op_result_free(&expected);
    layer_free(&layer);
}

/* x and dy of rank 3, with padded rows, without a bias. */
static void ranks_and_strides(void) {
    enum { OUTER = 2, ROWS = 7, N = 12, K = 24 };
    static const int64_t splits[] = {5, 0, 9};
    static const char *const plan = "x=nvfp4 w=fp8 dy=mxfp8 grad=xw";
    static uint16_t x[OUTER * ROWS][K + 3];
    static uint16_t dy[OUTER * ROWS][N + 1];
    struct grouped_layer layer = layer_make(splits, 3, N, K, OPAQ_BF16);
    memset(x, 0xFF, sizeof x);
    memset(dy, 0xFF, sizeof dy);
    for (size_t r = 0; r < OUTER * ROWS; ++r) {
        memcpy(x[r], (uint16_t *)layer.x.view.buffer[0].data + r * K, K * 2);
        memcpy(dy[r], (uint16_t *)layer.dy.view.buffer[0].data + r * N, N * 2);
    }
    for (int is_backward = 0; is_backward < 2; ++is_backward) {
        struct grouped_arguments arguments;
        struct op_result expected;
        struct op_result result;
        struct opaq_error error = {OPAQ_OK, ""};
        arguments_make(&layer, plan, NULL, is_backward, &arguments);
        if (!is_backward) {
            arguments.value[3].tensors = NULL;
        }
        CHECK_EQ_INT(op_call(name_of(is_backward), arguments.value, NULL, &expected, &error), OPAQ_OK);
        arguments.x = (struct opaq_tensor){.data = x,
                                           .dtype = OPAQ_DTYPE_BF16,
                                           .rank = 3,
                                           .shape = {OUTER, ROWS, K},
                                           .strides = {ROWS * (K + 3), K + 3, 1}};
        arguments.dy = (struct opaq_tensor){.data = dy,
                                            .dtype = OPAQ_DTYPE_BF16,
                                            .rank = 3,
                                            .shape = {OUTER, ROWS, N},
                                            .strides = {ROWS * (N + 1), N + 1, 1}};
        CHECK_EQ_INT(op_call(name_of(is_backward), arguments.value, NULL, &result, &error), OPAQ_OK);
        CHECK_EQ_STR(error.text, "");
        CHECK_EQ_INT(result.outputs.tensor[0].rank, 3);
        experts_check_same(&result, &expected, name_of(is_backward));
        op_result_free(&expected);
        op_result_free(&result);
    }
    layer_free(&layer);
}

static void thread_count_does_not_matter(void) {
    static const int64_t splits[] = {300, 20, 400};
    static const int threads[] = {1, 2, 4};
    static const int which[] = {0, 4, 14};
    struct grouped_layer layer = layer_make(splits, 3, 90, 130, OPAQ_BF16);
    for (int t = 0; t < 3; ++t) {
        struct opaq_pool *pool = NULL;
        CHECK_EQ_INT(opaq_pool_create(threads[t], &pool, NULL), OPAQ_OK);
        const struct opaq_parallel parallel = opaq_pool_parallel(pool);
        for (int i = 0; i < 6; ++i) {
            const struct linear_text plan = linear_plan(&linear_recipes[which[i / 2]], "grad=xwb");
            struct op_result expected = call(&layer, plan.text, NULL, i % 2, NULL);
            struct op_result result = call(&layer, plan.text, NULL, i % 2, &parallel);
            experts_check_same(&result, &expected, plan.text);
            op_result_free(&expected);
            op_result_free(&result);
        }
        opaq_pool_destroy(pool);
    }
    layer_free(&layer);
}

/* ---- linear ---- */

/* The same bytes as linear_forward's y; a given scale replaces that of the data. */
static struct op_result call_linear(const struct linear_layer *layer, const char *plan, const struct tensor *w,
                                    const float *scale) {
    const struct op_tensors x = op_tensors_of(&layer->x);
    const struct op_tensors list = op_tensors_of(w == NULL ? &layer->w : w);
    const struct op_tensors bias = op_tensors_of(&layer->bias);
    const struct opaq_tensor floats = {
        .data = (void *)(uintptr_t)scale, .dtype = OPAQ_DTYPE_F32, .rank = 1, .shape = {1}, .strides = {1}};
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {
        op_tensor_value(x.tensor),    op_list_value(&list),
        op_tensor_value(bias.tensor), op_sizes_value(layer->w_shape, 2),
        op_text_value(plan),          op_tensor_value(scale == NULL ? NULL : &floats)};
    struct op_result result;
    struct opaq_error error = {OPAQ_OK, ""};
    if (op_call("linear", values, NULL, &result, &error) != OPAQ_OK) {
        CHECK_FAIL("linear, \"%s\": %s", plan, error.text);
        memset(&result, 0, sizeof result);
    } else {
        experts_check_again("linear", values, &result, plan);
    }
    return result;
}

static void linear_is_linear_forward(void) {
    static const enum opaq_element dtypes[] = {OPAQ_BF16, OPAQ_F16, OPAQ_F32};
    for (int i = 0; i < linear_recipe_count; ++i) {
        const struct linear_recipe recipe = {linear_recipes[i].x, linear_recipes[i].w, ""};
        const struct linear_text plan = linear_plan(&recipe, "");
        if (strstr(plan.text, "+sr") == NULL) {
            struct linear_layer layer = linear_layer_make(37, 29, 70, dtypes[i % 3]);
            struct op_result expected = linear_forward(&layer, plan.text, NULL);
            struct op_result result = call_linear(&layer, plan.text, NULL, NULL);
            linear_check_same(&result, &expected, 0, plan.text);
            op_result_free(&expected);
            op_result_free(&result);
            if (recipe.w[0] != '\0') {
                char given[128];
                const struct opaq_spec spec = spec_of(recipe.w);
                struct tensor w = quantized(&layer.w, &spec, NULL);
                struct tensor floats = dequantized(&w, OPAQ_ROWWISE);
                (void)snprintf(given, sizeof given, "w_given=%s%s%s", recipe.w, recipe.x[0] ? " x=" : "",
                               recipe.x);
                const struct linear_recipe without = {recipe.x, "", ""};
                result = call_linear(&layer, given, &w, NULL);
                expected = call_linear(&layer, linear_plan(&without, "").text, &floats, NULL);
                linear_check_same(&result, &expected, 0, given);
                op_result_free(&expected);
                op_result_free(&result);
                tensor_free(&floats);
                tensor_free(&w);
            }
            linear_layer_free(&layer);
        }
    }
}

static void linear_takes_scales(void) {
    static const char *const texts[] = {
        "fp8+delayed", "fp8.e5m2+delayed",    "nvfp4",
        "fp8",         "nvfp4+rule=modelopt", "nvfp4+global+rule=compressed-tensors"};
    const float scale = 5.5f;
    for (int i = 0; i < 6; ++i) {
        const struct opaq_spec spec = spec_of(texts[i]);
        const bool is_delayed = (spec.options & OPAQ_DELAYED) != 0;
        const struct opaq_quantize_args args = {.scale = is_delayed ? &scale : NULL,
                                                .amax_rowwise = is_delayed ? NULL : &scale};
        char plan[64];
        struct linear_layer layer = linear_layer_make(37, 29, 70, OPAQ_F32);
        struct tensor x = quantized(&layer.x, &spec, &args);
        struct tensor floats = dequantized(&x, OPAQ_ROWWISE);
        (void)snprintf(plan, sizeof plan, "x=%s", texts[i]);
        struct op_result result = call_linear(&layer, plan, NULL, &scale);
        tensor_free(&layer.x);
        layer.x = floats;
        struct op_result expected = call_linear(&layer, "", NULL, NULL);
        linear_check_same(&result, &expected, 0, plan);
        op_result_free(&expected);
        op_result_free(&result);
        tensor_free(&x);
        linear_layer_free(&layer);
    }
}

static const struct test_case tests[] = {TEST(every_recipe),
                                         TEST(splits_of_every_kind),
                                         TEST(sizes_at_the_edges),
                                         TEST(a_group_may_need_more_than_all),
                                         TEST(given_weights_are_their_floats),
                                         TEST(splits_may_have_strides),
                                         TEST(ranks_and_strides),
                                         TEST(thread_count_does_not_matter),
                                         TEST(linear_is_linear_forward),
                                         TEST(linear_takes_scales)};
TEST_MAIN(tests)
