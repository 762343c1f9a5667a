/* cpu/gemm/x86/packed_near_avx2.c: 4-bit weights times int16 rows (near) with AVX2.
 *
 * vpmaddwd multiplies int16 and adds neighbours in int32. The weights' values times 2 are within -12 to 12, so 32
 * columns make at most 32 * 12 * 32767 < 2^24: sums are exact in int32, and as floats. For 16 columns, 8 rows and a
 * row of x:
 *     8 vpmaddwd + 7 vpaddd + vcvtdq2ps + vfmadd = 17 instructions for 128 multiplications. */
#include "cpu/gemm/packed.h"

#if defined(__x86_64__)
#include "cpu/gemm/x86/packed_avx2.h"

#define SWEEP_ROWS 2

enum { PIECE_TILES = 8, PAIRS = 8 /* of columns in a group of 16 */, ROWS_TOGETHER = 48 };

static const int8_t twice_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* 2 values of a row of x, for all rows of the weight. */
PACKED_INLINE __m256i broadcast2(const int16_t *q) {
    int32_t two;
    __builtin_memcpy(&two, q, sizeof two);
    return _mm256_set1_epi32(two);
}

/* Values times 2 of 4 columns of 8 rows, in bytes, as int16: a dword's even bytes, and its odd ones. */
struct words {
    __m256i even;
    __m256i odd;
};

PACKED_INLINE struct words widen(__m256i bytes) {
    return (struct words){_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
}

/* Times 256, which is quicker. */
PACKED_INLINE struct words widen_upwards(__m256i bytes) {
    return (struct words){_mm256_slli_epi16(bytes, 8),
                          _mm256_and_si256(bytes, _mm256_set1_epi16((short)0xFF00))};
}

/* ---- few rows of x ---- */

/* One half of a block. x has the columns in the order of the bytes. Sums are times 256 where int32 holds them. */
PACKED_INLINE void step_block(enum packed_format format, int rows, const uint8_t *codes,
                              const struct packed_scales *scales, const struct packed_few *x, __m256i values,
                              int64_t b, int h, __m256 *total) {
    const int eights = format == PACKED_NVFP4 ? 2 : 4;
    const __m256 scale = packed_scale(format, format == PACKED_NVFP4 ? 8 : 1, scales, b, h);
    __m256i sum[PACKED_FEW];
    PACKED_UNROLL
    for (int e = 0; e < eights; ++e) {
        const int64_t eight = b * eights + e;
        __m256i bytes = packed_load(codes + eight * 64 + h * 32);
        PACKED_HERE(bytes);
        const struct packed_nibbles nibbles = packed_split(bytes);
        PACKED_UNROLL
        for (int i = 0; i < 2; ++i) {
            const __m256i four = _mm256_shuffle_epi8(values, i == 0 ? nibbles.low : nibbles.high);
            const struct words words = format == PACKED_NVFP4 ? widen_upwards(four) : widen(four);
            PACKED_UNROLL
            for (int m = 0; m < rows; ++m) {
                const int16_t *const q = x->q16[m] + eight * 8 + i * 4;
                const __m256i first = _mm256_madd_epi16(words.even, broadcast2(q));
                sum[m] = e == 0 && i == 0 ? first : _mm256_add_epi32(sum[m], first);
                PACKED_HERE(sum[m]);
                sum[m] = _mm256_add_epi32(sum[m], _mm256_madd_epi16(words.odd, broadcast2(q + 2)));
                PACKED_HERE(sum[m]);
            }
        }
    }
    PACKED_UNROLL
    for (int m = 0; m < rows; ++m) {
        __m256 value = _mm256_cvtepi32_ps(sum[m]);
        if (format == PACKED_MXFP4) {
            value = _mm256_mul_ps(value, packed_lift(scales, b, h));
        }
        total[m] = _mm256_fmadd_ps(value, scale, total[m]);
    }
}

PACKED_INLINE void step_rows(enum packed_format format, enum packed_precision precision, int rows,
                             const struct packed_step *step) {
    (void)precision;
    const int blocks = format == PACKED_NVFP4 ? 4 : 2;
    const __m256i values = packed_table16(twice_values);
    for (int64_t tile = 0; tile < step->tiles; ++tile) {
        const uint8_t *const codes = step->codes + tile * step->codes_step;
        struct packed_scales scales;
        __m256 total[PACKED_HALVES][PACKED_FEW];
        packed_prefetch(step, tile);
        packed_scales_load(format, step->scales + tile * step->scales_step, &scales);
        PACKED_UNROLL
        for (int m = 0; m < rows; ++m) {
            total[0][m] = step->total[tile][m][0];
            total[1][m] = step->total[tile][m][1];
        }
        if (rows <= 2) { /* more independent instructions */
            for (int b = 0; b < blocks; ++b) {
                step_block(format, rows, codes, &scales, step->x, values, b, 0, total[0]);
                step_block(format, rows, codes, &scales, step->x, values, b, 1, total[1]);
            }
        } else { /* fewer registers */
            for (int b = 0; b < blocks; ++b) {
                step_block(format, rows, codes, &scales, step->x, values, b, 0, total[0]);
            }
            for (int b = 0; b < blocks; ++b) {
                step_block(format, rows, codes, &scales, step->x, values, b, 1, total[1]);
            }
        }
        PACKED_UNROLL
        for (int m = 0; m < rows; ++m) {
            step->total[tile][m][0] = total[0][m];
            step->total[tile][m][1] = total[1][m];
        }
    }
}

/* ---- many rows of x ---- */

/* [group of 16 columns][pair][row][2 columns]. The bytes of columns 1 and 2 change places first, so that a dword's even
 * bytes are columns 0 and 1 and its odd ones 2 and 3. */
static void decode(const uint8_t *codes, int64_t groups, void *weights) {
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    const __m256i values = packed_table16(twice_values);
    __m256i *to = weights;
    for (int64_t eight = 0; eight < groups * 2; ++eight) {
        for (int h = 0; h < PACKED_HALVES; ++h) {
            const struct packed_nibbles nibbles =
                packed_split(_mm256_shuffle_epi8(packed_load(codes + eight * 64 + h * 32), order));
            const struct words low = widen(_mm256_shuffle_epi8(values, nibbles.low));
            const struct words high = widen(_mm256_shuffle_epi8(values, nibbles.high));
            to[h] = low.even;
            to[PACKED_HALVES + h] = low.odd;
            to[2 * PACKED_HALVES + h] = high.even;
            to[3 * PACKED_HALVES + h] = high.odd;
        }
        to += 4 * PACKED_HALVES;
    }
}

PACKED_INLINE void sweep_rows(enum packed_format format, enum packed_precision precision, bool has_lift,
                              int rows, const struct packed_piece *piece, int64_t m) {
    (void)precision;
    const struct packed_rows *x = piece->x;
    const int groups = format == PACKED_NVFP4 ? 1 : 2;
    const __m256i *const weights = piece->weights;
    const int16_t *q[SWEEP_ROWS];
    __m256 total[SWEEP_ROWS][PACKED_HALVES];
    PACKED_UNROLL
    for (int i = 0; i < rows; ++i) {
        q[i] = x->q16 + (m + i) * x->padded + piece->column;
        packed_totals_load(piece, m + i, total[i]);
    }
    for (int64_t b = 0; b < piece->blocks; ++b) {
        __m256i sum[SWEEP_ROWS][PACKED_HALVES];
        PACKED_UNROLL
        for (int p = 0; p < groups * PAIRS; ++p) {
            const int64_t pair = b * groups * PAIRS + p;
            __m256i word[PACKED_HALVES] = {packed_load(weights + pair * PACKED_HALVES),
                                           packed_load(weights + pair * PACKED_HALVES + 1)};
            PACKED_HERE(word[0]);
            PACKED_HERE(word[1]);
            PACKED_UNROLL
            for (int i = 0; i < rows; ++i) {
                const __m256i two = broadcast2(q[i] + pair * 2);
                PACKED_UNROLL
                for (int h = 0; h < PACKED_HALVES; ++h) {
                    const __m256i products = _mm256_madd_epi16(two, word[h]);
                    sum[i][h] = p == 0 ? products : _mm256_add_epi32(sum[i][h], products);
                    PACKED_HERE(sum[i][h]);
                }
            }
        }
        PACKED_UNROLL
        for (int i = 0; i < rows; ++i) {
            PACKED_UNROLL
            for (int h = 0; h < PACKED_HALVES; ++h) {
                packed_totals_add(piece, has_lift, b, h, _mm256_cvtepi32_ps(sum[i][h]), &total[i][h]);
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
    return 1;
}

#include "cpu/gemm/x86/packed_kernels_avx2.h"

PACKED_FUNCTIONS(nvfp4, PACKED_NVFP4, PACKED_NEAR)
PACKED_FUNCTIONS(mxfp4, PACKED_MXFP4, PACKED_NEAR)

const struct packed_avx2_parts packed_near_parts_avx2[2] = {
    {0.5f, PIECE_TILES, ROWS_TOGETHER, step_nvfp4, NULL, decode, scales_nvfp4, sweep_nvfp4},
    {1.0f, PIECE_TILES, ROWS_TOGETHER, step_mxfp4, NULL, decode, scales_mxfp4, sweep_mxfp4}};
#endif
