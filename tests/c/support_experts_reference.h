/* support_experts_reference.h: what the experts' operators are to give, by plain loops over experts, twice: bit for bit,
 * from quantizers and products that are tested by themselves; and in double, with bounds, from nothing of the library's.
 * Depends on support_experts.h, support_numbers.h. */
#ifndef SUPPORT_EXPERTS_REFERENCE_H
#define SUPPORT_EXPERTS_REFERENCE_H

#include "support_experts.h"
#include "support_numbers.h"

/* ---- routing ---- */

/* The slots of one expert in their order; of an mlp all rows. A slot is token * choices + choice. */
struct reference_group {
    int64_t index, count;
    int64_t *slot;
};
struct reference_group reference_group_of(const struct experts_layer *layer,
                                          const struct opaq_experts_plan *plan, int64_t index);
void reference_group_free(struct reference_group *group);

/* A group's rows of a tensor that has one for each token (or slot), times their router weights or not. */
enum reference_rows { REFERENCE_TOKENS, REFERENCE_WEIGHTED_TOKENS, REFERENCE_SLOTS };
struct tensor reference_gather(const struct experts_layer *layer, const struct reference_group *group,
                               const struct tensor *from, enum reference_rows rows);

/* ---- bit for bit ---- */

/* x quantized along its rows as a form says, or not, as floats again. given: a scale or an amax, or NULL. */
struct tensor reference_operand(const struct tensor *x, const struct opaq_form *form, const float *given,
                                const int64_t *random, int64_t stream);

/* Matrix `index` of a stack, plain or quantized, or quantized here, as floats. */
struct tensor reference_weight(const struct tensor *stack, int64_t index, int64_t rows,
                               const struct opaq_form *here, const int64_t *random, int64_t stream);

/* a b^T + bias (or NULL) in float32 by the operator linear, checked in double. */
struct tensor reference_multiply(const struct tensor *a, const struct tensor *b, const struct tensor *bias);

struct reference_forward {
    struct tensor y, h;
};
struct reference_forward reference_forward(const struct experts_layer *layer, const char *plan,
                                           const struct experts_given *given);
void reference_forward_free(struct reference_forward *forward);

/* Runs mlp or moe and their training operators: both results are as they should be bit for bit, where nothing is
 * quantized in double too, and depend neither on memory beforehand nor on any behind the workspace. */
void experts_check_forward(const struct experts_layer *layer, const char *plan,
                           const struct experts_given *given);

/* ---- in double, where nothing is quantized ---- */

struct reference_numbers {
    struct numbers y, h;
};
struct reference_numbers reference_forward_numbers(const struct experts_layer *layer, const char *plan,
                                                   const struct experts_given *given);
void reference_numbers_free(struct reference_numbers *forward);

/* By enum experts_gradient; of h as it is given. */
struct reference_gradients {
    struct numbers gradient[6];
};
struct reference_gradients reference_backward_numbers(const struct experts_layer *layer, const char *plan,
                                                      const struct experts_given *given,
                                                      const struct tensor *h);
void reference_gradients_free(struct reference_gradients *gradients);

#endif
