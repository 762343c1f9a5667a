/* support_runner_layer.h: arguments of the operators linear, mlp and moe, for tests of runners. Depends on
 * support_op.h. */
#ifndef SUPPORT_RUNNER_LAYER_H
#define SUPPORT_RUNNER_LAYER_H

#include "opaq/runner.h"
#include "support_op.h"

/* Sizes that are multiples of every format's blocks: x[ROWS,H], w[N,H], gate_up[2I,H], down[H,I], E of them in
 * a mixture. */
enum { RUNNER_ROWS = 7, RUNNER_H = 128, RUNNER_I = 64, RUNNER_N = 48, RUNNER_E = 3, RUNNER_K = 2 };

/* One or two weights, plain or quantized, with biases, all in memory of the layer. */
struct runner_layer {
    enum opaq_runner_kind kind;
    int weight_count;
    struct op_result quantized[2]; /* empty if the weight is plain */
    struct tensor plain[2];
    struct tensor bias[2];
    struct opaq_tensor tensors[2]; /* the plain weights in their original ranks */
    struct opaq_tensor bias_tensors[2];
    struct op_tensors lists[2];
    int64_t shapes[2][3];
    char plan[1024];
};

/* `weights` is the quantizer of both weights, "" for plain ones. `words` are the other words of the plan. */
struct runner_layer runner_layer_make(enum opaq_runner_kind kind, enum opaq_element dtype, const char *weights,
                                      const char *words);
/* Overwrites every byte before freeing, so that a later read is noticed. */
void runner_layer_free(struct runner_layer *layer);

/* Activations: x, and the routing of each row. */
struct runner_inputs {
    struct tensor x;
    float weights[RUNNER_ROWS][RUNNER_K];
    int32_t ids[RUNNER_ROWS][RUNNER_K];
    struct opaq_tensor tensors[3];
};
struct runner_inputs *runner_inputs_make(enum opaq_element dtype);
void runner_inputs_free(struct runner_inputs *inputs);

/* Quantizers of tiled weights, for lists of a test's formats. */
#define RUNNER_TILED_FORMATS                                                                      \
    "fp8+tiled", "fp8.e5m2+tiled", "fp8row+tiled", "fp8blk2+tiled", "mxfp8+tiled", "mxfp4+tiled", \
        "nvfp4+tiled", "nvfp4+rowscaled+tiled"

/* The operator of a kind and its values: with inputs, or without (NULL) for opaq_runner_create. */
const struct opaq_op *runner_op(enum opaq_runner_kind kind);
void runner_values(const struct runner_layer *layer, const struct runner_inputs *inputs,
                   struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT]);

/* Runs a runner's row on the inputs. */
enum opaq_status runner_run(enum opaq_runner_kind kind, int64_t handle, const struct runner_inputs *inputs,
                            const struct op_settings *settings, struct op_result *result,
                            struct opaq_error *error);

#endif
