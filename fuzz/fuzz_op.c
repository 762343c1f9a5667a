/* fuzz_op.c: the operator table on hostile arguments: any text, shapes, dtypes, strides, lists; and on arguments that fit
 * but for one. libFuzzer.
 *
 * Every tensor, output and workspace stands in memory of exactly its size. An operator either refuses with a text that
 * begins with its name, or computes; outputs are what opaq_op_outputs said, and a byte of workspace less is refused. */
#include "fuzz_call.h"
#include "fuzz_linear.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

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

/* Any tensor as tensor t of an argument. */
static void take_tensor(struct input *input, struct call *call, int index, int t) {
    static const int32_t dtypes[] = {
        OPAQ_DTYPE_U8, OPAQ_DTYPE_F32, OPAQ_DTYPE_BF16, OPAQ_DTYPE_F16, OPAQ_DTYPE_I64, OPAQ_DTYPE_U8, -1,
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
    const int64_t length = kind % 48;
    for (int64_t i = 0; i < length; ++i) {
        text[i] = (char)take(input);
    }
    return length;
}

static void take_argument(struct input *input, const struct opaq_op *op, int index, struct call *call) {
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
        value->count = take(input) % 2; /* which nobody reads */
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

/* Replaces the list by one that fits, most of the time: text is argument 1, and the shape the first sizes argument. */
static void fit_list(struct input *input, const struct opaq_op *op, struct call *call) {
    struct opaq_spec spec;
    for (int i = 0; i < op->argument_count; ++i) {
        if (op->argument[i].kind == OPAQ_ARGUMENT_SIZES) {
            forget(call, 0);
            if (opaq_spec_parse(call->text[1], (size_t)call->value[1].count, &spec, NULL) == OPAQ_OK) {
                put_buffers(input, call, 0, &spec, call->sizes[i], (int)call->value[i].count);
            }
            return;
        }
    }
}

/* The state of a plan that has one. */
static void fit_update(struct input *input, const struct opaq_op *op, struct call *call) {
    const int64_t count = take(input) % 2 + 2;
    take_plan(input, call->text[0]);
    call->value[0].count = (int64_t)strlen(call->text[0]);
    put_floats(input, call, op, "scale", 0, count);
    put_floats(input, call, op, "amax_history", take(input) % 5 + 1, count);
}

/* Arguments that are anything, or that fit but for one. */
static void take_call(struct input *input, const struct opaq_op *op, struct call *call) {
    const uint8_t kind = take(input);
    const int is_linear = strncmp(op->name, "linear", 6) == 0;
    for (int i = 0; i < op->argument_count && (!is_linear || kind % 8 == 0); ++i) {
        take_argument(input, op, i, call);
    }
    if (kind % 8 == 0) {
        return;
    }
    if (is_linear) {
        fit_linear(input, op, call);
    } else if (strcmp(op->name, "delayed_update") == 0) {
        fit_update(input, op, call);
    } else if (op->argument[0].kind == OPAQ_ARGUMENT_TENSOR_LIST) {
        fit_list(input, op, call);
    }
    const int spoilt = kind / 16 % OPAQ_OP_ARGUMENT_LIMIT;
    if (kind / 8 % 2 == 1 && spoilt < op->argument_count) {
        take_argument(input, op, spoilt, call);
    }
}

static void expect_refusal(const struct opaq_op *op, enum opaq_status status, const struct opaq_error *error) {
    const size_t length = strlen(op->name);
    expect(error->status == status && strncmp(error->text, op->name, length) == 0 &&
           error->text[length] == ':');
}

/* Memory of exactly so many bytes, aligned to 64. */
static void *aligned(size_t bytes) {
    void *memory;
    expect(posix_memalign(&memory, 64, bytes + (bytes == 0)) == 0);
    memset(memory, 0x5A, bytes);
    return memory;
}

static void run_with_outputs(const struct opaq_op *op, const struct call *call, struct opaq_outputs *outputs) {
    const size_t workspace_limit = (size_t)1 << 24;
    struct opaq_error error;
    size_t bytes = 0;
    enum opaq_status status = opaq_op_workspace(op, call->value, &bytes, &error);
    if (status != OPAQ_OK) { /* then the run says the same, or something that it looks at before */
        expect_refusal(op, status, &error);
        status = opaq_op_run(op, call->value, outputs, (struct opaq_span){NULL, 0}, NULL, &error);
        expect(status != OPAQ_OK);
        expect_refusal(op, status, &error);
        return;
    }
    if (bytes > workspace_limit) {
        return;
    }
    void *workspace = aligned(bytes);
    if (bytes > 0) {
        status = opaq_op_run(op, call->value, outputs, (struct opaq_span){workspace, bytes - 1}, NULL, &error);
        expect(status != OPAQ_OK);
        expect_refusal(op, status, &error);
    }
    status = opaq_op_run(op, call->value, outputs, (struct opaq_span){workspace, bytes}, NULL, &error);
    if (status != OPAQ_OK) {
        expect_refusal(op, status, &error);
    }
    free(workspace);
}

static void run(const struct opaq_op *op, const struct call *call) {
    struct opaq_outputs outputs;
    struct opaq_error error;
    const enum opaq_status status = opaq_op_outputs(op, call->value, &outputs, &error);
    if (status != OPAQ_OK) {
        expect_refusal(op, status, &error);
        return;
    }
    void *memory[OPAQ_OP_OUTPUT_LIMIT] = {NULL};
    int64_t total = 0;
    for (int i = 0; i < outputs.count; ++i) {
        const int64_t bytes = reach(&outputs.tensor[i]);
        total = bytes < 0 || total < 0 ? -1 : total + bytes;
    }
    for (int i = 0; total >= 0 && i < outputs.count; ++i) {
        outputs.tensor[i].data = memory[i] = aligned((size_t)reach(&outputs.tensor[i]));
    }
    if (total >= 0) {
        run_with_outputs(op, call, &outputs);
    }
    for (int i = 0; i < OPAQ_OP_OUTPUT_LIMIT; ++i) {
        free(memory[i]);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input input = {data, size};
    static struct call call;
    memset(&call, 0, sizeof call);
    const struct opaq_op *op = opaq_op_at(take(&input) % 32 % opaq_op_count());
    take_call(&input, op, &call);
    run(op, &call);
    for (int i = 0; i < OPAQ_OP_ARGUMENT_LIMIT; ++i) {
        forget(&call, i);
    }
    return 0;
}
