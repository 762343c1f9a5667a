/* cpu/quant/remap_rows.h: remap_ref(), faster where rows are contiguous or tiled. Depends on remap_ref.h. */
#ifndef OPAQ_CPU_QUANT_REMAP_ROWS_H
#define OPAQ_CPU_QUANT_REMAP_ROWS_H

#include "cpu/quant/ref/remap_ref.h"

/* Rows [r, r_end) of the target; the same bytes as remap_ref(). */
void remap_rows(const struct remap *remap, int64_t r, int64_t r_end);

#endif
