/* support_experts_reference.h: expected results of the experts' operators, by plain loops over experts, twice:
 * exactly, from quantizers and products that other tests check; and in double with error bounds, independent of
 * the library. Depends on support_experts.h, support_numbers.h. */
#ifndef SUPPORT_EXPERTS_REFERENCE_H
#define SUPPORT_EXPERTS_REFERENCE_H

#include "support_experts.h"
#include "support_numbers.h"

/* ---- routing ---- */

/* The slots of one expert in their order; for an mlp all rows. A slot is token * choices + choice. */
struct reference_group {
    int64_t index, count;
    int64_t *slot;
};
struct reference_group reference_group_of(const struct experts_layer *layer,
                                          const struct opaq_experts_plan *plan, int64_t index);
void reference_group_free(struct reference_group *group);

/* A group's rows of a tensor with one row per token (or per slot), optionally times their router weights. */
enum reference_rows { REFERENCE_TOKENS, REFERENCE_WEIGHTED_TOKENS, REFERENCE_SLOTS };
struct tensor reference_gather(const struct experts_layer *layer, const struct reference_group *group,
                               const struct tensor *from, enum reference_rows rows);

/* ---- exact reference ---- */

/* x quantized along its rows by a form and dequantized, or only converted to floats. `given`: a scale or an
 * amax, or NULL. */
struct tensor reference_operand(const struct tensor *x, const struct opaq_form *form, const float *given,
                                const int64_t *random, int64_t stream);

/* Matrix `index` of a stack as floats: plain, quantized by the caller, or quantized here. */
struct tensor reference_weight(const struct tensor *stack, int64_t index, int64_t rows,
                               const struct opaq_form *here, const int64_t *random, int64_t stream);

/* a b^T + bias (or NULL) in float32 by the operator linear, checked against double. */
struct tensor reference_multiply(const struct tensor *a, const struct tensor *b, const struct tensor *bias);

struct reference_forward {
    struct tensor y, h;
};
struct reference_forward reference_forward(const struct experts_layer *layer, const char *plan,
                                           const struct experts_given *given);
void reference_forward_free(struct reference_forward *forward);

/* Runs mlp or moe and their training operators. Both results must be exact and, if nothing is quantized, within
 * the bound of the reference in double; they must not depend on the initial bytes of memory or change bytes
 * after the workspace. */
void experts_check_forward(const struct experts_layer *layer, const char *plan,
                           const struct experts_given *given);

/* ---- reference in double, for plans that quantize nothing ---- */

struct reference_numbers {
    struct numbers y, h;
};
struct reference_numbers reference_forward_numbers(const struct experts_layer *layer, const char *plan,
                                                   const struct experts_given *given);
void reference_numbers_free(struct reference_numbers *forward);

/* Indexed by enum experts_gradient; h is an input. */
struct reference_gradients {
    struct numbers gradient[6];
};
struct reference_gradients reference_backward_numbers(const struct experts_layer *layer, const char *plan,
                                                      const struct experts_given *given,
                                                      const struct tensor *h);
void reference_gradients_free(struct reference_gradients *gradients);

#endif
