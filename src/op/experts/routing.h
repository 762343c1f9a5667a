/* op/experts/routing.h: which rows of a batch go to which expert. Depends on linear_parts.h.
 *
 * A slot is a place of topk_ids: token t's j-th choice is slot t * k + j. Slots are sorted by expert, and among one
 * expert's in their own order, so the order of all sums is fixed. */
#ifndef OPAQ_OP_EXPERTS_ROUTING_H
#define OPAQ_OP_EXPERTS_ROUTING_H

#include "op/linear/linear_parts.h"

struct routing {
    int64_t tokens, choices; /* choices: k */
    int64_t experts;         /* in the stack */
    int64_t *first;          /* experts + 1: where each one's slots begin in `slot` */
    int64_t *slot;           /* sorted */
    float *weight;           /* by slot */
};

/* What the stack is a part of. */
struct routing_slice {
    int64_t total, first;
};

/* Reads the ids and weights, both of one shape, [T, k] or the leading sizes of `tokens` and k, into scratch. -1 and `total` are nobody's;
 * other numbers outside [0, total) are an error; experts outside the slice are passed over. While measuring only the
 * scratch is taken. */
enum opaq_status routing_read(struct linear *linear, const struct opaq_tensor *weights,
                              const struct opaq_tensor *ids, const struct opaq_proto *tokens, int64_t experts,
                              struct routing_slice slice, struct routing *routing, struct opaq_error *error);

/* The rows of `from` that slots name, times their weights if those are given, one after another into `to`. by_token: a
 * slot names its token's row, else its own. */
struct routing_gather {
    const struct routing *routing;
    const int64_t *slots;
    int64_t count;
    bool by_token;
    const float *weight;
};
void routing_gather(const struct routing_gather *gather, const struct quant_matrix *from,
                    const struct quant_matrix *to, const struct opaq_parallel *parallel);

/* And back: row i of `from` becomes the row of slot i's own; or is added, times its weight, to its token's row of a
 * float32 matrix, in the order of the slots. */
void routing_scatter(const struct routing_gather *gather, const struct quant_matrix *from,
                     const struct quant_matrix *to, const struct opaq_parallel *parallel);
void routing_add(const struct routing_gather *gather, const struct quant_matrix *from, float *sums,
                 int64_t columns, const struct opaq_parallel *parallel);

/* Row i of a float32 matrix times slot i's weight, in place. */
void routing_weigh(const struct routing_gather *gather, const float *weight, const struct quant_matrix *rows,
                   const struct opaq_parallel *parallel);

/* A matrix into one of another dtype. */
void routing_copy(const struct quant_matrix *from, const struct quant_matrix *to,
                  const struct opaq_parallel *parallel);

/* The products of rows i of two matrices: result[slot i] is set to their sum over columns, or that is added to it. */
struct routing_dot {
    const struct quant_matrix *a;
    const struct quant_matrix *b;
    bool adds;
};
void routing_dot(const struct routing_gather *gather, const struct routing_dot *dot, float *result,
                 const struct opaq_parallel *parallel);

#endif
