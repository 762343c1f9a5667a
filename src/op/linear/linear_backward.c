/* op/linear/linear_backward.c: the operators linear_backward and linear_backward_changing: the gradients of a linear
 * layer, and delayed scaling's state. */
#include <string.h>

#include "base/try.h"
#include "op/linear/linear_parts.h"
#include "op/table/op_tensor.h"

/* the arguments and outputs of the rows; from AMAX on only where something is changed */
enum {
    DY,
    X,
    W,
    X_SHAPE,
    W_SHAPE,
    X_DTYPE,
    W_DTYPE,
    PLAN,
    RANDOM,
    AMAX,
    MAIN_GRAD,
    SCALE_FWD,
    HISTORY_FWD,
    SCALE_BWD,
    HISTORY_BWD
};
enum { DX, DW, DBIAS };

static bool has_main_grad(const struct opaq_linear_plan *plan) {
    return (plan->options & (OPAQ_LINEAR_ADD | OPAQ_LINEAR_SET)) != 0;
}

static bool fills_main_grad(const struct opaq_linear_plan *plan) {
    return has_main_grad(plan) && (plan->gradients & OPAQ_GRADIENT_W) != 0;
}

enum opaq_status form_linear_backward(const struct op_call *call, int output, struct opaq_form *form,
                                      struct opaq_error *error) {
    const struct opaq_linear_plan *plan = &call->plan.linear;
    const bool is_there = (plan->gradients & 1 << output) != 0 && !(output == DW && fills_main_grad(plan));
    (void)error;
    form->kind = is_there ? OPAQ_FORM_PLAIN : OPAQ_FORM_ABSENT;
    if (is_there && output == DX && is_quantized(&plan->dx)) {
        *form = form_with_usage(&plan->dx, OPAQ_ROWWISE);
    }
    return OPAQ_OK;
}

/* ---- arguments ---- */

/* The state of delayed scaling: the given scales and histories, checked. */
struct delayed {
    const float *forward_amax; /* from the forward: of x, w and y */
    float *backward_amax;      /* computed here: of dy and dx; in the arena */
    struct opaq_delayed_state forward, backward;
};

struct inputs {
    struct opaq_view dy, x, w, main_grad;
    const int64_t *random;
    struct delayed delayed;
};

/* [length][count] floats, updated in place. */
static enum opaq_status read_history(const struct op_call *call, int scale, int64_t count,
                                     struct opaq_delayed_state *state, struct opaq_error *error) {
    const struct opaq_value *values = call->values;
    const struct opaq_argument_row *rows = call->op->argument;
    const struct opaq_tensor *history = values[scale + 1].tensors;
    const float *floats;
    TRY(read_floats(call, rows[scale].name, &values[scale], true, count, &floats, error));
    if (history == NULL || history->rank != 2 || history->shape[0] < 1 || history->shape[1] != count ||
        tensor_elements(history) < 0) {
        char text[160];
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s is %s, expected [length,%lld]", rows[scale + 1].name,
                         history == NULL ? "missing" : shape_text(history, text, sizeof text),
                         (long long)count);
    }
    TRY(floats_of_tensor(rows[scale + 1].name, &values[scale + 1], tensor_elements(history), call->device,
                         &floats, error));
    *state = (struct opaq_delayed_state){.amax_history = history->data,
                                         .scale = values[scale].tensors->data,
                                         .length = history->shape[0],
                                         .count = count};
    return OPAQ_OK;
}

static enum opaq_status read_changed(const struct op_call *call, const struct linear_sizes *sizes,
                                     struct inputs *in, struct opaq_error *error) {
    const struct opaq_value *values = call->values;
    const struct opaq_linear_plan *plan = &call->plan.linear;
    const bool can_change = call->op->argument_count > AMAX;
    const bool forward = plan_forward_is_delayed(plan);
    const bool backward = plan_backward_is_delayed(plan);
    if (!can_change) {
        return !forward && !backward && !fills_main_grad(plan)
                   ? OPAQ_OK
                   : opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                               "the plan changes %s, which linear_backward_changing does",
                               fills_main_grad(plan) ? "main_grad" : "delayed scaling's state");
    }
    const struct opaq_tensor *main_grad = values[MAIN_GRAD].tensors;
    if (main_grad == NULL ? fills_main_grad(plan) : !has_main_grad(plan)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "main_grad is %s, but the plan has %s",
                         main_grad == NULL ? "missing" : "given",
                         main_grad == NULL ? "\"main_grad=\"" : "no \"main_grad=\"");
    }
    if (fills_main_grad(plan)) {
        TRY(read_plain(call, "main_grad", main_grad, sizes->w_shape, 2, -1, &in->main_grad, error));
    }
    TRY(read_floats(call, "amax", &values[AMAX], forward, 3, &in->delayed.forward_amax, error));
    if (forward) {
        TRY(read_history(call, SCALE_FWD, 3, &in->delayed.forward, error));
    }
    return backward ? read_history(call, SCALE_BWD, 2, &in->delayed.backward, error) : OPAQ_OK;
}

static enum opaq_status read_inputs(const struct op_call *call, const struct linear_sizes *sizes,
                                    struct inputs *in, struct opaq_error *error) {
    const struct opaq_value *values = call->values;
    const struct opaq_linear_plan *plan = &call->plan.linear;
    const struct opaq_form x = plan_x_kept(plan);
    const struct opaq_form w = plan_w_kept(plan);
    memset(in, 0, sizeof *in);
    TRY(read_list(call, "dy", &values[DY], &plan->dy_given, sizes->y_shape, sizes->rank, -1, &in->dy, error));
    if (x.kind != OPAQ_FORM_ABSENT) {
        TRY(read_list(call, "x", &values[X], &x, sizes->x_shape, sizes->rank, -1, &in->x, error));
    }
    if (w.kind != OPAQ_FORM_ABSENT) {
        TRY(read_list(call, "w", &values[W], &w, sizes->w_shape, 2, -1, &in->w, error));
    }
    TRY(read_random(call, &values[RANDOM], plan_backward_is_stochastic(plan), &in->random, error));
    return read_changed(call, sizes, in, error);
}

/* ---- gradients ---- */

/* Scales and amaxes for quantizing dy or dx. */
static struct quantize_figures figures_of(const struct inputs *in, int place, int64_t stream) {
    const struct delayed *delayed = &in->delayed;
    return (struct quantize_figures){
        .scale = delayed->backward.scale == NULL ? NULL : delayed->backward.scale + place,
        .amax = delayed->backward_amax == NULL ? NULL : delayed->backward_amax + place,
        .random = {.state = in->random, .stream = stream}};
}

/* dx = dy w */
static enum opaq_status input_gradient(struct op_call *call, const struct inputs *in,
                                       const struct opaq_view *dy, struct opaq_error *error) {
    const struct opaq_linear_plan *plan = &call->plan.linear;
    const bool quantizes = is_quantized(&plan->dx);
    const struct operand_form dy_form = form_along(OPAQ_ROWWISE);
    const struct operand_form w_form = kept_form(&plan->w, plan->backward, in->random, STREAM_W);
    struct operand a;
    struct operand b;
    struct opaq_view dx;
    TRY(operand_make(&call->work, dy, &dy_form, &a, error));
    TRY(operand_make(&call->work, &in->w, &w_form, &b, error));
    if (quantizes) {
        const struct opaq_view shape = {.proto = call->protos[DX]};
        TRY(work_plain_like(&call->work, &shape, (enum opaq_element)call->values[X_DTYPE].integer, &dx, error));
    } else {
        dx = op_plain_output(call, DX);
    }
    TRY(multiply(call, &a, &b, &dx, NULL, plan, false, error));
    if (quantizes) {
        const struct quantize_target target = {form_with_usage(&plan->dx, OPAQ_ROWWISE), DX,
                                               figures_of(in, 1, STREAM_DX)};
        struct opaq_view quantized;
        TRY(quantize_to(call, &dx, &target, &quantized, error));
    }
    return OPAQ_OK;
}

/* dw = dy^T x */
static enum opaq_status weight_gradient(struct op_call *call, const struct inputs *in,
                                        const struct opaq_view *dy, struct opaq_error *error) {
    const struct opaq_linear_plan *plan = &call->plan.linear;
    const struct operand_form dy_form = form_along(OPAQ_COLUMNWISE);
    const struct operand_form x_form = kept_form(&plan->x, plan->backward, in->random, STREAM_X);
    const struct opaq_view dw = fills_main_grad(plan) ? in->main_grad : op_plain_output(call, DW);
    struct operand a;
    struct operand b;
    TRY(operand_make(&call->work, dy, &dy_form, &a, error));
    TRY(operand_make(&call->work, &in->x, &x_form, &b, error));
    return multiply(call, &a, &b, &dw, NULL, plan, (plan->options & OPAQ_LINEAR_ADD) != 0, error);
}

static enum opaq_status bias_gradient(struct op_call *call, const struct inputs *in, struct opaq_error *error) {
    struct work *work = &call->work;
    struct opaq_view dy;
    const struct opaq_view dbias = op_plain_output(call, DBIAS);
    TRY(work_dequantize(work, &in->dy, &dy, error));
    const struct quant_matrix rows = quant_matrix_make(&dy);
    return work->is_measuring ? OPAQ_OK
                              : work->backend->column_sum(NULL, &rows, &dbias, work->execution, error);
}

/* Records the amaxes of forward and backward and, unless they have to be reduced first, updates the scales. */
static enum opaq_status delayed_step(const struct op_call *call, const struct delayed *delayed,
                                     struct opaq_error *error) {
    const struct opaq_linear_plan *plan = &call->plan.linear;
    const struct backend *backend = call->work.backend;
    struct delayed_rule rule = {.margin = plan->margin,
                                .algorithm = (enum opaq_amax_algorithm)plan->algorithm,
                                .updates = (plan->options & OPAQ_LINEAR_REDUCE) == 0};
    if (delayed->forward.scale != NULL) {
        rule.element = (enum opaq_element)plan_forward_element(plan);
        TRY(backend->delayed_update(&delayed->forward, delayed->forward_amax, NULL, &rule, &call->execution,
                                    error));
    }
    if (delayed->backward.scale != NULL) {
        rule.element = (enum opaq_element)plan_backward_element(plan);
        TRY(backend->delayed_update(&delayed->backward, delayed->backward_amax, NULL, &rule, &call->execution,
                                    error));
    }
    return OPAQ_OK;
}

enum opaq_status run_linear_backward(struct op_call *call, struct opaq_error *error) {
    enum { AMAX_COUNT = 2 }; /* of dy and dx */
    const struct opaq_linear_plan *plan = &call->plan.linear;
    const struct opaq_form form = plan_dy(plan);
    struct work *work = &call->work;
    struct linear_sizes sizes;
    struct inputs in;
    TRY(linear_sizes_read(call, X_SHAPE, &sizes, error));
    TRY(read_inputs(call, &sizes, &in, error));
    if (plan_backward_is_delayed(plan)) {
        in.delayed.backward_amax = arena_take_array(&work->arena, AMAX_COUNT, sizeof(float));
        if (!work->is_measuring) {
            TRY(work->backend->zero(in.delayed.backward_amax, AMAX_COUNT * sizeof(float), work->execution,
                                    error));
        }
    }
    struct opaq_view dy = in.dy;
    if (is_quantized(&form)) {
        const struct quantize_target target = {form, -1, figures_of(&in, 0, STREAM_DY)};
        TRY(quantize_to(call, &in.dy, &target, &dy, error));
    }
    if (plan->gradients & OPAQ_GRADIENT_X) {
        TRY(input_gradient(call, &in, &dy, error));
    }
    if (plan->gradients & OPAQ_GRADIENT_W) {
        TRY(weight_gradient(call, &in, &dy, error));
    }
    if (plan->gradients & OPAQ_GRADIENT_BIAS) {
        TRY(bias_gradient(call, &in, error));
    }
    return work->is_measuring ? OPAQ_OK : delayed_step(call, &in.delayed, error);
}
