/* op/experts/experts_forward.c: the operators mlp, moe, mlp_forward and moe_forward: each expert's two products on its
 * rows, and the sum over experts. */
#include <string.h>

#include "base/try.h"
#include "op/experts/experts_parts.h"
#include "op/table/op_tensor.h"

/* the outputs; h only where it is kept */
enum { Y, H };

/* A scale from a checkpoint: one float for all experts, or one per expert. */
struct given_scale {
    const float *floats; /* or NULL */
    int64_t step;        /* 1: one per expert */
};

static enum opaq_status read_scale(const struct experts *experts, const char *name, const char *operand,
                                   const struct opaq_form *form, struct given_scale *scale,
                                   struct opaq_error *error) {
    const struct opaq_value *value = op_argument(experts->call, name);
    *scale = (struct given_scale){NULL, 0};
    if (value != NULL && value->tensors != NULL) {
        scale->step = experts->is_routed && tensor_elements(value->tensors) != 1;
        TRY(floats_of_tensor(name, value, scale->step ? experts->gate_up.count : 1, experts->call->device,
                             &scale->floats, error));
    }
    return check_given_scale(name, operand, form, scale->floats, error);
}

static enum opaq_status check_inference_plan(const struct experts *experts, struct opaq_error *error) {
    const struct opaq_experts_plan *plan = experts->plan;
    if (plan->gradients == 0 && !is_quantized(&plan->dy) && plan->backward == 0) {
        return OPAQ_OK;
    }
    return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "the plan has %s, which %s_forward takes",
                     plan->gradients != 0      ? "grad="
                     : is_quantized(&plan->dy) ? "dy="
                                               : "backward=",
                     experts->call->op->name);
}

/* a = activation(x gate_up^T + bias), sorted; h is kept if the operator has that output. */
static enum opaq_status first_product(struct experts *experts, const struct given_scale *scale,
                                      const struct opaq_view *activated, struct opaq_error *error) {
    const struct opaq_experts_plan *plan = experts->plan;
    struct op_call *call = experts->call;
    struct work *work = &call->work;
    struct grouped_product job = {
        .groups = &experts->groups,
        .a = experts_token_rows(experts, &experts->x, plan->weights_on_input != 0,
                                forward_form(&plan->x, scale->floats, experts->random, EXPERTS_X)),
        .w = {experts->gate_up.view, forward_form(&plan->w, NULL, experts->random, EXPERTS_W1)},
        .bias = experts->has_gate_up_bias ? &experts->gate_up_bias : NULL,
        .any_order = plan->order == OPAQ_ORDER_ANY,
        .precision = plan->precision,
        .result = GROUPED_ACTIVATE,
        .c = quant_matrix_make(activated),
        .activation = plan};
    job.a.figure_step = scale->step;
    if (call->op->output_count > 1) {
        const struct opaq_view h = op_plain_output(call, H);
        job.h = quant_matrix_make(&h);
        if (experts->is_routed && !work->is_measuring) { /* slots without an expert */
            TRY(work->backend->zero(h.buffer[0].data, h.buffer[0].bytes, work->execution, error));
        }
    }
    return work_grouped_product(work, &job, error);
}

/* y = a down^T + bias, summed over each token's experts. */
static enum opaq_status second_product(struct experts *experts, const struct given_scale *scale,
                                       const struct opaq_view *activated, const struct opaq_view *sums,
                                       struct opaq_error *error) {
    const struct opaq_experts_plan *plan = experts->plan;
    const struct opaq_view y = op_plain_output(experts->call, Y);
    struct grouped_product job = {
        .groups = &experts->groups,
        .a = sorted_rows(activated, forward_form(&plan->h, scale->floats, experts->random, EXPERTS_H)),
        .w = {experts->down.view, forward_form(&plan->w, NULL, experts->random, EXPERTS_W2)},
        .bias = experts->has_down_bias ? &experts->down_bias : NULL,
        .any_order = plan->order == OPAQ_ORDER_ANY,
        .precision = plan->precision,
        .result = GROUPED_STORE,
        .c = quant_matrix_make(&y)};
    job.a.figure_step = scale->step;
    if (experts->is_routed) {
        job.result = GROUPED_COMBINE;
        job.sums = quant_matrix_make(sums);
        job.is_weighted = plan->weights_on_input == 0;
    }
    return work_grouped_product(&experts->call->work, &job, error);
}

/* Reads the call, and computes the first product. */
static enum opaq_status begin_forward(struct op_call *call, struct experts *experts,
                                      struct given_scale *hidden_scale, struct opaq_view *sums,
                                      struct opaq_view *activated, struct opaq_error *error) {
    struct given_scale input_scale;
    TRY(experts_begin(call, experts, error));
    TRY(read_scale(experts, "input_scale", "x", &experts->plan->x, &input_scale, error));
    TRY(read_scale(experts, "hidden_scale", "h", &experts->plan->h, hidden_scale, error));
    if (call->op->output_count == 1) {
        TRY(check_inference_plan(experts, error));
    }
    if (sums != NULL && experts->is_routed) {
        TRY(experts_sums(experts, sums, error));
    }
    TRY(experts_matrix(experts, experts->inner, experts->dtype, activated, error));
    return first_product(experts, &input_scale, activated, error);
}

enum opaq_status run_experts_forward(struct op_call *call, struct opaq_error *error) {
    struct experts experts;
    struct given_scale hidden_scale;
    struct opaq_view sums;
    struct opaq_view activated;
    memset(&sums, 0, sizeof sums);
    TRY(begin_forward(call, &experts, &hidden_scale, &sums, &activated, error));
    TRY(second_product(&experts, &hidden_scale, &activated, &sums, error));
    return experts.is_routed ? experts_store_sums(&experts, &sums, Y, error) : OPAQ_OK;
}

enum opaq_status run_experts_hidden(struct op_call *call, struct opaq_error *error) {
    struct experts experts;
    struct given_scale hidden_scale;
    struct opaq_view activated;
    return begin_forward(call, &experts, &hidden_scale, NULL, &activated, error);
}
