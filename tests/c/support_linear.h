/* support_linear.h: plans, layers and calls of the linear operators, for tests. Depends on support_op.h. */
#ifndef SUPPORT_LINEAR_H
#define SUPPORT_LINEAR_H

#include <stdbool.h>

#include "opaq/linear.h"
#include "support_op.h"

/* The output rows of the operators, and the random stream of each tensor (docs/linear.md). */
enum linear_output { LINEAR_Y, LINEAR_X_SAVED, LINEAR_W_SAVED, LINEAR_AMAX, LINEAR_RANDOM };
enum linear_gradient { LINEAR_DX, LINEAR_DW, LINEAR_DBIAS };
enum linear_stream { LINEAR_STREAM_X, LINEAR_STREAM_W, LINEAR_STREAM_DY, LINEAR_STREAM_Y, LINEAR_STREAM_DX };

/* ---- plans ---- */

/* Quantizers of x, w and dy; "" for none. */
struct linear_recipe {
    const char *x, *w, *dy;
};

/* Every pair of formats that recipes use, and more. */
extern const struct linear_recipe linear_recipes[];
extern const int linear_recipe_count;

/* "x=fp8 w=fp8 dy=fp8.e5m2 grad=xwb" for a recipe and further words of its plan. */
struct linear_text {
    char text[OPAQ_LINEAR_PLAN_TEXT_BYTES];
};
struct linear_text linear_plan(const struct linear_recipe *recipe, const char *rest);

/* A quantizer's text with another usage. */
struct linear_text linear_with_usage(const char *text, int usage);

/* ---- layers and calls ---- */

/* One layer's tensors, plain, filled with numbers. x[M,K] may have any rank, w is [N,K]. */
struct linear_layer {
    int64_t m, n, k;
    int rank;
    int64_t x_shape[OPAQ_RANK_LIMIT];
    int64_t w_shape[2];
    struct tensor x, w, bias, dy;
};
struct linear_layer linear_layer_make(int64_t m, int64_t n, int64_t k, enum opaq_element dtype);
struct linear_layer linear_layer_shaped(const int64_t *x_shape, int rank, int64_t n, enum opaq_element dtype);
void linear_layer_free(struct linear_layer *layer);

enum { LINEAR_HISTORY = 3 };

/* Delayed scaling's state. */
struct linear_state {
    float scale_fwd[3], history_fwd[LINEAR_HISTORY][3];
    float scale_bwd[2], history_bwd[LINEAR_HISTORY][2];
};

/* Arguments of a step in addition to its layer; all zero for none. */
struct linear_given {
    const struct tensor *x, *w, *dy; /* instead of the layer's */
    const struct opaq_tensor *main_grad;
    struct linear_state *state;
    bool no_bias;
    struct op_settings settings;
};

/* The arguments of a call, with the tensors they point to. */
struct linear_arguments {
    struct opaq_value value[OPAQ_OP_ARGUMENT_LIMIT];
    struct op_tensors x, w, dy;
    struct opaq_tensor bias, random, amax, scale[2], history[2];
};
void linear_forward_arguments(const struct linear_layer *layer, const char *plan,
                              const struct linear_given *given, struct linear_arguments *arguments);
/* After a forward, whose saved tensors it takes if there are any. */
void linear_backward_arguments(const struct linear_layer *layer, const char *plan,
                               const struct linear_given *given, const struct op_result *forward,
                               struct linear_arguments *arguments);

/* A forward and a backward; linear_backward_changing if a tensor is to be changed. An error counts as a failed
 * check and leaves an empty result. `given` may be NULL. */
struct linear_step {
    struct op_result forward, backward;
};
struct op_result linear_forward(const struct linear_layer *layer, const char *plan,
                                const struct linear_given *given);
struct linear_step linear_step(const struct linear_layer *layer, const char *plan,
                               const struct linear_given *given);
void linear_step_free(struct linear_step *step);

/* The random numbers of a step of `linear_seeded`, and x quantized with those of a stream; a copy of x if the
 * text is empty. A delayed quantizer takes the scale. */
extern const struct linear_given linear_seeded;
struct tensor linear_quantized(const struct tensor *x, const char *text, int usage, enum linear_stream stream,
                               float scale);

/* A failed check unless a call fails with that status and a text that begins with the operator's name and
 * contains `part`. */
void linear_refuse(int line, const char *op, const struct opaq_value *values, enum opaq_status status,
                   const char *part);

/* A failed check unless both results have the output row, with equal bytes. */
void linear_check_same(const struct op_result *a, const struct op_result *b, int output, const char *what);

/* linear_check_same for every output row of a forward and its backward. */
void linear_check_same_step(const struct linear_step *a, const struct linear_step *b, const char *what);

/* Whether an output row has exactly the buffers of a tensor. */
bool linear_check_buffers(const struct op_result *result, int output, const struct tensor *expected,
                          const char *what);

#endif
