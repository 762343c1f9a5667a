/* op/experts/experts_parts.c: shared by the forward and the backward of an MLP or a mixture of experts. */
#include "op/experts/experts_parts.h"

#include <string.h>

#include "base/try.h"
#include "op/table/op_tensor.h"

/* ---- arguments ---- */

static enum opaq_status check_plan(const struct experts *experts, struct opaq_error *error) {
    const struct opaq_experts_plan *plan = experts->plan;
    if (!experts->is_routed &&
        (plan->experts || plan->first || plan->weights_on_input || (plan->gradients & OPAQ_EXPERTS_ROUTER))) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "experts=, first=, weights= and grad=r are for a mixture of experts");
    }
    return OPAQ_OK;
}

static enum opaq_status read_x(struct experts *experts, struct opaq_error *error) {
    const char *name = experts->is_routed ? "hidden_states" : "x";
    const struct opaq_tensor *tensor = op_argument(experts->call, name)->tensors;
    TRY(view_of_tensor(name, tensor, &experts->x, error));
    TRY(check_on_device(name, tensor, experts->call->device, error));
    experts->dtype = (enum opaq_element)tensor->dtype;
    experts->rows = opaq_proto_rows(&experts->x.proto);
    return OPAQ_OK;
}

static enum opaq_status read_weights(struct experts *experts, struct opaq_error *error) {
    const struct op_call *call = experts->call;
    const int rank = experts->is_routed ? 3 : 2;
    const int32_t dtype = (int32_t)experts->dtype;
    const struct opaq_experts_plan *plan = experts->plan;
    TRY(read_stack(call, "gate_up", op_argument(call, "gate_up"), op_argument(call, "gate_up_shape"), rank,
                   &plan->gate_up_given, dtype, &experts->gate_up, error));
    TRY(read_stack(call, "down", op_argument(call, "down"), op_argument(call, "down_shape"), rank,
                   &plan->down_given, dtype, &experts->down, error));
    TRY(read_stack_bias(call, "gate_up_bias", op_argument(call, "gate_up_bias"), &experts->gate_up, dtype,
                        &experts->gate_up_bias, &experts->has_gate_up_bias, error));
    return read_stack_bias(call, "down_bias", op_argument(call, "down_bias"), &experts->down, dtype,
                           &experts->down_bias, &experts->has_down_bias, error);
}

/* x[.., H], gate_up[2I, H], down[H, I] */
static enum opaq_status check_sizes(struct experts *experts, struct opaq_error *error) {
    const struct weight_stack *up = &experts->gate_up;
    const struct weight_stack *down = &experts->down;
    const enum opaq_activation activation = (enum opaq_activation)experts->plan->activation;
    const int64_t halves = opaq_activation_is_gated(activation) ? 2 : 1;
    experts->hidden = opaq_proto_columns(&experts->x.proto);
    experts->inner = down->columns;
    experts->width = up->rows;
    if (up->columns != experts->hidden || down->rows != experts->hidden || up->count != down->count ||
        experts->width % halves != 0 || experts->width / halves != experts->inner) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE,
                         "%lld features with gate_up of %lld x [%lld,%lld] and down of %lld x [%lld,%lld], "
                         "expected [%s,H] and [H,I] for act=%s",
                         (long long)experts->hidden, (long long)up->count, (long long)up->rows,
                         (long long)up->columns, (long long)down->count, (long long)down->rows,
                         (long long)down->columns, halves == 2 ? "2I" : "I", opaq_activation_name(activation));
    }
    return OPAQ_OK;
}

static enum opaq_status read_experts_random(struct experts *experts, struct opaq_error *error) {
    const struct opaq_experts_plan *plan = experts->plan;
    const struct opaq_value *random = op_argument(experts->call, "random");
    const bool rounds = has_option(&plan->w, OPAQ_STOCHASTIC) || has_option(&plan->dy, OPAQ_STOCHASTIC) ||
                        has_option(&plan->x, OPAQ_STOCHASTIC) || has_option(&plan->h, OPAQ_STOCHASTIC);
    if (random == NULL && rounds) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "the plan rounds stochastically (sr), for which %s_forward takes random numbers",
                         experts->call->op->name);
    }
    return random == NULL ? OPAQ_OK : read_random(experts->call, random, rounds, &experts->random, error);
}

/* ---- routing ---- */

/* [tokens, k], or the leading sizes of the tokens' tensor and k; dimensions of size 1 are ignored. */
static bool fits_tokens(const struct opaq_tensor *ids, const struct opaq_proto *tokens) {
    const int64_t flat = opaq_proto_rows(tokens);
    const int leading = ids->rank - 1;
    int mine = 0;
    int theirs = 0;
    if (leading == 1 && ids->shape[0] == flat) {
        return true;
    }
    for (;;) {
        while (mine < leading && ids->shape[mine] == 1) {
            ++mine;
        }
        while (theirs < tokens->rank - 1 && tokens->shape[theirs] == 1) {
            ++theirs;
        }
        if (mine >= leading || theirs >= tokens->rank - 1 || ids->shape[mine] != tokens->shape[theirs]) {
            return ids->rank >= 1 && mine == leading && theirs >= tokens->rank - 1;
        }
        ++mine;
        ++theirs;
    }
}

static enum opaq_status check_choices(const struct experts *experts, const struct opaq_tensor *weights,
                                      const struct opaq_tensor *ids, struct opaq_error *error) {
    const struct opaq_proto *tokens = &experts->x.proto;
    char got[160];
    char other[160];
    if (ids->dtype != OPAQ_DTYPE_I32 && ids->dtype != OPAQ_DTYPE_I64) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "topk_ids holds %s, expected int32 or int64",
                         dtype_name(ids->dtype));
    }
    if (weights->dtype != OPAQ_DTYPE_F32 && weights->dtype != OPAQ_DTYPE_BF16 &&
        weights->dtype != OPAQ_DTYPE_F16) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "topk_weights holds %s, expected f32, bf16 or f16",
                         dtype_name(weights->dtype));
    }
    if (tensor_elements(ids) < 0 || !fits_tokens(ids, tokens)) {
        return opaq_fail(
            error, OPAQ_ERROR_SHAPE,
            "topk_ids has the shape %s, expected %lld tokens by choices, or the tokens' own sizes by "
            "choices",
            shape_text(ids, got, sizeof got), (long long)opaq_proto_rows(tokens));
    }
    if (weights->rank != ids->rank ||
        memcmp(weights->shape, ids->shape, (size_t)ids->rank * sizeof ids->shape[0]) != 0) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "topk_weights has the shape %s, expected topk_ids' %s",
                         shape_text(weights, got, sizeof got), shape_text(ids, other, sizeof other));
    }
    TRY(check_tensor_memory("topk_ids", ids, experts->call->device, error));
    return check_tensor_memory("topk_weights", weights, experts->call->device, error);
}

static enum opaq_status route(struct experts *experts, struct opaq_error *error) {
    const struct opaq_experts_plan *plan = experts->plan;
    const struct opaq_tensor *weights = op_argument(experts->call, "topk_weights")->tensors;
    const struct opaq_tensor *ids = op_argument(experts->call, "topk_ids")->tensors;
    struct work *work = &experts->call->work;
    struct row_groups *groups = &experts->groups;
    const int64_t count = experts->gate_up.count;
    const int64_t total = plan->experts == 0 ? plan->first + count : plan->experts;
    if (plan->first + count > total) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE,
                         "a stack of %lld experts from %lld on does not fit into experts=%lld",
                         (long long)count, (long long)plan->first, (long long)total);
    }
    TRY(check_choices(experts, weights, ids, error));
    groups->count = count;
    groups->rows = tensor_elements(ids);
    groups->choices = ids->shape[ids->rank - 1];
    groups->is_split = true;
    groups->is_routed = true;
    groups->first = arena_take_array(&work->arena, count + 1, sizeof *groups->first);
    groups->slot = arena_take_array(&work->arena, groups->rows, sizeof *groups->slot);
    groups->weight = arena_take_array(&work->arena, groups->rows, sizeof *groups->weight);
    const struct route_job job = {
        .ids = *ids, .weights = *weights, .total = total, .begin = plan->first, .groups = *groups};
    return work->is_measuring ? OPAQ_OK : work->backend->route(&job, work->execution, error);
}

enum opaq_status experts_begin(struct op_call *call, struct experts *experts, struct opaq_error *error) {
    memset(experts, 0, sizeof *experts);
    experts->call = call;
    experts->plan = &call->plan.experts;
    experts->is_routed = op_argument(call, "topk_ids") != NULL;
    TRY(check_plan(experts, error));
    TRY(read_x(experts, error));
    TRY(read_weights(experts, error));
    TRY(check_sizes(experts, error));
    TRY(read_experts_random(experts, error));
    TRY(check_stack(&experts->gate_up, error));
    TRY(check_stack(&experts->down, error));
    experts->groups = (struct row_groups){.count = 1, .rows = experts->rows, .choices = 1};
    return experts->is_routed ? route(experts, error) : OPAQ_OK;
}

/* ---- rows ---- */

struct grouped_rows experts_token_rows(const struct experts *experts, const struct opaq_view *view,
                                       bool is_weighted, struct operand_form form) {
    return (struct grouped_rows){.view = *view,
                                 .order = experts->is_routed ? ROWS_BY_TOKEN : ROWS_SORTED,
                                 .is_weighted = is_weighted,
                                 .form = form};
}

struct grouped_rows sorted_rows(const struct opaq_view *view, struct operand_form form) {
    return (struct grouped_rows){.view = *view, .order = ROWS_SORTED, .form = form};
}

enum opaq_status experts_matrix(struct experts *experts, int64_t columns, enum opaq_element dtype,
                                struct opaq_view *matrix, struct opaq_error *error) {
    return work_matrix(&experts->call->work, experts->groups.rows, columns, dtype, matrix, error);
}

enum opaq_status experts_sums(struct experts *experts, struct opaq_view *sums, struct opaq_error *error) {
    struct work *work = &experts->call->work;
    TRY(work_matrix(work, experts->rows, experts->hidden, OPAQ_F32, sums, error));
    return work->is_measuring
               ? OPAQ_OK
               : work->backend->zero(sums->buffer[0].data, sums->buffer[0].bytes, work->execution, error);
}

enum opaq_status experts_store_sums(struct experts *experts, const struct opaq_view *sums, int output,
                                    struct opaq_error *error) {
    struct work *work = &experts->call->work;
    const struct opaq_view view = op_plain_output(experts->call, output);
    const struct quant_matrix from = quant_matrix_make(sums);
    const struct quant_matrix to = quant_matrix_make(&view);
    return work->is_measuring ? OPAQ_OK : work->backend->convert_rows(&from, &to, work->execution, error);
}
