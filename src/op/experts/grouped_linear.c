/* op/experts/grouped_linear.c: the operators grouped_linear and grouped_linear_backward: consecutive rows of x, each
 * group with a weight of its own. */
#include <string.h>

#include "base/try.h"
#include "op/experts/experts_parts.h"
#include "op/table/op_tensor.h"

/* One call of either operator. */
struct grouped {
    struct op_call *call;
    const struct opaq_linear_plan *plan;
    struct opaq_view x, dy, bias;
    bool has_bias;
    struct weight_stack weights;
    struct row_groups groups;
    const int64_t *random;
};

static enum opaq_status check_plan(const struct grouped *grouped, struct opaq_error *error) {
    const struct opaq_linear_plan *plan = grouped->plan;
    const bool is_delayed = has_option(&plan->x, OPAQ_DELAYED) || has_option(&plan->w, OPAQ_DELAYED) ||
                            has_option(&plan->dy, OPAQ_DELAYED);
    if (plan->options || plan->saved || plan->margin || plan->algorithm || is_quantized(&plan->y) ||
        is_quantized(&plan->dx) || is_quantized(&plan->x_given) || is_quantized(&plan->dy_given) ||
        is_delayed) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "the plan has words beside x=, w=, w_given=, dy=, grad= and backward=, or delayed "
                         "scaling");
    }
    return OPAQ_OK;
}

/* Reads [E] group sizes, which add up to x's rows. */
static enum opaq_status split(struct grouped *grouped, struct opaq_error *error) {
    struct work *work = &grouped->call->work;
    const struct opaq_tensor *splits = op_argument(grouped->call, "splits")->tensors;
    struct row_groups *groups = &grouped->groups;
    char text[160];
    if ((splits->dtype != OPAQ_DTYPE_I32 && splits->dtype != OPAQ_DTYPE_I64) || splits->rank != 1 ||
        splits->shape[0] != grouped->weights.count) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "splits is %s%s, expected int32 or int64 [%lld]",
                         dtype_name(splits->dtype), shape_text(splits, text, sizeof text),
                         (long long)grouped->weights.count);
    }
    TRY(check_tensor_memory("splits", splits, grouped->call->device, error));
    groups->count = grouped->weights.count;
    groups->rows = opaq_proto_rows(&grouped->x.proto);
    groups->choices = 1;
    groups->is_split = true;
    groups->first = arena_take_array(&work->arena, groups->count + 1, sizeof *groups->first);
    const struct split_job job = {.splits = *splits, .groups = *groups};
    return work->is_measuring ? OPAQ_OK : work->backend->split(&job, work->execution, error);
}

static enum opaq_status begin(struct op_call *call, struct grouped *grouped, struct opaq_error *error) {
    const struct opaq_linear_plan *plan = &call->plan.linear;
    const struct opaq_tensor *x = op_argument(call, "x")->tensors;
    const struct opaq_value *dy = op_argument(call, "dy");
    memset(grouped, 0, sizeof *grouped);
    grouped->call = call;
    grouped->plan = plan;
    if (x->rank < 1) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "x has no dimensions, expected at least one");
    }
    TRY(view_of_tensor("x", x, &grouped->x, error));
    TRY(check_on_device("x", x, call->device, error));
    TRY(read_stack(call, "w", op_argument(call, "w"), op_argument(call, "w_shape"), 3, &plan->w_given, x->dtype,
                   &grouped->weights, error));
    TRY(read_stack_bias(call, "bias", op_argument(call, "bias"), &grouped->weights, x->dtype, &grouped->bias,
                        &grouped->has_bias, error));
    if (opaq_proto_columns(&grouped->x.proto) != grouped->weights.columns) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "x has %lld features, expected the %lld of w",
                         (long long)opaq_proto_columns(&grouped->x.proto), (long long)grouped->weights.columns);
    }
    if (dy != NULL) {
        int64_t shape[OPAQ_RANK_LIMIT];
        memcpy(shape, grouped->x.proto.shape, sizeof shape);
        shape[grouped->x.proto.rank - 1] = grouped->weights.rows;
        TRY(read_plain(call, "dy", dy->tensors, shape, grouped->x.proto.rank, -1, &grouped->dy, error));
    }
    const bool rounds = has_option(&plan->x, OPAQ_STOCHASTIC) || has_option(&plan->w, OPAQ_STOCHASTIC) ||
                        has_option(&plan->dy, OPAQ_STOCHASTIC);
    TRY(check_plan(grouped, error));
    TRY(read_random(call, op_argument(call, "random"), rounds, &grouped->random, error));
    TRY(check_stack(&grouped->weights, error));
    return split(grouped, error);
}

enum opaq_status run_grouped_linear(struct op_call *call, struct opaq_error *error) {
    const struct opaq_linear_plan *plan = &call->plan.linear;
    const struct opaq_view y = op_plain_output(call, 0);
    struct grouped grouped;
    TRY(begin(call, &grouped, error));
    const struct grouped_product job = {
        .groups = &grouped.groups,
        .a = sorted_rows(&grouped.x, forward_form(&plan->x, NULL, grouped.random, STREAM_X)),
        .w = {grouped.weights.view, forward_form(&plan->w, NULL, grouped.random, STREAM_W)},
        .bias = grouped.has_bias ? &grouped.bias : NULL,
        .any_order = plan->order == OPAQ_ORDER_ANY,
        .precision = plan->precision,
        .result = GROUPED_STORE,
        .c = quant_matrix_make(&y)};
    return work_grouped_product(&call->work, &job, error);
}

/* ---- backward ---- */

enum { DX, DW, DBIAS };

enum opaq_status form_grouped_linear_backward(const struct op_call *call, int output, struct opaq_form *form,
                                              struct opaq_error *error) {
    (void)error;
    form->kind = call->plan.linear.gradients & 1 << output ? OPAQ_FORM_PLAIN : OPAQ_FORM_ABSENT;
    return OPAQ_OK;
}

/* dy along a usage, quantized if the backward is. */
static struct operand_form dy_form(const struct grouped *grouped, enum opaq_usage along) {
    const struct opaq_linear_plan *plan = grouped->plan;
    struct operand_form form = form_along(along);
    form.quantizes = is_quantized(&plan->dy) && plan->backward == OPAQ_BACKWARD_QUANTIZED;
    form.spec = form_with_usage(&plan->dy, (int)along).spec;
    form.random = (struct random_source){.state = grouped->random, .stream = STREAM_DY};
    return form;
}

enum opaq_status run_grouped_linear_backward(struct op_call *call, struct opaq_error *error) {
    const struct opaq_linear_plan *plan = &call->plan.linear;
    struct work *work = &call->work;
    struct grouped grouped;
    TRY(begin(call, &grouped, error));
    if (plan->gradients & OPAQ_GRADIENT_X) {
        const struct opaq_view dx = op_plain_output(call, DX);
        const struct grouped_product job = {
            .groups = &grouped.groups,
            .a = sorted_rows(&grouped.dy, dy_form(&grouped, OPAQ_ROWWISE)),
            .w = {grouped.weights.view, kept_form(&plan->w, plan->backward, grouped.random, STREAM_W)},
            .any_order = plan->order == OPAQ_ORDER_ANY,
            .precision = plan->precision,
            .result = GROUPED_STORE,
            .c = quant_matrix_make(&dx)};
        TRY(work_grouped_product(work, &job, error));
    }
    if (plan->gradients & OPAQ_GRADIENT_W) {
        const struct grouped_gradient job = {
            .groups = &grouped.groups,
            .a = sorted_rows(&grouped.dy, dy_form(&grouped, OPAQ_COLUMNWISE)),
            .b = sorted_rows(&grouped.x, kept_form(&plan->x, plan->backward, grouped.random, STREAM_X)),
            .c = op_plain_output(call, DW)};
        TRY(work_grouped_gradient(work, &job, error));
    }
    if ((plan->gradients & OPAQ_GRADIENT_BIAS) && !work->is_measuring) {
        const struct opaq_view dbias = op_plain_output(call, DBIAS);
        const struct quant_matrix rows = quant_matrix_make(&grouped.dy);
        TRY(work->backend->column_sum(&grouped.groups, &rows, &dbias, work->execution, error));
    }
    return OPAQ_OK;
}
