/* backend/grouped.h: rows in groups, each multiplied with its own weight, for mixtures of experts and grouped
 * linear layers. Depends on operand.h.
 *
 * Terms: a token is a row of the input; a slot is one choice of an expert by a token, slot t * choices + j
 * being token t's j-th; sorted rows are the slots sorted by expert, and by slot within an expert; a group is
 * the sorted rows of one expert. The number of rows of a group is in device memory: only a back end knows it. */
#ifndef OPAQ_BACKEND_GROUPED_H
#define OPAQ_BACKEND_GROUPED_H

#include "backend/operand.h"
#include "base/device.h"
#include "opaq/experts.h"

/* Whether h is twice as wide as a. */
OPAQ_DEVICE static inline bool activation_is_gated(enum opaq_activation activation) {
    return activation < OPAQ_SILU_NO_MUL;
}

/* Random streams of a group start at GROUP_STREAMS times its index. */
enum { GROUP_STREAMS = 64 };

struct row_groups {
    int64_t count;   /* groups: matrices in a stack of weights */
    int64_t rows;    /* maximum number of sorted rows: tokens times choices */
    int64_t choices; /* slots per token */
    bool is_split;   /* `first` is set; else group 0 has all rows */
    bool is_routed;  /* `slot` and `weight` are set; else sorted row i is row i */
    int64_t *first;  /* device memory: count + 1 offsets into the sorted rows */
    int64_t *slot;   /* device memory: the slot of each sorted row */
    float *weight;   /* device memory: the router weight of each slot */
};

/* Sorts slots by expert. Ids in [0, total) are experts, of which [begin, begin + groups.count) have a group
 * here; -1 and `total` mean no expert. The CPU rejects any other id; a device that cannot report errors skips
 * that slot. */
struct route_job {
    struct opaq_tensor ids;     /* int32 or int64, any strides; one per slot */
    struct opaq_tensor weights; /* f32, bf16 or f16, any strides; one per slot */
    int64_t total, begin;
    struct row_groups groups; /* the caller supplies the memory; filled here */
};

/* Converts the sizes of consecutive groups to offsets. The CPU rejects sizes that do not add up to `rows`. */
struct split_job {
    struct opaq_tensor splits; /* int32 or int64 [count], any stride */
    struct row_groups groups;  /* the caller supplies the memory of `first`; filled here */
};

/* How a matrix's rows are ordered. */
enum row_order { ROWS_SORTED, ROWS_BY_SLOT, ROWS_BY_TOKEN };

/* A matrix with grouped rows, and how each group is prepared as an operand. */
struct grouped_rows {
    struct opaq_view view; /* plain */
    enum row_order order;
    bool is_weighted;         /* multiply each row by its router weight */
    struct operand_form form; /* of group 0; each group is quantized separately */
    int64_t figure_step;      /* 1: form.scale and form.amax have one entry per group */
};

/* A weight [N,K], or a stack of them [E,N,K], plain or quantized. form.along is OPAQ_ROWWISE for a w^T and
 * OPAQ_COLUMNWISE for a w. */
struct grouped_weights {
    struct opaq_view view;
    struct operand_form form;
};

enum grouped_result {
    GROUPED_STORE,    /* store the product in sorted order */
    GROUPED_ACTIVATE, /* store the activation of the product in sorted order */
    GROUPED_COMBINE   /* add the product's rows to their tokens' sums, in sorted order */
};

struct grouped_product {
    const struct row_groups *groups;
    struct grouped_rows a;
    struct grouped_weights w;
    const struct opaq_view *bias; /* [N] or [E,N]; NULL: none */
    bool any_order;               /* a row's bits may depend on the other rows */
    int32_t precision;            /* enum opaq_precision */
    enum grouped_result result;
    struct quant_matrix c; /* STORE, ACTIVATE: the result */
    /* ACTIVATE: the product is rounded to c's dtype, stored by slot in `h` unless that has no columns, and
     * activated. */
    const struct opaq_experts_plan *activation;
    struct quant_matrix h;
    /* COMBINE: float32 sums, one contiguous row per token, to which rows are added, multiplied by their router
     * weights if `is_weighted`. If dot_result is not NULL, the dot product of each unweighted result row with
     * its token's row of `dot` is stored there by slot. */
    struct quant_matrix sums;
    bool is_weighted;
    struct quant_matrix dot;
    float *dot_result;
};

/* c_e = a_e^T b_e for the rows of each group; zero for a group without rows. Both forms have `along` OPAQ_COLUMNWISE. */
struct grouped_gradient {
    const struct row_groups *groups;
    struct grouped_rows a;
    struct grouped_rows b;
    struct opaq_view c; /* [N,K] or [E,N,K] */
};

/* result[slot] = (result[slot] +) sum over columns of a times b, for each sorted row. */
struct row_dot {
    const struct row_groups *groups;
    struct grouped_rows a;
    struct opaq_view b;  /* plain: sorted rows, or one row per group: [N] or [E,N] */
    bool is_b_per_group; /* which of the two */
    bool adds;
    float *result;
};

#endif
