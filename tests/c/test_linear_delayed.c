/* test_linear_delayed.c: delayed scaling through the linear operators: given scales are used, amaxes are returned, the
 * backward records them and updates the state as opaq_delayed_update does; with "reduce" it records only, and the
 * operator delayed_update completes it. */
#include <math.h>

#include "check.h"
#include "support_linear.h"
#include "support_product.h"

static const struct linear_state start = {.scale_fwd = {3.0f, 5.0f, 0.5f},
                                          .history_fwd = {{0, 0, 0}, {100, 0, 1}, {7, 1e-3f, 2}},
                                          .scale_bwd = {2.0f, 0.25f},
                                          .history_bwd = {{0, 0}, {0.5f, 50}, {0.25f, 0}}};

/* The largest absolute value of a plain tensor. */
static float amax_of(const struct tensor *tensor) {
    float amax = 0.0f;
    for (int64_t r = 0; r < opaq_proto_rows(&tensor->view.proto); ++r) {
        for (int64_t c = 0; c < opaq_proto_columns(&tensor->view.proto); ++c) {
            amax = fmaxf(amax, fabsf(tensor_get(tensor, r, c)));
        }
    }
    return amax;
}

static float amax_of_row(const struct op_result *result, int output) {
    const struct opaq_tensor tensor = op_result_row(result, output).tensor[0];
    double amax = 0.0;
    for (int64_t i = 0; i < tensor.shape[0] * tensor.shape[1]; ++i) {
        amax = fmax(amax, fabs(product_value(&tensor, i)));
    }
    return (float)amax;
}

/* The state after a step, by the public function. */
struct update {
    float amax_fwd[3], amax_bwd[2];
    enum opaq_element fwd, bwd;
    int margin;
    enum opaq_amax_algorithm algorithm;
    bool reduce;
};

static struct linear_state updated(struct linear_state state, const struct update *update) {
    for (int i = 0; i < 3; ++i) {
        state.history_fwd[0][i] = fmaxf(state.history_fwd[0][i], update->amax_fwd[i]);
    }
    for (int i = 0; i < 2; ++i) {
        state.history_bwd[0][i] = fmaxf(state.history_bwd[0][i], update->amax_bwd[i]);
    }
    const struct opaq_delayed_state forward = {state.history_fwd[0], state.scale_fwd, LINEAR_HISTORY, 3};
    const struct opaq_delayed_state backward = {state.history_bwd[0], state.scale_bwd, LINEAR_HISTORY, 2};
    if (!update->reduce) {
        CHECK_EQ_INT(
            opaq_delayed_update(&forward, NULL, update->fwd, update->margin, update->algorithm, NULL, NULL),
            OPAQ_OK);
        CHECK_EQ_INT(
            opaq_delayed_update(&backward, NULL, update->bwd, update->margin, update->algorithm, NULL, NULL),
            OPAQ_OK);
    }
    return state;
}

static void check_state(const struct linear_state *state, const struct linear_state *expected,
                        const char *what) {
    CHECK_BYTES(state, expected, sizeof *state, "%s: the state", what);
}

/* ---- a whole step ---- */

static void check_products(const struct linear_layer *layer, const struct linear_step *step, const char *plan) {
    struct tensor x[2];
    struct tensor w[2];
    struct tensor dy[2];
    struct product_matrix bias = product_matrix_of(&layer->bias, OPAQ_ROWWISE);
    for (int i = 0; i < 2; ++i) {
        const enum opaq_usage usage = i == 0 ? OPAQ_ROWWISE : OPAQ_COLUMNWISE;
        x[i] = linear_quantized(&layer->x, "fp8+delayed", usage, LINEAR_STREAM_X, start.scale_fwd[0]);
        w[i] = linear_quantized(&layer->w, "fp8+delayed", usage, LINEAR_STREAM_W, start.scale_fwd[1]);
        dy[i] = linear_quantized(&layer->dy, "fp8.e5m2+delayed", usage, LINEAR_STREAM_DY, start.scale_bwd[0]);
    }
    struct product_matrix operands[6] = {
        product_matrix_of(&x[0], OPAQ_ROWWISE),     product_matrix_of(&w[0], OPAQ_ROWWISE),
        product_matrix_of(&dy[0], OPAQ_ROWWISE),    product_matrix_of(&w[1], OPAQ_COLUMNWISE),
        product_matrix_of(&dy[1], OPAQ_COLUMNWISE), product_matrix_of(&x[1], OPAQ_COLUMNWISE)};
    const struct opaq_tensor y = op_result_row(&step->forward, LINEAR_Y).tensor[0];
    const struct opaq_tensor dx = op_result_row(&step->backward, LINEAR_DX).tensor[0];
    const struct opaq_tensor dw = op_result_row(&step->backward, LINEAR_DW).tensor[0];
    (void)product_check(&y, &operands[0], &operands[1], bias.value, NULL, plan);
    (void)product_check(&dx, &operands[2], &operands[3], NULL, NULL, plan);
    (void)product_check(&dw, &operands[4], &operands[5], NULL, NULL, plan);
    (void)linear_check_buffers(&step->forward, LINEAR_X_SAVED, &x[1], plan);
    (void)linear_check_buffers(&step->forward, LINEAR_W_SAVED, &w[1], plan);
    for (int i = 0; i < 6; ++i) {
        product_matrix_free(&operands[i]);
    }
    for (int i = 0; i < 2; ++i) {
        tensor_free(&x[i]);
        tensor_free(&w[i]);
        tensor_free(&dy[i]);
    }
    product_matrix_free(&bias);
}

static const char all[] = "x=fp8+delayed w=fp8+delayed dy=fp8.e5m2+delayed grad=xwb";

static void scales_are_used_and_amaxes_returned(void) {
    static const int64_t sizes[][3] = {{37, 53, 70}, {1, 2, 3}, {0, 5, 7}, {5, 0, 7}, {5, 7, 0}};
    for (int s = 0; s < 5; ++s) {
        struct linear_layer layer = linear_layer_make(sizes[s][0], sizes[s][1], sizes[s][2], OPAQ_BF16);
        struct linear_state state = start;
        const struct linear_given given = {.state = &state};
        struct linear_step step = linear_step(&layer, all, &given);
        const struct op_tensors amax = op_result_row(&step.forward, LINEAR_AMAX);
        const float expected[3] = {amax_of(&layer.x), amax_of(&layer.w), 0.0f};
        CHECK_EQ_INT(amax.count, 1);
        CHECK_BYTES(amax.tensor[0].data, expected, sizeof expected, "amax");
        check_products(&layer, &step, all);
        const struct update update = {.amax_fwd = {expected[0], expected[1], 0},
                                      .amax_bwd = {amax_of(&layer.dy), 0},
                                      .fwd = OPAQ_E4M3,
                                      .bwd = OPAQ_E5M2};
        const struct linear_state after = updated(start, &update);
        check_state(&state, &after, all);
        linear_step_free(&step);
        linear_layer_free(&layer);
    }
}

/* A quantized result is the plain one quantized with the scale that was given for it. */
static void check_quantized(const struct op_result *plain, const struct op_result *quantized, const char *text,
                            float scale) {
    const struct opaq_tensor result = op_result_row(plain, 0).tensor[0]; /* y or dx */
    struct tensor copy = tensor_make(result.shape[0], result.shape[1], (enum opaq_element)result.dtype, NULL);
    memcpy(copy.view.buffer[0].data, result.data, tensor_bytes(&copy, 0));
    struct tensor expected = linear_quantized(&copy, text, OPAQ_ROWWISE, LINEAR_STREAM_Y, scale);
    (void)linear_check_buffers(quantized, 0, &expected, text);
    tensor_free(&copy);
    tensor_free(&expected);
}

/* Every algorithm and some margins, with quantized results, over several steps. */
static void the_state_is_updated(void) {
    struct linear_layer layer = linear_layer_make(20, 30, 40, OPAQ_BF16);
    for (int i = 0; i < 2 * 5 * 2; ++i) {
        static const int margins[] = {0, 3, -2, 64, -64};
        const struct update common = {.fwd = OPAQ_E4M3,
                                      .bwd = OPAQ_E5M2,
                                      .margin = margins[i / 2 % 5],
                                      .algorithm = i % 2 ? OPAQ_AMAX_MOST_RECENT : OPAQ_AMAX_MAX,
                                      .reduce = i >= 10};
        struct linear_text plan;
        struct linear_state state = start;
        struct linear_state expected = start;
        struct linear_given given = {.state = &state};
        (void)snprintf(plan.text, sizeof plan.text, "%s y=fp8+delayed dx=fp8.e5m2+delayed margin=%d%s%s", all,
                       common.margin,
                       i % 2   ? " history=most_recent"
                       : i % 3 ? " history=max"
                               : "",
                       common.reduce ? " reduce" : "");
        for (int n = 0; n < 4; ++n) {
            tensor_fill(&layer.x, FILL_NORMAL, (uint64_t)n + 10); /* another amax in each step */
            tensor_fill(&layer.dy, FILL_OUTLIERS, (uint64_t)n + 20);
            /* the plain results with the same scales, whose amaxes are recorded */
            const struct linear_state before = state;
            struct linear_state unchanged = state;
            const struct linear_given plain_given = {.state = &unchanged};
            struct linear_step plain = linear_step(&layer, all, &plain_given);
            struct linear_step step = linear_step(&layer, plan.text, &given);
            check_quantized(&plain.forward, &step.forward, "fp8+delayed", before.scale_fwd[2]);
            check_quantized(&plain.backward, &step.backward, "fp8.e5m2+delayed", before.scale_bwd[1]);
            struct update update = common;
            update.amax_fwd[0] = amax_of(&layer.x);
            update.amax_fwd[1] = amax_of(&layer.w);
            update.amax_fwd[2] = amax_of_row(&plain.forward, LINEAR_Y);
            update.amax_bwd[0] = amax_of(&layer.dy);
            update.amax_bwd[1] = amax_of_row(&plain.backward, LINEAR_DX);
            expected = updated(expected, &update);
            check_state(&state, &expected, plan.text);
            linear_step_free(&plain);
            linear_step_free(&step);
        }
    }
    linear_layer_free(&layer);
}

static enum opaq_status delayed_update(const char *plan, const struct linear_arguments *arguments,
                                       int direction, struct opaq_error *error) {
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {op_text_value(plan),
                                                              {.tensors = &arguments->scale[direction]},
                                                              {.tensors = &arguments->history[direction]}};
    struct op_result none;
    return op_call("delayed_update", values, NULL, &none, error);
}

static void delayed_update_completes_what_reduce_recorded(void) {
    static const char *const plans[] = {"x=fp8+delayed w=fp8+delayed dy=fp8.e5m2+delayed grad=xw margin=2",
                                        "x=fp8.e5m2+delayed w=mxfp8 dy=fp8+delayed grad=xw history=most_recent",
                                        "w=fp8.e5m2+delayed dx=fp8.e5m2+delayed grad=xw",
                                        "x=mxfp4 y=fp8+delayed dy=nvfp4 dx=fp8+delayed grad=xw"};
    struct linear_layer layer = linear_layer_make(20, 30, 40, OPAQ_F32);
    for (int i = 0; i < 4; ++i) {
        char reduced[128];
        struct linear_state at_once = start;
        struct linear_state later = start;
        const struct linear_given given[2] = {{.state = &at_once}, {.state = &later}};
        struct opaq_error error = {OPAQ_OK, ""};
        struct linear_arguments arguments;
        (void)snprintf(reduced, sizeof reduced, "%s reduce", plans[i]);
        struct linear_step one = linear_step(&layer, plans[i], &given[0]);
        struct linear_step two = linear_step(&layer, reduced, &given[1]);
        linear_check_same(&one.backward, &two.backward, LINEAR_DW, reduced);
        CHECK_BYTES(later.scale_fwd, start.scale_fwd, sizeof start.scale_fwd, "%s", reduced);
        CHECK_BYTES(later.scale_bwd, start.scale_bwd, sizeof start.scale_bwd, "%s", reduced);
        CHECK_BYTES(later.history_fwd[1], start.history_fwd[1], 2 * sizeof start.history_fwd[1], "%s", reduced);
        CHECK_BYTES(later.history_bwd[1], start.history_bwd[1], 2 * sizeof start.history_bwd[1], "%s", reduced);
        linear_backward_arguments(&layer, reduced, &given[1], &two.forward, &arguments);
        CHECK_EQ_INT(delayed_update(reduced, &arguments, 0, &error), OPAQ_OK);
        CHECK_EQ_INT(delayed_update(reduced, &arguments, 1, &error), OPAQ_OK);
        CHECK_EQ_STR(error.text, "");
        check_state(&later, &at_once, reduced);
        linear_step_free(&one);
        linear_step_free(&two);
    }
    linear_layer_free(&layer);
    /* a tensor quantized with a delayed scale was recorded by its own quantizer, and is updated with that
     * format's element */
    struct linear_state state = start;
    struct linear_state expected = start;
    struct linear_layer none = linear_layer_make(1, 1, 1, OPAQ_F32);
    struct linear_arguments arguments;
    struct op_result no_forward;
    memset(&no_forward, 0, sizeof no_forward);
    const struct linear_given given = {.state = &state};
    const char *plan = "x_given=fp8.e5m2+delayed dy_given=fp8+delayed";
    linear_backward_arguments(&none, plan, &given, &no_forward, &arguments);
    state.history_fwd[0][0] = expected.history_fwd[0][0] = 9.0f;
    CHECK_EQ_INT(delayed_update(plan, &arguments, 0, NULL), OPAQ_OK);
    CHECK_EQ_INT(delayed_update(plan, &arguments, 1, NULL), OPAQ_OK);
    const struct update update = {.amax_fwd = {9.0f, 0, 0}, .fwd = OPAQ_E5M2, .bwd = OPAQ_E4M3};
    expected = updated(expected, &update);
    check_state(&state, &expected, plan);
    linear_layer_free(&none);
}

/* ---- plans with only some delayed tensors ---- */

static void only_delayed_tensors_are_recorded(void) {
    struct linear_layer layer = linear_layer_make(20, 30, 40, OPAQ_BF16);
    struct linear_state state = start;
    const struct linear_given given = {.state = &state};
    const float amax_x = amax_of(&layer.x);
    struct linear_step step = linear_step(&layer, "x=fp8+delayed w=fp8 dy=fp8.e5m2 grad=xwb", &given);
    const struct update update = {.amax_fwd = {amax_x, 0, 0}, .fwd = OPAQ_E4M3, .bwd = OPAQ_E4M3};
    struct linear_state expected = updated(start, &update);
    memcpy(expected.scale_bwd, start.scale_bwd, sizeof start.scale_bwd);
    memcpy(expected.history_bwd, start.history_bwd, sizeof start.history_bwd);
    check_state(&state, &expected, "only x");
    linear_step_free(&step);
    /* an unrequested gradient is not quantized, so nothing is recorded */
    state = start;
    step = linear_step(&layer, "x=fp8+delayed w=fp8+delayed dy=fp8.e5m2+delayed dx=fp8.e5m2+delayed grad=b",
                       &given);
    CHECK_BYTES(state.history_bwd, start.history_bwd, sizeof start.history_bwd, "only b");
    CHECK_BYTES(state.scale_bwd, start.scale_bwd, sizeof start.scale_bwd, "only b");
    CHECK(state.scale_fwd[0] != start.scale_fwd[0]);
    linear_step_free(&step);
    /* a forward without a backward returns and changes nothing */
    state = start;
    struct op_result forward = linear_forward(&layer, "x=fp8+delayed w=fp8+delayed", &given);
    CHECK_EQ_INT(op_result_row(&forward, LINEAR_AMAX).count, 0);
    check_state(&state, &start, "no gradients");
    op_result_free(&forward);
    /* a nonfinite amax is recorded, but does not set a scale */
    state = start;
    tensor_set(&layer.x, 3, 3, INFINITY);
    step = linear_step(&layer, all, &given);
    CHECK(isinf(((const float *)op_result_row(&step.forward, LINEAR_AMAX).tensor[0].data)[0]));
    CHECK(state.scale_fwd[0] == start.scale_fwd[0] && state.scale_fwd[1] != start.scale_fwd[1]);
    linear_step_free(&step);
    linear_layer_free(&layer);
}

/* The maximum over several backwards before an update. */
static void recording_keeps_the_largest(void) {
    struct linear_layer layer = linear_layer_make(8, 16, 16, OPAQ_F32);
    struct linear_state state = start;
    const struct linear_given given = {.state = &state};
    float largest = 0.0f;
    for (int n = 0; n < 5; ++n) {
        tensor_fill(&layer.x, n == 2 ? FILL_OUTLIERS : FILL_NORMAL, (uint64_t)n);
        largest = fmaxf(largest, amax_of(&layer.x));
        struct linear_step step =
            linear_step(&layer, "x=fp8+delayed w=fp8+delayed dy=fp8.e5m2+delayed grad=w reduce", &given);
        CHECK(state.history_fwd[0][0] == largest);
        linear_step_free(&step);
    }
    linear_layer_free(&layer);
}

static const struct test_case tests[] = {TEST(scales_are_used_and_amaxes_returned), TEST(the_state_is_updated),
                                         TEST(delayed_update_completes_what_reduce_recorded),
                                         TEST(only_delayed_tensors_are_recorded),
                                         TEST(recording_keeps_the_largest)};
TEST_MAIN(tests)
