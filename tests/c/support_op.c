/* support_op.c: calling rows of the operator table from tests. */
#include "support_op.h"

#include <string.h>

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
    return opaq_op_run(op, values, &outputs, (struct opaq_span){NULL, 0}, NULL, error);
}
