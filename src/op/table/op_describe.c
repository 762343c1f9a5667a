/* op/table/op_describe.c: evaluates a row for a call: its schema, and its outputs' forms, shapes, dtypes and
 * devices. */
#include "op/table/op_describe.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/try.h"
#include "op/table/op_tensor.h"

static const char *const kind_names[] = {"Tensor",     "Tensor?", "Tensor[]", "str",   "SymInt[]",
                                         "ScalarType", "int",     "SymInt",   "Tensor"};

int opaq_op_changes(const struct opaq_op *op) {
    for (int i = 0; op != NULL && i < op->argument_count; ++i) {
        if (op->argument[i].kind == OPAQ_ARGUMENT_CHANGED_TENSOR) {
            return 1;
        }
    }
    return 0;
}

/* " -> Tensor", " -> Tensor[]" or a tuple. */
static size_t print_results(const struct opaq_op *op, char *text, size_t capacity) {
    if (!opaq_op_changes(op)) {
        return (size_t)snprintf(text, capacity, ") -> %s", op->returns_one ? "Tensor" : "Tensor[]");
    }
    size_t length = (size_t)snprintf(text, capacity, ") -> (");
    int slots = 0;
    for (int i = 0; i < op->output_count; ++i) {
        slots += op->output[i].slots;
    }
    for (int i = 0; i < slots; ++i) {
        length += (size_t)snprintf(text + length, capacity - length, i ? ", Tensor" : "Tensor");
    }
    return length + (size_t)snprintf(text + length, capacity - length, ")");
}

enum opaq_status opaq_op_schema(const struct opaq_op *op, char *buffer, size_t capacity,
                                struct opaq_error *error) {
    char text[OPAQ_OP_SCHEMA_BYTES];
    if (op == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "op_schema: op is NULL");
    }
    size_t length = (size_t)snprintf(text, sizeof text, "%s(", op->name);
    char alias = 'a';
    for (int i = 0; i < op->argument_count; ++i) {
        const struct opaq_argument_row *argument = &op->argument[i];
        char mark[8] = "";
        if (argument->kind == OPAQ_ARGUMENT_CHANGED_TENSOR) {
            (void)snprintf(mark, sizeof mark, "(%c!)?", alias++);
        }
        length += (size_t)snprintf(text + length, sizeof text - length, "%s%s%s %s%s%s", i ? ", " : "",
                                   kind_names[argument->kind], mark, argument->name,
                                   argument->default_text ? "=" : "",
                                   argument->default_text ? argument->default_text : "");
    }
    length += print_results(op, text + length, sizeof text - length);
    if (buffer == NULL || capacity <= length) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "op_schema: the text needs %zu bytes, the buffer has %zu",
                         length + 1, buffer == NULL ? 0 : capacity);
    }
    memcpy(buffer, text, length + 1);
    return OPAQ_OK;
}

int64_t argument_tensors(enum opaq_argument_kind kind, const struct opaq_value *value) {
    if (kind == OPAQ_ARGUMENT_TENSOR_LIST) {
        return value->count;
    }
    const bool one = kind <= OPAQ_ARGUMENT_OPTIONAL_TENSOR || kind == OPAQ_ARGUMENT_CHANGED_TENSOR;
    return one && value->tensors != NULL ? 1 : 0;
}

static enum opaq_status check_texts(const struct op_row *row, const struct opaq_value *values,
                                    struct opaq_error *error) {
    for (int i = 0; i < row->op.argument_count; ++i) {
        if (row->op.argument[i].kind == OPAQ_ARGUMENT_TEXT && (values[i].text == NULL || values[i].count < 0)) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is missing", row->op.argument[i].name);
        }
    }
    return OPAQ_OK;
}

static enum opaq_status check_rank(const char *name, int64_t rank, struct opaq_error *error) {
    return rank >= 0 && rank <= OPAQ_RANK_LIMIT
               ? OPAQ_OK
               : opaq_fail(error, OPAQ_ERROR_SHAPE, "%s has %lld dimensions, at most %d are allowed", name,
                           (long long)rank, OPAQ_RANK_LIMIT);
}

enum opaq_status check_values(const struct op_row *row, const struct opaq_value *values,
                              struct opaq_error *error) {
    const struct opaq_op *op = &row->op;
    TRY(check_texts(row, values, error));
    for (int i = 0; i < op->argument_count; ++i) {
        const enum opaq_argument_kind kind = op->argument[i].kind;
        const struct opaq_value *value = &values[i];
        const char *name = op->argument[i].name;
        const bool is_counted = kind == OPAQ_ARGUMENT_TENSOR_LIST || kind == OPAQ_ARGUMENT_SIZES;
        if ((kind == OPAQ_ARGUMENT_TENSOR && value->tensors == NULL) || (is_counted && value->count < 0) ||
            (kind == OPAQ_ARGUMENT_TENSOR_LIST && value->tensors == NULL && value->count > 0) ||
            (kind == OPAQ_ARGUMENT_SIZES && value->sizes == NULL && value->count > 0)) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is missing", name);
        }
        if (kind == OPAQ_ARGUMENT_SIZES) {
            TRY(check_rank(name, value->count, error));
        }
        const int64_t tensors = argument_tensors(kind, value);
        for (int64_t t = 0; t < tensors; ++t) {
            TRY(check_rank(name, value->tensors[t].rank, error));
        }
    }
    return OPAQ_OK;
}

enum opaq_status check_row(const struct op_row *row, const struct opaq_value *values,
                           struct opaq_error *error) {
    return row != NULL && values != NULL
               ? OPAQ_OK
               : opaq_fail(error, OPAQ_ERROR_ARGUMENT, "op: %s",
                           row == NULL ? "op is not a row of the table" : "values is NULL");
}

/* The form of an output whose plan is resolved. */
static enum opaq_status form_of(const struct op_call *call, int output, struct opaq_form *form,
                                struct opaq_error *error) {
    memset(form, 0, sizeof *form);
    form->kind = OPAQ_FORM_PLAIN;
    return call->row->form == NULL ? OPAQ_OK : call->row->form(call, output, form, error);
}

static enum opaq_status op_form(const struct op_row *row, const struct opaq_value *values, int output,
                                struct opaq_form *form, struct opaq_error *error) {
    struct op_call call = {.row = row, .op = &row->op, .values = values};
    TRY(check_texts(row, values, error));
    if (form == NULL || output < 0 || output >= row->op.output_count) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "output %d%s, expected 0 to %d", output,
                         form == NULL ? " into NULL" : "", row->op.output_count - 1);
    }
    TRY(op_plan_resolve(row, values, &call.plan, error));
    return form_of(&call, output, form, error);
}

enum opaq_status opaq_op_form(const struct opaq_op *op, const struct opaq_value *values, int output,
                              struct opaq_form *form, struct opaq_error *error) {
    const struct op_row *row = op_row_of(op);
    TRY(check_row(row, values, error));
    TRY_AS(op->name, error, op_form(row, values, output, form, error));
    return OPAQ_OK;
}

static bool is_of_tensor(enum opaq_shape_source source) {
    return source == OPAQ_SHAPE_OF_TENSOR || source == OPAQ_SHAPE_LEADING_AND_INT ||
           source == OPAQ_SHAPE_LEADING_AND_OUTER || source == OPAQ_SHAPE_TENSOR_AND_OUTER;
}

/* The shape of an output; returns its rank, or -1 if the arguments do not determine one. */
static int output_shape(const struct opaq_output_row *output, const struct opaq_value *values,
                        int64_t shape[OPAQ_RANK_LIMIT]) {
    if (output->shape_source == OPAQ_SHAPE_CONSTANT) {
        shape[0] = output->shape_argument;
        return 1;
    }
    const struct opaq_value *value = &values[output->shape_argument];
    const enum opaq_shape_source source = output->shape_source;
    const bool of_tensor = is_of_tensor(source);
    int64_t rank = of_tensor ? value->tensors->rank : value->count;
    const int64_t *sizes = of_tensor ? value->tensors->shape : value->sizes;
    if (source == OPAQ_SHAPE_FIRST) {
        shape[0] = rank > 0 ? sizes[0] : 0;
        return rank > 0 ? 1 : -1;
    }
    if (rank > 0) {
        memcpy(shape, sizes, (size_t)rank * sizeof *shape);
    }
    if (source == OPAQ_SHAPE_OF_TENSOR || source == OPAQ_SHAPE_OF_SIZES || source == OPAQ_SHAPE_OF_SIZES_FLAT) {
        return (int)rank;
    }
    rank -= source == OPAQ_SHAPE_TENSOR_AND_OUTER ? 0 : 1;
    if (source == OPAQ_SHAPE_LEADING || rank < 0 || rank >= OPAQ_RANK_LIMIT) {
        return rank < OPAQ_RANK_LIMIT ? (int)rank : -1;
    }
    const struct opaq_value *last = &values[output->first_argument];
    const int64_t place = source == OPAQ_SHAPE_LEADING_AND_FIRST ? 0 : last->count - 2;
    if (source == OPAQ_SHAPE_LEADING_AND_INT) {
        shape[rank] = last->integer;
    } else if (place >= 0 && place < last->count) {
        shape[rank] = last->sizes[place];
    } else {
        return -1;
    }
    return (int)rank + 1;
}

static enum opaq_status output_dtype(const struct opaq_op *op, const struct opaq_output_row *output,
                                     const struct opaq_value *values, int32_t *dtype,
                                     struct opaq_error *error) {
    if (output->dtype_argument < 0) {
        *dtype = output->dtype;
        return OPAQ_OK;
    }
    const struct opaq_value *value = &values[output->dtype_argument];
    const bool of_tensor = op->argument[output->dtype_argument].kind == OPAQ_ARGUMENT_TENSOR;
    const int64_t number = of_tensor ? value->tensors->dtype : value->integer;
    *dtype = number == (int32_t)number ? (int32_t)number : -1;
    if (*dtype != OPAQ_DTYPE_F32 && *dtype != OPAQ_DTYPE_BF16 && *dtype != OPAQ_DTYPE_F16) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is %s, expected f32, bf16 or f16",
                         op->argument[output->dtype_argument].name, dtype_name(*dtype));
    }
    return OPAQ_OK;
}

static enum opaq_status output_device(const struct opaq_op *op, const struct opaq_output_row *output,
                                      const struct opaq_value *values, struct opaq_device *device,
                                      struct opaq_error *error) {
    const struct opaq_value *value = &values[output->device_argument];
    const bool is_list = op->argument[output->device_argument].kind == OPAQ_ARGUMENT_TENSOR_LIST;
    if (value->tensors == NULL || (is_list && value->count == 0)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is empty", op->argument[output->device_argument].name);
    }
    *device = value->tensors->device;
    return OPAQ_OK;
}

/* A tensor of integers, for which there are no prototypes. */
static void integer_output(int64_t size, int32_t dtype, struct opaq_device device, struct opaq_tensor *tensor) {
    memset(tensor, 0, sizeof *tensor);
    tensor->dtype = dtype;
    tensor->rank = 1;
    tensor->device = device;
    tensor->shape[0] = size;
    tensor->strides[0] = 1;
}

/* The argument that does not determine an output's shape, for the message. */
static enum opaq_status refuse_shape(const struct opaq_op *op, const struct opaq_output_row *output,
                                     const struct opaq_value *values, struct opaq_error *error) {
    const struct opaq_value *shaped = &values[output->shape_argument];
    int argument = output->shape_argument;
    int64_t count = is_of_tensor(output->shape_source) ? shaped->tensors->rank : shaped->count;
    const int64_t least = output->shape_source == OPAQ_SHAPE_TENSOR_AND_OUTER ? 0 : 1;
    if (count >= least && count < OPAQ_RANK_LIMIT) { /* then it is the other one */
        argument = output->first_argument;
        count = values[argument].count;
    }
    return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s has %lld dimensions, %s for the shape of %s",
                     op->argument[argument].name, (long long)count,
                     count >= OPAQ_RANK_LIMIT ? "more than the 8 allowed" : "too few", output->name);
}

static enum opaq_status describe_output(const struct op_call *call, int index, struct opaq_proto *proto,
                                        struct opaq_outputs *outputs, struct opaq_error *error) {
    const struct opaq_op *op = call->op;
    const struct opaq_value *values = call->values;
    const struct opaq_output_row *output = &op->output[index];
    struct opaq_form form;
    struct opaq_device device = {OPAQ_DEVICE_CPU, 0};
    int64_t shape[OPAQ_RANK_LIMIT] = {0};
    int32_t dtype = 0;
    TRY(form_of(call, index, &form, error));
    if (form.kind == OPAQ_FORM_ABSENT) {
        return OPAQ_OK;
    }
    TRY(output_device(op, output, values, &device, error));
    const int rank = output_shape(output, values, shape);
    if (rank < 0) {
        return refuse_shape(op, output, values, error);
    }
    TRY(output_dtype(op, output, values, &dtype, error));
    if (dtype_bytes(dtype) == 8) {
        integer_output(shape[0], dtype, device, &outputs->tensor[outputs->count++]);
        return OPAQ_OK;
    }
    TRY(opaq_proto_make(shape, rank, (enum opaq_element)dtype,
                        form.kind == OPAQ_FORM_QUANTIZED ? &form.spec : NULL, device, proto, error));
    struct opaq_tensor *const tensors = &outputs->tensor[outputs->count];
    const int count = tensors_of_proto(proto, tensors);
    for (int i = 0; output->shape_source == OPAQ_SHAPE_OF_SIZES_FLAT && proto->is_quantized && i < count; ++i) {
        tensors[i].shape[0] = tensor_elements(&tensors[i]);
        tensors[i].strides[0] = 1;
        tensors[i].rank = 1;
    }
    outputs->count += count;
    return OPAQ_OK;
}

/* The unused slots of an output. */
static enum opaq_status fill_slots(const struct opaq_op *op, int index, struct opaq_device device,
                                   struct opaq_outputs *outputs, struct opaq_error *error) {
    const int used = outputs->count - outputs->first[index];
    const int slots = op->output[index].slots;
    if (used > slots) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "%s has %d tensors, there is room for %d",
                         op->output[index].name, used, slots);
    }
    for (int i = used; i < slots; ++i) {
        integer_output(0, OPAQ_DTYPE_U8, device, &outputs->tensor[outputs->count++]);
    }
    return OPAQ_OK;
}

enum opaq_status op_describe(const struct op_call *call, struct opaq_proto protos[OPAQ_OP_RESULT_LIMIT],
                             struct opaq_outputs *outputs, struct opaq_error *error) {
    const struct opaq_op *op = call->op;
    const bool has_slots = opaq_op_changes(op) != 0;
    outputs->count = 0;
    outputs->first[0] = 0;
    for (int i = 0; i < op->output_count; ++i) {
        memset(&protos[i], 0, sizeof protos[i]);
        TRY(describe_output(call, i, &protos[i], outputs, error));
        if (has_slots) {
            struct opaq_device device = {OPAQ_DEVICE_CPU, 0};
            TRY(output_device(op, &op->output[i], call->values, &device, error));
            TRY(fill_slots(op, i, device, outputs, error));
        }
        outputs->first[i + 1] = outputs->count;
    }
    return OPAQ_OK;
}
