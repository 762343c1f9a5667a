/* op/table/op_run.c: calls of operators: checks everything that does not depend on the operator, then calls the
 * row. */
#include <stdbool.h>
#include <string.h>

#include "base/try.h"
#include "op/table/op_describe.h"
#include "op/table/op_tensor.h"
#include "op/table/tensor_check.h"

/* ---- checks ---- */

static bool overlaps(const struct opaq_tensor *a, const struct opaq_tensor *b) {
    const int64_t a_bytes = tensor_reach(a);
    const int64_t b_bytes = tensor_reach(b);
    return a_bytes > 0 && b_bytes > 0 && a->data != NULL && b->data != NULL &&
           (uintptr_t)a->data < (uintptr_t)b->data + (uintptr_t)b_bytes &&
           (uintptr_t)b->data < (uintptr_t)a->data + (uintptr_t)a_bytes;
}

/* Whether a written tensor overlaps an argument other than itself. */
static bool overlaps_argument(const struct op_call *call, const struct opaq_tensor *written) {
    for (int i = 0; i < call->op->argument_count; ++i) {
        const struct opaq_value *value = &call->values[i];
        const int64_t tensors = argument_tensors(call->op->argument[i].kind, value);
        for (int64_t t = 0; value->tensors != NULL && t < tensors; ++t) {
            if (&value->tensors[t] != written && overlaps(written, &value->tensors[t])) {
                return true;
            }
        }
    }
    return false;
}

static bool overlaps_output(const struct opaq_outputs *outputs, int index) {
    for (int i = 0; i < index; ++i) {
        if (overlaps(&outputs->tensor[index], &outputs->tensor[i])) {
            return true;
        }
    }
    return false;
}

static const char *output_name(const struct opaq_op *op, const struct opaq_outputs *outputs, int index) {
    int row = 0;
    while (row + 1 < op->output_count && index >= outputs->first[row + 1]) {
        ++row;
    }
    return op->output[row].name;
}

/* Checks that the outputs are those that op_describe returned, with memory. */
static enum opaq_status check_outputs(const struct op_call *call, const struct opaq_outputs *outputs,
                                      struct opaq_error *error) {
    const struct opaq_outputs *expected = call->outputs;
    if (outputs->count != expected->count) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "got %d outputs, expected %d", outputs->count,
                         expected->count);
    }
    for (int i = 0; i < expected->count; ++i) {
        const struct opaq_tensor *output = &outputs->tensor[i];
        TRY(check_same_tensor(output_name(call->op, expected, i), output, &expected->tensor[i], error));
        if (!is_on_device(output, expected->tensor[i].device)) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "output %d is on another device than the arguments",
                             i);
        }
        if (tensor_reach(output) > 0 &&
            (output->data == NULL || (uintptr_t)output->data % (uintptr_t)dtype_bytes(output->dtype) != 0)) {
            return opaq_fail(error, OPAQ_ERROR_BUFFER, "output %d is %s", i,
                             output->data == NULL ? "NULL" : "not aligned to its elements");
        }
        if (overlaps_argument(call, output) || overlaps_output(outputs, i)) {
            return opaq_fail(error, OPAQ_ERROR_BUFFER, "output %d overlaps an argument or another output", i);
        }
    }
    return OPAQ_OK;
}

static enum opaq_status check_changed(const struct op_call *call, struct opaq_error *error) {
    for (int i = 0; i < call->op->argument_count; ++i) {
        const struct opaq_argument_row *argument = &call->op->argument[i];
        const struct opaq_tensor *changed = call->values[i].tensors;
        if (argument->kind != OPAQ_ARGUMENT_CHANGED_TENSOR || changed == NULL) {
            continue;
        }
        if (tensor_reach(changed) < 0 || overlaps_argument(call, changed)) {
            return opaq_fail(error, OPAQ_ERROR_BUFFER, "%s, which is changed, %s", argument->name,
                             tensor_reach(changed) < 0 ? "has strides that are negative or reach too far"
                                                       : "overlaps another argument");
        }
    }
    return OPAQ_OK;
}

static enum opaq_status check_workspace(struct opaq_span given, size_t needed, struct opaq_error *error) {
    if (needed > 0 && (given.data == NULL || given.bytes < needed || (uintptr_t)given.data % 64 != 0)) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "needs a workspace of %zu bytes aligned to 64, got %zu",
                         needed, given.data == NULL ? 0 : given.bytes);
    }
    return OPAQ_OK;
}

/* ---- a call, step by step ---- */

/* The device of the call is that of the first tensor. */
static struct opaq_device device_of(const struct op_call *call) {
    for (int i = 0; i < call->op->argument_count; ++i) {
        if (argument_tensors(call->op->argument[i].kind, &call->values[i]) > 0) {
            return call->values[i].tensors->device;
        }
    }
    return (struct opaq_device){OPAQ_DEVICE_CPU, 0};
}

/* The memory of a call: the described outputs, and the allocated memory. */
struct call_memory {
    struct opaq_proto protos[OPAQ_OP_RESULT_LIMIT];
    struct opaq_outputs outputs;
};

/* All checks that need no memory, and the description of the outputs. */
static enum opaq_status begin(const struct op_row *row, const struct opaq_value *values,
                              const struct opaq_execution *execution, struct call_memory *memory,
                              struct op_call *call, struct opaq_error *error) {
    call->row = row;
    call->op = &row->op;
    call->values = values;
    call->protos = memory->protos;
    call->outputs = &memory->outputs;
    TRY(check_values(row, values, error));
    TRY(kernel_list_check(error));
    TRY(op_plan_resolve(row, values, &call->plan, error));
    TRY(op_describe(call, memory->protos, &memory->outputs, error));
    call->device = device_of(call);
    TRY(backend_of(call->device, &call->work.backend, error));
    TRY(execution_of(execution, call->device, &call->execution, error));
    call->work.execution = &call->execution;
    return OPAQ_OK;
}

static enum opaq_status measure(struct op_call *call, size_t *bytes, struct opaq_error *error) {
    *bytes = 0;
    if (!call->row->has_workspace) {
        return OPAQ_OK;
    }
    call->work.is_measuring = true;
    call->work.arena = (struct arena){.memory = NULL};
    TRY(call->row->run(call, error));
    if (call->work.arena.most > (size_t)OPAQ_SIZE_LIMIT) {
        return opaq_fail(error, OPAQ_ERROR_OVERFLOW, "the workspace would have more than 2^62 bytes");
    }
    *bytes = call->work.arena.most;
    return OPAQ_OK;
}

static enum opaq_status run(struct op_call *call, struct opaq_span workspace, struct opaq_error *error) {
    call->work.is_measuring = false;
    call->work.arena = (struct arena){.memory = workspace.data, .bytes = workspace.bytes};
    return call->row->run(call, error);
}

/* Copies without the unused entries, which are many. */
static void outputs_copy(const struct opaq_outputs *from, struct opaq_outputs *to) {
    to->count = from->count;
    memcpy(to->first, from->first, sizeof to->first);
    memcpy(to->tensor, from->tensor, (size_t)from->count * sizeof *to->tensor);
}

/* Takes the memory of outputs that were checked: all else is read from our own description, the caller's numbers are
 * not trusted. */
static void take_data(const struct opaq_outputs *outputs, struct opaq_outputs *expected) {
    for (int i = 0; i < expected->count; ++i) {
        expected->tensor[i].data = outputs->tensor[i].data;
    }
}

static enum opaq_status call_op(const struct op_row *row, const struct opaq_value *values,
                                const struct opaq_memory *memory, const struct opaq_execution *execution,
                                struct opaq_error *error) {
    struct call_memory described;
    struct opaq_outputs outputs;
    struct opaq_span workspace = {NULL, 0};
    struct op_call call;
    size_t bytes;
    TRY(begin(row, values, execution, &described, &call, error));
    if (memory == NULL || memory->give == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "memory is NULL");
    }
    TRY(measure(&call, &bytes, error));
    TRY(check_changed(&call, error));
    outputs_copy(&described.outputs, &outputs);
    TRY(memory->give(memory->context, &outputs, bytes, &workspace, error));
    TRY(check_outputs(&call, &outputs, error));
    TRY(check_workspace(workspace, bytes, error));
    take_data(&outputs, &described.outputs);
    return run(&call, workspace, error);
}

/* ---- the public calls ---- */

static enum opaq_status outputs_of(const struct op_row *row, const struct opaq_value *values,
                                   struct opaq_outputs *outputs, struct opaq_error *error) {
    struct opaq_proto protos[OPAQ_OP_RESULT_LIMIT];
    struct op_call call = {.row = row, .op = &row->op, .values = values};
    TRY(check_values(row, values, error));
    if (outputs == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "outputs is NULL");
    }
    TRY(op_plan_resolve(row, values, &call.plan, error));
    return op_describe(&call, protos, outputs, error);
}

enum opaq_status opaq_op_outputs(const struct opaq_op *op, const struct opaq_value *values,
                                 struct opaq_outputs *outputs, struct opaq_error *error) {
    const struct op_row *row = op_row_of(op);
    TRY(check_row(row, values, error));
    TRY_AS(op->name, error, outputs_of(row, values, outputs, error));
    return OPAQ_OK;
}

static enum opaq_status workspace_of(const struct op_row *row, const struct opaq_value *values, size_t *bytes,
                                     struct opaq_error *error) {
    struct call_memory described;
    struct op_call call;
    TRY(begin(row, values, NULL, &described, &call, error));
    if (bytes == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "bytes is NULL");
    }
    return measure(&call, bytes, error);
}

enum opaq_status opaq_op_workspace(const struct opaq_op *op, const struct opaq_value *values, size_t *bytes,
                                   struct opaq_error *error) {
    const struct op_row *row = op_row_of(op);
    TRY(check_row(row, values, error));
    TRY_AS(op->name, error, workspace_of(row, values, bytes, error));
    return OPAQ_OK;
}

enum opaq_status opaq_op_call(const struct opaq_op *op, const struct opaq_value *values,
                              const struct opaq_memory *memory, const struct opaq_execution *execution,
                              struct opaq_error *error) {
    const struct op_row *row = op_row_of(op);
    TRY(check_row(row, values, error));
    TRY_AS(op->name, error, call_op(row, values, memory, execution, error));
    return OPAQ_OK;
}

/* Memory that the caller allocated before the call. */
struct brought {
    const struct opaq_outputs *outputs;
    struct opaq_span workspace;
};

static enum opaq_status give_brought(void *context, struct opaq_outputs *outputs, size_t bytes,
                                     struct opaq_span *workspace, struct opaq_error *error) {
    const struct brought *brought = context;
    const int count = brought->outputs == NULL ? 0 : brought->outputs->count;
    (void)bytes;
    *workspace = brought->workspace;
    if (count != outputs->count) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "got %d outputs, expected %d", count, outputs->count);
    }
    memcpy(outputs->tensor, brought->outputs == NULL ? outputs->tensor : brought->outputs->tensor,
           (size_t)count * sizeof *outputs->tensor);
    return OPAQ_OK;
}

enum opaq_status opaq_op_run(const struct opaq_op *op, const struct opaq_value *values,
                             const struct opaq_outputs *outputs, struct opaq_span workspace,
                             const struct opaq_execution *execution, struct opaq_error *error) {
    struct brought brought = {outputs, workspace};
    const struct opaq_memory memory = {give_brought, &brought};
    return opaq_op_call(op, values, &memory, execution, error);
}
