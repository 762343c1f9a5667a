/* runner/runner_run.c: a runner's operator without its values: for programs that have the tensors at hand. */
#include <stdio.h>
#include <string.h>

#include "op/runner_registry.h"
#include "opaq/status.h"

/* The row of the runner's kind, and its values: the inputs, the handle, the size that the runner gives. */
static enum opaq_status find_row(const char *operation, int64_t handle, const struct opaq_tensor *inputs,
                                 int input_count, const struct opaq_op **op, struct opaq_value *values,
                                 struct opaq_error *error) {
    struct opaq_runner_info info;
    struct opaq_error reason;
    char name[32];
    if (opaq_runner_query(handle, &info, &reason) != OPAQ_OK) {
        return opaq_fail(error, reason.status, "%s: %s", operation, strchr(reason.text, ' ') + 1);
    }
    (void)snprintf(name, sizeof name, "%s_gemm", runner_kind_name(info.kind));
    *op = opaq_op_find(name);
    const int count = (*op)->argument_count - 2;
    if (inputs == NULL || input_count != count) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "%s: %s %d inputs, but runner %lld is a %s runner and takes %d", operation,
                         inputs == NULL ? "NULL for" : "got", input_count, (long long)handle,
                         runner_kind_name(info.kind), count);
    }
    memset(values, 0, OPAQ_OP_ARGUMENT_LIMIT * sizeof *values);
    for (int i = 0; i < count; ++i) {
        values[i] = (struct opaq_value){.tensors = &inputs[i], .count = 1};
    }
    values[count].integer = handle;
    values[count + 1].integer = info.out_features;
    return OPAQ_OK;
}

enum opaq_status opaq_runner_workspace(int64_t handle, const struct opaq_tensor *inputs, int input_count,
                                       size_t *bytes, struct opaq_error *error) {
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    const struct opaq_op *op;
    const enum opaq_status status =
        find_row("runner_workspace", handle, inputs, input_count, &op, values, error);
    return status == OPAQ_OK ? opaq_op_workspace(op, values, bytes, error) : status;
}

enum opaq_status opaq_runner_run(int64_t handle, const struct opaq_tensor *inputs, int input_count,
                                 const struct opaq_tensor *output, struct opaq_span workspace,
                                 const struct opaq_parallel *parallel, struct opaq_error *error) {
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_outputs outputs = {.count = output != NULL, .first = {0, output != NULL}};
    const struct opaq_op *op;
    const enum opaq_status status = find_row("runner_run", handle, inputs, input_count, &op, values, error);
    if (status != OPAQ_OK) {
        return status;
    }
    if (output != NULL) {
        outputs.tensor[0] = *output;
    }
    return opaq_op_run(op, values, &outputs, workspace, parallel, error);
}
