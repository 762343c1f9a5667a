/* test_experts_backward.c: the gradients of mlp and moe against double, with bounds, for every activation,
 * dtype and option; the reference's own gradients against differences; unused experts; floating-point
 * settings. */
#include <fenv.h>
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "support_experts_reference.h"
#include "support_float.h"
#include "support_quant.h"
#include "support_spec.h"

static const enum opaq_element dtypes[] = {OPAQ_BF16, OPAQ_F16, OPAQ_F32};

static const struct experts_sizes ragged_mlp = {13, -1, 1, 37, 22};
static const struct experts_sizes ragged_moe = {13, 3, 5, 37, 22};

/* ---- in double ---- */

static const char *const names[] = {"dx", "drouter", "dgate_up", "ddown", "dgate_up_bias", "ddown_bias"};

static void check_layer(const struct experts_layer *layer, const char *words,
                        const struct experts_given *given) {
    char plan[256];
    (void)snprintf(plan, sizeof plan, "%s%sgrad=%s", words, words[0] ? " " : "",
                   layer->is_routed ? "xrgdbc" : "xgdbc");
    struct tensor h = experts_forward_h(layer, plan, given);
    struct op_result result = experts_backward(layer, plan, given, &h);
    struct reference_gradients expected = reference_backward_numbers(layer, plan, given, &h);
    for (int g = 0; g < 6 && result.outputs.count > 0; ++g) {
        if (g != EXPERTS_DROUTER || layer->is_routed) {
            char what[288];
            (void)snprintf(what, sizeof what, "%s, \"%s\", %s", experts_backward_name(layer), plan, names[g]);
            (void)numbers_check(&op_result_row(&result, experts_output_of(layer, g)).tensor[0],
                                &expected.gradient[g], what);
        }
    }
    reference_gradients_free(&expected);
    op_result_free(&result);
    tensor_free(&h);
}

static void check_sizes(const struct experts_sizes *size, const char *words, enum opaq_element dtype,
                        const struct experts_given *given) {
    struct experts_layer layer = experts_layer_make(size, words, dtype);
    check_layer(&layer, words, given);
    experts_layer_free(&layer);
}

static void every_activation(void) {
    for (int i = 0; i < OPAQ_ACTIVATION_COUNT; ++i) {
        for (int d = 0; d < 3; ++d) {
            char words[96];
            check_sizes(&ragged_mlp, experts_activations[i], dtypes[d], NULL);
            check_sizes(&ragged_moe, experts_activations[i], dtypes[d], NULL);
            (void)snprintf(words, sizeof words, "%s weights=input", experts_activations[i]);
            check_sizes(&ragged_moe, words, dtypes[d], NULL);
        }
    }
}

static void biases_may_be_missing(void) {
    for (int i = 1; i < 4; ++i) {
        const struct experts_given given = {.no_gate_up_bias = i & 1, .no_down_bias = i & 2};
        check_sizes(&ragged_mlp, "act=swiglu_oai", OPAQ_BF16, &given);
        check_sizes(&ragged_moe, "", OPAQ_F32, &given);
        check_sizes(&ragged_moe, "weights=input", OPAQ_F32, &given);
    }
}

static void sizes_at_the_edges(void) {
    static const struct experts_sizes sizes[] = {
        {1, 1, 1, 1, 1},   {0, 2, 3, 16, 8},    {4, 0, 3, 16, 8},   {4, 2, 0, 16, 8},
        {4, 2, 3, 0, 8},   {4, 2, 3, 16, 0},    {0, 0, 0, 0, 0},    {1, 9, 2, 16, 8},
        {70, 1, 2, 16, 8}, {33, 3, 1, 17, 300}, {1, 1, 40, 8, 4},   {0, -1, 1, 8, 4},
        {3, -1, 1, 0, 4},  {3, -1, 1, 8, 0},    {1056, 1, 1, 8, 8}, {1030, 1, 1, 8, 4}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i) {
        check_sizes(&sizes[i], "", OPAQ_F32, NULL);
        if (sizes[i].choices >= 0) {
            check_sizes(&sizes[i], "act=gelu_no_mul weights=input", OPAQ_F32, NULL);
        }
    }
}

/* Slices, unused experts, tokens that chose the same expert twice. */
static void routings(void) {
    const struct experts_sizes size = {11, 3, 4, 20, 12};
    static const char *const plans[] = {"experts=9 first=2", "experts=9 first=5 weights=input", "",
                                        "act=relu2 first=3"};
    for (int p = 0; p < 4; ++p) {
        for (int kind = 0; kind < 4; ++kind) {
            struct experts_layer layer = experts_layer_make(&size, plans[p], OPAQ_F32);
            const struct opaq_experts_plan plan = experts_plan_of(plans[p]);
            const int64_t total = plan.experts != 0 ? plan.experts : plan.first + 4;
            for (int64_t s = 0; s < 33; ++s) {
                layer.ids[s] = kind == 0   ? (s * 5) % total
                               : kind == 1 ? -1
                               : kind == 2 ? plan.first + 2
                                           : plan.first + s / 3 % 2;
            }
            check_layer(&layer, plans[p], NULL);
            experts_layer_free(&layer);
        }
    }
}

/* dy in another dtype than x; gradients of weights in any dtype; router weights in two bytes. */
static void dtypes_may_differ(void) {
    for (int d = 0; d < 3; ++d) {
        struct experts_layer layer = experts_layer_make(&ragged_moe, "", OPAQ_BF16);
        struct tensor dy = experts_converted(&layer.dy, dtypes[d]);
        struct tensor router = experts_converted(&layer.weights, OPAQ_BF16);
        struct tensor back = experts_converted(&router, OPAQ_F32);
        const struct opaq_tensor router_tensor = op_tensors_of(&router).tensor[0];
        tensor_free(&layer.dy);
        tensor_free(&layer.weights);
        layer.dy = dy;
        layer.weights = back;
        const struct experts_given given = {.w_dtype = (int32_t)dtypes[(d + 1) % 3], .weights = &router_tensor};
        check_layer(&layer, "", &given);
        check_layer(&layer, "weights=input", &given);
        experts_layer_free(&layer);
        tensor_free(&router);
    }
}

/* When one number changes, the loss sum(y dy) changes by the reference's gradient. */
static double loss_of(const struct experts_layer *layer, const char *plan) {
    struct reference_numbers forward = reference_forward_numbers(layer, plan, NULL);
    double loss = 0.0;
    for (int64_t i = 0; i < layer->size.tokens * layer->size.hidden; ++i) {
        loss +=
            forward.y.value[i] * (double)tensor_get(&layer->dy, i / layer->size.hidden, i % layer->size.hidden);
    }
    reference_numbers_free(&forward);
    return loss;
}

static void the_reference_is_a_derivative(void) {
    static const char *const more[] = {"", " weights=input"};
    const struct experts_sizes size = {5, 2, 3, 6, 4};
    for (int i = 0; i < OPAQ_ACTIVATION_COUNT * 2; ++i) {
        char plan[96];
        (void)snprintf(plan, sizeof plan, "%s%s", experts_activations[i / 2], more[i % 2]);
        struct experts_layer layer = experts_layer_make(&size, plan, OPAQ_F32);
        struct tensor *const moved[] = {&layer.x,    &layer.weights,      &layer.gate_up,
                                        &layer.down, &layer.gate_up_bias, &layer.down_bias};
        struct reference_numbers forward = reference_forward_numbers(&layer, plan, NULL);
        struct tensor h = tensor_make(10, layer.width, OPAQ_F32, NULL);
        for (int64_t k = 0; k < 10 * layer.width; ++k) {
            tensor_set(&h, k / layer.width, k % layer.width, (float)forward.h.value[k]);
        }
        struct reference_gradients gradients = reference_backward_numbers(&layer, plan, NULL, &h);
        for (int g = 0; g < 6; ++g) {
            float *numbers = moved[g]->view.buffer[0].data;
            const int64_t count = gradients.gradient[g].rows * gradients.gradient[g].columns;
            for (int64_t k = 0; k < count; k += 3) {
                const float kept = numbers[k];
                numbers[k] = kept + 0x1p-9f;
                const double up = (double)(numbers[k] - kept);
                const double high = loss_of(&layer, plan);
                numbers[k] = kept - 0x1p-9f;
                const double down = (double)(kept - numbers[k]);
                const double low = loss_of(&layer, plan);
                numbers[k] = kept;
                const double slope = (high - low) / (up + down);
                /* the activation may have a corner within some steps; h was rounded */
                if (fabs(slope - gradients.gradient[g].value[k]) > 0.02 + 0.02 * fabs(slope)) {
                    CHECK_FAIL("\"%s\", %s %lld: %.6g, the loss moves by %.6g", plan, names[g], (long long)k,
                               gradients.gradient[g].value[k], slope);
                }
            }
        }
        reference_gradients_free(&gradients);
        reference_numbers_free(&forward);
        tensor_free(&h);
        experts_layer_free(&layer);
    }
}

/* Each gradient requested alone equals the same gradient among all. */
static void gradients_do_not_depend_on_each_other(void) {
    static const char *const plans[] = {"act=swiglu_oai", "x=nvfp4 h=fp8 w=mxfp8 dy=fp8row",
                                        "weights=input dy=mxfp8"};
    static const char letters[] = "xrgdbc";
    for (int p = 0; p < 3; ++p) {
        struct experts_layer layer = experts_layer_make(&ragged_moe, plans[p], OPAQ_BF16);
        struct tensor h = experts_forward_h(&layer, plans[p], NULL);
        char plan[128];
        (void)snprintf(plan, sizeof plan, "%s grad=xrgdbc", plans[p]);
        struct op_result all = experts_backward(&layer, plan, NULL, &h);
        for (int set = 1; set < 63; ++set) {
            char some[8] = "";
            for (int i = 0; i < 6; ++i) {
                if (set >> i & 1) {
                    some[strlen(some)] = letters[i];
                }
            }
            (void)snprintf(plan, sizeof plan, "%s grad=%s", plans[p], some);
            struct op_result result = experts_backward(&layer, plan, NULL, &h);
            for (int i = 0; i < 6; ++i) {
                const int count = op_result_row(&result, i).count;
                CHECK_EQ_INT(count, set >> i & 1);
                CHECK(count == 0 || op_result_difference(&result, &all, i) < 0);
            }
            op_result_free(&result);
        }
        op_result_free(&all);
        tensor_free(&h);
        experts_layer_free(&layer);
    }
}

/* The gradients of an unused expert are zero. */
static void unused_experts_have_zero_gradients(void) {
    static const char *const plans[] = {"grad=xrgdbc", "x=nvfp4 w=fp8 h=mxfp8 dy=nvfp4 grad=gdbc",
                                        "weights=input grad=gdbc"};
    const struct experts_sizes size = {5, 2, 4, 12, 6};
    for (int p = 0; p < 3; ++p) {
        struct experts_layer layer = experts_layer_make(&size, "", OPAQ_BF16);
        for (int s = 0; s < 10; ++s) {
            layer.ids[s] = s % 2 ? 2 : -1;
        }
        struct tensor h = experts_forward_h(&layer, plans[p], NULL);
        struct op_result result = experts_backward(&layer, plans[p], NULL, &h);
        for (int g = EXPERTS_DGATE_UP; g <= EXPERTS_DDOWN_BIAS && result.outputs.count > 0; ++g) {
            const struct opaq_tensor found = op_result_row(&result, g).tensor[0];
            const size_t bytes = op_tensor_bytes(&found) / 4;
            for (int e = 0; e < 4; ++e) {
                bool is_zero = true;
                for (size_t i = 0; i < bytes; ++i) {
                    is_zero = is_zero && ((const char *)found.data)[(size_t)e * bytes + i] == 0;
                }
                if (is_zero != (e != 2)) {
                    CHECK_FAIL("\"%s\": %s of expert %d", plans[p], names[g], e);
                }
            }
        }
        op_result_free(&result);
        tensor_free(&h);
        experts_layer_free(&layer);
    }
}

/* ---- settings ---- */

static void settings_do_not_matter(void) {
    static const char *const plans[] = {"act=gelu grad=xrgdbc", "x=nvfp4 h=fp8 w=mxfp8 dy=fp8 grad=xrgdbc",
                                        "weights=input act=gelu_tanh grad=xrgdbc"};
    const struct float_setting before = float_setting_get();
    for (int p = 0; p < 3; ++p) {
        struct experts_layer layer = experts_layer_make(&ragged_moe, plans[p], OPAQ_F32);
        for (int64_t i = 0; i < 37; ++i) { /* gradients of tokens 0 to 5 are subnormal */
            for (int64_t t = 0; t < 6; ++t) {
                tensor_set(&layer.dy, t, i, 0x1p-130f * (float)(i + 1));
            }
        }
        struct tensor h = experts_forward_h(&layer, plans[p], NULL);
        struct op_result expected = experts_backward(&layer, plans[p], NULL, &h);
        const struct opaq_tensor h_tensor = op_tensors_of(&h).tensor[0];
        const struct experts_given given = {.h = &h_tensor};
        (void)fesetround(FE_UPWARD);
        (void)float_setting_flush_to_zero();
        struct op_result result = experts_call("moe_backward", &layer, plans[p], &given);
        float_setting_put(before);
        experts_check_same(&result, &expected, plans[p]);
        op_result_free(&expected);
        op_result_free(&result);
        tensor_free(&h);
        experts_layer_free(&layer);
    }
}

static const struct test_case tests[] = {TEST(every_activation),
                                         TEST(biases_may_be_missing),
                                         TEST(sizes_at_the_edges),
                                         TEST(routings),
                                         TEST(dtypes_may_differ),
                                         TEST(the_reference_is_a_derivative),
                                         TEST(gradients_do_not_depend_on_each_other),
                                         TEST(unused_experts_have_zero_gradients),
                                         TEST(settings_do_not_matter)};
TEST_MAIN(tests)
