/* cpu/gemm/packed_rows.h: activations as packed kernels read them. Depends on packed.h, product.h. */
#ifndef OPAQ_CPU_GEMM_PACKED_ROWS_H
#define OPAQ_CPU_GEMM_PACKED_ROWS_H

#include <stddef.h>

#include "backend/product.h"
#include "cpu/gemm/packed.h"
#include "opaq/parallel.h"

/* What they need for `rows` rows of `padded` columns. */
size_t packed_rows_bytes(enum packed_precision precision, int64_t rows, int64_t padded);

/* Prepares rows [first, first + rows) of an operand in memory of that size. `format`: of the weight. */
void packed_rows_make(const struct gemm_operand *operand, int64_t first, int64_t rows, int64_t padded,
                      enum packed_format format, enum packed_precision precision, void *memory,
                      const struct opaq_parallel *parallel, struct packed_rows *made);

/* The same for rows source[0], source[1], ... of the operand. Equal consecutive entries are prepared once. */
void packed_rows_gather(const struct gemm_operand *operand, const int64_t *source, int64_t rows, int64_t padded,
                        enum packed_format format, enum packed_precision precision, void *memory,
                        const struct opaq_parallel *parallel, struct packed_rows *made);

/* Rows [first, first + rows) of prepared ones. */
struct packed_rows packed_rows_slice(const struct packed_rows *all, enum packed_format format, int64_t first,
                                     int64_t rows);

#endif
