/* op/handle/runner_operators.c: the operators linear_gemm, mlp_gemm and moe_gemm: a runner's handle, and what it runs
 * on. The row of runner kind k is named k_gemm; its arguments are the activations, the handle, and the output's last
 * size. k_gemm_backward has dy and the activations that the gradients depend on, the handle, and the last size of dx. */
#include <assert.h>
#include <stdbool.h>
#include <string.h>

#include "base/try.h"
#include "op/handle/runner_registry.h"
#include "op/table/op_table.h"
#include "op/table/op_tensor.h"

/* the activations of moe_gemm; linear_gemm and mlp_gemm have X only. moe_gemm_backward has dy before them. */
enum { X, TOPK_WEIGHTS, TOPK_IDS, ACTIVATIONS, INPUT_LIMIT };

/* One call: its runner, held, and its tensors in one array. */
struct held_call {
    int64_t handle;
    const struct runner *runner;
    bool is_backward;
    struct opaq_tensor inputs[INPUT_LIMIT];
    struct opaq_runner_call call;
};

static int kind_of(const struct opaq_op *op) {
    int kind = 0;
    while (kind + 1 < OPAQ_RUNNER_KIND_COUNT &&
           strncmp(op->name, runner_kind_name(kind), strlen(runner_kind_name(kind))) != 0) {
        ++kind;
    }
    return kind;
}

/* dx is what the runner takes, and dy what it gives. */
static enum opaq_status check_sizes(const struct op_call *call, const struct held_call *held,
                                    struct opaq_error *error) {
    const struct opaq_op *op = call->op;
    const struct opaq_runner_info *info = &held->runner->info;
    const bool is_backward = held->is_backward;
    const struct opaq_tensor *first = &held->inputs[0];
    const int hint = held->call.input_count + 1;
    const int64_t given = call->values[hint].integer;
    const int64_t result = is_backward ? info->in_features : info->out_features;
    const int64_t features = is_backward ? info->out_features : info->in_features;
    if (given != result) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s is %lld, but runner %lld %s %lld",
                         op->argument[hint].name, (long long)given, (long long)held->handle,
                         is_backward ? "takes" : "gives", (long long)result);
    }
    if (first->rank < 1 || first->shape[first->rank - 1] != features) {
        char text[160];
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s has the shape %s, but runner %lld %s %lld features",
                         op->argument[0].name, shape_text(first, text, sizeof text), (long long)held->handle,
                         is_backward ? "gives" : "takes", (long long)features);
    }
    return OPAQ_OK;
}

/* The number of elements without the last dimension; -1 if a tensor has none, or too many. */
static int64_t rows_of(const struct opaq_tensor *tensor) {
    struct opaq_tensor leading = *tensor;
    --leading.rank;
    return leading.rank < 0 ? -1 : tensor_elements(&leading);
}

/* One choice of experts for each row of hidden_states. */
static enum opaq_status check_topk(const struct held_call *held, struct opaq_error *error) {
    const struct opaq_tensor *weights = &held->inputs[TOPK_WEIGHTS];
    const struct opaq_tensor *ids = &held->inputs[TOPK_IDS];
    const int64_t rows = rows_of(&held->inputs[X]);
    const bool is_float = weights->dtype == OPAQ_DTYPE_F32 || weights->dtype == OPAQ_DTYPE_BF16 ||
                          weights->dtype == OPAQ_DTYPE_F16;
    char text[2][160];
    if (!is_float || (ids->dtype != OPAQ_DTYPE_I32 && ids->dtype != OPAQ_DTYPE_I64)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "topk_weights holds %s and topk_ids %s, expected f32, bf16 or f16, and int32 or int64",
                         dtype_name(weights->dtype), dtype_name(ids->dtype));
    }
    if (weights->rank != ids->rank ||
        memcmp(weights->shape, ids->shape, (size_t)ids->rank * sizeof ids->shape[0]) != 0 ||
        rows_of(ids) != rows) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE,
                         "topk_weights has the shape %s and topk_ids %s, expected the same with %lld rows",
                         shape_text(weights, text[0], sizeof text[0]), shape_text(ids, text[1], sizeof text[1]),
                         (long long)rows);
    }
    return OPAQ_OK;
}

/* On success the runner is held; the caller releases it. */
static enum opaq_status hold(const struct op_call *call, struct held_call *held, struct opaq_error *error) {
    const int count = call->op->argument_count - 2;
    assert(count > 0); /* for the static analyzer */
    held->handle = call->values[count].integer;
    held->is_backward = strcmp(call->op->argument[0].name, "dy") == 0;
    held->runner = runner_hold(held->handle, kind_of(call->op), error);
    if (held->runner == NULL) {
        return OPAQ_ERROR_ARGUMENT;
    }
    for (int i = 0; i < count; ++i) {
        held->inputs[i] = *call->values[i].tensors;
    }
    held->call = (struct opaq_runner_call){.inputs = held->inputs,
                                           .input_count = count,
                                           .output = call->outputs->tensor,
                                           .workspace = {call->work.arena.memory, call->work.arena.bytes},
                                           .execution = &call->execution};
    return OPAQ_OK;
}

/* Checks that memory matches its description and sizes match the runner. */
static enum opaq_status check(const struct op_call *call, const struct held_call *held,
                              struct opaq_error *error) {
    TRY(check_sizes(call, held, error));
    if (held->call.input_count == ACTIVATIONS) {
        TRY(check_topk(held, error));
    }
    for (int i = 0; i < held->call.input_count; ++i) {
        TRY(check_tensor_memory(call->op->argument[i].name, &held->inputs[i], call->device, error));
    }
    return OPAQ_OK;
}

/* Calls the runner's own function; its errors are prefixed with the operator's name. */
static enum opaq_status run_held(struct op_call *call, const struct held_call *held, struct opaq_error *error) {
    const struct opaq_runner_functions *functions =
        held->is_backward ? held->runner->backward : &held->runner->functions;
    struct opaq_error reason = {OPAQ_OK, ""};
    enum opaq_status status = OPAQ_OK;
    if (functions == NULL) {
        status = opaq_fail(&reason, OPAQ_ERROR_UNSUPPORTED,
                           "has no gradient: it was registered with functions, not made from weights");
    } else if (!call->work.is_measuring) {
        status = functions->run(held->runner->state, &held->call, &reason);
    } else if (functions->workspace != NULL) {
        size_t bytes = 0;
        status = functions->workspace(held->runner->state, &held->call, &bytes, &reason);
        (void)arena_take(&call->work.arena, bytes);
    }
    if (status == OPAQ_OK) {
        return OPAQ_OK;
    }
    reason.text[sizeof reason.text - 1] = '\0'; /* the caller's code may have written it */
    return opaq_fail(error, status, "runner %lld: %s", (long long)held->handle,
                     reason.text[0] == '\0' ? "failed without a reason" : reason.text);
}

enum opaq_status run_gemm(struct op_call *call, struct opaq_error *error) {
    struct held_call held;
    TRY(hold(call, &held, error));
    enum opaq_status status = check(call, &held, error);
    if (status == OPAQ_OK) {
        status = run_held(call, &held, error);
    }
    runner_release(held.handle);
    return status;
}
