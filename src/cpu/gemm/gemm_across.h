/* cpu/gemm/gemm_across.h: converts operands to what tile kernels read, if b is read across the rows of its copy or two
 * steps are processed at once. Depends on gemm_table.h and backend/quant_job.h. */
#ifndef OPAQ_CPU_GEMM_GEMM_ACROSS_H
#define OPAQ_CPU_GEMM_GEMM_ACROSS_H

#include <string.h>

#include "backend/quant_job.h"
#include "cpu/gemm/gemm_decode.h"
#include "cpu/gemm/gemm_table.h"

/* Adjacent tiles, filled step by step. */
struct across_target {
    int width, tile_step, tiles;
    float *to;
    const float *first; /* the first step of a pair, kept until the second one */
};

/* Callers pass a constant `width` where speed matters. */
static inline __attribute__((always_inline)) void across_copy(const struct across_target *target, int width,
                                                              int step, const float *values) {
    float *to = target->to + step * width;
    for (int tile = 0; tile < target->tiles; ++tile, to += target->tile_step) {
        memcpy(to, values + tile * width, (size_t)width * sizeof *to);
    }
}

/* GEMM_ACROSS values of one step, as gemm_decode_across gives them. */
static inline void across_take(void *argument, int step, const float *values) {
    const struct across_target *target = argument;
    if (step * target->width >= target->tile_step) { /* zeros after an odd number of steps */
        return;
    }
    if (target->width == GEMM_TILE_COLUMN_LIMIT) {
        across_copy(target, GEMM_TILE_COLUMN_LIMIT, step, values);
    } else {
        across_copy(target, target->width, step, values);
    }
}

/* Two numbers that are exact in bf16 in one float. */
static inline void pair_values(const float *restrict first, const float *restrict second, int n,
                               float *restrict to) {
    for (int i = 0; i < n; ++i) {
        uint32_t bits[2];
        memcpy(&bits[0], &first[i], sizeof bits[0]);
        memcpy(&bits[1], &second[i], sizeof bits[1]);
        const uint32_t pair = (bits[0] & 0xFFFF0000u) | bits[1] >> 16;
        memcpy(&to[i], &pair, sizeof pair);
    }
}

/* The same for two steps. */
static inline void across_take_pair(void *argument, int step, const float *values) {
    struct across_target *target = argument;
    if (step % 2 == 0) {
        target->first = values;
        return;
    }
    float pairs[GEMM_ACROSS];
    pair_values(target->first, values, GEMM_ACROSS, pairs);
    across_take(target, step / 2, pairs);
}

/* Contiguous elements. Returns the number processed. */
static inline int pair_neighbours(const uint16_t *restrict from, int pairs, float *restrict to) {
    for (int i = 0; i < pairs; ++i) {
        const uint32_t pair = (uint32_t)from[2 * i] << 16 | from[2 * i + 1];
        memcpy(&to[i], &pair, sizeof pair);
    }
    return 2 * pairs;
}

/* Rows of a matrix of bf16, columns [k, k + n), two to a float; rows of GEMM_BLOCK floats in `to`. */
static inline void pairs_of_rows(const struct quant_matrix *a, int64_t row, int rows, int64_t k, int n,
                                 float *to) {
    for (int i = 0; i < rows; ++i) {
        const uint16_t *const from = (const uint16_t *)a->data + (row + i) * a->row_step + k * a->column_step;
        int j = a->column_step == 1 ? pair_neighbours(from, n / 2, to + i * GEMM_BLOCK) : 0;
        for (; j < n; j += 2) {
            const uint32_t second = j + 1 < n ? from[(j + 1) * a->column_step] : 0u;
            const uint32_t pair = (uint32_t)from[j * a->column_step] << 16 | second;
            memcpy(&to[i * GEMM_BLOCK + j / 2], &pair, sizeof pair);
        }
    }
}

#endif
