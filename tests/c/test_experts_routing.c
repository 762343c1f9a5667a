/* test_experts_routing.c: the routing of tokens to experts: routings and sizes of every kind, slices of a
 * mixture, ids and router weights of every dtype and with any strides, ranks; and nonfinite numbers, which do
 * not affect other tokens. */
#include <math.h>

#include "check.h"
#include "support_experts_reference.h"
#include "support_float.h"

static const enum opaq_element dtypes[] = {OPAQ_BF16, OPAQ_F16, OPAQ_F32};
static const struct experts_sizes ragged_moe = {13, 3, 5, 37, 22};

/* ---- routings ---- */

static void check_ids(const struct experts_sizes *size, const char *plan, int64_t (*id)(int64_t slot)) {
    struct experts_layer layer = experts_layer_make(size, plan, OPAQ_BF16);
    for (int64_t s = 0; s < size->tokens * size->choices; ++s) {
        layer.ids[s] = id(s);
    }
    experts_check_forward(&layer, plan, NULL);
    experts_layer_free(&layer);
}

static int64_t always_the_last(int64_t slot) { return (void)slot, 4; }
static int64_t always_unassigned(int64_t slot) { return slot % 2 ? -1 : 5; }
static int64_t one_slot_only(int64_t slot) { return slot == 17 ? 2 : -1; }
static int64_t twice_the_same(int64_t slot) { return slot / 3 % 5; }
static int64_t descending(int64_t slot) { return 4 - slot % 5; }

static void routings_of_every_kind(void) {
    static int64_t (*const ids[])(int64_t slot) = {always_the_last, always_unassigned, one_slot_only,
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
        {1, 1, 1, 1, 1},    {0, 2, 3, 16, 8},    {4, 0, 3, 16, 8},  {4, 2, 0, 16, 8},
        {4, 2, 3, 0, 8},    {4, 2, 3, 16, 0},    {0, 0, 0, 0, 0},   {1, 9, 2, 16, 8},
        {70, 1, 2, 16, 8},  {33, 3, 1, 17, 300}, {1, 1, 100, 8, 4}, {5, 2, 300, 8, 4},
        {30, 2, 300, 8, 4}, {0, -1, 1, 8, 4},    {3, -1, 1, 0, 4},  {3, -1, 1, 8, 0}};
    static const char *const plans[] = {"", "x=nvfp4 h=fp8 w=mxfp8", "act=swiglu_oai weights=input h=fp8row",
                                        "act=gelu_no_mul"};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i) {
        for (int p = 0; p < 4; ++p) {
            if (sizes[i].choices >= 0 || p != 2) {
                struct experts_layer layer = experts_layer_make(&sizes[i], plans[p], OPAQ_BF16);
                experts_check_forward(&layer, plans[p], NULL);
                experts_layer_free(&layer);
            }
        }
    }
}

/* More rows than one pass sums up, by 1 to 33: the last, smaller part uses another code path. */
static void groups_longer_than_a_pass(void) {
    static const int64_t rows[] = {1023, 1024, 1025, 1056, 1057, 2080};
    for (int i = 0; i < 6; ++i) {
        const struct experts_sizes size = {rows[i], 1, 1, 8, 8};
        struct experts_layer layer = experts_layer_make(&size, "", OPAQ_BF16);
        memset(layer.ids, 0, (size_t)rows[i] * sizeof *layer.ids);
        experts_check_forward(&layer, "", NULL);
        experts_check_forward(&layer, "x=nvfp4 h=mxfp8 w=fp8", NULL);
        experts_layer_free(&layer);
    }
}

/* Two stacks that form a whole: each separately, and together the same numbers in double. */
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
        experts_check_forward(&layer, plans[p], NULL);
        experts_layer_free(&layer);
    }
}

/* ---- strides, ranks, dtypes of what the router gives ---- */

/* The same ids and weights with other strides. */
static void routing_tensors_may_have_strides(void) {
    enum { TOKENS = 13, CHOICES = 3 };
    struct experts_layer layer = experts_layer_make(&ragged_moe, "", OPAQ_BF16);
    static int64_t wide[TOKENS * 10];
    static int32_t narrow[CHOICES * 20];
    static float weights[CHOICES * 15];
    for (int64_t s = 0; s < TOKENS * CHOICES; ++s) {
        const int64_t t = s / CHOICES;
        const int64_t k = s % CHOICES;
        wide[t * 10 + 3 * k] = layer.ids[s];
        narrow[k * 20 + t] = (int32_t)layer.ids[s]; /* transposed */
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
    struct opaq_tensor transposed = {
        .data = weights, .dtype = OPAQ_DTYPE_F32, .rank = 2, .shape = {TOKENS, CHOICES}, .strides = {1, 15}};
    static const char *const plans[] = {"", "x=nvfp4 w=mxfp8", "weights=input"};
    for (int p = 0; p < 3; ++p) {
        struct op_result expected = experts_call("moe", &layer, plans[p], NULL);
        for (int i = 0; i < 3; ++i) {
            transposed.rank = ids[i].rank;
            transposed.shape[0] = ids[i].shape[0];
            transposed.shape[1] = ids[i].shape[1];
            transposed.shape[2] = CHOICES;
            transposed.strides[i == 2] = 1;
            transposed.strides[1 + (i == 2)] = 15;
            const struct experts_given given = {.ids = &ids[i], .weights = &transposed};
            struct op_result result = experts_call("moe", &layer, plans[p], &given);
            experts_check_same(&result, &expected, plans[p]);
            op_result_free(&result);
        }
        op_result_free(&expected);
    }
    experts_layer_free(&layer);
}

/* Router weights of two bytes are converted to float32; all may be one element with stride 0. */
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

static void ranks_and_padded_rows(void) {
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

/* A nonfinite token only affects tokens that share a scale with it; a nonfinite router weight only its own
 * token, or none if the slot has no expert. */
static void nonfinite_tokens_do_not_spread(void) {
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

static const struct test_case tests[] = {TEST(routings_of_every_kind),
                                         TEST(sizes_at_the_edges),
                                         TEST(groups_longer_than_a_pass),
                                         TEST(slices),
                                         TEST(routing_tensors_may_have_strides),
                                         TEST(router_weights_of_every_dtype),
                                         TEST(ranks_and_padded_rows),
                                         TEST(a_vector_is_one_token),
                                         TEST(nonfinite_tokens_do_not_spread)};
TEST_MAIN(tests)
