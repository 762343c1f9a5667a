/* test_linear_given.c: quantized operands, in every usage: given by the caller, cached by an earlier
 * forward, or dequantized again in the backward. Compared with double arithmetic on the copies that a
 * product must read. */
#include <stdlib.h>

#include "check.h"
#include "support_linear.h"
#include "support_product.h"
#include "support_spec.h"

static const int usages[] = {OPAQ_ROWWISE, OPAQ_COLUMNWISE, OPAQ_BOTH};

static struct tensor quantize_for(const struct tensor *x, const char *text, int usage,
                                  enum linear_stream stream) {
    return linear_quantized(x, text, usage, stream, 1.0f);
}

/* The copies that the products of a step read: for y, for dx, for dw. */
struct operands {
    struct product_matrix y[2], dx[2], dw[2];
};

static struct operands operands_of(const struct tensor *x, const struct tensor *w, const struct tensor *dy) {
    return (struct operands){{product_matrix_of(x, OPAQ_ROWWISE), product_matrix_of(w, OPAQ_ROWWISE)},
                             {product_matrix_of(dy, OPAQ_ROWWISE), product_matrix_of(w, OPAQ_COLUMNWISE)},
                             {product_matrix_of(dy, OPAQ_COLUMNWISE), product_matrix_of(x, OPAQ_COLUMNWISE)}};
}

static void operands_check_and_free(struct operands *operands, const struct linear_step *step,
                                    const char *what) {
    const struct opaq_tensor y = op_result_row(&step->forward, LINEAR_Y).tensor[0];
    const struct opaq_tensor dx = op_result_row(&step->backward, LINEAR_DX).tensor[0];
    const struct opaq_tensor dw = op_result_row(&step->backward, LINEAR_DW).tensor[0];
    if (step->backward.outputs.count > 0) {
        (void)product_check(&y, &operands->y[0], &operands->y[1], NULL, NULL, what);
        (void)product_check(&dx, &operands->dx[0], &operands->dx[1], NULL, NULL, what);
        (void)product_check(&dw, &operands->dw[0], &operands->dw[1], NULL, NULL, what);
    }
    for (int i = 0; i < 2; ++i) {
        product_matrix_free(&operands->y[i]);
        product_matrix_free(&operands->dx[i]);
        product_matrix_free(&operands->dw[i]);
    }
}

/* Two columnwise copies with the same transform are multiplied without undoing it. */
static void leave_transformed(const struct linear_layer *layer, const struct linear_recipe *recipe,
                              struct operands *operands) {
    const struct opaq_spec p = spec_of(recipe->x);
    const struct opaq_spec q = spec_of(recipe->dy);
    if ((p.options & q.options & OPAQ_HADAMARD) == 0 || p.hadamard_mask != q.hadamard_mask) {
        return;
    }
    struct tensor x = quantize_for(&layer->x, recipe->x, OPAQ_COLUMNWISE, LINEAR_STREAM_X);
    struct tensor dy = quantize_for(&layer->dy, recipe->dy, OPAQ_COLUMNWISE, LINEAR_STREAM_DY);
    product_matrix_free(&operands->dw[0]);
    product_matrix_free(&operands->dw[1]);
    operands->dw[0] = product_matrix_transformed(&dy);
    operands->dw[1] = product_matrix_transformed(&x);
    tensor_free(&x);
    tensor_free(&dy);
}

/* ---- all operands quantized by the caller ---- */

static void check_given(const struct linear_layer *layer, const struct linear_recipe *recipe, int x_usage,
                        int w_usage, int dy_usage) {
    struct tensor x = quantize_for(&layer->x, recipe->x, x_usage, LINEAR_STREAM_X);
    struct tensor w = quantize_for(&layer->w, recipe->w, w_usage, LINEAR_STREAM_W);
    struct tensor dy = quantize_for(&layer->dy, recipe->dy, dy_usage, LINEAR_STREAM_DY);
    const struct linear_given given = {.x = &x, .w = &w, .dy = &dy, .no_bias = true};
    struct linear_text plan;
    (void)snprintf(plan.text, sizeof plan.text, "x_given=%.128s w_given=%.128s dy_given=%.128s grad=xwb",
                   linear_with_usage(recipe->x, x_usage).text, linear_with_usage(recipe->w, w_usage).text,
                   linear_with_usage(recipe->dy, dy_usage).text);
    struct linear_step step = linear_step(layer, plan.text, &given);
    struct operands operands = operands_of(&x, &w, &dy);
    if (x_usage & dy_usage & OPAQ_COLUMNWISE) {
        leave_transformed(layer, recipe, &operands);
    }
    CHECK_EQ_INT(op_result_row(&step.forward, LINEAR_X_SAVED).count, 0);
    CHECK_EQ_INT(op_result_row(&step.forward, LINEAR_W_SAVED).count, 0);
    const struct opaq_tensor dbias = op_result_row(&step.backward, LINEAR_DBIAS).tensor[0];
    struct product_matrix sums = product_matrix_whole(&dy, OPAQ_COLUMNWISE);
    (void)product_check_sums(&dbias, &sums, plan.text);
    operands_check_and_free(&operands, &step, plan.text);
    product_matrix_free(&sums);
    tensor_free(&x);
    tensor_free(&w);
    tensor_free(&dy);
    linear_step_free(&step);
}

static void all_three_quantized(void) {
    struct linear_layer layer = linear_layer_make(37, 53, 70, OPAQ_BF16);
    for (int i = 0; i < linear_recipe_count; ++i) {
        const struct linear_recipe *recipe = &linear_recipes[i];
        for (int u = 0; u < 9 && recipe->x[0] && recipe->w[0] && recipe->dy[0]; ++u) {
            check_given(&layer, recipe, usages[u % 3], usages[u / 3], usages[(u + u / 3) % 3]);
        }
    }
    linear_layer_free(&layer);
}

/* ---- only the weight is quantized ---- */

static void weight_only(void) {
    static const char *const specs[] = {"fp8",   "fp8row",    "fp8blk2",         "mxfp8",        "mxfp4+2d",
                                        "nvfp4", "nvfp4+rht", "nvfp4+rowscaled", "nvfp4+swizzle"};
    static const struct {
        int64_t m, n, k;
        enum opaq_element dtype;
    } sizes[] = {{37, 53, 70, OPAQ_BF16},
                 {1, 40, 33, OPAQ_F32},
                 {5, 0, 7, OPAQ_F16},
                 {0, 9, 4, OPAQ_BF16},
                 {3, 4, 0, OPAQ_F32}};
    for (int i = 0; i < 9 * 5; ++i) {
        struct linear_layer layer =
            linear_layer_make(sizes[i % 5].m, sizes[i % 5].n, sizes[i % 5].k, sizes[i % 5].dtype);
        for (int u = 0; u < 3; ++u) {
            struct tensor w = quantize_for(&layer.w, specs[i / 5], usages[u], LINEAR_STREAM_W);
            const struct linear_given given = {.w = &w, .no_bias = true};
            struct linear_text plan;
            (void)snprintf(plan.text, sizeof plan.text, "w_given=%.128s grad=xw",
                           linear_with_usage(specs[i / 5], usages[u]).text);
            struct linear_step step = linear_step(&layer, plan.text, &given);
            struct operands operands = operands_of(&layer.x, &w, &layer.dy);
            operands_check_and_free(&operands, &step, plan.text);
            tensor_free(&w);
            linear_step_free(&step);
        }
        linear_layer_free(&layer);
    }
}

/* ---- cached weights ---- */

/* A quantized tensor with the buffers of an output row. */
static struct tensor tensor_of_row(const struct op_result *result, int output, const struct tensor *like) {
    struct tensor made = tensor_make_proto(&like->view.proto);
    const struct op_tensors row = op_result_row(result, output);
    for (int i = 0; i < row.count; ++i) {
        memcpy(made.view.buffer[i].data, row.tensor[i].data, tensor_bytes(&made, i));
    }
    return made;
}

static void check_cache(const struct linear_layer *layer, const struct linear_recipe *recipe, const char *mode,
                        int usage) {
    char rest[64];
    (void)snprintf(rest, sizeof rest, "%s cache", mode);
    const struct linear_text plain = linear_plan(recipe, mode);
    const struct linear_text caching = linear_plan(recipe, rest);
    struct linear_step expected = linear_step(layer, plain.text, &linear_seeded);
    struct linear_step first = linear_step(layer, caching.text, &linear_seeded);
    struct tensor made = quantize_for(&layer->w, recipe->w, usage, LINEAR_STREAM_W);
    if (!linear_check_buffers(&first.forward, LINEAR_W_SAVED, &made, caching.text)) {
        exit(1);
    }
    struct tensor cached = tensor_of_row(&first.forward, LINEAR_W_SAVED, &made);
    struct linear_given given = linear_seeded;
    given.w = &cached;
    const struct linear_recipe without = {recipe->x, "", recipe->dy};
    char again[256];
    (void)snprintf(again, sizeof again, "%s w_given=%.128s", mode, linear_with_usage(recipe->w, usage).text);
    const struct linear_text plan = linear_plan(&without, again);
    struct linear_step next = linear_step(layer, plan.text, &given);
    linear_check_same(&first.forward, &expected.forward, LINEAR_Y, caching.text);
    linear_check_same(&next.forward, &expected.forward, LINEAR_Y, plan.text);
    for (int g = 0; g < 3; ++g) {
        linear_check_same(&first.backward, &expected.backward, g, caching.text);
        if (strstr(mode, "high_precision") == NULL || g != LINEAR_DX) { /* the plain weight is not available
                                                                         * then */
            linear_check_same(&next.backward, &expected.backward, g, plan.text);
        }
    }
    tensor_free(&made);
    tensor_free(&cached);
    linear_step_free(&expected);
    linear_step_free(&first);
    linear_step_free(&next);
}

static void a_cached_weight_gives_the_same(void) {
    struct linear_layer layer = linear_layer_make(37, 53, 70, OPAQ_BF16);
    for (int i = 0; i < linear_recipe_count; ++i) {
        if (linear_recipes[i].w[0] != '\0') {
            check_cache(&layer, &linear_recipes[i], "grad=xwb", OPAQ_BOTH);
            check_cache(&layer, &linear_recipes[i], "grad=xwb backward=dequantized", OPAQ_ROWWISE);
            check_cache(&layer, &linear_recipes[i], "grad=xwb backward=high_precision", OPAQ_ROWWISE);
        }
    }
    linear_layer_free(&layer);
}

/* ---- other backward modes ---- */

/* dy, x and w unchanged: the bytes of the plan without quantizers. */
static void high_precision_is_the_plain_backward(void) {
    struct linear_layer layer = linear_layer_make(37, 53, 70, OPAQ_BF16);
    struct linear_step plain = linear_step(&layer, "grad=xwb", NULL);
    for (int i = 0; i < linear_recipe_count; ++i) {
        const struct linear_text plan = linear_plan(&linear_recipes[i], "grad=xwb backward=high_precision");
        struct linear_step step = linear_step(&layer, plan.text, &linear_seeded);
        for (int g = 0; g < 3; ++g) {
            linear_check_same(&step.backward, &plain.backward, g, plan.text);
        }
        linear_step_free(&step);
    }
    linear_step_free(&plain);
    linear_layer_free(&layer);
}

/* dy unchanged; x and w as the forward multiplied them: their rowwise copies, whether or not there are
 * columnwise ones. */
static void dequantized_backward_uses_the_forward_operands(void) {
    struct linear_layer layer = linear_layer_make(37, 53, 70, OPAQ_BF16);
    for (int i = 0; i < linear_recipe_count; ++i) {
        const struct linear_recipe *recipe = &linear_recipes[i];
        struct tensor x = quantize_for(&layer.x, recipe->x, OPAQ_ROWWISE, LINEAR_STREAM_X);
        struct tensor w = quantize_for(&layer.w, recipe->w, OPAQ_ROWWISE, LINEAR_STREAM_W);
        const struct linear_text plan = linear_plan(recipe, "grad=xwb backward=dequantized");
        struct linear_given given = linear_seeded;
        given.no_bias = true;
        struct linear_step step = linear_step(&layer, plan.text, &given);
        struct operands operands = operands_of(&x, &w, &layer.dy);
        operands_check_and_free(&operands, &step, plan.text);
        for (int u = 0; u < 4 && recipe->x[0] && recipe->w[0];
             ++u) { /* the same if they were given with both copies */
            struct tensor x_both =
                quantize_for(&layer.x, recipe->x, u & 1 ? OPAQ_BOTH : OPAQ_ROWWISE, LINEAR_STREAM_X);
            struct tensor w_both =
                quantize_for(&layer.w, recipe->w, u & 2 ? OPAQ_BOTH : OPAQ_ROWWISE, LINEAR_STREAM_W);
            struct linear_text other;
            (void)snprintf(other.text, sizeof other.text, "x_given=%.128s w_given=%.128s grad=xwb backward=%s",
                           linear_with_usage(recipe->x, x_both.view.proto.spec.usage).text,
                           linear_with_usage(recipe->w, w_both.view.proto.spec.usage).text,
                           u & 1 ? "high_precision" : "dequantized");
            const struct linear_given both = {.x = &x_both, .w = &w_both, .no_bias = true};
            struct linear_step same = linear_step(&layer, other.text, &both);
            linear_check_same(&same.forward, &step.forward, LINEAR_Y, other.text);
            for (int g = 0; g < 3; ++g) {
                linear_check_same(&same.backward, &step.backward, g, other.text);
            }
            tensor_free(&x_both);
            tensor_free(&w_both);
            linear_step_free(&same);
        }
        tensor_free(&x);
        tensor_free(&w);
        linear_step_free(&step);
    }
    linear_layer_free(&layer);
}

static const struct test_case tests[] = {
    TEST(all_three_quantized), TEST(weight_only), TEST(a_cached_weight_gives_the_same),
    TEST(high_precision_is_the_plain_backward), TEST(dequantized_backward_uses_the_forward_operands)};
TEST_MAIN(tests)
