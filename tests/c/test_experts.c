/* test_experts.c: the operators mlp and moe against loops over experts, exactly and in double: every
 * activation, dtype and weight format, given scales; results do not depend on the initial bytes of memory, the
 * size of the workspace or floating-point settings; threads: test_experts_parallel.c. */
#include <fenv.h>
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "support_experts_reference.h"
#include "support_float.h"
#include "support_hiding.h"
#include "support_quant.h"
#include "support_spec.h"

static const enum opaq_element dtypes[] = {OPAQ_BF16, OPAQ_F16, OPAQ_F32};

/* Sizes that are multiples of no block or tile, and sizes that are multiples of all. */
static const struct experts_sizes ragged_mlp = {13, -1, 1, 37, 22};
static const struct experts_sizes ragged_moe = {13, 3, 5, 37, 22};
static const struct experts_sizes whole_mlp = {9, -1, 1, 128, 64};
static const struct experts_sizes whole_moe = {7, 2, 3, 128, 64};

static void check_sizes(const struct experts_sizes *size, const char *plan, enum opaq_element dtype,
                        const struct experts_given *given) {
    struct experts_layer layer = experts_layer_make(size, plan, dtype);
    experts_check_forward(&layer, plan, given);
    experts_layer_free(&layer);
}

/* ---- activations ---- */

static void every_activation(void) {
    static const char *const numbers[] = {
        "", " limit=2.5", " limit=1.25 alpha=0.75 beta=-0.5", " alpha=3", " limit=0.5", "", "", "", "", "", "",
        ""};
    for (int i = 0; i < OPAQ_ACTIVATION_COUNT; ++i) {
        for (int d = 0; d < 3; ++d) {
            char plan[96];
            (void)snprintf(plan, sizeof plan, "act=%s%s", opaq_activation_name((enum opaq_activation)i),
                           numbers[i]);
            check_sizes(&ragged_mlp, plan, dtypes[d], NULL);
            check_sizes(&ragged_moe, plan, dtypes[d], NULL);
        }
    }
}

static void biases_may_be_missing(void) {
    for (int i = 1; i < 4; ++i) {
        const struct experts_given given = {.no_gate_up_bias = i & 1, .no_down_bias = i & 2};
        check_sizes(&ragged_mlp, "act=swiglu_oai", OPAQ_BF16, &given);
        check_sizes(&ragged_moe, "", OPAQ_F32, &given);
    }
}

static void weights_may_have_wider_dtypes(void) {
    struct experts_layer layer = experts_layer_make(&ragged_moe, "act=gelu", OPAQ_BF16);
    struct experts_layer wide = experts_layer_make(&ragged_moe, "act=gelu", OPAQ_F32);
    struct tensor *const mine[] = {&layer.gate_up, &layer.down, &layer.gate_up_bias, &layer.down_bias};
    struct tensor *const theirs[] = {&wide.gate_up, &wide.down, &wide.gate_up_bias, &wide.down_bias};
    for (int i = 0; i < 4; ++i) {
        const struct tensor kept = *mine[i];
        *mine[i] = *theirs[i];
        *theirs[i] = kept;
    }
    experts_check_forward(&layer, "act=gelu", NULL);
    experts_check_forward(&layer, "act=gelu w=mxfp8", NULL);
    experts_layer_free(&layer);
    experts_layer_free(&wide);
}

/* ---- formats ---- */

/* Formats whose blocks are within a row, and formats whose blocks or swizzled scales cover several rows. */
static const char *const row_formats[] = {"nvfp4",
                                          "nvfp4+rowscaled",
                                          "mxfp8",
                                          "mxfp4",
                                          "fp8",
                                          "fp8.e5m2",
                                          "fp8row",
                                          "fp8blk1",
                                          "nvfp4+4over6",
                                          "nvfp4+both",
                                          "mxfp8.e5m2+rule=ocp",
                                          "nvfp4+rule=modelopt",
                                          "nvfp4+global+rowscaled+rule=compressed-tensors"};
static const char *const block_formats[] = {"fp8blk2",       "fp8blk2+pow2",       "mxfp8+2d",
                                            "mxfp4+2d",      "nvfp4+2d",           "nvfp4+swizzle",
                                            "mxfp8+swizzle", "mxfp4+swizzle+both", "nvfp4+rowscaled+swizzle"};
enum {
    ROW_FORMATS = sizeof row_formats / sizeof row_formats[0],
    BLOCK_FORMATS = sizeof block_formats / sizeof block_formats[0]
};

/* Quantized weights as inputs. */
static void check_given(const struct experts_sizes *size, const char *up, const char *down, const char *rest,
                        enum opaq_element dtype) {
    char plan[256];
    (void)snprintf(plan, sizeof plan, "gate_up_given=%s down_given=%s%s", up, down, rest);
    struct experts_layer layer = experts_layer_make(size, plan, dtype);
    const struct opaq_spec specs[2] = {spec_of(up), spec_of(down)};
    struct tensor weights[2] = {quantized(&layer.gate_up, &specs[0], NULL),
                                quantized(&layer.down, &specs[1], NULL)};
    const struct experts_given given = {.gate_up = &weights[0], .down = &weights[1]};
    experts_check_forward(&layer, plan, &given);
    tensor_free(&weights[0]);
    tensor_free(&weights[1]);
    experts_layer_free(&layer);
}

static void quantized_weights(void) {
    for (int i = 0; i < ROW_FORMATS; ++i) {
        const char *other = row_formats[(i + 3) % ROW_FORMATS];
        check_given(&ragged_mlp, row_formats[i], other, "", dtypes[i % 3]);
        check_given(&ragged_moe, row_formats[i], other, "", dtypes[(i + 1) % 3]);
        check_given(&ragged_moe, row_formats[i], row_formats[i], " x=mxfp8 h=nvfp4", dtypes[i % 3]);
    }
    for (int i = 0; i < BLOCK_FORMATS; ++i) {
        const char *other = block_formats[(i + 2) % BLOCK_FORMATS];
        check_given(&whole_mlp, block_formats[i], other, "", dtypes[i % 3]);
        check_given(&whole_moe, block_formats[i], other, " x=fp8 h=fp8blk1", dtypes[(i + 1) % 3]);
    }
    check_given(&ragged_mlp, "fp8blk2", "mxfp8+swizzle", "", OPAQ_BF16); /* one matrix has no next one */
    const struct experts_sizes one = {5, 2, 1, 37, 22};
    check_given(&one, "nvfp4+swizzle", "fp8blk2", "", OPAQ_BF16);
}

/* Inputs in bfloat16 and sums of a multiple of 128 terms, which CUDA can compute for all experts at once; more experts than tokens,
 * and many tokens for each. */
static void quantized_weights_of_many_terms(void) {
    static const struct experts_sizes few = {3, 2, 7, 256, 128};
    static const struct experts_sizes many = {40, 2, 3, 128, 256};
    for (int i = 0; i < ROW_FORMATS + BLOCK_FORMATS; ++i) {
        const char *format = i < ROW_FORMATS ? row_formats[i] : block_formats[i - ROW_FORMATS];
        check_given(&few, format, format, "", OPAQ_BF16);
        check_given(&many, format, format, i % 2 == 0 ? " act=swiglu_oai limit=1.5 alpha=1.25" : "", OPAQ_BF16);
    }
}

static void one_quantized_weight(void) {
    struct experts_layer layer = experts_layer_make(&ragged_moe, "", OPAQ_BF16);
    const struct opaq_spec spec = spec_of("nvfp4");
    struct tensor up = quantized(&layer.gate_up, &spec, NULL);
    struct tensor down = quantized(&layer.down, &spec, NULL);
    const struct experts_given first = {.gate_up = &up};
    const struct experts_given second = {.down = &down};
    experts_check_forward(&layer, "gate_up_given=nvfp4 x=nvfp4", &first);
    experts_check_forward(&layer, "down_given=nvfp4 act=silu_step limit=1", &second);
    tensor_free(&up);
    tensor_free(&down);
    experts_layer_free(&layer);
}

static void everything_quantized_in_the_call(void) {
    for (int i = 0; i < ROW_FORMATS + BLOCK_FORMATS; ++i) {
        const char *format = i < ROW_FORMATS ? row_formats[i] : block_formats[i - ROW_FORMATS];
        const char *other = row_formats[(i + 4) % ROW_FORMATS];
        char plan[256];
        (void)snprintf(plan, sizeof plan, "x=%s h=%s w=%s", format, other, format);
        check_sizes(&ragged_mlp, plan, dtypes[i % 3], NULL);
        check_sizes(&ragged_moe, plan, dtypes[i % 3], NULL); /* each expert's matrices separately */
        (void)snprintf(plan, sizeof plan, "h=%s act=swiglu_oai weights=input", format);
        check_sizes(&ragged_moe, plan, dtypes[(i + 1) % 3], NULL);
    }
}

/* Each expert has separate random numbers for each of its tensors. */
static void stochastic_rounding(void) {
    static const int64_t random[2] = {0x123456789ABCDEF, 5000};
    static const char *const plans[] = {"x=nvfp4+sr", "h=mxfp4+sr", "w=fp8+sr",
                                        "x=fp8row+sr h=nvfp4+sr w=mxfp8+sr"};
    const struct experts_given given = {.random = random};
    for (int i = 0; i < 4; ++i) {
        check_sizes(&ragged_mlp, plans[i], dtypes[i % 3], &given);
        check_sizes(&ragged_moe, plans[i], dtypes[i % 3], &given);
    }
}

/* Scales beyond a tensor's rows and columns are zero by definition and are not read. */
static void padding_is_not_read(void) {
    static const char *const formats[] = {"nvfp4", "mxfp8", "mxfp4", "nvfp4+swizzle", "mxfp8+swizzle"};
    for (int f = 0; f < 5; ++f) {
        const struct experts_sizes size = {6, 2, f < 3 ? 3 : 1, 37, 22};
        const struct opaq_spec spec = spec_of(formats[f]);
        char plan[96];
        (void)snprintf(plan, sizeof plan, "gate_up_given=%s down_given=%s", formats[f], formats[f]);
        struct experts_layer layer = experts_layer_make(&size, plan, OPAQ_BF16);
        for (int64_t i = 0; i < 200; ++i) { /* so that no block is all zero */
            tensor_set(&layer.x, i % 6, i % 37, 1.0f);
        }
        struct tensor weights[2] = {quantized(&layer.gate_up, &spec, NULL),
                                    quantized(&layer.down, &spec, NULL)};
        const struct experts_given given = {.gate_up = &weights[0], .down = &weights[1]};
        struct op_result expected = experts_call("moe", &layer, plan, &given);
        int64_t poisoned = 0;
        for (int w = 0; w < 2; ++w) {
            const int scale = opaq_proto_find(&weights[w].view.proto, OPAQ_ROLE_SCALE, OPAQ_ROWWISE);
            uint8_t *bytes = weights[w].view.buffer[scale].data;
            for (size_t i = 0; i < weights[w].view.buffer[scale].bytes; ++i) {
                poisoned += bytes[i] == 0;
                bytes[i] = bytes[i] == 0 ? 0x7F : bytes[i]; /* a block of normal numbers cannot have this
                                                             * scale */
            }
        }
        struct op_result result = experts_call("moe", &layer, plan, &given);
        CHECK(poisoned > 0);
        experts_check_same(&result, &expected, formats[f]);
        op_result_free(&expected);
        op_result_free(&result);
        tensor_free(&weights[0]);
        tensor_free(&weights[1]);
        experts_layer_free(&layer);
    }
}

/* ---- given scales ---- */

static void given_scales(void) {
    static const float scales[5] = {3.0f, 0.5f, 17.0f, 1.0f, 40.0f};
    static const char *const plans[] = {"x=fp8+delayed h=fp8.e5m2+delayed", "x=nvfp4 h=nvfp4+rule=modelopt",
                                        "x=fp8 h=fp8",
                                        "x=fp8+delayed+rule=compressed-tensors h=nvfp4+global+rule=modelopt"};
    for (int i = 0; i < 4; ++i) {
        for (int count = 1; count <= 5; count += 4) {
            const struct experts_given given = {.input_scale = scales,
                                                .hidden_scale = scales + (count == 1 ? 2 : 0),
                                                .input_scales = count,
                                                .hidden_scales = count};
            check_sizes(&ragged_moe, plans[i], dtypes[i % 3], &given);
            if (count == 1) {
                check_sizes(&ragged_mlp, plans[i], dtypes[i % 3], &given);
            }
        }
        const struct experts_given mixed = {
            .input_scale = scales, .hidden_scale = scales + 1, .input_scales = 5, .hidden_scales = 1};
        check_sizes(&ragged_moe, plans[i], dtypes[i % 3], &mixed);
    }
    const struct experts_given one = {.hidden_scale = scales, .hidden_scales = 1};
    check_sizes(&ragged_mlp, "h=nvfp4", OPAQ_BF16, &one);
}

/* ---- settings ---- */

static void settings_do_not_matter(void) {
    static const char *const plans[] = {"act=gelu", "x=nvfp4 h=fp8 w=mxfp8", "weights=input act=gelu_tanh"};
    const struct float_setting before = float_setting_get();
    for (int p = 0; p < 3; ++p) {
        struct experts_layer layer = experts_layer_make(&ragged_moe, plans[p], OPAQ_F32);
        for (int64_t t = 0; t < 6; ++t) {
            for (int64_t c = 0; c < 37; ++c) {
                tensor_set(&layer.x, t, c, 0x1p-135f * (float)(c + 1));
            }
            tensor_set(&layer.weights, t, 1, 0x1p-140f);
        }
        struct op_result expected = experts_call("moe_forward", &layer, plans[p], NULL);
        (void)fesetround(FE_UPWARD);
        (void)float_setting_flush_to_zero();
        struct op_result result = experts_call("moe_forward", &layer, plans[p], NULL);
        float_setting_put(before);
        experts_check_same(&result, &expected, plans[p]);
        op_result_free(&expected);
        op_result_free(&result);
        experts_layer_free(&layer);
    }
}

/* Both products may be in any order. The CPU has one. */
static void any_order_gives_the_same_bytes(void) {
    static const char *const plans[] = {"order=any", "x=nvfp4 h=fp8 w=mxfp8 order=any"};
    static const char *const fixed[] = {"", "x=nvfp4 h=fp8 w=mxfp8"};
    for (int p = 0; p < 2; ++p) {
        struct experts_layer layer = experts_layer_make(&ragged_moe, plans[p], OPAQ_BF16);
        (void)hiding_any_order();
        struct op_result expected = experts_call("moe_forward", &layer, fixed[p], NULL);
        CHECK_EQ_INT(hiding_any_order(), 0);
        struct op_result result = experts_call("moe_forward", &layer, plans[p], NULL);
        CHECK_EQ_INT(hiding_any_order(), 2);
        experts_check_same(&result, &expected, plans[p]);
        op_result_free(&expected);
        op_result_free(&result);
        experts_layer_free(&layer);
    }
}

static const struct test_case tests[] = {TEST(every_activation),
                                         TEST(biases_may_be_missing),
                                         TEST(weights_may_have_wider_dtypes),
                                         TEST(quantized_weights),
                                         TEST(quantized_weights_of_many_terms),
                                         TEST(one_quantized_weight),
                                         TEST(everything_quantized_in_the_call),
                                         TEST(stochastic_rounding),
                                         TEST(padding_is_not_read),
                                         TEST(given_scales),
                                         TEST(settings_do_not_matter),
                                         TEST(any_order_gives_the_same_bytes)};
TEST_MAIN(tests)
