/* op/handle/runner_operators.c: the operators linear_gemm, mlp_gemm and moe_gemm: a runner's handle, and what it runs on. The row of
 * runner kind k is named k_gemm; its arguments are the activations, the handle, and the output's last size. */
#include <stdbool.h>
#include <string.h>

#include "op/table/op_table.h"
#include "op/table/op_tensor.h"
#include "op/handle/runner_registry.h"
#include "opaq/status.h"

/* the activations of moe_gemm; of the others X alone */
enum { X, TOPK_WEIGHTS, TOPK_IDS, INPUT_LIMIT };

/* One call: its runner, held, and its tensors side by side. */
struct held_call {
    int64_t handle;
    const struct runner *runner;
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

static enum opaq_status check_sizes(const struct opaq_call *call, const struct held_call *held,
                                    struct opaq_error *error) {
    const struct opaq_op *op = call->op;
    const struct opaq_runner_info *info = &held->runner->info;
    const struct opaq_tensor *x = &held->inputs[X];
    const int hint = held->call.input_count + 1;
    const int64_t given = call->values[hint].integer;
    if (given != info->out_features) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: %s is %lld, but runner %lld gives %lld", op->name,
                         op->argument[hint].name, (long long)given, (long long)held->handle,
                         (long long)info->out_features);
    }
    if (x->shape[x->rank - 1] != info->in_features) { /* the output has a last size, so x has one */
        char text[160];
        return opaq_fail(error, OPAQ_ERROR_SHAPE,
                         "%s: %s has the shape %s, but runner %lld takes %lld features", op->name,
                         op->argument[X].name, shape_text(x, text, sizeof text), (long long)held->handle,
                         (long long)info->in_features);
    }
    return OPAQ_OK;
}

/* Elements but for the last dimension; -1 if a tensor has none, or too many. */
static int64_t rows_of(const struct opaq_tensor *tensor) {
    struct opaq_tensor leading = *tensor;
    --leading.rank;
    return leading.rank < 0 ? -1 : tensor_elements(&leading);
}

/* One choice of experts for each row of hidden_states. */
static enum opaq_status check_topk(const struct opaq_call *call, const struct held_call *held,
                                   struct opaq_error *error) {
    const struct opaq_tensor *weights = &held->inputs[TOPK_WEIGHTS];
    const struct opaq_tensor *ids = &held->inputs[TOPK_IDS];
    const int64_t rows = rows_of(&held->inputs[X]);
    const bool is_float = weights->dtype == OPAQ_DTYPE_F32 || weights->dtype == OPAQ_DTYPE_BF16 ||
                          weights->dtype == OPAQ_DTYPE_F16;
    char text[2][160];
    if (!is_float || (ids->dtype != OPAQ_DTYPE_I32 && ids->dtype != OPAQ_DTYPE_I64)) {
        return opaq_fail(
            error, OPAQ_ERROR_ARGUMENT,
            "%s: topk_weights holds %s and topk_ids %s, expected f32, bf16 or f16, and int32 or int64",
            call->op->name, dtype_name(weights->dtype), dtype_name(ids->dtype));
    }
    if (weights->rank != ids->rank ||
        memcmp(weights->shape, ids->shape, (size_t)ids->rank * sizeof ids->shape[0]) != 0 ||
        rows_of(ids) != rows) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE,
                         "%s: topk_weights has the shape %s and topk_ids %s, expected the same with %lld rows",
                         call->op->name, shape_text(weights, text[0], sizeof text[0]),
                         shape_text(ids, text[1], sizeof text[1]), (long long)rows);
    }
    return OPAQ_OK;
}

/* Memory that a runner's functions can read as it is described. */
static enum opaq_status check_memory(const struct opaq_call *call, const struct held_call *held,
                                     struct opaq_error *error) {
    const struct opaq_device device = held->inputs[X].device;
    for (int i = 0; i < held->call.input_count; ++i) {
        const struct opaq_tensor *tensor = &held->inputs[i];
        const char *name = call->op->argument[i].name;
        const int64_t reach = tensor_reach(tensor);
        if (tensor->device.type != device.type || tensor->device.index != device.index) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s is on another device than the first tensor",
                             call->op->name, name);
        }
        if (reach < 0) {
            return opaq_fail(error, OPAQ_ERROR_OVERFLOW,
                             "%s: the strides of %s are negative or reach beyond 2^62 bytes", call->op->name,
                             name);
        }
        if (reach > 0 &&
            (tensor->data == NULL || (uintptr_t)tensor->data % (uintptr_t)dtype_bytes(tensor->dtype) != 0)) {
            return opaq_fail(error, OPAQ_ERROR_BUFFER, "%s: %s is %s", call->op->name, name,
                             tensor->data == NULL ? "NULL" : "not aligned to its elements");
        }
    }
    return OPAQ_OK;
}

/* After success the runner is held, and has to be released. */
static enum opaq_status begin(const struct opaq_call *call, struct held_call *held, struct opaq_error *error) {
    const int kind = kind_of(call->op);
    const int count = kind == OPAQ_RUNNER_MOE ? INPUT_LIMIT : 1;
    held->handle = call->values[count].integer;
    held->runner = runner_hold(call->op->name, held->handle, kind, error);
    if (held->runner == NULL) {
        return OPAQ_ERROR_ARGUMENT;
    }
    for (int i = 0; i < count; ++i) {
        held->inputs[i] = *call->values[i].tensors;
    }
    held->call = (struct opaq_runner_call){.inputs = held->inputs,
                                           .input_count = count,
                                           .output = call->outputs->tensor,
                                           .workspace = call->workspace,
                                           .parallel = call->parallel};
    enum opaq_status status = check_sizes(call, held, error);
    if (status == OPAQ_OK && kind == OPAQ_RUNNER_MOE) {
        status = check_topk(call, held, error);
    }
    if (status == OPAQ_OK) {
        status = check_memory(call, held, error);
    }
    if (status != OPAQ_OK) {
        runner_release(held->handle);
    }
    return status;
}

/* Releases the runner, and says whose error it was. */
static enum opaq_status end(const struct opaq_call *call, const struct held_call *held, enum opaq_status status,
                            struct opaq_error *reason, struct opaq_error *error) {
    runner_release(held->handle);
    if (status == OPAQ_OK) {
        return OPAQ_OK;
    }
    reason->text[sizeof reason->text - 1] = '\0'; /* it may be somebody else's code that wrote it */
    return opaq_fail(error, status, "%s: runner %lld: %s", call->op->name, (long long)held->handle,
                     reason->text[0] == '\0' ? "failed without a reason" : reason->text);
}

enum opaq_status workspace_gemm(const struct opaq_call *call, size_t *bytes, struct opaq_error *error) {
    struct held_call held;
    struct opaq_error reason = {OPAQ_OK, ""};
    enum opaq_status status = begin(call, &held, error);
    if (status != OPAQ_OK) {
        return status;
    }
    const struct opaq_runner_functions *functions = &held.runner->functions;
    *bytes = 0;
    if (functions->workspace != NULL) {
        status = functions->workspace(held.runner->state, &held.call, bytes, &reason);
    }
    return end(call, &held, status, &reason, error);
}

enum opaq_status run_gemm(const struct opaq_call *call, struct opaq_error *error) {
    struct held_call held;
    struct opaq_error reason = {OPAQ_OK, ""};
    enum opaq_status status = begin(call, &held, error);
    if (status != OPAQ_OK) {
        return status;
    }
    status = held.runner->functions.run(held.runner->state, &held.call, &reason);
    return end(call, &held, status, &reason, error);
}
