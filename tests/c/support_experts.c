/* support_experts.c: MLPs, mixtures of experts and calls of their operators. */
#include "support_experts.h"

#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "support_quant.h"

struct opaq_experts_plan experts_plan_of(const char *text) {
    struct opaq_experts_plan plan;
    struct opaq_error error;
    if (opaq_experts_plan_parse(text, strlen(text), &plan, &error) != OPAQ_OK) {
        printf("  \"%s\": %s\n", text, error.text);
        exit(1);
    }
    return plan;
}

const char *const experts_activations[OPAQ_ACTIVATION_COUNT] = {
    "act=silu",
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

static bool is_gated(const struct opaq_experts_plan *plan) {
    return opaq_activation_is_gated((enum opaq_activation)plan->activation) != 0;
}

/* ---- layers ---- */

struct tensor experts_tensor(const int64_t *shape, int rank, enum opaq_element dtype, double scale,
                             uint64_t seed) {
    struct opaq_proto proto;
    struct opaq_error error;
    if (opaq_proto_make(shape, rank, dtype, NULL, tensor_cpu, &proto, &error) != OPAQ_OK) {
        printf("  %s\n", error.text);
        exit(1);
    }
    struct tensor tensor = tensor_make_proto(&proto);
    tensor_fill(&tensor, FILL_NORMAL, seed);
    for (int64_t r = 0; r < opaq_proto_rows(&proto); ++r) {
        for (int64_t c = 0; c < opaq_proto_columns(&proto); ++c) {
            tensor_set(&tensor, r, c, (float)scale * tensor_get(&tensor, r, c));
        }
    }
    return tensor;
}

struct tensor experts_rows(const struct tensor *from, int64_t first, int64_t rows) {
    const int64_t columns = opaq_proto_columns(&from->view.proto);
    struct tensor part = tensor_make(rows, columns, (enum opaq_element)from->view.proto.dtype, NULL);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            tensor_set(&part, r, c, tensor_get(from, first + r, c));
        }
    }
    return part;
}

struct tensor experts_converted(const struct tensor *from, enum opaq_element dtype) {
    struct opaq_proto proto = from->view.proto;
    proto.dtype = (int32_t)dtype;
    struct tensor made = tensor_make_proto(&proto);
    for (int64_t r = 0; r < opaq_proto_rows(&proto); ++r) {
        for (int64_t c = 0; c < opaq_proto_columns(&proto); ++c) {
            tensor_set(&made, r, c, tensor_get(from, r, c));
        }
    }
    return made;
}

/* Assigns the experts in turn, in an order with jumps; one slot of eleven has no expert, marked by -1 or by the
 * number of experts. */
static int64_t id_of_slot(int64_t slot, int64_t experts) {
    return experts == 0 || slot % 11 == 7 ? (slot % 2 ? -1 : experts) : (slot * 7 + slot / 5) % experts;
}

struct experts_layer experts_layer_make(const struct experts_sizes *size, const char *plan,
                                        enum opaq_element dtype) {
    const struct opaq_experts_plan parsed = experts_plan_of(plan);
    struct experts_layer layer;
    memset(&layer, 0, sizeof layer);
    layer.size = *size;
    layer.is_routed = size->choices >= 0;
    layer.width = is_gated(&parsed) ? 2 * size->inner : size->inner;
    const int skip = layer.is_routed ? 0 : 1; /* the leading dimension */
    const int64_t slots = layer.is_routed ? size->tokens * size->choices : 0;
    const int64_t x_shape[2] = {size->tokens, size->hidden};
    const int64_t up_shape[3] = {size->experts, layer.width, size->hidden};
    const int64_t down_shape[3] = {size->experts, size->hidden, size->inner};
    const int64_t router_shape[2] = {size->tokens, layer.is_routed ? size->choices : 0};
    layer.x = experts_tensor(x_shape, 2, dtype, 1.0, 1);
    layer.gate_up = experts_tensor(up_shape + skip, 3 - skip, dtype, 2.0 / sqrt((double)size->hidden + 1.0), 2);
    layer.down = experts_tensor(down_shape + skip, 3 - skip, dtype, 1.0 / sqrt((double)size->inner + 1.0), 3);
    layer.gate_up_bias = experts_tensor(up_shape + skip, 2 - skip, dtype, 0.5, 4);
    layer.down_bias = experts_tensor(down_shape + skip, 2 - skip, dtype, 0.5, 5);
    layer.weights = experts_tensor(router_shape, 2, OPAQ_F32, 0.5, 6);
    layer.dy = experts_tensor(x_shape, 2, dtype, 1.0, 7);
    layer.ids = calloc((size_t)slots + 1, sizeof *layer.ids);
    if (layer.ids == NULL) {
        printf("  calloc: no memory\n");
        exit(1);
    }
    for (int64_t s = 0; s < slots; ++s) {
        layer.ids[s] = id_of_slot(s, size->experts);
    }
    return layer;
}

void experts_layer_free(struct experts_layer *layer) {
    tensor_free(&layer->x);
    tensor_free(&layer->gate_up);
    tensor_free(&layer->down);
    tensor_free(&layer->gate_up_bias);
    tensor_free(&layer->down_bias);
    tensor_free(&layer->weights);
    tensor_free(&layer->dy);
    free(layer->ids);
}

/* ---- calls ---- */

static const struct experts_given nothing;

struct opaq_value *experts_value(struct experts_arguments *arguments, const char *name) {
    for (int i = 0; i < arguments->op->argument_count; ++i) {
        if (strcmp(arguments->op->argument[i].name, name) == 0) {
            return &arguments->value[i];
        }
    }
    printf("  %s has no argument %s\n", arguments->op->name, name);
    exit(1);
}

static struct opaq_tensor floats_tensor(const float *data, int64_t count) {
    return (struct opaq_tensor){
        .data = (void *)(uintptr_t)data, .dtype = OPAQ_DTYPE_F32, .rank = 1, .shape = {count}, .strides = {1}};
}

static struct opaq_tensor or_first(const struct opaq_tensor *given, const struct tensor *own) {
    return given != NULL ? *given : op_tensors_of(own).tensor[0];
}

static void fill_tensors(const struct experts_layer *layer, const struct experts_given *given,
                         struct experts_arguments *arguments) {
    const struct experts_sizes *size = &layer->size;
    const int skip = layer->is_routed ? 0 : 1;
    arguments->x = or_first(given->x, &layer->x);
    arguments->dy = or_first(given->dy, &layer->dy);
    arguments->weights = or_first(given->weights, &layer->weights);
    arguments->gate_up = op_tensors_of(given->gate_up == NULL ? &layer->gate_up : given->gate_up);
    arguments->down = op_tensors_of(given->down == NULL ? &layer->down : given->down);
    arguments->gate_up_bias = op_tensors_of(&layer->gate_up_bias).tensor[0];
    arguments->down_bias = op_tensors_of(&layer->down_bias).tensor[0];
    arguments->ids = (struct opaq_tensor){.data = layer->ids,
                                          .dtype = OPAQ_DTYPE_I64,
                                          .rank = 2,
                                          .shape = {size->tokens, size->choices},
                                          .strides = {size->choices, 1}};
    if (given->ids != NULL) {
        arguments->ids = *given->ids;
    }
    if (given->h != NULL) {
        arguments->h = *given->h;
    }
    arguments->input_scale = floats_tensor(given->input_scale, given->input_scales);
    arguments->hidden_scale = floats_tensor(given->hidden_scale, given->hidden_scales);
    arguments->random = (struct opaq_tensor){.data = (void *)(uintptr_t)given->random,
                                             .dtype = OPAQ_DTYPE_I64,
                                             .rank = 1,
                                             .shape = {2},
                                             .strides = {1}};
    const int64_t up_shape[3] = {size->experts, layer->width, size->hidden};
    const int64_t down_shape[3] = {size->experts, size->hidden, size->inner};
    memcpy(arguments->gate_up_shape, up_shape + skip, (size_t)(3 - skip) * sizeof *up_shape);
    memcpy(arguments->down_shape, down_shape + skip, (size_t)(3 - skip) * sizeof *down_shape);
}

void experts_arguments(const char *op, const struct experts_layer *layer, const char *plan,
                       const struct experts_given *given, struct experts_arguments *arguments) {
    given = given == NULL ? &nothing : given;
    memset(arguments, 0, sizeof *arguments);
    arguments->op = opaq_op_find(op);
    fill_tensors(layer, given, arguments);
    const int rank = layer->is_routed ? 3 : 2;
    const int32_t w_dtype = given->w_dtype != 0 ? given->w_dtype : layer->gate_up.view.proto.dtype;
    const struct {
        const char *name;
        struct opaq_value value;
    } known[] = {
        {"x", op_tensor_value(&arguments->x)},
        {"hidden_states", op_tensor_value(&arguments->x)},
        {"topk_weights", op_tensor_value(&arguments->weights)},
        {"topk_ids", op_tensor_value(&arguments->ids)},
        {"dy", op_tensor_value(&arguments->dy)},
        {"h", op_tensor_value(&arguments->h)},
        {"gate_up", op_list_value(&arguments->gate_up)},
        {"down", op_list_value(&arguments->down)},
        {"gate_up_bias", op_tensor_value(given->no_gate_up_bias ? NULL : &arguments->gate_up_bias)},
        {"down_bias", op_tensor_value(given->no_down_bias ? NULL : &arguments->down_bias)},
        {"gate_up_shape", op_sizes_value(arguments->gate_up_shape, rank)},
        {"down_shape", op_sizes_value(arguments->down_shape, rank)},
        {"w_dtype", op_int_value(w_dtype)},
        {"plan", op_text_value(plan)},
        {"input_scale", op_tensor_value(given->input_scale == NULL ? NULL : &arguments->input_scale)},
        {"hidden_scale", op_tensor_value(given->hidden_scale == NULL ? NULL : &arguments->hidden_scale)},
        {"random", op_tensor_value(given->random == NULL ? NULL : &arguments->random)},
    };
    for (int i = 0; i < arguments->op->argument_count; ++i) {
        for (size_t k = 0; k < sizeof known / sizeof known[0]; ++k) {
            if (strcmp(arguments->op->argument[i].name, known[k].name) == 0) {
                arguments->value[i] = known[k].value;
            }
        }
    }
}

struct op_result experts_call(const char *op, const struct experts_layer *layer, const char *plan,
                              const struct experts_given *given) {
    struct experts_arguments arguments;
    struct op_result result;
    struct opaq_error error = {OPAQ_OK, ""};
    given = given == NULL ? &nothing : given;
    const struct op_settings settings = {.parallel = given->parallel};
    experts_arguments(op, layer, plan, given, &arguments);
    if (op_call(op, arguments.value, &settings, &result, &error) != OPAQ_OK) {
        CHECK_FAIL("%s, \"%s\": %s", op, plan, error.text);
        memset(&result, 0, sizeof result);
    }
    return result;
}

void experts_check_same(const struct op_result *a, const struct op_result *b, const char *what) {
    CHECK_EQ_INT(a->outputs.count, b->outputs.count);
    for (int i = 0; i < a->outputs.count && i < b->outputs.count; ++i) {
        const size_t bytes = op_tensor_bytes(&a->outputs.tensor[i]);
        if (CHECK_EQ_INT(op_tensor_bytes(&b->outputs.tensor[i]), bytes)) {
            CHECK_BYTES(a->outputs.tensor[i].data, b->outputs.tensor[i].data, bytes, "%s: output %d", what, i);
        }
    }
}

void experts_check_again(const char *op, const struct opaq_value *values, const struct op_result *expected,
                         const char *what) {
    enum { GUARD = 4096 };
    static const unsigned char garbage[] = {0x00, 0xFF, 0x7F};
    const struct opaq_op *row = opaq_op_find(op);
    struct opaq_error error = {OPAQ_OK, ""};
    size_t bytes = 0;
    CHECK_EQ_INT(opaq_op_workspace(row, values, &bytes, &error), OPAQ_OK);
    for (int g = 0; g < 3; ++g) {
        struct op_result result = {.outputs = expected->outputs};
        void *memory = NULL;
        for (int i = 0; i < result.outputs.count; ++i) {
            const size_t size = op_tensor_bytes(&expected->outputs.tensor[i]);
            result.outputs.tensor[i].data = malloc(size + 1);
            memset(result.outputs.tensor[i].data, garbage[g], size);
        }
        if (posix_memalign(&memory, 64, bytes + GUARD) != 0) {
            exit(1);
        }
        memset(memory, garbage[g], bytes);
        memset((char *)memory + bytes, 0x5C, GUARD);
        CHECK_EQ_INT(opaq_op_run(row, values, &result.outputs, (struct opaq_span){memory, bytes}, NULL, &error),
                     OPAQ_OK);
        experts_check_same(&result, expected, what);
        for (int i = 0; i < GUARD; ++i) {
            if (((unsigned char *)memory)[bytes + (size_t)i] != 0x5C) {
                CHECK_FAIL("%s: byte %d after the workspace of %zu was written", what, i, bytes);
                break;
            }
        }
        free(memory);
        op_result_free(&result);
    }
}

/* The output row of the operator that has a gradient. */
int experts_output_of(const struct experts_layer *layer, int gradient) {
    return layer->is_routed || gradient < EXPERTS_DROUTER ? gradient : gradient - 1;
}

const char *experts_backward_name(const struct experts_layer *layer) {
    return layer->is_routed ? "moe_backward" : "mlp_backward";
}

/* h of a forward, in the form in which the backward takes it. */
struct tensor experts_forward_h(const struct experts_layer *layer, const char *plan,
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
struct op_result experts_backward(const struct experts_layer *layer, const char *plan,
                                  const struct experts_given *given, const struct tensor *h) {
    struct experts_given all = given == NULL ? nothing : *given;
    const struct opaq_tensor h_tensor = op_tensors_of(h).tensor[0];
    struct experts_arguments arguments;
    all.h = &h_tensor;
    struct op_result result = experts_call(experts_backward_name(layer), layer, plan, &all);
    experts_arguments(experts_backward_name(layer), layer, plan, &all, &arguments);
    if (result.outputs.count > 0) {
        experts_check_again(experts_backward_name(layer), arguments.value, &result, plan);
    }
    return result;
}

/* ---- activations ---- */

struct experts_words experts_activation_words(const char *plan) {
    static const char *const names[] = {"act=", "limit=", "alpha=", "beta="};
    struct experts_words words = {""};
    for (const char *word = plan; *word != '\0';) {
        const size_t length = strcspn(word, " ");
        for (int i = 0; i < 4; ++i) {
            if (strncmp(word, names[i], strlen(names[i])) == 0) {
                const size_t used = strlen(words.text);
                (void)snprintf(words.text + used, sizeof words.text - used, "%s%.*s", used > 0 ? " " : "",
                               (int)length, word);
            }
        }
        word += length + (word[length] == ' ');
    }
    return words;
}

/* Sets the diagonal to 1. */
static struct tensor ones(int64_t rows, int64_t columns, enum opaq_element dtype) {
    struct tensor made = tensor_make(rows, columns, dtype, NULL);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            tensor_set(&made, r, c, r == c ? 1.0f : 0.0f);
        }
    }
    return made;
}

/* An mlp whose products are identities: x is h, and a is in the first columns of y. */
static struct experts_layer identity_layer(const struct tensor *h, const struct opaq_experts_plan *plan) {
    const int64_t width = opaq_proto_columns(&h->view.proto);
    const int64_t inner = is_gated(plan) ? width / 2 : width;
    const enum opaq_element dtype = (enum opaq_element)h->view.proto.dtype;
    struct experts_layer layer = {.size = {opaq_proto_rows(&h->view.proto), -1, 1, width, inner},
                                  .width = width,
                                  .x = experts_converted(h, dtype),
                                  .gate_up = ones(width, width, dtype),
                                  .down = ones(width, inner, dtype)};
    const int64_t none = 0;
    layer.gate_up_bias = experts_tensor(&none, 1, dtype, 0.0, 1); /* no token uses it */
    layer.down_bias = experts_tensor(&none, 1, dtype, 0.0, 1);
    layer.weights = experts_tensor(&none, 1, dtype, 0.0, 1);
    layer.dy = experts_tensor(&none, 1, dtype, 0.0, 1);
    return layer;
}

struct tensor experts_activated(const struct tensor *h, const char *plan) {
    const struct experts_words words = experts_activation_words(plan);
    const struct opaq_experts_plan parsed = experts_plan_of(words.text);
    struct experts_layer layer = identity_layer(h, &parsed);
    const struct experts_given given = {.no_gate_up_bias = true, .no_down_bias = true};
    struct op_result result = experts_call("mlp", &layer, words.text, &given);
    const int64_t shape[2] = {layer.size.tokens, layer.size.hidden};
    struct tensor a = tensor_make(shape[0], layer.size.inner, (enum opaq_element)h->view.proto.dtype, NULL);
    struct tensor y = tensor_make(shape[0], shape[1], (enum opaq_element)h->view.proto.dtype, NULL);
    if (result.outputs.count == 1) {
        memcpy(y.view.buffer[0].data, result.outputs.tensor[0].data, tensor_bytes(&y, 0));
    }
    for (int64_t r = 0; r < shape[0]; ++r) {
        for (int64_t c = 0; c < layer.size.inner; ++c) {
            tensor_set(&a, r, c, tensor_get(&y, r, c));
        }
    }
    tensor_free(&y);
    op_result_free(&result);
    experts_layer_free(&layer);
    return a;
}

struct tensor experts_activation_gradient(const struct tensor *h, const struct tensor *da, const char *plan) {
    const struct experts_words words = experts_activation_words(plan);
    const struct opaq_experts_plan parsed = experts_plan_of(words.text);
    struct experts_layer layer = identity_layer(h, &parsed);
    char with_grad[OPAQ_EXPERTS_PLAN_TEXT_BYTES + 8];
    struct tensor dy = tensor_make(layer.size.tokens, layer.size.hidden, OPAQ_F32, NULL);
    for (int64_t r = 0; r < layer.size.tokens; ++r) { /* then da equals dy down */
        for (int64_t c = 0; c < layer.size.hidden; ++c) {
            tensor_set(&dy, r, c, c < layer.size.inner ? tensor_get(da, r, c) : 0.0f);
        }
    }
    tensor_free(&layer.dy);
    layer.dy = dy;
    (void)snprintf(with_grad, sizeof with_grad, "%s%sgrad=x", words.text, words.text[0] ? " " : "");
    const struct opaq_tensor h_tensor = op_tensors_of(&layer.x).tensor[0];
    const struct experts_given given = {.h = &h_tensor};
    struct op_result result = experts_call("mlp_backward", &layer, with_grad, &given);
    struct tensor dh = tensor_make_proto(&layer.x.view.proto);
    if (result.outputs.count == 1) {
        memcpy(dh.view.buffer[0].data, result.outputs.tensor[0].data, tensor_bytes(&dh, 0));
    }
    op_result_free(&result);
    experts_layer_free(&layer);
    return dh;
}

/* ---- reference in double ---- */

static double logistic(double x) { return 1.0 / (1.0 + exp(-x)); }

static double normal_density(double x) { return 0.39894228040143267794 * exp(-0.5 * x * x); }
static double normal_distribution(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }

/* x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 */
static double tanh_inner(double x) { return 0.79788456080286535588 * (x + 0.044715 * x * x * x); }

static bool is_any_of(const struct opaq_experts_plan *plan, enum opaq_activation a, enum opaq_activation b) {
    return plan->activation == (int)a || plan->activation == (int)b;
}

static bool is_clamped(const struct opaq_experts_plan *plan) {
    return plan->activation == OPAQ_SILU_CLAMP || is_any_of(plan, OPAQ_SWIGLU_OAI, OPAQ_SWIGLU_OAI_PACKED);
}

double reference_gate(const struct opaq_experts_plan *plan, double g) {
    const double limit = (double)plan->limit;
    if (isnan(g)) {
        return g;
    }
    if (is_any_of(plan, OPAQ_SILU, OPAQ_SILU_NO_MUL)) {
        return g * logistic(g);
    }
    if (plan->activation == OPAQ_SILU_STEP) {
        return g * logistic(g) > limit ? limit : g * logistic(g);
    }
    if (is_clamped(plan)) {
        const double gate = g > limit ? limit : g;
        return gate * logistic((double)plan->alpha * gate);
    }
    if (is_any_of(plan, OPAQ_GELU, OPAQ_GELU_NO_MUL)) {
        return g * normal_distribution(g);
    }
    if (is_any_of(plan, OPAQ_GELU_TANH, OPAQ_GELU_TANH_NO_MUL)) {
        return g * logistic(2.0 * tanh_inner(g)); /* (1 + tanh z) / 2, without cancellation */
    }
    return g > 0.0 ? g * g : 0.0;
}

/* At a limit itself the gradient passes through. */
double reference_gate_slope(const struct opaq_experts_plan *plan, double g) {
    const double limit = (double)plan->limit;
    if (is_any_of(plan, OPAQ_SILU, OPAQ_SILU_NO_MUL) || plan->activation == OPAQ_SILU_STEP) {
        const double s = logistic(g);
        return plan->activation == OPAQ_SILU_STEP && g * s > limit ? 0.0 : s + g * s * (1.0 - s);
    }
    if (is_clamped(plan)) {
        const double s = logistic((double)plan->alpha * g);
        return g > limit ? 0.0 : s + (double)plan->alpha * g * s * (1.0 - s);
    }
    if (is_any_of(plan, OPAQ_GELU, OPAQ_GELU_NO_MUL)) {
        return normal_distribution(g) + g * normal_density(g);
    }
    if (is_any_of(plan, OPAQ_GELU_TANH, OPAQ_GELU_TANH_NO_MUL)) {
        const double t = tanh(tanh_inner(g));
        return 0.5 * (1.0 + t) +
               0.5 * g * (1.0 - t * t) * 0.79788456080286535588 * (1.0 + 3.0 * 0.044715 * g * g);
    }
    return g > 0.0 ? 2.0 * g : 0.0;
}

double reference_factor(const struct opaq_experts_plan *plan, double u) {
    const double limit = (double)plan->limit;
    if (!is_gated(plan)) {
        return 1.0;
    }
    if (limit > 0.0) {
        u = u > limit ? limit : u < -limit ? -limit : u;
    }
    return u + (double)plan->beta;
}

double reference_factor_slope(const struct opaq_experts_plan *plan, double u) {
    const double limit = (double)plan->limit;
    return is_gated(plan) && (limit <= 0.0 || fabs(u) <= limit) ? 1.0 : 0.0;
}

int64_t reference_gate_column(const struct opaq_experts_plan *plan, int64_t inner, int64_t column) {
    (void)inner;
    return plan->activation == OPAQ_SWIGLU_OAI ? 2 * column : column;
}

int64_t reference_factor_column(const struct opaq_experts_plan *plan, int64_t inner, int64_t column) {
    return !is_gated(plan) ? column : plan->activation == OPAQ_SWIGLU_OAI ? 2 * column + 1 : inner + column;
}
