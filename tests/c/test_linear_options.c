/* test_linear_options.c: the options of a plan besides formats: keeping the originals, quantized results,
 * biases, main gradients, some of the gradients, random numbers. Each is compared with a plan without the
 * option, or with double arithmetic. */
#include <stdlib.h>

#include "check.h"
#include "support_hiding.h"
#include "support_linear.h"
#include "support_product.h"

/* ---- keeping the originals ---- */

static void check_saving(const struct linear_layer *layer, const struct linear_recipe *recipe,
                         const char *mode) {
    static const char *const saves[] = {"save=x", "save=w", "save=xw"};
    struct linear_step expected = linear_step(layer, linear_plan(recipe, mode).text, &linear_seeded);
    for (int s = 0; s < 3; ++s) {
        char rest[64];
        (void)snprintf(rest, sizeof rest, "%s %s", mode, saves[s]);
        const struct linear_text plan = linear_plan(recipe, rest);
        struct linear_step step = linear_step(layer, plan.text, &linear_seeded);
        linear_check_same(&step.forward, &expected.forward, LINEAR_Y, plan.text);
        CHECK(s == 1 || op_result_row(&step.forward, LINEAR_X_SAVED).count == 0);
        CHECK(s == 0 || op_result_row(&step.forward, LINEAR_W_SAVED).count == 0);
        for (int g = 0; g < 3; ++g) {
            linear_check_same(&step.backward, &expected.backward, g, plan.text);
        }
        linear_step_free(&step);
    }
    linear_step_free(&expected);
}

static void saving_the_originals_gives_the_same_bytes(void) {
    struct linear_layer layer = linear_layer_make(37, 53, 70, OPAQ_BF16);
    for (int i = 0; i < linear_recipe_count; ++i) {
        check_saving(&layer, &linear_recipes[i], "grad=xwb");
        check_saving(&layer, &linear_recipes[i], "grad=xwb backward=dequantized");
        check_saving(&layer, &linear_recipes[i], "grad=xwb backward=high_precision");
    }
    linear_layer_free(&layer);
}

/* ---- quantized results ---- */

/* The plain result of a step as a test tensor. */
static struct tensor tensor_of(const struct op_result *result, int output) {
    const struct opaq_tensor plain = op_result_row(result, output).tensor[0];
    struct tensor made = tensor_make(plain.shape[0], plain.shape[1], (enum opaq_element)plain.dtype, NULL);
    memcpy(made.view.buffer[0].data, plain.data, tensor_bytes(&made, 0));
    return made;
}

static void quantized_results_are_the_plain_ones_quantized(void) {
    static const char *const specs[] = {
        "fp8",        "fp8.e5m2+columnwise", "fp8row+both", "fp8blk1", "fp8blk2+columnwise",   "mxfp8+both",
        "mxfp4+sr",   "nvfp4+both+sr",       "nvfp4+2d",    "fp8+sr",  "nvfp4+columnwise+rht", "mxfp8+swizzle",
        "fp8.e5m2+sr"};
    static const struct linear_recipe inner[] = {
        {"", "", ""}, {"mxfp8", "mxfp8", "mxfp8.e5m2"}, {"nvfp4+rht", "nvfp4+2d", "nvfp4+rht+sr"}};
    for (int r = 0; r < 3; ++r) {
        struct linear_layer layer = linear_layer_make(37, 53, 70, r == 1 ? OPAQ_F32 : OPAQ_BF16);
        const struct linear_text plain = linear_plan(&inner[r], "grad=xwb");
        struct linear_step expected = linear_step(&layer, plain.text, &linear_seeded);
        struct tensor y = tensor_of(&expected.forward, LINEAR_Y);
        struct tensor dx = tensor_of(&expected.backward, LINEAR_DX);
        for (size_t i = 0; i < sizeof specs / sizeof specs[0]; ++i) {
            char rest[128];
            (void)snprintf(rest, sizeof rest, "grad=xwb y=%s dx=%s", specs[i], specs[i]);
            const struct linear_text plan = linear_plan(&inner[r], rest);
            struct linear_step step = linear_step(&layer, plan.text, &linear_seeded);
            struct tensor y_quantized = linear_quantized(&y, specs[i], OPAQ_ROWWISE, LINEAR_STREAM_Y, 1.0f);
            struct tensor dx_quantized = linear_quantized(&dx, specs[i], OPAQ_ROWWISE, LINEAR_STREAM_DX, 1.0f);
            (void)linear_check_buffers(&step.forward, LINEAR_Y, &y_quantized, plan.text);
            (void)linear_check_buffers(&step.backward, LINEAR_DX, &dx_quantized, plan.text);
            linear_check_same(&step.backward, &expected.backward, LINEAR_DW, plan.text);
            tensor_free(&y_quantized);
            tensor_free(&dx_quantized);
            linear_step_free(&step);
        }
        tensor_free(&y);
        tensor_free(&dx);
        linear_step_free(&expected);
        linear_layer_free(&layer);
    }
}

/* ---- bias ---- */

static void a_later_bias_is_not_added(void) {
    struct linear_layer layer = linear_layer_make(20, 33, 45, OPAQ_BF16);
    const struct linear_given without = {.no_bias = true};
    struct linear_step added = linear_step(&layer, "x=fp8 w=fp8 dy=fp8 grad=xwb", NULL);
    struct linear_step later = linear_step(&layer, "x=fp8 w=fp8 dy=fp8 grad=xwb bias_later", NULL);
    struct linear_step none = linear_step(&layer, "x=fp8 w=fp8 dy=fp8 grad=xw", &without);
    linear_check_same(&later.forward, &none.forward, LINEAR_Y, "bias_later");
    CHECK(op_result_difference(&added.forward, &none.forward, LINEAR_Y) >= 0);
    for (int g = 0; g < 3; ++g) {
        linear_check_same(&later.backward, &added.backward, g, "bias_later");
    }
    struct tensor x = linear_quantized(&layer.x, "fp8", OPAQ_ROWWISE, LINEAR_STREAM_X, 1.0f);
    struct tensor w = linear_quantized(&layer.w, "fp8", OPAQ_ROWWISE, LINEAR_STREAM_W, 1.0f);
    struct product_matrix operands[2] = {product_matrix_of(&x, OPAQ_ROWWISE),
                                         product_matrix_of(&w, OPAQ_ROWWISE)};
    const struct opaq_tensor y = op_result_row(&none.forward, LINEAR_Y).tensor[0];
    (void)product_check(&y, &operands[0], &operands[1], NULL, NULL, "no bias");
    product_matrix_free(&operands[0]);
    product_matrix_free(&operands[1]);
    tensor_free(&x);
    tensor_free(&w);
    linear_step_free(&added);
    linear_step_free(&later);
    linear_step_free(&none);
    linear_layer_free(&layer);
}

/* ---- main gradients ---- */

enum { GAP = 5 };

/* A tensor [N,K] whose rows are padded by GAP elements, filled with numbers, padding included. */
static struct opaq_tensor main_grad_make(const struct linear_layer *layer, enum opaq_element dtype,
                                         int64_t gap) {
    const int64_t stride = layer->k + gap;
    struct tensor numbers = tensor_make(layer->n, stride, dtype, NULL);
    struct opaq_tensor made = op_tensors_of(&numbers).tensor[0];
    tensor_fill(&numbers, FILL_NORMAL, 8);
    made.shape[1] = layer->k; /* the memory of the numbers is released with it */
    made.strides[0] = stride;
    return made;
}

/* The numbers of a padded tensor, contiguous. */
static double *numbers_of(const struct opaq_tensor *tensor) {
    double *numbers = calloc((size_t)(tensor->shape[0] * tensor->shape[1]) + 1, sizeof *numbers);
    for (int64_t i = 0; numbers != NULL && i < tensor->shape[0] * tensor->shape[1]; ++i) {
        numbers[i] = product_value(tensor, i / tensor->shape[1] * tensor->strides[0] + i % tensor->shape[1]);
    }
    return numbers;
}

static void check_main_grad(const struct linear_layer *layer, const struct linear_recipe *recipe, bool adds,
                            enum opaq_element dtype, int64_t gap) {
    const struct linear_text plan =
        linear_plan(recipe, adds ? "grad=xwb main_grad=add" : "grad=xwb main_grad=set");
    struct opaq_tensor grad = main_grad_make(layer, dtype, gap);
    struct opaq_tensor before = main_grad_make(layer, dtype, gap);
    struct linear_given given = linear_seeded;
    given.main_grad = &grad;
    struct linear_step expected = linear_step(layer, linear_plan(recipe, "grad=xwb").text, &linear_seeded);
    struct linear_step step = linear_step(layer, plan.text, &given);
    CHECK_EQ_INT(op_result_row(&step.backward, LINEAR_DW).count, 0);
    linear_check_same(&step.backward, &expected.backward, LINEAR_DX, plan.text);
    linear_check_same(&step.backward, &expected.backward, LINEAR_DBIAS, plan.text);
    /* against double, and the padding must be unchanged */
    struct tensor dy = linear_quantized(&layer->dy, recipe->dy, OPAQ_COLUMNWISE, LINEAR_STREAM_DY, 1.0f);
    struct tensor x = linear_quantized(&layer->x, recipe->x, OPAQ_COLUMNWISE, LINEAR_STREAM_X, 1.0f);
    struct product_matrix operands[2] = {product_matrix_of(&dy, OPAQ_COLUMNWISE),
                                         product_matrix_of(&x, OPAQ_COLUMNWISE)};
    double *former = numbers_of(&before);
    struct tensor dense = tensor_make(layer->n, layer->k, dtype, NULL);
    const size_t entry = dtype == OPAQ_F32 ? 4 : 2;
    for (int64_t r = 0; r < layer->n; ++r) {
        const size_t row = (size_t)(r * grad.strides[0]) * entry;
        const size_t columns = (size_t)layer->k * entry;
        memcpy((char *)dense.view.buffer[0].data + (size_t)r * columns, (char *)grad.data + row, columns);
        CHECK_BYTES((char *)grad.data + row + columns, (char *)before.data + row + columns, (size_t)gap * entry,
                    "%s: beyond row %lld", plan.text, (long long)r);
    }
    const struct op_tensors result = op_tensors_of(&dense);
    (void)product_check(&result.tensor[0], &operands[0], &operands[1], NULL, adds ? former : NULL, plan.text);
    if (!adds && (int32_t)dtype == layer->w.view.proto.dtype) { /* the same bytes as dw */
        (void)linear_check_buffers(&expected.backward, LINEAR_DW, &dense, plan.text);
    }
    product_matrix_free(&operands[0]);
    product_matrix_free(&operands[1]);
    free(former);
    free(grad.data);
    free(before.data);
    tensor_free(&dense);
    tensor_free(&dy);
    tensor_free(&x);
    linear_step_free(&expected);
    linear_step_free(&step);
}

static void main_gradients(void) {
    static const enum opaq_element dtypes[] = {OPAQ_F32, OPAQ_BF16, OPAQ_F16};
    static const struct linear_recipe kinds[] = {
        {"", "", ""}, {"fp8", "fp8", "fp8.e5m2"}, {"mxfp8", "mxfp8", "mxfp8+sr"}};
    struct linear_layer layer = linear_layer_make(40, 33, 27, OPAQ_BF16);
    for (int i = 0; i < 3 * 3 * 4; ++i) {
        check_main_grad(&layer, &kinds[i % 3], i / 9 % 2 == 0, dtypes[i / 3 % 3], i / 18 ? GAP : 0);
    }
    linear_layer_free(&layer);
    layer = linear_layer_make(0, 5, 7, OPAQ_BF16); /* nothing is added, or zeros are written */
    check_main_grad(&layer, &kinds[1], true, OPAQ_F32, GAP);
    check_main_grad(&layer, &kinds[1], false, OPAQ_F32, GAP);
    linear_layer_free(&layer);
}

/* ---- some of the gradients ---- */

static void every_set_of_gradients(void) {
    static const char *const sets[] = {"grad=x",  "grad=w",  "grad=xw", "grad=b",
                                       "grad=xb", "grad=wb", "grad=bwx"};
    struct linear_layer layer = linear_layer_make(37, 53, 70, OPAQ_BF16);
    for (int i = 0; i < linear_recipe_count; ++i) {
        const struct linear_text whole = linear_plan(&linear_recipes[i], "grad=xwb");
        struct linear_step expected = linear_step(&layer, whole.text, &linear_seeded);
        for (int set = 1; set <= 7; ++set) {
            const struct linear_text plan = linear_plan(&linear_recipes[i], sets[set - 1]);
            struct linear_arguments arguments;
            struct op_result backward;
            struct opaq_error error = {OPAQ_OK, ""};
            struct op_result forward = linear_forward(&layer, plan.text, &linear_seeded);
            linear_check_same(&forward, &expected.forward, LINEAR_Y, plan.text);
            linear_backward_arguments(&layer, plan.text, &linear_seeded, &forward, &arguments);
            if ((set & OPAQ_GRADIENT_W) == 0) { /* tensors that are not needed may be absent */
                arguments.value[1] = (struct opaq_value){.count = 0};
            }
            if ((set & OPAQ_GRADIENT_X) == 0) {
                arguments.value[2] = (struct opaq_value){.count = 0};
            }
            CHECK_EQ_INT(op_call("linear_backward", arguments.value, NULL, &backward, &error), OPAQ_OK);
            CHECK_EQ_STR(error.text, "");
            for (int g = 0; g < 3; ++g) {
                if (set & 1 << g) {
                    linear_check_same(&backward, &expected.backward, g, plan.text);
                } else {
                    CHECK_EQ_INT(op_result_row(&backward, g).count, 0);
                }
            }
            op_result_free(&forward);
            op_result_free(&backward);
        }
        linear_step_free(&expected);
    }
    linear_layer_free(&layer);
}

/* ---- random numbers ---- */

static void results_depend_on_random_numbers(void) {
    static const char *const plans[] = {"x=nvfp4+sr w=nvfp4 dy=nvfp4 grad=xw", "x=fp8 w=fp8+sr dy=fp8 grad=xw",
                                        "x=mxfp8 w=mxfp8 dy=mxfp8+sr grad=xw", "y=fp8+sr grad=xw",
                                        "dx=mxfp4+sr grad=xw"};
    /* whether y, dx and dw depend on them */
    static const int changes[][3] = {{1, 0, 1}, {1, 1, 0}, {0, 1, 1}, {1, 0, 0}, {0, 1, 0}};
    static const int64_t numbers[][2] = {{1, 2}, {1, 2}, {3, 2}, {1, 20}, {-1, INT64_MAX}};
    struct linear_layer layer = linear_layer_make(40, 40, 48, OPAQ_BF16);
    for (int i = 0; i < 5; ++i) {
        struct linear_step first;
        for (int n = 0; n < 5; ++n) {
            const struct linear_given given = {.settings = {.random = {numbers[n][0], numbers[n][1]}}};
            struct linear_step step = linear_step(&layer, plans[i], &given);
            if (n == 0) {
                first = step;
                continue;
            }
            const int different[3] = {op_result_difference(&step.forward, &first.forward, LINEAR_Y) >= 0,
                                      op_result_difference(&step.backward, &first.backward, LINEAR_DX) >= 0,
                                      op_result_difference(&step.backward, &first.backward, LINEAR_DW) >= 0};
            for (int k = 0; k < 3; ++k) {
                CHECK_EQ_INT(different[k], n > 1 && changes[i][k]);
            }
            linear_step_free(&step);
        }
        linear_step_free(&first);
    }
    /* equal tensors are rounded with different numbers */
    tensor_free(&layer.w);
    layer.w = linear_quantized(&layer.x, "", 0, LINEAR_STREAM_X, 1.0f);
    const char *plan = "x=nvfp4+sr w=nvfp4+sr dy=nvfp4 grad=xw";
    struct op_result forward = linear_forward(&layer, plan, &linear_seeded);
    const struct op_tensors x = op_result_row(&forward, LINEAR_X_SAVED);
    const struct op_tensors w = op_result_row(&forward, LINEAR_W_SAVED);
    CHECK(x.count == w.count && memcmp(x.tensor[0].data, w.tensor[0].data, op_tensor_bytes(&x.tensor[0])) != 0);
    CHECK_BYTES(x.tensor[1].data, w.tensor[1].data, op_tensor_bytes(&x.tensor[1]), "scales");
    op_result_free(&forward);
    linear_layer_free(&layer);
}

/* ---- order of sums ---- */

/* The products of the plan may be in any order. The CPU has one order, so nothing changes there. */
static void any_order_gives_the_same_bytes(void) {
    struct linear_layer layer = linear_layer_make(37, 53, 70, OPAQ_BF16);
    for (int i = 0; i < linear_recipe_count; ++i) {
        const struct linear_text fixed = linear_plan(&linear_recipes[i], "grad=xwb order=fixed");
        const struct linear_text any = linear_plan(&linear_recipes[i], "grad=xwb order=any");
        struct linear_step expected = linear_step(&layer, fixed.text, &linear_seeded);
        CHECK_EQ_INT(hiding_any_order(), 0);
        struct linear_step step = linear_step(&layer, any.text, &linear_seeded);
        CHECK_EQ_INT(hiding_any_order(), 3); /* y, dx and dw */
        linear_check_same_step(&step, &expected, any.text);
        linear_step_free(&expected);
        linear_step_free(&step);
    }
    linear_layer_free(&layer);
}

static const struct test_case tests[] = {TEST(saving_the_originals_gives_the_same_bytes),
                                         TEST(quantized_results_are_the_plain_ones_quantized),
                                         TEST(a_later_bias_is_not_added),
                                         TEST(main_gradients),
                                         TEST(every_set_of_gradients),
                                         TEST(results_depend_on_random_numbers),
                                         TEST(any_order_gives_the_same_bytes)};
TEST_MAIN(tests)
