/* test_experts.c: the operators mlp and moe against loops over experts, bit for bit and in double: every activation,
 * dtype and weight format, given scales, routings of every kind, slices; memory beforehand and the size of the workspace
 * do not count, nor do threads, strides, ranks and floating-point settings. */
#include <fenv.h>
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "support_experts_reference.h"
#include "support_float.h"
#include "support_quant.h"
#include "support_spec.h"

static const enum opaq_element dtypes[] = {OPAQ_BF16, OPAQ_F16, OPAQ_F32};
static const struct experts_given nothing;

/* Sizes that are no multiples of anything; and those that every block and tile fits into. */
static const struct experts_sizes ragged_mlp = {13, -1, 1, 37, 22};
static const struct experts_sizes ragged_moe = {13, 3, 5, 37, 22};
static const struct experts_sizes whole_mlp = {9, -1, 1, 128, 64};
static const struct experts_sizes whole_moe = {7, 2, 3, 128, 64};

static bool is_plain(const char *plan) {
    const struct opaq_experts_plan parsed = experts_plan_of(plan);
    const struct opaq_form forms[] = {parsed.x, parsed.h, parsed.w, parsed.gate_up_given, parsed.down_given};
    bool plain = true;
    for (int i = 0; i < 5; ++i) {
        plain = plain && forms[i].kind == OPAQ_FORM_PLAIN;
    }
    return plain;
}

/* ---- one call, checked ---- */

/* Both operators' results; the inference operator has scales and the training operator random numbers. */
static void check_layer(const struct experts_layer *layer, const char *plan,
                        const struct experts_given *given) {
    struct reference_forward expected = reference_forward(layer, plan, given);
    given = given == NULL ? &nothing : given;
    if (given->random == NULL) {
        const char *op = layer->is_routed ? "moe" : "mlp";
        struct experts_arguments arguments;
        struct op_result result = experts_call(op, layer, plan, given);
        experts_arguments(op, layer, plan, given, &arguments);
        if (CHECK_EQ_INT(result.outputs.count, 1)) {
            CHECK_BYTES(result.outputs.tensor[0].data, expected.y.view.buffer[0].data,
                        op_tensor_bytes(&result.outputs.tensor[0]), "%s, \"%s\"", op, plan);
            experts_check_again(op, arguments.value, &result, plan);
        }
        op_result_free(&result);
    }
    if (given->input_scale == NULL && given->hidden_scale == NULL) {
        const char *op = layer->is_routed ? "moe_forward" : "mlp_forward";
        struct experts_arguments arguments;
        struct op_result result = experts_call(op, layer, plan, given);
        experts_arguments(op, layer, plan, given, &arguments);
        if (CHECK_EQ_INT(result.outputs.count, 2)) {
            CHECK_BYTES(result.outputs.tensor[0].data, expected.y.view.buffer[0].data,
                        op_tensor_bytes(&result.outputs.tensor[0]), "%s, \"%s\", y", op, plan);
            CHECK_BYTES(result.outputs.tensor[1].data, expected.h.view.buffer[0].data,
                        op_tensor_bytes(&result.outputs.tensor[1]), "%s, \"%s\", h", op, plan);
            experts_check_again(op, arguments.value, &result, plan);
        }
        if (result.outputs.count == 2 && is_plain(plan)) {
            struct reference_numbers numbers = reference_forward_numbers(layer, plan, given);
            (void)numbers_check(&result.outputs.tensor[0], &numbers.y, plan);
            (void)numbers_check(&result.outputs.tensor[1], &numbers.h, plan);
            reference_numbers_free(&numbers);
        }
        op_result_free(&result);
    }
    reference_forward_free(&expected);
}

static void check_sizes(const struct experts_sizes *size, const char *plan, enum opaq_element dtype,
                        const struct experts_given *given) {
    struct experts_layer layer = experts_layer_make(size, plan, dtype);
    check_layer(&layer, plan, given);
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

static void weights_may_be_wider(void) {
    struct experts_layer layer = experts_layer_make(&ragged_moe, "act=gelu", OPAQ_BF16);
    struct experts_layer wide = experts_layer_make(&ragged_moe, "act=gelu", OPAQ_F32);
    struct tensor *const mine[] = {&layer.gate_up, &layer.down, &layer.gate_up_bias, &layer.down_bias};
    struct tensor *const theirs[] = {&wide.gate_up, &wide.down, &wide.gate_up_bias, &wide.down_bias};
    for (int i = 0; i < 4; ++i) {
        const struct tensor kept = *mine[i];
        *mine[i] = *theirs[i];
        *theirs[i] = kept;
    }
    check_layer(&layer, "act=gelu", NULL);
    check_layer(&layer, "act=gelu w=mxfp8", NULL);
    experts_layer_free(&layer);
    experts_layer_free(&wide);
}

/* ---- formats ---- */

/* Those whose rows stand by themselves, and those of which some share a scale. */
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

/* Weights that come quantized. */
static void check_given(const struct experts_sizes *size, const char *up, const char *down, const char *rest,
                        enum opaq_element dtype) {
    char plan[256];
    (void)snprintf(plan, sizeof plan, "gate_up_given=%s down_given=%s%s", up, down, rest);
    struct experts_layer layer = experts_layer_make(size, plan, dtype);
    const struct opaq_spec specs[2] = {spec_of(up), spec_of(down)};
    struct tensor weights[2] = {quantized(&layer.gate_up, &specs[0], NULL),
                                quantized(&layer.down, &specs[1], NULL)};
    const struct experts_given given = {.gate_up = &weights[0], .down = &weights[1]};
    check_layer(&layer, plan, &given);
    tensor_free(&weights[0]);
    tensor_free(&weights[1]);
    experts_layer_free(&layer);
}

static void weights_that_come_quantized(void) {
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

static void one_of_the_weights_comes_quantized(void) {
    struct experts_layer layer = experts_layer_make(&ragged_moe, "", OPAQ_BF16);
    const struct opaq_spec spec = spec_of("nvfp4");
    struct tensor up = quantized(&layer.gate_up, &spec, NULL);
    struct tensor down = quantized(&layer.down, &spec, NULL);
    const struct experts_given first = {.gate_up = &up};
    const struct experts_given second = {.down = &down};
    check_layer(&layer, "gate_up_given=nvfp4 x=nvfp4", &first);
    check_layer(&layer, "down_given=nvfp4 act=silu_step limit=1", &second);
    tensor_free(&up);
    tensor_free(&down);
    experts_layer_free(&layer);
}

static void everything_quantized_here(void) {
    for (int i = 0; i < ROW_FORMATS + BLOCK_FORMATS; ++i) {
        const char *format = i < ROW_FORMATS ? row_formats[i] : block_formats[i - ROW_FORMATS];
        const char *other = row_formats[(i + 4) % ROW_FORMATS];
        char plan[256];
        (void)snprintf(plan, sizeof plan, "x=%s h=%s w=%s", format, other, format);
        check_sizes(&ragged_mlp, plan, dtypes[i % 3], NULL);
        check_sizes(&ragged_moe, plan, dtypes[i % 3], NULL); /* each expert's matrices by themselves */
        (void)snprintf(plan, sizeof plan, "h=%s act=swiglu_oai weights=input", format);
        check_sizes(&ragged_moe, plan, dtypes[(i + 1) % 3], NULL);
    }
}

/* Each expert has numbers of its own for each of its tensors. */
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

/* What is beyond a tensor's rows and columns in its scales is zero by definition, and not read. */
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
                bytes[i] = bytes[i] == 0 ? 0x7F : bytes[i]; /* a block of normal numbers has no such scale */
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

/* ---- scales that are given ---- */

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

/* ---- routings ---- */

static void check_ids(const struct experts_sizes *size, const char *plan, int64_t (*id)(int64_t slot)) {
    struct experts_layer layer = experts_layer_make(size, plan, OPAQ_BF16);
    for (int64_t s = 0; s < size->tokens * size->choices; ++s) {
        layer.ids[s] = id(s);
    }
    check_layer(&layer, plan, NULL);
    experts_layer_free(&layer);
}

static int64_t always_the_last(int64_t slot) { return (void)slot, 4; }
static int64_t always_nobody(int64_t slot) { return slot % 2 ? -1 : 5; }
static int64_t one_slot_only(int64_t slot) { return slot == 17 ? 2 : -1; }
static int64_t twice_the_same(int64_t slot) { return slot / 3 % 5; }
static int64_t descending(int64_t slot) { return 4 - slot % 5; }

static void routings_of_every_kind(void) {
    static int64_t (*const ids[])(int64_t slot) = {always_the_last, always_nobody, one_slot_only,
                                                   twice_the_same, descending};
    static const char *const plans[] = {"", "x=nvfp4 h=nvfp4 w=nvfp4", "weights=input act=swiglu_oai",
                                        "x=fp8 weights=input"};
    for (int i = 0; i < 5; ++i) {
        for (int p = 0; p < 4; ++p) {
            check_ids(&ragged_moe, plans[p], ids[i]);
        }
    }
}

static void sizes_at_the_edges(void) {
    static const struct experts_sizes sizes[] = {
        {1, 1, 1, 1, 1},   {0, 2, 3, 16, 8}, {4, 0, 3, 16, 8}, {4, 2, 0, 16, 8},  {4, 2, 3, 0, 8},
        {4, 2, 3, 16, 0},  {0, 0, 0, 0, 0},  {1, 9, 2, 16, 8}, {70, 1, 2, 16, 8}, {33, 3, 1, 17, 300},
        {1, 1, 100, 8, 4}, {0, -1, 1, 8, 4}, {3, -1, 1, 0, 4}, {3, -1, 1, 8, 0}};
    static const char *const plans[] = {"", "x=nvfp4 h=fp8 w=mxfp8", "act=swiglu_oai weights=input h=fp8row",
                                        "act=gelu_no_mul"};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i) {
        for (int p = 0; p < 4; ++p) {
            if (sizes[i].choices >= 0 || p != 2) {
                check_sizes(&sizes[i], plans[p], OPAQ_BF16, NULL);
            }
        }
    }
}

/* More rows than are added up at a time, by 1 to 33: the last lot is small and works in another way. */
static void groups_longer_than_a_lot(void) {
    static const int64_t rows[] = {1023, 1024, 1025, 1056, 1057, 2080};
    for (int i = 0; i < 6; ++i) {
        const struct experts_sizes size = {rows[i], 1, 1, 8, 8};
        struct experts_layer layer = experts_layer_make(&size, "", OPAQ_BF16);
        memset(layer.ids, 0, (size_t)rows[i] * sizeof *layer.ids);
        check_layer(&layer, "", NULL);
        check_layer(&layer, "x=nvfp4 h=mxfp8 w=fp8", NULL);
        experts_layer_free(&layer);
    }
}

/* Two stacks that make a whole: each by itself, and together the same numbers in double. */
static void slices(void) {
    const struct experts_sizes size = {11, 3, 3, 37, 22};
    static const char *const plans[] = {
        "experts=8 first=2", "experts=8 first=5", "experts=8", "first=5", "experts=2147483647 first=1 x=fp8",
        "experts=3"};
    for (int p = 0; p < 6; ++p) {
        struct experts_layer layer = experts_layer_make(&size, plans[p], OPAQ_BF16);
        const struct opaq_experts_plan plan = experts_plan_of(plans[p]);
        const int64_t total = plan.experts != 0 ? plan.experts : plan.first + 3;
        for (int64_t s = 0; s < 33; ++s) {
            layer.ids[s] = s % 10 == 3 ? total : s % 10 == 6 ? -1 : (s * 5) % (total < 8 ? total : 8);
        }
        layer.ids[7] = total - 1;
        check_layer(&layer, plans[p], NULL);
        experts_layer_free(&layer);
    }
}

/* ---- strides, ranks, dtypes of what the router gives ---- */

/* The same ids and weights in other memory. */
static void routers_may_lie_anywhere(void) {
    enum { TOKENS = 13, CHOICES = 3 };
    struct experts_layer layer = experts_layer_make(&ragged_moe, "", OPAQ_BF16);
    static int64_t wide[TOKENS * 10];
    static int32_t narrow[CHOICES * 20];
    static float weights[CHOICES * 15];
    for (int64_t s = 0; s < TOKENS * CHOICES; ++s) {
        const int64_t t = s / CHOICES;
        const int64_t k = s % CHOICES;
        wide[t * 10 + 3 * k] = layer.ids[s];
        narrow[k * 20 + t] = (int32_t)layer.ids[s]; /* turned */
        weights[k * 15 + t] = tensor_get(&layer.weights, t, k);
    }
    const struct opaq_tensor ids[] = {
        {.data = wide, .dtype = OPAQ_DTYPE_I64, .rank = 2, .shape = {TOKENS, CHOICES}, .strides = {10, 3}},
        {.data = narrow, .dtype = OPAQ_DTYPE_I32, .rank = 2, .shape = {TOKENS, CHOICES}, .strides = {1, 20}},
        {.data = wide,
         .dtype = OPAQ_DTYPE_I64,
         .rank = 3,
         .shape = {1, TOKENS, CHOICES},
         .strides = {99, 10, 3}}};
    struct opaq_tensor turned = {
        .data = weights, .dtype = OPAQ_DTYPE_F32, .rank = 2, .shape = {TOKENS, CHOICES}, .strides = {1, 15}};
    static const char *const plans[] = {"", "x=nvfp4 w=mxfp8", "weights=input"};
    for (int p = 0; p < 3; ++p) {
        struct op_result expected = experts_call("moe", &layer, plans[p], NULL);
        for (int i = 0; i < 3; ++i) {
            turned.rank = ids[i].rank;
            turned.shape[0] = ids[i].shape[0];
            turned.shape[1] = ids[i].shape[1];
            turned.shape[2] = CHOICES;
            turned.strides[i == 2] = 1;
            turned.strides[1 + (i == 2)] = 15;
            const struct experts_given given = {.ids = &ids[i], .weights = &turned};
            struct op_result result = experts_call("moe", &layer, plans[p], &given);
            experts_check_same(&result, &expected, plans[p]);
            op_result_free(&result);
        }
        op_result_free(&expected);
    }
    experts_layer_free(&layer);
}

/* Router weights of two bytes count as the float32 numbers they are; one memory cell may stand for all of them. */
static void router_weights_of_every_dtype(void) {
    for (int d = 0; d < 2; ++d) {
        struct experts_layer layer = experts_layer_make(&ragged_moe, "", OPAQ_F32);
        struct tensor narrow = experts_converted(&layer.weights, dtypes[d]);
        struct tensor wide = experts_converted(&narrow, OPAQ_F32);
        const struct opaq_tensor narrow_tensor = op_tensors_of(&narrow).tensor[0];
        const struct experts_given given = {.weights = &narrow_tensor};
        tensor_free(&layer.weights);
        layer.weights = wide;
        struct op_result expected = experts_call("moe", &layer, "weights=input", NULL);
        struct op_result result = experts_call("moe", &layer, "weights=input", &given);
        experts_check_same(&result, &expected, "router weights of two bytes");
        op_result_free(&expected);
        op_result_free(&result);
        struct opaq_tensor same = narrow_tensor;
        same.strides[0] = same.strides[1] = 0;
        const struct experts_given one = {.weights = &same};
        for (int64_t s = 0; s < 39; ++s) {
            tensor_set(&layer.weights, s / 3, s % 3, tensor_get(&narrow, 0, 0));
        }
        expected = experts_call("moe", &layer, "", NULL);
        result = experts_call("moe", &layer, "", &one);
        experts_check_same(&result, &expected, "one weight for all");
        op_result_free(&expected);
        op_result_free(&result);
        tensor_free(&narrow);
        experts_layer_free(&layer);
    }
}

static void ranks_and_rows_apart(void) {
    enum { ROWS = 12, HIDDEN = 24 };
    static const char *const plans[] = {"", "x=nvfp4 h=fp8 w=mxfp4"};
    for (int is_moe = 0; is_moe < 2; ++is_moe) {
        const struct experts_sizes size = {ROWS, is_moe ? 2 : -1, is_moe ? 4 : 1, HIDDEN, 16};
        for (int p = 0; p < 2; ++p) {
            struct experts_layer layer = experts_layer_make(&size, plans[p], OPAQ_BF16);
            const char *op = is_moe ? "moe" : "mlp";
            struct op_result expected = experts_call(op, &layer, plans[p], NULL);
            static uint16_t apart[ROWS][HIDDEN + 5];
            memset(apart, 0xFF, sizeof apart);
            for (int r = 0; r < ROWS; ++r) {
                memcpy(apart[r], (uint16_t *)layer.x.view.buffer[0].data + (size_t)r * HIDDEN, HIDDEN * 2);
            }
            const struct opaq_tensor x[] = {{.data = apart,
                                             .dtype = OPAQ_DTYPE_BF16,
                                             .rank = 2,
                                             .shape = {ROWS, HIDDEN},
                                             .strides = {HIDDEN + 5, 1}},
                                            {.data = layer.x.view.buffer[0].data,
                                             .dtype = OPAQ_DTYPE_BF16,
                                             .rank = 4,
                                             .shape = {2, 3, 2, HIDDEN},
                                             .strides = {6 * HIDDEN, 2 * HIDDEN, HIDDEN, 1}}};
            for (int i = 0; i < 2; ++i) {
                const struct experts_given given = {.x = &x[i]};
                struct op_result result = experts_call(op, &layer, plans[p], &given);
                CHECK_EQ_INT(result.outputs.tensor[0].rank, x[i].rank);
                experts_check_same(&result, &expected, plans[p]);
                op_result_free(&result);
            }
            op_result_free(&expected);
            experts_layer_free(&layer);
        }
    }
}

/* A vector is one token. */
static void a_vector_is_one_token(void) {
    const struct experts_sizes size = {1, 2, 3, 20, 12};
    struct experts_layer layer = experts_layer_make(&size, "", OPAQ_F32);
    struct opaq_tensor x = op_tensors_of(&layer.x).tensor[0];
    const struct opaq_tensor ids = {
        .data = layer.ids, .dtype = OPAQ_DTYPE_I64, .rank = 1, .shape = {2}, .strides = {1}};
    struct opaq_tensor weights = op_tensors_of(&layer.weights).tensor[0];
    x.rank = weights.rank = 1;
    x.shape[0] = 20;
    x.strides[0] = weights.strides[0] = 1;
    weights.shape[0] = 2;
    const struct experts_given given = {.x = &x, .ids = &ids, .weights = &weights};
    struct op_result expected = experts_call("moe_forward", &layer, "", NULL);
    struct op_result result = experts_call("moe_forward", &layer, "", &given);
    CHECK_EQ_INT(result.outputs.tensor[0].rank, 1);
    CHECK_EQ_INT(result.outputs.tensor[1].rank, 2);
    experts_check_same(&result, &expected, "a vector");
    op_result_free(&expected);
    op_result_free(&result);
    experts_layer_free(&layer);
}

/* ---- numbers that are not finite ---- */

/* A token that is not finite spoils nobody but those who share a scale with it; a router weight only its own token, and
 * one that is nobody's nothing. */
static void spoilt_tokens_stay_alone(void) {
    const struct experts_sizes size = {12, 1, 3, 24, 16};
    static const char *const plans[] = {"", "x=nvfp4+rowscaled h=mxfp8 w=mxfp8", "x=fp8 h=fp8",
                                        "weights=input"};
    const float bad[] = {support_nan(), support_infinity(), -support_infinity()};
    for (int p = 0; p < 4; ++p) {
        for (int b = 0; b < 3; ++b) {
            struct experts_layer layer = experts_layer_make(&size, plans[p], OPAQ_BF16);
            for (int64_t t = 0; t < 12; ++t) {
                layer.ids[t] = t == 11 ? -1 : t % 3;
            }
            struct op_result expected = experts_call("moe", &layer, plans[p], NULL);
            tensor_set(&layer.x, 4, 7, bad[b]);
            tensor_set(&layer.weights, 6, 0, bad[b]);
            tensor_set(&layer.weights, 11, 0, bad[b]);
            struct op_result result = experts_call("moe", &layer, plans[p], NULL);
            for (int64_t t = 0; t < 12; ++t) {
                const bool shares = p == 2 && t % 3 == 1;
                const bool weighed = p == 3 && t % 3 == 0;
                const uint16_t *found = (const uint16_t *)result.outputs.tensor[0].data + t * 24;
                if (t != 4 && t != 6 && !shares && !weighed && t != 11) {
                    CHECK_BYTES(found, (const uint16_t *)expected.outputs.tensor[0].data + t * 24, 48,
                                "\"%s\", token %d", plans[p], (int)t);
                }
                bool is_zero = true;
                bool is_finite = true;
                for (int c = 0; c < 24; ++c) {
                    is_zero = is_zero && found[c] == 0;
                    is_finite = is_finite && isfinite(opaq_element_decode(OPAQ_BF16, found[c]));
                }
                CHECK(t != 11 || is_zero);
                CHECK(t != 6 || !is_finite);
                CHECK(t != 4 || p > 0 || !is_finite);
            }
            op_result_free(&expected);
            op_result_free(&result);
            experts_layer_free(&layer);
        }
    }
}

/* ---- threads and settings ---- */

static void the_number_of_threads_does_not_count(void) {
    static const int threads[] = {1, 2, 4};
    static const char *const plans[] = {"", "x=nvfp4 h=mxfp8 w=fp8row act=swiglu_oai",
                                        "x=fp8 weights=input w=nvfp4"};
    struct opaq_pool *pools[3] = {NULL};
    for (int t = 0; t < 3; ++t) {
        CHECK_EQ_INT(opaq_pool_create(threads[t], &pools[t], NULL), OPAQ_OK);
    }
    for (int i = 0; i < 6; ++i) {
        const bool is_moe = i % 2 == 0;
        const char *plan = is_moe ? plans[i / 2] : i == 5 ? "act=relu2" : plans[i / 2];
        const struct experts_sizes size = {520, is_moe ? 2 : -1, is_moe ? 2 : 1, 80,
                                           72}; /* enough to be shared */
        struct experts_layer layer = experts_layer_make(&size, plan, dtypes[i % 3]);
        const char *op = is_moe ? "moe_forward" : "mlp_forward";
        struct op_result expected = experts_call(op, &layer, plan, NULL);
        for (int t = 0; t < 3; ++t) {
            const struct opaq_parallel parallel = opaq_pool_parallel(pools[t]);
            const struct experts_given given = {.parallel = &parallel};
            struct op_result result = experts_call(op, &layer, plan, &given);
            experts_check_same(&result, &expected, plan);
            op_result_free(&result);
        }
        op_result_free(&expected);
        experts_layer_free(&layer);
    }
    for (int t = 0; t < 3; ++t) {
        opaq_pool_destroy(pools[t]);
    }
}

static void settings_of_the_caller_do_not_count(void) {
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

static const struct test_case tests[] = {TEST(every_activation),
                                         TEST(biases_may_be_missing),
                                         TEST(weights_may_be_wider),
                                         TEST(weights_that_come_quantized),
                                         TEST(one_of_the_weights_comes_quantized),
                                         TEST(everything_quantized_here),
                                         TEST(stochastic_rounding),
                                         TEST(padding_is_not_read),
                                         TEST(given_scales),
                                         TEST(routings_of_every_kind),
                                         TEST(sizes_at_the_edges),
                                         TEST(groups_longer_than_a_lot),
                                         TEST(slices),
                                         TEST(routers_may_lie_anywhere),
                                         TEST(router_weights_of_every_dtype),
                                         TEST(ranks_and_rows_apart),
                                         TEST(a_vector_is_one_token),
                                         TEST(spoilt_tokens_stay_alone),
                                         TEST(the_number_of_threads_does_not_count),
                                         TEST(settings_of_the_caller_do_not_count)};
TEST_MAIN(tests)
