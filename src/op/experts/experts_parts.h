/* op/experts/experts_parts.h: what the forward and the backward of an MLP or a mixture of experts share. Depends on
 * weight_stack.h, routing.h. */
#ifndef OPAQ_OP_EXPERTS_EXPERTS_PARTS_H
#define OPAQ_OP_EXPERTS_EXPERTS_PARTS_H

#include "op/plan/experts_plan.h"
#include "op/experts/routing.h"
#include "op/linear/weight_stack.h"

/* Streams of random numbers, for each expert. */
enum experts_stream {
    EXPERTS_X,
    EXPERTS_W1,
    EXPERTS_H,
    EXPERTS_W2,
    EXPERTS_DY,
    EXPERTS_DH,
    EXPERTS_STREAMS = 64
};

enum { EXPERTS_CHUNK = 1024 }; /* rows of float32 results at a time */

/* One call, its arguments read and checked. Both operators have them under the same names. */
struct experts {
    struct linear linear;
    struct opaq_experts_plan plan;
    struct opaq_view x;
    enum opaq_element dtype; /* of x, h and a */
    struct weight_stack gate_up, down;
    struct opaq_view gate_up_bias, down_bias;
    bool has_gate_up_bias, has_down_bias;
    const int64_t *random;
    bool is_routed; /* moe; an mlp is one expert that has all rows */
    struct routing routing;
    int64_t rows;   /* of x */
    int64_t hidden; /* H */
    int64_t inner;  /* I */
    int64_t width;  /* of h */
};

/* The value of an argument by its name; NULL if the operator has none of that name. */
const struct opaq_value *experts_argument(const struct opaq_call *call, const char *name);

/* Reads what both directions have. */
enum opaq_status experts_begin(const struct opaq_call *call, bool is_measuring, struct experts *experts,
                               struct opaq_error *error);

/* The work of one expert on its rows: slots are NULL where nothing is routed, and while measuring. */
struct experts_group {
    int64_t index;
    int64_t rows;
    struct routing_gather by_token, by_slot; /* without weights */
};

/* Calls `work` for each expert that has rows, each time with the same scratch memory; while measuring once, as if one
 * expert had them all. `idle`, if there is one, for those without rows. */
enum opaq_status experts_each(struct experts *experts,
                              enum opaq_status (*work)(struct experts *experts,
                                                       const struct experts_group *group, void *state,
                                                       struct opaq_error *error),
                              void (*idle)(struct experts *experts, int64_t index, void *state), void *state,
                              struct opaq_error *error);

/* Rows of a token's matrix, or of a slot's, for a group, times their router weights or not: gathered into scratch, or,
 * where nothing is routed, the matrix itself. */
enum opaq_status experts_gather(struct experts *experts, const struct experts_group *group,
                                const struct opaq_view *from, bool by_token, bool weighted,
                                struct opaq_view *rows, struct opaq_error *error);

/* a b^T in float32, some rows at a time, each lot added to its tokens' sums (times router weights or not). `dot`: and
 * multiplied with these rows, the products being router weights' gradients. */
struct experts_sum {
    const struct linear_operand *a;
    struct linear_operand *b;
    const struct opaq_view *bias; /* or NULL */
    bool weighted;
    float *sums;
    const struct opaq_view *dot; /* or NULL */
    float *dot_result;
};
enum opaq_status experts_add(struct experts *experts, const struct experts_group *group,
                             const struct experts_sum *sum, struct opaq_error *error);

/* float32 sums [rows, H] in scratch, zero; and as a plain output. */
enum opaq_status experts_sums(struct experts *experts, float **sums, struct opaq_error *error);
void experts_store_sums(struct experts *experts, const float *sums, int output);

struct weight_use experts_use(const struct experts *experts, int64_t index, enum experts_stream stream);

#endif
