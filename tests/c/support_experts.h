/* support_experts.h: MLPs, mixtures of experts and calls of their operators, for tests. Depends on support_op.h. */
#ifndef SUPPORT_EXPERTS_H
#define SUPPORT_EXPERTS_H

#include <stdbool.h>

#include "opaq/experts.h"
#include "support_op.h"

/* The output rows of the operators. An mlp's gradients are those of a mixture without the router's. */
enum experts_output { EXPERTS_Y, EXPERTS_H };
enum experts_gradient {
    EXPERTS_DX,
    EXPERTS_DROUTER,
    EXPERTS_DGATE_UP,
    EXPERTS_DDOWN,
    EXPERTS_DGATE_UP_BIAS,
    EXPERTS_DDOWN_BIAS
};

/* Which numbers of the random state are added to the second of the two, for expert 0; 64 more for each next one
 * (docs/linear.md has linear's own). */
enum experts_stream_number {
    EXPERTS_STREAM_X,
    EXPERTS_STREAM_W1,
    EXPERTS_STREAM_H,
    EXPERTS_STREAM_W2,
    EXPERTS_STREAM_DY,
    EXPERTS_STREAM_DH,
    EXPERTS_STREAM_STEP = 64
};

/* ---- layers ---- */

/* choices < 0: an mlp, whose experts is 1 and whose weights have no leading dimension. */
struct experts_sizes {
    int64_t tokens, choices, experts, hidden, inner;
};

/* The tensors, plain, filled with numbers of about the size 1; ids choose all experts, and nobody now and then. */
struct experts_layer {
    struct experts_sizes size;
    int64_t width; /* of h */
    bool is_routed;
    struct tensor x, gate_up, down, gate_up_bias, down_bias, weights, dy;
    int64_t *ids;
};
struct experts_layer experts_layer_make(const struct experts_sizes *size, const char *plan,
                                        enum opaq_element dtype);
void experts_layer_free(struct experts_layer *layer);

/* A plain tensor of any rank, normal numbers times `scale`. */
struct tensor experts_tensor(const int64_t *shape, int rank, enum opaq_element dtype, double scale,
                             uint64_t seed);

/* Rows of a plain tensor, as a matrix of its own. */
struct tensor experts_rows(const struct tensor *from, int64_t first, int64_t rows);

/* The same numbers in another dtype that holds them, or rounded to it. */
struct tensor experts_converted(const struct tensor *from, enum opaq_element dtype);

/* ---- calls ---- */

/* What a call is given besides or instead of its layer's tensors; all zero is the usual case. */
struct experts_given {
    const struct tensor *gate_up, *down;
    const struct opaq_tensor *x, *dy, *h, *ids, *weights;
    const float *input_scale, *hidden_scale;
    int64_t input_scales, hidden_scales; /* how many */
    bool no_gate_up_bias, no_down_bias;
    const int64_t *random; /* two */
    int32_t w_dtype;       /* of a backward; 0: the weights' */
    const struct opaq_parallel *parallel;
};

/* The arguments of a call, with the tensors they point to. Not to be copied. */
struct experts_arguments {
    const struct opaq_op *op;
    struct opaq_value value[OPAQ_OP_ARGUMENT_LIMIT];
    struct op_tensors gate_up, down;
    struct opaq_tensor x, dy, h, ids, weights, gate_up_bias, down_bias, input_scale, hidden_scale, random;
    int64_t gate_up_shape[3], down_shape[3];
};
void experts_arguments(const char *op, const struct experts_layer *layer, const char *plan,
                       const struct experts_given *given, struct experts_arguments *arguments);

/* The value of an argument by its name; ends the program if there is none. */
struct opaq_value *experts_value(struct experts_arguments *arguments, const char *name);

/* Runs an operator; a refusal counts as a failed check and leaves an empty result. `given` may be NULL. */
struct op_result experts_call(const char *op, const struct experts_layer *layer, const char *plan,
                              const struct experts_given *given);

/* h of a training operator, as its backward is given it; and that backward, run as experts_check_again does. Which of its
 * output rows stands for a gradient. */
struct tensor experts_forward_h(const struct experts_layer *layer, const char *plan,
                                const struct experts_given *given);
struct op_result experts_backward(const struct experts_layer *layer, const char *plan,
                                  const struct experts_given *given, const struct tensor *h);
const char *experts_backward_name(const struct experts_layer *layer);
int experts_output_of(const struct experts_layer *layer, int gradient);

/* One plan of each activation, in their order. */
extern const char *const experts_activations[OPAQ_ACTIVATION_COUNT];

/* Once more with other garbage in the outputs and the workspace beforehand, and nothing behind the workspace may change:
 * a failed check unless the result is the same. */
void experts_check_again(const char *op, const struct opaq_value *values, const struct op_result *expected,
                         const char *what);

/* A failed check unless two results have the same bytes in all output rows. */
void experts_check_same(const struct op_result *a, const struct op_result *b, const char *what);

/* ---- what stands between the products ---- */

/* The words of a plan that speak about the activation. */
struct experts_words {
    char text[OPAQ_EXPERTS_PLAN_TEXT_BYTES];
};
struct experts_words experts_activation_words(const char *plan);

/* activation(h), by the operator mlp with products that change nothing; and its gradient, from mlp_backward. da is
 * float32. */
struct tensor experts_activated(const struct tensor *h, const char *plan);
struct tensor experts_activation_gradient(const struct tensor *h, const struct tensor *da, const char *plan);

/* The same in double, by the formulas of docs/experts.md, unrounded: the gate before it is multiplied, what it is
 * multiplied with, and their derivatives. */
double reference_gate(const struct opaq_experts_plan *plan, double g);
double reference_gate_slope(const struct opaq_experts_plan *plan, double g);
double reference_factor(const struct opaq_experts_plan *plan, double u);
double reference_factor_slope(const struct opaq_experts_plan *plan, double u);

/* Where a gate and its factor lie in a row of h. */
int64_t reference_gate_place(const struct opaq_experts_plan *plan, int64_t inner, int64_t column);
int64_t reference_factor_place(const struct opaq_experts_plan *plan, int64_t inner, int64_t column);

struct opaq_experts_plan experts_plan_of(const char *text);

#endif
