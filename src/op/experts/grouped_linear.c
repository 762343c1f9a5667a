/* op/experts/grouped_linear.c: the operators grouped_linear and grouped_linear_backward: consecutive rows of x, each stretch
 * with a weight of its own. */
#include <string.h>

#include "cpu/gemm/column_sum.h"
#include "op/table/op_table.h"
#include "op/table/op_tensor.h"
#include "op/linear/weight_stack.h"
#include "opaq/status.h"

enum { GROUP_STREAMS = 64 };

/* One call of either. */
struct grouped {
    struct linear linear;
    struct opaq_view x, dy, bias;
    bool has_bias, has_dy;
    struct weight_stack weights;
    const struct opaq_tensor *splits;
    const int64_t *random;
};

static const struct opaq_value *argument(const struct opaq_call *call, const char *name) {
    for (int i = 0; i < call->op->argument_count; ++i) {
        if (strcmp(call->op->argument[i].name, name) == 0) {
            return &call->values[i];
        }
    }
    return NULL;
}

static int64_t split_at(const struct opaq_tensor *splits, int64_t index) {
    const int64_t place = index * splits->strides[0];
    return splits->dtype == OPAQ_DTYPE_I32 ? ((const int32_t *)splits->data)[place]
                                           : ((const int64_t *)splits->data)[place];
}

/* [E] numbers that make x's rows. The numbers are looked at in a run only. */
static enum opaq_status check_splits(const struct grouped *grouped, struct opaq_error *error) {
    const struct opaq_tensor *splits = grouped->splits;
    const char *operation = grouped->linear.operation;
    const int64_t rows = opaq_proto_rows(&grouped->x.proto);
    char text[160];
    if ((splits->dtype != OPAQ_DTYPE_I32 && splits->dtype != OPAQ_DTYPE_I64) || splits->rank != 1 ||
        splits->shape[0] != grouped->weights.count || tensor_reach(splits) < 0 ||
        splits->device.type != OPAQ_DEVICE_CPU) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "%s: splits is %s%s, expected int32 or int64 [%lld] on the cpu", operation,
                         dtype_name(splits->dtype), shape_text(splits, text, sizeof text),
                         (long long)grouped->weights.count);
    }
    if (tensor_reach(splits) > 0 &&
        (splits->data == NULL || (uintptr_t)splits->data % (uintptr_t)dtype_bytes(splits->dtype) != 0)) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "%s: splits is %s", operation,
                         splits->data == NULL ? "NULL" : "not aligned to its elements");
    }
    int64_t left = rows;
    for (int64_t e = 0; !grouped->linear.is_measuring && e < grouped->weights.count; ++e) {
        const int64_t split = split_at(splits, e);
        if (split < 0 || split > left) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: splits has %lld at %lld, expected 0 to %lld",
                             operation, (long long)split, (long long)e, (long long)left);
        }
        left -= split;
    }
    if (!grouped->linear.is_measuring && left != 0) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: splits make %lld rows, expected the %lld of x",
                         operation, (long long)(rows - left), (long long)rows);
    }
    return OPAQ_OK;
}

static enum opaq_status check_plan(const struct grouped *grouped, struct opaq_error *error) {
    const struct opaq_linear_plan *plan = &grouped->linear.plan;
    const bool is_delayed = has_option(&plan->x, OPAQ_DELAYED) || has_option(&plan->w, OPAQ_DELAYED) ||
                            has_option(&plan->dy, OPAQ_DELAYED);
    if (plan->options || plan->saved || plan->margin || plan->algorithm || is_quantized(&plan->y) ||
        is_quantized(&plan->dx) || is_quantized(&plan->x_given) || is_quantized(&plan->dy_given) ||
        is_delayed) {
        return opaq_fail(
            error, OPAQ_ERROR_UNSUPPORTED,
            "%s: the plan has words beside x=, w=, w_given=, dy=, grad= and backward=, or delayed scaling",
            grouped->linear.operation);
    }
    const bool rounds = has_option(&plan->x, OPAQ_STOCHASTIC) || has_option(&plan->w, OPAQ_STOCHASTIC) ||
                        has_option(&plan->dy, OPAQ_STOCHASTIC);
    if (rounds && grouped->random == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "%s: random is missing, but the plan rounds stochastically (sr)",
                         grouped->linear.operation);
    }
    return OPAQ_OK;
}

static enum opaq_status begin(const struct opaq_call *call, bool is_measuring, struct grouped *grouped,
                              struct opaq_error *error) {
    struct opaq_error reason;
    struct linear *linear = &grouped->linear;
    const struct opaq_tensor *x = argument(call, "x")->tensors;
    memset(grouped, 0, sizeof *grouped);
    *linear = linear_workbench(call, is_measuring);
    linear->device = x->device;
    grouped->splits = argument(call, "splits")->tensors;
    enum opaq_status status = plan_of_value(argument(call, "plan"), &linear->plan, &reason);
    if (status != OPAQ_OK) {
        return opaq_fail(error, status, "%s: %s", call->op->name, reason.text);
    }
    if (x->rank < 1) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: x has no dimensions, expected at least one",
                         call->op->name);
    }
    status = view_of_tensor(call->op->name, "x", x, &grouped->x, error);
    if (status == OPAQ_OK) {
        status = weight_stack_read(linear, "w", argument(call, "w"), argument(call, "w_shape"), 3,
                                   &linear->plan.w_given, &linear->plan.w, x->dtype, &grouped->weights, error);
    }
    const struct opaq_value *bias = argument(call, "bias");
    if (status == OPAQ_OK && bias != NULL) {
        status = weight_bias_read(linear, "bias", bias, &grouped->weights, x->dtype, &grouped->bias,
                                  &grouped->has_bias, error);
    }
    if (status == OPAQ_OK && opaq_proto_columns(&grouped->x.proto) != grouped->weights.columns) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: x has %lld features, expected the %lld of w",
                         call->op->name, (long long)opaq_proto_columns(&grouped->x.proto),
                         (long long)grouped->weights.columns);
    }
    const struct opaq_value *dy = argument(call, "dy");
    if (status == OPAQ_OK && dy != NULL) {
        int64_t shape[OPAQ_RANK_LIMIT];
        memcpy(shape, grouped->x.proto.shape, sizeof shape);
        shape[grouped->x.proto.rank - 1] = grouped->weights.rows;
        status = linear_plain_input(linear, "dy", dy->tensors, shape, grouped->x.proto.rank, -1, &grouped->dy,
                                    error);
    }
    if (status == OPAQ_OK) {
        status = random_of_tensor(call->op->name, argument(call, "random"), &grouped->random, error);
    }
    if (status == OPAQ_OK) {
        status = check_plan(grouped, error);
    }
    return status == OPAQ_OK ? check_splits(grouped, error) : status;
}

/* Rows of a plain tensor, as a matrix. */
static struct opaq_view rows_of(const struct opaq_view *view, int64_t first, int64_t rows) {
    struct opaq_view part = *view;
    const int64_t columns = opaq_proto_columns(&view->proto);
    memset(part.proto.shape, 0, sizeof part.proto.shape);
    part.proto.rank = 2;
    part.proto.shape[0] = rows;
    part.proto.shape[1] = columns;
    if (view->buffer[0].data != NULL) {
        part.buffer[0].data =
            (char *)view->buffer[0].data + first * view->row_stride * (view->proto.dtype == OPAQ_F32 ? 4 : 2);
    }
    return part;
}

struct group {
    int64_t index, first, rows;
};

static struct weight_use use_of(const struct grouped *grouped, const struct group *group) {
    return (struct weight_use){group->index, grouped->linear.plan.backward,
                               GROUP_STREAMS * group->index + STREAM_W, grouped->random};
}

static enum opaq_status each(struct grouped *grouped,
                             enum opaq_status (*work)(struct grouped *grouped, const struct group *group,
                                                      struct opaq_error *error),
                             struct opaq_error *error) {
    struct scratch *scratch = &grouped->linear.scratch;
    const int64_t rows = opaq_proto_rows(&grouped->x.proto);
    const size_t mark = scratch->used;
    if (grouped->linear.is_measuring) { /* nothing needs more than all rows at once */
        const struct group all = {0, 0, rows};
        return grouped->weights.count > 0 ? work(grouped, &all, error) : OPAQ_OK;
    }
    enum opaq_status status = OPAQ_OK;
    struct group group = {0, 0, 0};
    for (; status == OPAQ_OK && group.index < grouped->weights.count; ++group.index) {
        group.rows = split_at(grouped->splits, group.index);
        scratch->used = mark;
        status = work(grouped, &group, error);
        group.first += group.rows;
    }
    return status;
}

/* ---- forward ---- */

static enum opaq_status forward_group(struct grouped *grouped, const struct group *group,
                                      struct opaq_error *error) {
    struct linear *linear = &grouped->linear;
    const struct opaq_view x = rows_of(&grouped->x, group->first, group->rows);
    const struct opaq_view output = linear_plain_output(linear, 0);
    const struct opaq_view y = rows_of(&output, group->first, group->rows);
    const struct opaq_view bias = weight_bias_at(&grouped->bias, group->index);
    const struct weight_use use = use_of(grouped, group);
    const struct linear_input_form input = {
        "x", "scale", &linear->plan.x, NULL, 1, GROUP_STREAMS * group->index + STREAM_X, grouped->random};
    struct linear_operand a;
    struct linear_operand b;
    if (group->rows == 0) {
        return OPAQ_OK;
    }
    enum opaq_status status = linear_input_operand(linear, &x, &input, 0, &a, error);
    if (status == OPAQ_OK) {
        status = weight_forward_operand(linear, &grouped->weights, &use, &b, error);
    }
    const struct linear_product product = {&a, &b, &y, grouped->has_bias ? &bias : NULL, false};
    return status == OPAQ_OK ? linear_product(linear, &product, error) : status;
}

enum opaq_status workspace_grouped_linear(const struct opaq_call *call, size_t *bytes,
                                          struct opaq_error *error) {
    struct grouped grouped;
    enum opaq_status status = begin(call, true, &grouped, error);
    if (status == OPAQ_OK) {
        status = each(&grouped, forward_group, error);
    }
    return status == OPAQ_OK ? linear_measured(&grouped.linear, bytes, error) : status;
}

enum opaq_status run_grouped_linear(const struct opaq_call *call, struct opaq_error *error) {
    struct grouped grouped;
    const enum opaq_status status = begin(call, false, &grouped, error);
    return status == OPAQ_OK ? each(&grouped, forward_group, error) : status;
}

/* ---- backward ---- */

enum { DX, DW, DBIAS };

enum opaq_status form_grouped_linear_backward(const struct opaq_value *values, int output,
                                              struct opaq_form *form, struct opaq_error *error) {
    enum { PLAN = 6 };
    struct opaq_linear_plan plan;
    const enum opaq_status status = plan_of_value(&values[PLAN], &plan, error);
    form->kind = status == OPAQ_OK && (plan.gradients & 1 << output) ? OPAQ_FORM_PLAIN : OPAQ_FORM_ABSENT;
    return status;
}

static enum opaq_status input_gradient(struct grouped *grouped, const struct group *group,
                                       const struct opaq_view *dy, struct opaq_error *error) {
    struct linear *linear = &grouped->linear;
    const struct opaq_view output = linear_plain_output(linear, DX);
    const struct opaq_view dx = rows_of(&output, group->first, group->rows);
    const struct weight_use use = use_of(grouped, group);
    struct linear_operand a;
    struct linear_operand b;
    enum opaq_status status = linear_operand(linear, dy, OPAQ_ROWWISE, &a, error);
    if (status == OPAQ_OK) {
        status = weight_backward_operand(linear, &grouped->weights, &use, &b, error);
    }
    const struct linear_product product = {&a, &b, &dx, NULL, false};
    return status == OPAQ_OK ? linear_product(linear, &product, error) : status;
}

static enum opaq_status weight_gradient(struct grouped *grouped, const struct group *group,
                                        const struct opaq_view *dy, struct opaq_error *error) {
    struct linear *linear = &grouped->linear;
    const struct opaq_view output = linear_plain_output(linear, DW);
    const struct opaq_view dw = weight_plain_at(&output, group->index);
    const struct opaq_view x = rows_of(&grouped->x, group->first, group->rows);
    const struct linear_kept kept = {&x, &linear->plan.x, linear->plan.backward,
                                     GROUP_STREAMS * group->index + STREAM_X, grouped->random};
    struct linear_operand a;
    struct linear_operand b;
    enum opaq_status status = linear_operand(linear, dy, OPAQ_COLUMNWISE, &a, error);
    if (status == OPAQ_OK) {
        status = linear_kept_operand(linear, &kept, &b, error);
    }
    const struct linear_product product = {&a, &b, &dw, NULL, false};
    return status == OPAQ_OK ? linear_product(linear, &product, error) : status;
}

static enum opaq_status backward_group(struct grouped *grouped, const struct group *group,
                                       struct opaq_error *error) {
    struct linear *linear = &grouped->linear;
    const int32_t gradients = linear->plan.gradients;
    const struct opaq_view dy = rows_of(&grouped->dy, group->first, group->rows);
    const struct opaq_form form = plan_dy(&linear->plan);
    struct opaq_view quantized = dy;
    enum opaq_status status = OPAQ_OK;
    if (is_quantized(&form)) {
        const struct linear_quantize how = {.form = form,
                                            .output = -1,
                                            .stream = GROUP_STREAMS * group->index + STREAM_DY,
                                            .random = grouped->random};
        status = linear_quantize(linear, &dy, &how, &quantized, error);
    }
    if (status == OPAQ_OK && (gradients & OPAQ_GRADIENT_X)) {
        status = input_gradient(grouped, group, &quantized, error);
    }
    if (status == OPAQ_OK && (gradients & OPAQ_GRADIENT_W)) {
        status = weight_gradient(grouped, group, &quantized, error);
    }
    if (status == OPAQ_OK && (gradients & OPAQ_GRADIENT_BIAS) && !linear->is_measuring) {
        const struct opaq_view output = linear_plain_output(linear, DBIAS);
        const struct opaq_view dbias = weight_bias_at(&output, group->index);
        const struct quant_matrix matrix = quant_matrix_make(&dy);
        const struct quant_matrix sums = quant_matrix_make(&dbias);
        column_sum(&matrix, &sums, linear->call->parallel);
    }
    return status;
}

enum opaq_status workspace_grouped_linear_backward(const struct opaq_call *call, size_t *bytes,
                                                   struct opaq_error *error) {
    struct grouped grouped;
    enum opaq_status status = begin(call, true, &grouped, error);
    if (status == OPAQ_OK) {
        status = each(&grouped, backward_group, error);
    }
    return status == OPAQ_OK ? linear_measured(&grouped.linear, bytes, error) : status;
}

enum opaq_status run_grouped_linear_backward(const struct opaq_call *call, struct opaq_error *error) {
    struct grouped grouped;
    const enum opaq_status status = begin(call, false, &grouped, error);
    return status == OPAQ_OK ? each(&grouped, backward_group, error) : status;
}
