/* cuda/quant/tile_parts.h: a tile of 128 x 128 bf16 values in shared memory, which is read in parts along its rows and along its
 * columns: a tensor is read from memory once for both. Depends on part_codes.h.
 *
 * A row of the tile is 64 words of two values. Words are rotated by a number of places that depends on the row's band of 16, so that
 * the lanes of a warp, which read different bands of a few columns, meet different banks. */
#ifndef OPAQ_CUDA_QUANT_TILE_PARTS_H
#define OPAQ_CUDA_QUANT_TILE_PARTS_H

#include "cuda/quant/part_codes.h"

enum {
    TILE = 128,
    TILE_WORDS = TILE / 2,
    BANDS = TILE / PART,
    ROWS_AT_ONCE = THREADS / BANDS,              /* parts along rows that a block of threads takes at once */
    PASSES = TILE / ROWS_AT_ONCE,                /* for all of them */
    COLUMN_PASSES = BANDS * TILE_WORDS / THREADS /* for all pairs of columns in all bands */
};

struct tile {
    alignas(16) uint32_t word[TILE][TILE_WORDS];
};

static __device__ OPAQ_INLINE int rotation_of(int band) { return band % 2 * 16 + band / 2 * 4; }

/* ---- places ---- */

/* The place of a matrix's tile, which begins at row r and column c. */
struct tile_place {
    int64_t r, c;
};

static __device__ OPAQ_INLINE struct tile_place tile_place_of(uint32_t index, int64_t columns) {
    const uint32_t across = (uint32_t)ceil_div(columns, TILE);
    const uint32_t down = index / across;
    return {(int64_t)down * TILE, (int64_t)(index - down * across) * TILE};
}

static inline int64_t tile_count(const struct quant_matrix *x) {
    return ceil_div(x->rows, TILE) * ceil_div(x->columns, TILE);
}

/* This thread's part along a row, in pass 0 to PASSES - 1. Eight neighbours have the parts of a row. */
static __device__ OPAQ_INLINE int row_of_thread(int pass) {
    return pass * ROWS_AT_ONCE + (int)threadIdx.x / BANDS;
}
static __device__ OPAQ_INLINE int part_of_thread(void) { return (int)threadIdx.x % BANDS; }

/* This thread's part along a column: of two columns, from 2 pair on, in one band. */
struct column_part {
    int band, pair;
};

/* The bands of `LANES` neighbours follow one another: 2 or 8. */
template <int LANES> static __device__ OPAQ_INLINE struct column_part column_part_of_thread(int pass) {
    const int lane = (int)threadIdx.x % WARP;
    const int warp = pass * (THREADS / WARP) + (int)threadIdx.x / WARP;
    const int pairs = WARP / LANES; /* of a warp */
    const int bands = BANDS / LANES;
    return {warp % bands * LANES + lane % LANES, warp / bands * pairs + lane / LANES};
}

/* ---- the tile's memory ---- */

static __device__ OPAQ_INLINE void write_row_part(struct tile *tile, int row, int part,
                                                  const uint32_t words[PART_WORDS]) {
    const int rotation = rotation_of(row / PART);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int at = (part * PART_WORDS + h * 4 + rotation) % TILE_WORDS;
        *(struct part_half *)&tile->word[row][at] = {words[4 * h], words[4 * h + 1], words[4 * h + 2],
                                                     words[4 * h + 3]};
    }
}

static __device__ OPAQ_INLINE void read_row_part(const struct tile *tile, int row, int part,
                                                 uint32_t words[PART_WORDS]) {
    const int rotation = rotation_of(row / PART);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const struct part_half half =
            *(const struct part_half *)&tile->word[row][(part * PART_WORDS + h * 4 + rotation) % TILE_WORDS];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[4 * h + i] = half.word[i];
        }
    }
}

/* The parts of two columns. */
static __device__ OPAQ_INLINE void read_column_parts(const struct tile *tile, struct column_part at,
                                                     uint32_t left[PART_WORDS], uint32_t right[PART_WORDS]) {
    const int column = (at.pair + rotation_of(at.band)) % TILE_WORDS;
#pragma unroll
    for (int i = 0; i < PART_WORDS; ++i) {
        const uint32_t upper = tile->word[at.band * PART + 2 * i][column];
        const uint32_t lower = tile->word[at.band * PART + 2 * i + 1][column];
        left[i] = (upper & 0xFFFFu) | lower << 16;
        right[i] = upper >> 16 | (lower & 0xFFFF0000u);
    }
}

/* The part of x at row `row` and column `column`; zeros outside of x. Its columns are a multiple of 16. */
static __device__ OPAQ_INLINE bool load_row_part(const struct quant_matrix *x, int64_t row, int64_t column,
                                                 uint32_t words[PART_WORDS]) {
    if (row < x->rows && column < x->columns) {
        read_part_words((const uint16_t *)x->data + row * x->row_step + column, words);
        return true;
    }
    clear_part(words);
    return false;
}

#endif
