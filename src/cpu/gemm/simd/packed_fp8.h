/* cpu/gemm/simd/packed_fp8.h: products with 8-bit tiles, written once. Depends on packed.h.
 *
 * The file that includes it defines, for its instruction set:
 *     LANES             floats in a vector; a strip is 2 LANES rows of a tile
 *     DIRECT_SUMS       vectors of sums that fit the registers while codes are decoded
 *     SWEEP_TOKENS      rows of x (tokens) that are multiplied with a decoded strip at once, with two sums each
 *     DIRECT_BLOCKS     blocks of a tile that are multiplied in parallel if there is one token, because the sums of one
 *                       block would wait for each other
 *     DIRECT_TILES      tiles, likewise
 *     PREPARED_BYTES    bytes that block_prepare() writes for a block, may be 0
 *     NUMBER_COLUMNS    columns of which a number of x holds the values: 2 of bfloat16. Then also the type `number`,
 *                       numbers_of(), vector_product() and vector_dot(). Without it x is float32.
 *     struct vector     and arithmetic on it
 *     struct decoder    with `shift`: values are decoded as 2^-shift times what they are
 *     block_prepare(), pair_load(), pair_column()    a tile's codes; two columns of a strip; one of them as floats, or
 *                                                    both as bfloat16
 *     scales_arrange(), sums_restore()               to the order of a tile's rows in vectors, and back
 * and gets run_packed_fp8(). It may define scales_write() itself, and HAS_SCALES_WRITE.
 *
 * An element of y, with float32: 32 columns in order with one fused multiply-add each; such sums in order with one
 * fused multiply-add each, which multiplies with the block's scale; one product with the factors. So it depends
 * neither on M nor on the instruction set, and its error is at most (min(K, 32) + ceil(K / 32) + 2) 2^-24 sum |x w|. */
#ifndef OPAQ_CPU_GEMM_SIMD_PACKED_FP8_H
#define OPAQ_CPU_GEMM_SIMD_PACKED_FP8_H

#include <stddef.h>
#include <string.h>

#include "base/checked.h"
#include "base/float_bits.h"
#include "cpu/gemm/packed.h"
#include "format/element_codec.h"

#ifndef NUMBER_COLUMNS
#define NUMBER_COLUMNS 1
#endif

/* Before a loop over sums, which are in registers only if it is unrolled. Clang unrolls it by itself. */
#if defined(__clang__)
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum {
    BLOCK = TILE8_COLUMNS,
    NUMBERS = BLOCK / NUMBER_COLUMNS, /* of a block */
    PAIR_NUMBERS = 2 / NUMBER_COLUMNS,
    STRIP_ROWS = 2 * LANES,
    STRIPS = TILE8_ROWS / STRIP_ROWS, /* in a tile */
    /* few tokens */
    DIRECT_TOKENS = PACKED_FEW_ROWS,
    STREAMS = 4, /* tiles read in parallel, one block of each in turn */
    /* many tokens */
    SWEEP_BLOCKS = 4, /* decoded at a time: 16 KiB of a tile */
    SWEEP_NUMBERS = SWEEP_BLOCKS * NUMBERS,
    SWEEP_TILES = 8,
    SWEEP_LIMIT = 512 /* tokens whose sums are kept across all columns */
};

#if NUMBER_COLUMNS == 1
typedef float number;

static inline const number *numbers_of(const struct packed_rows *x) { return x->f32; }

static inline struct vector vector_product(struct vector w, struct vector x) { return vector_multiply(w, x); }

static inline struct vector vector_dot(struct vector w, struct vector x, struct vector sum) {
    return vector_fma(w, x, sum);
}
#endif

/* ---- scales of a block ---- */

/* What a block's sums are multiplied with, rows as arranged: factor, and in rare cases `before` first, where a product
 * of the two would not be a normal number. */
struct block_scale {
    _Alignas(64) float factor[TILE8_ROWS];
    float before[TILE8_ROWS];
    bool has_before;
};

/* The scale times 2^shift as before * factor. */
static void scale_split(float scale, int shift, float *before, float *factor) {
    const float power = float_from_bits((uint32_t)(127 + shift) << 23);
    const bool is_small = shift == 0 && float_to_bits(scale) << 1 < 0x01000000u; /* 0 too */
    const bool is_large = !is_small && !float_is_finite(scale * power);
    *before = is_small ? 0x1p-24f : is_large ? power : 1.0f;
    *factor = is_small ? scale * 0x1p24f : is_large ? scale : scale * power;
}

static void scale_load_rare(const uint8_t *codes, int shift, struct block_scale *to) {
    for (int row = 0; row < TILE8_ROWS; ++row) {
        scale_split(decode_e8m0(codes[row]), shift, &to->before[row], &to->factor[row]);
    }
    to->has_before = true;
}

#if !defined(HAS_SCALES_WRITE)
/* Arranged scales as floats, times 2^shift; says whether all are normal numbers. */
PACKED_INLINE bool scales_write(const uint8_t *arranged, int shift, float *to) {
    uint32_t bits[TILE8_ROWS];
    uint32_t rare = 0;
    for (int row = 0; row < TILE8_ROWS; ++row) {
        const uint32_t exponent = arranged[row] + (uint32_t)shift;
        rare |= exponent - 1 > 253 ? 1 : 0;
        bits[row] = exponent << 23;
    }
    memcpy(to, bits, sizeof bits);
    return rare == 0;
}
#endif

PACKED_INLINE void scale_load_e8m0(const uint8_t *codes, int shift, struct block_scale *to) {
    uint8_t arranged[TILE8_ROWS];
    scales_arrange(codes, arranged);
    to->has_before = false;
    if (!scales_write(arranged, shift, to->factor)) {
        scale_load_rare(arranged, shift, to);
    }
}

static void scale_load_same(float scale, int shift, struct block_scale *to) {
    float before;
    float factor;
    scale_split(scale, shift, &before, &factor);
    to->has_before = before != 1.0f;
    for (int row = 0; row < TILE8_ROWS; ++row) {
        to->factor[row] = factor;
        to->before[row] = before;
    }
}

/* Whether scales from this block on may differ from those of the blocks before. */
PACKED_INLINE bool scale_changes(const struct packed_weight *weight, int64_t block) {
    return block == 0 || weight->format == PACKED_MXFP8 ||
           (weight->format == PACKED_FP8BLK && block * BLOCK % 128 == 0);
}

PACKED_INLINE void scale_load(const struct packed_weight *weight, int64_t tile, int64_t block, int shift,
                              struct block_scale *to) {
    if (weight->format == PACKED_MXFP8) {
        const int64_t at = tile_scale_offset(tile * TILE8_ROWS, block, weight->tile_columns, TILE8_ROWS);
        __builtin_prefetch(weight->scale + at + 8 * TILE8_ROWS, 0, 2);
        scale_load_e8m0(weight->scale + at, shift, to);
    } else if (weight->format == PACKED_FP8BLK) {
        const int64_t at = tile * TILE8_ROWS / 128 * weight->block_scale_step + block * BLOCK / 128;
        scale_load_same(weight->block_scale[at], shift, to);
    } else {
        scale_load_same(1.0f, shift, to);
    }
}

/* Sets the factor of rows with an e4m3 NaN code, which decoding reads as a number, to NaN: their results are NaN in
 * any case, so the factor may stay. */
static void scale_mark_nan(const uint8_t *codes, struct block_scale *to) {
    for (int i = 0; i < TILE8_BYTES; ++i) {
        if ((codes[i] & 0x7F) == 0x7F) {
            to->factor[i % TILE8_PAIR_BYTES / 2] = float_nan();
        }
    }
}

/* ---- what both ways share ---- */

static const uint8_t *tile_codes(const struct packed_weight *weight, int64_t tile, int64_t block) {
    return weight->data + (tile * weight->tile_columns + block) * TILE8_BYTES;
}

/* total[t * step] += sum[t] * scale, for a strip from `row` on. */
PACKED_INLINE void add_block(struct vector (*sum)[2], int tokens, const struct block_scale *scale, int row,
                             float *total, int step) {
    if (scale->has_before) {
        UNROLL
        for (int t = 0; t < tokens; ++t) {
            sum[t][0] = vector_multiply(sum[t][0], vector_load(scale->before + row));
            sum[t][1] = vector_multiply(sum[t][1], vector_load(scale->before + row + LANES));
        }
    }
    const struct vector low = vector_load(scale->factor + row);
    const struct vector high = vector_load(scale->factor + row + LANES);
    UNROLL
    for (int t = 0; t < tokens; ++t) {
        float *const place = total + t * step + row;
        vector_store(place, vector_fma(sum[t][0], low, vector_load(place)));
        vector_store(place + LANES, vector_fma(sum[t][1], high, vector_load(place + LANES)));
    }
}

/* A contiguous copy of rows of x: in x itself they may all map to the same few cache sets. */
PACKED_INLINE void copy_numbers(const number *x, int64_t x_step, int tokens, int count, number *to, int step) {
    for (int t = 0; t < tokens; ++t) {
        for (int k = 0; k < count; k += LANES) {
            vector_store((float *)(void *)(to + t * step + k),
                         vector_load_any((const float *)(const void *)(x + t * x_step + k)));
        }
    }
}

/* From one row of x to the next. */
PACKED_INLINE int64_t numbers_step(const struct packed_rows *x) { return x->padded / NUMBER_COLUMNS; }

/* A tile's sums, total[token * step + row], into y. */
static void write_tile(const struct packed_weight *weight, int64_t tile, const float *total, int64_t step,
                       int64_t tokens, float *y, int64_t y_step) {
    float factor[TILE8_ROWS];
    _Alignas(64) float restored[TILE8_ROWS];
    const int64_t first = tile * TILE8_ROWS;
    const int rows = (int)min_int64(TILE8_ROWS, weight->rows - first);
    for (int row = 0; row < rows; ++row) {
        factor[row] = weight->factor * (weight->row_factor == NULL ? 1.0f : weight->row_factor[first + row]);
    }
    for (int64_t m = 0; m < tokens; ++m) {
        sums_restore(total + m * step, restored);
        for (int row = 0; row < rows; ++row) {
            y[m * y_step + first + row] = restored[row] * factor[row];
        }
    }
}

/* ---- few tokens: codes are decoded into registers ---- */

enum { DIRECT_PARTS = DIRECT_TILES * DIRECT_BLOCKS };
_Static_assert(DIRECT_TILES == 1 || DIRECT_BLOCKS == 1, "tiles or blocks are multiplied side by side");

struct direct_panel {
    struct block_scale scale[STREAMS][DIRECT_BLOCKS];
    _Alignas(64) number x[DIRECT_TOKENS][DIRECT_BLOCKS * NUMBERS];
    float total[STREAMS][DIRECT_TOKENS][TILE8_ROWS];
    uint8_t prepared[DIRECT_PARTS][PREPARED_BYTES + 64];
};

/* A block of a tile: its codes, as block_prepare() left them, and what they are multiplied with and added to. */
struct direct_part {
    const uint8_t *codes;
    const number *x; /* DIRECT_BLOCKS * NUMBERS from one token to the next */
    const struct block_scale *scale;
    float *total;
};

/* Strips [strip, strip + strips), counted through the parts, times tokens [token, token + tokens). All counts are
 * constants where this is called, so that every loop except that over the columns is unrolled. */
PACKED_INLINE void direct_strips(const struct decoder *decoder, const struct direct_part *part, int strip,
                                 int strips, int token, int tokens) {
    const bool is_shared = DIRECT_TILES > 1 && tokens == 1; /* the numbers of x, by all tiles */
    struct vector sum[DIRECT_SUMS / 2][2];
    UNROLL
    for (int i = 0; i < strips * tokens; ++i) {
        sum[i][0] = sum[i][1] = vector_zero();
    }
    for (int pair = 0; pair < BLOCK / 2; ++pair) {
        struct vector factor[PAIR_NUMBERS];
        for (int c = 0; c < PAIR_NUMBERS && is_shared; ++c) {
            factor[c] = vector_broadcast(part->x + PAIR_NUMBERS * pair + c);
        }
        UNROLL
        for (int i = 0; i < strips; ++i) {
            const struct direct_part *const from = &part[(strip + i) / STRIPS];
            const struct codes_pair codes = pair_load(decoder, from->codes, pair, (strip + i) % STRIPS);
            UNROLL
            for (int c = 0; c < PAIR_NUMBERS; ++c) {
                struct vector column[2];
                pair_column(&codes, c, column);
                UNROLL
                for (int t = 0; t < tokens; ++t) {
                    struct vector *const to = sum[i * tokens + t];
                    if (is_shared) {
                        to[0] = vector_dot(column[0], factor[c], to[0]);
                        to[1] = vector_dot(column[1], factor[c], to[1]);
                    } else {
                        const number *const x =
                            from->x + (token + t) * DIRECT_BLOCKS * NUMBERS + PAIR_NUMBERS * pair + c;
                        vector_add_product(&to[0], column[0], x);
                        vector_add_product(&to[1], column[1], x);
                    }
                }
            }
        }
    }
    UNROLL
    for (int i = 0; i < strips; ++i) {
        const struct direct_part *const to = &part[(strip + i) / STRIPS];
        add_block(sum + i * tokens, tokens, to->scale, (strip + i) % STRIPS * STRIP_ROWS,
                  to->total + token * TILE8_ROWS, TILE8_ROWS);
    }
}

/* Tokens that share a decoded code; the others follow. */
PACKED_INLINE int direct_first(int tokens) { return tokens > DIRECT_SUMS / 2 ? (tokens + 1) / 2 : tokens; }

/* Strips that are processed in parallel. */
PACKED_INLINE int direct_most(int parts, int tokens) {
    const int most = DIRECT_SUMS / 2 / direct_first(tokens);
    return most >= parts * STRIPS ? parts * STRIPS : most >= STRIPS ? STRIPS : 1;
}

/* `blocks` blocks from `block` on of `tiles` tiles from the panel's i-th on; its first is `tile`. */
PACKED_INLINE void direct_blocks(const struct packed_weight *weight, const struct decoder *decoder,
                                 int64_t tile, int tiles, int64_t block, int blocks, int tokens,
                                 struct direct_panel *panel, int i) {
    const int first = direct_first(tokens);
    const int strips = direct_most(tiles * blocks, tokens);
    struct direct_part part[DIRECT_PARTS];
    for (int p = 0; p < tiles * blocks; ++p) {
        const int t = p / blocks;
        const int b = p % blocks;
        const uint8_t *const codes = tile_codes(weight, tile + i + t, block + b);
        struct block_scale *const scale = &panel->scale[i + t][b];
        part[p] = (struct direct_part){NULL, panel->x[0] + b * NUMBERS, scale, panel->total[i + t][0]};
        if (block_prepare(decoder, codes, panel->prepared[p], &part[p].codes)) {
            scale_mark_nan(codes, scale);
        }
    }
    for (int strip = 0; strip < tiles * blocks * STRIPS; strip += strips) {
        direct_strips(decoder, part, strip, strips, 0, first);
        if (first < tokens) {
            direct_strips(decoder, part, strip, strips, first, tokens - first);
        }
    }
}

PACKED_INLINE void run_direct(const struct packed_weight *weight, const struct packed_rows *x, int64_t begin,
                              int64_t end, float *y, int64_t y_step, struct direct_panel *panel, int tokens) {
    const struct decoder decoder = decoder_make(weight->is_e5m2);
    const int at_once = tokens == 1 ? DIRECT_BLOCKS : 1;
    const int side = tokens == 1 ? DIRECT_TILES : 1;
    for (int64_t tile = begin; tile < end; tile += STREAMS) {
        const int tiles = (int)min_int64(STREAMS, end - tile);
        memset(panel->total, 0, sizeof panel->total);
        for (int64_t block = 0; block < weight->tile_columns; block += at_once) {
            const int blocks = (int)min_int64(at_once, weight->tile_columns - block);
            copy_numbers(numbers_of(x) + block * NUMBERS, numbers_step(x), tokens, blocks * NUMBERS,
                         panel->x[0], DIRECT_BLOCKS * NUMBERS);
            for (int i = 0; i < tiles * blocks && scale_changes(weight, block); ++i) {
                scale_load(weight, tile + i / blocks, block + i % blocks, decoder.shift,
                           &panel->scale[i / blocks][i % blocks]);
            }
            int i = 0;
            for (; blocks == at_once && tiles - i >= side; i += side) {
                direct_blocks(weight, &decoder, tile, side, block, at_once, tokens, panel, i);
            }
            for (; i < tiles; ++i) { /* fewer tiles, or a block */
                direct_blocks(weight, &decoder, tile, 1, block, 1, tokens, panel, i);
            }
        }
        for (int i = 0; i < tiles; ++i) {
            write_tile(weight, tile + i, panel->total[i][0], TILE8_ROWS, tokens, y, y_step);
        }
    }
}

/* ---- many tokens: weights are decoded, and tokens swept over them ---- */

struct sweep_panel {
    struct block_scale scale[SWEEP_TILES][SWEEP_BLOCKS];
    _Alignas(64) float weight[SWEEP_TILES][SWEEP_NUMBERS][TILE8_ROWS]; /* or pairs of bfloat16 */
    number x[SWEEP_TOKENS][SWEEP_NUMBERS];
    float total[SWEEP_LIMIT][SWEEP_TILES * TILE8_ROWS];
    uint8_t prepared[PREPARED_BYTES + 64];
};

static void sweep_decode(const struct decoder *decoder, const uint8_t *codes, struct sweep_panel *panel,
                         int tile, int block) {
    const uint8_t *prepared;
    if (block_prepare(decoder, codes, panel->prepared, &prepared)) {
        scale_mark_nan(codes, &panel->scale[tile][block]);
    }
    for (int pair = 0; pair < BLOCK / 2; ++pair) {
        for (int strip = 0; strip < STRIPS; ++strip) {
            const struct codes_pair two = pair_load(decoder, prepared, pair, strip);
            for (int c = 0; c < PAIR_NUMBERS; ++c) {
                float *const to =
                    panel->weight[tile][block * NUMBERS + PAIR_NUMBERS * pair + c] + strip * STRIP_ROWS;
                struct vector column[2];
                pair_column(&two, c, column);
                vector_store(to, column[0]);
                vector_store(to + LANES, column[1]);
            }
        }
    }
}

/* A strip, from `row` on, times `tokens` tokens; a constant, as above. */
PACKED_INLINE void sweep_strip(const float (*weight)[TILE8_ROWS], int row, const struct block_scale *scale,
                               int blocks, const number *x, int tokens, float *total) {
    for (int block = 0; block < blocks; ++block) {
        struct vector sum[SWEEP_TOKENS][2];
        int k = block * NUMBERS;
        struct vector low = vector_load(weight[k] + row);
        struct vector high = vector_load(weight[k] + row + LANES);
        UNROLL
        for (int t = 0; t < tokens; ++t) {
            const struct vector factor = vector_broadcast(x + t * SWEEP_NUMBERS + k);
            sum[t][0] = vector_product(low, factor);
            sum[t][1] = vector_product(high, factor);
        }
        while (++k < (block + 1) * NUMBERS) {
            low = vector_load(weight[k] + row);
            high = vector_load(weight[k] + row + LANES);
            UNROLL
            for (int t = 0; t < tokens; ++t) {
                const struct vector factor = vector_broadcast(x + t * SWEEP_NUMBERS + k);
                sum[t][0] = vector_dot(low, factor, sum[t][0]);
                sum[t][1] = vector_dot(high, factor, sum[t][1]);
            }
        }
        add_block(sum, tokens, &scale[block], row, total, SWEEP_TILES * TILE8_ROWS);
        __asm__ volatile("" : : : "memory"); /* else the compiler keeps totals on the stack as well */
    }
}

/* Tokens from `token` on, of which `left` remain; `x` is at the first. */
PACKED_INLINE void sweep_tokens(struct sweep_panel *panel, int tiles, int blocks, const number *x,
                                int64_t x_step, int64_t token, int tokens, int64_t left) {
    const int next = (int)min_int64(left - tokens, SWEEP_TOKENS);
    copy_numbers(x, x_step, tokens, blocks * NUMBERS, panel->x[0], SWEEP_NUMBERS);
    for (int tile = 0; tile < tiles; ++tile) {
        for (int t = 0; t < next; ++t) { /* the tile-th part of what is copied next */
            __builtin_prefetch(x + (tokens + t) * x_step + tile * (SWEEP_NUMBERS / SWEEP_TILES));
        }
        for (int row = 0; row < TILE8_ROWS; row += STRIP_ROWS) {
            sweep_strip((const float(*)[TILE8_ROWS])panel->weight[tile], row, panel->scale[tile], blocks,
                        panel->x[0], tokens, panel->total[token] + tile * TILE8_ROWS);
        }
    }
}

/* Multiplies as many tokens as there are sums for, or fewer; returns their number. */
static int sweep_some(struct sweep_panel *panel, int tiles, int blocks, const number *x, int64_t x_step,
                      int64_t token, int64_t left) {
    if (left >= SWEEP_TOKENS) {
        sweep_tokens(panel, tiles, blocks, x, x_step, token, SWEEP_TOKENS, left);
        return SWEEP_TOKENS;
    }
    if (left >= SWEEP_TOKENS / 2) {
        sweep_tokens(panel, tiles, blocks, x, x_step, token, SWEEP_TOKENS / 2, left);
        return SWEEP_TOKENS / 2;
    }
    if (left >= 2) {
        sweep_tokens(panel, tiles, blocks, x, x_step, token, 2, left);
        return 2;
    }
    sweep_tokens(panel, tiles, blocks, x, x_step, token, 1, left);
    return 1;
}

/* Tiles [tile, tile + tiles) times tokens [token, token + tokens). */
static void sweep_part(const struct packed_weight *weight, const struct decoder *decoder,
                       const struct packed_rows *x, int64_t tile, int tiles, int64_t token, int64_t tokens,
                       float *y, int64_t y_step, struct sweep_panel *panel) {
    memset(panel->total, 0, (size_t)tokens * sizeof panel->total[0]);
    for (int64_t block = 0; block < weight->tile_columns; block += SWEEP_BLOCKS) {
        const int blocks = (int)min_int64(SWEEP_BLOCKS, weight->tile_columns - block);
        for (int i = 0; i < tiles; ++i) {
            for (int b = 0; b < blocks; ++b) {
                scale_load(weight, tile + i, block + b, decoder->shift, &panel->scale[i][b]);
                sweep_decode(decoder, tile_codes(weight, tile + i, block + b), panel, i, b);
            }
        }
        for (int64_t t = 0; t < tokens;) {
            const number *const from = numbers_of(x) + (token + t) * numbers_step(x) + block * NUMBERS;
            t += sweep_some(panel, tiles, blocks, from, numbers_step(x), t, tokens - t);
        }
    }
    for (int i = 0; i < tiles; ++i) {
        write_tile(weight, tile + i, panel->total[0] + i * TILE8_ROWS, SWEEP_TILES * TILE8_ROWS, tokens,
                   y + token * y_step, y_step);
    }
}

static void run_sweep(const struct packed_weight *weight, const struct packed_rows *x, int64_t begin,
                      int64_t end, float *y, int64_t y_step, struct sweep_panel *panel) {
    const struct decoder decoder = decoder_make(weight->is_e5m2);
    const int64_t part = ceil_div(x->rows, ceil_div(x->rows, SWEEP_LIMIT));
    for (int64_t token = 0; token < x->rows; token += part) {
        for (int64_t tile = begin; tile < end; tile += SWEEP_TILES) {
            sweep_part(weight, &decoder, x, tile, (int)min_int64(SWEEP_TILES, end - tile), token,
                       min_int64(part, x->rows - token), y, y_step, panel);
        }
    }
}

/* ---- either ---- */

union fp8_panel {
    struct direct_panel direct;
    struct sweep_panel sweep;
};

static void run_packed_fp8(const struct packed_weight *weight, const struct packed_rows *x, int64_t begin,
                           int64_t end, float *y, int64_t y_step, void *panel) {
    switch (x->rows) {
    case 1:
        run_direct(weight, x, begin, end, y, y_step, panel, 1);
        break;
    case 2:
        run_direct(weight, x, begin, end, y, y_step, panel, 2);
        break;
    case 3:
        run_direct(weight, x, begin, end, y, y_step, panel, 3);
        break;
    case 4:
        run_direct(weight, x, begin, end, y, y_step, panel, 4);
        break;
    case 5:
        run_direct(weight, x, begin, end, y, y_step, panel, 5);
        break;
    case 6:
        run_direct(weight, x, begin, end, y, y_step, panel, 6);
        break;
    case 7:
        run_direct(weight, x, begin, end, y, y_step, panel, 7);
        break;
    case DIRECT_TOKENS:
        run_direct(weight, x, begin, end, y, y_step, panel, DIRECT_TOKENS);
        break;
    default:
        run_sweep(weight, x, begin, end, y, y_step, panel);
    }
}

#define KERNEL(format, precision, isa)                                                      \
    {                                                                                       \
        "packed_" #format "_" #precision "_" #isa, run_packed_fp8, sizeof(union fp8_panel), \
            sizeof(struct direct_panel), STREAMS                                            \
    }

#endif
