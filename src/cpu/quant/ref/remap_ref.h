/* cpu/quant/ref/remap_ref.h: moving codes and scales between copies without touching their values. Depends on quant_job.h. */
#ifndef OPAQ_CPU_QUANT_REF_REMAP_REF_H
#define OPAQ_CPU_QUANT_REF_REMAP_REF_H

#include "backend/quant_job.h"

/* Fills columns [column, column_end) of operand rows of `to` from `from`. Element (r, c) of `to` is element
 * (r + row_offset, c + column_offset) of `from`, or, transposed, (c, r) of it. Blocks lie on blocks: the caller has
 * checked. The target is all zero before. */
struct remap {
    const struct quant_copy *from;
    const struct quant_copy *to;
    bool is_transposed;
    int64_t row_offset;
    int64_t column_offset;
    int64_t column;
    int64_t column_end;
    int scale_bytes; /* of one scale entry: 1 or 4; 0: scales are not moved */
};

/* Rows [r, r_end) of the target. Pairs of rows that share bytes (packed, not transposed) go together. */
void remap_ref(const struct remap *remap, int64_t r, int64_t r_end);

/* The same for codes from column `column` of the target on only, and for the scales if they are wanted. */
void remap_rest_ref(const struct remap *remap, int64_t r, int64_t r_end, int64_t column, bool has_scales);

#endif
