/* backend/remap.h: copies codes and scales between copies of quantized tensors without rounding. Depends on
 * quant_job.h. */
#ifndef OPAQ_BACKEND_REMAP_H
#define OPAQ_BACKEND_REMAP_H

#include "backend/quant_job.h"

/* Fills columns [column, column_end) of operand rows of `to` from `from`. Element (r, c) of `to` is element (r
 * + row_offset, c + column_offset) of `from`, or, if transposed, element (c, r). The caller has checked that
 * blocks coincide, and has zeroed the target. */
struct remap {
    const struct quant_copy *from;
    const struct quant_copy *to;
    bool is_transposed;
    int64_t row_offset;
    int64_t column_offset;
    int64_t column;
    int64_t column_end;
    int scale_bytes; /* bytes of a scale entry: 1 or 4; 0: scales are not copied */
};

/* A remap of operand rows [row, row + rows) of the target, and the tensor-wide scale and amaxes. */
struct remap_job {
    struct remap remap;
    int64_t row, rows;
    bool has_tensor_scale; /* fp8: copy the tensor's scale */
    int64_t amax_count;    /* number of amaxes to copy between these entries */
    int64_t amax_from, amax_to;
};

#endif
