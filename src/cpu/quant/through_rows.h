/* cpu/quant/through_rows.h: quantizes into tiles, and dequantizes from them, with kernels that support
 * row-major codes only. Depends on quant_table.h. */
#ifndef OPAQ_CPU_QUANT_THROUGH_ROWS_H
#define OPAQ_CPU_QUANT_THROUGH_ROWS_H

#include "cpu/quant/quant_table.h"

/* Whether a tiled copy can be processed in regions: rows are short enough, and codes do not use random bits,
 * which depend on an element's position. */
bool through_rows_can_run(const struct quant_job *job, const struct quant_copy *copy, bool is_quantizing);

/* A buffer for the codes and scales of a region of a tensor, in row-major order. */
enum {
    TILE_REGION_CODES = 32 << 10,
    TILE_REGION_SCALES = TILE_REGION_CODES / 16, /* for the smallest blocks */
    TILE_REGION_ALIGN = 128                      /* columns of the largest blocks */
};
struct tile_region {
    uint8_t codes[TILE_REGION_CODES] __attribute__((aligned(64)));
    uint8_t scales[TILE_REGION_SCALES];
};

/* Rows [r, r + rows) and columns [c, c + columns) of a tiled copy as a separate copy whose codes, and scales if
 * they are tiled, are in row-major order in `region`. At most TILE_REGION_CODES codes; r is a multiple of a
 * tile's and a block's rows and c of TILE_REGION_ALIGN. */
struct quant_copy tile_region_rows(const struct quant_copy *tiled, struct tile_region *region, int64_t r,
                                   int64_t rows, int64_t c, int64_t columns);

/* Runs the kernel on rows [r, r_end) of the tiled copy, in regions. */
void quantize_through_rows(const struct quant_kernel *kernel, const struct quant_job *job,
                           const struct quant_copy *copy, int64_t r, int64_t r_end);
void dequantize_through_rows(const struct quant_kernel *kernel, const struct quant_job *job,
                             const struct quant_copy *copy, int64_t r, int64_t r_end);

#endif
