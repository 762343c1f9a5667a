/* op/table/op_tensor.c: converts between a framework's tensors and opaq's views. */
#include "op/table/op_tensor.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/try.h"

const char *dtype_name(int32_t dtype) {
    switch (dtype) {
    case OPAQ_DTYPE_U8:
        return "uint8";
    case OPAQ_DTYPE_I64:
        return "int64";
    case OPAQ_DTYPE_I32:
        return "int32";
    case OPAQ_DTYPE_F64:
        return "float64";
    case OPAQ_DTYPE_F16:
    case OPAQ_DTYPE_BF16:
    case OPAQ_DTYPE_F32:
        return opaq_element_info((enum opaq_element)dtype)->name;
    default:
        return "another dtype";
    }
}

/* "[4,128]" */
const char *shape_text(const struct opaq_tensor *tensor, char *buffer, size_t capacity) {
    size_t length = (size_t)snprintf(buffer, capacity, "[");
    for (int i = 0; i < tensor->rank && length < capacity; ++i) {
        length += (size_t)snprintf(buffer + length, capacity - length, "%s%lld", i ? "," : "",
                                   (long long)tensor->shape[i]);
    }
    if (length < capacity) {
        (void)snprintf(buffer + length, capacity - length, "]");
    }
    return buffer;
}

static bool is_empty(const struct opaq_tensor *tensor) {
    for (int i = 0; i < tensor->rank; ++i) {
        if (tensor->shape[i] == 0) {
            return true;
        }
    }
    return false;
}

int64_t tensor_elements(const struct opaq_tensor *tensor) {
    int64_t elements = 1;
    for (int i = 0; i < tensor->rank; ++i) {
        if (tensor->shape[i] < 0 || !checked_multiply(elements, tensor->shape[i], &elements)) {
            return -1;
        }
    }
    return elements;
}

int64_t tensor_reach(const struct opaq_tensor *tensor) {
    int64_t last = 0;
    if (is_empty(tensor)) {
        return 0;
    }
    for (int i = 0; i < tensor->rank; ++i) {
        int64_t step;
        if (tensor->strides[i] < 0 || tensor->shape[i] < 0 ||
            !checked_multiply(tensor->shape[i] - 1, tensor->strides[i], &step) ||
            step > OPAQ_SIZE_LIMIT - last) {
            return -1;
        }
        last += step;
    }
    int64_t bytes;
    return checked_multiply(last + 1, dtype_bytes(tensor->dtype), &bytes) ? bytes : -1;
}

/* Interned, so that a text is parsed once; where the interned texts have reached their limit, parsed again. */
enum opaq_status spec_of_value(const struct opaq_value *text, struct opaq_spec *spec,
                               struct opaq_error *error) {
    const struct opaq_spec *shared;
    enum opaq_status status = opaq_spec_intern(text->text, (size_t)text->count, &shared, error);
    if (status == OPAQ_OK) {
        *spec = *shared;
    } else if (status == OPAQ_ERROR_LIMIT || status == OPAQ_ERROR_MEMORY) {
        status = opaq_spec_parse(text->text, (size_t)text->count, spec, error);
    }
    return status;
}

enum opaq_status view_of_tensor(const char *what, const struct opaq_tensor *tensor, struct opaq_view *view,
                                struct opaq_error *error) {
    const int64_t bytes = tensor_reach(tensor);
    if (tensor->dtype != OPAQ_DTYPE_F32 && tensor->dtype != OPAQ_DTYPE_BF16 &&
        tensor->dtype != OPAQ_DTYPE_F16) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s holds %s, expected f32, bf16 or f16", what,
                         dtype_name(tensor->dtype));
    }
    if (bytes < 0) {
        return opaq_fail(error, OPAQ_ERROR_OVERFLOW,
                         "the strides of %s are negative or reach beyond 2^62 bytes", what);
    }
    TRY_AS(what, error,
           opaq_view_plain(tensor->shape, tensor->strides, tensor->rank, (enum opaq_element)tensor->dtype,
                           tensor->device, tensor->data, (size_t)bytes, view, error));
    return OPAQ_OK;
}

/* One buffer as a tensor without data. */
static struct opaq_tensor tensor_of_buffer(const struct opaq_buffer *buffer, struct opaq_device device) {
    struct opaq_tensor tensor;
    tensor.data = NULL;
    tensor.dtype = buffer->entry_bytes == 1 ? OPAQ_DTYPE_U8 : (int32_t)buffer->element;
    tensor.rank = buffer->rank;
    tensor.device = device;
    memcpy(tensor.shape, buffer->shape, sizeof tensor.shape);
    memcpy(tensor.strides, buffer->strides, sizeof tensor.strides);
    return tensor;
}

int tensors_of_proto(const struct opaq_proto *proto, struct opaq_tensor tensors[OPAQ_BUFFER_LIMIT]) {
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    const int count = proto_buffers(proto, buffers);
    for (int i = 0; i < count; ++i) {
        tensors[i] = tensor_of_buffer(&buffers[i], proto->device);
    }
    return count;
}

/* Strides along dimensions of size 1, and of tensors without elements, do not matter. */
static bool is_contiguous_as(const struct opaq_tensor *tensor, const struct opaq_tensor *expected) {
    for (int i = 0; i < tensor->rank; ++i) {
        if (tensor->shape[i] > 1 && tensor->strides[i] != expected->strides[i]) {
            return is_empty(tensor);
        }
    }
    return true;
}

enum opaq_status check_same_tensor(const char *name, const struct opaq_tensor *tensor,
                                   const struct opaq_tensor *wanted, struct opaq_error *error) {
    if (tensor->dtype != wanted->dtype || tensor->rank != wanted->rank ||
        memcmp(tensor->shape, wanted->shape, (size_t)wanted->rank * sizeof tensor->shape[0]) != 0) {
        char got[160];
        char want[160];
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "buffer \"%s\" is %s%s, expected %s%s", name,
                         dtype_name(tensor->dtype), shape_text(tensor, got, sizeof got),
                         dtype_name(wanted->dtype), shape_text(wanted, want, sizeof want));
    }
    if (!is_contiguous_as(tensor, wanted)) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "buffer \"%s\" is not contiguous", name);
    }
    return OPAQ_OK;
}

enum opaq_status view_of_buffers(const struct opaq_proto *proto, const struct opaq_tensor *buffers,
                                 int64_t count, struct opaq_view *view, struct opaq_error *error) {
    struct opaq_buffer expected[OPAQ_BUFFER_LIMIT];
    const int expected_count = proto_buffers(proto, expected);
    if (count != expected_count) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "got %lld buffers, expected %d", (long long)count,
                         expected_count);
    }
    memset(view, 0, sizeof *view);
    view->proto = *proto;
    for (int i = 0; i < expected_count; ++i) {
        const struct opaq_tensor *tensor = &buffers[i];
        const struct opaq_buffer *buffer = &expected[i];
        struct opaq_tensor wanted = tensor_of_buffer(buffer, proto->device);
        if (tensor->rank == 1 && tensor->shape[0] == tensor_elements(&wanted)) {
            wanted.rank = 1;
            wanted.shape[0] = tensor->shape[0];
            wanted.strides[0] = 1;
        }
        TRY(check_same_tensor(buffer->name, tensor, &wanted, error));
        if (tensor->device.type != proto->device.type || tensor->device.index != proto->device.index) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "buffer \"%s\" is on another device than the first",
                             buffer->name);
        }
        if ((tensor->data == NULL && buffer->bytes > 0) ||
            (uintptr_t)tensor->data % (uintptr_t)buffer->entry_bytes) {
            return opaq_fail(error, OPAQ_ERROR_BUFFER, "buffer \"%s\" is %s", buffer->name,
                             tensor->data == NULL ? "NULL" : "not aligned to its entries");
        }
        view->buffer[i] = (struct opaq_span){tensor->data, buffer->bytes};
    }
    return OPAQ_OK;
}

/* For a tensor with elements: checks that their number fits. */
static bool is_row_major(const struct opaq_tensor *tensor) {
    int64_t stride = 1;
    for (int i = tensor->rank - 1; i >= 0; --i) {
        if (tensor->shape[i] > 1 && tensor->strides[i] != stride) {
            return false;
        }
        stride *= tensor->shape[i];
    }
    return true;
}

bool is_on_device(const struct opaq_tensor *tensor, struct opaq_device device) {
    return tensor->device.type == device.type && tensor->device.index == device.index;
}

enum opaq_status check_on_device(const char *name, const struct opaq_tensor *tensor, struct opaq_device device,
                                 struct opaq_error *error) {
    return is_on_device(tensor, device)
               ? OPAQ_OK
               : opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is on another device than the first tensor", name);
}

enum opaq_status check_tensor_memory(const char *name, const struct opaq_tensor *tensor,
                                     struct opaq_device device, struct opaq_error *error) {
    const int64_t reach = tensor_reach(tensor);
    TRY(check_on_device(name, tensor, device, error));
    if (reach < 0) {
        return opaq_fail(error, OPAQ_ERROR_OVERFLOW,
                         "the strides of %s are negative or reach beyond 2^62 bytes", name);
    }
    if (reach > 0 &&
        (tensor->data == NULL || (uintptr_t)tensor->data % (uintptr_t)dtype_bytes(tensor->dtype) != 0)) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "%s is %s", name,
                         tensor->data == NULL ? "NULL" : "not aligned to its elements");
    }
    return OPAQ_OK;
}

enum opaq_status floats_of_tensor(const char *what, const struct opaq_value *value, int64_t count,
                                  struct opaq_device device, const float **values, struct opaq_error *error) {
    const struct opaq_tensor *tensor = value->tensors;
    *values = NULL;
    if (tensor == NULL) {
        return OPAQ_OK;
    }
    const int64_t elements = tensor_elements(tensor);
    const bool dense = elements <= 0 || is_row_major(tensor);
    if (tensor->dtype != OPAQ_DTYPE_F32 || elements != count || elements < 0 || !dense ||
        !is_on_device(tensor, device)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is %lld x %s%s%s, expected %lld contiguous f32 on %s",
                         what, (long long)elements, dtype_name(tensor->dtype), dense ? "" : ", not contiguous",
                         is_on_device(tensor, device) ? "" : ", on another device", (long long)count,
                         device.type == OPAQ_DEVICE_CPU ? "the cpu" : "the device of the first tensor");
    }
    TRY(check_tensor_memory(what, tensor, device, error));
    *values = tensor->data;
    return OPAQ_OK;
}

enum opaq_status random_of_tensor(const struct opaq_value *value, struct opaq_device device,
                                  const int64_t **random, struct opaq_error *error) {
    const struct opaq_tensor *tensor = value->tensors;
    *random = NULL;
    if (tensor == NULL) {
        return OPAQ_OK;
    }
    if (tensor->dtype != OPAQ_DTYPE_I64 || tensor->rank != 1 || tensor->shape[0] != 2 ||
        tensor->strides[0] != 1 || !is_on_device(tensor, device) || tensor->data == NULL ||
        (uintptr_t)tensor->data % sizeof(int64_t) != 0) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "random is %s of rank %d%s, expected two contiguous int64 (seed, offset) on %s",
                         dtype_name(tensor->dtype), tensor->rank,
                         is_on_device(tensor, device) ? "" : " on another device",
                         device.type == OPAQ_DEVICE_CPU ? "the cpu" : "the device of the first tensor");
    }
    *random = tensor->data;
    return OPAQ_OK;
}
