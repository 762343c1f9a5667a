/* cpu/quant/remap_rows.h: copies codes and scales between copies unchanged. Depends on backend/remap.h. */
#ifndef OPAQ_CPU_QUANT_REMAP_ROWS_H
#define OPAQ_CPU_QUANT_REMAP_ROWS_H

#include "backend/remap.h"

/* Copies rows [r, r_end) of the target. Pairs of rows that share bytes (packed, not transposed) must not be
 * separated. */
void remap_ref(const struct remap *remap, int64_t r, int64_t r_end);

/* Copies codes from column `column` of the target on, and the scales if has_scales. */
void remap_rest_ref(const struct remap *remap, int64_t r, int64_t r_end, int64_t column, bool has_scales);

/* The same bytes as remap_ref(), faster where rows are contiguous or tiled. */
void remap_rows(const struct remap *remap, int64_t r, int64_t r_end);

#endif
