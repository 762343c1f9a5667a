/* opaq/runner.h: prepared state behind an integer. Depends on op.h. Guide: docs/runners.md.
 *
 * A runner is all that a linear layer, an MLP or a mixture of experts needs besides its input: packed weights, biases,
 * the plan. It is made once; what runs afterwards is a small operator that carries the runner's integer:
 *
 *     opaq_runner_create(opaq_op_find("linear"), values, NULL, &handle, &error);   values[0], the input, is not read
 *     opaq_op_run(opaq_op_find("linear_gemm"), ...)                                (x, handle, out features) -> y
 *     opaq_runner_destroy(handle, &error);
 *
 * Whatever allocates, locks or fills a table happens at creation. A run finds its runner without a lock.
 *
 * All of these may be called from any thread at any time. A runner that is destroyed while it runs lives until that
 * run ends; its handle is an error from then on, for ever: no other runner gets it. */
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

/* What a runner is. A caller that registers one fills it in; texts are terminated and may be empty. */
struct opaq_runner_info {
    int32_t kind;            /* enum opaq_runner_kind */
    int64_t in_features;     /* the input's last size */
    int64_t out_features;    /* the output's last size */
    int64_t experts;         /* OPAQ_RUNNER_MOE: how many it holds; else 0 */
    int64_t multiplications; /* for each row of the input, MOE: and each expert of it; 0 if not known */
    size_t bytes;            /* of memory that it holds */
    char format[264]; /* the weights' quantizer, or "bf16", ...; two with a space between them if they differ */
    char kernel[64];  /* "packed_nvfp4_fast_avx512", "gemm_avx512" */
};

/* One run, as a runner's functions see it. Inputs and output are checked: sizes that fit the info, memory that is
 * there, aligned to its elements. */
struct opaq_runner_call {
    /* LINEAR, MLP: x. MOE: hidden_states, topk_weights (f32), topk_ids (int32 or int64), which agree in all sizes but
     * the last. Strides may be anything that is not negative. */
    const struct opaq_tensor *inputs;
    int32_t input_count;
    const struct opaq_tensor *output; /* contiguous, of the first input's dtype */
    struct opaq_span workspace;       /* at least what `workspace` asked for, aligned to 64 */
    const struct opaq_execution *execution;
};

/* A runner of one's own. Every function may be called from several threads at once, except destroy, which comes last
 * and once. A function that fails returns a status and fills in the error, with opaq_fail or by hand. */
#define OPAQ_RUNNER_ABI 1
struct opaq_runner_functions {
    uint32_t abi; /* OPAQ_RUNNER_ABI */
    /* The scratch memory that such a call needs; NULL: none. Reads no tensor's contents; there may be no memory. */
    enum opaq_status (*workspace)(void *state, const struct opaq_runner_call *call, size_t *bytes,
                                  struct opaq_error *error);
    /* Writes the output, without allocating and without locks. */
    enum opaq_status (*run)(void *state, const struct opaq_runner_call *call, struct opaq_error *error);
    /* Frees the state; NULL: nothing to free. Comes on the thread whose destroy or run was the last to need it. */
    void (*destroy)(void *state);
};

/* At most this many at a time. */
#define OPAQ_RUNNER_LIMIT 65536

/* A runner from a call of the operator `linear`, `mlp` or `moe`: everything but the activations, which are the first
 * argument (moe: the first three) and may be zero, is checked and copied; memory of the caller's is not needed
 * afterwards. Weights that the plan quantizes are quantized now. */
OPAQ_API enum opaq_status opaq_runner_create(const struct opaq_op *op, const struct opaq_value *values,
                                             const struct opaq_execution *execution, int64_t *handle,
                                             struct opaq_error *error);

/* A runner of one's own. `info` and `functions` are copied. On failure the state is still the caller's. */
OPAQ_API enum opaq_status opaq_runner_register(const struct opaq_runner_info *info,
                                               const struct opaq_runner_functions *functions, void *state,
                                               int64_t *handle, struct opaq_error *error);

OPAQ_API enum opaq_status opaq_runner_query(int64_t handle, struct opaq_runner_info *info,
                                            struct opaq_error *error);

/* Takes the handle away. The runner goes when its last run has ended, or now. */
OPAQ_API enum opaq_status opaq_runner_destroy(int64_t handle, struct opaq_error *error);

/* How many there are: created or registered, and not destroyed. */
OPAQ_API int opaq_runner_count(void);

/* The same as the operators of the runner's kind, for a program that has its tensors at hand: the scratch memory that a
 * run on such inputs needs, and the run. `output` has the input's leading sizes and the runner's out_features. */
OPAQ_API enum opaq_status opaq_runner_workspace(int64_t handle, const struct opaq_tensor *inputs,
                                                int input_count, size_t *bytes, struct opaq_error *error);
OPAQ_API enum opaq_status opaq_runner_run(int64_t handle, const struct opaq_tensor *inputs, int input_count,
                                          const struct opaq_tensor *output, struct opaq_span workspace,
                                          const struct opaq_execution *execution, struct opaq_error *error);

#ifdef __cplusplus
}
#endif

#endif
