/* cpu/gemm/neon/packed_neon.h: products with 4-bit tiles in NEON, written once. Depends on packed.h.
 *
 * A vector's lanes are 4 rows of a tile, so a tile is four vectors high and no sum crosses lanes. 16 bytes of a tile
 * are 4 rows of two quads, of 4 columns each: one in the low nibbles, one in the high ones. The file that includes it
 * defines, for a type of numbers:
 *     number                 the type of x
 *     numbers_of()           the address of x's numbers
 *     struct quad            values of 4 columns and 4 rows of the weight
 *     quad_decode()          makes a quad of codes, one in each byte, row by row
 *     struct factor          4 columns of a row of x
 *     factor_load()
 *     struct sum             4 sums, of one row of x; sum_zero(), sum_add(), and sum_value(), which makes floats of it
 *     IS_FLOAT               sums are of 16 columns, else of a block of the weight
 *     FEW_SUMS, SWEEP_SUMS   sums that fit the registers beside codes that are decoded, and beside decoded weights
 * and gets run_packed_neon(). There are two ways through the weight, which give the same bits:
 *     up to 8 rows of x   the weight is read once, some tiles in parallel, and decoded in registers
 *     more                some columns of a few tiles are decoded into the panel, then multiplied with all rows of x
 * The order of all sums is that of the reference, and so are the bits. Scales that are subnormal floats need no special
 * case: these processors multiply them as fast as others. */
#ifndef OPAQ_CPU_GEMM_NEON_PACKED_NEON_H
#define OPAQ_CPU_GEMM_NEON_PACKED_NEON_H

#include <arm_neon.h>
#include <stddef.h>
#include <string.h>

#include "base/checked.h"
#include "cpu/gemm/packed.h"

enum {
    LANES = 4,
    VECTORS = TILE4_ROWS / LANES,
    QUADS = 4, /* in a group of 16 columns */
    GROUPS = TILE4_COLUMNS / TILE4_GROUP,
    STREAMS = 4, /* tiles of different rows that are read in parallel */
    FEW = PACKED_FEW_ROWS,
    SWEEP_ROWS = 4,  /* of x that are multiplied with decoded weights together */
    SWEEP_TILES = 8, /* of different rows, decoded together: x is loaded from memory once for all of them */
    PIECE_TILES = 4, /* along the columns, decoded together */
    PIECE_COLUMNS = PIECE_TILES * TILE4_COLUMNS,
    PIECE_GROUPS = PIECE_TILES * GROUPS,
    SWEEP_LIMIT = 256 /* rows of x whose sums are kept across all columns */
};

/* ---- scales of the weight ---- */

/* 8 scales of e4m3. A code at the place of a half's bits is its value times 2^-8, subnormal or not. */
PACKED_INLINE void scales_from_e4m3(int8x8_t codes, float *to) {
    const uint16x8_t magnitude = vdupq_n_u16(0x7F);
    const uint16x8_t code = vreinterpretq_u16_s16(vmovl_s8(codes));
    const uint16x8_t nan = vceqq_u16(vandq_u16(code, magnitude), magnitude);
    const uint16x8_t moved = vandq_u16(vshlq_n_u16(code, 7), vdupq_n_u16(0xBFFF));
    const float16x8_t half = vreinterpretq_f16_u16(vorrq_u16(moved, nan));
    vst1q_f32(to, vmulq_n_f32(vcvt_f32_f16(vget_low_f16(half)), 256.0f));
    vst1q_f32(to + LANES, vmulq_n_f32(vcvt_high_f32_f16(half), 256.0f));
}

/* 4 scales of e8m0: 0 is 2^-127, which is subnormal, 255 is NaN. */
PACKED_INLINE void scales_from_e8m0(uint32x4_t code, float *to) {
    const uint32x4_t bits = vmaxq_u32(vshlq_n_u32(code, 23), vdupq_n_u32(0x00400000));
    const uint32x4_t nan = vceqq_u32(code, vdupq_n_u32(255));
    vst1q_f32(to, vreinterpretq_f32_u32(vorrq_u32(bits, nan)));
}

/* Scales of `blocks` blocks to floats, [block][16]. */
PACKED_INLINE void scales_decode(enum packed_format format, const uint8_t *codes, int64_t blocks, float *to) {
    for (int64_t i = 0; i < blocks * TILE4_ROWS; i += 2 * LANES) {
        const uint8x8_t code = vld1_u8(codes + i);
        if (format == PACKED_NVFP4) {
            scales_from_e4m3(vreinterpret_s8_u8(code), to + i);
        } else {
            const uint16x8_t wide = vmovl_u8(code);
            scales_from_e8m0(vmovl_u16(vget_low_u16(wide)), to + i);
            scales_from_e8m0(vmovl_high_u16(wide), to + i + LANES);
        }
    }
}

/* ---- rows of x ---- */

/* A contiguous copy of some columns of some rows: in x itself they may all map to the same few cache sets. */
struct columns {
    number x[PIECE_COLUMNS];
    float scale[PIECE_GROUPS]; /* for each block of the weight */
};

/* Whether x has scales for blocks. */
PACKED_INLINE bool has_block_scales(const struct packed_rows *x) {
    return x->precision == PACKED_FAST32 || x->precision == PACKED_CODES;
}

/* Rows [m, m + rows), `count` columns from `column` on. */
static void columns_load(const struct packed_weight *weight, const struct packed_rows *x, int64_t m,
                         int64_t rows, int64_t column, int64_t count, struct columns *to) {
    const int64_t per = packed_block_columns(weight->format);
    const int64_t scale_per = x->precision == PACKED_FAST32 ? 32 : per;
    const float unit = x->precision == PACKED_CODES ? 0.5f : 1.0f; /* codes are stored times 2 */
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t at = (m + i) * x->padded + column;
        memcpy(to[i].x, numbers_of(x) + at, (size_t)count * sizeof(number));
        for (int64_t b = 0; has_block_scales(x) && b < count / per; ++b) {
            const bool is_there = column + b * per < weight->columns; /* else x may have no scale */
            to[i].scale[b] = is_there ? unit * x->block_scale[(at + b * per) / scale_per] : 0.0f;
        }
    }
}

/* ---- products ---- */

/* Some groups of 16 columns of a tile, and some rows of x. */
struct product {
    const uint8_t *codes;     /* if they are not decoded */
    const struct quad *quads; /* [group][quad][vector], if they are */
    int groups;
    int block_groups;        /* in a block of the weight: 1 or 2 */
    const float *scale;      /* the weight's, [block][16] */
    const struct columns *x; /* [rows] */
    bool has_block_scales;   /* of x */
    float *total;            /* [rows][total_step], 16 of each are added to */
    int64_t total_step;
};

/* A quad of a group, of the rows of a vector. */
PACKED_INLINE struct quad quad_from_codes(const uint8_t *codes, int64_t group, int quad, int vector) {
    const uint8x16_t both = vld1q_u8(codes + group * TILE4_GROUP_BYTES + quad / 2 * 64 + vector * 16);
    return quad_decode(quad % 2 == 0 ? vandq_u8(both, vdupq_n_u8(15)) : vshrq_n_u8(both, 4));
}

/* Sums of groups [begin, end), of `vectors` vectors from `first` on. */
PACKED_INLINE void add_groups(bool is_decoded, int rows, int vectors, int first, const struct product *p,
                              int64_t begin, int64_t end, struct sum (*sum)[VECTORS]) {
    for (int64_t g = begin; g < end; ++g) {
        PACKED_UNROLL
        for (int q = 0; q < QUADS; ++q) {
            struct factor factor[FEW];
            PACKED_UNROLL
            for (int m = 0; m < rows; ++m) {
                factor[m] = factor_load(p->x[m].x + g * TILE4_GROUP + q * 4);
            }
            PACKED_UNROLL
            for (int v = 0; v < vectors; ++v) {
                const struct quad quad = is_decoded ? p->quads[(g * QUADS + q) * VECTORS + first + v]
                                                    : quad_from_codes(p->codes, g, q, first + v);
                PACKED_UNROLL
                for (int m = 0; m < rows; ++m) {
                    sum[m][v] = sum_add(sum[m][v], &quad, factor[m]);
                }
            }
            __asm__ volatile("" : : : "memory"); /* else compilers load too early and run out of registers */
        }
    }
}

/* Adds one block, or one group of floats: its sums times the scales, to the totals. */
PACKED_INLINE void add_block(bool is_decoded, int rows, int vectors, int first, const struct product *p,
                             int64_t begin, int64_t end) {
    const int64_t block = p->block_groups == 1 ? begin : begin / 2;
    struct sum sum[FEW][VECTORS];
    float32x4_t value[FEW][VECTORS];
    PACKED_UNROLL
    for (int i = 0; i < rows * vectors; ++i) {
        sum[i / vectors][i % vectors] = sum_zero();
    }
    add_groups(is_decoded, rows, vectors, first, p, begin, end, sum);
    PACKED_UNROLL
    for (int i = 0; i < rows * vectors; ++i) {
        value[i / vectors][i % vectors] = sum_value(sum[i / vectors][i % vectors]);
    }
    if (!IS_FLOAT && p->has_block_scales) {
        PACKED_UNROLL
        for (int i = 0; i < rows * vectors; ++i) {
            float32x4_t *const one = &value[i / vectors][i % vectors];
            *one = vmulq_n_f32(*one, p->x[i / vectors].scale[block]);
        }
    }
    PACKED_UNROLL
    for (int v = 0; v < vectors; ++v) {
        const float32x4_t scale = vld1q_f32(p->scale + block * TILE4_ROWS + (first + v) * LANES);
        PACKED_UNROLL
        for (int m = 0; m < rows; ++m) {
            float *const place = p->total + m * p->total_step + (first + v) * LANES;
            vst1q_f32(place, vfmaq_f32(vld1q_f32(place), value[m][v], scale));
        }
    }
}

/* The product is a copy, so that compilers know that it does not change. */
PACKED_INLINE void multiply(bool is_decoded, int rows, const struct product p) {
    const int sums = is_decoded ? SWEEP_SUMS : FEW_SUMS;
    const int vectors = rows * VECTORS <= sums ? VECTORS : rows * 2 <= sums ? 2 : 1;
    const int64_t step = IS_FLOAT ? 1 : p.block_groups;
    for (int64_t begin = 0; begin < p.groups; begin += step) {
        PACKED_UNROLL
        for (int first = 0; first < VECTORS; first += vectors) {
            add_block(is_decoded, rows, vectors, first, &p, begin, begin + step);
        }
    }
}

/* Separate functions, so that registers are allocated for each number of rows. */
static void few_1(const struct product *p) { multiply(false, 1, *p); }
static void few_2(const struct product *p) { multiply(false, 2, *p); }
static void few_3(const struct product *p) { multiply(false, 3, *p); }
static void few_4(const struct product *p) { multiply(false, 4, *p); }
static void few_5(const struct product *p) { multiply(false, 5, *p); }
static void few_6(const struct product *p) { multiply(false, 6, *p); }
static void few_7(const struct product *p) { multiply(false, 7, *p); }
static void few_8(const struct product *p) { multiply(false, 8, *p); }

static void sweep_1(const struct product *p) { multiply(true, 1, *p); }
static void sweep_2(const struct product *p) { multiply(true, 2, *p); }
static void sweep_3(const struct product *p) { multiply(true, 3, *p); }
static void sweep_4(const struct product *p) { multiply(true, 4, *p); }

/* By the rows of x less one. */
static void (*const multiply_few[FEW])(const struct product *p) = {few_1, few_2, few_3, few_4,
                                                                   few_5, few_6, few_7, few_8};
static void (*const multiply_decoded[SWEEP_ROWS])(const struct product *p) = {sweep_1, sweep_2, sweep_3,
                                                                              sweep_4};

/* A tile's sums, total[m * step + row], into y. */
static void write_tile(const struct packed_weight *weight, const struct packed_rows *x, int64_t tile,
                       const float *total, int64_t step, int64_t m, int64_t rows, float *y, int64_t y_step) {
    const int64_t n = tile * TILE4_ROWS;
    const int64_t count = min_int64(TILE4_ROWS, weight->rows - n);
    const bool has_scale = x->precision == PACKED_NEAR || x->precision == PACKED_FAST;
    float factor[TILE4_ROWS];
    for (int64_t i = 0; i < count; ++i) {
        factor[i] = weight->factor * (weight->row_factor == NULL ? 1.0f : weight->row_factor[n + i]);
    }
    for (int64_t r = 0; r < rows; ++r) {
        const float scale = has_scale ? x->row_scale[m + r] : 1.0f;
        for (int64_t i = 0; i < count; ++i) {
            y[(m + r) * y_step + n + i] = total[r * step + i] * factor[i] * scale;
        }
    }
}

static const uint8_t *tile_codes(const struct packed_weight *weight, int64_t tile, int64_t tile_column) {
    return weight->data + (tile * weight->tile_columns + tile_column) * TILE4_BYTES;
}

static const uint8_t *tile_scales(const struct packed_weight *weight, int64_t tile, int64_t tile_column) {
    const int64_t blocks = TILE4_COLUMNS / packed_block_columns(weight->format);
    return weight->scale + (tile * weight->tile_columns + tile_column) * blocks * TILE4_ROWS;
}

/* ---- few rows of x ---- */

static void run_few(const struct packed_weight *weight, const struct packed_rows *x, int64_t begin, int64_t end,
                    float *y, int64_t y_step) {
    const int per = (int)packed_block_columns(weight->format);
    float total[STREAMS][FEW * TILE4_ROWS];
    float scale[GROUPS * TILE4_ROWS];
    struct columns columns[FEW];
    struct product product = {.groups = GROUPS,
                              .block_groups = per / TILE4_GROUP,
                              .scale = scale,
                              .x = columns,
                              .has_block_scales = has_block_scales(x),
                              .total_step = TILE4_ROWS};
    for (int64_t tile = begin; tile < end; tile += STREAMS) {
        const int64_t tiles = min_int64(STREAMS, end - tile);
        memset(total, 0, sizeof total);
        for (int64_t c = 0; c < weight->tile_columns; ++c) {
            columns_load(weight, x, 0, x->rows, c * TILE4_COLUMNS, TILE4_COLUMNS, columns);
            for (int64_t i = 0; i < tiles; ++i) {
                scales_decode(weight->format, tile_scales(weight, tile + i, c), TILE4_COLUMNS / per, scale);
                product.codes = tile_codes(weight, tile + i, c);
                product.total = total[i];
                multiply_few[x->rows - 1](&product);
            }
        }
        for (int64_t i = 0; i < tiles; ++i) {
            write_tile(weight, x, tile + i, total[i], TILE4_ROWS, 0, x->rows, y, y_step);
        }
    }
}

/* ---- many rows of x ---- */

struct panel {
    _Alignas(64) struct quad quads[SWEEP_TILES][PIECE_GROUPS * QUADS * VECTORS];
    float scale[SWEEP_TILES][PIECE_GROUPS * TILE4_ROWS];
    float total[SWEEP_LIMIT][SWEEP_TILES * TILE4_ROWS];
    struct columns columns[SWEEP_ROWS];
};

/* `count` tiles along the columns from tile column c on, of each of `tiles` tiles. */
static void decode_piece(const struct packed_weight *weight, int64_t tile, int64_t tiles, int64_t c,
                         int64_t count, struct panel *panel) {
    for (int64_t i = 0; i < tiles; ++i) {
        const uint8_t *const codes = tile_codes(weight, tile + i, c);
        scales_decode(weight->format, tile_scales(weight, tile + i, c),
                      count * TILE4_COLUMNS / packed_block_columns(weight->format), panel->scale[i]);
        struct quad *to = panel->quads[i];
        for (int64_t g = 0; g < count * GROUPS; ++g) {
            for (int q = 0; q < QUADS; ++q) {
                for (int v = 0; v < VECTORS; ++v) {
                    *to++ = quad_from_codes(codes, g, q, v);
                }
            }
        }
    }
}

/* Multiplies `rows` rows of x, from that of `total` on, with the decoded weights. */
static void sweep(const struct packed_weight *weight, const struct packed_rows *x, int64_t rows, int64_t tiles,
                  int groups, struct panel *panel, float *total) {
    struct product product = {.groups = groups,
                              .block_groups = (int)packed_block_columns(weight->format) / TILE4_GROUP,
                              .x = panel->columns,
                              .has_block_scales = has_block_scales(x),
                              .total_step = SWEEP_TILES * TILE4_ROWS};
    for (int64_t i = 0; i < tiles; ++i) {
        product.quads = panel->quads[i];
        product.scale = panel->scale[i];
        product.total = total + i * TILE4_ROWS;
        multiply_decoded[rows - 1](&product);
    }
}

/* Rows [m, m + rows) of x, at most SWEEP_LIMIT, times at most SWEEP_TILES tiles. */
static void run_part(const struct packed_weight *weight, const struct packed_rows *x, int64_t tile,
                     int64_t tiles, int64_t m, int64_t rows, float *y, int64_t y_step, struct panel *panel) {
    memset(panel->total, 0, (size_t)rows * sizeof panel->total[0]);
    for (int64_t c = 0; c < weight->tile_columns; c += PIECE_TILES) {
        const int64_t count = min_int64(PIECE_TILES, weight->tile_columns - c);
        decode_piece(weight, tile, tiles, c, count, panel);
        for (int64_t r = 0; r < rows; r += SWEEP_ROWS) {
            const int64_t some = min_int64(SWEEP_ROWS, rows - r);
            columns_load(weight, x, m + r, some, c * TILE4_COLUMNS, count * TILE4_COLUMNS, panel->columns);
            sweep(weight, x, some, tiles, (int)count * GROUPS, panel, panel->total[r]);
        }
    }
    for (int64_t i = 0; i < tiles; ++i) {
        write_tile(weight, x, tile + i, panel->total[0] + i * TILE4_ROWS, SWEEP_TILES * TILE4_ROWS, m, rows, y,
                   y_step);
    }
}

static void run_many(const struct packed_weight *weight, const struct packed_rows *x, int64_t begin,
                     int64_t end, float *y, int64_t y_step, struct panel *panel) {
    for (int64_t m = 0; m < x->rows; m += SWEEP_LIMIT) {
        for (int64_t tile = begin; tile < end; tile += SWEEP_TILES) {
            run_part(weight, x, tile, min_int64(SWEEP_TILES, end - tile), m,
                     min_int64(SWEEP_LIMIT, x->rows - m), y, y_step, panel);
        }
    }
}

/* ---- either ---- */

static void run_packed_neon(const struct packed_weight *weight, const struct packed_rows *x, int64_t begin,
                            int64_t end, float *y, int64_t y_step, void *panel) {
    if (x->rows > FEW) {
        run_many(weight, x, begin, end, y, y_step, panel);
    } else if (x->rows > 0) {
        run_few(weight, x, begin, end, y, y_step);
    }
}

#define KERNEL(format, precision, isa) \
    { "packed_" #format "_" #precision "_" #isa, run_packed_neon, (int64_t)sizeof(struct panel), 0, STREAMS }

#endif
