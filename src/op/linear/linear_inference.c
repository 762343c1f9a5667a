/* op/linear/linear_inference.c: the operator linear: x w^T + bias, nothing kept. */
#include <string.h>

#include "op/table/op_table.h"
#include "op/table/op_tensor.h"
#include "op/linear/weight_stack.h"
#include "opaq/status.h"

/* the arguments of the row */
enum { X, W, BIAS, W_SHAPE, PLAN, INPUT_SCALE };

static enum opaq_status read_plan(struct linear *linear, struct opaq_error *error) {
    struct opaq_error reason;
    const struct opaq_linear_plan *plan = &linear->plan;
    const enum opaq_status status = plan_of_value(&linear->call->values[PLAN], &linear->plan, &reason);
    if (status != OPAQ_OK) {
        return opaq_fail(error, status, "%s: %s", linear->operation, reason.text);
    }
    if (plan->gradients || plan->saved || plan->options || plan->backward || plan->margin || plan->algorithm ||
        is_quantized(&plan->y) || is_quantized(&plan->dy) || is_quantized(&plan->dx) ||
        is_quantized(&plan->x_given) || is_quantized(&plan->dy_given)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "%s: the plan has words beside x=, w= and w_given=, which linear_forward takes",
                         linear->operation);
    }
    if (plan_forward_is_stochastic(plan)) {
        return opaq_fail(
            error, OPAQ_ERROR_ARGUMENT,
            "%s: the plan rounds stochastically (sr), for which linear_forward takes random numbers",
            linear->operation);
    }
    if (has_option(&plan->w, OPAQ_DELAYED)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "%s: w= takes a scale (delayed), which a weight that is quantized here has not",
                         linear->operation);
    }
    return OPAQ_OK;
}

/* Measures or runs. */
static enum opaq_status forward(struct linear *linear, struct opaq_error *error) {
    const struct opaq_value *values = linear->call->values;
    const struct opaq_tensor *tensor = values[X].tensors;
    struct weight_stack weights;
    struct opaq_view x;
    struct opaq_view bias;
    bool has_bias = false;
    const float *given = NULL;
    linear->device = tensor->device;
    enum opaq_status status = read_plan(linear, error);
    if (status == OPAQ_OK) {
        status = view_of_tensor(linear->operation, "x", tensor, &x, error);
    }
    if (status == OPAQ_OK) {
        status = weight_stack_read(linear, "w", &values[W], &values[W_SHAPE], 2, &linear->plan.w_given,
                                   &linear->plan.w, tensor->dtype, &weights, error);
    }
    if (status == OPAQ_OK) {
        status =
            weight_bias_read(linear, "bias", &values[BIAS], &weights, tensor->dtype, &bias, &has_bias, error);
    }
    if (status == OPAQ_OK) {
        status = floats_of_tensor(linear->operation, "input_scale", &values[INPUT_SCALE], 1, &given, error);
    }
    if (status == OPAQ_OK && opaq_proto_columns(&x.proto) != weights.columns) {
        char text[160];
        status =
            opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: x of shape %s has %lld features, expected the %lld of w",
                      linear->operation, shape_text(tensor, text, sizeof text),
                      (long long)opaq_proto_columns(&x.proto), (long long)weights.columns);
    }
    if (status != OPAQ_OK) {
        return status;
    }
    struct linear_operand a;
    struct linear_operand b;
    const struct weight_use use = {.stream = STREAM_W};
    const struct opaq_view y = linear_plain_output(linear, 0);
    const struct linear_input_form input = {"x", "input_scale", &linear->plan.x, given, 1, STREAM_X, NULL};
    status = linear_input_operand(linear, &x, &input, 0, &a, error);
    if (status == OPAQ_OK) {
        status = weight_forward_operand(linear, &weights, &use, &b, error);
    }
    const struct linear_product product = {&a, &b, &y, has_bias ? &bias : NULL, false};
    return status == OPAQ_OK ? linear_product(linear, &product, error) : status;
}

enum opaq_status workspace_linear(const struct opaq_call *call, size_t *bytes, struct opaq_error *error) {
    struct linear linear = linear_workbench(call, true);
    const enum opaq_status status = forward(&linear, error);
    return status == OPAQ_OK ? linear_measured(&linear, bytes, error) : status;
}

enum opaq_status run_linear(const struct opaq_call *call, struct opaq_error *error) {
    struct linear linear = linear_workbench(call, false);
    return forward(&linear, error);
}
