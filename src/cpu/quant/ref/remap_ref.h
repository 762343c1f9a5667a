/* cpu/quant/ref/remap_ref.h: moving codes and scales between copies without touching their values. Depends on backend/remap.h. */
#ifndef OPAQ_CPU_QUANT_REF_REMAP_REF_H
#define OPAQ_CPU_QUANT_REF_REMAP_REF_H

#include "backend/remap.h"

/* Rows [r, r_end) of the target. Pairs of rows that share bytes (packed, not transposed) go together. */
void remap_ref(const struct remap *remap, int64_t r, int64_t r_end);

/* The same for codes from column `column` of the target on only, and for the scales if they are wanted. */
void remap_rest_ref(const struct remap *remap, int64_t r, int64_t r_end, int64_t column, bool has_scales);

#endif
