/* op/linear/linear_forward.c: the operator linear_forward: quantize x and w, multiply, add the bias, keep what the backward
 * needs. */
#include <string.h>

#include "op/linear/linear_parts.h"
#include "op/table/op_table.h"
#include "opaq/status.h"

/* the arguments and outputs of the row */
enum { X, W, BIAS, X_SHAPE, W_SHAPE, DTYPE, PLAN, SCALE };
enum { Y, X_SAVED, W_SAVED, AMAX, RANDOM };

enum opaq_status form_linear_forward(const struct opaq_value *values, int output, struct opaq_form *form,
                                     struct opaq_error *error) {
    struct opaq_linear_plan plan;
    const enum opaq_status status = plan_of_training(&values[PLAN], &plan, error);
    if (status != OPAQ_OK) {
        return status;
    }
    switch (output) {
    case Y:
        *form = is_quantized(&plan.y) ? form_with_usage(&plan.y, OPAQ_ROWWISE) : plan.y;
        break;
    case X_SAVED:
        *form = plan_x_saved(&plan);
        break;
    case W_SAVED:
        *form = plan_w_saved(&plan);
        break;
    case AMAX:
        form->kind = plan_forward_is_delayed(&plan) && plan.gradients != 0 ? OPAQ_FORM_PLAIN : OPAQ_FORM_ABSENT;
        break;
    default:
        form->kind = plan_forward_is_stochastic(&plan) || plan_backward_is_stochastic(&plan) ? OPAQ_FORM_PLAIN
                                                                                             : OPAQ_FORM_ABSENT;
    }
    return OPAQ_OK;
}

/* The first tensor of an output's data; NULL if it is absent. */
static void *output_data(const struct opaq_outputs *outputs, int output) {
    return outputs->first[output] == outputs->first[output + 1] ? NULL
                                                                : outputs->tensor[outputs->first[output]].data;
}

/* x or w as the product reads it: as it came, or quantized. */
static enum opaq_status prepare(struct linear *linear, const struct opaq_form *form, struct opaq_form saved,
                                const struct linear_quantize *how, struct opaq_view *view,
                                struct linear_operand *operand, struct opaq_error *error) {
    struct opaq_view quantized = *view;
    enum opaq_status status = OPAQ_OK;
    if (is_quantized(form)) {
        struct linear_quantize now = *how;
        now.form = *form;
        now.form.spec.usage = (uint8_t)(OPAQ_ROWWISE | (is_quantized(&saved) ? saved.spec.usage : 0));
        status = linear_quantize(linear, view, &now, &quantized, error);
    }
    *view = quantized;
    return status == OPAQ_OK ? linear_operand(linear, view, OPAQ_ROWWISE, operand, error) : status;
}

struct inputs {
    struct opaq_view x, w, bias;
    bool has_bias;
    const float *scale;
    int64_t *random;
    float *amax;
};

static enum opaq_status read_inputs(const struct linear *linear, struct inputs *inputs,
                                    struct opaq_error *error) {
    const struct opaq_value *values = linear->call->values;
    const struct opaq_linear_plan *plan = &linear->plan;
    const int32_t dtype = (int32_t)values[DTYPE].integer;
    inputs->random = output_data(linear->call->outputs, RANDOM);
    inputs->amax = output_data(linear->call->outputs, AMAX);
    inputs->has_bias = values[BIAS].tensors != NULL;
    enum opaq_status status = linear_input(linear, "x", &values[X], &plan->x_given, linear->x_shape,
                                           linear->rank, dtype, &inputs->x, error);
    if (status == OPAQ_OK) {
        status =
            linear_input(linear, "w", &values[W], &plan->w_given, linear->w_shape, 2, dtype, &inputs->w, error);
    }
    if (status == OPAQ_OK && inputs->has_bias) {
        status = linear_plain_input(linear, "bias", values[BIAS].tensors, linear->w_shape, 1, dtype,
                                    &inputs->bias, error);
    }
    return status == OPAQ_OK ? linear_floats(linear, "scale", &values[SCALE], plan_forward_is_delayed(plan), 3,
                                             &inputs->scale, error)
                             : status;
}

/* Measures or runs. */
static enum opaq_status forward(struct linear *linear, struct opaq_error *error) {
    const struct opaq_linear_plan *plan = &linear->plan;
    struct inputs in;
    struct linear_operand x;
    struct linear_operand w;
    struct opaq_view y;
    memset(&in, 0, sizeof in);
    enum opaq_status status = read_inputs(linear, &in, error);
    if (status != OPAQ_OK) {
        return status;
    }
    float *const amax = linear->is_measuring ? NULL : in.amax;
    if (amax != NULL) {
        memset(amax, 0, 3 * sizeof *amax);
    }
    const struct linear_quantize how_x = {
        .output = X_SAVED, .stream = STREAM_X, .random = in.random, .scale = in.scale, .amax = amax};
    const struct linear_quantize how_w = {.output = W_SAVED,
                                          .stream = STREAM_W,
                                          .random = in.random,
                                          .scale = in.scale == NULL ? NULL : in.scale + 1,
                                          .amax = amax == NULL ? NULL : amax + 1};
    const struct linear_quantize how_y = {.form = form_with_usage(&plan->y, OPAQ_ROWWISE),
                                          .output = Y,
                                          .stream = STREAM_Y,
                                          .random = in.random,
                                          .scale = in.scale == NULL ? NULL : in.scale + 2,
                                          .amax = amax == NULL ? NULL : amax + 2};
    status = prepare(linear, &plan->x, plan_x_saved(plan), &how_x, &in.x, &x, error);
    if (status == OPAQ_OK) {
        status = prepare(linear, &plan->w, plan_w_saved(plan), &how_w, &in.w, &w, error);
    }
    if (status == OPAQ_OK && is_quantized(&plan->y)) {
        struct opaq_view shape = {.proto = linear->call->protos[Y]};
        status =
            linear_scratch(linear, &shape, (enum opaq_element)linear->call->values[DTYPE].integer, &y, error);
    } else if (status == OPAQ_OK) {
        y = linear_plain_output(linear, Y);
    }
    if (status != OPAQ_OK) {
        return status;
    }
    const bool adds_bias = in.has_bias && (plan->options & OPAQ_LINEAR_BIAS_LATER) == 0;
    const struct linear_product product = {&x, &w, &y, adds_bias ? &in.bias : NULL, false};
    struct opaq_view quantized;
    status = linear_product(linear, &product, error);
    return status == OPAQ_OK && is_quantized(&plan->y) ? linear_quantize(linear, &y, &how_y, &quantized, error)
                                                       : status;
}

enum opaq_status workspace_linear_forward(const struct opaq_call *call, size_t *bytes,
                                          struct opaq_error *error) {
    struct linear linear;
    enum opaq_status status = linear_begin(call, X_SHAPE, PLAN, true, &linear, error);
    if (status == OPAQ_OK) {
        status = forward(&linear, error);
    }
    return status == OPAQ_OK ? linear_measured(&linear, bytes, error) : status;
}

enum opaq_status run_linear_forward(const struct opaq_call *call, struct opaq_error *error) {
    struct linear linear;
    const enum opaq_status status = linear_begin(call, X_SHAPE, PLAN, false, &linear, error);
    return status == OPAQ_OK ? forward(&linear, error) : status;
}
