/* op/table/op_run.c: the door: everything that can be wrong with a call before its row looks at it, then the row. */
#include <stdbool.h>
#include <string.h>

#include "op/table/kernel_list.h"
#include "op/table/op_describe.h"
#include "op/table/op_tensor.h"
#include "opaq/status.h"

static bool overlaps(const struct opaq_tensor *a, const struct opaq_tensor *b) {
    const int64_t a_bytes = tensor_reach(a);
    const int64_t b_bytes = tensor_reach(b);
    return a_bytes > 0 && b_bytes > 0 && a->data != NULL && b->data != NULL &&
           (uintptr_t)a->data < (uintptr_t)b->data + (uintptr_t)b_bytes &&
           (uintptr_t)b->data < (uintptr_t)a->data + (uintptr_t)a_bytes;
}

/* Whether a tensor that is written shares memory with an argument other than itself. */
static bool overlaps_argument(const struct opaq_op *op, const struct opaq_value *values,
                              const struct opaq_tensor *written) {
    for (int i = 0; i < op->argument_count; ++i) {
        const int64_t tensors = argument_tensors(op->argument[i].kind, &values[i]);
        for (int64_t t = 0; values[i].tensors != NULL && t < tensors; ++t) {
            if (&values[i].tensors[t] != written && overlaps(written, &values[i].tensors[t])) {
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

/* The outputs are those that op_describe gave, with memory. */
static enum opaq_status check_outputs(const struct opaq_op *op, const struct opaq_value *values,
                                      const struct opaq_outputs *expected, const struct opaq_outputs *outputs,
                                      struct opaq_error *error) {
    if (outputs == NULL || outputs->count != expected->count) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: got %d outputs, expected %d", op->name,
                         outputs == NULL ? 0 : outputs->count, expected->count);
    }
    for (int i = 0; i < expected->count; ++i) {
        const struct opaq_tensor *output = &outputs->tensor[i];
        const struct opaq_device device = expected->tensor[i].device;
        const enum opaq_status status =
            check_same_tensor(op->name, output_name(op, expected, i), output, &expected->tensor[i], error);
        if (status != OPAQ_OK) {
            return status;
        }
        if (output->device.type != device.type || output->device.index != device.index) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                             "%s: output %d is on another device than the arguments", op->name, i);
        }
        if (tensor_reach(output) > 0 &&
            (output->data == NULL || (uintptr_t)output->data % (uintptr_t)dtype_bytes(output->dtype) != 0)) {
            return opaq_fail(error, OPAQ_ERROR_BUFFER, "%s: output %d is %s", op->name, i,
                             output->data == NULL ? "NULL" : "not aligned to its elements");
        }
        if (overlaps_argument(op, values, output) || overlaps_output(outputs, i)) {
            return opaq_fail(error, OPAQ_ERROR_BUFFER, "%s: output %d overlaps an argument or another output",
                             op->name, i);
        }
    }
    return OPAQ_OK;
}

static enum opaq_status check_changed(const struct opaq_op *op, const struct opaq_value *values,
                                      struct opaq_error *error) {
    for (int i = 0; i < op->argument_count; ++i) {
        const struct opaq_tensor *changed = values[i].tensors;
        if (op->argument[i].kind != OPAQ_ARGUMENT_CHANGED_TENSOR || changed == NULL) {
            continue;
        }
        if (tensor_reach(changed) < 0 || overlaps_argument(op, values, changed)) {
            return opaq_fail(error, OPAQ_ERROR_BUFFER, "%s: %s, which is changed, %s", op->name,
                             op->argument[i].name,
                             tensor_reach(changed) < 0 ? "has strides that are negative or reach too far"
                                                       : "overlaps another argument");
        }
    }
    return OPAQ_OK;
}

/* The device of the call: of the first output, or the first tensor where there is none. */
static enum opaq_status check_device(const struct opaq_op *op, const struct opaq_value *values,
                                     struct opaq_error *error) {
    for (int i = 0; i < op->argument_count; ++i) {
        if (argument_tensors(op->argument[i].kind, &values[i]) > 0) {
            const struct opaq_device device = values[i].tensors->device;
            return device.type == OPAQ_DEVICE_CPU
                       ? OPAQ_OK
                       : opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                                   "%s: the tensors are on cuda:%d, this build works on the cpu", op->name,
                                   device.index);
        }
    }
    return OPAQ_OK;
}

static enum opaq_status measure(const struct opaq_call *call, size_t *bytes, struct opaq_error *error) {
    *bytes = 0;
    return call->op->workspace == NULL ? OPAQ_OK : call->op->workspace(call, bytes, error);
}

static enum opaq_status check_workspace(const struct opaq_op *op, struct opaq_span given, size_t needed,
                                        struct opaq_error *error) {
    if (needed > 0 && (given.data == NULL || given.bytes < needed || (uintptr_t)given.data % 64 != 0)) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "%s: needs a workspace of %zu bytes aligned to 64, got %zu",
                         op->name, needed, given.data == NULL ? 0 : given.bytes);
    }
    return OPAQ_OK;
}

/* All that can be said before there is memory: the values are right, and this is what they make. */
static enum opaq_status begin(const struct opaq_op *op, const struct opaq_value *values,
                              struct opaq_proto protos[OPAQ_OP_RESULT_LIMIT], struct opaq_outputs *expected,
                              struct opaq_error *error) {
    enum opaq_status status = check_values(op, values, error);
    if (status == OPAQ_OK) {
        status = kernel_list_check(error);
    }
    if (status == OPAQ_OK) {
        status = op_describe(op, values, protos, expected, error);
    }
    if (status == OPAQ_OK) {
        status = check_device(op, values, error);
    }
    return status == OPAQ_OK ? check_changed(op, values, error) : status;
}

/* Without the places beyond the count, which are many. */
static void outputs_copy(const struct opaq_outputs *from, struct opaq_outputs *to) {
    to->count = from->count;
    memcpy(to->first, from->first, sizeof to->first);
    memcpy(to->tensor, from->tensor, (size_t)from->count * sizeof *to->tensor);
}

/* Takes the memory of outputs that were checked: all else is read from our own description, the caller's numbers are not
 * trusted. */
static void take_data(const struct opaq_outputs *outputs, struct opaq_outputs *expected) {
    for (int i = 0; i < expected->count; ++i) {
        expected->tensor[i].data = outputs->tensor[i].data;
    }
}

enum opaq_status opaq_op_run(const struct opaq_op *op, const struct opaq_value *values,
                             const struct opaq_outputs *outputs, struct opaq_span workspace,
                             const struct opaq_parallel *parallel, struct opaq_error *error) {
    struct opaq_proto protos[OPAQ_OP_RESULT_LIMIT];
    struct opaq_outputs expected;
    size_t bytes = 0;
    const struct opaq_call call = {op, values, protos, &expected, workspace, parallel};
    enum opaq_status status = begin(op, values, protos, &expected, error);
    if (status == OPAQ_OK) {
        status = check_outputs(op, values, &expected, outputs, error);
    }
    if (status != OPAQ_OK) {
        return status;
    }
    take_data(outputs, &expected);
    status = measure(&call, &bytes, error);
    if (status == OPAQ_OK) {
        status = check_workspace(op, workspace, bytes, error);
    }
    return status == OPAQ_OK ? op->run(&call, error) : status;
}

enum opaq_status opaq_op_call(const struct opaq_op *op, const struct opaq_value *values,
                              const struct opaq_memory *memory, const struct opaq_parallel *parallel,
                              struct opaq_error *error) {
    struct opaq_proto protos[OPAQ_OP_RESULT_LIMIT];
    struct opaq_outputs expected;
    struct opaq_outputs outputs;
    size_t bytes = 0;
    struct opaq_call call = {.op = op, .values = values, .protos = protos, .outputs = &expected};
    enum opaq_status status = begin(op, values, protos, &expected, error);
    if (status != OPAQ_OK) {
        return status;
    }
    if (memory == NULL || memory->give == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: memory is NULL", op->name);
    }
    status = measure(&call, &bytes, error);
    if (status == OPAQ_OK) {
        outputs_copy(&expected, &outputs);
        status = memory->give(memory->context, &outputs, bytes, &call.workspace, error);
    }
    if (status == OPAQ_OK) {
        status = check_outputs(op, values, &expected, &outputs, error);
    }
    if (status == OPAQ_OK) {
        status = check_workspace(op, call.workspace, bytes, error);
    }
    if (status != OPAQ_OK) {
        return status;
    }
    take_data(&outputs, &expected);
    call.parallel = parallel;
    return op->run(&call, error);
}
