/* cpu/quant/simd/random_bytes_vec.h: the random bytes of a row of x, for copies along its rows and down its columns,
 * in vectors. Depends on stochastic_vec.h. */
#ifndef OPAQ_CPU_QUANT_SIMD_RANDOM_BYTES_VEC_H
#define OPAQ_CPU_QUANT_SIMD_RANDOM_BYTES_VEC_H

#include "cpu/quant/simd/specialize_vec.h"
#include "cpu/quant/simd/stochastic_vec.h"

/* Columns of x whose bytes are kept at a time: of one row along rows, of 16 down columns. */
enum { RANDOM_ALONG = 2048, RANDOM_DOWN = 512, RANDOM_PITCH = RANDOM_DOWN + 64 };

struct random_bytes {
    bool is_used; /* else codes are rounded to the nearest, and there is nothing here */
    bool is_down; /* blocks run down columns of x */
    struct random_source source;
    int64_t row; /* down columns: the first row and column whose bytes are kept */
    int64_t c;
    int64_t columns;
    uint8_t bytes[16 * RANDOM_PITCH];
};

_Static_assert(16 * RANDOM_PITCH >= RANDOM_ALONG + 16 * FLOATS, "there is room for what is written beyond");

/* For a copy whose operand is x, or, `is_across`, x transposed. */
static inline void random_bytes_begin(struct random_bytes *random, const struct quant_job *job,
                                      const struct quant_copy *copy, bool is_across) {
    random->is_used = (job->spec.options & OPAQ_STOCHASTIC) != 0;
    if (random->is_used) {
        random->source = random_source(job, copy);
        random->is_down = is_across != random->source.is_mirrored;
        random->row = -1;
        memset(random->bytes, 0, sizeof random->bytes); /* the bytes after the last column are read too */
    }
}

/* Those of 16 rows from `row` on: a block runs down a column. */
static void random_down(struct random_bytes *random, int64_t row, int64_t c, int64_t columns) {
    for (int64_t i = 0; i < columns; i += FLOATS) {
        const uint64_t step = (uint64_t)random->source.row_blocks;
        const struct random_words words =
            random_blocks(&random->source, (uint64_t)(c + i) * step + (uint64_t)row / 16, step);
        for (int k = 0; k < 16; ++k) {
            store_low_bytes(random->bytes + k * RANDOM_PITCH + i, words.word[k / 4] >> (k % 4 * 8));
        }
    }
}

static inline int64_t random_columns(const struct random_bytes *random) {
    return random->is_down ? RANDOM_DOWN : RANDOM_ALONG;
}

/* The bytes of `columns` elements of row `row` of x from column c on, up to random_columns(); along rows c is a
 * multiple of 16. Behind them there is room to read the rest of a few vectors. */
VEC_OUTLINE const uint8_t *random_bytes(struct random_bytes *random, int64_t row, int64_t c, int64_t columns) {
    if (!random->is_down) {
        random_row(&random->source, row, c / 16, ceil_div(columns, 16), random->bytes);
        return random->bytes;
    }
    if (random->row != row / 16 * 16 || random->c != c || random->columns != columns) {
        random->row = row / 16 * 16;
        random->c = c;
        random->columns = columns;
        random_down(random, random->row, c, columns);
    }
    return random->bytes + row % 16 * RANDOM_PITCH;
}

#endif
