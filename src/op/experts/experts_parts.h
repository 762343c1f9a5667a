/* op/experts/experts_parts.h: what the forward and the backward of an MLP or a mixture of experts share. Depends on
 * linear_parts.h. */
#ifndef OPAQ_OP_EXPERTS_EXPERTS_PARTS_H
#define OPAQ_OP_EXPERTS_EXPERTS_PARTS_H

#include "op/linear/linear_parts.h"

/* Random streams per expert. */
enum experts_stream { EXPERTS_X, EXPERTS_W1, EXPERTS_H, EXPERTS_W2, EXPERTS_DY, EXPERTS_DH };

/* One call, its arguments read and checked. All operators have them under the same names. */
struct experts {
    struct op_call *call;
    const struct opaq_experts_plan *plan;
    struct opaq_view x;
    enum opaq_element dtype; /* of x, h and a */
    struct weight_stack gate_up, down;
    struct opaq_view gate_up_bias, down_bias;
    bool has_gate_up_bias, has_down_bias;
    const int64_t *random;
    bool is_routed;           /* moe; an mlp is one group with all rows */
    struct row_groups groups; /* in device memory */
    int64_t rows;             /* of x */
    int64_t hidden;           /* H */
    int64_t inner;            /* I */
    int64_t width;            /* of h */
};

/* Reads the arguments that all operators have, and sorts the rows by expert. */
enum opaq_status experts_begin(struct op_call *call, struct experts *experts, struct opaq_error *error);

/* Rows of x or dy in token order; for an mlp, in place. */
struct grouped_rows experts_token_rows(const struct experts *experts, const struct opaq_view *view,
                                       bool is_weighted, struct operand_form form);

/* Rows in sorted order. */
struct grouped_rows sorted_rows(const struct opaq_view *view, struct operand_form form);

/* A matrix with a row for each sorted row, in the arena. */
enum opaq_status experts_matrix(struct experts *experts, int64_t columns, enum opaq_element dtype,
                                struct opaq_view *matrix, struct opaq_error *error);

/* float32 sums [rows, H] in the arena, zero; and as a plain output. */
enum opaq_status experts_sums(struct experts *experts, struct opaq_view *sums, struct opaq_error *error);
enum opaq_status experts_store_sums(struct experts *experts, const struct opaq_view *sums, int output,
                                    struct opaq_error *error);

#endif
