/* cpu/moe/rows.h: copies rows between token or slot order and the sorted order of groups. Depends on
 * definition. */
#ifndef OPAQ_CPU_MOE_ROWS_H
#define OPAQ_CPU_MOE_ROWS_H

#include "definition/sorted_rows.h"
#include "opaq/parallel.h"

/* Sorted rows [first, first + count). The matrices below have `count` rows unless stated otherwise. */
struct row_range {
    const struct row_groups *groups;
    int64_t first, count;
};

/* Copies from `from`, a whole matrix in some order, to `to`, multiplied by router weights if is_weighted. */
void rows_gather(const struct row_range *range, const struct quant_matrix *from, enum row_order order,
                 bool is_weighted, const struct quant_matrix *to, const struct opaq_parallel *parallel);

/* Copies `from` to the rows of their slots in `to`, a whole matrix. */
void rows_scatter(const struct row_range *range, const struct quant_matrix *from, const struct quant_matrix *to,
                  const struct opaq_parallel *parallel);

/* Adds `from`, multiplied by router weights if is_weighted, to the tokens' rows of `sums`, a whole contiguous
 * float32 matrix, in sorted order. */
void rows_add(const struct row_range *range, const struct quant_matrix *from, bool is_weighted,
              const struct quant_matrix *sums, const struct opaq_parallel *parallel);

/* result[slot] = (result[slot] +) the dot product of a row of a with one of b. b is a whole matrix in the order
 * `b_order`, or one row for all (row step 0). */
struct rows_dot {
    const struct quant_matrix *a;
    const struct quant_matrix *b;
    enum row_order b_order; /* ROWS_SORTED: `count` rows, as a has */
    bool adds;
};
void rows_dot(const struct row_range *range, const struct rows_dot *dot, float *result,
              const struct opaq_parallel *parallel);

#endif
