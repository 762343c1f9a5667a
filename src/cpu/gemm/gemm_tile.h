/* cpu/gemm/gemm_tile.h: the tile kernel, written once. Depends on gemm_table.h.
 *
 * The file that includes it defines TILE_LANES (floats in a vector register), TILE_ROWS and TILE_VECTORS (the tile is
 * TILE_ROWS rows by TILE_VECTORS vectors, and its sums must fit the registers), and gets tile_run(). Vectors lie
 * along the columns of c, so every sum has a lane of its own and its order does not depend on the lanes. A product is
 * added without being rounded first; TILE_FMA(factor, column, sum), if it is defined, does that for a vector. */
#ifndef OPAQ_CPU_GEMM_GEMM_TILE_H
#define OPAQ_CPU_GEMM_GEMM_TILE_H

#include <math.h>
#include <string.h>

#include "cpu/gemm/gemm_table.h"

enum {
    TILE_COLUMNS = TILE_LANES * TILE_VECTORS,
    TILE_FEWER_ROWS = 4 /* of a smaller tile for the remaining rows; the last ones are processed one by one */
};
_Static_assert(GEMM_TILE_COLUMN_LIMIT % TILE_COLUMNS == 0, "panels are cut into whole tiles");
_Static_assert(TILE_ROWS - TILE_FEWER_ROWS >= 0, "sums are kept for TILE_ROWS rows");

struct tile_vector {
    float lane __attribute__((vector_size(TILE_LANES * sizeof(float))));
};

/* sum + factor * column, rounded once. */
#if !defined(TILE_FMA)
static inline struct tile_vector tile_fma(struct tile_vector sum, float factor, struct tile_vector column) {
    for (int i = 0; i < TILE_LANES; ++i) {
        sum.lane[i] = fmaf(factor, column.lane[i], sum.lane[i]);
    }
    return sum;
}
#else
static inline __attribute__((always_inline)) struct tile_vector tile_fma(struct tile_vector sum, float factor,
                                                                         struct tile_vector column) {
    sum.lane = TILE_FMA(factor, column.lane, sum.lane);
    return sum;
}
#endif

static inline struct tile_vector tile_load(const float *from) {
    struct tile_vector vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

/* `rows` is a constant where this is called, so with -O3 every loop except that over k is unrolled, and the sums stay
 * in registers. */
static inline __attribute__((always_inline)) void tile_multiply(const float *a, int rows, const float *b,
                                                                int depth, float *total, int64_t total_step) {
    struct tile_vector sum[TILE_ROWS][TILE_VECTORS];
    memset(sum, 0, sizeof sum);
    for (int k = 0; k < depth; ++k) {
        struct tile_vector column[TILE_VECTORS];
        for (int v = 0; v < TILE_VECTORS; ++v) {
            column[v] = tile_load(b + k * TILE_COLUMNS + v * TILE_LANES);
        }
        for (int row = 0; row < rows; ++row) {
            const float factor = a[row * GEMM_BLOCK + k];
            for (int v = 0; v < TILE_VECTORS; ++v) {
                sum[row][v] = tile_fma(sum[row][v], factor, column[v]);
            }
        }
    }
    for (int row = 0; row < rows; ++row) {
        for (int v = 0; v < TILE_VECTORS; ++v) {
            float *const place = total + row * total_step + v * TILE_LANES;
            struct tile_vector value = tile_load(place);
            value.lane += sum[row][v].lane;
            memcpy(place, &value, sizeof value);
        }
    }
}

static void tile_run(const float *a, int rows, const float *b, int depth, float *total, int64_t total_step) {
    int row = 0;
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS) {
        tile_multiply(a + row * GEMM_BLOCK, TILE_ROWS, b, depth, total + row * total_step, total_step);
    }
    for (; row + TILE_FEWER_ROWS <= rows; row += TILE_FEWER_ROWS) {
        tile_multiply(a + row * GEMM_BLOCK, TILE_FEWER_ROWS, b, depth, total + row * total_step, total_step);
    }
    for (; row < rows; ++row) {
        tile_multiply(a + row * GEMM_BLOCK, 1, b, depth, total + row * total_step, total_step);
    }
}

#endif
