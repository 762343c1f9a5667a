/* torch/torch_stack.c: converts LibTorch's boxed arguments to opaq values, and results back. One conversion for each kind
 * of argument, and no decisions. */
#include "torch/torch_stack.h"

#include <stdbool.h>
#include <string.h>

#include "opaq/status.h"
#include "torch/torch_cuda.h"
#include "torch/torch_shim.h"

static struct torch_tensor *tensor_handle(uint64_t value) { return (struct torch_tensor *)(uintptr_t)value; }
static struct torch_list *list_handle(uint64_t value) { return (struct torch_list *)(uintptr_t)value; }
static struct torch_string *string_handle(uint64_t value) { return (struct torch_string *)(uintptr_t)value; }
static uint64_t *box_handle(uint64_t value) { return (uint64_t *)(uintptr_t)value; }

/* How the library reads a tensor: by rows that may have gaps between them, as one piece of memory, or to change it. */
enum access { ROWS, DENSE, CHANGED };

/* Negative for a dtype that no operator takes. */
static int32_t dtype_of_code(int32_t code) {
    return code == aoti_torch_dtype_bfloat16()  ? OPAQ_DTYPE_BF16
           : code == aoti_torch_dtype_float32() ? OPAQ_DTYPE_F32
           : code == aoti_torch_dtype_float16() ? OPAQ_DTYPE_F16
           : code == aoti_torch_dtype_uint8()   ? OPAQ_DTYPE_U8
           : code == aoti_torch_dtype_int64()   ? OPAQ_DTYPE_I64
           : code == aoti_torch_dtype_int32()   ? OPAQ_DTYPE_I32
           : code == aoti_torch_dtype_float64() ? OPAQ_DTYPE_F64
                                                : -1;
}

static int32_t code_of_dtype(int32_t dtype) {
    switch (dtype) {
    case OPAQ_DTYPE_BF16:
        return aoti_torch_dtype_bfloat16();
    case OPAQ_DTYPE_F32:
        return aoti_torch_dtype_float32();
    case OPAQ_DTYPE_F16:
        return aoti_torch_dtype_float16();
    case OPAQ_DTYPE_I64:
        return aoti_torch_dtype_int64();
    case OPAQ_DTYPE_I32:
        return aoti_torch_dtype_int32();
    default:
        return aoti_torch_dtype_uint8();
    }
}

/* `is_changed`: its memory is its own, even if it was shared until now. */
static int32_t data_of(struct torch_tensor *handle, bool is_changed, void **data) {
    const void *constant = NULL;
    if (is_changed) {
        return torch_get_mutable_data_ptr(handle, data);
    }
    const int32_t status = torch_get_const_data_ptr(handle, &constant);
    memcpy(data, &constant, sizeof constant); /* opaq_tensor serves inputs and outputs, so it is not const */
    return status;
}

static enum opaq_status describe_tensor(const char *operation, const char *name, uint64_t value,
                                        bool is_changed, struct opaq_tensor *tensor, struct opaq_error *error) {
    struct torch_tensor *handle = tensor_handle(value);
    int64_t *sizes;
    int64_t *strides;
    int64_t rank;
    int32_t code;
    int32_t layout;
    int32_t device;
    int32_t index;
    memset(tensor, 0, sizeof *tensor);
    if (aoti_torch_get_layout(handle, &layout) != 0 || layout != aoti_torch_layout_strided()) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s is not a strided tensor", operation, name);
    }
    if (aoti_torch_get_dim(handle, &rank) != 0 || aoti_torch_get_sizes(handle, &sizes) != 0 ||
        aoti_torch_get_strides(handle, &strides) != 0 || aoti_torch_get_dtype(handle, &code) != 0 ||
        aoti_torch_get_device_type(handle, &device) != 0 || aoti_torch_get_device_index(handle, &index) != 0 ||
        data_of(handle, is_changed, &tensor->data) != 0) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s cannot be read", operation, name);
    }
    if (rank > OPAQ_RANK_LIMIT) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: %s has %lld dimensions, at most %d are allowed",
                         operation, name, (long long)rank, OPAQ_RANK_LIMIT);
    }
    if (device != aoti_torch_device_type_cpu() && device != aoti_torch_device_type_cuda()) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "%s: %s is neither on the cpu nor on cuda", operation,
                         name);
    }
    tensor->dtype = dtype_of_code(code);
    tensor->rank = (int32_t)rank;
    tensor->device.type = device == aoti_torch_device_type_cpu() ? OPAQ_DEVICE_CPU : OPAQ_DEVICE_CUDA;
    tensor->device.index = index < 0 ? 0 : index;
    memcpy(tensor->shape, sizes, (size_t)rank * sizeof *sizes);
    memcpy(tensor->strides, strides, (size_t)rank * sizeof *strides);
    return OPAQ_OK;
}

/* Whether a tensor's rows are contiguous and at one distance from one another; with `is_dense`, at the smallest one.
 * Strides of dimensions of size 1, and of tensors without elements, do not matter. */
static bool has_rows(const struct opaq_tensor *tensor, bool is_dense) {
    const int last = tensor->rank - 1;
    int64_t expected = -1; /* not known before the innermost leading dimension */
    bool fits = true;
    for (int i = last; i >= 0; --i) {
        const int64_t stride = tensor->strides[i];
        if (tensor->shape[i] == 0) {
            return true;
        }
        if (tensor->shape[i] == 1) {
            continue;
        }
        if (i == last) {
            fits = stride == 1;
            continue;
        }
        if (expected < 0) {
            fits = fits && (is_dense ? stride == tensor->shape[last] : stride >= tensor->shape[last]);
        } else {
            fits = fits && stride == expected;
        }
        expected = stride * tensor->shape[i];
    }
    return fits;
}

/* Replaces a tensor whose layout the library does not read by a contiguous copy. */
static enum opaq_status make_rows(const char *operation, const char *name, bool is_dense, uint64_t *handle,
                                  struct opaq_tensor *tensor, struct opaq_error *error) {
    struct opaq_tensor copy = *tensor;
    uint64_t made = 0;
    if (tensor->dtype < 0 || tensor->data == NULL || has_rows(tensor, is_dense)) {
        return OPAQ_OK; /* the operator refuses the first two itself */
    }
    int64_t stride = 1;
    for (int i = tensor->rank - 1; i >= 0; --i) {
        copy.strides[i] = stride;
        stride *= copy.shape[i];
    }
    if (torch_tensor_allocate(&copy, &made, error) != OPAQ_OK) {
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "%s: PyTorch could not allocate a copy of %s", operation,
                         name);
    }
    const bool records = aoti_torch_grad_mode_is_enabled();
    aoti_torch_grad_mode_set_enabled(false);
    const int32_t failed = aoti_torch_copy_(tensor_handle(made), tensor_handle(*handle), 0);
    aoti_torch_grad_mode_set_enabled(records);
    if (failed != 0) {
        torch_tensor_free(made);
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "%s: PyTorch could not copy %s", operation, name);
    }
    torch_tensor_free(*handle);
    *handle = made;
    *tensor = copy;
    return OPAQ_OK;
}

/* What a tensor is a pointer to. */
static const void *impl_of(const struct torch_tensor *tensor) {
    const void *impl;
    memcpy(&impl, tensor, sizeof impl);
    return impl;
}

/* Whether a tensor has a tangent, which would be lost. */
static bool is_dual(const struct torch_tensor *tensor) {
    return torch_impl_tangent != NULL && torch_undefined_impl != NULL &&
           impl_of(torch_impl_tangent(impl_of(tensor), 0, tensor)) != torch_undefined_impl;
}

int torch_runner_argument(const struct opaq_op *op) {
    for (int i = 0; i < op->argument_count; ++i) {
        if (op->argument[i].kind == OPAQ_ARGUMENT_SYMINT && strcmp(op->argument[i].name, "runner_id") == 0) {
            return i;
        }
    }
    return -1;
}

/* Whether one of the tensors that are not in lists requires a gradient. */
static bool requires_gradient(const struct opaq_op *op, const uint64_t *stack) {
    for (int i = 0; i < op->argument_count; ++i) {
        if (op->argument[i].kind == OPAQ_ARGUMENT_TENSOR &&
            torch_impl_requires_grad(impl_of(tensor_handle(stack[i])))) {
            return true;
        }
    }
    return false;
}

/* Notes a tensor that requires a gradient, or each. */
static void track(struct torch_tensor *tensor, struct torch_arguments *arguments) {
    struct torch_tensor *noted;
    if (!arguments->tracks_all && !torch_impl_requires_grad(impl_of(tensor))) {
        return;
    }
    if (arguments->tracked == NULL && torch_new_list_reserve_size(1, &arguments->tracked) != 0) {
        arguments->tracked = NULL;
    } else if (aoti_torch_new_tensor_handle(tensor, &noted) == 0) {
        (void)torch_list_push_back(arguments->tracked, (uint64_t)(uintptr_t)noted);
    }
}

/* The next tensor of the arguments. */
static enum opaq_status read_tensor(const char *operation, const char *name, uint64_t *handle,
                                    enum access access, struct torch_arguments *arguments,
                                    struct opaq_error *error) {
    struct opaq_tensor *tensor = &arguments->tensor[arguments->tensor_count++];
    if (is_dual(tensor_handle(*handle))) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "%s: %s is a dual tensor, expected a plain one: the operators do not support "
                         "forward-mode differentiation (torch.autograd.forward_ad)",
                         operation, name);
    }
    if (arguments->tracks && access != CHANGED) {
        track(tensor_handle(*handle), arguments);
    }
    const enum opaq_status status = describe_tensor(operation, name, *handle, access == CHANGED, tensor, error);
    return status != OPAQ_OK || access == CHANGED
               ? status
               : make_rows(operation, name, access == DENSE, handle, tensor, error);
}

static enum opaq_status read_tensors(const char *operation, const char *name, uint64_t list, int64_t count,
                                     struct torch_arguments *arguments, struct opaq_value *value,
                                     struct opaq_error *error) {
    if (count > STACK_LIST_LIMIT - arguments->tensor_count) {
        return opaq_fail(error, OPAQ_ERROR_LIMIT, "%s: %s has %lld tensors, at most %d are allowed", operation,
                         name, (long long)count, STACK_LIST_LIMIT);
    }
    value->tensors = &arguments->tensor[arguments->tensor_count];
    value->count = count;
    for (int64_t i = 0; i < count; ++i) {
        uint64_t item;
        if (torch_list_get_item(list_handle(list), (size_t)i, &item) != 0) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s cannot be read", operation, name);
        }
        const uint64_t given = item;
        const enum opaq_status status = read_tensor(operation, name, &item, DENSE, arguments, error);
        if (item != given) {
            (void)torch_list_set_item(list_handle(list), (size_t)i, item); /* it is there: it cannot fail */
        }
        if (status != OPAQ_OK) {
            return status;
        }
    }
    return OPAQ_OK;
}

static enum opaq_status read_one_tensor(const char *operation, const char *name, uint64_t *handle,
                                        enum access access, struct torch_arguments *arguments,
                                        struct opaq_value *value, struct opaq_error *error) {
    value->tensors =
        &arguments->tensor[arguments->tensor_count]; /* lists leave room for one of each argument */
    value->count = 1;
    return read_tensor(operation, name, handle, access, arguments, error);
}

static enum opaq_status read_sizes(const char *operation, const char *name, uint64_t list, int64_t count,
                                   struct torch_arguments *arguments, struct opaq_value *value,
                                   struct opaq_error *error) {
    if (count > STACK_SIZE_LIMIT - arguments->size_count) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: %s has %lld sizes, at most %d are allowed", operation,
                         name, (long long)count, OPAQ_RANK_LIMIT);
    }
    value->sizes = &arguments->size[arguments->size_count];
    value->count = count;
    for (int64_t i = 0; i < count; ++i) {
        uint64_t item;
        if (torch_list_get_item(list_handle(list), (size_t)i, &item) != 0) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s cannot be read", operation, name);
        }
        arguments->size[arguments->size_count++] = (int64_t)item;
    }
    return OPAQ_OK;
}

static enum opaq_status read_argument(const struct opaq_op *op, int index, uint64_t *place,
                                      struct torch_arguments *arguments, struct opaq_error *error) {
    const char *name = op->argument[index].name;
    struct opaq_value *value = &arguments->value[index];
    const uint64_t slot = *place;
    size_t length = 0;
    switch (op->argument[index].kind) {
    case OPAQ_ARGUMENT_TENSOR:
        return read_one_tensor(op->name, name, place, ROWS, arguments, value, error);
    case OPAQ_ARGUMENT_OPTIONAL_TENSOR:
    case OPAQ_ARGUMENT_CHANGED_TENSOR: {
        const enum access access = op->argument[index].kind == OPAQ_ARGUMENT_CHANGED_TENSOR ? CHANGED : DENSE;
        return slot == 0 ? OPAQ_OK
                         : read_one_tensor(op->name, name, box_handle(slot), access, arguments, value, error);
    }
    case OPAQ_ARGUMENT_TENSOR_LIST:
        if (torch_list_size(list_handle(slot), &length) != 0) {
            break;
        }
        return read_tensors(op->name, name, slot, (int64_t)length, arguments, value, error);
    case OPAQ_ARGUMENT_TEXT:
        if (torch_string_length(string_handle(slot), &length) != 0 ||
            torch_string_c_str(string_handle(slot), &value->text) != 0) {
            break;
        }
        value->count = (int64_t)length;
        return OPAQ_OK;
    case OPAQ_ARGUMENT_SIZES:
        if (torch_list_size(list_handle(slot), &length) != 0) {
            break;
        }
        return read_sizes(op->name, name, slot, (int64_t)length, arguments, value, error);
    case OPAQ_ARGUMENT_DTYPE:
        value->integer = dtype_of_code((int32_t)(uint32_t)slot);
        return OPAQ_OK;
    case OPAQ_ARGUMENT_INT:
    case OPAQ_ARGUMENT_SYMINT:
        value->integer = (int64_t)slot;
        return OPAQ_OK;
    }
    return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s cannot be read", op->name, name);
}

enum opaq_status torch_arguments_read(const struct opaq_op *op, uint64_t *stack, bool tracks,
                                      struct torch_arguments *arguments, struct opaq_error *error) {
    enum opaq_status status = OPAQ_OK;
    memset(arguments->value, 0, sizeof arguments->value);
    arguments->tensor_count = 0;
    arguments->size_count = 0;
    arguments->tracked = NULL;
    arguments->tracks = tracks && torch_impl_requires_grad != NULL && aoti_torch_grad_mode_is_enabled();
    arguments->tracks_all = arguments->tracks && torch_runner_argument(op) >= 0 && requires_gradient(op, stack);
    for (int i = 0; status == OPAQ_OK && i < op->argument_count; ++i) {
        status = read_argument(op, i, &stack[i], arguments, error);
    }
    return status;
}

void torch_tensor_free(uint64_t handle) { (void)aoti_torch_delete_tensor_object(tensor_handle(handle)); }

static void free_box(uint64_t *box) {
    torch_tensor_free(*box);
    if (torch_delete_stable_ivalue != NULL) {
        (void)torch_delete_stable_ivalue(box);
    } else {
        torch_operator_delete(box);
    }
}

static void free_list(struct torch_list *list, int of_tensors) {
    size_t length = 0;
    if (of_tensors && torch_list_size(list, &length) == 0) {
        for (size_t i = 0; i < length; ++i) {
            uint64_t item;
            if (torch_list_get_item(list, i, &item) == 0) {
                torch_tensor_free(item);
            }
        }
    }
    (void)torch_delete_list(list);
}

void torch_arguments_free(const struct opaq_op *op, uint64_t *stack, struct torch_arguments *arguments) {
    if (arguments->tracked != NULL) {
        free_list(arguments->tracked, 1);
    }
    for (int i = 0; i < op->argument_count; ++i) {
        switch (op->argument[i].kind) {
        case OPAQ_ARGUMENT_TENSOR:
            torch_tensor_free(stack[i]);
            break;
        case OPAQ_ARGUMENT_OPTIONAL_TENSOR:
        case OPAQ_ARGUMENT_CHANGED_TENSOR:
            if (stack[i] != 0) {
                free_box(box_handle(stack[i]));
            }
            break;
        case OPAQ_ARGUMENT_TENSOR_LIST:
        case OPAQ_ARGUMENT_SIZES:
            free_list(list_handle(stack[i]), op->argument[i].kind == OPAQ_ARGUMENT_TENSOR_LIST);
            break;
        case OPAQ_ARGUMENT_TEXT:
            (void)torch_delete_string(string_handle(stack[i]));
            break;
        case OPAQ_ARGUMENT_DTYPE:
        case OPAQ_ARGUMENT_INT:
        case OPAQ_ARGUMENT_SYMINT:
            break;
        }
    }
}

enum opaq_status torch_tensor_allocate(struct opaq_tensor *like, uint64_t *handle, struct opaq_error *error) {
    struct torch_tensor *tensor;
    const int32_t device =
        like->device.type == OPAQ_DEVICE_CPU ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
    if (aoti_torch_empty_strided(like->rank, like->shape, like->strides, code_of_dtype(like->dtype), device,
                                 like->device.index, &tensor) != 0) {
        double elements = 1.0; /* the product may overflow an integer */
        for (int i = 0; i < like->rank; ++i) {
            elements *= (double)like->shape[i];
        }
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "PyTorch could not allocate a tensor of %.0f elements",
                         elements);
    }
    if (torch_get_mutable_data_ptr(tensor, &like->data) != 0) {
        (void)aoti_torch_delete_tensor_object(tensor);
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "PyTorch gave a tensor without memory");
    }
    *handle = (uint64_t)(uintptr_t)tensor;
    return OPAQ_OK;
}

enum opaq_status torch_tensor_randomize(const struct opaq_tensor *tensor, uint64_t handle,
                                        struct opaq_error *error) {
    const int64_t high = (int64_t)1 << 62;
    int32_t (*randint)(struct torch_tensor *, int64_t, int64_t, const int64_t *, int64_t) =
        aoti_torch_cpu_randint_low_out;
    if (tensor->device.type != OPAQ_DEVICE_CPU) {
        static torch_cuda_cache cache;
        void *const symbol = torch_cuda_symbol("aoti_torch_cuda_randint_low_out", &cache);
        if (symbol == NULL) {
            return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                             "this PyTorch has no aoti_torch_cuda_randint_low_out, which draws random numbers "
                             "on cuda:%d",
                             tensor->device.index);
        }
        memcpy(&randint, &symbol, sizeof randint);
    }
    if (randint(tensor_handle(handle), 0, high, tensor->shape, tensor->rank) != 0) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "PyTorch gave no random numbers");
    }
    return OPAQ_OK;
}
