/* cpu/gemm/x86/packed_exact_avx2.c: 4-bit weights times float32 rows (exact) with AVX2 and FMA.
 *
 * A value of e2m1 as float32 has two bytes that are not zero, the upper ones. Two tables of bytes give them, vpunpck
 * joins them to words, and a shift or a mask makes floats of these. For 8 columns and 8 rows (32 bytes):
 *     1 vpshufb (order) + 3 (nibbles) + 4 vpshufb + 4 vpunpck + 4 vpslld + 4 vpand = 20 instructions, and 8 vfmadd
 * for each row of x. A block's 16 or 32 products are added in the order of the columns, beginning from 0. */
#include "cpu/gemm/packed.h"

#if defined(__x86_64__)
#include "cpu/gemm/x86/packed_avx2.h"

#define SWEEP_ROWS 6

enum { PIECE_TILES = PACKED_SWEEP_COLUMNS / TILE4_COLUMNS };

/* The two bytes of each code's float. */
static const int8_t upper_bytes[16] = {0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,
                                       0, -65,  -65,  -65,  -64,  -64,  -64,  -64};
static const int8_t lower_bytes[16] = {0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64};

struct tables {
    __m256i upper;
    __m256i lower;
};

PACKED_INLINE struct tables tables_load(void) {
    return (struct tables){packed_table16(upper_bytes), packed_table16(lower_bytes)};
}

/* 4 columns of 8 rows: in each row's dword of `indices` bytes 0 and 1 are columns 0 and 1 of rows 0, 4.. */
PACKED_INLINE void decode_four(__m256i indices, struct tables tables, __m256 *column) {
    const __m256i upper = _mm256_shuffle_epi8(tables.upper, indices);
    const __m256i lower = _mm256_shuffle_epi8(tables.lower, indices);
    const __m256i first = _mm256_unpacklo_epi8(lower, upper);
    const __m256i last = _mm256_unpackhi_epi8(lower, upper);
    const __m256i mask = _mm256_set1_epi32((int)0xFFFF0000);
    column[0] = _mm256_castsi256_ps(_mm256_slli_epi32(first, 16));
    column[1] = _mm256_castsi256_ps(_mm256_and_si256(first, mask));
    column[2] = _mm256_castsi256_ps(_mm256_slli_epi32(last, 16));
    column[3] = _mm256_castsi256_ps(_mm256_and_si256(last, mask));
}

/* Indices of 8 columns of 8 rows. Moves the bytes of columns 0 and 1 of all rows to the lower half of a lane,
 * where vpunpck reads them. */
PACKED_INLINE __m256i lane_order(void) {
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
}

PACKED_INLINE struct packed_nibbles load_eight(const uint8_t *codes) {
    return packed_split(_mm256_shuffle_epi8(packed_load(codes), lane_order()));
}

/* ---- few rows of x ---- */

/* `chains` half groups of 16 columns, from `first` on: halves of a group follow each other. Since a multiply-add waits
 * for the previous one, few rows of x need several chains. */
PACKED_INLINE void step_groups(enum packed_format format, int rows, int chains, const uint8_t *codes,
                               const struct packed_scales *scales, const struct packed_few *x,
                               struct tables tables, int first, __m256 (*total)[PACKED_HALVES]) {
    struct packed_nibbles nibbles[4];
    __m256 sum[4][PACKED_FEW];
    PACKED_UNROLL
    for (int i = 0; i < TILE4_GROUP / 4; ++i) {
        PACKED_UNROLL
        for (int c = 0; c < chains; ++c) {
            const int group = (first + c) / PACKED_HALVES;
            const int h = (first + c) % PACKED_HALVES;
            __m256 column[4];
            if (i % 2 == 0) {
                nibbles[c] = load_eight(codes + group * TILE4_GROUP_BYTES + i / 2 * 64 + h * 32);
            }
            decode_four(i % 2 == 0 ? nibbles[c].low : nibbles[c].high, tables, column);
            PACKED_UNROLL
            for (int k = 0; k < 4; ++k) {
                PACKED_UNROLL
                for (int m = 0; m < rows; ++m) {
                    const __m256 one = _mm256_set1_ps(x->f32[m][group * TILE4_GROUP + i * 4 + k]);
                    sum[c][m] = i == 0 && k == 0 ? _mm256_mul_ps(column[k], one)
                                                 : _mm256_fmadd_ps(column[k], one, sum[c][m]);
                }
            }
        }
    }
    PACKED_UNROLL
    for (int c = 0; c < chains; ++c) {
        const int h = (first + c) % PACKED_HALVES;
        const int block = (first + c) / PACKED_HALVES / (format == PACKED_NVFP4 ? 1 : 2);
        const __m256 scale = packed_scale(format, 0, scales, block, h);
        PACKED_UNROLL
        for (int m = 0; m < rows; ++m) {
            const __m256 value =
                format == PACKED_NVFP4 ? sum[c][m] : _mm256_mul_ps(sum[c][m], packed_lift(scales, block, h));
            total[m][h] = _mm256_fmadd_ps(value, scale, total[m][h]);
        }
    }
}

PACKED_INLINE void step_rows(enum packed_format format, enum packed_precision precision, int rows,
                             const struct packed_step *step) {
    (void)precision;
    const int chains = rows == 1 ? 4 : rows <= 3 ? 2 : 1;
    const struct tables tables = tables_load();
    for (int64_t tile = 0; tile < step->tiles; ++tile) {
        struct packed_scales scales;
        packed_prefetch(step, tile);
        packed_scales_load(format, step->scales + tile * step->scales_step, &scales);
        for (int i = 0; i < PACKED_GROUPS * PACKED_HALVES; i += chains) {
            step_groups(format, rows, chains, step->codes + tile * step->codes_step, &scales, step->x, tables,
                        i, step->total[tile]);
        }
    }
}

/* ---- one row of x ---- */

/* Two tiles and their halves are summed in parallel, column by column, to hide the latency of the dependent
 * additions. */
enum { LINE_TILES = 2, LINE_CHAINS = LINE_TILES * PACKED_HALVES };

/* Four columns of all chains, as pairs of words in each row's dword. */
PACKED_INLINE void line_decode(const __m256i *indices, struct tables tables, __m256i *first, __m256i *last) {
    PACKED_UNROLL
    for (int i = 0; i < LINE_CHAINS; ++i) {
        const __m256i upper = _mm256_shuffle_epi8(tables.upper, indices[i]);
        const __m256i lower = _mm256_shuffle_epi8(tables.lower, indices[i]);
        first[i] = _mm256_unpacklo_epi8(lower, upper);
        last[i] = _mm256_unpackhi_epi8(lower, upper);
        PACKED_HERE(first[i]);
        PACKED_HERE(last[i]);
    }
}

PACKED_INLINE void line_add_two(const __m256i *words, const float *x, __m256 *sum) {
    const __m256i mask = _mm256_set1_epi32((int)0xFFFF0000);
    const __m256 x0 = _mm256_broadcast_ss(x);
    PACKED_UNROLL
    for (int i = 0; i < LINE_CHAINS; ++i) {
        sum[i] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(words[i], 16)), x0, sum[i]);
        PACKED_HERE(sum[i]);
    }
    const __m256 x1 = _mm256_broadcast_ss(x + 1);
    PACKED_UNROLL
    for (int i = 0; i < LINE_CHAINS; ++i) {
        sum[i] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(words[i], mask)), x1, sum[i]);
        PACKED_HERE(sum[i]);
    }
}

/* A group of 16 columns. */
PACKED_INLINE void line_group(const uint8_t *codes, int64_t step, const float *x, struct tables tables,
                              __m256 *sum) {
    const __m256i nibble = _mm256_set1_epi8(15);
    PACKED_UNROLL
    for (int i = 0; i < LINE_CHAINS; ++i) {
        sum[i] = _mm256_setzero_ps();
    }
    PACKED_UNROLL
    for (int quad = 0; quad < TILE4_GROUP / 4; ++quad) {
        __m256i indices[LINE_CHAINS];
        __m256i first[LINE_CHAINS];
        __m256i last[LINE_CHAINS];
        PACKED_UNROLL
        for (int i = 0; i < LINE_CHAINS; ++i) {
            const uint8_t *const from =
                codes + i / PACKED_HALVES * step + quad / 2 * 64 + i % PACKED_HALVES * 32;
            __m256i some = _mm256_shuffle_epi8(packed_load(from), lane_order());
            some = quad % 2 == 0 ? some : _mm256_srli_epi16(some, 4);
            indices[i] = _mm256_and_si256(some, nibble);
        }
        line_decode(indices, tables, first, last);
        line_add_two(first, x + quad * 4, sum);
        line_add_two(last, x + quad * 4 + 2, sum);
    }
}

PACKED_INLINE void line_tiles(enum packed_format format, const uint8_t *codes, int64_t codes_step,
                              const uint8_t *scales, int64_t scales_step, const float *x, struct tables tables,
                              struct packed_ahead ahead, __m256 (*total)[PACKED_FEW][PACKED_HALVES]) {
    for (int g = 0; g < PACKED_GROUPS; ++g) {
        const int b = format == PACKED_NVFP4 ? g : g / 2;
        __m256 sum[LINE_CHAINS];
        PACKED_UNROLL
        for (int tile = 0; tile < LINE_TILES; ++tile) {
            packed_prefetch_group(codes + tile * codes_step + g * TILE4_GROUP_BYTES, ahead);
        }
        line_group(codes + g * TILE4_GROUP_BYTES, codes_step, x + g * TILE4_GROUP, tables, sum);
        PACKED_UNROLL
        for (int i = 0; i < LINE_CHAINS; ++i) {
            const int tile = i / PACKED_HALVES;
            const int h = i % PACKED_HALVES;
            const uint8_t *const from = scales + tile * scales_step + b * TILE4_ROWS + h * PACKED_LANES;
            total[tile][0][h] =
                _mm256_fmadd_ps(sum[i], packed_normal_scale(format, 0, from), total[tile][0][h]);
        }
    }
}

PACKED_INLINE int64_t line_all(enum packed_format format, enum packed_precision precision,
                               const struct packed_line *line, int64_t begin, int64_t end) {
    (void)precision;
    const int64_t scales_bytes = format == PACKED_NVFP4 ? 64 : 32; /* of a tile */
    const struct tables tables = tables_load();
    int64_t c = begin;
    for (; c < end; ++c) {
        const uint8_t *const codes = line->codes + c * TILE4_BYTES;
        const uint8_t *const scales = line->scales + c * scales_bytes;
        const struct packed_ahead ahead = packed_line_ahead(line, c, end);
        packed_prefetch_scales(scales, line->scales_step, ahead);
        if (!packed_scales_are_normal(format, scales, line->scales_step)) {
            break;
        }
        for (int tile = 0; tile < PACKED_STREAMS; tile += LINE_TILES) {
            line_tiles(format, codes + tile * line->codes_step, line->codes_step,
                       scales + tile * line->scales_step, line->scales_step, line->x->f32 + c * TILE4_COLUMNS,
                       tables, ahead, line->total + tile);
        }
    }
    return c;
}

/* ---- many rows of x ---- */

/* [column][row] */
static void decode(const uint8_t *codes, int64_t groups, void *weights) {
    const struct tables tables = tables_load();
    float *const to = weights;
    for (int64_t eight = 0; eight < groups * 2; ++eight) {
        for (int h = 0; h < PACKED_HALVES; ++h) {
            const struct packed_nibbles nibbles = load_eight(codes + eight * 64 + h * 32);
            __m256 column[8];
            decode_four(nibbles.low, tables, column);
            decode_four(nibbles.high, tables, column + 4);
            PACKED_UNROLL
            for (int k = 0; k < 8; ++k) {
                _mm256_store_ps(to + (eight * 8 + k) * TILE4_ROWS + h * PACKED_LANES, column[k]);
            }
        }
    }
}

PACKED_INLINE void sweep_rows(enum packed_format format, enum packed_precision precision, bool has_lift,
                              int rows, const struct packed_piece *piece, int64_t m) {
    (void)precision;
    const int groups = format == PACKED_NVFP4 ? 1 : 2; /* in a block */
    const float *weights = piece->weights;
    const float *x = piece->copy;
    __m256 total[PACKED_SWEEP_ROWS][PACKED_HALVES];
    PACKED_UNROLL
    for (int i = 0; i < rows; ++i) {
        packed_totals_load(piece, m + i, total[i]);
    }
    for (int64_t group = 0; group < piece->blocks * groups; ++group) {
        const int64_t b = group / groups;
        __m256 sum[PACKED_SWEEP_ROWS][PACKED_HALVES];
        PACKED_UNROLL
        for (int i = 0; i < rows; ++i) {
            sum[i][0] = _mm256_setzero_ps();
            sum[i][1] = _mm256_setzero_ps();
        }
        for (int k = 0; k < TILE4_GROUP; ++k) {
            const __m256 w0 = _mm256_load_ps(weights);
            const __m256 w1 = _mm256_load_ps(weights + PACKED_LANES);
            PACKED_UNROLL
            for (int i = 0; i < rows; ++i) {
                const __m256 one = _mm256_set1_ps(x[i * PACKED_SWEEP_COLUMNS]);
                sum[i][0] = _mm256_fmadd_ps(w0, one, sum[i][0]);
                sum[i][1] = _mm256_fmadd_ps(w1, one, sum[i][1]);
            }
            weights += TILE4_ROWS;
            ++x;
        }
        PACKED_UNROLL
        for (int i = 0; i < rows; ++i) {
            PACKED_UNROLL
            for (int h = 0; h < PACKED_HALVES; ++h) {
                packed_totals_add(piece, has_lift, b, h, sum[i][h], &total[i][h]);
            }
        }
    }
    PACKED_UNROLL
    for (int i = 0; i < rows; ++i) {
        packed_totals_store(piece, m + i, total[i]);
    }
}

/* ---- kernels ---- */

PACKED_INLINE int halvings_of(enum packed_precision precision) {
    (void)precision;
    return 0;
}

#include "cpu/gemm/x86/packed_kernels_avx2.h"

PACKED_FUNCTIONS(nvfp4, PACKED_NVFP4, PACKED_EXACT)
PACKED_FUNCTIONS(mxfp4, PACKED_MXFP4, PACKED_EXACT)
PACKED_LINE(nvfp4, PACKED_NVFP4, PACKED_EXACT)
PACKED_LINE(mxfp4, PACKED_MXFP4, PACKED_EXACT)

const struct packed_avx2_parts packed_exact_parts_avx2[2] = {
    {1.0f, PIECE_TILES, SWEEP_ROWS, step_nvfp4, line_nvfp4, decode, scales_nvfp4, sweep_nvfp4},
    {1.0f, PIECE_TILES, SWEEP_ROWS, step_mxfp4, line_mxfp4, decode, scales_mxfp4, sweep_mxfp4}};
#endif
