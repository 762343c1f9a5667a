/* cpu/gemm/x86/packed_avx2.h: what the AVX2 kernels for 4-bit tiles share. Depends on packed.h; only files that are
 * compiled with -mavx2 -mfma -mf16c include it.
 *
 * A vector's lanes are 8 rows of a tile, so a tile is two vectors high (its halves) and no sum crosses lanes. There
 * are two ways through the weight, which give the same bits:
 *     up to 8 rows of x   the weight is read once, 4 tiles in parallel; codes are decoded in registers and used for all
 *                         rows at once ("step": 64 columns of the tiles)
 *     more                some columns of a few tiles are decoded into the panel, then multiplied with all rows of x, some
 *                         rows at a time ("sweep"); between such pieces of the tile the totals are kept in y
 * packed_avx2.c has the loops over tiles and columns; packed_exact_avx2.c, packed_near_avx2.c and packed_fast_avx2.c
 * multiply.
 *
 * Scales of e8m0 reach down to subnormal floats, which some processors multiply very slowly. So a block's sum is first
 * multiplied with a "lift", which is 1 but for the smallest scales, then with a scale that is normal or NaN; that
 * rounds nothing more. Scales of e4m3 need no lift. */
#ifndef OPAQ_CPU_GEMM_X86_PACKED_AVX2_H
#define OPAQ_CPU_GEMM_X86_PACKED_AVX2_H

#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>

#include "cpu/gemm/packed.h"

/* Computes the vector here: otherwise compilers reorder sums of integers and load twice, and then run out of
 * registers. */
#define PACKED_HERE(vector) __asm__("" : "+x"(vector))

enum {
    PACKED_LANES = 8,
    PACKED_HALVES = TILE4_ROWS / PACKED_LANES,
    PACKED_STREAMS = 4,           /* tiles of different rows that are read in parallel */
    PACKED_FEW = PACKED_FEW_ROWS, /* rows of x that are multiplied while the weight is read */
    PACKED_GROUPS = TILE4_COLUMNS / TILE4_GROUP,
    PACKED_AHEAD_BYTES = 256,
    PACKED_SWEEP_ROWS = 6,     /* of floats that are multiplied with a piece together */
    PACKED_SWEEP_COLUMNS = 256 /* of a piece for floats */
};

/* 64 columns of a few rows of x, contiguous, so that their offsets are constants. Of int16, columns 1 and 2, 5 and 6
 * and so on are swapped (packed_near_avx2.c). */
struct packed_few {
    _Alignas(64) union {
        int8_t q8[PACKED_FEW][TILE4_COLUMNS];
        int16_t q16[PACKED_FEW][TILE4_COLUMNS];
        float f32[PACKED_FEW][TILE4_COLUMNS];
    };
    int32_t correction[PACKED_FEW][PACKED_GROUPS]; /* for each block of the weight, of 16 or 32 columns */
    float scale[PACKED_FEW][PACKED_GROUPS];        /* likewise; 0 beyond the last column */
};

/* 64 columns of neighbouring tiles times a few rows of x. */
struct packed_step {
    const uint8_t *codes; /* of the first tile */
    const uint8_t *scales;
    int64_t codes_step; /* bytes from tile to tile */
    int64_t scales_step;
    int64_t codes_ahead; /* prefetch distance, in bytes */
    int64_t scales_ahead;
    const struct packed_few *x;
    int64_t rows;                               /* of x */
    int64_t tiles;                              /* at most PACKED_STREAMS */
    __m256 (*total)[PACKED_FEW][PACKED_HALVES]; /* [tiles][rows], added to */
};

/* Whole rows of PACKED_STREAMS neighbouring tiles times one row of x. */
struct packed_line {
    const uint8_t *codes; /* of the first tile */
    const uint8_t *scales;
    int64_t codes_step; /* bytes from tile to tile */
    int64_t scales_step;
    int64_t codes_next; /* bytes to the next tiles */
    int64_t scales_next;
    const struct packed_rows *x;                /* of its first row */
    __m256 (*total)[PACKED_FEW][PACKED_HALVES]; /* [tiles][0], added to, to be multiplied with step_factor */
};

/* A decoded piece of a tile, and the destination of its product. */
struct packed_piece {
    const struct packed_rows *x;
    const float
        *copy; /* EXACT: [PACKED_SWEEP_ROWS][PACKED_SWEEP_COLUMNS], the rows and columns that are multiplied */
    const void *weights;
    const float *scale; /* [blocks][16] */
    const float *lift;  /* likewise, or NULL: all are 1 */
    int64_t column;     /* the first */
    int64_t blocks;
    bool is_first;       /* totals start from 0 instead of y */
    bool is_last;        /* totals are multiplied with all factors */
    const float *factor; /* [16] */
    float *y;            /* of the tile's first row */
    int64_t y_step;
    int64_t rows; /* that the tile has, at most 16 */
};

/* A format and precision. */
struct packed_avx2_parts {
    float step_factor;   /* totals of steps are multiplied with it */
    int64_t piece_tiles; /* tiles along K in a piece */
    int64_t sweep_rows;  /* of x that are multiplied with a piece together */
    void (*step)(const struct packed_step *step);
    /* Tiles [begin, end) along K. Returns the first tile whose scales it does not support; `step` handles that tile. */
    int64_t (*line)(const struct packed_line *line, int64_t begin, int64_t end);
    /* Groups of 16 columns into the panel. */
    void (*decode)(const uint8_t *codes, int64_t groups, void *weights);
    /* Scales of blocks likewise. Returns whether any lift is not 1. */
    bool (*decode_scales)(const uint8_t *codes, int64_t blocks, float *scale, float *lift);
    /* Rows [m, m + rows) of x, at most sweep_rows. */
    void (*sweep)(const struct packed_piece *piece, int64_t m, int64_t rows);
};

extern const struct packed_avx2_parts packed_exact_parts_avx2[2]; /* by enum packed_format */
extern const struct packed_avx2_parts packed_near_parts_avx2[2];
extern const struct packed_avx2_parts packed_fast_parts_avx2[2];
extern const struct packed_avx2_parts packed_fast32_parts_avx2[2];
extern const struct packed_avx2_parts packed_codes_parts_avx2[2];

/* ---- codes ---- */

PACKED_INLINE __m256i packed_load(const void *from) { return _mm256_load_si256((const __m256i *)from); }

/* Scales need not be aligned. */
PACKED_INLINE __m256i packed_load_any(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }

/* A table of bytes, one for each code, in both lanes of a vector. */
PACKED_INLINE __m256i packed_table16(const int8_t *table) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
}

/* 8 rows x 8 columns of codes: columns 0 to 3 as indices of such a table, and 4 to 7. */
struct packed_nibbles {
    __m256i low;
    __m256i high;
};

PACKED_INLINE struct packed_nibbles packed_split(__m256i codes) {
    const __m256i mask = _mm256_set1_epi8(15);
    return (struct packed_nibbles){_mm256_and_si256(codes, mask),
                                   _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask)};
}

/* ---- scales ---- */

/* e4m3 at the place of float16's bits is its value times 2^-8, subnormal or not. */
PACKED_INLINE __m256i packed_e4m3_to_half(__m128i codes) {
    const __m256i magnitude = _mm256_set1_epi16(0x7F);
    const __m256i code = _mm256_cvtepi8_epi16(codes);
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(code, magnitude), magnitude);
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16((short)0xBFFF));
    return _mm256_or_si256(half, nan);
}

/* For codes below 0x7F: neither negative nor NaN. */
PACKED_INLINE __m256i packed_e4m3_to_half_quickly(__m128i codes) {
    return _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 7);
}

/* 8 scales of e8m0 are lift * scale / 2^halvings: 2^(min(code, 4) - 4) and 2^(max(code, 4) - 127). */
PACKED_INLINE __m256 packed_e8m0_scale(__m256i code, int halvings) {
    const __m256i exponent = _mm256_max_epi32(code, _mm256_set1_epi32(4));
    const __m256i bits = _mm256_slli_epi32(_mm256_sub_epi32(exponent, _mm256_set1_epi32(halvings)), 23);
    const __m256i nan = _mm256_cmpeq_epi32(code, _mm256_set1_epi32(255));
    return _mm256_castsi256_ps(_mm256_or_si256(bits, nan));
}

PACKED_INLINE __m256 packed_e8m0_lift(__m256i code) {
    const __m256i exponent = _mm256_min_epi32(code, _mm256_set1_epi32(4));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127 - 4)), 23));
}

PACKED_INLINE __m256i packed_load_codes(const uint8_t *codes) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
}

/* For sweeps: floats times 2^-halvings, because of the factors 2 in integers. */
PACKED_INLINE bool packed_decode_scales(enum packed_format format, int halvings, const uint8_t *codes,
                                        int64_t blocks, float *scale, float *lift) {
    const __m256 factor = _mm256_set1_ps((float)(256 >> halvings));
    __m256i least = _mm256_set1_epi32(4);
    for (int64_t i = 0; i < blocks * TILE4_ROWS && format == PACKED_NVFP4; i += TILE4_ROWS) {
        const __m256i half = packed_e4m3_to_half(_mm_loadu_si128((const __m128i *)(codes + i)));
        const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
        const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
        _mm256_storeu_ps(scale + i, _mm256_mul_ps(low, factor));
        _mm256_storeu_ps(scale + i + PACKED_LANES, _mm256_mul_ps(high, factor));
    }
    for (int64_t i = 0; i < blocks * TILE4_ROWS && format == PACKED_MXFP4; i += PACKED_LANES) {
        const __m256i code = packed_load_codes(codes + i);
        least = _mm256_min_epi32(least, code);
        _mm256_storeu_ps(scale + i, packed_e8m0_scale(code, halvings));
        _mm256_storeu_ps(lift + i, packed_e8m0_lift(code));
    }
    return _mm256_movemask_epi8(_mm256_cmpeq_epi32(least, _mm256_set1_epi32(4))) != -1;
}

/* For steps: the scales of a tile, not yet floats. */
struct packed_scales {
    _Alignas(32) uint16_t half[PACKED_GROUPS * TILE4_ROWS]; /* NVFP4: float16 */
    const uint8_t *codes;                                   /* MXFP4 */
};

PACKED_INLINE void packed_scales_load(enum packed_format format, const uint8_t *codes,
                                      struct packed_scales *scales) {
    scales->codes = codes;
    if (format == PACKED_MXFP4) {
        return;
    }
    const __m256i one = _mm256_set1_epi8(1);
    const __m256i negative_or_nan = _mm256_or_si256(_mm256_adds_epu8(packed_load_any(codes), one),
                                                    _mm256_adds_epu8(packed_load_any(codes + 32), one));
    const bool is_regular = _mm256_movemask_epi8(negative_or_nan) == 0;
    PACKED_UNROLL
    for (int i = 0; i < PACKED_GROUPS; ++i) {
        const __m128i some = _mm_loadu_si128((const __m128i *)(codes + i * TILE4_ROWS));
        _mm256_store_si256((__m256i *)(scales->half + i * TILE4_ROWS),
                           is_regular ? packed_e4m3_to_half_quickly(some) : packed_e4m3_to_half(some));
    }
}

/* Of 8 rows of a block. Scales of NVFP4 are times 2^-8 if `halvings` is 8. */
PACKED_INLINE __m256 packed_scale(enum packed_format format, int halvings, const struct packed_scales *scales,
                                  int64_t block, int half) {
    const int64_t at = block * TILE4_ROWS + half * PACKED_LANES;
    if (format == PACKED_MXFP4) {
        return packed_e8m0_scale(packed_load_codes(scales->codes + at), halvings);
    }
    const __m256 scale = _mm256_cvtph_ps(_mm_load_si128((const __m128i *)(scales->half + at)));
    return halvings == 8 ? scale : _mm256_mul_ps(scale, _mm256_set1_ps((float)(256 >> halvings)));
}

PACKED_INLINE __m256 packed_lift(const struct packed_scales *scales, int64_t block, int half) {
    return packed_e8m0_lift(packed_load_codes(scales->codes + block * TILE4_ROWS + half * PACKED_LANES));
}

/* For lines. Whether all scales of PACKED_STREAMS tiles are normal numbers, so that their bits become a float's by a
 * shift. */
PACKED_INLINE bool packed_scales_are_normal(enum packed_format format, const uint8_t *codes, int64_t step) {
    const __m256i least = _mm256_set1_epi8(format == PACKED_NVFP4 ? 8 : 5);
    const __m256i most = _mm256_set1_epi8((char)(format == PACKED_NVFP4 ? 126 : 254));
    __m256i low = packed_load_any(codes);
    __m256i high = low;
    PACKED_UNROLL
    for (int tile = 0; tile < PACKED_STREAMS; ++tile) {
        const __m256i first = packed_load_any(codes + tile * step);
        const __m256i second = format == PACKED_NVFP4 ? packed_load_any(codes + tile * step + 32) : first;
        low = _mm256_min_epu8(low, _mm256_min_epu8(first, second));
        high = _mm256_max_epu8(high, _mm256_max_epu8(first, second));
    }
    const __m256i normal = _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_max_epu8(low, least), low),
                                            _mm256_cmpeq_epi8(_mm256_min_epu8(high, most), high));
    return _mm256_movemask_epi8(normal) == -1;
}

/* 8 of them, times 2^-halvings. */
PACKED_INLINE __m256 packed_normal_scale(enum packed_format format, int halvings, const uint8_t *codes) {
    const int shift = format == PACKED_NVFP4 ? 20 : 23;
    const int bias = format == PACKED_NVFP4 ? (127 - 7 - halvings) * 8 : -halvings;
    const __m256i code = packed_load_codes(codes);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(code, _mm256_set1_epi32(bias)), shift));
}

/* ---- steps ---- */

/* Prefetches the codes and scales of one tile. */
PACKED_INLINE void packed_prefetch(const struct packed_step *step, int64_t tile) {
    const char *const codes = (const char *)step->codes + tile * step->codes_step + step->codes_ahead;
    PACKED_UNROLL
    for (int i = 0; i < TILE4_BYTES; i += 64) {
        _mm_prefetch(codes + i, _MM_HINT_T0);
    }
    _mm_prefetch((const char *)step->scales + tile * step->scales_step + step->scales_ahead, _MM_HINT_T0);
}

/* Likewise for lines. The hardware prefetcher follows a row, so this only brings lines into the first cache; at the end
 * of a row it prefetches the beginning of the next one. */
struct packed_ahead {
    int64_t codes; /* prefetch distance, in bytes */
    int64_t scales;
};

PACKED_INLINE struct packed_ahead packed_line_ahead(const struct packed_line *line, int64_t c,
                                                    int64_t columns) {
    const bool is_last = c + 1 == columns;
    return (struct packed_ahead){is_last ? line->codes_next - c * TILE4_BYTES : PACKED_AHEAD_BYTES,
                                 is_last ? line->scales_next - line->scales_step + 64 : 64};
}

/* A group of 16 columns. */
PACKED_INLINE void packed_prefetch_group(const uint8_t *codes, struct packed_ahead ahead) {
    _mm_prefetch((const char *)codes + ahead.codes, _MM_HINT_T0);
    _mm_prefetch((const char *)codes + ahead.codes + 64, _MM_HINT_T0);
}

PACKED_INLINE void packed_prefetch_scales(const uint8_t *scales, int64_t step, struct packed_ahead ahead) {
    PACKED_UNROLL
    for (int tile = 0; tile < PACKED_STREAMS; ++tile) {
        _mm_prefetch((const char *)scales + tile * step + ahead.scales, _MM_HINT_T0);
    }
}

PACKED_INLINE void packed_line_totals_load(const struct packed_line *line, __m256 (*total)[PACKED_HALVES]) {
    PACKED_UNROLL
    for (int tile = 0; tile < PACKED_STREAMS; ++tile) {
        total[tile][0] = line->total[tile][0][0];
        total[tile][1] = line->total[tile][0][1];
    }
}

PACKED_INLINE void packed_line_totals_store(const struct packed_line *line,
                                            const __m256 (*total)[PACKED_HALVES]) {
    PACKED_UNROLL
    for (int tile = 0; tile < PACKED_STREAMS; ++tile) {
        line->total[tile][0][0] = total[tile][0];
        line->total[tile][0][1] = total[tile][1];
    }
}

/* ---- totals of one row of x ---- */

PACKED_INLINE void packed_totals_load(const struct packed_piece *piece, int64_t m, __m256 *total) {
    const float *const y = piece->y + m * piece->y_step;
    if (piece->is_first) {
        total[0] = _mm256_setzero_ps();
        total[1] = _mm256_setzero_ps();
    } else if (piece->rows == TILE4_ROWS) {
        total[0] = _mm256_loadu_ps(y);
        total[1] = _mm256_loadu_ps(y + PACKED_LANES);
    } else {
        float some[TILE4_ROWS] = {0.0f};
        for (int64_t i = 0; i < piece->rows; ++i) {
            some[i] = y[i];
        }
        total[0] = _mm256_loadu_ps(some);
        total[1] = _mm256_loadu_ps(some + PACKED_LANES);
    }
}

PACKED_INLINE void packed_totals_store(const struct packed_piece *piece, int64_t m, const __m256 *total) {
    float *const y = piece->y + m * piece->y_step;
    __m256 result[PACKED_HALVES] = {total[0], total[1]};
    if (piece->is_last) {
        const bool has_scale = piece->x->precision == PACKED_NEAR || piece->x->precision == PACKED_FAST;
        const __m256 scale = _mm256_set1_ps(has_scale ? piece->x->row_scale[m] : 1.0f);
        result[0] = _mm256_mul_ps(_mm256_mul_ps(total[0], _mm256_loadu_ps(piece->factor)), scale);
        result[1] =
            _mm256_mul_ps(_mm256_mul_ps(total[1], _mm256_loadu_ps(piece->factor + PACKED_LANES)), scale);
    }
    if (piece->rows == TILE4_ROWS) {
        _mm256_storeu_ps(y, result[0]);
        _mm256_storeu_ps(y + PACKED_LANES, result[1]);
    } else {
        float some[TILE4_ROWS];
        _mm256_storeu_ps(some, result[0]);
        _mm256_storeu_ps(some + PACKED_LANES, result[1]);
        for (int64_t i = 0; i < piece->rows; ++i) {
            y[i] = some[i];
        }
    }
}

/* The total of a row of x and a half of a tile, plus the sum of a block times its scales. */
PACKED_INLINE void packed_totals_add(const struct packed_piece *piece, bool has_lift, int64_t block, int half,
                                     __m256 value, __m256 *total) {
    const int64_t at = block * TILE4_ROWS + half * PACKED_LANES;
    if (has_lift) {
        value = _mm256_mul_ps(value, _mm256_loadu_ps(piece->lift + at));
    }
    *total = _mm256_fmadd_ps(value, _mm256_loadu_ps(piece->scale + at), *total);
}

#endif
