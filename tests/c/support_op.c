/* support_op.c: calls rows of the operator table in tests. */
#include "support_op.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support_hiding.h"

struct op_tensors op_tensors_of(const struct tensor *tensor) {
    struct op_tensors made;
    memset(&made, 0, sizeof made);
    made.count = opaq_proto_buffer_count(&tensor->view.proto);
    for (int i = 0; i < made.count; ++i) {
        struct opaq_buffer buffer;
        struct opaq_tensor *one = &made.tensor[i];
        (void)opaq_proto_buffer(&tensor->view.proto, i, &buffer, NULL);
        one->data = tensor->view.buffer[i].data;
        one->dtype = buffer.entry_bytes == 1 ? OPAQ_DTYPE_U8 : (int32_t)buffer.element;
        one->rank = buffer.rank;
        memcpy(one->shape, buffer.shape, sizeof one->shape);
        memcpy(one->strides, buffer.strides, sizeof one->strides);
    }
    return made;
}

struct opaq_value op_tensor_value(const struct opaq_tensor *tensor) {
    return (struct opaq_value){.tensors = tensor, .count = 1};
}

struct opaq_value op_list_value(const struct op_tensors *tensors) {
    return (struct opaq_value){.tensors = tensors->tensor, .count = tensors->count};
}

struct opaq_value op_text_value(const char *text) {
    return (struct opaq_value){.text = text, .count = (int64_t)strlen(text)};
}

struct opaq_value op_sizes_value(const int64_t *sizes, int count) {
    return (struct opaq_value){.sizes = sizes, .count = count};
}

struct opaq_value op_int_value(int64_t value) {
    return (struct opaq_value){.integer = value};
}

enum opaq_status op_run_into(const char *name, const struct opaq_value *values, const struct tensor *out,
                             struct opaq_error *error) {
    const struct opaq_op *op = opaq_op_find(name);
    const struct op_tensors expected = op_tensors_of(out);
    struct opaq_outputs outputs;
    const enum opaq_status status = opaq_op_outputs(op, values, &outputs, error);
    if (status != OPAQ_OK) {
        return status;
    }
    if (outputs.count != expected.count) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "the row has %d outputs, the test %d", outputs.count,
                         expected.count);
    }
    for (int i = 0; i < outputs.count; ++i) {
        struct opaq_tensor *one = &outputs.tensor[i];
        const struct opaq_tensor *other = &expected.tensor[i];
        if (one->dtype != other->dtype || one->rank != other->rank ||
            memcmp(one->shape, other->shape, sizeof one->shape) != 0 ||
            memcmp(one->strides, other->strides, sizeof one->strides) != 0) {
            return opaq_fail(error, OPAQ_ERROR_SHAPE,
                             "output %d of the row differs from the prototype's buffer", i);
        }
        one->data = other->data;
    }
    struct hidden_call hidden;
    hidden_call_run(&hidden, op, values, &outputs, NULL);
    const enum opaq_status run = opaq_op_run(op, values, &outputs, (struct opaq_span){NULL, 0}, NULL, error);
    hidden_call_compare(&hidden, op, values, &outputs, run);
    return run;
}

int64_t op_tensor_elements(const struct opaq_tensor *tensor) {
    int64_t elements = 1;
    for (int i = 0; i < tensor->rank; ++i) {
        elements *= tensor->shape[i];
    }
    return elements;
}

size_t op_tensor_bytes(const struct opaq_tensor *tensor) {
    const size_t bytes = tensor->dtype == OPAQ_DTYPE_U8                                       ? 1
                         : tensor->dtype == OPAQ_DTYPE_I64                                    ? 8
                         : tensor->dtype == OPAQ_DTYPE_F32 || tensor->dtype == OPAQ_DTYPE_I32 ? 4
                                                                                              : 2;
    return bytes * (size_t)op_tensor_elements(tensor);
}

static void *allocate(size_t bytes) {
    void *memory;
    if (posix_memalign(&memory, 64, bytes > 0 ? bytes : 1) != 0) {
        printf("  posix_memalign: no memory\n");
        exit(1);
    }
    memset(memory, 0xA5, bytes);
    return memory;
}

/* Allocates every output; random outputs get their numbers. */
static void allocate_outputs(const struct opaq_op *op, const int64_t random[2], struct opaq_outputs *outputs) {
    for (int row = 0; row < op->output_count; ++row) {
        for (int i = outputs->first[row]; i < outputs->first[row + 1]; ++i) {
            struct opaq_tensor *tensor = &outputs->tensor[i];
            tensor->data = allocate(op_tensor_bytes(tensor));
            if (op->output[row].is_random) {
                memcpy(tensor->data, random, 2 * sizeof *random);
            }
        }
    }
}

enum opaq_status op_call(const char *name, const struct opaq_value *values, const struct op_settings *settings,
                         struct op_result *result, struct opaq_error *error) {
    static const struct op_settings none = {0};
    const struct opaq_op *op = opaq_op_find(name);
    size_t bytes = 0;
    settings = settings == NULL ? &none : settings;
    memset(result, 0, sizeof *result);
    result->has_slots = opaq_op_changes(op);
    enum opaq_status status = opaq_op_outputs(op, values, &result->outputs, error);
    if (status == OPAQ_OK) {
        status = opaq_op_workspace(op, values, &bytes, error);
    }
    if (status != OPAQ_OK) {
        return status;
    }
    void *workspace = allocate(bytes);
    allocate_outputs(op, settings->random, &result->outputs);
    const struct opaq_execution execution = {.parallel = settings->parallel};
    struct hidden_call hidden;
    hidden_call_run(&hidden, op, values, &result->outputs, settings->parallel);
    status = opaq_op_run(op, values, &result->outputs, (struct opaq_span){workspace, bytes}, &execution, error);
    hidden_call_compare(&hidden, op, values, &result->outputs, status);
    free(workspace);
    if (status != OPAQ_OK) {
        op_result_free(result);
    }
    return status;
}

void op_result_free(struct op_result *result) {
    for (int i = 0; i < result->outputs.count; ++i) {
        free(result->outputs.tensor[i].data);
    }
    memset(result, 0, sizeof *result);
}

struct op_tensors op_result_row(const struct op_result *result, int output) {
    const struct opaq_outputs *outputs = &result->outputs;
    struct op_tensors row;
    memset(&row, 0, sizeof row);
    for (int i = outputs->first[output]; i < outputs->first[output + 1]; ++i) {
        const struct opaq_tensor *tensor = &outputs->tensor[i];
        const int is_empty = tensor->dtype == OPAQ_DTYPE_U8 && tensor->rank == 1 && tensor->shape[0] == 0;
        if (!result->has_slots || !is_empty) { /* an absent output of an operator that changes tensors */
            row.tensor[row.count++] = *tensor;
        }
    }
    return row;
}

int op_result_difference(const struct op_result *a, const struct op_result *b, int output) {
    const struct op_tensors p = op_result_row(a, output);
    const struct op_tensors q = op_result_row(b, output);
    for (int i = 0; i < p.count || i < q.count; ++i) {
        const size_t bytes = op_tensor_bytes(&p.tensor[i]);
        if (p.count != q.count || bytes != op_tensor_bytes(&q.tensor[i]) ||
            memcmp(p.tensor[i].data, q.tensor[i].data, bytes) != 0) {
            return i;
        }
    }
    return -1;
}
