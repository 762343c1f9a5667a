/* format/tile_mma.h: positions of codes and scales in tiles for tensor cores (`tiled=mma`). Depends on base.
 * Specification: docs/formats.md, "Tiles for tensor cores".
 *
 * A tile is 64 rows x 64 columns. Tiles of the same 64 rows are consecutive along the columns, which are padded with
 * zeros to whole pairs of tiles (128 columns), rows to 64. Inside, codes lie as the first operand of the matrix
 * instructions wants them (mma m16n8k16, and wgmma m64nNk16 of four warps): lane 4 g + j of warp w holds, for each
 * step of 16 columns, the rows 16 w + g and 16 w + g + 8 and the columns 2 j, 2 j + 1, 2 j + 8 and 2 j + 9: its eight
 * codes.
 *
 *     fragment f of a code    0: row g, column 2 j or 2 j + 1    1: row g + 8, the same columns
 *                             2: row g, column 2 j + 8 or 2 j + 9    3: row g + 8, those
 *     half h of a code        0: the even column, 1: the odd one. It becomes half h of a register of two bf16. */
#ifndef OPAQ_FORMAT_TILE_MMA_H
#define OPAQ_FORMAT_TILE_MMA_H

#include <stdint.h>

#include "base/device.h"

enum {
    TILE_MMA_ROWS = 64,
    TILE_MMA_COLUMNS = 64,
    TILE_MMA_PADDED = 128, /* columns are padded to a multiple of it */
    TILE_MMA_STEP = 16,    /* columns of one matrix instruction */
    TILE_MMA4_BYTES = TILE_MMA_ROWS * TILE_MMA_COLUMNS / 2,
    TILE_MMA8_BYTES = TILE_MMA_ROWS * TILE_MMA_COLUMNS
};

/* The tile of a code, of rows of `columns` padded columns. */
OPAQ_DEVICE static inline int64_t tile_mma_index(int64_t row, int64_t column, int64_t columns) {
    return row / TILE_MMA_ROWS * (columns / TILE_MMA_COLUMNS) + column / TILE_MMA_COLUMNS;
}

/* The thread (0 to 127) of four warps that holds a code. */
OPAQ_DEVICE static inline int64_t tile_mma_thread(int64_t row, int64_t column) {
    return row % TILE_MMA_ROWS / 16 * 32 + row % 8 * 4 + column % 8 / 2;
}

OPAQ_DEVICE static inline int tile_mma_fragment(int64_t row, int64_t column) {
    return (int)(column % 16 / 8 * 2 + row % 16 / 8);
}

/* ---- 4-bit codes: a thread has 16 bytes of a tile, one little-endian word for each step ---- */

/* The index of the 32-bit word that holds a code. */
OPAQ_DEVICE static inline int64_t tile_mma4_word(int64_t row, int64_t column, int64_t columns) {
    return tile_mma_index(row, column, columns) * (TILE_MMA4_BYTES / 4) + tile_mma_thread(row, column) * 4 +
           column % TILE_MMA_COLUMNS / TILE_MMA_STEP;
}

/* The bits of a code in its word. A kernel makes a pair of bf16, 2^-126 times the values, from bits 15, 8, 7 and 6 of
 * each half: fragment 0 is there, fragment 1 after a rotation of the word to the right by 3, fragment 2 by 6, and
 * fragment 3 after (word & 0x001B001B) * 0x1084. `bit` is that of the code: 0 the mantissa, 1 and 2 the exponent, 3
 * the sign. */
OPAQ_DEVICE static inline int tile_mma4_bit(int fragment, int half, int bit) {
    const int rotated = bit == 3 ? 15 : 6 + bit;
    const int last = bit == 0 ? 4 : bit == 3 ? 3 : bit - 1;
    return fragment == 3 ? 16 * half + last : (16 * half + rotated + 3 * fragment) % 32;
}

OPAQ_DEVICE static inline uint32_t tile_mma4_get(uint32_t word, int fragment, int half) {
    uint32_t code = 0;
    for (int bit = 0; bit < 4; ++bit) {
        code |= (word >> tile_mma4_bit(fragment, half, bit) & 1u) << bit;
    }
    return code;
}

OPAQ_DEVICE static inline uint32_t tile_mma4_put(uint32_t word, int fragment, int half, uint32_t code) {
    for (int bit = 0; bit < 4; ++bit) {
        const int to = tile_mma4_bit(fragment, half, bit);
        word = (word & ~(1u << to)) | (code >> bit & 1u) << to;
    }
    return word;
}

/* ---- 8-bit codes: a thread has 16 bytes of each half of a tile (32 columns): two steps of two words ---- */

/* The byte offset of a code. The two words of a step hold columns 0 to 7 and 8 to 15; in a word the codes of row g are
 * bytes 1 and 3, at the top of the halves, those of row g + 8 bytes 0 and 2. */
OPAQ_DEVICE static inline int64_t tile_mma8_offset(int64_t row, int64_t column, int64_t columns) {
    return tile_mma_index(row, column, columns) * TILE_MMA8_BYTES +
           column % TILE_MMA_COLUMNS / 32 * (TILE_MMA8_BYTES / 2) + tile_mma_thread(row, column) * 16 +
           column % 32 / 16 * 8 + column % 16 / 8 * 4 + column % 2 * 2 + (1 - row % 16 / 8);
}

/* ---- block scales of one byte ---- */

/* The byte offset of a block's scale. `blocks`: those of a padded row; `per_tile`: those of 64 columns, 4 (nvfp4) or 2
 * (mxfp8, mxfp4). The scales of rows g and g + 8 of a warp lie together: two blocks take a word, whose bytes are (g,
 * odd block), (g, even block), (g + 8, odd), (g + 8, even). */
OPAQ_DEVICE static inline int64_t tile_mma_scale_offset(int64_t row, int64_t block, int64_t blocks,
                                                        int64_t per_tile) {
    const int64_t tile = row / TILE_MMA_ROWS * (blocks / per_tile) + block / per_tile;
    const int64_t pair = row % TILE_MMA_ROWS / 16 * 8 + row % 8;
    return tile * (TILE_MMA_ROWS * per_tile) + pair * (2 * per_tile) + block % per_tile / 2 * 4 +
           row % 16 / 8 * 2 + (1 - block % 2);
}

#endif
