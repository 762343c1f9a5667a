/* test_experts_backward.c: the gradients of mlp and moe against double, with bounds, for every activation, dtype and
 * option; that the reference itself is a derivative; and, with quantizers, the same bytes as quantizing and multiplying
 * expert by expert with linear_backward. */
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

static const struct experts_sizes ragged_mlp = {13, -1, 1, 37, 22};
static const struct experts_sizes ragged_moe = {13, 3, 5, 37, 22};

/* Which output row of the operator stands for a gradient. */
static int output_of(const struct experts_layer *layer, int gradient) {
    return layer->is_routed || gradient < EXPERTS_DROUTER ? gradient : gradient - 1;
}

static const char *backward_of(const struct experts_layer *layer) {
    return layer->is_routed ? "moe_backward" : "mlp_backward";
}

/* h of a forward, as the backward is given it. */
static struct tensor forward_h(const struct experts_layer *layer, const char *plan,
                               const struct experts_given *given) {
    struct op_result forward =
        experts_call(layer->is_routed ? "moe_forward" : "mlp_forward", layer, plan, given);
    const int64_t slots = layer->is_routed ? layer->size.tokens * layer->size.choices : layer->size.tokens;
    struct tensor h = tensor_make(slots, layer->width, (enum opaq_element)layer->x.view.proto.dtype, NULL);
    if (forward.outputs.count == 2) {
        memcpy(h.view.buffer[0].data, forward.outputs.tensor[1].data, tensor_bytes(&h, 0));
    }
    op_result_free(&forward);
    return h;
}

/* A backward with h as a tensor. */
static struct op_result backward(const struct experts_layer *layer, const char *plan,
                                 const struct experts_given *given, const struct tensor *h) {
    struct experts_given all = given == NULL ? nothing : *given;
    const struct opaq_tensor h_tensor = op_tensors_of(h).tensor[0];
    struct experts_arguments arguments;
    all.h = &h_tensor;
    struct op_result result = experts_call(backward_of(layer), layer, plan, &all);
    experts_arguments(backward_of(layer), layer, plan, &all, &arguments);
    if (result.outputs.count > 0) {
        experts_check_again(backward_of(layer), arguments.value, &result, plan);
    }
    return result;
}

/* ---- in double ---- */

static const char *const names[] = {"dx", "drouter", "dgate_up", "ddown", "dgate_up_bias", "ddown_bias"};

static void check_layer(const struct experts_layer *layer, const char *words,
                        const struct experts_given *given) {
    char plan[256];
    (void)snprintf(plan, sizeof plan, "%s%sgrad=%s", words, words[0] ? " " : "",
                   layer->is_routed ? "xrgdbc" : "xgdbc");
    struct tensor h = forward_h(layer, plan, given);
    struct op_result result = backward(layer, plan, given, &h);
    struct reference_gradients expected = reference_backward_numbers(layer, plan, given, &h);
    for (int g = 0; g < 6 && result.outputs.count > 0; ++g) {
        if (g != EXPERTS_DROUTER || layer->is_routed) {
            char what[288];
            (void)snprintf(what, sizeof what, "%s, \"%s\", %s", backward_of(layer), plan, names[g]);
            (void)numbers_check(&op_result_row(&result, output_of(layer, g)).tensor[0], &expected.gradient[g],
                                what);
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

static const char *const activations[] = {"act=silu",
                                          "act=silu_clamp limit=1.25 alpha=0.75 beta=-0.5",
                                          "act=swiglu_oai",
                                          "act=swiglu_oai_packed limit=1",
                                          "act=silu_step limit=0.5",
                                          "act=gelu",
                                          "act=gelu_tanh",
                                          "act=relu2",
                                          "act=silu_no_mul",
                                          "act=gelu_no_mul",
                                          "act=gelu_tanh_no_mul",
                                          "act=relu2_no_mul"};
enum { ACTIVATIONS = sizeof activations / sizeof activations[0] };

static void every_activation(void) {
    for (int i = 0; i < ACTIVATIONS; ++i) {
        for (int d = 0; d < 3; ++d) {
            char words[96];
            check_sizes(&ragged_mlp, activations[i], dtypes[d], NULL);
            check_sizes(&ragged_moe, activations[i], dtypes[d], NULL);
            (void)snprintf(words, sizeof words, "%s weights=input", activations[i]);
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

/* Slices, experts that nobody chose, tokens that chose the same twice. */
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

/* dy in another dtype than x; gradients of weights in any; router weights in two bytes. */
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

/* The loss sum(y dy) moves as the reference says when one number moves: the reference's own chain of gradients. */
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
    for (int i = 0; i < ACTIVATIONS * 2; ++i) {
        char plan[96];
        (void)snprintf(plan, sizeof plan, "%s%s", activations[i / 2], more[i % 2]);
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
                /* corners of the activation lie within some steps; h was rounded */
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

/* Every gradient by itself is what it is among all of them. */
static void gradients_do_not_depend_on_each_other(void) {
    static const char *const plans[] = {"act=swiglu_oai", "x=nvfp4 h=fp8 w=mxfp8 dy=fp8row",
                                        "weights=input dy=mxfp8"};
    static const char letters[] = "xrgdbc";
    for (int p = 0; p < 3; ++p) {
        struct experts_layer layer = experts_layer_make(&ragged_moe, plans[p], OPAQ_BF16);
        struct tensor h = forward_h(&layer, plans[p], NULL);
        char plan[128];
        (void)snprintf(plan, sizeof plan, "%s grad=xrgdbc", plans[p]);
        struct op_result all = backward(&layer, plan, NULL, &h);
        for (int set = 1; set < 63; ++set) {
            char some[8] = "";
            for (int i = 0; i < 6; ++i) {
                if (set >> i & 1) {
                    some[strlen(some)] = letters[i];
                }
            }
            (void)snprintf(plan, sizeof plan, "%s grad=%s", plans[p], some);
            struct op_result result = backward(&layer, plan, NULL, &h);
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

/* x is taken as float32, so that dx is: the same numbers, which quantize the same. */
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

/* How a case is quantized; "" for not at all. */
struct backward_recipe {
    const char *x, *h, *w, *dy, *rest;
};

/* "x=.. w=.. dy=.. save=xw grad=xwb backward=.." of one of the two products. */
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

/* Matrix (or row) e of an output against a tensor. */
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
    /* linear's streams are x 0, w 1, dy 2: two further on they are those of the second product */
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
    check_part(result, output_of(layer, EXPERTS_DGATE_UP), e, &inner.dw, plan);
    check_part(result, output_of(layer, EXPERTS_DGATE_UP_BIAS), e, &inner.dbias, plan);
    check_part(result, output_of(layer, EXPERTS_DDOWN), e, &weighted.dw, plan);
    check_part(result, output_of(layer, EXPERTS_DDOWN_BIAS), e, &weighted.dbias, plan);
    for (int64_t i = 0; i < group->count; ++i) { /* one choice each: the sum has one term */
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
    struct tensor h = forward_h(&layer, plan.text, &given);
    struct op_result result = backward(&layer, plan.text, &given, &h);
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
        check_composition(&mlp, &recipes[i], activations[i % ACTIVATIONS], dtypes[i % 3]);
        check_composition(&moe, &recipes[i], activations[(i + 5) % ACTIVATIONS], dtypes[(i + 1) % 3]);
        if (strstr(recipes[i].rest, "backward") == NULL) {
            struct backward_recipe on_input = recipes[i];
            on_input.rest = "";
            char act[96];
            (void)snprintf(act, sizeof act, "%s weights=input", activations[(i + 2) % ACTIVATIONS]);
            check_composition(&moe, &on_input, act, dtypes[i % 3]);
        }
    }
}

/* Weights that come quantized give dx and the router's gradient as their floats would. */
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
            struct tensor h = forward_h(&layer, plan, &given);
            struct op_result result = backward(&layer, plan, &given, &h);
            struct op_result expected = backward(&layer, plain, &wide, &h);
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

/* The gradients of an expert that nobody chose are zero. */
static void idle_experts_have_no_gradient(void) {
    static const char *const plans[] = {"grad=xrgdbc", "x=nvfp4 w=fp8 h=mxfp8 dy=nvfp4 grad=gdbc",
                                        "weights=input grad=gdbc"};
    const struct experts_sizes size = {5, 2, 4, 12, 6};
    for (int p = 0; p < 3; ++p) {
        struct experts_layer layer = experts_layer_make(&size, "", OPAQ_BF16);
        for (int s = 0; s < 10; ++s) {
            layer.ids[s] = s % 2 ? 2 : -1;
        }
        struct tensor h = forward_h(&layer, plans[p], NULL);
        struct op_result result = backward(&layer, plans[p], NULL, &h);
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

/* ---- threads and settings ---- */

static void the_number_of_threads_does_not_count(void) {
    static const int threads[] = {1, 2, 4};
    static const char *const plans[] = {"grad=xgdbc", "x=nvfp4+rht h=mxfp8 w=fp8 dy=nvfp4+rht+sr grad=xgdbc",
                                        "act=swiglu_oai dy=fp8row grad=xgdbc"};
    for (int t = 0; t < 3; ++t) {
        struct opaq_pool *pool = NULL;
        CHECK_EQ_INT(opaq_pool_create(threads[t], &pool, NULL), OPAQ_OK);
        const struct opaq_parallel parallel = opaq_pool_parallel(pool);
        for (int i = 0; i < 6; ++i) {
            const bool is_moe = i % 2 == 0;
            const struct experts_sizes size = {420, is_moe ? 2 : -1, is_moe ? 2 : 1, 96, 72};
            struct experts_layer layer = experts_layer_make(&size, plans[i / 2], dtypes[i % 3]);
            const struct experts_given alone = {.random = random_numbers};
            const struct experts_given many = {.random = random_numbers, .parallel = &parallel};
            struct tensor h = forward_h(&layer, plans[i / 2], &alone);
            struct op_result expected = backward(&layer, plans[i / 2], &alone, &h);
            struct op_result result = backward(&layer, plans[i / 2], &many, &h);
            experts_check_same(&result, &expected, plans[i / 2]);
            op_result_free(&expected);
            op_result_free(&result);
            tensor_free(&h);
            experts_layer_free(&layer);
        }
        opaq_pool_destroy(pool);
    }
}

static void settings_of_the_caller_do_not_count(void) {
    static const char *const plans[] = {"act=gelu grad=xrgdbc", "x=nvfp4 h=fp8 w=mxfp8 dy=fp8 grad=xrgdbc",
                                        "weights=input act=gelu_tanh grad=xrgdbc"};
    const struct float_setting before = float_setting_get();
    for (int p = 0; p < 3; ++p) {
        struct experts_layer layer = experts_layer_make(&ragged_moe, plans[p], OPAQ_F32);
        for (int64_t i = 0; i < 37; ++i) { /* gradients of tokens 0 to 5 below the normal numbers */
            for (int64_t t = 0; t < 6; ++t) {
                tensor_set(&layer.dy, t, i, 0x1p-130f * (float)(i + 1));
            }
        }
        struct tensor h = forward_h(&layer, plans[p], NULL);
        struct op_result expected = backward(&layer, plans[p], NULL, &h);
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
                                         TEST(quantized_as_by_linear_backward),
                                         TEST(given_weights_are_their_floats),
                                         TEST(idle_experts_have_no_gradient),
                                         TEST(the_number_of_threads_does_not_count),
                                         TEST(settings_of_the_caller_do_not_count)};
TEST_MAIN(tests)
