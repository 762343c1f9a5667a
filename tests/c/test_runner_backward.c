/* test_runner_backward.c: the gradients of a runner made from weights are, byte for byte, those of the backward operators
 * with the same weights; other runners have none; errors. */
#include <stdlib.h>

#include "check.h"
#include "support_runner.h"
#include "support_runner_layer.h"

static const enum opaq_runner_kind kinds[] = {OPAQ_RUNNER_LINEAR, OPAQ_RUNNER_MLP, OPAQ_RUNNER_MOE};
static const char *const rows[] = {"linear_gemm_backward", "mlp_gemm_backward", "moe_gemm_backward"};

static const char *const formats[] = {"",
                                      "fp8",
                                      "fp8row",
                                      "fp8blk1",
                                      "fp8blk2",
                                      "mxfp8",
                                      "mxfp8.e5m2+swizzle",
                                      "mxfp4",
                                      "nvfp4",
                                      "nvfp4+rowscaled",
                                      "nvfp4+rht",
                                      "nvfp4+2d",
                                      RUNNER_TILED_FORMATS};
enum { FORMAT_COUNT = sizeof formats / sizeof formats[0] };

/* Plans besides the weights, and the same without the quantization of activations, which gradients pass unchanged. */
static const struct {
    const char *forward, *backward;
} plans[3][3] = {{{"", "grad=x"}, {"x=mxfp8", "grad=x"}, {"x=nvfp4 precision=fast order=any", "grad=x"}},
                 {{"act=silu", "act=silu grad=x"},
                  {"act=silu_clamp limit=7 x=mxfp8 h=nvfp4", "act=silu_clamp limit=7 grad=x"},
                  {"act=gelu_tanh precision=fast x=fp8 h=fp8", "act=gelu_tanh precision=fast grad=x"}},
                 {{"act=silu", "act=silu grad=xr"},
                  {"act=silu weights=input x=mxfp8 h=mxfp8", "act=silu weights=input grad=xr"},
                  {"act=gelu_tanh experts=9 first=1 x=nvfp4", "act=gelu_tanh experts=9 first=1 grad=xr"}}};
enum { PLAN_COUNT = 3 };

/* dy of a runner: [RUNNER_ROWS, its out features]. */
static struct tensor make_dy(enum opaq_runner_kind kind, enum opaq_element dtype, struct opaq_tensor *tensor) {
    struct tensor dy = tensor_make(RUNNER_ROWS, kind == OPAQ_RUNNER_LINEAR ? RUNNER_N : RUNNER_H, dtype, NULL);
    tensor_fill(&dy, FILL_NORMAL, 3);
    *tensor = op_tensors_of(&dy).tensor[0];
    return dy;
}

/* The arguments of the operator of rows[kind], and their number. */
static int set_arguments(enum opaq_runner_kind kind, int64_t handle, const struct opaq_tensor *dy,
                         const struct runner_inputs *inputs, struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT]) {
    static const int activations[] = {0, 1, 3};
    int at = 0;
    memset(values, 0, OPAQ_OP_ARGUMENT_LIMIT * sizeof *values);
    values[at++] = op_tensor_value(dy);
    for (int i = 0; i < activations[kind]; ++i) {
        values[at++] = op_tensor_value(&inputs->tensors[i]);
    }
    values[at++].integer = handle;
    values[at++].integer = RUNNER_H;
    return at;
}

/* Words of a plan with those about the weights, which end the layer's plan. */
static const char *plan_with_weights(const struct runner_layer *layer, const char *forward, const char *words,
                                     char *text, size_t capacity) {
    (void)snprintf(text, capacity, "%s%s%s", words, layer->plan[strlen(forward)] == ' ' ? "" : " ",
                   layer->plan + strlen(forward));
    const size_t length = strlen(text);
    if (text[length - 1] == ' ') {
        text[length - 1] = '\0';
    }
    return text;
}

/* The gradients by the operators with weights: 0 on success. */
static int call_operators(const struct runner_layer *layer, const char *forward, const char *backward,
                          const struct opaq_tensor *dy, const struct runner_inputs *inputs,
                          struct op_result *result) {
    const enum opaq_runner_kind kind = layer->kind;
    const struct opaq_tensor *x = &inputs->tensors[0];
    struct opaq_value own[OPAQ_OP_ARGUMENT_LIMIT];
    struct op_result kept;
    struct op_tensors list = {.tensor = {*dy}, .count = 1};
    struct opaq_error error = {OPAQ_OK, ""};
    char text[1024];
    const struct opaq_value plan =
        op_text_value(plan_with_weights(layer, forward, backward, text, sizeof text));
    const struct opaq_value w_dtype = op_int_value(OPAQ_DTYPE_BF16);
    runner_values(layer, inputs, own);
    if (kind == OPAQ_RUNNER_LINEAR) {
        const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {
            op_list_value(&list),    {.tensors = NULL}, own[1], op_sizes_value(x->shape, 2), own[3],
            op_int_value(dy->dtype), w_dtype,           plan};
        if (op_call("linear_backward", values, NULL, result, &error) != OPAQ_OK) {
            CHECK_FAIL("%s: %s", text, error.text);
            return 1;
        }
        return 0;
    }
    const int is_moe = kind == OPAQ_RUNNER_MOE;
    if (op_call(is_moe ? "moe_forward" : "mlp_forward", own, NULL, &kept, &error) != OPAQ_OK) {
        CHECK_FAIL("%s: %s", layer->plan, error.text);
        return 1;
    }
    const struct opaq_value h = op_tensor_value(&kept.outputs.tensor[1]);
    const struct opaq_value dy_value = op_tensor_value(dy);
    const struct opaq_value mlp[OPAQ_OP_ARGUMENT_LIMIT] = {dy_value, own[0], h,       own[1], own[2],
                                                           own[5],   own[6], w_dtype, plan};
    const struct opaq_value moe[OPAQ_OP_ARGUMENT_LIMIT] = {dy_value, own[0], own[1], own[2], h,       own[3],
                                                           own[4],   own[6], own[7], own[8], w_dtype, plan};
    const enum opaq_status status =
        op_call(is_moe ? "moe_backward" : "mlp_backward", is_moe ? moe : mlp, NULL, result, &error);
    if (status != OPAQ_OK) {
        CHECK_FAIL("%s: %s", text, error.text);
    }
    op_result_free(&kept);
    return status != OPAQ_OK;
}

/* The runner is made from weights of `format`, the operators read the same weights in `rowwise`. */
static void check_gradients(enum opaq_runner_kind kind, const char *format, const char *rowwise, int p,
                            enum opaq_element dtype) {
    const char *forward = plans[kind][p].forward;
    struct runner_layer layer = runner_layer_make(kind, dtype, format, forward);
    struct runner_layer operators_layer = runner_layer_make(kind, dtype, rowwise, forward);
    struct runner_inputs *inputs = runner_inputs_make(dtype);
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_tensor dy_tensor;
    struct tensor dy = make_dy(kind, dtype, &dy_tensor);
    struct op_result expected;
    struct op_result got;
    struct opaq_error error = {OPAQ_OK, ""};
    int64_t handle = 0;
    runner_values(&layer, NULL, values);
    CHECK_EQ_INT(opaq_runner_create(runner_op(kind), values, NULL, &handle, &error), OPAQ_OK);
    const int failed =
        call_operators(&operators_layer, forward, plans[kind][p].backward, &dy_tensor, inputs, &expected);
    char what[1100];
    (void)snprintf(what, sizeof what, "%s \"%s\"", rows[kind], layer.plan);
    runner_layer_free(&layer);
    runner_layer_free(&operators_layer);
    for (int run = 0; run < 2 && !failed; ++run) {
        (void)set_arguments(kind, handle, &dy_tensor, inputs, values);
        if (op_call(rows[kind], values, NULL, &got, &error) != OPAQ_OK) {
            CHECK_FAIL("%s: %s", what, error.text);
            continue;
        }
        CHECK_EQ_INT(got.outputs.count, kind == OPAQ_RUNNER_MOE ? 2 : 1);
        for (int i = 0; i < got.outputs.count; ++i) {
            if (op_result_difference(&got, &expected, i) >= 0) {
                CHECK_FAIL("%s: %s is not the operator's", what, i == 0 ? "dx" : "dtopk_weights");
            }
        }
        op_result_free(&got);
    }
    if (!failed) {
        op_result_free(&expected);
    }
    CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
    tensor_free(&dy);
    runner_inputs_free(inputs);
}

static void gradients_are_those_of_the_operators(void) {
    static const enum opaq_element dtypes[] = {OPAQ_BF16, OPAQ_F32, OPAQ_F16};
    for (int k = 0; k < 3; ++k) {
        for (int f = 0; f < FORMAT_COUNT; ++f) {
            for (int p = 0; p < PLAN_COUNT; ++p) {
                check_gradients(kinds[k], formats[f], formats[f], p, dtypes[(f + p) % 3]);
            }
        }
        check_gradients(kinds[k], "mxfp8+both", "mxfp8", 0, OPAQ_BF16); /* a runner keeps one copy of the two */
        check_gradients(kinds[k], "nvfp4+both", "nvfp4", 0, OPAQ_F32);
    }
}

/* A failed check unless the backward operator of a kind fails with that status and text. */
static void refuse(int line, enum opaq_runner_kind kind, const struct opaq_value *values,
                   enum opaq_status status, const char *text) {
    struct op_result result;
    struct opaq_error error = {OPAQ_OK, ""};
    const enum opaq_status got = op_call(rows[kind], values, NULL, &result, &error);
    if (got != status || strstr(error.text, text) == NULL || strstr(error.text, rows[kind]) != error.text) {
        CHECK_FAIL("line %d: %s \"%s\", expected %s \"%s\"", line, opaq_status_name(got), error.text,
                   opaq_status_name(status), text);
    }
    if (got == OPAQ_OK) {
        op_result_free(&result);
    }
}

static void refuse_sizes(enum opaq_runner_kind kind, int64_t handle, const struct opaq_tensor *dy,
                         const struct runner_inputs *inputs) {
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_tensor wrong = *dy;
    char text[160];
    const int count = set_arguments(kind, handle, &wrong, inputs, values);
    values[count - 1].integer = 7;
    (void)snprintf(text, sizeof text, "%s is 7, but runner %lld takes %d",
                   kind == OPAQ_RUNNER_LINEAR ? "in_features" : "hidden_size", (long long)handle, RUNNER_H);
    refuse(__LINE__, kind, values, OPAQ_ERROR_SHAPE, text);
    values[count - 1].integer = RUNNER_H;
    wrong.shape[1] = 3;
    (void)snprintf(text, sizeof text, "dy has the shape [%d,3], but runner %lld gives %lld features",
                   RUNNER_ROWS, (long long)handle, (long long)dy->shape[1]);
    refuse(__LINE__, kind, values, OPAQ_ERROR_SHAPE, text);
    wrong = *dy;
    wrong.rank = 0;
    refuse(__LINE__, kind, values, OPAQ_ERROR_SHAPE,
           kind == OPAQ_RUNNER_LINEAR ? "has 0 dimensions" : "shape []");
    wrong = *dy;
    wrong.data = NULL;
    refuse(__LINE__, kind, values, OPAQ_ERROR_BUFFER, "dy is NULL");
    wrong = *dy;
    --wrong.shape[0];
    if (kind != OPAQ_RUNNER_LINEAR) {
        refuse(__LINE__, kind, values, OPAQ_ERROR_SHAPE, "_backward: dy has the shape");
    }
}

static void refuse_activations(enum opaq_runner_kind kind, int64_t handle, const struct opaq_tensor *dy,
                               const struct runner_inputs *inputs) {
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_tensor wrong;
    (void)set_arguments(kind, handle, dy, inputs, values);
    if (kind == OPAQ_RUNNER_LINEAR) {
        return;
    }
    values[1].tensors = &wrong;
    wrong = inputs->tensors[0];
    wrong.rank = 0;
    refuse(__LINE__, kind, values, OPAQ_ERROR_SHAPE, "_backward: ");
    wrong = inputs->tensors[0];
    wrong.shape[1] = 3;
    refuse(__LINE__, kind, values, OPAQ_ERROR_SHAPE, "_forward: ");
    if (kind == OPAQ_RUNNER_MOE) {
        (void)set_arguments(kind, handle, dy, inputs, values);
        values[3].tensors = &wrong;
        wrong = inputs->tensors[2];
        wrong.shape[0] = 1;
        refuse(__LINE__, kind, values, OPAQ_ERROR_SHAPE, "topk_ids has the shape");
    }
}

static void arguments_that_do_not_fit(void) {
    for (int k = 0; k < 3; ++k) {
        struct runner_layer layer = runner_layer_make(kinds[k], OPAQ_BF16, "mxfp8", plans[k][0].forward);
        struct runner_inputs *inputs = runner_inputs_make(OPAQ_BF16);
        struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
        struct opaq_tensor dy_tensor;
        struct tensor dy = make_dy(kinds[k], OPAQ_BF16, &dy_tensor);
        int64_t handle = 0;
        runner_values(&layer, NULL, values);
        CHECK_EQ_INT(opaq_runner_create(runner_op(kinds[k]), values, NULL, &handle, NULL), OPAQ_OK);
        refuse_sizes(kinds[k], handle, &dy_tensor, inputs);
        refuse_activations(kinds[k], handle, &dy_tensor, inputs);
        (void)set_arguments(kinds[(k + 1) % 3], handle, &dy_tensor, inputs, values);
        refuse(__LINE__, kinds[(k + 1) % 3], values, OPAQ_ERROR_ARGUMENT, "runner, expected a ");
        CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
        (void)set_arguments(kinds[k], handle, &dy_tensor, inputs, values);
        refuse(__LINE__, kinds[k], values, OPAQ_ERROR_ARGUMENT, "is gone: it was destroyed");
        runner_layer_free(&layer);
        runner_inputs_free(inputs);
        tensor_free(&dy);
    }
}

static void registered_functions_have_no_gradient(void) {
    for (int k = 0; k < 3; ++k) {
        struct test_runner_counts counts = {0};
        struct test_runner state = {.counts = &counts};
        struct test_runner_inputs inputs;
        struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
        const int64_t handle = test_runner_register(kinds[k], &state);
        test_runner_arguments(kinds[k], handle, 2, &inputs);
        struct opaq_tensor dy = inputs.tensors[0];
        dy.shape[1] = dy.strides[0] = k == 0 ? RUNNER_OUT : RUNNER_IN;
        const struct opaq_value first = op_tensor_value(&dy);
        const int count = k == 0 ? 0 : k == 1 ? 1 : 3;
        memset(values, 0, sizeof values);
        values[0] = first;
        for (int i = 0; i < count; ++i) {
            values[1 + i] = inputs.values[i];
        }
        values[1 + count].integer = handle;
        values[2 + count].integer = RUNNER_IN;
        refuse(__LINE__, kinds[k], values, OPAQ_ERROR_UNSUPPORTED,
               "has no gradient: it was registered with functions, not made from weights");
        CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
        CHECK_EQ_INT(atomic_load(&counts.runs), 0);
    }
}

/* The shape comes from the row, whatever the handle. */
static void outputs_never_touch_the_runner(void) {
    struct runner_inputs *inputs = runner_inputs_make(OPAQ_BF16);
    for (int k = 0; k < 3; ++k) {
        struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
        struct opaq_outputs outputs;
        struct opaq_tensor dy_tensor;
        struct tensor dy = make_dy(kinds[k], OPAQ_F32, &dy_tensor);
        (void)set_arguments(kinds[k], -12345, &dy_tensor, inputs, values);
        CHECK_EQ_INT(opaq_op_outputs(opaq_op_find(rows[k]), values, &outputs, NULL), OPAQ_OK);
        CHECK_EQ_INT(outputs.count, k == 2 ? 2 : 1);
        CHECK_EQ_INT(outputs.tensor[0].shape[0], RUNNER_ROWS);
        CHECK_EQ_INT(outputs.tensor[0].shape[1], RUNNER_H);
        CHECK_EQ_INT(outputs.tensor[0].dtype, k == 0 ? OPAQ_DTYPE_F32 : OPAQ_DTYPE_BF16);
        CHECK(k < 2 || outputs.tensor[1].shape[1] == RUNNER_K);
        tensor_free(&dy);
    }
    runner_inputs_free(inputs);
}

static const struct test_case tests[] = {
    TEST(gradients_are_those_of_the_operators), TEST(arguments_that_do_not_fit),
    TEST(registered_functions_have_no_gradient), TEST(outputs_never_touch_the_runner)};
TEST_MAIN(tests)
