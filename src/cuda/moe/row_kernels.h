/* cuda/moe/row_kernels.h: copies and combines rows of groups. Depends on cuda_functions.h. */
#ifndef OPAQ_CUDA_MOE_ROW_KERNELS_H
#define OPAQ_CUDA_MOE_ROW_KERNELS_H

#include "cuda/cuda_functions.h"

/* The sorted rows of one group, or of all. */
struct row_span {
    struct row_groups groups;
    int64_t group; /* -1: all */
};

/* Copies from `from`, a whole matrix in some order, to the first rows of `to`. */
enum opaq_status gather_span(const struct row_span *span, const struct quant_matrix *from, enum row_order order,
                             bool is_weighted, const struct quant_matrix *to, CUDA_RUN);

/* Copies all sorted rows to the rows of their slots. */
enum opaq_status scatter_rows(const struct row_groups *groups, const struct quant_matrix *from,
                              const struct quant_matrix *to, CUDA_RUN);

/* Adds all sorted rows of `from`, times router weights or not, to their tokens' rows of `sums`, in sorted order. `places`: an
 * int64 for each slot, scratch memory; NULL if rows are not routed. */
enum opaq_status combine_rows(const struct row_groups *groups, const struct quant_matrix *from,
                              bool is_weighted, const struct quant_matrix *sums, int64_t *places, CUDA_RUN);

/* result[slot] = (result[slot] +) the dot product of row i of a with a row of b. */
struct span_dot {
    struct quant_matrix a; /* the span's rows */
    struct quant_matrix b;
    enum row_order b_order; /* of the whole matrix b */
    bool is_b_one_row;      /* b's first row, for all */
    bool adds;
};
enum opaq_status dot_span(const struct row_span *span, const struct span_dot *dot, float *result, CUDA_RUN);

#endif
