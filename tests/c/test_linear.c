/* test_linear.c: a forward and a backward for every pair of formats that recipes use, against operands that the
 * test quantizes and dequantizes itself and multiplies in double; the saved tensors; empty sizes, ranks,
 * strides, and other floating-point settings. */
#include <fenv.h>
#include <stdlib.h>

#include "check.h"
#include "support_float.h"
#include "support_linear.h"
#include "support_product.h"
#include "support_spec.h"

/* ---- every pair of formats ---- */

static bool is_transformed(const char *a, const char *b) {
    const struct opaq_spec p = spec_of(a[0] ? a : "fp8");
    const struct opaq_spec q = spec_of(b[0] ? b : "fp8");
    return (p.options & q.options & OPAQ_HADAMARD) != 0 && p.hadamard_mask == q.hadamard_mask;
}

static struct tensor quantize_for(const struct tensor *x, const char *text, int usage,
                                  enum linear_stream stream) {
    return linear_quantized(x, text, usage, stream, 1.0f);
}

/* c = a b^T, both read along `usage` and quantized for it. */
static void check_pair(const struct opaq_tensor *c, const struct tensor *a, const struct tensor *b,
                       bool is_left_transformed, enum opaq_usage a_usage, enum opaq_usage b_usage,
                       const double *bias, const char *what) {
    struct product_matrix p =
        is_left_transformed ? product_matrix_transformed(a) : product_matrix_of(a, a_usage);
    struct product_matrix q =
        is_left_transformed ? product_matrix_transformed(b) : product_matrix_of(b, b_usage);
    (void)product_check(c, &p, &q, bias, NULL, what);
    product_matrix_free(&p);
    product_matrix_free(&q);
}

static void check_forward(const struct linear_layer *layer, const struct linear_recipe *recipe,
                          const struct op_result *forward, const char *plan) {
    struct tensor x = quantize_for(&layer->x, recipe->x, OPAQ_ROWWISE, LINEAR_STREAM_X);
    struct tensor w = quantize_for(&layer->w, recipe->w, OPAQ_ROWWISE, LINEAR_STREAM_W);
    struct tensor x_saved = quantize_for(&layer->x, recipe->x, OPAQ_COLUMNWISE, LINEAR_STREAM_X);
    struct tensor w_saved = quantize_for(&layer->w, recipe->w, OPAQ_COLUMNWISE, LINEAR_STREAM_W);
    struct product_matrix bias = product_matrix_of(&layer->bias, OPAQ_ROWWISE);
    const struct opaq_tensor y = op_result_row(forward, LINEAR_Y).tensor[0];
    check_pair(&y, &x, &w, false, OPAQ_ROWWISE, OPAQ_ROWWISE, bias.value, plan);
    if (recipe->x[0] != '\0') {
        (void)linear_check_buffers(forward, LINEAR_X_SAVED, &x_saved, plan);
    }
    if (recipe->w[0] != '\0') {
        (void)linear_check_buffers(forward, LINEAR_W_SAVED, &w_saved, plan);
    }
    product_matrix_free(&bias);
    tensor_free(&x);
    tensor_free(&w);
    tensor_free(&x_saved);
    tensor_free(&w_saved);
}

static void check_backward(const struct linear_layer *layer, const struct linear_recipe *recipe,
                           const struct op_result *backward, const char *plan) {
    struct tensor x = quantize_for(&layer->x, recipe->x, OPAQ_COLUMNWISE, LINEAR_STREAM_X);
    struct tensor w = quantize_for(&layer->w, recipe->w, OPAQ_COLUMNWISE, LINEAR_STREAM_W);
    struct tensor dy[2] = {quantize_for(&layer->dy, recipe->dy, OPAQ_ROWWISE, LINEAR_STREAM_DY),
                           quantize_for(&layer->dy, recipe->dy, OPAQ_COLUMNWISE, LINEAR_STREAM_DY)};
    const struct opaq_tensor dx = op_result_row(backward, LINEAR_DX).tensor[0];
    const struct opaq_tensor dw = op_result_row(backward, LINEAR_DW).tensor[0];
    const struct opaq_tensor dbias = op_result_row(backward, LINEAR_DBIAS).tensor[0];
    check_pair(&dx, &dy[0], &w, false, OPAQ_ROWWISE, OPAQ_COLUMNWISE, NULL, plan);
    check_pair(&dw, &dy[1], &x, is_transformed(recipe->x, recipe->dy), OPAQ_COLUMNWISE, OPAQ_COLUMNWISE, NULL,
               plan);
    struct product_matrix sums = product_matrix_of(&layer->dy, OPAQ_COLUMNWISE); /* dy unchanged */
    (void)product_check_sums(&dbias, &sums, plan);
    product_matrix_free(&sums);
    tensor_free(&x);
    tensor_free(&w);
    tensor_free(&dy[0]);
    tensor_free(&dy[1]);
}

static void check_recipes(int64_t m, int64_t n, int64_t k, enum opaq_element dtype) {
    struct linear_layer layer = linear_layer_make(m, n, k, dtype);
    for (int i = 0; i < linear_recipe_count; ++i) {
        const struct linear_text plan = linear_plan(&linear_recipes[i], "grad=xwb");
        const char *text = plan.text;
        struct linear_step step = linear_step(&layer, text, &linear_seeded);
        if (step.forward.outputs.count > 0 && step.backward.outputs.count > 0) {
            check_forward(&layer, &linear_recipes[i], &step.forward, text);
            check_backward(&layer, &linear_recipes[i], &step.backward, text);
        }
        linear_step_free(&step);
    }
    linear_layer_free(&layer);
}

static void whole_blocks(void) { check_recipes(128, 128, 256, OPAQ_BF16); }
static void ragged_in_bf16(void) { check_recipes(37, 53, 70, OPAQ_BF16); }
static void ragged_in_f16(void) { check_recipes(50, 17, 23, OPAQ_F16); }
static void ragged_in_f32(void) { check_recipes(19, 40, 33, OPAQ_F32); }
static void many_blocks_of_the_sum(void) { check_recipes(261, 9, 530, OPAQ_BF16); }

static void one_of_everything(void) {
    check_recipes(1, 1, 1, OPAQ_F32);
    check_recipes(1, 3, 2, OPAQ_BF16);
    check_recipes(2, 1, 17, OPAQ_F16);
}

static void empty_sizes(void) {
    check_recipes(0, 5, 7, OPAQ_BF16);
    check_recipes(5, 0, 7, OPAQ_F32);
    check_recipes(5, 7, 0, OPAQ_BF16); /* y is the bias */
    check_recipes(0, 0, 0, OPAQ_F16);
}

/* ---- ranks and strides ---- */

static void ranks_do_not_matter(void) {
    static const int64_t shapes[][OPAQ_RANK_LIMIT] = {{24, 40}, {2, 12, 40}, {1, 4, 2, 3, 1, 1, 1, 40}};
    static const int ranks[] = {2, 3, 8};
    for (int i = 0; i < linear_recipe_count; ++i) {
        const struct linear_text plan = linear_plan(&linear_recipes[i], "grad=xwb");
        const char *text = plan.text;
        struct linear_step first;
        for (int s = 0; s < 3; ++s) {
            struct linear_layer layer = linear_layer_shaped(shapes[s], ranks[s], 20, OPAQ_BF16);
            struct linear_step step = linear_step(&layer, text, &linear_seeded);
            const struct op_tensors y = op_result_row(&step.forward, LINEAR_Y);
            CHECK(y.tensor[0].rank == ranks[s] && y.tensor[0].shape[ranks[s] - 1] == 20);
            if (s == 0) {
                first = step;
            } else {
                linear_check_same_step(&step, &first, text);
                linear_step_free(&step);
            }
            linear_layer_free(&layer);
        }
        linear_step_free(&first);
    }
    /* a vector is one row */
    const int64_t vector[1] = {40};
    const int64_t row[2] = {1, 40};
    struct linear_layer layers[2] = {linear_layer_shaped(vector, 1, 20, OPAQ_F32),
                                     linear_layer_shaped(row, 2, 20, OPAQ_F32)};
    const char *plan = "x=mxfp8 w=nvfp4 dy=fp8 grad=xwb";
    struct linear_step steps[2] = {linear_step(&layers[0], plan, NULL), linear_step(&layers[1], plan, NULL)};
    linear_check_same_step(&steps[0], &steps[1], "a vector");
    for (int i = 0; i < 2; ++i) {
        linear_step_free(&steps[i]);
        linear_layer_free(&layers[i]);
    }
}

/* The same numbers with padded rows. */
static struct tensor spread(const struct tensor *x, void **memory) {
    const int64_t rows = opaq_proto_rows(&x->view.proto);
    const int64_t columns = opaq_proto_columns(&x->view.proto);
    struct tensor wide = {x->view};
    const size_t bytes = (size_t)((rows - 1) * (columns + 3) + columns) * 2;
    *memory = malloc(bytes);
    wide.view.row_stride = columns + 3;
    wide.view.buffer[0] = (struct opaq_span){*memory, bytes};
    memset(*memory, 0xA5, bytes);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            tensor_set(&wide, r, c, tensor_get(x, r, c));
        }
    }
    return wide;
}

static void rows_may_be_padded(void) {
    struct linear_layer layer = linear_layer_make(20, 33, 50, OPAQ_BF16);
    void *memory[3] = {NULL};
    struct tensor x = spread(&layer.x, &memory[0]);
    struct tensor w = spread(&layer.w, &memory[1]);
    struct tensor dy = spread(&layer.dy, &memory[2]);
    for (int i = 0; i < linear_recipe_count; ++i) {
        const struct linear_text plan = linear_plan(&linear_recipes[i], "grad=xwb save=xw");
        const char *text = plan.text;
        struct linear_step expected = linear_step(&layer, text, &linear_seeded);
        struct linear_arguments arguments;
        struct linear_step step;
        struct opaq_error error = {OPAQ_OK, ""};
        linear_forward_arguments(&layer, text, &linear_seeded, &arguments);
        arguments.x.tensor[0].data = x.view.buffer[0].data;
        arguments.x.tensor[0].strides[0] = x.view.row_stride;
        arguments.w.tensor[0].data = w.view.buffer[0].data;
        arguments.w.tensor[0].strides[0] = w.view.row_stride;
        CHECK_EQ_INT(op_call("linear_forward", arguments.value, &linear_seeded.settings, &step.forward, &error),
                     OPAQ_OK);
        linear_backward_arguments(&layer, text, &linear_seeded, &step.forward, &arguments);
        arguments.x.tensor[0].data = x.view.buffer[0].data;
        arguments.x.tensor[0].strides[0] = x.view.row_stride;
        arguments.w.tensor[0].data = w.view.buffer[0].data;
        arguments.w.tensor[0].strides[0] = w.view.row_stride;
        arguments.dy.tensor[0].data = dy.view.buffer[0].data;
        arguments.dy.tensor[0].strides[0] = dy.view.row_stride;
        CHECK_EQ_INT(op_call("linear_backward", arguments.value, NULL, &step.backward, &error), OPAQ_OK);
        CHECK_EQ_STR(error.text, "");
        linear_check_same_step(&step, &expected, text);
        linear_step_free(&step);
        linear_step_free(&expected);
    }
    for (int i = 0; i < 3; ++i) {
        free(memory[i]);
    }
    linear_layer_free(&layer);
}

/* ---- linear_forward_random ---- */

/* linear_forward_random is linear_forward with a tensor that is not read. */
static void the_random_forward_is_the_same(void) {
    struct linear_layer layer = linear_layer_make(20, 33, 50, OPAQ_BF16);
    for (int i = 0; i < linear_recipe_count; ++i) {
        const struct linear_text plan = linear_plan(&linear_recipes[i], "grad=xwb y=fp8+sr");
        struct op_result expected = linear_forward(&layer, plan.text, &linear_seeded);
        for (int like = 0; like < 2; ++like) {
            struct linear_arguments arguments;
            struct op_result result;
            struct opaq_error error = {OPAQ_OK, ""};
            linear_forward_arguments(&layer, plan.text, &linear_seeded, &arguments);
            arguments.value[8].tensors = like ? &arguments.bias : NULL;
            CHECK_EQ_INT(
                op_call("linear_forward_random", arguments.value, &linear_seeded.settings, &result, &error),
                OPAQ_OK);
            CHECK_EQ_STR(error.text, "");
            for (int output = 0; output < 5; ++output) {
                CHECK(op_result_difference(&result, &expected, output) < 0);
            }
            op_result_free(&result);
            arguments.value[6] = op_text_value("x=fp9");
            linear_refuse(__LINE__, "linear_forward_random", arguments.value, OPAQ_ERROR_TEXT,
                          "plan: \"x=fp9\"");
            linear_forward_arguments(&layer, plan.text, &linear_seeded, &arguments);
            arguments.value[0].count = 2;
            linear_refuse(__LINE__, "linear_forward_random", arguments.value, OPAQ_ERROR_ARGUMENT, "x ");
        }
        op_result_free(&expected);
    }
    linear_layer_free(&layer);
}

/* ---- dtypes and settings ---- */

/* x in bf16 with a weight and a bias in f32: the dtype of each result follows from the arguments that determine
 * it. */
static void dtypes_may_differ(void) {
    static const char *const plans[] = {"grad=xwb", "x=fp8 w=fp8 dy=fp8.e5m2 grad=xwb"};
    static const struct linear_recipe same[] = {{"", "", ""}, {"fp8", "fp8", "fp8.e5m2"}};
    for (int i = 0; i < 2; ++i) {
        struct linear_layer layer = linear_layer_make(12, 20, 40, OPAQ_BF16);
        struct linear_layer wide = linear_layer_make(12, 20, 40, OPAQ_F32);
        tensor_free(&layer.w);
        tensor_free(&layer.bias);
        layer.w = wide.w;
        layer.bias = wide.bias;
        struct linear_step step = linear_step(&layer, plans[i], NULL);
        CHECK_EQ_INT(op_result_row(&step.forward, LINEAR_Y).tensor[0].dtype, OPAQ_DTYPE_BF16);
        CHECK_EQ_INT(op_result_row(&step.backward, LINEAR_DX).tensor[0].dtype, OPAQ_DTYPE_BF16);
        CHECK_EQ_INT(op_result_row(&step.backward, LINEAR_DW).tensor[0].dtype, OPAQ_DTYPE_F32);
        CHECK_EQ_INT(op_result_row(&step.backward, LINEAR_DBIAS).tensor[0].dtype, OPAQ_DTYPE_F32);
        check_forward(&layer, &same[i], &step.forward, plans[i]);
        check_backward(&layer, &same[i], &step.backward, plans[i]);
        linear_step_free(&step);
        tensor_free(&wide.x);
        tensor_free(&wide.dy);
        linear_layer_free(&layer);
    }
}

static void settings_do_not_matter(void) {
    const struct float_setting before = float_setting_get();
    struct linear_layer layer = linear_layer_make(20, 30, 40, OPAQ_F32);
    tensor_fill(&layer.x, FILL_TINY, 9);
    for (int i = 0; i < linear_recipe_count; ++i) {
        const struct linear_text plan = linear_plan(&linear_recipes[i], "grad=xwb");
        const char *text = plan.text;
        struct linear_step expected = linear_step(&layer, text, &linear_seeded);
        (void)fesetround(FE_UPWARD);
        (void)float_setting_flush_to_zero();
        struct linear_step step = linear_step(&layer, text, &linear_seeded);
        float_setting_put(before);
        linear_check_same_step(&step, &expected, text);
        linear_step_free(&step);
        linear_step_free(&expected);
    }
    linear_layer_free(&layer);
}

static const struct test_case tests[] = {TEST(whole_blocks),
                                         TEST(ragged_in_bf16),
                                         TEST(ragged_in_f16),
                                         TEST(ragged_in_f32),
                                         TEST(many_blocks_of_the_sum),
                                         TEST(one_of_everything),
                                         TEST(empty_sizes),
                                         TEST(ranks_do_not_matter),
                                         TEST(rows_may_be_padded),
                                         TEST(the_random_forward_is_the_same),
                                         TEST(dtypes_may_differ),
                                         TEST(settings_do_not_matter)};
TEST_MAIN(tests)
