/* opaq/runner.h: prepared layers behind integer handles. Depends on op.h. Guide: docs/runners.md.
 *
 * A runner holds all that a linear layer, an MLP or a mixture of experts needs besides its input: packed
 * weights, biases, the plan. It is created once; each call is then a small operator that takes the runner's
 * handle:
 *
 *     opaq_runner_create(opaq_op_find("linear"), values, NULL, &handle, &error);   values[0], the input, is not read
 *     opaq_op_run(opaq_op_find("linear_gemm"), ...)                                (x, handle, out features) -> y
 *     opaq_op_run(opaq_op_find("linear_gemm_backward"), ...)                       (dy, handle, in features) -> dx
 *     opaq_runner_destroy(handle, &error);
 *
 * All allocation, locking and table setup happens at creation. A run finds its runner without a lock.
 *
 * All of these may be called from any thread at any time. A runner that is destroyed while it runs lives until
 * that run ends; its handle is invalid from the destroy on and is never reused. */
#ifndef OPAQ_RUNNER_H
#define OPAQ_RUNNER_H

#include <stddef.h>
#include <stdint.h>

#include "opaq/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The order is part of the ABI: append. */
enum opaq_runner_kind {
    OPAQ_RUNNER_LINEAR = 0, /* linear_gemm(x, runner_id, out_features) */
    OPAQ_RUNNER_MLP = 1,    /* mlp_gemm(x, runner_id, hidden_size) */
    OPAQ_RUNNER_MOE = 2     /* moe_gemm(hidden_states, topk_weights, topk_ids, runner_id, hidden_size) */
};
#define OPAQ_RUNNER_KIND_COUNT 3

/* Description of a runner. To register one, fill it in; texts are terminated and may be empty. */
struct opaq_runner_info {
    int32_t kind;            /* enum opaq_runner_kind */
    int64_t in_features;     /* size of the input's last dimension */
    int64_t out_features;    /* size of the output's last dimension */
    int64_t experts;         /* OPAQ_RUNNER_MOE: number of experts; else 0 */
    int64_t multiplications; /* per row of the input (MOE: per row and selected expert); 0 if unknown */
    size_t bytes;            /* memory it holds */
    char format[264]; /* the weights' quantizer, or "bf16", ...; two with a space between them if they differ */
    char kernel[64];  /* "packed_nvfp4_fast_avx512", "gemm_avx512" */
};

/* One run, as passed to a runner's functions. Inputs and output are already checked: sizes match the info,
 * memory is present and aligned to its elements. */
struct opaq_runner_call {
    /* LINEAR, MLP: x. MOE: hidden_states, topk_weights (f32, bf16 or f16), topk_ids (int32 or int64), whose
     * leading sizes agree. Strides may be anything that is not negative. */
    const struct opaq_tensor *inputs;
    int32_t input_count;
    const struct opaq_tensor *output; /* contiguous, of the first input's dtype */
    struct opaq_span workspace;       /* at least the bytes that `workspace` returned, aligned to 64 */
    const struct opaq_execution *execution;
};

/* The functions of a custom runner. All of them may be called from several threads at once, except destroy,
 * which is called last and once. On failure a function returns a status and fills in the error, with opaq_fail
 * or by hand. */
#define OPAQ_RUNNER_ABI 1
struct opaq_runner_functions {
    uint32_t abi; /* OPAQ_RUNNER_ABI */
    /* Sets the scratch memory that the call needs; NULL: none. Must not read tensors' contents; data may be
     * NULL. */
    enum opaq_status (*workspace)(void *state, const struct opaq_runner_call *call, size_t *bytes,
                                  struct opaq_error *error);
    /* Writes the output. Must not allocate or lock. */
    enum opaq_status (*run)(void *state, const struct opaq_runner_call *call, struct opaq_error *error);
    /* Frees the state; NULL: nothing to free. Called by the destroy, or by the last run if that ends later. */
    void (*destroy)(void *state);
};

/* The largest number of runners that exist at a time. */
#define OPAQ_RUNNER_LIMIT 65536

/* Creates a runner from a call of the operator `linear`, `mlp` or `moe`. Everything but the activations, which
 * are the first argument (moe: the first three) and may be zero, is checked and copied; the caller may free it
 * afterwards. Weights that the plan quantizes are quantized now. */
OPAQ_API enum opaq_status opaq_runner_create(const struct opaq_op *op, const struct opaq_value *values,
                                             const struct opaq_execution *execution, int64_t *handle,
                                             struct opaq_error *error);

/* Registers a custom runner, which has no gradients. `info` and `functions` are copied. On failure the caller still owns the
 * state. */
OPAQ_API enum opaq_status opaq_runner_register(const struct opaq_runner_info *info,
                                               const struct opaq_runner_functions *functions, void *state,
                                               int64_t *handle, struct opaq_error *error);

OPAQ_API enum opaq_status opaq_runner_query(int64_t handle, struct opaq_runner_info *info,
                                            struct opaq_error *error);

/* Invalidates the handle. The runner is freed when its last run has ended, or now. */
OPAQ_API enum opaq_status opaq_runner_destroy(int64_t handle, struct opaq_error *error);

/* The number of runners that exist. */
OPAQ_API int opaq_runner_count(void);

/* Run without the operator table: the scratch memory that a run on such inputs needs, and the run. `output` has
 * the input's leading sizes and the runner's out_features. */
OPAQ_API enum opaq_status opaq_runner_workspace(int64_t handle, const struct opaq_tensor *inputs,
                                                int input_count, size_t *bytes, struct opaq_error *error);
OPAQ_API enum opaq_status opaq_runner_run(int64_t handle, const struct opaq_tensor *inputs, int input_count,
                                          const struct opaq_tensor *output, struct opaq_span workspace,
                                          const struct opaq_execution *execution, struct opaq_error *error);

#ifdef __cplusplus
}
#endif

#endif
