/* cpu/gemm/transpose.h: four rows of floats to columns. Depends on gemm_table.h. */
#ifndef OPAQ_CPU_GEMM_TRANSPOSE_H
#define OPAQ_CPU_GEMM_TRANSPOSE_H

#include <string.h>

#include "cpu/gemm/gemm_table.h"

enum { TRANSPOSE_SIZE = 4 };

struct transpose_vector {
    float lane __attribute__((vector_size(TRANSPOSE_SIZE * sizeof(float))));
};

static inline struct transpose_vector transpose_load(const float *from) {
    struct transpose_vector vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

/* a0 b0 a1 b1, and a2 b2 a3 b3; compilers make one instruction of it. */
static inline struct transpose_vector zip_low(struct transpose_vector a, struct transpose_vector b) {
    return (struct transpose_vector){{a.lane[0], b.lane[0], a.lane[1], b.lane[1]}};
}

static inline struct transpose_vector zip_high(struct transpose_vector a, struct transpose_vector b) {
    return (struct transpose_vector){{a.lane[2], b.lane[2], a.lane[3], b.lane[3]}};
}

/* to[k * step + j] = rows[j * GEMM_BLOCK + k] for k below n and j below TRANSPOSE_SIZE. */
static inline void transpose_rows(const float *rows, int n, float *to, int step) {
    int k = 0;
    for (; k + TRANSPOSE_SIZE <= n; k += TRANSPOSE_SIZE) {
        const struct transpose_vector row0 = transpose_load(rows + k);
        const struct transpose_vector row1 = transpose_load(rows + GEMM_BLOCK + k);
        const struct transpose_vector row2 = transpose_load(rows + 2 * GEMM_BLOCK + k);
        const struct transpose_vector row3 = transpose_load(rows + 3 * GEMM_BLOCK + k);
        const struct transpose_vector even_low = zip_low(row0, row2);
        const struct transpose_vector even_high = zip_high(row0, row2);
        const struct transpose_vector odd_low = zip_low(row1, row3);
        const struct transpose_vector odd_high = zip_high(row1, row3);
        const struct transpose_vector columns[TRANSPOSE_SIZE] = {
            zip_low(even_low, odd_low), zip_high(even_low, odd_low), zip_low(even_high, odd_high),
            zip_high(even_high, odd_high)};
        for (int i = 0; i < TRANSPOSE_SIZE; ++i) {
            memcpy(to + (k + i) * step, &columns[i], sizeof columns[i]);
        }
    }
    for (; k < n; ++k) {
        for (int j = 0; j < TRANSPOSE_SIZE; ++j) {
            to[k * step + j] = rows[j * GEMM_BLOCK + k];
        }
    }
}

#endif
