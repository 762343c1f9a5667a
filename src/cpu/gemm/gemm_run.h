/* cpu/gemm/gemm_run.h: the matrix product c = a b^T for every pair of operands. Depends on product.h.
 *
 * Arithmetic, the same on every machine and with any number of threads: operands are decoded to float32 as
 * dequantization does. For each element of c the products a[i][k] * b[j][k] are summed up in float32 in the order of
 * k, each added with one rounding (a fused multiply-add), in blocks of 256 that each start from 0; the blocks' sums
 * are added in order to a total that starts from 0. Where a is plain bf16 and b is read across the rows of its copy, b
 * is decoded without the factor that all its elements share (fp8's scale, nvfp4's amax / (6 * 448) or global scale),
 * if there is one between 2^-100 and 2^100, and the total is multiplied with it. Then bias[j] is added, then the
 * former c[i][j], and the result is rounded once to c's dtype, every NaN being the canonical one.
 *
 * Without overflow and underflow the float32 total differs from the exact one by at most
 *     (min(K, 256) + ceil(K / 256) + 2) * 2^-24 * sum |a[i][k] b[j][k]|
 * to first order: a product meets one rounding for each addition in its block and one for each block; two more are
 * left for the bias and c, whose sizes then count among the terms. A factor that was omitted adds five: three of
 * dequantization, two of its own.
 *
 * Values decoded without that factor, and those of mxfp8 and mxfp4, are exact in bf16, so gemm_pairs may be used, with
 * the same bits but for subnormal numbers, which may count as 0 in a, in b and in the sums of a block: that changes an
 * element of c by less than
 *     2^-126 |factor| sum over k (|b[j][k]| + |a[i][k]| + 2)
 * with b before the factor; and subnormal numbers times infinite ones may be NaN. */
#ifndef OPAQ_CPU_GEMM_GEMM_RUN_H
#define OPAQ_CPU_GEMM_GEMM_RUN_H

#include <stddef.h>

#include "backend/product.h"
#include "cpu/gemm/gemm_table.h"
#include "opaq/parallel.h"

/* The scratch memory that gemm_run needs; depends on the shapes only. At most 8 MiB, or 32 rows of K floats, rounded
 * up to 256, if that is more; where b is read across rows at most 4 MiB, or 128 rows of K floats. What is enough for
 * one product is enough for one with fewer rows of a, rows of b or steps. */
size_t gemm_workspace_bytes(const struct gemm_job *job);

/* The job's operands are checked and match. The workspace is aligned to 64 and may be NULL if 0 bytes are needed.
 * Empty sizes are allowed; with K = 0 every sum is 0. */
void gemm_run(const struct gemm_job *job, void *workspace, const struct opaq_parallel *parallel);

/* The same with given tables, which this machine must be able to run; pairs may be NULL. */
void gemm_run_with(const struct gemm_table *table, const struct gemm_table *pairs, const struct gemm_job *job,
                   void *workspace, const struct opaq_parallel *parallel);

/* sums[0][j] = sum over i of matrix[i][j], a bias's gradient, in float32 with the order and the blocks of gemm_run:
 * for each column the rows in order, in blocks of 256 that each start from 0, added in order; rounded once to the
 * dtype of `sums`, which has one row. */
void column_sum(const struct quant_matrix *matrix, const struct quant_matrix *sums,
                const struct opaq_parallel *parallel);

/* Which kernel gemm_run uses on this machine: "gemm_avx512". */
const char *gemm_kernel_name(void);

#endif
