/* cpu/quant/through_rows.h: quantizing into tiles, and dequantizing from them, with kernels that know rows. Depends on
 * quant_table.h. */
#ifndef OPAQ_CPU_QUANT_THROUGH_ROWS_H
#define OPAQ_CPU_QUANT_THROUGH_ROWS_H

#include "cpu/quant/quant_table.h"

/* Whether a tiled copy can go through rows: they are not too long for a strip, and random bits, which depend on where an
 * element is, do not make codes. */
bool through_rows_can_run(const struct quant_job *job, const struct quant_copy *copy, bool is_quantizing);

/* Codes and scales of some rows and columns, row by row. */
enum {
    TILE_STRIP_CODES = 32 << 10,
    TILE_STRIP_SCALES = TILE_STRIP_CODES / 16, /* of the smallest blocks */
    TILE_STRIP_ALIGN = 128                     /* columns of the largest blocks */
};
struct tile_strip {
    uint8_t codes[TILE_STRIP_CODES] __attribute__((aligned(64)));
    uint8_t scales[TILE_STRIP_SCALES];
};

/* Rows [r, r + rows) and columns [c, c + columns) of a tiled copy as a copy by itself, whose codes lie in the strip row by row, as
 * do scales that lie in tiles. They are at most TILE_STRIP_CODES, r is a multiple of a tile's and a block's rows and c of
 * TILE_STRIP_ALIGN. */
struct quant_copy tile_strip_rows(const struct quant_copy *tiled, struct tile_strip *strip, int64_t r,
                                  int64_t rows, int64_t c, int64_t columns);

/* What the kernel does with rows [r, r_end) of the tiled copy. */
void quantize_through_rows(const struct quant_kernel *kernel, const struct quant_job *job,
                           const struct quant_copy *copy, int64_t r, int64_t r_end);
void dequantize_through_rows(const struct quant_kernel *kernel, const struct quant_job *job,
                             const struct quant_copy *copy, int64_t r, int64_t r_end);

#endif
