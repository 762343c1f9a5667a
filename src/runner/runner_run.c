/* runner/runner_run.c: runs a runner's operator on tensors, for programs that do not use the operator table. */
#include <stdio.h>
#include <string.h>

#include "base/try.h"
#include "op/handle/runner_registry.h"

/* The row of the runner's kind, and its values: the inputs, the handle, the size that the runner gives. NULL with an
 * OPAQ_ERROR_ARGUMENT if that does not fit. */
static const struct opaq_op *find_row(int64_t handle, const struct opaq_tensor *inputs, int input_count,
                                      struct opaq_value *values, struct opaq_error *error) {
    const struct runner *runner = runner_hold(handle, RUNNER_ANY, error);
    char name[32];
    if (runner == NULL) {
        return NULL;
    }
    const char *kind = runner_kind_name(runner->info.kind);
    const int64_t size = runner->info.out_features;
    runner_release(handle);
    (void)snprintf(name, sizeof name, "%s_gemm", kind);
    const struct opaq_op *op = opaq_op_find(name);
    const int count = op->argument_count - 2;
    if (inputs == NULL || input_count != count) {
        (void)opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s %d inputs, but runner %lld is a %s runner and takes %d",
                        inputs == NULL ? "NULL for" : "got", input_count, (long long)handle, kind, count);
        return NULL;
    }
    memset(values, 0, OPAQ_OP_ARGUMENT_LIMIT * sizeof *values);
    for (int i = 0; i < count; ++i) {
        values[i] = (struct opaq_value){.tensors = &inputs[i], .count = 1};
    }
    values[count].integer = handle;
    values[count + 1].integer = size;
    return op;
}

enum opaq_status opaq_runner_workspace(int64_t handle, const struct opaq_tensor *inputs, int input_count,
                                       size_t *bytes, struct opaq_error *error) {
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    const struct opaq_op *op = find_row(handle, inputs, input_count, values, error);
    return op == NULL ? error_prefix(error, OPAQ_ERROR_ARGUMENT, "runner_workspace")
                      : opaq_op_workspace(op, values, bytes, error);
}

enum opaq_status opaq_runner_run(int64_t handle, const struct opaq_tensor *inputs, int input_count,
                                 const struct opaq_tensor *output, struct opaq_span workspace,
                                 const struct opaq_execution *execution, struct opaq_error *error) {
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_outputs outputs = {.count = output != NULL, .first = {0, output != NULL}};
    const struct opaq_op *op = find_row(handle, inputs, input_count, values, error);
    if (op == NULL) {
        return error_prefix(error, OPAQ_ERROR_ARGUMENT, "runner_run");
    }
    if (output != NULL) {
        outputs.tensor[0] = *output;
    }
    return opaq_op_run(op, values, &outputs, workspace, execution, error);
}
