/* cpu/gemm/packed_weight.h: a tiled copy as packed kernels read it. Depends on packed.h, product.h. */
#ifndef OPAQ_CPU_GEMM_PACKED_WEIGHT_H
#define OPAQ_CPU_GEMM_PACKED_WEIGHT_H

#include "backend/product.h"
#include "cpu/gemm/packed.h"

enum packed_format packed_format_of(const struct opaq_spec *spec);

/* Columns of the prepared rows of x, padded with zeros. */
int64_t packed_padded_columns(const struct gemm_operand *b);

/* Whether its kernels can read it: it is tiled, its memory aligned. */
bool packed_weight_can_run(const struct gemm_operand *b);

/* Bytes of row factors, if the copy stores them in another form; usually 0. */
int64_t packed_row_factor_bytes(const struct gemm_operand *b);

/* The weight. row_factors: memory of that size, whose rows [begin, end) packed_row_factors fills. */
struct packed_weight packed_weight_of(const struct gemm_operand *b, float *row_factors);
void packed_row_factors(const struct gemm_operand *b, int64_t begin, int64_t end, float *row_factors);

#endif
