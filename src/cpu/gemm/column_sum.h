/* cpu/gemm/column_sum.h: the sums of a matrix's columns, which is a bias's gradient. Depends on quant. */
#ifndef OPAQ_CPU_GEMM_COLUMN_SUM_H
#define OPAQ_CPU_GEMM_COLUMN_SUM_H

#include "backend/quant_job.h"

/* sums[0][j] = sum over i of matrix[i][j], in float32 with the order and the blocks of gemm_run.h: for each column the
 * rows in order, in blocks of 256 that each start from 0, added in order; rounded once to the dtype of `sums`, which has
 * one row. */
void column_sum(const struct quant_matrix *matrix, const struct quant_matrix *sums,
                const struct opaq_parallel *parallel);

#endif
