/* cpu/quant/remap_rows.h: remap_ref(), faster where rows lie along memory or in tiles. Depends on remap_ref.h. */
#ifndef OPAQ_CPU_QUANT_REMAP_ROWS_H
#define OPAQ_CPU_QUANT_REMAP_ROWS_H

#include "cpu/quant/ref/remap_ref.h"

/* Rows [r, r_end) of the target: what remap_ref() does, byte for byte. */
void remap_rows(const struct remap *remap, int64_t r, int64_t r_end);

#endif
