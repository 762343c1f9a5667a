/* support_experts.h: MLPs, mixtures of experts and calls of their operators, for tests. Depends on support_op.h. */
#ifndef SUPPORT_EXPERTS_H
#define SUPPORT_EXPERTS_H

#include <stdbool.h>

#include "opaq/experts.h"
#include "support_op.h"

/* The output rows of the operators. An mlp's gradients are those of a mixture, without the router's. */
enum experts_output { EXPERTS_Y, EXPERTS_H };
enum experts_gradient {
    EXPERTS_DX,
    EXPERTS_DROUTER,
    EXPERTS_DGATE_UP,
    EXPERTS_DDOWN,
    EXPERTS_DGATE_UP_BIAS,
    EXPERTS_DDOWN_BIAS
};

/* Random streams of expert 0, added to the second number of the random state; each following expert adds 64
 * (docs/linear.md has those of linear). */
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

/* choices < 0: an mlp, which has 1 expert and weights without leading dimension. */
struct experts_sizes {
    int64_t tokens, choices, experts, hidden, inner;
};

/* The tensors, plain, filled with numbers of about size 1; ids use all experts, and some slots have no
 * expert. */
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

/* A plain tensor of any rank, filled with normal numbers times `scale`. */
struct tensor experts_tensor(const int64_t *shape, int rank, enum opaq_element dtype, double scale,
                             uint64_t seed);

/* Rows of a plain tensor, as a separate matrix. */
struct tensor experts_rows(const struct tensor *from, int64_t first, int64_t rows);

/* The same numbers in another dtype, rounded if necessary. */
struct tensor experts_converted(const struct tensor *from, enum opaq_element dtype);

/* ---- calls ---- */

/* Arguments of a call in addition to or instead of its layer's tensors; all zero for none. */
struct experts_given {
    const struct tensor *gate_up, *down;
    const struct opaq_tensor *x, *dy, *h, *ids, *weights;
    const float *input_scale, *hidden_scale;
    int64_t input_scales, hidden_scales; /* number of scales */
    bool no_gate_up_bias, no_down_bias;
    const int64_t *random; /* two tensors */
    int32_t w_dtype;       /* of a backward; 0: those of the weights */
    const struct opaq_parallel *parallel;
};

/* The arguments of a call, with the tensors they point to. Must not be copied. */
struct experts_arguments {
    const struct opaq_op *op;
    struct opaq_value value[OPAQ_OP_ARGUMENT_LIMIT];
    struct op_tensors gate_up, down;
    struct opaq_tensor x, dy, h, ids, weights, gate_up_bias, down_bias, input_scale, hidden_scale, random;
    int64_t gate_up_shape[3], down_shape[3];
};
void experts_arguments(const char *op, const struct experts_layer *layer, const char *plan,
                       const struct experts_given *given, struct experts_arguments *arguments);

/* The value of an argument by its name; ends the program if the name is unknown. */
struct opaq_value *experts_value(struct experts_arguments *arguments, const char *name);

/* Runs an operator; an error counts as a failed check and leaves an empty result. `given` may be NULL. */
struct op_result experts_call(const char *op, const struct experts_layer *layer, const char *plan,
                              const struct experts_given *given);

/* h of a training operator, as input of its backward; that backward, checked as in experts_check_again; and the
 * output row of a gradient. */
struct tensor experts_forward_h(const struct experts_layer *layer, const char *plan,
                                const struct experts_given *given);
struct op_result experts_backward(const struct experts_layer *layer, const char *plan,
                                  const struct experts_given *given, const struct tensor *h);
const char *experts_backward_name(const struct experts_layer *layer);
int experts_output_of(const struct experts_layer *layer, int gradient);

/* One plan for each activation, in the order of the activations. */
extern const char *const experts_activations[OPAQ_ACTIVATION_COUNT];

/* Repeats the call with other initial bytes in the outputs and the workspace: a failed check unless the result
 * is the same and the bytes after the workspace are unchanged. */
void experts_check_again(const char *op, const struct opaq_value *values, const struct op_result *expected,
                         const char *what);

/* A failed check unless two results have equal bytes in all output rows. */
void experts_check_same(const struct op_result *a, const struct op_result *b, const char *what);

/* ---- activations ---- */

/* The words of a plan that set the activation. */
struct experts_words {
    char text[OPAQ_EXPERTS_PLAN_TEXT_BYTES];
};
struct experts_words experts_activation_words(const char *plan);

/* activation(h), computed by the operator mlp with identity products, and its gradient, by mlp_backward. da is
 * float32. */
struct tensor experts_activated(const struct tensor *h, const char *plan);
struct tensor experts_activation_gradient(const struct tensor *h, const struct tensor *da, const char *plan);

/* The same in double by the formulas of docs/experts.md, without rounding: the gate, the factor it is
 * multiplied with, and their derivatives. */
double reference_gate(const struct opaq_experts_plan *plan, double g);
double reference_gate_slope(const struct opaq_experts_plan *plan, double g);
double reference_factor(const struct opaq_experts_plan *plan, double u);
double reference_factor_slope(const struct opaq_experts_plan *plan, double u);

/* The columns of a gate and its factor in a row of h. */
int64_t reference_gate_column(const struct opaq_experts_plan *plan, int64_t inner, int64_t column);
int64_t reference_factor_column(const struct opaq_experts_plan *plan, int64_t inner, int64_t column);

struct opaq_experts_plan experts_plan_of(const char *text);

#endif
