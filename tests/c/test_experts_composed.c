/* test_experts_composed.c: the quantized gradients of mlp and moe: the same bytes as quantizing and multiplying
 * expert by expert with linear_backward; and quantized weights give the same results as their dequantized
 * floats. */
#include <stdlib.h>

#include "check.h"
#include "support_experts_reference.h"
#include "support_quant.h"
#include "support_spec.h"

static const enum opaq_element dtypes[] = {OPAQ_BF16, OPAQ_F16, OPAQ_F32};

/* ---- with quantizers: the same bytes as linear_backward, expert by expert ---- */

static const int64_t random_numbers[2] = {0x123456789ABCDEF, 7000};

/* The gradients of one product: dy and x plain, w plain or quantized. */
struct product_gradients {
    struct tensor dx, dw, dbias; /* dx float32 */
};

static struct tensor result_tensor(const struct op_result *result, int output, int64_t rows, int64_t columns) {
    const struct op_tensors row = op_result_row(result, output);
    struct tensor made =
        tensor_make(rows, columns, row.count == 1 ? (enum opaq_element)row.tensor[0].dtype : OPAQ_F32, NULL);
    if (CHECK_EQ_INT(row.count, 1) && CHECK_EQ_INT(op_tensor_bytes(&row.tensor[0]), tensor_bytes(&made, 0))) {
        memcpy(made.view.buffer[0].data, row.tensor[0].data, tensor_bytes(&made, 0));
    }
    return made;
}

/* x is converted to float32, so that dx is float32: the same numbers, quantized to the same bytes. */
static struct product_gradients linear_gradients(const struct tensor *dy, const struct tensor *x,
                                                 const struct tensor *w, const char *plan, int64_t stream) {
    struct tensor wide_x = experts_converted(x, OPAQ_F32);
    struct tensor wide_dy = experts_converted(dy, (enum opaq_element)dy->view.proto.dtype);
    const struct op_tensors tensors[3] = {op_tensors_of(&wide_dy), op_tensors_of(&wide_x), op_tensors_of(w)};
    const int64_t n = opaq_proto_columns(&dy->view.proto);
    const int64_t m = opaq_proto_rows(&x->view.proto);
    const int64_t k = opaq_proto_columns(&x->view.proto);
    const int64_t x_shape[2] = {m, k};
    const int64_t w_shape[2] = {n, k};
    int64_t numbers[2] = {random_numbers[0], random_numbers[1] + stream};
    const struct opaq_tensor random = {
        .data = numbers, .dtype = OPAQ_DTYPE_I64, .rank = 1, .shape = {2}, .strides = {1}};
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {
        op_list_value(&tensors[0]),        op_list_value(&tensors[1]), op_list_value(&tensors[2]),
        op_sizes_value(x_shape, 2),        op_sizes_value(w_shape, 2), op_int_value(OPAQ_DTYPE_F32),
        op_int_value(w->view.proto.dtype), op_text_value(plan),        op_tensor_value(&random)};
    struct op_result result;
    struct opaq_error error = {OPAQ_OK, ""};
    if (op_call("linear_backward", values, NULL, &result, &error) != OPAQ_OK) {
        CHECK_FAIL("\"%s\": %s", plan, error.text);
        memset(&result, 0, sizeof result);
    }
    const struct product_gradients made = {result_tensor(&result, 0, m, k), result_tensor(&result, 1, n, k),
                                           result_tensor(&result, 2, 1, n)};
    op_result_free(&result);
    tensor_free(&wide_x);
    tensor_free(&wide_dy);
    return made;
}

static void gradients_free(struct product_gradients *gradients) {
    tensor_free(&gradients->dx);
    tensor_free(&gradients->dw);
    tensor_free(&gradients->dbias);
}

/* Quantizers of a case; "" for none. */
struct backward_recipe {
    const char *x, *h, *w, *dy, *rest;
};

/* "x=.. w=.. dy=.. save=xw grad=xwb backward=.." for one of the two products. */
static struct experts_words linear_words(const struct backward_recipe *recipe, const char *x, bool given_w) {
    struct experts_words words;
    const struct {
        const char *name, *text;
    } parts[] = {{"x=", x}, {given_w ? "w_given=" : "w=", recipe->w}, {"dy=", recipe->dy}, {"", recipe->rest}};
    (void)snprintf(words.text, sizeof words.text, "grad=xwb save=xw");
    for (int i = 0; i < 4; ++i) {
        const size_t length = strlen(words.text);
        if (parts[i].text[0] != '\0') {
            (void)snprintf(words.text + length, sizeof words.text - length, " %s%s", parts[i].name,
                           parts[i].text);
        }
    }
    return words;
}

static struct experts_words experts_recipe(const struct backward_recipe *recipe, const char *act,
                                           const char *grad) {
    struct experts_words words;
    const struct {
        const char *name, *text;
    } parts[] = {
        {"x=", recipe->x}, {"h=", recipe->h}, {"w=", recipe->w}, {"dy=", recipe->dy}, {"", recipe->rest}};
    (void)snprintf(words.text, sizeof words.text, "%s grad=%s", act, grad);
    for (int i = 0; i < 5; ++i) {
        const size_t length = strlen(words.text);
        if (parts[i].text[0] != '\0') {
            (void)snprintf(words.text + length, sizeof words.text - length, " %s%s", parts[i].name,
                           parts[i].text);
        }
    }
    return words;
}

/* Compares matrix (or row) e of an output with a tensor. */
static void check_part(const struct op_result *result, int output, int64_t e, const struct tensor *expected,
                       const char *what) {
    const struct op_tensors row = op_result_row(result, output);
    const size_t bytes = tensor_bytes(expected, 0);
    if (CHECK_EQ_INT(row.count, 1) && CHECK((size_t)(e + 1) * bytes <= op_tensor_bytes(&row.tensor[0]))) {
        CHECK_BYTES((const char *)row.tensor[0].data + (size_t)e * bytes, expected->view.buffer[0].data, bytes,
                    "%s: output %d of expert %d", what, output, (int)e);
    }
}

/* One expert's rows, with the random numbers of expert 0. */
static void compose_group(const struct experts_layer *layer, const struct backward_recipe *recipe,
                          const char *plan, const struct tensor *h_slots, const struct op_result *result,
                          const struct reference_group *group, struct tensor *dx_rows) {
    const struct opaq_experts_plan parsed = experts_plan_of(plan);
    const int64_t e = group->index;
    const bool on_output = layer->is_routed && !parsed.weights_on_input;
    const bool on_input = layer->is_routed && parsed.weights_on_input;
    const int64_t stream = e * EXPERTS_STREAM_STEP;
    struct tensor x =
        reference_gather(layer, group, &layer->x, on_input ? REFERENCE_WEIGHTED_TOKENS : REFERENCE_TOKENS);
    struct tensor dy = reference_gather(layer, group, &layer->dy, REFERENCE_TOKENS);
    struct tensor dy_weighted =
        reference_gather(layer, group, &layer->dy, on_output ? REFERENCE_WEIGHTED_TOKENS : REFERENCE_TOKENS);
    struct tensor h = reference_gather(layer, group, h_slots, REFERENCE_SLOTS);
    struct tensor gate_up = experts_rows(&layer->gate_up, e * layer->width, layer->width);
    struct tensor down = experts_rows(&layer->down, e * layer->size.hidden, layer->size.hidden);
    struct tensor a = experts_activated(&h, plan);
    const struct experts_words first = linear_words(recipe, recipe->x, false);
    const struct experts_words second = linear_words(recipe, recipe->h, false);
    /* linear's streams are x 0, w 1, dy 2; those of the second product are larger by 2 */
    struct product_gradients plain = linear_gradients(&dy, &a, &down, second.text, stream + 2);
    struct product_gradients weighted = linear_gradients(&dy_weighted, &a, &down, second.text, stream + 2);
    for (int64_t i = 0; on_output && i < group->count; ++i) {
        const float weight = tensor_get(&layer->weights, group->slot[i] / layer->size.choices,
                                        group->slot[i] % layer->size.choices);
        for (int64_t c = 0; c < layer->size.inner; ++c) {
            tensor_set(&plain.dx, i, c, weight * tensor_get(&plain.dx, i, c));
        }
    }
    struct tensor dh = experts_activation_gradient(&h, &plain.dx, plan);
    const bool shifts = strstr(recipe->dy, "sr") != NULL && recipe->rest[0] == '\0'; /* dh's stream is 5 */
    struct product_gradients inner = linear_gradients(&dh, &x, &gate_up, first.text, stream + (shifts ? 3 : 0));
    check_part(result, experts_output_of(layer, EXPERTS_DGATE_UP), e, &inner.dw, plan);
    check_part(result, experts_output_of(layer, EXPERTS_DGATE_UP_BIAS), e, &inner.dbias, plan);
    check_part(result, experts_output_of(layer, EXPERTS_DDOWN), e, &weighted.dw, plan);
    check_part(result, experts_output_of(layer, EXPERTS_DDOWN_BIAS), e, &weighted.dbias, plan);
    for (int64_t i = 0; i < group->count; ++i) { /* one choice per token: the sum has one term */
        const int64_t token = layer->is_routed ? group->slot[i] / layer->size.choices : group->slot[i];
        const float weight = on_input ? tensor_get(&layer->weights, token, 0) : 1.0f;
        for (int64_t c = 0; c < layer->size.hidden; ++c) {
            tensor_set(dx_rows, token, c, 0.0f + weight * tensor_get(&inner.dx, i, c));
        }
    }
    gradients_free(&plain);
    gradients_free(&weighted);
    gradients_free(&inner);
    struct tensor *const all[] = {&x, &dy, &dy_weighted, &h, &gate_up, &down, &a, &dh};
    for (int i = 0; i < 8; ++i) {
        tensor_free(all[i]);
    }
}

static void check_composition(const struct experts_sizes *size, const struct backward_recipe *recipe,
                              const char *act, enum opaq_element dtype) {
    const struct experts_words plan = experts_recipe(recipe, act, size->choices < 0 ? "xgdbc" : "xrgdbc");
    const struct opaq_experts_plan parsed = experts_plan_of(plan.text);
    const struct experts_given given = {.random = random_numbers};
    struct experts_layer layer = experts_layer_make(size, plan.text, dtype);
    struct tensor h = experts_forward_h(&layer, plan.text, &given);
    struct op_result result = experts_backward(&layer, plan.text, &given, &h);
    struct tensor dx = tensor_make_proto(&layer.x.view.proto);
    memset(dx.view.buffer[0].data, 0, tensor_bytes(&dx, 0));
    for (int64_t e = 0; e < size->experts && result.outputs.count > 0; ++e) {
        struct reference_group group = reference_group_of(&layer, &parsed, e);
        if (group.count > 0) {
            compose_group(&layer, recipe, plan.text, &h, &result, &group, &dx);
        }
        reference_group_free(&group);
    }
    check_part(&result, EXPERTS_DX, 0, &dx, plan.text);
    tensor_free(&dx);
    op_result_free(&result);
    tensor_free(&h);
    experts_layer_free(&layer);
}

static const struct backward_recipe recipes[] = {
    {"", "", "", "", ""},
    {"fp8", "fp8", "fp8", "fp8.e5m2", ""},
    {"fp8blk1+pow2", "fp8blk1+pow2", "fp8blk2+pow2", "fp8blk1+pow2", ""},
    {"mxfp8", "mxfp8", "mxfp8", "mxfp8", ""},
    {"nvfp4+rht", "nvfp4+rht", "nvfp4+2d", "nvfp4+rht", ""},
    {"nvfp4+rht", "nvfp4+rht", "nvfp4+2d", "nvfp4+rht+sr", ""},
    {"nvfp4+sr", "mxfp4+sr", "fp8+sr", "", ""},
    {"nvfp4+rowscaled", "fp8row", "mxfp4", "fp8row.e5m2", ""},
    {"nvfp4", "", "", "", ""},
    {"", "mxfp8+swizzle", "", "", ""},
    {"", "", "nvfp4+swizzle", "", ""},
    {"", "", "", "nvfp4+sr", ""},
    {"nvfp4", "fp8", "mxfp8", "nvfp4", "backward=high_precision"},
    {"nvfp4", "fp8", "mxfp8", "nvfp4", "backward=dequantized"},
    {"nvfp4+sr", "fp8+sr", "mxfp8+sr", "nvfp4+sr", "backward=dequantized"},
};

static void quantized_as_by_linear_backward(void) {
    static const struct experts_sizes mlp = {37, -1, 1, 48, 24};
    static const struct experts_sizes moe = {60, 1, 3, 40, 24};
    for (size_t i = 0; i < sizeof recipes / sizeof recipes[0]; ++i) {
        check_composition(&mlp, &recipes[i], experts_activations[i % OPAQ_ACTIVATION_COUNT], dtypes[i % 3]);
        check_composition(&moe, &recipes[i], experts_activations[(i + 5) % OPAQ_ACTIVATION_COUNT],
                          dtypes[(i + 1) % 3]);
        if (strstr(recipes[i].rest, "backward") == NULL) {
            struct backward_recipe on_input = recipes[i];
            on_input.rest = "";
            char act[96];
            (void)snprintf(act, sizeof act, "%s weights=input",
                           experts_activations[(i + 2) % OPAQ_ACTIVATION_COUNT]);
            check_composition(&moe, &on_input, act, dtypes[i % 3]);
        }
    }
}

/* Quantized weights give the dx and router gradient of their dequantized floats. */
static void given_weights_are_their_floats(void) {
    static const char *const formats[] = {"nvfp4",         "nvfp4+rowscaled", "mxfp8",   "mxfp4",
                                          "fp8",           "fp8row",          "fp8blk1", "fp8blk2",
                                          "mxfp8+swizzle", "nvfp4+both"};
    static const struct experts_sizes sizes[] = {{9, -1, 1, 128, 64}, {9, 2, 3, 128, 64}};
    for (int f = 0; f < 10; ++f) {
        for (int s = 0; s < 2; ++s) {
            const bool is_moe = s == 1;
            const struct opaq_spec spec = spec_of(formats[f]);
            char plan[160];
            char plain[96];
            (void)snprintf(plan, sizeof plan, "x=mxfp8 dy=fp8 grad=x%sbc gate_up_given=%s down_given=%s",
                           is_moe ? "r" : "", formats[f], formats[f]);
            (void)snprintf(plain, sizeof plain, "x=mxfp8 dy=fp8 grad=x%sbc", is_moe ? "r" : "");
            struct experts_layer layer = experts_layer_make(&sizes[s], plain, OPAQ_BF16);
            struct tensor q[2] = {quantized(&layer.gate_up, &spec, NULL), quantized(&layer.down, &spec, NULL)};
            struct tensor floats[2] = {dequantized(&q[0], OPAQ_ROWWISE), dequantized(&q[1], OPAQ_ROWWISE)};
            const struct experts_given given = {.gate_up = &q[0], .down = &q[1], .w_dtype = OPAQ_DTYPE_F32};
            const struct experts_given wide = {
                .gate_up = &floats[0], .down = &floats[1], .w_dtype = OPAQ_DTYPE_F32};
            struct tensor h = experts_forward_h(&layer, plan, &given);
            struct op_result result = experts_backward(&layer, plan, &given, &h);
            struct op_result expected = experts_backward(&layer, plain, &wide, &h);
            experts_check_same(&result, &expected, plan);
            op_result_free(&result);
            op_result_free(&expected);
            for (int i = 0; i < 2; ++i) {
                tensor_free(&q[i]);
                tensor_free(&floats[i]);
            }
            tensor_free(&h);
            experts_layer_free(&layer);
        }
    }
}

static const struct test_case tests[] = {TEST(quantized_as_by_linear_backward),
                                         TEST(given_weights_are_their_floats)};
TEST_MAIN(tests)
