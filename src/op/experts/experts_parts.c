/* op/experts/experts_parts.c: what the forward and the backward of an MLP or a mixture of experts share. */
#include "op/experts/experts_parts.h"

#include <string.h>

#include "base/checked.h"
#include "base/parallel_run.h"
#include "cpu/gemm/plain_convert.h"
#include "op/table/op_tensor.h"
#include "opaq/status.h"

const struct opaq_value *experts_argument(const struct opaq_call *call, const char *name) {
    for (int i = 0; i < call->op->argument_count; ++i) {
        if (strcmp(call->op->argument[i].name, name) == 0) {
            return &call->values[i];
        }
    }
    return NULL;
}

static enum opaq_status read_x(struct experts *experts, struct opaq_error *error) {
    const struct opaq_call *call = experts->linear.call;
    const struct opaq_value *value = experts_argument(call, experts->is_routed ? "hidden_states" : "x");
    const struct opaq_tensor *tensor = value->tensors;
    experts->linear.device = tensor->device;
    const enum opaq_status status = view_of_tensor(
        experts->linear.operation, experts->is_routed ? "hidden_states" : "x", tensor, &experts->x, error);
    experts->dtype = (enum opaq_element)tensor->dtype;
    experts->rows = status == OPAQ_OK ? opaq_proto_rows(&experts->x.proto) : 0;
    return status;
}

static enum opaq_status read_weights(struct experts *experts, struct opaq_error *error) {
    const struct linear *linear = &experts->linear;
    const struct opaq_call *call = linear->call;
    const int rank = experts->is_routed ? 3 : 2;
    const int32_t dtype = (int32_t)experts->dtype;
    const struct opaq_experts_plan *plan = &experts->plan;
    enum opaq_status status = weight_stack_read(
        linear, "gate_up", experts_argument(call, "gate_up"), experts_argument(call, "gate_up_shape"), rank,
        &plan->gate_up_given, &plan->w, dtype, &experts->gate_up, error);
    if (status == OPAQ_OK) {
        status = weight_stack_read(linear, "down", experts_argument(call, "down"),
                                   experts_argument(call, "down_shape"), rank, &plan->down_given, &plan->w,
                                   dtype, &experts->down, error);
    }
    const struct opaq_value *bias = experts_argument(call, "gate_up_bias");
    if (status == OPAQ_OK && bias != NULL) {
        status = weight_bias_read(linear, "gate_up_bias", bias, &experts->gate_up, dtype,
                                  &experts->gate_up_bias, &experts->has_gate_up_bias, error);
    }
    bias = experts_argument(call, "down_bias");
    if (status == OPAQ_OK && bias != NULL) {
        status = weight_bias_read(linear, "down_bias", bias, &experts->down, dtype, &experts->down_bias,
                                  &experts->has_down_bias, error);
    }
    return status;
}

/* x[.., H], gate_up[2I, H], down[H, I] */
static enum opaq_status check_sizes(struct experts *experts, struct opaq_error *error) {
    const struct weight_stack *up = &experts->gate_up;
    const struct weight_stack *down = &experts->down;
    const bool is_gated = opaq_activation_is_gated((enum opaq_activation)experts->plan.activation) != 0;
    experts->hidden = opaq_proto_columns(&experts->x.proto);
    experts->inner = down->columns;
    experts->width = up->rows;
    if (up->columns != experts->hidden || down->rows != experts->hidden || up->count != down->count ||
        experts->width % (is_gated ? 2 : 1) != 0 || experts->width / (is_gated ? 2 : 1) != experts->inner) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE,
                         "%s: %lld features with gate_up of %lld x [%lld,%lld] and down of %lld x [%lld,%lld], "
                         "expected [%s,H] and [H,I] for act=%s",
                         experts->linear.operation, (long long)experts->hidden, (long long)up->count,
                         (long long)up->rows, (long long)up->columns, (long long)down->count,
                         (long long)down->rows, (long long)down->columns, is_gated ? "2I" : "I",
                         opaq_activation_name((enum opaq_activation)experts->plan.activation));
    }
    return OPAQ_OK;
}

static enum opaq_status read_routing(struct experts *experts, struct opaq_error *error) {
    const struct opaq_call *call = experts->linear.call;
    const struct opaq_experts_plan *plan = &experts->plan;
    const struct routing_slice slice = {
        plan->experts == 0 ? plan->first + experts->gate_up.count : plan->experts, plan->first};
    if (slice.first + experts->gate_up.count > slice.total) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE,
                         "%s: a stack of %lld experts from %lld on does not fit into experts=%lld",
                         experts->linear.operation, (long long)experts->gate_up.count, (long long)slice.first,
                         (long long)slice.total);
    }
    return routing_read(&experts->linear, experts_argument(call, "topk_weights")->tensors,
                        experts_argument(call, "topk_ids")->tensors, &experts->x.proto, experts->gate_up.count,
                        slice, &experts->routing, error);
}

enum opaq_status experts_begin(const struct opaq_call *call, bool is_measuring, struct experts *experts,
                               struct opaq_error *error) {
    struct opaq_error reason;
    memset(experts, 0, sizeof *experts);
    experts->linear = linear_workbench(call, is_measuring);
    experts->is_routed = experts_argument(call, "topk_ids") != NULL;
    enum opaq_status status = experts_plan_of_value(experts_argument(call, "plan"), &experts->plan, &reason);
    if (status != OPAQ_OK) {
        return opaq_fail(error, status, "%s: %s", call->op->name, reason.text);
    }
    experts->linear.plan.precision = experts->plan.precision;
    if (!experts->is_routed &&
        (experts->plan.experts || experts->plan.first || experts->plan.weights_on_input ||
         (experts->plan.gradients & OPAQ_EXPERTS_ROUTER))) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "%s: experts=, first=, weights= and grad=r are for a mixture of experts",
                         call->op->name);
    }
    status = read_x(experts, error);
    if (status == OPAQ_OK) {
        status = read_weights(experts, error);
    }
    if (status == OPAQ_OK) {
        status = check_sizes(experts, error);
    }
    const struct opaq_value *random = experts_argument(call, "random");
    if (status == OPAQ_OK && random != NULL) {
        status = random_of_tensor(call->op->name, random, &experts->random, error);
    }
    const struct opaq_experts_plan *plan = &experts->plan;
    const bool rounds = has_option(&plan->w, OPAQ_STOCHASTIC) || has_option(&plan->dy, OPAQ_STOCHASTIC) ||
                        has_option(&plan->x, OPAQ_STOCHASTIC) || has_option(&plan->h, OPAQ_STOCHASTIC);
    if (status == OPAQ_OK && experts->random == NULL && rounds) {
        return random == NULL
                   ? opaq_fail(
                         error, OPAQ_ERROR_ARGUMENT,
                         "%s: the plan rounds stochastically (sr), for which %s_forward takes random numbers",
                         call->op->name, call->op->name)
                   : opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                               "%s: random is missing, but the plan rounds stochastically (sr)",
                               call->op->name);
    }
    return status == OPAQ_OK && experts->is_routed ? read_routing(experts, error) : status;
}

/* ---- groups ---- */

static struct experts_group group_of(const struct experts *experts, int64_t index, int64_t rows,
                                     const int64_t *slots) {
    return (struct experts_group){index,
                                  rows,
                                  {&experts->routing, slots, rows, true, NULL},
                                  {&experts->routing, slots, rows, false, NULL}};
}

enum opaq_status experts_each(struct experts *experts,
                              enum opaq_status (*work)(struct experts *experts,
                                                       const struct experts_group *group, void *state,
                                                       struct opaq_error *error),
                              void (*idle)(struct experts *experts, int64_t index, void *state), void *state,
                              struct opaq_error *error) {
    struct scratch *scratch = &experts->linear.scratch;
    const struct routing *routing = &experts->routing;
    const size_t mark = scratch->used;
    const int64_t all = experts->is_routed ? routing->tokens * routing->choices : experts->rows;
    if (experts->gate_up.count == 0) {
        return OPAQ_OK;
    }
    if (experts->linear.is_measuring || !experts->is_routed) { /* nothing needs more than all rows at once */
        const struct experts_group group = group_of(experts, 0, all, NULL);
        return work(experts, &group, state, error);
    }
    for (int64_t e = 0; e < routing->experts; ++e) {
        const int64_t first = routing->first[e];
        const struct experts_group group =
            group_of(experts, e, routing->first[e + 1] - first, routing->slot + first);
        if (group.rows == 0) {
            if (idle != NULL) {
                idle(experts, e, state);
            }
            continue;
        }
        scratch->used = mark;
        const enum opaq_status status = work(experts, &group, state, error);
        if (status != OPAQ_OK) {
            return status;
        }
    }
    return OPAQ_OK;
}

enum opaq_status experts_gather(struct experts *experts, const struct experts_group *group,
                                const struct opaq_view *from, bool by_token, bool weighted,
                                struct opaq_view *rows, struct opaq_error *error) {
    struct linear *linear = &experts->linear;
    if (!experts->is_routed) {
        *rows = *from;
        return OPAQ_OK;
    }
    const enum opaq_status status = linear_matrix(linear, group->rows, opaq_proto_columns(&from->proto),
                                                  (enum opaq_element)from->proto.dtype, rows, error);
    if (status == OPAQ_OK && !linear->is_measuring) {
        struct routing_gather gather = by_token ? group->by_token : group->by_slot;
        gather.weight = weighted ? experts->routing.weight : NULL;
        const struct quant_matrix source = quant_matrix_make(from);
        const struct quant_matrix target = quant_matrix_make(rows);
        routing_gather(&gather, &source, &target, linear->call->parallel);
    }
    return status;
}

enum opaq_status experts_add(struct experts *experts, const struct experts_group *group,
                             const struct experts_sum *sum, struct opaq_error *error) {
    struct linear *linear = &experts->linear;
    struct opaq_view lot;
    const int64_t chunk = min_int64(group->rows, EXPERTS_CHUNK);
    enum opaq_status status = linear_matrix(linear, chunk, experts->hidden, OPAQ_F32, &lot, error);
    for (int64_t first = 0; status == OPAQ_OK && first < group->rows; first += EXPERTS_CHUNK) {
        struct linear_operand part;
        struct routing_gather gather = group->by_token;
        gather.count = min_int64(EXPERTS_CHUNK, group->rows - first);
        gather.slots = gather.slots == NULL ? NULL : gather.slots + first;
        gather.weight = sum->weighted ? experts->routing.weight : NULL;
        lot.proto.shape[0] = gather.count;
        if (!linear_operand_rows(sum->a, first, gather.count, &part)) {
            return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "%s: rows cannot be taken apart",
                             linear->operation);
        }
        const struct linear_product product = {&part, sum->b, &lot, sum->bias, false};
        status = linear_product(linear, &product, error);
        if (linear->is_measuring) {
            return status; /* the first lot is the largest */
        }
        const struct quant_matrix results = quant_matrix_make(&lot);
        if (sum->dot != NULL) {
            struct quant_matrix other = quant_matrix_make(sum->dot);
            other.data = (char *)other.data + first * other.row_step * (other.dtype == OPAQ_F32 ? 4 : 2);
            const struct routing_dot dot = {&results, &other, false};
            routing_dot(&gather, &dot, sum->dot_result, linear->call->parallel);
        }
        routing_add(&gather, &results, sum->sums, experts->hidden, linear->call->parallel);
    }
    return status;
}

enum opaq_status experts_sums(struct experts *experts, float **sums, struct opaq_error *error) {
    struct opaq_view view;
    const enum opaq_status status =
        linear_matrix(&experts->linear, experts->rows, experts->hidden, OPAQ_F32, &view, error);
    *sums = status == OPAQ_OK ? view.buffer[0].data : NULL;
    if (status == OPAQ_OK && !experts->linear.is_measuring && view.buffer[0].bytes > 0) {
        memset(*sums, 0, view.buffer[0].bytes);
    }
    return status;
}

struct store_task {
    const float *sums;
    const struct quant_matrix *to;
};

static void store_rows(void *argument, int64_t begin, int64_t end) {
    const struct store_task *task = argument;
    const struct quant_matrix *to = task->to;
    const int64_t most = 1 << 20; /* in one call, which counts with int */
    for (int64_t row = begin; row < end; ++row) {
        for (int64_t c = 0; c < to->columns; c += most) {
            plain_store(to->data, to->dtype, row * to->row_step + c, 1, (int)min_int64(most, to->columns - c),
                        task->sums + row * to->columns + c);
        }
    }
}

void experts_store_sums(struct experts *experts, const float *sums, int output) {
    const struct opaq_view view = linear_plain_output(&experts->linear, output);
    const struct quant_matrix to = quant_matrix_make(&view);
    struct store_task task = {sums, &to};
    const struct opaq_body body = {store_rows, &task};
    parallel_run(parallel_if_worth(experts->linear.call->parallel, to.rows * to.columns), to.rows, &body);
}

struct weight_use experts_use(const struct experts *experts, int64_t index, enum experts_stream stream) {
    return (struct weight_use){index, experts->plan.backward, EXPERTS_STREAMS * index + (int64_t)stream,
                               experts->random};
}
