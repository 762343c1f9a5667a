/* packed_operands.h: tiled weights and prepared rows, made in the same way for the tests and the benchmark of
 * products with tiled weights: plain codes and scales, tiled by the offsets of format/tile.h. Depends on gemm:
 * the product has no public function, so these two programs use internal ones. */
#ifndef PACKED_OPERANDS_H
#define PACKED_OPERANDS_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "cpu/gemm/packed.h"
#include "cpu/gemm/packed_prepare.h"
#include "cpu/gemm/packed_rows.h"

/* Kinds of contents; the numbers are equal on every machine. */
enum packed_fill {
    PACKED_FILL_USUAL,   /* any finite codes, scales within a few powers of two of 1 */
    PACKED_FILL_WIDE,    /* scales of the whole range for which sums stay finite; outliers in x */
    PACKED_FILL_SMALLEST /* the smallest scales, subnormal as floats or in their format; few of the weights are
                          * nonzero */
};
#define PACKED_FILL_COUNT 3

/* A weight in row order, and tiled. */
struct packed_case_weight {
    struct packed_weight weight; /* points to the tiled bytes below */
    int per;                     /* columns of a block */
    int64_t blocks;              /* along K */
    uint8_t *code;               /* [N][K], one code per byte */
    uint8_t *code_scale;         /* [N][blocks], or NULL */
    float *block_scale;          /* FP8BLK: [ceil(N/128)][ceil(K/128)], or NULL */
    float *row_factor;           /* [N] or NULL */
    uint8_t *tiled;
    uint8_t *tiled_scale;
};

/* Rows of x in one precision, in memory of exactly their size. */
struct packed_case_rows {
    struct packed_rows rows;
    int per; /* columns of a scale in a block */
    float *f32;
    uint16_t *bf16;
    int16_t *q16;
    int8_t *q8;
    int32_t *correction;
    float *row_scale;
    float *block_scale;
};

/* Aligned to 64 and of exactly that size, so that AddressSanitizer detects an access beyond it; initialized to
 * 0xA5. */
static inline void *packed_allocate(int64_t bytes) {
    void *memory;
    if (posix_memalign(&memory, 64, bytes > 0 ? (size_t)bytes : 1) != 0) {
        fprintf(stderr, "packed_allocate: no memory\n");
        exit(1);
    }
    memset(memory, 0xA5, (size_t)bytes);
    return memory;
}

/* A float truncated to a bfloat16, and the reverse. */
static inline uint16_t packed_cut(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static inline float packed_widened(uint16_t bf16) {
    const uint32_t bits = (uint32_t)bf16 << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t packed_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

/* From -1 to 1, approximately normal. */
static inline float packed_random_float(uint64_t *state) {
    const uint32_t a = packed_random(state);
    return ((float)(a & 0x3FF) + (float)(a >> 10 & 0x3FF) + (float)(a >> 20 & 0x3FF) - 1534.5f) / 1534.5f;
}

/* ---- weights ---- */

static inline uint8_t packed_random_code(const struct packed_weight *w, enum packed_fill fill,
                                         uint64_t *state) {
    const uint32_t a = packed_random(state);
    if (packed_is_4_bit(w->format)) {
        const bool is_kept = fill != PACKED_FILL_SMALLEST || (a >> 8) % 7 == 0;
        return is_kept ? a & 15 : 0;
    }
    const uint32_t magnitude = a & 0x7F;
    const uint32_t largest = w->is_e5m2 ? (fill == PACKED_FILL_USUAL ? 0x43 : 0x5F) : 0x7E;
    const uint32_t kept = fill == PACKED_FILL_SMALLEST ? magnitude % 9 : magnitude;
    return (uint8_t)((kept > largest ? kept % largest : kept) | (a & 0x80));
}

static inline uint8_t packed_random_scale(const struct packed_weight *w, enum packed_fill fill,
                                          uint64_t *state) {
    const uint32_t a = packed_random(state);
    if (w->format == PACKED_NVFP4) {
        return (uint8_t)(fill == PACKED_FILL_USUAL  ? 0x28 + a % 40
                         : fill == PACKED_FILL_WIDE ? a % 0x7F
                                                    : a % 9);
    }
    return (uint8_t)(fill == PACKED_FILL_USUAL  ? 120 + a % 12
                     : fill == PACKED_FILL_WIDE ? a % (w->format == PACKED_MXFP4 ? 225 : 205)
                                                : a % 4);
}

/* Tiles codes and scales; to be repeated after a test has changed some. */
static inline void packed_case_tile(struct packed_case_weight *w) {
    const struct packed_weight *weight = &w->weight;
    const bool is_4_bit = packed_is_4_bit(weight->format);
    const int64_t tile_rows = is_4_bit ? TILE4_ROWS : TILE8_ROWS;
    const int64_t columns = weight->tile_columns * (is_4_bit ? TILE4_COLUMNS : TILE8_COLUMNS);
    const int64_t tiles = ceil_div(weight->rows, tile_rows) * weight->tile_columns;
    memset(w->tiled, 0, (size_t)(tiles * (is_4_bit ? TILE4_BYTES : TILE8_BYTES)));
    for (int64_t n = 0; n < weight->rows; ++n) {
        for (int64_t k = 0; k < weight->columns; ++k) {
            int shift = 0;
            const int64_t at = is_4_bit ? tile4_offset(n, k, columns, &shift) : tile8_offset(n, k, columns);
            w->tiled[at] = (uint8_t)(w->tiled[at] | w->code[n * weight->columns + k] << shift);
        }
    }
    if (w->code_scale != NULL) {
        const int64_t blocks = columns / w->per;
        memset(w->tiled_scale, 0, (size_t)(ceil_div(weight->rows, tile_rows) * tile_rows * blocks));
        for (int64_t n = 0; n < weight->rows; ++n) {
            for (int64_t b = 0; b < w->blocks; ++b) {
                w->tiled_scale[tile_scale_offset(n, b, blocks, tile_rows)] = w->code_scale[n * w->blocks + b];
            }
        }
    }
}

static inline void packed_case_weight_make(struct packed_case_weight *w, enum packed_format format,
                                           bool is_e5m2, int64_t rows, int64_t columns, enum packed_fill fill,
                                           uint64_t seed) {
    const bool is_4_bit = packed_is_4_bit(format);
    const int64_t tile_rows = is_4_bit ? TILE4_ROWS : TILE8_ROWS;
    const int64_t tile_columns = is_4_bit ? TILE4_COLUMNS : TILE8_COLUMNS;
    const int64_t row_tiles = ceil_div(rows, tile_rows);
    uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
    memset(w, 0, sizeof *w);
    w->weight.format = format;
    w->weight.is_e5m2 = is_e5m2;
    w->weight.rows = rows;
    w->weight.columns = columns;
    w->weight.tile_columns = ceil_div(columns, tile_columns);
    w->weight.factor = 0.8125f;
    w->per = format == PACKED_NVFP4 ? 16 : format == PACKED_FP8BLK ? 128 : 32;
    w->blocks = ceil_div(columns, w->per);
    w->code = packed_allocate(rows * columns);
    for (int64_t i = 0; i < rows * columns; ++i) {
        w->code[i] = packed_random_code(&w->weight, fill, &state);
    }
    w->tiled = packed_allocate(row_tiles * w->weight.tile_columns * (is_4_bit ? TILE4_BYTES : TILE8_BYTES));
    w->weight.data = w->tiled;
    if (format <= PACKED_MXFP8) {
        w->code_scale = packed_allocate(rows * w->blocks);
        for (int64_t i = 0; i < rows * w->blocks; ++i) {
            w->code_scale[i] = packed_random_scale(&w->weight, fill, &state);
        }
        w->tiled_scale =
            packed_allocate(row_tiles * tile_rows * w->weight.tile_columns * (tile_columns / w->per));
        w->weight.scale = w->tiled_scale;
    } else if (format == PACKED_FP8BLK) {
        const int64_t count = ceil_div(rows, 128) * w->blocks;
        w->block_scale = packed_allocate(count * (int64_t)sizeof(float));
        for (int64_t i = 0; i < count; ++i) {
            w->block_scale[i] = 0.01f + fabsf(packed_random_float(&state));
        }
        w->weight.block_scale = w->block_scale;
        w->weight.block_scale_step = w->blocks;
    }
    if (seed % 2 == 1) {
        w->row_factor = packed_allocate(rows * (int64_t)sizeof(float));
        for (int64_t i = 0; i < rows; ++i) {
            w->row_factor[i] = packed_random_float(&state) + 1.5f;
        }
        w->weight.row_factor = w->row_factor;
    }
    packed_case_tile(w);
}

static inline void packed_case_weight_free(struct packed_case_weight *w) {
    free(w->code);
    free(w->code_scale);
    free(w->block_scale);
    free(w->row_factor);
    free(w->tiled);
    free(w->tiled_scale);
}

/* ---- rows of x ---- */

/* The sums of q8; to be repeated after a test has changed some. */
static inline void packed_case_correct(struct packed_case_rows *x) {
    for (int64_t i = 0; i < x->rows.rows * (x->rows.padded / 16); ++i) {
        int32_t sum = 0;
        for (int j = 0; j < 16; ++j) {
            sum += x->q8[i * 16 + j];
        }
        x->correction[i] = -12 * sum;
    }
}

/* Some integers have their extreme values. `columns` is K of the weight. */
static inline void packed_case_rows_make(struct packed_case_rows *x, enum packed_precision precision,
                                         enum packed_format format, int64_t rows, int64_t columns,
                                         enum packed_fill fill, uint64_t seed) {
    const int64_t padded = round_up(columns, packed_is_4_bit(format) ? TILE4_COLUMNS : TILE8_COLUMNS);
    uint64_t state = seed * 0xD1342543DE82EF95u + 1;
    memset(x, 0, sizeof *x);
    x->rows.precision = precision;
    x->rows.rows = rows;
    x->rows.padded = padded;
    x->per = precision == PACKED_CODES && format == PACKED_NVFP4 ? 16 : 32;
    const int limit = precision == PACKED_NEAR ? 32767 : 127;
    static const int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    if (precision == PACKED_EXACT) {
        x->f32 = packed_allocate(rows * padded * (int64_t)sizeof(float));
    } else if (precision == PACKED_BF16) {
        x->bf16 = packed_allocate(rows * padded * (int64_t)sizeof(uint16_t));
    } else if (precision == PACKED_NEAR) {
        x->q16 = packed_allocate(rows * padded * (int64_t)sizeof(int16_t));
    } else {
        x->q8 = packed_allocate(rows * padded);
    }
    for (int64_t i = 0; i < rows * padded; ++i) {
        const bool is_padding = i % padded >= columns;
        const float value = is_padding ? 0.0f : packed_random_float(&state);
        const uint32_t a = packed_random(&state);
        const int extreme = a % 11 == 0 ? limit : a % 11 == 1 ? -limit : (int)lrintf(value * (float)limit);
        const int integer = is_padding ? 0 : fill == PACKED_FILL_WIDE ? extreme : (int)lrintf(value * 100.0f);
        const float wide = fill == PACKED_FILL_WIDE ? ldexpf(value, (int)(a % 21) - 10) : value;
        if (precision == PACKED_EXACT) {
            x->f32[i] = wide;
        } else if (precision == PACKED_BF16) {
            x->bf16[i] = packed_cut(wide);
        } else if (precision == PACKED_NEAR) {
            x->q16[i] = (int16_t)integer;
        } else if (precision == PACKED_CODES) {
            x->q8[i] = is_padding ? 0 : values[a & 15];
        } else {
            x->q8[i] = (int8_t)integer;
        }
    }
    if (x->q8 != NULL) {
        x->correction = packed_allocate(rows * (padded / 16) * (int64_t)sizeof(int32_t));
        packed_case_correct(x);
    }
    if (precision == PACKED_NEAR || precision == PACKED_FAST) {
        x->row_scale = packed_allocate(rows * (int64_t)sizeof(float));
        for (int64_t i = 0; i < rows; ++i) {
            x->row_scale[i] = 0.001f + fabsf(packed_random_float(&state));
        }
    } else if (precision != PACKED_EXACT && precision != PACKED_BF16) {
        x->block_scale = packed_allocate(rows * (padded / x->per) * (int64_t)sizeof(float));
        for (int64_t i = 0; i < rows * (padded / x->per); ++i) {
            x->block_scale[i] = 0.001f + fabsf(packed_random_float(&state));
        }
    }
    x->rows.f32 = x->f32;
    x->rows.bf16 = x->bf16;
    x->rows.q16 = x->q16;
    x->rows.q8 = x->q8;
    x->rows.correction = x->correction;
    x->rows.row_scale = x->row_scale;
    x->rows.block_scale = x->block_scale;
}

static inline void packed_case_rows_free(struct packed_case_rows *x) {
    free(x->f32);
    free(x->bf16);
    free(x->q16);
    free(x->q8);
    free(x->correction);
    free(x->row_scale);
    free(x->block_scale);
}

#endif
