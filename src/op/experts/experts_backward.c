/* op/experts/experts_backward.c: the operators mlp_backward and moe_backward. h is kept by the forward; everything else is
 * computed again from the arguments, with the same bytes. For one expert's rows (dy, x, h; a = activation(h); r: router
 * weights, 1 for an mlp; all but r go through the recipe's quantizers):
 *
 *     da = dy down          dr = sum of a da (+ dy . bias)        da = r da
 *     ddown = (r dy)^T a    dh = activation'(h, da)
 *     dx = dh gate_up       dgate_up = dh^T x
 *
 * With router weights on the input x is r x, dr = sum of x dx, and r stands before dx instead. */
#include <string.h>

#include "cpu/gemm/column_sum.h"
#include "cpu/moe/activation.h"
#include "op/experts/experts_parts.h"
#include "op/table/op_table.h"
#include "op/table/op_tensor.h"
#include "opaq/status.h"

/* ---- forms ---- */

/* The outputs of moe_backward by their gradients' bits; mlp_backward leaves the router's out. */
static const int32_t gradient_bits[] = {OPAQ_EXPERTS_X,    OPAQ_EXPERTS_ROUTER,       OPAQ_EXPERTS_GATE_UP,
                                        OPAQ_EXPERTS_DOWN, OPAQ_EXPERTS_GATE_UP_BIAS, OPAQ_EXPERTS_DOWN_BIAS};
enum { DX, DROUTER, DGATE_UP, DDOWN, DGATE_UP_BIAS, DDOWN_BIAS };

/* Which output row stands for one of these. */
static int output_of(const struct experts *experts, int which) {
    return experts->is_routed || which < DROUTER ? which : which - 1;
}

static enum opaq_status form_of(const struct opaq_value *plan_text, int32_t bit, struct opaq_form *form,
                                struct opaq_error *error) {
    struct opaq_experts_plan plan;
    const enum opaq_status status = experts_plan_of_value(plan_text, &plan, error);
    form->kind = status == OPAQ_OK && (plan.gradients & bit) ? OPAQ_FORM_PLAIN : OPAQ_FORM_ABSENT;
    return status;
}

enum opaq_status form_moe_backward(const struct opaq_value *values, int output, struct opaq_form *form,
                                   struct opaq_error *error) {
    enum { PLAN = 11 };
    return form_of(&values[PLAN], gradient_bits[output], form, error);
}

enum opaq_status form_mlp_backward(const struct opaq_value *values, int output, struct opaq_form *form,
                                   struct opaq_error *error) {
    enum { PLAN = 8 };
    return form_of(&values[PLAN], gradient_bits[output == DX ? DX : output + 1], form, error);
}

/* ---- one expert ---- */

struct backward_state {
    struct opaq_view dy, h;
    float *dx_sums;       /* where something is routed */
    float *router_result; /* by slot */
};

static bool wants(const struct experts *experts, int which) {
    return (experts->plan.gradients & gradient_bits[which]) != 0;
}

/* dy, or dh, quantized in the usages that products read; as it is where the backward is not quantized. */
static enum opaq_status quantize_gradient(struct experts *experts, const struct experts_group *group,
                                          const struct opaq_view *gradient, int usage,
                                          enum experts_stream stream, struct opaq_view *quantized,
                                          struct opaq_error *error) {
    const struct opaq_experts_plan *plan = &experts->plan;
    *quantized = *gradient;
    if (!is_quantized(&plan->dy) || plan->backward != OPAQ_BACKWARD_QUANTIZED || usage == 0) {
        return OPAQ_OK;
    }
    const struct linear_quantize how = {.form = form_with_usage(&plan->dy, usage),
                                        .output = -1,
                                        .stream = EXPERTS_STREAMS * group->index + (int64_t)stream,
                                        .random = experts->random};
    return linear_quantize(&experts->linear, gradient, &how, quantized, error);
}

/* An expert's part of a weight's (a bias') gradient. */
static struct opaq_view gradient_at(const struct experts *experts, int which, int64_t index) {
    const struct opaq_view whole = linear_plain_output(&experts->linear, output_of(experts, which));
    return which <= DDOWN ? weight_plain_at(&whole, index) : weight_bias_at(&whole, index);
}

/* dw = dy^T x, and the sums of dy's columns. */
struct weight_gradient {
    int which, bias;
    const struct opaq_view *dy;        /* plain */
    const struct opaq_view *quantized; /* the same, columnwise */
    const struct opaq_view *x;
    const struct opaq_form *form;
    enum experts_stream stream;
};

static enum opaq_status weight_gradient(struct experts *experts, const struct experts_group *group,
                                        const struct weight_gradient *what, struct opaq_error *error) {
    struct linear *linear = &experts->linear;
    enum opaq_status status = OPAQ_OK;
    if (wants(experts, what->which)) {
        const struct linear_kept kept = {what->x, what->form, experts->plan.backward,
                                         EXPERTS_STREAMS * group->index + (int64_t)what->stream,
                                         experts->random};
        struct linear_operand a;
        struct linear_operand b;
        const struct opaq_view dw = gradient_at(experts, what->which, group->index);
        status = linear_operand(linear, what->quantized, OPAQ_COLUMNWISE, &a, error);
        if (status == OPAQ_OK) {
            status = linear_kept_operand(linear, &kept, &b, error);
        }
        const struct linear_product product = {&a, &b, &dw, NULL, false};
        status = status == OPAQ_OK ? linear_product(linear, &product, error) : status;
    }
    if (status == OPAQ_OK && wants(experts, what->bias) && !linear->is_measuring) {
        const struct opaq_view dbias = gradient_at(experts, what->bias, group->index);
        const struct quant_matrix matrix = quant_matrix_make(what->dy);
        const struct quant_matrix sums = quant_matrix_make(&dbias);
        column_sum(&matrix, &sums, linear->call->parallel);
    }
    return status;
}

/* What the forward multiplied, where the backward is to differentiate just that. */
static enum opaq_status seen_by_forward(struct experts *experts, const struct experts_group *group,
                                        const struct opaq_view *activated, struct opaq_view *seen,
                                        struct opaq_error *error) {
    struct opaq_view quantized;
    *seen = *activated;
    if (experts->plan.backward != OPAQ_BACKWARD_DEQUANTIZED || !is_quantized(&experts->plan.h)) {
        return OPAQ_OK;
    }
    const struct linear_quantize how = {.form = form_with_usage(&experts->plan.h, OPAQ_ROWWISE),
                                        .output = -1,
                                        .stream = EXPERTS_STREAMS * group->index + EXPERTS_H,
                                        .random = experts->random};
    const enum opaq_status status = linear_quantize(&experts->linear, activated, &how, &quantized, error);
    return status == OPAQ_OK ? linear_plain(&experts->linear, &quantized, seen, error) : status;
}

/* The second product's gradients: da (times r), the router's, ddown. `weighted` is r dy, or dy where r is not here. */
static enum opaq_status backward_down(struct experts *experts, const struct experts_group *group,
                                      const struct backward_state *state, const struct opaq_view *activated,
                                      struct opaq_view *da, struct opaq_error *error) {
    struct linear *linear = &experts->linear;
    const bool has_weights = experts->is_routed && !experts->plan.weights_on_input;
    const bool wants_router = wants(experts, DROUTER) && has_weights;
    const bool wants_dw = wants(experts, DDOWN) || wants(experts, DDOWN_BIAS);
    const struct weight_use use = experts_use(experts, group->index, EXPERTS_W2);
    struct opaq_view dy;
    struct opaq_view weighted;
    struct opaq_view quantized;
    struct opaq_view quantized_weighted;
    struct opaq_view seen = *activated;
    struct linear_operand a;
    struct linear_operand b;
    memset(&dy, 0, sizeof dy);
    enum opaq_status status = experts_gather(experts, group, &state->dy, true, false, &dy, error);
    weighted = dy;
    quantized = dy;
    if (status == OPAQ_OK && has_weights && wants_dw) {
        status = experts_gather(experts, group, &state->dy, true, true, &weighted, error);
    }
    const int columnwise = wants(experts, DDOWN) ? OPAQ_COLUMNWISE : 0;
    if (status == OPAQ_OK) {
        status = quantize_gradient(experts, group, &dy, OPAQ_ROWWISE | (has_weights ? 0 : columnwise),
                                   EXPERTS_DY, &quantized, error);
    }
    quantized_weighted = quantized;
    if (status == OPAQ_OK && has_weights) {
        status =
            quantize_gradient(experts, group, &weighted, columnwise, EXPERTS_DY, &quantized_weighted, error);
    }
    if (status == OPAQ_OK) {
        status = linear_operand(linear, &quantized, OPAQ_ROWWISE, &a, error);
    }
    if (status == OPAQ_OK) {
        status = weight_backward_operand(linear, &experts->down, &use, &b, error);
    }
    if (status == OPAQ_OK) {
        status = linear_matrix(linear, group->rows, experts->inner, OPAQ_F32, da, error);
    }
    const struct linear_product product = {&a, &b, da, NULL, false};
    if (status == OPAQ_OK) {
        status = linear_product(linear, &product, error);
    }
    if (status == OPAQ_OK && wants_router) {
        status = seen_by_forward(experts, group, activated, &seen, error);
    }
    if (status == OPAQ_OK && has_weights && !linear->is_measuring) {
        const struct quant_matrix left = quant_matrix_make(&seen);
        const struct quant_matrix right = quant_matrix_make(da);
        if (wants_router) {
            const struct routing_dot dot = {&left, &right, false};
            routing_dot(&group->by_slot, &dot, state->router_result, linear->call->parallel);
        }
        if (wants_router && experts->has_down_bias) {
            const struct opaq_view bias = weight_bias_at(&experts->down_bias, group->index);
            const struct quant_matrix rows = quant_matrix_make(&dy);
            struct quant_matrix same = quant_matrix_make(&bias);
            same.row_step = 0;
            const struct routing_dot dot = {&rows, &same, true};
            routing_dot(&group->by_slot, &dot, state->router_result, linear->call->parallel);
        }
        routing_weigh(&group->by_slot, experts->routing.weight, &right, linear->call->parallel);
    }
    const struct weight_gradient gradient = {DDOWN,     DDOWN_BIAS,       &weighted, &quantized_weighted,
                                             activated, &experts->plan.h, EXPERTS_H};
    return status == OPAQ_OK ? weight_gradient(experts, group, &gradient, error) : status;
}

static enum opaq_status input_gradient(struct experts *experts, const struct experts_group *group,
                                       const struct backward_state *state, const struct opaq_view *dh,
                                       struct opaq_error *error) {
    struct linear *linear = &experts->linear;
    const bool on_input = experts->plan.weights_on_input != 0;
    const struct weight_use use = experts_use(experts, group->index, EXPERTS_W1);
    struct linear_operand a;
    struct linear_operand b;
    struct opaq_view rows;
    enum opaq_status status = linear_operand(linear, dh, OPAQ_ROWWISE, &a, error);
    if (status == OPAQ_OK) {
        status = weight_backward_operand(linear, &experts->gate_up, &use, &b, error);
    }
    if (status != OPAQ_OK) {
        return status;
    }
    if (!experts->is_routed) {
        const struct opaq_view dx = linear_plain_output(linear, DX);
        const struct linear_product product = {&a, &b, &dx, NULL, false};
        return linear_product(linear, &product, error);
    }
    const bool wants_router = on_input && wants(experts, DROUTER);
    if (wants_router) {
        status = experts_gather(experts, group, &experts->x, true, false, &rows, error);
    }
    const struct experts_sum sum = {.a = &a,
                                    .b = &b,
                                    .weighted = on_input,
                                    .sums = state->dx_sums,
                                    .dot = wants_router ? &rows : NULL,
                                    .dot_result = state->router_result};
    return status == OPAQ_OK ? experts_add(experts, group, &sum, error) : status;
}

/* The first product's gradients. */
static enum opaq_status backward_gate_up(struct experts *experts, const struct experts_group *group,
                                         const struct backward_state *state, const struct opaq_view *dh,
                                         struct opaq_error *error) {
    const bool on_input = experts->plan.weights_on_input != 0;
    const bool needs_dx = wants(experts, DX) || (on_input && wants(experts, DROUTER));
    const int usage = (needs_dx ? OPAQ_ROWWISE : 0) | (wants(experts, DGATE_UP) ? OPAQ_COLUMNWISE : 0);
    struct opaq_view quantized;
    struct opaq_view x = experts->x;
    enum opaq_status status = quantize_gradient(experts, group, dh, usage, EXPERTS_DH, &quantized, error);
    if (status == OPAQ_OK && needs_dx) {
        status = input_gradient(experts, group, state, &quantized, error);
    }
    if (status == OPAQ_OK && wants(experts, DGATE_UP)) {
        status = experts_gather(experts, group, &experts->x, true, on_input, &x, error);
    }
    const struct weight_gradient gradient = {DGATE_UP, DGATE_UP_BIAS,    dh,       &quantized,
                                             &x,       &experts->plan.x, EXPERTS_X};
    return status == OPAQ_OK ? weight_gradient(experts, group, &gradient, error) : status;
}

static enum opaq_status backward_group(struct experts *experts, const struct experts_group *group,
                                       void *argument, struct opaq_error *error) {
    const struct backward_state *state = argument;
    struct linear *linear = &experts->linear;
    struct opaq_view h;
    struct opaq_view activated;
    struct opaq_view da;
    struct opaq_view dh;
    enum opaq_status status = experts_gather(experts, group, &state->h, false, false, &h, error);
    if (status == OPAQ_OK) {
        status = linear_matrix(linear, group->rows, experts->inner, experts->dtype, &activated, error);
    }
    const struct quant_matrix from = quant_matrix_make(&h);
    if (status == OPAQ_OK && !linear->is_measuring) {
        const struct quant_matrix to = quant_matrix_make(&activated);
        activation_forward(&experts->plan, &from, &to, linear->call->parallel);
    }
    if (status == OPAQ_OK) {
        status = backward_down(experts, group, state, &activated, &da, error);
    }
    if (status == OPAQ_OK) {
        status = linear_matrix(linear, group->rows, experts->width, experts->dtype, &dh, error);
    }
    if (status == OPAQ_OK && !linear->is_measuring) {
        const struct quant_matrix upstream = quant_matrix_make(&da);
        const struct quant_matrix to = quant_matrix_make(&dh);
        activation_backward(&experts->plan, &from, &upstream, &to, linear->call->parallel);
    }
    return status == OPAQ_OK ? backward_gate_up(experts, group, state, &dh, error) : status;
}

/* An expert that nobody chose. */
static void clear_gradients(struct experts *experts, int64_t index, void *state) {
    (void)state;
    for (int which = DGATE_UP; which <= DDOWN_BIAS; ++which) {
        if (wants(experts, which)) {
            const struct opaq_view part = gradient_at(experts, which, index);
            size_t bytes = 0;
            (void)opaq_proto_bytes(&part.proto, &bytes, NULL); /* of a prototype that was made */
            if (bytes > 0) {
                memset(part.buffer[0].data, 0, bytes);
            }
        }
    }
}

/* ---- all of them ---- */

/* dy like x, h [.., width] for each row or slot, in x's dtype. */
static enum opaq_status read_gradients(const struct experts *experts, struct backward_state *state,
                                       struct opaq_error *error) {
    const struct linear *linear = &experts->linear;
    const struct opaq_tensor *h = experts_argument(linear->call, "h")->tensors;
    const struct opaq_tensor *dy = experts_argument(linear->call, "dy")->tensors;
    const int64_t rows = experts->is_routed ? experts->rows * experts->routing.choices : experts->rows;
    enum opaq_status status = linear_plain_input(linear, "dy", dy, experts->x.proto.shape,
                                                 experts->x.proto.rank, -1, &state->dy, error);
    if (status == OPAQ_OK) {
        status = view_of_tensor(linear->operation, "h", h, &state->h, error);
    }
    if (status == OPAQ_OK &&
        (h->device.type != linear->device.type || h->device.index != linear->device.index)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: h is on another device than the first tensor",
                         linear->operation);
    }
    if (status == OPAQ_OK && (h->dtype != (int32_t)experts->dtype || opaq_proto_rows(&state->h.proto) != rows ||
                              opaq_proto_columns(&state->h.proto) != experts->width)) {
        char text[160];
        return opaq_fail(error, OPAQ_ERROR_SHAPE,
                         "%s: h is %s%s, expected what the forward gave: %s, %lld x %lld", linear->operation,
                         dtype_name(h->dtype), shape_text(h, text, sizeof text),
                         dtype_name((int32_t)experts->dtype), (long long)rows, (long long)experts->width);
    }
    return status;
}

/* The router's gradients, by slot, as the output. */
static void store_router(const struct experts *experts, const float *result) {
    const struct opaq_view view = linear_plain_output(&experts->linear, DROUTER);
    struct quant_matrix to = quant_matrix_make(&view);
    const struct quant_matrix from = {(void *)(uintptr_t)result, OPAQ_F32, to.rows, to.columns, to.columns, 1};
    routing_copy(&from, &to, experts->linear.call->parallel);
}

/* Measures or runs. */
static enum opaq_status backward(struct experts *experts, struct opaq_error *error) {
    struct backward_state state;
    const struct routing *routing = &experts->routing;
    const bool has_router = experts->is_routed && wants(experts, DROUTER);
    memset(&state, 0, sizeof state);
    enum opaq_status status = read_gradients(experts, &state, error);
    if (status == OPAQ_OK && experts->is_routed) {
        status = experts_sums(experts, &state.dx_sums, error);
    }
    if (status == OPAQ_OK && has_router) {
        const int64_t slots = routing->tokens * routing->choices;
        state.router_result = scratch_take_array(&experts->linear.scratch, slots, sizeof(float));
        if (!experts->linear.is_measuring && slots > 0) {
            memset(state.router_result, 0, (size_t)slots * sizeof(float));
        }
    }
    if (status == OPAQ_OK) {
        status = experts_each(experts, backward_group, clear_gradients, &state, error);
    }
    if (status != OPAQ_OK || experts->linear.is_measuring) {
        return status;
    }
    if (experts->is_routed && wants(experts, DX)) {
        experts_store_sums(experts, state.dx_sums, DX);
    }
    if (has_router) {
        store_router(experts, state.router_result);
    }
    return OPAQ_OK;
}

enum opaq_status workspace_experts_backward(const struct opaq_call *call, size_t *bytes,
                                            struct opaq_error *error) {
    struct experts experts;
    enum opaq_status status = experts_begin(call, true, &experts, error);
    if (status == OPAQ_OK) {
        status = backward(&experts, error);
    }
    return status == OPAQ_OK ? linear_measured(&experts.linear, bytes, error) : status;
}

enum opaq_status run_experts_backward(const struct opaq_call *call, struct opaq_error *error) {
    struct experts experts;
    const enum opaq_status status = experts_begin(call, false, &experts, error);
    return status == OPAQ_OK ? backward(&experts, error) : status;
}
