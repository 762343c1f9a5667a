/* op/linear/weight_stack.h: weights [N,K], or a stack of them [E,N,K], and one of them as an operand. Depends on
 * linear_parts.h. */
#ifndef OPAQ_OP_LINEAR_WEIGHT_STACK_H
#define OPAQ_OP_LINEAR_WEIGHT_STACK_H

#include "op/linear/linear_parts.h"

struct weight_stack {
    const char *name;
    struct opaq_view view; /* as it came */
    struct opaq_form here; /* plain, or how each matrix is quantized here */
    int64_t count, rows, columns;
};

/* Reads a list argument: one plain tensor, or the buffers of `given`. `rank`: 2 for one matrix, 3 for a stack. dtype:
 * what it holds besides f32. */
enum opaq_status weight_stack_read(const struct linear *linear, const char *name, const struct opaq_value *list,
                                   const struct opaq_value *shape, int rank, const struct opaq_form *given,
                                   const struct opaq_form *here, int32_t dtype, struct weight_stack *stack,
                                   struct opaq_error *error);

/* A plain tensor [count, length], one row for each weight; absent if `value` has none. */
enum opaq_status weight_bias_read(const struct linear *linear, const char *name, const struct opaq_value *value,
                                  const struct weight_stack *stack, int32_t dtype, struct opaq_view *bias,
                                  bool *is_there, struct opaq_error *error);

/* Row `index` of such a tensor, as a vector; and matrix `index` of a plain stack. */
struct opaq_view weight_bias_at(const struct opaq_view *bias, int64_t index);
struct opaq_view weight_plain_at(const struct opaq_view *stack, int64_t index);

/* What the products of one weight need to know. */
struct weight_use {
    int64_t index;
    int32_t backward; /* enum opaq_backward */
    int64_t stream;
    const int64_t *random;
};

/* Along its rows, for y = x w^T; and along its columns, for dx = dy w. */
enum opaq_status weight_forward_operand(struct linear *linear, const struct weight_stack *stack,
                                        const struct weight_use *use, struct linear_operand *operand,
                                        struct opaq_error *error);
enum opaq_status weight_backward_operand(struct linear *linear, const struct weight_stack *stack,
                                         const struct weight_use *use, struct linear_operand *operand,
                                         struct opaq_error *error);

#endif
