/* cpu/gemm/x86/packed_fast_avx2.c: 4-bit weights times int8 rows (fast, fast32, codes) with AVX2.
 *
 * vpmaddubsw multiplies unsigned with signed bytes and adds neighbours in int16, which must hold the sum. The weights'
 * values, times 2 and plus 12, are 0 to 24 and x is within -127 to 127, so the four products of a row's dword in each
 * of 4 vectors make at most 4 * 2 * 24 * 127 = 24384: one vpmaddwd for 16 columns brings them to int32, and x's
 * correction takes the 12 away again. For 16 columns, 8 rows and a row of x:
 *     4 vpmaddubsw + 3 vpaddw + vpmaddwd + vpaddd + vcvtdq2ps + vfmadd = 11 instructions for 128 multiplications
 * of which 7 are for the two ports that multiply; vpmaddubsw alone would be 4. */
#include "cpu/gemm/packed.h"

#if defined(__x86_64__)
#include "cpu/gemm/x86/packed_avx2.h"

#define SWEEP_ROWS 2

enum { PIECE_TILES = 16, QUADS = 4 /* of columns in a group of 16 */, ROWS_TOGETHER = 48 };

static const int8_t unsigned_values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* 4 values of a row of x, for all rows of the weight. */
PACKED_INLINE __m256i broadcast4(const int8_t *q) {
    int32_t four;
    __builtin_memcpy(&four, q, sizeof four);
    return _mm256_set1_epi32(four);
}

/* Products are times 2 because of the weights, and times 2 again if x is codes. */
PACKED_INLINE int halvings_of(enum packed_precision precision) { return precision == PACKED_CODES ? 2 : 1; }

/* The same where scales are decoded in registers: those of nvfp4 are left times 2^-8, if that is all. */
PACKED_INLINE int register_halvings(enum packed_format format, enum packed_precision precision) {
    return format == PACKED_NVFP4 && precision == PACKED_FAST ? 8 : halvings_of(precision);
}

/* ---- few rows of x ---- */

/* A group's 16 columns of 8 rows. */
PACKED_INLINE void decode_quads(const uint8_t *codes, __m256i values, __m256i *quad) {
    PACKED_UNROLL
    for (int i = 0; i < 2; ++i) {
        __m256i eight = packed_load(codes + i * 64);
        PACKED_HERE(eight);
        const struct packed_nibbles nibbles = packed_split(eight);
        quad[2 * i] = _mm256_shuffle_epi8(values, nibbles.low);
        quad[2 * i + 1] = _mm256_shuffle_epi8(values, nibbles.high);
    }
}

/* The sums of both halves, plus 12 times that of x. */
PACKED_INLINE void group_sum_of_halves(__m256i quad[PACKED_HALVES][QUADS], const int8_t *q, __m256i *sum) {
    PACKED_UNROLL
    for (int i = 0; i < QUADS; ++i) {
        const __m256i four = broadcast4(q + 4 * i);
        PACKED_UNROLL
        for (int h = 0; h < PACKED_HALVES; ++h) {
            const __m256i product = _mm256_maddubs_epi16(quad[h][i], four);
            sum[h] = i == 0 ? product : _mm256_add_epi16(sum[h], product);
            PACKED_HERE(sum[h]);
        }
    }
    PACKED_UNROLL
    for (int h = 0; h < PACKED_HALVES; ++h) {
        sum[h] = _mm256_madd_epi16(sum[h], _mm256_set1_epi16(1));
    }
}

/* Both halves of a block, which share the loads of x. The totals stay in memory: the weights occupy the
 * registers. */
PACKED_INLINE void step_block_of_halves(enum packed_format format, int halvings, bool has_scale, int rows,
                                        const uint8_t *codes, const struct packed_scales *scales,
                                        const struct packed_few *x, __m256i values, int64_t b,
                                        __m256 (*total)[PACKED_HALVES]) {
    const int groups = format == PACKED_NVFP4 ? 1 : 2;
    const __m256 scale[PACKED_HALVES] = {packed_scale(format, halvings, scales, b, 0),
                                         packed_scale(format, halvings, scales, b, 1)};
    __m256i before[PACKED_FEW][PACKED_HALVES]; /* sums of the first of two groups */
    PACKED_UNROLL
    for (int g = 0; g < groups; ++g) {
        const int64_t group = b * groups + g;
        __m256i quad[PACKED_HALVES][QUADS];
        decode_quads(codes + group * TILE4_GROUP_BYTES, values, quad[0]);
        decode_quads(codes + group * TILE4_GROUP_BYTES + 32, values, quad[1]);
        PACKED_UNROLL
        for (int m = 0; m < rows; ++m) {
            __m256i sum[PACKED_HALVES];
            group_sum_of_halves(quad, x->q8[m] + group * TILE4_GROUP, sum);
            PACKED_UNROLL
            for (int h = 0; h < PACKED_HALVES; ++h) {
                const __m256i other = g == 0 ? _mm256_set1_epi32(x->correction[m][b]) : before[m][h];
                sum[h] = _mm256_add_epi32(sum[h], other);
                if (g + 1 < groups) {
                    before[m][h] = sum[h];
                    continue;
                }
                __m256 value = _mm256_cvtepi32_ps(sum[h]);
                if (has_scale) {
                    value = _mm256_mul_ps(value, _mm256_set1_ps(x->scale[m][b]));
                }
                if (format == PACKED_MXFP4) {
                    value = _mm256_mul_ps(value, packed_lift(scales, b, h));
                }
                total[m][h] = _mm256_fmadd_ps(value, scale[h], total[m][h]);
            }
            __asm__ volatile("" : : : "memory"); /* a row's totals are written before the next row's are read */
        }
    }
}

PACKED_INLINE void step_rows(enum packed_format format, enum packed_precision precision, int rows,
                             const struct packed_step *step) {
    const int halvings = register_halvings(format, precision);
    const bool has_scale = precision != PACKED_FAST;
    const int blocks = format == PACKED_NVFP4 ? 4 : 2;
    const __m256i values = packed_table16(unsigned_values);
    for (int64_t tile = 0; tile < step->tiles; ++tile) {
        const uint8_t *const codes = step->codes + tile * step->codes_step;
        struct packed_scales scales;
        packed_prefetch(step, tile);
        packed_scales_load(format, step->scales + tile * step->scales_step, &scales);
        for (int b = 0; b < blocks; ++b) {
            step_block_of_halves(format, halvings, has_scale, rows, codes, &scales, step->x, values, b,
                                 step->total[tile]);
        }
    }
}

/* ---- one row of x ---- */

/* A group of 16 columns of x. */
struct line_group {
    __m256i four[QUADS];
    __m256i correction;
};

PACKED_INLINE struct line_group line_group_load(const struct packed_rows *x, int64_t column) {
    struct line_group group;
    PACKED_UNROLL
    for (int i = 0; i < QUADS; ++i) {
        group.four[i] = broadcast4(x->q8 + column + 4 * i);
    }
    group.correction = _mm256_set1_epi32(x->correction[column / TILE4_GROUP]);
    return group;
}

/* 8 rows of it. */
PACKED_INLINE __m256i line_group_sum(const struct line_group *x, const uint8_t *codes, __m256i values) {
    __m256i quad[QUADS];
    decode_quads(codes, values, quad);
    const __m256i first =
        _mm256_add_epi16(_mm256_maddubs_epi16(quad[0], x->four[0]), _mm256_maddubs_epi16(quad[1], x->four[1]));
    const __m256i last =
        _mm256_add_epi16(_mm256_maddubs_epi16(quad[2], x->four[2]), _mm256_maddubs_epi16(quad[3], x->four[3]));
    __m256i both = _mm256_add_epi16(first, last);
    PACKED_HERE(both);
    return _mm256_add_epi32(_mm256_madd_epi16(both, _mm256_set1_epi16(1)), x->correction);
}

/* A block of 8 rows, after its first group. `scale_columns`: for which x has a scale, or 0. */
PACKED_INLINE __m256 line_block(enum packed_format format, int halvings, int scale_columns, __m256i sum,
                                const uint8_t *scales, const float *x_scale, __m256 total) {
    __m256 value = _mm256_cvtepi32_ps(sum);
    if (scale_columns != 0) {
        value = _mm256_mul_ps(value, _mm256_broadcast_ss(x_scale));
    }
    return _mm256_fmadd_ps(value, packed_normal_scale(format, halvings, scales), total);
}

/* 64 columns of all tiles. `scale_columns`: for which x has a scale, or 0. */
PACKED_INLINE void line_column(enum packed_format format, int halvings, int scale_columns,
                               const struct packed_line *line, int64_t c, struct packed_ahead ahead,
                               __m256i values, __m256 (*total)[PACKED_HALVES]) {
    const int groups = format == PACKED_NVFP4 ? 1 : 2;
    const uint8_t *codes = line->codes + c * TILE4_BYTES;
    const uint8_t *scales = line->scales + c * (PACKED_GROUPS / groups) * TILE4_ROWS;
    for (int g = 0; g < PACKED_GROUPS; g += groups) {
        const int64_t column = c * TILE4_COLUMNS + g * TILE4_GROUP;
        const float *const x_scale = scale_columns == 0 ? NULL : line->x->block_scale + column / scale_columns;
        const struct line_group first = line_group_load(line->x, column);
        const struct line_group second = groups == 1 ? first : line_group_load(line->x, column + TILE4_GROUP);
        PACKED_UNROLL
        for (int tile = 0; tile < PACKED_STREAMS; ++tile) {
            const uint8_t *const from = codes + tile * line->codes_step;
            packed_prefetch_group(from, ahead);
            if (groups == 2) {
                packed_prefetch_group(from + TILE4_GROUP_BYTES, ahead);
            }
            PACKED_UNROLL
            for (int h = 0; h < PACKED_HALVES; ++h) {
                __m256i sum = line_group_sum(&first, from + h * 32, values);
                if (groups == 2) {
                    sum = _mm256_add_epi32(sum,
                                           line_group_sum(&second, from + TILE4_GROUP_BYTES + h * 32, values));
                }
                total[tile][h] =
                    line_block(format, halvings, scale_columns, sum,
                               scales + tile * line->scales_step + h * PACKED_LANES, x_scale, total[tile][h]);
            }
        }
        codes += groups * TILE4_GROUP_BYTES;
        scales += TILE4_ROWS;
    }
}

PACKED_INLINE int64_t line_all(enum packed_format format, enum packed_precision precision,
                               const struct packed_line *line, int64_t begin, int64_t end) {
    const int halvings = register_halvings(format, precision);
    const int scale_columns = precision == PACKED_FAST                              ? 0
                              : precision == PACKED_CODES && format == PACKED_NVFP4 ? 16
                                                                                    : 32;
    const int64_t scales_bytes = format == PACKED_NVFP4 ? 64 : 32; /* of a tile */
    const __m256i values = packed_table16(unsigned_values);
    __m256 total[PACKED_STREAMS][PACKED_HALVES];
    int64_t c = begin;
    packed_line_totals_load(line, total);
    for (; c < end; ++c) {
        const uint8_t *const scales = line->scales + c * scales_bytes;
        const struct packed_ahead ahead = packed_line_ahead(line, c, end);
        packed_prefetch_scales(scales, line->scales_step, ahead);
        if (!packed_scales_are_normal(format, scales, line->scales_step)) {
            break;
        }
        line_column(format, halvings, scale_columns, line, c, ahead, values, total);
    }
    packed_line_totals_store(line, (const __m256(*)[PACKED_HALVES])total);
    return c;
}

/* ---- many rows of x ---- */

/* [group of 16 columns][quad][row][4 columns] */
static void decode(const uint8_t *codes, int64_t groups, void *weights) {
    const __m256i values = packed_table16(unsigned_values);
    __m256i *const to = weights;
    for (int64_t g = 0; g < groups; ++g) {
        for (int h = 0; h < PACKED_HALVES; ++h) {
            __m256i quad[QUADS];
            decode_quads(codes + g * TILE4_GROUP_BYTES + h * 32, values, quad);
            PACKED_UNROLL
            for (int i = 0; i < QUADS; ++i) {
                to[(g * QUADS + i) * PACKED_HALVES + h] = quad[i];
            }
        }
    }
}

/* The addresses of a row's data for the piece. */
struct row {
    const int8_t *q;
    const int32_t *correction;
    const float *scale;
};

/* A group's sums of all rows at once. */
PACKED_INLINE void group_sums(int rows, const __m256i *weights, const struct row *row, int64_t group,
                              __m256i (*sum)[PACKED_HALVES]) {
    PACKED_UNROLL
    for (int i = 0; i < QUADS; ++i) {
        __m256i first = packed_load(weights + (group * QUADS + i) * PACKED_HALVES);
        __m256i last = packed_load(weights + (group * QUADS + i) * PACKED_HALVES + 1);
        PACKED_HERE(first);
        PACKED_HERE(last);
        PACKED_UNROLL
        for (int m = 0; m < rows; ++m) {
            const __m256i four = broadcast4(row[m].q + group * TILE4_GROUP + 4 * i);
            const __m256i p0 = _mm256_maddubs_epi16(first, four);
            const __m256i p1 = _mm256_maddubs_epi16(last, four);
            sum[m][0] = i == 0 ? p0 : _mm256_add_epi16(sum[m][0], p0);
            PACKED_HERE(sum[m][0]);
            sum[m][1] = i == 0 ? p1 : _mm256_add_epi16(sum[m][1], p1);
            PACKED_HERE(sum[m][1]);
        }
    }
    PACKED_UNROLL
    for (int m = 0; m < rows; ++m) {
        const __m256i correction = _mm256_set1_epi32(row[m].correction[group]);
        PACKED_UNROLL
        for (int h = 0; h < PACKED_HALVES; ++h) {
            const __m256i wide = _mm256_madd_epi16(sum[m][h], _mm256_set1_epi16(1));
            sum[m][h] = _mm256_add_epi32(wide, correction);
        }
    }
}

PACKED_INLINE void sweep_rows(enum packed_format format, enum packed_precision precision, bool has_lift,
                              int rows, const struct packed_piece *piece, int64_t m) {
    const struct packed_rows *x = piece->x;
    const int groups = format == PACKED_NVFP4 ? 1 : 2;
    const int scale_shift = precision == PACKED_FAST32 && format == PACKED_NVFP4 ? 1 : 0;
    const int64_t scale_per = (groups * TILE4_GROUP) << scale_shift;
    struct row row[SWEEP_ROWS];
    __m256 total[SWEEP_ROWS][PACKED_HALVES];
    PACKED_UNROLL
    for (int i = 0; i < rows; ++i) {
        const int64_t at = (m + i) * x->padded + piece->column;
        row[i] = (struct row){x->q8 + at, x->correction + at / TILE4_GROUP,
                              precision == PACKED_FAST ? NULL : x->block_scale + at / scale_per};
        packed_totals_load(piece, m + i, total[i]);
    }
    for (int64_t b = 0; b < piece->blocks; ++b) {
        __m256i sum[2][SWEEP_ROWS][PACKED_HALVES];
        PACKED_UNROLL
        for (int g = 0; g < groups; ++g) {
            group_sums(rows, piece->weights, row, b * groups + g, sum[g]);
        }
        PACKED_UNROLL
        for (int i = 0; i < rows; ++i) {
            PACKED_UNROLL
            for (int h = 0; h < PACKED_HALVES; ++h) {
                const __m256i all = groups == 1 ? sum[0][i][h] : _mm256_add_epi32(sum[0][i][h], sum[1][i][h]);
                __m256 value = _mm256_cvtepi32_ps(all);
                if (precision != PACKED_FAST) {
                    value = _mm256_mul_ps(value, _mm256_set1_ps(row[i].scale[b >> scale_shift]));
                }
                packed_totals_add(piece, has_lift, b, h, value, &total[i][h]);
            }
        }
    }
    PACKED_UNROLL
    for (int i = 0; i < rows; ++i) {
        packed_totals_store(piece, m + i, total[i]);
    }
}

/* ---- kernels ---- */

#include "cpu/gemm/x86/packed_kernels_avx2.h"

/* Sweeps of mxfp4 use one scale of x per 32 columns, in every precision. */
PACKED_FUNCTIONS(nvfp4_fast, PACKED_NVFP4, PACKED_FAST)
PACKED_FUNCTIONS(nvfp4_fast32, PACKED_NVFP4, PACKED_FAST32)
PACKED_FUNCTIONS(nvfp4_codes, PACKED_NVFP4, PACKED_CODES)
PACKED_FUNCTIONS(mxfp4_fast, PACKED_MXFP4, PACKED_FAST)
PACKED_FUNCTIONS(mxfp4_fast32, PACKED_MXFP4, PACKED_FAST32)
PACKED_FUNCTIONS(mxfp4_codes, PACKED_MXFP4, PACKED_CODES)
PACKED_LINE(nvfp4_fast, PACKED_NVFP4, PACKED_FAST)
PACKED_LINE(nvfp4_fast32, PACKED_NVFP4, PACKED_FAST32)
PACKED_LINE(nvfp4_codes, PACKED_NVFP4, PACKED_CODES)
PACKED_LINE(mxfp4_fast, PACKED_MXFP4, PACKED_FAST)
PACKED_LINE(mxfp4_fast32, PACKED_MXFP4, PACKED_FAST32)
PACKED_LINE(mxfp4_codes, PACKED_MXFP4, PACKED_CODES)

#define PARTS(factor, name) \
    { factor, PIECE_TILES, ROWS_TOGETHER, step_##name, line_##name, decode, scales_##name, sweep_##name }
const struct packed_avx2_parts packed_fast_parts_avx2[2] = {PARTS(128.0f, nvfp4_fast), PARTS(1.0f, mxfp4_fast)};
const struct packed_avx2_parts packed_fast32_parts_avx2[2] = {PARTS(1.0f, nvfp4_fast32),
                                                              PARTS(1.0f, mxfp4_fast32)};
const struct packed_avx2_parts packed_codes_parts_avx2[2] = {PARTS(1.0f, nvfp4_codes),
                                                             PARTS(1.0f, mxfp4_codes)};
#endif
