/* fuzz_runner.h: makes a runner of a call that was made from fuzz input. The creation either fails with a text that
 * begins with its name, or the runner does what the operator does: the same bytes, or an error. Its gradients are called
 * too. Depends on fuzz_run.h. */
#ifndef FUZZ_RUNNER_H
#define FUZZ_RUNNER_H

#include "fuzz_run.h"

/* Whether results may be compared: a tiled weight at another address than a multiple of 64 has other kernels, whose
 * order of sums is their own; a runner's weights are aligned. */
static inline int has_aligned_lists(const struct opaq_op *op, const struct call *call) {
    for (int i = 0; i < op->argument_count; ++i) {
        const int is_list = op->argument[i].kind == OPAQ_ARGUMENT_TENSOR_LIST;
        for (int64_t t = 0; is_list && t < call->value[i].count; ++t) {
            if ((uintptr_t)call->value[i].tensors[t].data % 64 != 0) {
                return 0;
            }
        }
    }
    return 1;
}

/* The same bytes, but for the bits of NaNs in float32 sums, which are the processor's own. */
static inline int is_same(const struct opaq_tensor *a, const struct opaq_tensor *b) {
    const size_t size = (size_t)reach(a);
    int same = size == 0 || memcmp(a->data, b->data, size) == 0;
    if (!same && a->dtype == OPAQ_DTYPE_F32) {
        const float *x = a->data;
        const float *y = b->data;
        same = 1;
        for (size_t i = 0; i < size / sizeof *x; ++i) {
            same = same && (memcmp(&x[i], &y[i], sizeof *x) == 0 || (x[i] != x[i] && y[i] != y[i]));
        }
    }
    return same;
}

/* Runs the runner and the operator. */
static inline void run_both(const struct opaq_op *op, const struct call *call, int64_t handle,
                            const struct opaq_tensor *inputs, int count, struct opaq_outputs *outputs) {
    const size_t workspace_limit = (size_t)1 << 24;
    struct opaq_error error;
    size_t bytes = 0;
    size_t own_bytes = 0;
    const enum opaq_status measured = opaq_op_workspace(op, call->value, &own_bytes, NULL);
    if (opaq_runner_workspace(handle, inputs, count, &bytes, &error) != OPAQ_OK || measured != OPAQ_OK) {
        expect(measured != OPAQ_OK);
        return;
    }
    if (bytes > workspace_limit || own_bytes > workspace_limit) {
        return;
    }
    struct opaq_tensor made = outputs->tensor[0];
    made.data = aligned((size_t)reach(&made), 0xC3);
    void *workspace = aligned(bytes, 0xFF);
    void *own = aligned(own_bytes, 0x5A);
    const enum opaq_status ran =
        opaq_runner_run(handle, inputs, count, &made, (struct opaq_span){workspace, bytes}, NULL, &error);
    const enum opaq_status direct =
        opaq_op_run(op, call->value, outputs, (struct opaq_span){own, own_bytes}, NULL, &error);
    expect(ran == direct);
    expect(ran != OPAQ_OK || !has_aligned_lists(op, call) || is_same(&made, &outputs->tensor[0]));
    free(own);
    free(workspace);
    free(made.data);
}

/* Calls the operator of the runner's gradients as run_call does: dy is y or, where it has the same shape, x. */
static inline void run_backward(int kind, int64_t handle, const struct opaq_tensor *inputs,
                                const struct opaq_tensor *y) {
    static const char *const names[] = {"linear_gemm_backward", "mlp_gemm_backward", "moe_gemm_backward"};
    static struct call call;
    const struct opaq_op *op = opaq_op_find(names[kind]);
    const int count = op->argument_count - 2;
    const struct opaq_tensor *dy = kind == OPAQ_RUNNER_LINEAR ? y : &inputs[0];
    struct opaq_runner_info info;
    expect(opaq_runner_query(handle, &info, NULL) == OPAQ_OK);
    memset(call.value, 0, sizeof call.value);
    for (int i = 0; i < count; ++i) {
        call.value[i] = (struct opaq_value){.tensors = i == 0 ? dy : &inputs[i - 1], .count = 1};
    }
    call.value[count].integer = handle;
    call.value[count + 1].integer = info.in_features;
    run_call(op, &call);
}

/* For the operators linear, mlp and moe; nothing for others. */
static inline void run_runner(const struct opaq_op *op, const struct call *call) {
    static const char *const names[] = {"linear", "mlp", "moe"};
    struct opaq_tensor inputs[3];
    struct opaq_outputs outputs;
    struct opaq_error error;
    int64_t handle;
    int kind = 0;
    while (kind < 3 && strcmp(op->name, names[kind]) != 0) {
        ++kind;
    }
    if (kind == 3) {
        return;
    }
    if (opaq_runner_create(op, call->value, NULL, &handle, &error) != OPAQ_OK) {
        expect(strncmp(error.text, "runner_create: ", 15) == 0);
        return;
    }
    const int count = kind == OPAQ_RUNNER_MOE ? 3 : 1;
    int are_there = 1;
    for (int i = 0; i < count; ++i) {
        are_there = are_there && call->value[i].tensors != NULL;
        inputs[i] = are_there ? *call->value[i].tensors : (struct opaq_tensor){.data = NULL};
    }
    if (are_there && opaq_op_outputs(op, call->value, &outputs, NULL) == OPAQ_OK &&
        reach(&outputs.tensor[0]) >= 0) {
        allocate_outputs(op, 0xA5, &outputs);
        run_both(op, call, handle, inputs, count, &outputs);
        run_backward(kind, handle, inputs, &outputs.tensor[0]);
        free_outputs(&outputs);
    }
    expect(opaq_runner_destroy(handle, NULL) == OPAQ_OK);
}

#endif
