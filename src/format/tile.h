/* format/tile.h: positions of codes and scales in a tiled tensor. Depends on base. Specification:
 * docs/formats.md, "Tiles".
 *
 * The rows of a tile are the lanes of vectors in the CPU's kernels, so a weight is read once, in order, and
 * sums need no horizontal additions. AVX2 and NEON process the same bytes in halves and quarters of an AVX-512
 * vector. */
#ifndef OPAQ_FORMAT_TILE_H
#define OPAQ_FORMAT_TILE_H

#include <stdint.h>

#include "base/device.h"

/* 4-bit codes: 16 rows x 64 columns, 512 bytes, as four groups of 16 columns (128 bytes) of two halves (64 bytes, 8
 * columns). In a half, row r has the four bytes from 4 r on, and byte j of them holds columns j (low nibble) and
 * 4 + j (high nibble) of the half. */
enum { TILE4_ROWS = 16, TILE4_COLUMNS = 64, TILE4_BYTES = 512, TILE4_GROUP = 16, TILE4_GROUP_BYTES = 128 };

/* 8-bit codes: 32 rows x 32 columns, 1024 bytes, as 16 pairs of columns (64 bytes); row r has bytes 2 r and 2 r + 1. */
enum { TILE8_ROWS = 32, TILE8_COLUMNS = 32, TILE8_BYTES = 1024, TILE8_PAIR_BYTES = 64 };

/* The byte offset of a code; *shift is 0 or 4. `columns` is the tensor's, padded to whole tiles. Tiles of the
 * same rows are consecutive along the columns. */
OPAQ_DEVICE static inline int64_t tile4_offset(int64_t row, int64_t column, int64_t columns, int *shift) {
    const int64_t tile = row / TILE4_ROWS * (columns / TILE4_COLUMNS) + column / TILE4_COLUMNS;
    const int64_t in_half = column % 8;
    *shift = in_half < 4 ? 0 : 4;
    return tile * TILE4_BYTES + column % TILE4_COLUMNS / 8 * 64 + row % TILE4_ROWS * 4 + in_half % 4;
}

OPAQ_DEVICE static inline int64_t tile8_offset(int64_t row, int64_t column, int64_t columns) {
    const int64_t tile = row / TILE8_ROWS * (columns / TILE8_COLUMNS) + column / TILE8_COLUMNS;
    return tile * TILE8_BYTES + column % TILE8_COLUMNS / 2 * TILE8_PAIR_BYTES + row % TILE8_ROWS * 2 +
           column % 2;
}

/* The index of a block's scale (one byte): blocks in order along the columns, in each the tile's rows.
 * `blocks`: the blocks of all columns, padded to whole tiles; `rows`: those of a tile. */
OPAQ_DEVICE static inline int64_t tile_scale_offset(int64_t row, int64_t block, int64_t blocks, int64_t rows) {
    return (row / rows * blocks + block) * rows + row % rows;
}

#endif
