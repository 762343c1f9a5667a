/* fuzz_arguments.h: arbitrary operator arguments: hostile shapes, dtypes, strides, texts, lists. Depends on
 * fuzz_call.h. */
#ifndef FUZZ_ARGUMENTS_H
#define FUZZ_ARGUMENTS_H

#include "fuzz_call.h"

/* Mostly small, sometimes any value. */
static inline int64_t take_size(struct input *input) {
    const uint8_t kind = take(input);
    if (kind < 240) {
        return kind % 70;
    }
    static const int64_t odd[] = {-1, 128, 129, INT64_MAX, INT64_MIN, (int64_t)1 << 40, (int64_t)1 << 62, 256};
    return odd[kind % 8];
}

static inline int64_t take_shape(struct input *input, int64_t *shape) {
    const int64_t rank = take(input) % 10;
    for (int64_t i = 0; i < rank && i < OPAQ_RANK_LIMIT; ++i) {
        shape[i] = take_size(input);
    }
    return rank;
}

/* Any tensor as tensor t of an argument. */
static inline void take_tensor(struct input *input, struct call *call, int index, int t) {
    static const int32_t dtypes[] = {
        OPAQ_DTYPE_U8, OPAQ_DTYPE_F32, OPAQ_DTYPE_BF16, OPAQ_DTYPE_F16, OPAQ_DTYPE_I64, OPAQ_DTYPE_I32, -1,
        OPAQ_DTYPE_F32};
    struct opaq_tensor *tensor = &call->tensor[index][t];
    memset(tensor, 0, sizeof *tensor);
    tensor->dtype = dtypes[take(input) % 8];
    tensor->device.type = take(input) % 50 == 0 ? OPAQ_DEVICE_CUDA : OPAQ_DEVICE_CPU;
    tensor->rank = (int32_t)take_shape(input, tensor->shape);
    int64_t stride = 1;
    const int rank = tensor->rank < OPAQ_RANK_LIMIT ? tensor->rank : OPAQ_RANK_LIMIT;
    for (int i = rank - 1; i >= 0; --i) {
        const uint8_t odd = take(input);
        tensor->strides[i] = odd > 245 ? take_size(input) : stride;
        stride = tensor->shape[i] > 0 && tensor->shape[i] < MEMORY_LIMIT && stride < MEMORY_LIMIT
                     ? stride * tensor->shape[i]
                     : stride;
    }
    allocate(input, call, index, t);
}

static inline int64_t take_text(struct input *input, char text[TEXT_LIMIT]) {
    static const char *const known[] = {"fp8",
                                        "fp8+both",
                                        "fp8row+both",
                                        "fp8blk1+both",
                                        "fp8blk2+columnwise",
                                        "mxfp8+both",
                                        "mxfp4+both+2d",
                                        "nvfp4",
                                        "nvfp4+both+rht",
                                        "nvfp4+both+sr",
                                        "nvfp4+both+rowscaled",
                                        "mxfp8+columnwise+swizzle",
                                        "fp8+delayed"};
    const uint8_t kind = take(input);
    const size_t count = sizeof known / sizeof known[0];
    if (kind < 200) {
        const size_t length = strlen(known[kind % count]);
        memcpy(text, known[kind % count], length);
        return (int64_t)length;
    }
    const int64_t length = kind % 48;
    for (int64_t i = 0; i < length; ++i) {
        text[i] = (char)take(input);
    }
    return length;
}

static inline void take_argument(struct input *input, const struct opaq_op *op, int index, struct call *call) {
    struct opaq_value *value = &call->value[index];
    forget(call, index);
    switch (op->argument[index].kind) {
    case OPAQ_ARGUMENT_OPTIONAL_TENSOR:
    case OPAQ_ARGUMENT_CHANGED_TENSOR:
        if (take(input) % 4 != 0) {
            break;
        }
        /* fall through */
    case OPAQ_ARGUMENT_TENSOR:
        take_tensor(input, call, index, 0);
        value->tensors = call->tensor[index];
        value->count = take(input) % 2; /* which is not read */
        break;
    case OPAQ_ARGUMENT_TENSOR_LIST:
        value->tensors = call->tensor[index];
        value->count = take(input) % TENSOR_LIMIT;
        for (int64_t i = 0; i < value->count; ++i) {
            take_tensor(input, call, index, (int)i);
        }
        if (value->count == 0) {
            value->count = -(take(input) % 2);
            value->tensors = NULL;
        }
        break;
    case OPAQ_ARGUMENT_TEXT:
        value->text = call->text[index];
        value->count = take_text(input, call->text[index]);
        break;
    case OPAQ_ARGUMENT_SIZES:
        value->sizes = call->sizes[index];
        value->count = take_shape(input, call->sizes[index]);
        value->count = value->count > OPAQ_RANK_LIMIT && take(input) % 2 ? -1 : value->count;
        break;
    case OPAQ_ARGUMENT_DTYPE:
        value->integer = take(input) % 8 == 0 ? OPAQ_DTYPE_U8 : OPAQ_DTYPE_BF16;
        break;
    case OPAQ_ARGUMENT_INT:
    case OPAQ_ARGUMENT_SYMINT:
        value->integer = take_size(input);
        break;
    }
}

#endif
