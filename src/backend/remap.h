/* backend/remap.h: moving codes and scales between copies of quantized tensors without rounding. Depends on
 * quant_job.h. */
#ifndef OPAQ_BACKEND_REMAP_H
#define OPAQ_BACKEND_REMAP_H

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

/* A remap of operand rows [row, row + rows) of the target, and the figures beside codes and block scales. */
struct remap_job {
    struct remap remap;
    int64_t row, rows;
    bool has_tensor_scale; /* fp8: the one scale of the tensor is copied */
    int64_t amax_count;    /* amaxes to copy, from and to these entries */
    int64_t amax_from, amax_to;
};

#endif
