/* op/experts/experts_forward.c: the operators mlp, moe, mlp_forward and moe_forward: each expert's two products on its rows,
 * and the sum over experts. */
#include <string.h>

#include "cpu/moe/activation.h"
#include "op/experts/experts_batch.h"
#include "op/experts/experts_parts.h"
#include "op/table/op_table.h"
#include "op/table/op_tensor.h"
#include "opaq/status.h"

/* the outputs; h only where it is kept */
enum { Y, H };

struct forward_state {
    bool saves;
    const float *input_scale, *hidden_scale; /* or NULL */
    int64_t input_scales, hidden_scales;     /* how many */
    float *sums;                             /* where something is routed */
};

/* One float for all experts, or one for each. */
static enum opaq_status read_scale(const struct experts *experts, const char *name, const float **scale,
                                   int64_t *count, struct opaq_error *error) {
    const struct opaq_value *value = experts_argument(experts->linear.call, name);
    *count = 1;
    *scale = NULL;
    if (value == NULL || value->tensors == NULL) {
        return OPAQ_OK;
    }
    if (experts->is_routed && tensor_elements(value->tensors) != 1) {
        *count = experts->gate_up.count;
    }
    return floats_of_tensor(experts->linear.operation, name, value, *count, scale, error);
}

/* h of one expert's rows: scratch, or where it is kept. */
static enum opaq_status place_h(struct experts *experts, const struct experts_group *group,
                                const struct forward_state *state, struct opaq_view *h,
                                struct opaq_error *error) {
    if (state->saves && !experts->is_routed) {
        *h = linear_plain_output(&experts->linear, H);
        return OPAQ_OK;
    }
    return linear_matrix(&experts->linear, group->rows, experts->width, experts->dtype, h, error);
}

static enum opaq_status first_product(struct experts *experts, const struct experts_group *group,
                                      const struct forward_state *state, struct opaq_view *h,
                                      struct opaq_error *error) {
    struct linear *linear = &experts->linear;
    const struct opaq_experts_plan *plan = &experts->plan;
    const struct weight_use use = experts_use(experts, group->index, EXPERTS_W1);
    const struct linear_input_form input = {"x",
                                            "input_scale",
                                            &plan->x,
                                            state->input_scale,
                                            state->input_scales,
                                            EXPERTS_STREAMS * group->index,
                                            experts->random};
    const struct opaq_view bias = weight_bias_at(&experts->gate_up_bias, group->index);
    struct opaq_view rows;
    struct linear_operand a;
    struct linear_operand b;
    enum opaq_status status =
        experts_gather(experts, group, &experts->x, true, plan->weights_on_input != 0, &rows, error);
    if (status == OPAQ_OK) {
        status = linear_input_operand(linear, &rows, &input, group->index, &a, error);
    }
    if (status == OPAQ_OK) {
        status = weight_forward_operand(linear, &experts->gate_up, &use, &b, error);
    }
    if (status == OPAQ_OK) {
        status = place_h(experts, group, state, h, error);
    }
    const struct linear_product product = {&a, &b, h, experts->has_gate_up_bias ? &bias : NULL, false};
    return status == OPAQ_OK ? linear_product(linear, &product, error) : status;
}

static enum opaq_status second_product(struct experts *experts, const struct experts_group *group,
                                       const struct forward_state *state, const struct opaq_view *activated,
                                       struct opaq_error *error) {
    struct linear *linear = &experts->linear;
    const struct opaq_experts_plan *plan = &experts->plan;
    const struct weight_use use = experts_use(experts, group->index, EXPERTS_W2);
    const struct linear_input_form input = {"h",
                                            "hidden_scale",
                                            &plan->h,
                                            state->hidden_scale,
                                            state->hidden_scales,
                                            EXPERTS_STREAMS * group->index + EXPERTS_H,
                                            experts->random};
    const struct opaq_view bias = weight_bias_at(&experts->down_bias, group->index);
    struct linear_operand a;
    struct linear_operand b;
    enum opaq_status status = linear_input_operand(linear, activated, &input, group->index, &a, error);
    if (status == OPAQ_OK) {
        status = weight_forward_operand(linear, &experts->down, &use, &b, error);
    }
    if (status != OPAQ_OK) {
        return status;
    }
    if (!experts->is_routed) {
        const struct opaq_view y = linear_plain_output(linear, Y);
        const struct linear_product product = {&a, &b, &y, experts->has_down_bias ? &bias : NULL, false};
        return linear_product(linear, &product, error);
    }
    const struct experts_sum sum = {.a = &a,
                                    .b = &b,
                                    .bias = experts->has_down_bias ? &bias : NULL,
                                    .weighted = plan->weights_on_input == 0,
                                    .sums = state->sums};
    return experts_add(experts, group, &sum, error);
}

static enum opaq_status forward_group(struct experts *experts, const struct experts_group *group,
                                      void *argument, struct opaq_error *error) {
    const struct forward_state *state = argument;
    struct linear *linear = &experts->linear;
    struct opaq_view h;
    struct opaq_view activated;
    enum opaq_status status = first_product(experts, group, state, &h, error);
    if (status == OPAQ_OK) {
        status = linear_matrix(linear, group->rows, experts->inner, experts->dtype, &activated, error);
    }
    if (status == OPAQ_OK && !linear->is_measuring) {
        const struct quant_matrix from = quant_matrix_make(&h);
        const struct quant_matrix to = quant_matrix_make(&activated);
        activation_forward(&experts->plan, &from, &to, linear->call->parallel);
        if (state->saves && experts->is_routed) {
            const struct opaq_view kept = linear_plain_output(linear, H);
            const struct quant_matrix all = quant_matrix_make(&kept);
            routing_scatter(&group->by_slot, &from, &all, linear->call->parallel);
        }
    }
    return status == OPAQ_OK ? second_product(experts, group, state, &activated, error) : status;
}

/* Expert by expert. */
static enum opaq_status forward_each(struct experts *experts, struct forward_state *state,
                                     struct opaq_error *error) {
    enum opaq_status status = experts->is_routed ? experts_sums(experts, &state->sums, error) : OPAQ_OK;
    if (status == OPAQ_OK && experts->is_routed && state->saves && !experts->linear.is_measuring) {
        const struct opaq_view kept = linear_plain_output(&experts->linear, H);
        if (kept.buffer[0].bytes > 0) {
            memset(kept.buffer[0].data, 0, kept.buffer[0].bytes); /* slots that are nobody's */
        }
    }
    if (status == OPAQ_OK) {
        status = experts_each(experts, forward_group, NULL, state, error);
    }
    if (status == OPAQ_OK && experts->is_routed && !experts->linear.is_measuring) {
        experts_store_sums(experts, state->sums, Y);
    }
    return status;
}

/* Many experts at once where that can be done. What it takes is measured for both ways, because which it will be shows in
 * the run. */
static enum opaq_status forward_best(struct experts *experts, struct forward_state *state,
                                     struct opaq_error *error) {
    struct scratch *scratch = &experts->linear.scratch;
    const size_t mark = scratch->used;
    const bool at_once = !state->saves && state->input_scale == NULL && state->hidden_scale == NULL &&
                         experts_batch_can_run(experts);
    enum opaq_status status = at_once ? experts_batch_forward(experts, error) : OPAQ_OK;
    if (status != OPAQ_OK || (at_once && !experts->linear.is_measuring)) {
        return status;
    }
    scratch->used = mark;
    return forward_each(experts, state, error);
}

/* Measures or runs. */
static enum opaq_status forward(struct experts *experts, struct opaq_error *error) {
    const struct opaq_call *call = experts->linear.call;
    struct forward_state state = {.saves = call->op->output_count > 1};
    enum opaq_status status =
        read_scale(experts, "input_scale", &state.input_scale, &state.input_scales, error);
    if (status == OPAQ_OK) {
        status = read_scale(experts, "hidden_scale", &state.hidden_scale, &state.hidden_scales, error);
    }
    if (status == OPAQ_OK && !state.saves &&
        (experts->plan.gradients != 0 || is_quantized(&experts->plan.dy) || experts->plan.backward != 0)) {
        status =
            opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: the plan has %s, which %s_forward takes", call->op->name,
                      experts->plan.gradients != 0      ? "grad="
                      : is_quantized(&experts->plan.dy) ? "dy="
                                                        : "backward=",
                      call->op->name);
    }
    return status == OPAQ_OK ? forward_best(experts, &state, error) : status;
}

enum opaq_status workspace_experts_forward(const struct opaq_call *call, size_t *bytes,
                                           struct opaq_error *error) {
    struct experts experts;
    enum opaq_status status = experts_begin(call, true, &experts, error);
    if (status == OPAQ_OK) {
        status = forward(&experts, error);
    }
    return status == OPAQ_OK ? linear_measured(&experts.linear, bytes, error) : status;
}

enum opaq_status run_experts_forward(const struct opaq_call *call, struct opaq_error *error) {
    struct experts experts;
    const enum opaq_status status = experts_begin(call, false, &experts, error);
    return status == OPAQ_OK ? forward(&experts, error) : status;
}
