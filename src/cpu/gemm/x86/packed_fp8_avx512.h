/* cpu/gemm/x86/packed_fp8_avx512.h: what products with 8-bit tiles in 16 lanes share, for every type of x; compiled
 * with AVX-512 and VBMI.
 * Depends on packed.h.
 *
 * A code becomes a bfloat16 by two tables of 128 bytes, which is exact: subnormals, infinities and NaN are entries like
 * others, and no number becomes a subnormal one. */
#ifndef OPAQ_CPU_GEMM_X86_PACKED_FP8_AVX512_H
#define OPAQ_CPU_GEMM_X86_PACKED_FP8_AVX512_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

#include "cpu/gemm/packed.h"

enum {
    LANES = 16,
    DIRECT_SUMS = 16,
    DIRECT_BLOCKS = 1,
    DIRECT_TILES = 4,
    SWEEP_TOKENS = 12,
    PREPARED_BYTES = 0,
    AHEAD_BYTES = TILE8_BYTES
};

struct vector {
    __m512 lane;
};

static inline struct vector vector_zero(void) { return (struct vector){_mm512_setzero_ps()}; }

static inline struct vector vector_load(const float *from) { return (struct vector){_mm512_load_ps(from)}; }

static inline struct vector vector_load_any(const float *from) {
    return (struct vector){_mm512_loadu_ps(from)};
}

static inline void vector_store(float *to, struct vector a) { _mm512_store_ps(to, a.lane); }

static inline struct vector vector_multiply(struct vector a, struct vector b) {
    return (struct vector){_mm512_mul_ps(a.lane, b.lane)};
}

static inline struct vector vector_fma(struct vector a, struct vector b, struct vector c) {
    return (struct vector){_mm512_fmadd_ps(a.lane, b.lane, c.lane)};
}

/* ---- decoding ---- */

/* The bytes of |value| as a bfloat16, by the code without its sign. */
struct decoder {
    __m512i low[2];
    __m512i high[2];
    int shift;
};

static inline struct decoder decoder_make(bool is_e5m2) {
    _Alignas(64) uint8_t low[128];
    _Alignas(64) uint8_t high[128];
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int i = 0; i < 128; i += 16) {
        /* e5m2 is the upper byte of a half; e4m3, moved by a bit, is one of 2^-8 times the value, but for NaN */
        const __m512i codes = _mm512_add_epi32(lanes, _mm512_set1_epi32(i));
        const __m512i halves = _mm512_slli_epi32(codes, is_e5m2 ? 8 : 7);
        const __m512 values = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves));
        const __m512i bits =
            _mm512_castps_si512(_mm512_mul_ps(values, _mm512_set1_ps(is_e5m2 ? 1.0f : 256.0f)));
        const __mmask16 nan = is_e5m2 ? 0 : _mm512_cmpeq_epi32_mask(codes, _mm512_set1_epi32(127));
        const __m512i right = _mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7FC00000));
        _mm_store_si128((__m128i *)(low + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(right, 16)));
        _mm_store_si128((__m128i *)(high + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(right, 24)));
    }
    return (struct decoder){{_mm512_load_si512(low), _mm512_load_si512(low + 64)},
                            {_mm512_load_si512(high), _mm512_load_si512(high + 64)},
                            0};
}

static inline bool block_prepare(const struct decoder *decoder, const uint8_t *codes, uint8_t *scratch,
                                 const uint8_t **prepared) {
    (void)decoder;
    (void)scratch;
    *prepared = codes;
    return false;
}

/* Of four rows each time, the first ones of eight and the second ones. */
struct codes_pair {
    __m512i words[2];
};

static inline struct codes_pair pair_load(const struct decoder *decoder, const uint8_t *block, int pair,
                                          int strip) {
    const uint8_t *const from = block + pair * TILE8_PAIR_BYTES;
    __m512i codes = _mm512_load_si512(from);
    __asm__("" : "+v"(codes)); /* loaded once, however often it is used */
    const __m512i low = _mm512_permutex2var_epi8(decoder->low[0], codes, decoder->low[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(decoder->high[0], codes, decoder->high[1]);
    const __m512i high = _mm512_ternarylogic_epi64(magnitude, codes, _mm512_set1_epi8((char)0x80), 0xF8);
    _mm_prefetch((const char *)from + AHEAD_BYTES,
                 _MM_HINT_T1); /* the first level keeps track of fewer lines */
    (void)strip;
    return (struct codes_pair){{_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)}};
}

static inline void scales_arrange(const uint8_t *codes, uint8_t *to) {
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    const __m256i rows = _mm256_loadu_si256((const __m256i *)codes);
    _mm256_storeu_si256((__m256i *)to, _mm256_permutevar8x32_epi32(rows, order));
}

#define HAS_SCALES_WRITE
static inline bool scales_write(const uint8_t *arranged, int shift, float *to) {
    const __m256i codes = _mm256_loadu_si256((const __m256i *)arranged);
    const __m512i low = _mm512_cvtepu8_epi32(_mm256_castsi256_si128(codes));
    const __m512i high = _mm512_cvtepu8_epi32(_mm256_extracti128_si256(codes, 1));
    const __m256i before = _mm256_sub_epi8(codes, _mm256_set1_epi8(1)); /* 0 becomes as large as NaN */
    (void)shift;                                                        /* 0: decoding does not scale values */
    _mm512_store_si512(to, _mm512_slli_epi32(low, 23));
    _mm512_store_si512(to + LANES, _mm512_slli_epi32(high, 23));
    return _mm256_cmpge_epu8_mask(before, _mm256_set1_epi8((char)0xFE)) == 0;
}

static inline void sums_restore(const float *sums, float *to) {
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const __m512d a = _mm512_castps_pd(_mm512_load_ps(sums));
    const __m512d b = _mm512_castps_pd(_mm512_load_ps(sums + LANES));
    _mm512_store_ps(to, _mm512_castpd_ps(_mm512_permutex2var_pd(a, first, b)));
    _mm512_store_ps(to + LANES, _mm512_castpd_ps(_mm512_permutex2var_pd(a, second, b)));
}

#endif
