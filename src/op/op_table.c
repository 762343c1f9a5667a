/* op/op_table.c: one row per operator. A new operator appends its row here and its run function in a file of its
 * own; schema, fake, allocation and call follow. */
#include "op/op_table.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "op/op_tensor.h"
#include "opaq/status.h"

/* clang-format off */
#define TENSOR(name)            {name, OPAQ_ARGUMENT_TENSOR, NULL}
#define OPTIONAL(name)          {name, OPAQ_ARGUMENT_OPTIONAL_TENSOR, "None"}
#define LIST(name)              {name, OPAQ_ARGUMENT_TENSOR_LIST, NULL}
#define QUANTIZER(name)         {name, OPAQ_ARGUMENT_TEXT, NULL}
#define SIZES(name)             {name, OPAQ_ARGUMENT_SIZES, NULL}
#define DTYPE(name)             {name, OPAQ_ARGUMENT_DTYPE, NULL}
#define INT(name, value)        {name, OPAQ_ARGUMENT_INT, value}
#define SYMINT(name)            {name, OPAQ_ARGUMENT_SYMINT, NULL}

static const struct opaq_op ops[] = {
    /* x to the buffers of a quantizer, in flatten order. scale: +delayed. amax_*: given instead of computed.
     * random: int64 (seed, offset), for +sr. */
    {"quantize", 6,
     {TENSOR("x"), QUANTIZER("quantizer"), OPTIONAL("scale"), OPTIONAL("amax_rowwise"), OPTIONAL("amax_columnwise"),
      OPTIONAL("random")},
     {"buffers", OPAQ_SHAPE_OF_TENSOR, 0, 0, 0, 1},
     run_quantize, NULL},
    /* and back, from the copy that usage names: 0 either, 1 rowwise, 2 columnwise */
    {"dequantize", 5,
     {LIST("buffers"), QUANTIZER("quantizer"), SIZES("shape"), DTYPE("dtype"), INT("usage", "0")},
     {"y", OPAQ_SHAPE_OF_SIZES, 2, 3, 0, -1},
     run_dequantize, NULL},
    /* the same tensor with other usages or the other scale order, where that needs no new rounding */
    {"convert", 5,
     {LIST("buffers"), QUANTIZER("quantizer"), QUANTIZER("to"), SIZES("shape"), DTYPE("dtype")},
     {"buffers", OPAQ_SHAPE_OF_SIZES, 3, 4, 0, 2},
     run_convert, NULL},
    /* rows from `start` on, as many as shape `to` has, of a tensor of shape `shape` */
    {"slice_rows", 6,
     {LIST("buffers"), QUANTIZER("quantizer"), SIZES("shape"), SIZES("to"), DTYPE("dtype"), SYMINT("start")},
     {"buffers", OPAQ_SHAPE_OF_SIZES, 3, 4, 0, 1},
     run_slice_rows, NULL},
    /* and together again: each buffer is those of equal shards of shape `shape`, after one another; `to` is whole */
    {"gather_rows", 5,
     {LIST("buffers"), QUANTIZER("quantizer"), SIZES("shape"), SIZES("to"), DTYPE("dtype")},
     {"buffers", OPAQ_SHAPE_OF_SIZES, 3, 4, 0, 1},
     run_gather_rows, NULL},
};
/* clang-format on */
enum { OP_COUNT = sizeof ops / sizeof ops[0] };

int opaq_op_count(void) { return OP_COUNT; }

const struct opaq_op *opaq_op_at(int index) { return index >= 0 && index < OP_COUNT ? &ops[index] : NULL; }

const struct opaq_op *opaq_op_find(const char *name) {
    for (int i = 0; name != NULL && i < OP_COUNT; ++i) {
        if (strcmp(ops[i].name, name) == 0) {
            return &ops[i];
        }
    }
    return NULL;
}

static const char *const kind_names[] = {"Tensor",   "Tensor?",    "Tensor[]", "str",
                                         "SymInt[]", "ScalarType", "int",      "SymInt"};

enum opaq_status opaq_op_schema(const struct opaq_op *op, char *buffer, size_t capacity,
                                struct opaq_error *error) {
    char text[OPAQ_OP_SCHEMA_BYTES];
    if (op == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "op_schema: op is NULL");
    }
    size_t length = (size_t)snprintf(text, sizeof text, "%s(", op->name);
    for (int i = 0; i < op->argument_count; ++i) {
        const struct opaq_argument_row *argument = &op->argument[i];
        length +=
            (size_t)snprintf(text + length, sizeof text - length, "%s%s %s%s%s", i ? ", " : "",
                             kind_names[argument->kind], argument->name, argument->default_text ? "=" : "",
                             argument->default_text ? argument->default_text : "");
    }
    length += (size_t)snprintf(text + length, sizeof text - length, ") -> %s",
                               op->output.quantizer_argument < 0 ? "Tensor" : "Tensor[]");
    if (buffer == NULL || capacity <= length) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "op_schema: the text needs %zu bytes, the buffer has %zu",
                         length + 1, buffer == NULL ? 0 : capacity);
    }
    memcpy(buffer, text, length + 1);
    return OPAQ_OK;
}

/* How many tensors an argument brings. */
static int64_t tensor_count(enum opaq_argument_kind kind, const struct opaq_value *value) {
    if (kind == OPAQ_ARGUMENT_TENSOR_LIST) {
        return value->count;
    }
    return kind <= OPAQ_ARGUMENT_OPTIONAL_TENSOR && value->tensors != NULL ? 1 : 0;
}

static enum opaq_status check_values(const struct opaq_op *op, const struct opaq_value *values,
                                     struct opaq_error *error) {
    if (op == NULL || values == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "op: %s is NULL", op == NULL ? "op" : "values");
    }
    for (int i = 0; i < op->argument_count; ++i) {
        const enum opaq_argument_kind kind = op->argument[i].kind;
        const struct opaq_value *value = &values[i];
        const char *name = op->argument[i].name;
        if ((kind == OPAQ_ARGUMENT_TENSOR && value->tensors == NULL) ||
            (kind == OPAQ_ARGUMENT_TENSOR_LIST && value->tensors == NULL && value->count > 0) ||
            (kind == OPAQ_ARGUMENT_TEXT && value->text == NULL) ||
            (kind == OPAQ_ARGUMENT_SIZES && value->sizes == NULL && value->count > 0)) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s is missing", op->name, name);
        }
        const int64_t tensors = tensor_count(kind, value);
        for (int64_t t = 0; t < tensors; ++t) {
            const int32_t rank = value->tensors[t].rank;
            if (rank < 0 || rank > OPAQ_RANK_LIMIT) {
                return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: %s has %d dimensions, at most %d are allowed",
                                 op->name, name, rank, OPAQ_RANK_LIMIT);
            }
        }
    }
    return OPAQ_OK;
}

static enum opaq_status op_output_proto(const struct opaq_op *op, const struct opaq_value *values,
                                        struct opaq_proto *proto, struct opaq_error *error) {
    const struct opaq_output_row *output = &op->output;
    const struct opaq_value *shape = &values[output->shape_argument];
    const struct opaq_value *dtype = &values[output->dtype_argument];
    const struct opaq_value *device = &values[output->device_argument];
    const bool dtype_is_tensor = op->argument[output->dtype_argument].kind == OPAQ_ARGUMENT_TENSOR;
    const bool of_tensor = output->shape_source == OPAQ_SHAPE_OF_TENSOR;
    const bool is_quantized = output->quantizer_argument >= 0;
    const bool device_is_list = op->argument[output->device_argument].kind == OPAQ_ARGUMENT_TENSOR_LIST;
    struct opaq_spec spec;
    struct opaq_error reason;
    if (is_quantized) {
        const enum opaq_status status =
            spec_of_text(op->name, &values[output->quantizer_argument], &spec, error);
        if (status != OPAQ_OK) {
            return status;
        }
    }
    if (device->tensors == NULL || (device_is_list && device->count == 0)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s is empty", op->name,
                         op->argument[output->device_argument].name);
    }
    if (!of_tensor && shape->count > OPAQ_RANK_LIMIT) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: shape has %lld dimensions, at most %d are allowed",
                         op->name, (long long)shape->count, OPAQ_RANK_LIMIT);
    }
    const int32_t element = dtype_is_tensor ? dtype->tensors->dtype : (int32_t)dtype->integer;
    if (element != OPAQ_DTYPE_F32 && element != OPAQ_DTYPE_BF16 && element != OPAQ_DTYPE_F16) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s is %s, expected f32, bf16 or f16", op->name,
                         op->argument[output->dtype_argument].name, dtype_name(element));
    }
    if (opaq_proto_make(of_tensor ? shape->tensors->shape : shape->sizes,
                        of_tensor ? shape->tensors->rank : (int)shape->count, (enum opaq_element)element,
                        is_quantized ? &spec : NULL, device->tensors->device, proto, &reason) != OPAQ_OK) {
        return opaq_fail(error, reason.status, "%s: %s", op->name, reason.text);
    }
    return OPAQ_OK;
}

enum opaq_status opaq_op_outputs(const struct opaq_op *op, const struct opaq_value *values,
                                 struct opaq_outputs *outputs, struct opaq_error *error) {
    struct opaq_proto proto;
    enum opaq_status status = check_values(op, values, error);
    if (status == OPAQ_OK && outputs == NULL) {
        status = opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: outputs is NULL", op->name);
    }
    if (status == OPAQ_OK) {
        status = op_output_proto(op, values, &proto, error);
    }
    if (status == OPAQ_OK) {
        tensors_of_proto(&proto, outputs);
    }
    return status;
}

enum opaq_status opaq_op_workspace(const struct opaq_op *op, const struct opaq_value *values, size_t *bytes,
                                   struct opaq_error *error) {
    struct opaq_proto proto;
    const enum opaq_status status = check_values(op, values, error);
    if (status != OPAQ_OK) {
        return status;
    }
    if (bytes == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: bytes is NULL", op->name);
    }
    if (op->workspace == NULL) {
        *bytes = 0;
        return OPAQ_OK;
    }
    const enum opaq_status described = op_output_proto(op, values, &proto, error);
    if (described == OPAQ_OK) {
        *bytes = op->workspace(values, &proto);
    }
    return described;
}

static bool overlaps(const struct opaq_tensor *a, const struct opaq_tensor *b) {
    const int64_t a_bytes = tensor_reach(a);
    const int64_t b_bytes = tensor_reach(b);
    return a_bytes > 0 && b_bytes > 0 && (uintptr_t)a->data < (uintptr_t)b->data + (uintptr_t)b_bytes &&
           (uintptr_t)b->data < (uintptr_t)a->data + (uintptr_t)a_bytes;
}

/* Whether output `index` shares memory with an argument or with an earlier output. */
static bool is_entangled(const struct opaq_op *op, const struct opaq_value *values,
                         const struct opaq_outputs *outputs, int index) {
    const struct opaq_tensor *output = &outputs->tensor[index];
    for (int i = 0; i < op->argument_count; ++i) {
        const int64_t tensors = tensor_count(op->argument[i].kind, &values[i]);
        for (int64_t t = 0; t < tensors; ++t) {
            if (overlaps(output, &values[i].tensors[t])) {
                return true;
            }
        }
    }
    for (int i = 0; i < index; ++i) {
        if (overlaps(output, &outputs->tensor[i])) {
            return true;
        }
    }
    return false;
}

/* The outputs are those that opaq_op_outputs gives, with memory. */
static enum opaq_status check_outputs(const struct opaq_op *op, const struct opaq_value *values,
                                      const struct opaq_proto *proto, const struct opaq_outputs *outputs,
                                      struct opaq_error *error) {
    struct opaq_outputs expected;
    tensors_of_proto(proto, &expected);
    if (outputs == NULL || outputs->count != expected.count) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: got %d outputs, expected %d", op->name,
                         outputs == NULL ? 0 : outputs->count, expected.count);
    }
    for (int i = 0; i < expected.count; ++i) {
        const struct opaq_tensor *output = &outputs->tensor[i];
        const struct opaq_device device = expected.tensor[i].device;
        const enum opaq_status status =
            check_same_tensor(op->name, op->output.name, output, &expected.tensor[i], error);
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
        if (is_entangled(op, values, outputs, i)) {
            return opaq_fail(error, OPAQ_ERROR_BUFFER, "%s: output %d overlaps an argument or another output",
                             op->name, i);
        }
    }
    return OPAQ_OK;
}

/* Everything that can be wrong with a call before its row looks at it. */
static enum opaq_status check_call(const struct opaq_op *op, const struct opaq_value *values,
                                   const struct opaq_outputs *outputs, struct opaq_span workspace,
                                   struct opaq_proto *proto, struct opaq_error *error) {
    enum opaq_status status = check_values(op, values, error);
    if (status != OPAQ_OK) {
        return status;
    }
    status = op_output_proto(op, values, proto, error);
    if (status != OPAQ_OK) {
        return status;
    }
    if (proto->device.type != OPAQ_DEVICE_CPU) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "%s: the tensors are on cuda:%d, this build works on the cpu", op->name,
                         proto->device.index);
    }
    const size_t needed = op->workspace == NULL ? 0 : op->workspace(values, proto);
    if (needed > 0 &&
        (workspace.data == NULL || workspace.bytes < needed || (uintptr_t)workspace.data % 64 != 0)) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "%s: needs a workspace of %zu bytes aligned to 64, got %zu",
                         op->name, needed, workspace.data == NULL ? 0 : workspace.bytes);
    }
    return check_outputs(op, values, proto, outputs, error);
}

enum opaq_status opaq_op_run(const struct opaq_op *op, const struct opaq_value *values,
                             const struct opaq_outputs *outputs, struct opaq_span workspace,
                             const struct opaq_parallel *parallel, struct opaq_error *error) {
    struct opaq_proto proto = {0};
    const enum opaq_status status = check_call(op, values, outputs, workspace, &proto, error);
    return status == OPAQ_OK ? op->run(values, &proto, outputs, workspace, parallel, error) : status;
}
