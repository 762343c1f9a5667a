/* fuzz_run.h: runs a call that was made from fuzz input. Outputs and workspace are in memory of exactly their
 * size. An operator either fails with a text that begins with its name, or computes; a workspace smaller by a
 * byte is an error; and the initial contents of memory do not affect a result. Depends on fuzz_call.h. */
#ifndef FUZZ_RUN_H
#define FUZZ_RUN_H

#include "fuzz_call.h"

static inline void expect_refusal(const struct opaq_op *op, enum opaq_status status,
                                  const struct opaq_error *error) {
    const size_t length = strlen(op->name);
    expect(error->status == status && strncmp(error->text, op->name, length) == 0 &&
           error->text[length] == ':');
}

/* `bytes` bytes, aligned to 64. */
static inline void *aligned(size_t bytes, int garbage) {
    void *memory;
    expect(posix_memalign(&memory, 64, bytes + (bytes == 0)) == 0);
    memset(memory, garbage, bytes);
    return memory;
}

/* The outputs with memory; random numbers, which the caller fills, are constant. */
static inline void allocate_outputs(const struct opaq_op *op, int garbage, struct opaq_outputs *outputs) {
    for (int row = 0; row < op->output_count; ++row) {
        for (int i = outputs->first[row]; i < outputs->first[row + 1]; ++i) {
            outputs->tensor[i].data =
                aligned((size_t)reach(&outputs->tensor[i]), op->output[row].is_random ? 0x3C : garbage);
        }
    }
}

static inline void free_outputs(struct opaq_outputs *outputs) {
    for (int i = 0; i < outputs->count; ++i) {
        free(outputs->tensor[i].data);
    }
}

/* Memory for opaq_op_call. */
struct fuzz_memory {
    const struct opaq_op *op;
    struct opaq_outputs *outputs;
    size_t bytes; /* the result of opaq_op_workspace */
    void *workspace;
};

static inline enum opaq_status give_memory(void *context, struct opaq_outputs *outputs, size_t bytes,
                                           struct opaq_span *workspace, struct opaq_error *error) {
    struct fuzz_memory *memory = context;
    (void)error;
    expect(bytes == memory->bytes);
    allocate_outputs(memory->op, 0xC3, outputs);
    *memory->outputs = *outputs;
    memory->workspace = aligned(bytes, 0xFF);
    *workspace = (struct opaq_span){memory->workspace, bytes};
    return OPAQ_OK;
}

/* Runs again, in one call and in other memory, and expects the same bytes. Not if the first run changed an
 * argument. */
static inline void expect_same_again(const struct opaq_op *op, const struct call *call, size_t bytes,
                                     const struct opaq_outputs *expected) {
    struct opaq_outputs outputs;
    struct opaq_error error;
    struct fuzz_memory given = {op, &outputs, bytes, NULL};
    const struct opaq_memory memory = {give_memory, &given};
    expect(opaq_op_call(op, call->value, &memory, NULL, &error) == OPAQ_OK);
    expect(outputs.count == expected->count);
    for (int i = 0; i < outputs.count; ++i) {
        const size_t size = (size_t)reach(&outputs.tensor[i]);
        expect(size == 0 || memcmp(outputs.tensor[i].data, expected->tensor[i].data, size) == 0);
    }
    free_outputs(&outputs);
    free(given.workspace);
}

static inline void run_with_outputs(const struct opaq_op *op, const struct call *call,
                                    struct opaq_outputs *outputs) {
    const size_t workspace_limit = (size_t)1 << 24;
    struct opaq_error error;
    size_t bytes = 0;
    enum opaq_status status = opaq_op_workspace(op, call->value, &bytes, &error);
    if (status != OPAQ_OK) { /* then the run fails with the same error, or with one that it checks earlier */
        expect_refusal(op, status, &error);
        status = opaq_op_run(op, call->value, outputs, (struct opaq_span){NULL, 0}, NULL, &error);
        expect(status != OPAQ_OK);
        expect_refusal(op, status, &error);
        return;
    }
    if (bytes > workspace_limit) {
        return;
    }
    void *workspace = aligned(bytes, 0x5A);
    if (bytes > 0) {
        status = opaq_op_run(op, call->value, outputs, (struct opaq_span){workspace, bytes - 1}, NULL, &error);
        expect(status != OPAQ_OK);
        expect_refusal(op, status, &error);
    }
    status = opaq_op_run(op, call->value, outputs, (struct opaq_span){workspace, bytes}, NULL, &error);
    if (status != OPAQ_OK) {
        expect_refusal(op, status, &error);
    } else if (!opaq_op_changes(op)) {
        expect_same_again(op, call, bytes, outputs);
    }
    free(workspace);
}

static inline void run_call(const struct opaq_op *op, const struct call *call) {
    struct opaq_outputs outputs;
    struct opaq_error error;
    const enum opaq_status status = opaq_op_outputs(op, call->value, &outputs, &error);
    if (status != OPAQ_OK) {
        expect_refusal(op, status, &error);
        return;
    }
    int64_t total = 0;
    for (int i = 0; i < outputs.count; ++i) {
        const int64_t bytes = reach(&outputs.tensor[i]);
        total = bytes < 0 || total < 0 ? -1 : total + bytes;
    }
    if (total >= 0) {
        allocate_outputs(op, 0x5A, &outputs);
        run_with_outputs(op, call, &outputs);
        free_outputs(&outputs);
    }
}

#endif
