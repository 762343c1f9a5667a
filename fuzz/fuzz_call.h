/* fuzz_call.h: an operator call made from fuzz input. Every tensor has separate memory of the size that its
 * shape and strides reach, so that AddressSanitizer detects an access beyond it. Depends on opaq/opaq.h. */
#ifndef FUZZ_CALL_H
#define FUZZ_CALL_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "opaq/opaq.h"

enum { MEMORY_LIMIT = 1 << 16, TENSOR_LIMIT = 8, TEXT_LIMIT = OPAQ_EXPERTS_PLAN_TEXT_BYTES };

struct input {
    const uint8_t *data;
    size_t size;
};

/* The arguments and the objects they point to. */
struct call {
    struct opaq_value value[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_tensor tensor[OPAQ_OP_ARGUMENT_LIMIT][TENSOR_LIMIT];
    void *memory[OPAQ_OP_ARGUMENT_LIMIT][TENSOR_LIMIT];
    char text[OPAQ_OP_ARGUMENT_LIMIT][TEXT_LIMIT];
    int64_t sizes[OPAQ_OP_ARGUMENT_LIMIT][OPAQ_RANK_LIMIT];
};

static inline void expect(int condition) {
    if (!condition) {
        abort();
    }
}

static inline uint8_t take(struct input *input) {
    if (input->size == 0) {
        return 0;
    }
    --input->size;
    return *input->data++;
}

static inline int dtype_bytes(int32_t dtype) {
    return dtype == OPAQ_DTYPE_U8                               ? 1
           : dtype == OPAQ_DTYPE_I64                            ? 8
           : dtype == OPAQ_DTYPE_F32 || dtype == OPAQ_DTYPE_I32 ? 4
                                                                : 2;
}

/* The bytes that a tensor reaches, or -1 if that is too much to allocate. */
static inline int64_t reach(const struct opaq_tensor *tensor) {
    int64_t last = 0;
    for (int i = 0; i < tensor->rank && i < OPAQ_RANK_LIMIT; ++i) {
        if (tensor->shape[i] == 0) {
            return 0;
        }
    }
    for (int i = 0; i < tensor->rank && i < OPAQ_RANK_LIMIT; ++i) {
        if (tensor->shape[i] < 0 || tensor->strides[i] < 0 || tensor->shape[i] > MEMORY_LIMIT ||
            tensor->strides[i] > MEMORY_LIMIT) {
            return -1;
        }
        last += (tensor->shape[i] - 1) * tensor->strides[i];
    }
    return last < MEMORY_LIMIT ? (last + 1) * dtype_bytes(tensor->dtype) : -1;
}

static inline int argument_of(const struct opaq_op *op, const char *name) {
    for (int i = 0; i < op->argument_count; ++i) {
        if (strcmp(op->argument[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

static inline void add_word(char *text, const char *name, const char *value) {
    const size_t length = strlen(text);
    (void)snprintf(text + length, TEXT_LIMIT - length, "%s%s%s", length > 0 ? " " : "", name, value);
}

/* Removes the previous value of an argument. */
static inline void forget(struct call *call, int index) {
    for (int t = 0; t < TENSOR_LIMIT; ++t) {
        free(call->memory[index][t]);
        call->memory[index][t] = NULL;
    }
    memset(&call->value[index], 0, sizeof call->value[index]);
}

/* Memory for tensor t of an argument, filled by repeating bytes of the input, and aligned to 64 or not; NULL if
 * the size is too large. */
static inline void allocate(struct input *input, struct call *call, int index, int t) {
    struct opaq_tensor *tensor = &call->tensor[index][t];
    const int64_t bytes = reach(tensor);
    void *memory = NULL;
    uint8_t pattern[5];
    for (int i = 0; i < 5; ++i) {
        pattern[i] = take(input);
    }
    if (bytes >= 0) {
        expect(posix_memalign(&memory, pattern[0] % 2 ? 16 : 64, (size_t)bytes + (bytes == 0)) == 0);
    }
    for (int64_t i = 0; i < bytes; ++i) {
        ((uint8_t *)memory)[i] = pattern[i % 5];
    }
    call->memory[index][t] = memory;
    tensor->data = memory;
}

/* A contiguous tensor as tensor t of an argument. */
static inline void put_tensor(struct input *input, struct call *call, int index, int t, int32_t dtype,
                              const int64_t *shape, int rank) {
    struct opaq_tensor *tensor = &call->tensor[index][t];
    int64_t stride = 1;
    *tensor = (struct opaq_tensor){.dtype = dtype, .rank = rank};
    for (int i = rank - 1; i >= 0; --i) {
        tensor->shape[i] = shape[i];
        tensor->strides[i] = stride;
        stride *= shape[i] > 0 && shape[i] < MEMORY_LIMIT && stride < MEMORY_LIMIT ? shape[i] : 1;
    }
    allocate(input, call, index, t);
    call->value[index].tensors = call->tensor[index];
    call->value[index].count = t + 1;
}

/* The buffers of a quantizer as an argument. */
static inline void put_buffers(struct input *input, struct call *call, int index, const struct opaq_spec *spec,
                               const int64_t *shape, int rank) {
    struct opaq_proto proto;
    if (rank < 1 || rank > OPAQ_RANK_LIMIT ||
        opaq_proto_make(shape, rank, OPAQ_BF16, spec, (struct opaq_device){0, 0}, &proto, NULL) != OPAQ_OK) {
        return;
    }
    const int count = opaq_proto_buffer_count(&proto);
    for (int i = 0; i < count; ++i) {
        struct opaq_buffer buffer;
        expect(opaq_proto_buffer(&proto, i, &buffer, NULL) == OPAQ_OK);
        if (buffer.bytes > MEMORY_LIMIT) {
            return;
        }
        put_tensor(input, call, index, i, buffer.entry_bytes == 1 ? OPAQ_DTYPE_U8 : OPAQ_DTYPE_F32,
                   buffer.shape, buffer.rank);
    }
}

/* One plain tensor, or the buffers of a form. */
static inline void put_form(struct input *input, struct call *call, int index, const struct opaq_form *form,
                            int32_t dtype, const int64_t *shape, int rank) {
    forget(call, index);
    if (form->kind == OPAQ_FORM_QUANTIZED) {
        put_buffers(input, call, index, &form->spec, shape, rank);
    } else {
        put_tensor(input, call, index, 0, dtype, shape, rank);
    }
}

static inline int64_t take_small(struct input *input) {
    const uint8_t kind = take(input);
    return kind < 220 ? kind % 37 : kind < 250 ? kind - 100 : 260; /* more than a block, more than two */
}

#endif
