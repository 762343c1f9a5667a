/* op/linear/linear_forward.c: the operator linear_forward: quantize x and w, multiply, add the bias, keep what the
 * backward needs. */
#include <string.h>

#include "base/try.h"
#include "op/linear/linear_parts.h"

/* the arguments and outputs of the row */
enum { X, W, BIAS, X_SHAPE, W_SHAPE, DTYPE, PLAN, SCALE };
enum { Y, X_SAVED, W_SAVED, AMAX, RANDOM };

enum opaq_status form_linear_forward(const struct op_call *call, int output, struct opaq_form *form,
                                     struct opaq_error *error) {
    const struct opaq_linear_plan *plan = &call->plan.linear;
    const bool is_random = plan_forward_is_stochastic(plan) || plan_backward_is_stochastic(plan);
    (void)error;
    switch (output) {
    case Y:
        *form = is_quantized(&plan->y) ? form_with_usage(&plan->y, OPAQ_ROWWISE) : plan->y;
        break;
    case X_SAVED:
        *form = plan_x_saved(plan);
        break;
    case W_SAVED:
        *form = plan_w_saved(plan);
        break;
    case AMAX:
        form->kind = plan_forward_is_delayed(plan) && plan->gradients != 0 ? OPAQ_FORM_PLAIN : OPAQ_FORM_ABSENT;
        break;
    default:
        form->kind = is_random ? OPAQ_FORM_PLAIN : OPAQ_FORM_ABSENT;
    }
    return OPAQ_OK;
}

/* The first tensor of an output's data; NULL if it is absent. */
static void *output_data(const struct opaq_outputs *outputs, int output) {
    return outputs->first[output] == outputs->first[output + 1] ? NULL
                                                                : outputs->tensor[outputs->first[output]].data;
}

struct inputs {
    struct opaq_view x, w, bias;
    bool has_bias;
    const float *scale; /* of x, w and y; or NULL */
    const int64_t *random;
    float *amax; /* of x, w and y; or NULL */
};

static enum opaq_status read_inputs(const struct op_call *call, const struct linear_sizes *sizes,
                                    struct inputs *in, struct opaq_error *error) {
    const struct opaq_value *values = call->values;
    const struct opaq_linear_plan *plan = &call->plan.linear;
    const int32_t dtype = (int32_t)values[DTYPE].integer;
    memset(in, 0, sizeof *in);
    in->random = output_data(call->outputs, RANDOM);
    in->amax = output_data(call->outputs, AMAX);
    in->has_bias = values[BIAS].tensors != NULL;
    TRY(read_list(call, "x", &values[X], &plan->x_given, sizes->x_shape, sizes->rank, dtype, &in->x, error));
    TRY(read_list(call, "w", &values[W], &plan->w_given, sizes->w_shape, 2, dtype, &in->w, error));
    if (in->has_bias) {
        TRY(read_plain(call, "bias", values[BIAS].tensors, sizes->w_shape, 1, dtype, &in->bias, error));
    }
    return read_floats(call, "scale", &values[SCALE], plan_forward_is_delayed(plan), 3, &in->scale, error);
}

/* Scales and amaxes for quantizing x, w or y. */
static struct quantize_figures figures_of(const struct inputs *in, int place, int64_t stream) {
    return (struct quantize_figures){.scale = in->scale == NULL ? NULL : in->scale + place,
                                     .amax = in->amax == NULL ? NULL : in->amax + place,
                                     .random = {.state = in->random, .stream = stream}};
}

/* x or w as the product reads it: plain or quantized, including the copy that is saved. */
static enum opaq_status prepare(struct op_call *call, const struct opaq_view *view,
                                const struct opaq_form *form, struct opaq_form saved, int output,
                                struct quantize_figures figures, struct operand *operand,
                                struct opaq_error *error) {
    const struct operand_form along_rows = form_along(OPAQ_ROWWISE);
    struct opaq_view read = *view;
    if (is_quantized(form)) {
        const int usage = OPAQ_ROWWISE | (is_quantized(&saved) ? saved.spec.usage : 0);
        const struct quantize_target target = {form_with_usage(form, usage), output, figures};
        TRY(quantize_to(call, view, &target, &read, error));
    }
    return operand_make(&call->work, &read, &along_rows, operand, error);
}

enum opaq_status run_linear_forward(struct op_call *call, struct opaq_error *error) {
    enum { AMAX_X, AMAX_W, AMAX_Y, AMAX_COUNT };
    const struct opaq_linear_plan *plan = &call->plan.linear;
    struct work *work = &call->work;
    struct linear_sizes sizes;
    struct inputs in;
    struct operand x;
    struct operand w;
    struct opaq_view y;
    TRY(linear_sizes_read(call, X_SHAPE, &sizes, error));
    TRY(read_inputs(call, &sizes, &in, error));
    if (in.amax != NULL && !work->is_measuring) {
        TRY(work->backend->zero(in.amax, AMAX_COUNT * sizeof *in.amax, work->execution, error));
    }
    TRY(prepare(call, &in.x, &plan->x, plan_x_saved(plan), X_SAVED, figures_of(&in, AMAX_X, STREAM_X), &x,
                error));
    TRY(prepare(call, &in.w, &plan->w, plan_w_saved(plan), W_SAVED, figures_of(&in, AMAX_W, STREAM_W), &w,
                error));
    if (is_quantized(&plan->y)) {
        const struct opaq_view shape = {.proto = call->protos[Y]};
        TRY(work_plain_like(work, &shape, (enum opaq_element)call->values[DTYPE].integer, &y, error));
    } else {
        y = op_plain_output(call, Y);
    }
    const bool adds_bias = in.has_bias && (plan->options & OPAQ_LINEAR_BIAS_LATER) == 0;
    TRY(multiply(call, &x, &w, &y, adds_bias ? &in.bias : NULL, plan, false, error));
    if (is_quantized(&plan->y)) {
        const struct quantize_target target = {form_with_usage(&plan->y, OPAQ_ROWWISE), Y,
                                               figures_of(&in, AMAX_Y, STREAM_Y)};
        struct opaq_view quantized;
        TRY(quantize_to(call, &y, &target, &quantized, error));
    }
    return OPAQ_OK;
}
