/* fuzz_op.c: the operator table on hostile arguments: any text, shapes, dtypes, strides, lists. libFuzzer.
 *
 * Tensors point into memory of their own whose size is what their shape and strides reach, so AddressSanitizer sees a
 * byte too far. An operator either refuses with a text that begins with its name, or computes; outputs are what
 * opaq_op_outputs said. */
#include <stdlib.h>
#include <string.h>

#include "opaq/opaq.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MEMORY_LIMIT = 1 << 16, TENSOR_LIMIT = 8, TEXT_LIMIT = 48 };

struct input {
    const uint8_t *data;
    size_t size;
};

static void expect(int condition) {
    if (!condition) {
        abort();
    }
}

static uint8_t take(struct input *input) {
    if (input->size == 0) {
        return 0;
    }
    --input->size;
    return *input->data++;
}

/* Mostly small, sometimes anything. */
static int64_t take_size(struct input *input) {
    const uint8_t kind = take(input);
    if (kind < 240) {
        return kind % 70;
    }
    static const int64_t odd[] = {-1, 128, 129, INT64_MAX, INT64_MIN, (int64_t)1 << 40, (int64_t)1 << 62, 256};
    return odd[kind % 8];
}

static int64_t take_shape(struct input *input, int64_t *shape) {
    const int64_t rank = take(input) % 10;
    for (int64_t i = 0; i < rank && i < OPAQ_RANK_LIMIT; ++i) {
        shape[i] = take_size(input);
    }
    return rank;
}

/* The bytes a tensor reaches, or -1 for more than is worth allocating. */
static int64_t reach(const struct opaq_tensor *tensor) {
    int64_t last = 0;
    int bytes = tensor->dtype == OPAQ_DTYPE_U8 ? 1 : tensor->dtype == OPAQ_DTYPE_I64 ? 8 : 4;
    for (int i = 0; i < tensor->rank && i < OPAQ_RANK_LIMIT; ++i) {
        if (tensor->shape[i] < 0 || tensor->strides[i] < 0 || tensor->shape[i] > MEMORY_LIMIT ||
            tensor->strides[i] > MEMORY_LIMIT) {
            return -1;
        }
        if (tensor->shape[i] == 0) {
            return 0;
        }
        last += (tensor->shape[i] - 1) * tensor->strides[i];
    }
    return last < MEMORY_LIMIT ? (last + 1) * bytes : -1;
}

/* A tensor with memory that is exactly as large as it has to be; NULL memory where that is too much. */
static void take_tensor(struct input *input, struct opaq_tensor *tensor, void **memory) {
    static const int32_t dtypes[] = {
        OPAQ_DTYPE_U8, OPAQ_DTYPE_F32, OPAQ_DTYPE_BF16, OPAQ_DTYPE_F16, OPAQ_DTYPE_I64, OPAQ_DTYPE_U8, -1,
        OPAQ_DTYPE_F32};
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
    const int64_t bytes = reach(tensor);
    *memory = bytes > 0 ? malloc((size_t)bytes) : NULL;
    if (*memory != NULL) {
        memset(*memory, take(input), (size_t)bytes);
    }
    tensor->data = *memory;
}

static int64_t take_text(struct input *input, char text[TEXT_LIMIT]) {
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
    const int64_t length = kind % TEXT_LIMIT;
    for (int64_t i = 0; i < length; ++i) {
        text[i] = (char)take(input);
    }
    return length;
}

/* Buffers that fit the quantizer and shape among the arguments, so that operators get past their checks too. */
static int fitting_buffers(const char *text, int64_t length, const int64_t *shape, int64_t rank,
                           struct input *input, struct opaq_tensor *tensors, void **memory) {
    struct opaq_spec spec;
    struct opaq_proto proto;
    if (rank < 1 || rank > OPAQ_RANK_LIMIT || opaq_spec_parse(text, (size_t)length, &spec, NULL) != OPAQ_OK ||
        opaq_proto_make(shape, (int)rank, OPAQ_BF16, &spec, (struct opaq_device){0, 0}, &proto, NULL) !=
            OPAQ_OK) {
        return 0;
    }
    const int count = opaq_proto_buffer_count(&proto);
    for (int i = 0; i < count; ++i) {
        struct opaq_buffer buffer;
        expect(opaq_proto_buffer(&proto, i, &buffer, NULL) == OPAQ_OK);
        if (buffer.bytes > MEMORY_LIMIT) {
            return i;
        }
        memory[i] = malloc(buffer.bytes + (buffer.bytes == 0));
        memset(memory[i], take(input), buffer.bytes);
        tensors[i] = (struct opaq_tensor){.data = memory[i],
                                          .dtype = buffer.entry_bytes == 1 ? OPAQ_DTYPE_U8 : OPAQ_DTYPE_F32,
                                          .rank = buffer.rank};
        memcpy(tensors[i].shape, buffer.shape, sizeof buffer.shape);
        memcpy(tensors[i].strides, buffer.strides, sizeof buffer.strides);
    }
    return count;
}

struct call {
    struct opaq_value value[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_tensor tensor[OPAQ_OP_ARGUMENT_LIMIT][TENSOR_LIMIT];
    void *memory[OPAQ_OP_ARGUMENT_LIMIT][TENSOR_LIMIT];
    char text[OPAQ_OP_ARGUMENT_LIMIT][TEXT_LIMIT];
    int64_t sizes[OPAQ_OP_ARGUMENT_LIMIT][OPAQ_RANK_LIMIT];
};

static void take_argument(struct input *input, const struct opaq_op *op, int index, struct call *call) {
    struct opaq_value *value = &call->value[index];
    switch (op->argument[index].kind) {
    case OPAQ_ARGUMENT_OPTIONAL_TENSOR:
        if (take(input) % 4 != 0) {
            break;
        }
        /* fall through */
    case OPAQ_ARGUMENT_TENSOR:
        take_tensor(input, &call->tensor[index][0], &call->memory[index][0]);
        value->tensors = call->tensor[index];
        value->count = 1;
        break;
    case OPAQ_ARGUMENT_TENSOR_LIST:
        value->tensors = call->tensor[index];
        value->count = take(input) % TENSOR_LIMIT;
        for (int64_t i = 0; i < value->count; ++i) {
            take_tensor(input, &call->tensor[index][i], &call->memory[index][i]);
        }
        break;
    case OPAQ_ARGUMENT_TEXT:
        value->text = call->text[index];
        value->count = take_text(input, call->text[index]);
        break;
    case OPAQ_ARGUMENT_SIZES:
        value->sizes = call->sizes[index];
        value->count = take_shape(input, call->sizes[index]);
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

/* Replaces the list by one that fits, most of the time: text is argument 1, and the shape the first sizes argument. */
static void fit_list(struct input *input, const struct opaq_op *op, struct call *call) {
    if (op->argument[0].kind != OPAQ_ARGUMENT_TENSOR_LIST || take(input) % 4 == 0) {
        return;
    }
    for (int i = 0; i < op->argument_count; ++i) {
        if (op->argument[i].kind == OPAQ_ARGUMENT_SIZES) {
            for (int t = 0; t < TENSOR_LIMIT; ++t) {
                free(call->memory[0][t]);
                call->memory[0][t] = NULL;
            }
            call->value[0].count =
                fitting_buffers(call->text[1], call->value[1].count, call->sizes[i], call->value[i].count,
                                input, call->tensor[0], call->memory[0]);
            return;
        }
    }
}

static void run(const struct opaq_op *op, const struct call *call) {
    struct opaq_outputs outputs;
    struct opaq_error error;
    enum opaq_status status = opaq_op_outputs(op, call->value, &outputs, &error);
    if (status == OPAQ_OK) {
        void *memory[OPAQ_OP_OUTPUT_LIMIT] = {NULL};
        int64_t total = 0;
        for (int i = 0; i < outputs.count; ++i) {
            const int64_t bytes = reach(&outputs.tensor[i]);
            total = bytes < 0 || total < 0 ? -1 : total + bytes;
        }
        if (total >= 0) {
            for (int i = 0; i < outputs.count; ++i) {
                const size_t bytes = (size_t)reach(&outputs.tensor[i]);
                outputs.tensor[i].data = memory[i] = malloc(bytes + (bytes == 0));
            }
            status = opaq_op_run(op, call->value, &outputs, (struct opaq_span){NULL, 0}, NULL, &error);
        }
        for (int i = 0; i < OPAQ_OP_OUTPUT_LIMIT; ++i) {
            free(memory[i]);
        }
    }
    if (status != OPAQ_OK) {
        expect(error.status == status && strncmp(error.text, op->name, strlen(op->name)) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input input = {data, size};
    static struct call call;
    memset(&call, 0, sizeof call);
    const struct opaq_op *op = opaq_op_at(take(&input) % opaq_op_count());
    for (int i = 0; i < op->argument_count; ++i) {
        take_argument(&input, op, i, &call);
    }
    fit_list(&input, op, &call);
    run(op, &call);
    for (int i = 0; i < OPAQ_OP_ARGUMENT_LIMIT; ++i) {
        for (int t = 0; t < TENSOR_LIMIT; ++t) {
            free(call.memory[i][t]);
        }
    }
    return 0;
}
