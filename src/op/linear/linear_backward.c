/* op/linear/linear_backward.c: the operators linear_backward and linear_backward_changing: the gradients of a linear layer,
 * and delayed scaling's state. */
#include <assert.h>
#include <string.h>

#include "cpu/gemm/column_sum.h"
#include "op/linear/linear_parts.h"
#include "op/table/op_table.h"
#include "op/table/op_tensor.h"
#include "opaq/status.h"

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

enum opaq_status form_linear_backward(const struct opaq_value *values, int output, struct opaq_form *form,
                                      struct opaq_error *error) {
    struct opaq_linear_plan plan;
    const enum opaq_status status = plan_of_training(&values[PLAN], &plan, error);
    if (status != OPAQ_OK) {
        return status;
    }
    const bool is_there = (plan.gradients & 1 << output) != 0 && !(output == DW && fills_main_grad(&plan));
    form->kind = is_there ? OPAQ_FORM_PLAIN : OPAQ_FORM_ABSENT;
    if (is_there && output == DX && is_quantized(&plan.dx)) {
        *form = form_with_usage(&plan.dx, OPAQ_ROWWISE);
    }
    return OPAQ_OK;
}

/* Delayed scaling's state: the scales and histories that are there, checked. */
struct delayed {
    const float *amax; /* the forward's */
    struct opaq_delayed_state forward, backward;
};

struct inputs {
    struct opaq_view dy, x, w, main_grad;
    const int64_t *random;
    struct delayed delayed;
};

/* [length][count] floats, written into. */
static enum opaq_status read_history(const struct linear *linear, int scale, int64_t count,
                                     struct opaq_delayed_state *state, struct opaq_error *error) {
    const struct opaq_value *values = linear->call->values;
    const struct opaq_argument_row *rows = linear->call->op->argument;
    const struct opaq_tensor *history = values[scale + 1].tensors;
    const float *floats;
    enum opaq_status status =
        linear_floats(linear, rows[scale].name, &values[scale], true, count, &floats, error);
    if (status != OPAQ_OK) {
        return status;
    }
    if (history == NULL || history->rank != 2 || history->shape[0] < 1 || history->shape[1] != count ||
        tensor_elements(history) < 0) {
        char text[160];
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: %s is %s, expected [length,%lld]", linear->operation,
                         rows[scale + 1].name,
                         history == NULL ? "missing" : shape_text(history, text, sizeof text),
                         (long long)count);
    }
    status = floats_of_tensor(linear->operation, rows[scale + 1].name, &values[scale + 1],
                              tensor_elements(history), &floats, error);
    *state = (struct opaq_delayed_state){.amax_history = history->data,
                                         .scale = values[scale].tensors->data,
                                         .length = history->shape[0],
                                         .count = count};
    return status;
}

static enum opaq_status read_changed(const struct linear *linear, struct inputs *in, struct opaq_error *error) {
    const struct opaq_value *values = linear->call->values;
    const struct opaq_linear_plan *plan = &linear->plan;
    const bool can_change = linear->call->op->argument_count > AMAX;
    const bool forward = plan_forward_is_delayed(plan);
    const bool backward = plan_backward_is_delayed(plan);
    if (!can_change) {
        return !forward && !backward && !fills_main_grad(plan)
                   ? OPAQ_OK
                   : opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                               "%s: the plan changes %s, which linear_backward_changing does",
                               linear->operation,
                               fills_main_grad(plan) ? "main_grad" : "delayed scaling's state");
    }
    const struct opaq_tensor *main_grad = values[MAIN_GRAD].tensors;
    if (main_grad == NULL ? fills_main_grad(plan) : !has_main_grad(plan)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: main_grad is %s, but the plan has %s",
                         linear->operation, main_grad == NULL ? "missing" : "given",
                         main_grad == NULL ? "\"main_grad=\"" : "no \"main_grad=\"");
    }
    enum opaq_status status = OPAQ_OK;
    if (fills_main_grad(plan)) {
        status =
            linear_plain_input(linear, "main_grad", main_grad, linear->w_shape, 2, -1, &in->main_grad, error);
    }
    if (status == OPAQ_OK) {
        status = linear_floats(linear, "amax", &values[AMAX], forward, 3, &in->delayed.amax, error);
    }
    if (status == OPAQ_OK && forward) {
        status = read_history(linear, SCALE_FWD, 3, &in->delayed.forward, error);
    }
    return status == OPAQ_OK && backward ? read_history(linear, SCALE_BWD, 2, &in->delayed.backward, error)
                                         : status;
}

static enum opaq_status read_inputs(const struct linear *linear, struct inputs *in, struct opaq_error *error) {
    const struct opaq_value *values = linear->call->values;
    const struct opaq_linear_plan *plan = &linear->plan;
    const struct opaq_form x = plan_x_kept(plan);
    const struct opaq_form w = plan_w_kept(plan);
    enum opaq_status status = linear_input(linear, "dy", &values[DY], &plan->dy_given, linear->y_shape,
                                           linear->rank, -1, &in->dy, error);
    if (status == OPAQ_OK && x.kind != OPAQ_FORM_ABSENT) {
        status = linear_input(linear, "x", &values[X], &x, linear->x_shape, linear->rank, -1, &in->x, error);
    }
    if (status == OPAQ_OK && w.kind != OPAQ_FORM_ABSENT) {
        status = linear_input(linear, "w", &values[W], &w, linear->w_shape, 2, -1, &in->w, error);
    }
    if (status == OPAQ_OK) {
        status = linear_random(linear, &values[RANDOM], plan_backward_is_stochastic(plan), &in->random, error);
    }
    return status == OPAQ_OK ? read_changed(linear, in, error) : status;
}

/* x or w as a product reads it: along its rows' dimension. */
static enum opaq_status kept_operand(struct linear *linear, const struct opaq_view *view,
                                     const struct opaq_form *form, enum linear_stream stream,
                                     const int64_t *random, struct linear_operand *operand,
                                     struct opaq_error *error) {
    const struct linear_kept kept = {view, form, linear->plan.backward, stream, random};
    return linear_kept_operand(linear, &kept, operand, error);
}

/* dx = dy w */
static enum opaq_status input_gradient(struct linear *linear, const struct inputs *in,
                                       const struct opaq_view *dy, float *amax, struct opaq_error *error) {
    struct linear_operand a;
    struct linear_operand b;
    struct opaq_view dx;
    const bool quantizes = is_quantized(&linear->plan.dx);
    enum opaq_status status = linear_operand(linear, dy, OPAQ_ROWWISE, &a, error);
    if (status == OPAQ_OK) {
        status = kept_operand(linear, &in->w, &linear->plan.w, STREAM_W, in->random, &b, error);
    }
    if (status == OPAQ_OK && quantizes) {
        const struct opaq_view shape = {.proto = linear->call->protos[DX]};
        status = linear_scratch(linear, &shape, (enum opaq_element)linear->call->values[X_DTYPE].integer, &dx,
                                error);
    } else if (status == OPAQ_OK) {
        dx = linear_plain_output(linear, DX);
    }
    if (status != OPAQ_OK) {
        return status;
    }
    const struct linear_product product = {&a, &b, &dx, NULL, false};
    const float *scale = in->delayed.backward.scale;
    const struct linear_quantize how = {.form = form_with_usage(&linear->plan.dx, OPAQ_ROWWISE),
                                        .output = DX,
                                        .stream = STREAM_DX,
                                        .random = in->random,
                                        .scale = scale == NULL ? NULL : scale + 1,
                                        .amax = amax};
    struct opaq_view quantized;
    status = linear_product(linear, &product, error);
    return status == OPAQ_OK && quantizes ? linear_quantize(linear, &dx, &how, &quantized, error) : status;
}

/* dw = dy^T x */
static enum opaq_status weight_gradient(struct linear *linear, const struct inputs *in,
                                        const struct opaq_view *dy, struct opaq_error *error) {
    struct linear_operand a;
    struct linear_operand b;
    struct opaq_view dw = in->main_grad;
    enum opaq_status status = linear_operand(linear, dy, OPAQ_COLUMNWISE, &a, error);
    if (status == OPAQ_OK) {
        status = kept_operand(linear, &in->x, &linear->plan.x, STREAM_X, in->random, &b, error);
    }
    if (status == OPAQ_OK && !fills_main_grad(&linear->plan)) {
        dw = linear_plain_output(linear, DW);
    }
    if (status == OPAQ_OK) {
        const struct linear_product product = {&a, &b, &dw, NULL,
                                               (linear->plan.options & OPAQ_LINEAR_ADD) != 0};
        status = linear_product(linear, &product, error);
    }
    return status;
}

static enum opaq_status bias_gradient(struct linear *linear, const struct inputs *in,
                                      struct opaq_error *error) {
    struct opaq_view dy;
    const struct opaq_view dbias = linear_plain_output(linear, DBIAS);
    const enum opaq_status status = linear_plain(linear, &in->dy, &dy, error);
    if (status == OPAQ_OK && !linear->is_measuring) {
        const struct quant_matrix matrix = quant_matrix_make(&dy);
        const struct quant_matrix sums = quant_matrix_make(&dbias);
        column_sum(&matrix, &sums, linear->call->parallel);
    }
    return status;
}

/* The largest of what was recorded since the last update. */
static void record(const struct opaq_delayed_state *state, const float *amax, int count) {
    assert(state->count == count);
    for (int i = 0; i < count; ++i) {
        if (amax[i] > state->amax_history[i]) {
            state->amax_history[i] = amax[i];
        }
    }
}

static enum opaq_status delayed_step(const struct linear *linear, const struct delayed *delayed,
                                     const float *backward_amax, struct opaq_error *error) {
    const struct opaq_linear_plan *plan = &linear->plan;
    const enum opaq_amax_algorithm algorithm = (enum opaq_amax_algorithm)plan->algorithm;
    const bool updates = (plan->options & OPAQ_LINEAR_REDUCE) == 0;
    enum opaq_status status = OPAQ_OK;
    if (delayed->forward.scale != NULL) {
        record(&delayed->forward, delayed->amax, 3);
        if (updates) {
            status = opaq_delayed_update(&delayed->forward, NULL, (enum opaq_element)plan_forward_element(plan),
                                         plan->margin, algorithm, error);
        }
    }
    if (status == OPAQ_OK && delayed->backward.scale != NULL) {
        record(&delayed->backward, backward_amax, 2);
        if (updates) {
            status =
                opaq_delayed_update(&delayed->backward, NULL, (enum opaq_element)plan_backward_element(plan),
                                    plan->margin, algorithm, error);
        }
    }
    return status;
}

/* Measures or runs. */
static enum opaq_status backward(struct linear *linear, struct opaq_error *error) {
    const struct opaq_form form = plan_dy(&linear->plan);
    const int32_t gradients = linear->plan.gradients;
    float amax[2] = {0.0f, 0.0f};
    struct inputs in;
    struct opaq_view dy;
    memset(&in, 0, sizeof in);
    enum opaq_status status = read_inputs(linear, &in, error);
    dy = in.dy;
    if (status == OPAQ_OK && is_quantized(&form)) {
        const struct linear_quantize how = {.form = form,
                                            .output = -1,
                                            .stream = STREAM_DY,
                                            .random = in.random,
                                            .scale = in.delayed.backward.scale,
                                            .amax = &amax[0]};
        status = linear_quantize(linear, &in.dy, &how, &dy, error);
    }
    if (status == OPAQ_OK && (gradients & OPAQ_GRADIENT_X)) {
        status = input_gradient(linear, &in, &dy, &amax[1], error);
    }
    if (status == OPAQ_OK && (gradients & OPAQ_GRADIENT_W)) {
        status = weight_gradient(linear, &in, &dy, error);
    }
    if (status == OPAQ_OK && (gradients & OPAQ_GRADIENT_BIAS)) {
        status = bias_gradient(linear, &in, error);
    }
    return status == OPAQ_OK && !linear->is_measuring ? delayed_step(linear, &in.delayed, amax, error) : status;
}

enum opaq_status workspace_linear_backward(const struct opaq_call *call, size_t *bytes,
                                           struct opaq_error *error) {
    struct linear linear;
    enum opaq_status status = linear_begin(call, X_SHAPE, PLAN, true, &linear, error);
    if (status == OPAQ_OK) {
        status = backward(&linear, error);
    }
    return status == OPAQ_OK ? linear_measured(&linear, bytes, error) : status;
}

enum opaq_status run_linear_backward(const struct opaq_call *call, struct opaq_error *error) {
    struct linear linear;
    const enum opaq_status status = linear_begin(call, X_SHAPE, PLAN, false, &linear, error);
    return status == OPAQ_OK ? backward(&linear, error) : status;
}
