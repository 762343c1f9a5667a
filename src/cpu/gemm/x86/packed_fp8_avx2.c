/* cpu/gemm/x86/packed_fp8_avx2.c: products with 8-bit tiles, 8 lanes; compiled with AVX2, FMA and F16C.
 *
 * A block of codes is converted to f16 in memory, from where F16C converts it to floats: e5m2 is the upper byte
 * of an f16; e4m3 shifted by one bit is an f16 of 2^-8 times the value. Both are exact, including subnormals. */
#include "cpu/gemm/packed.h"
#include "opaq/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

enum {
    LANES = 8,
    DIRECT_SUMS = 10,
    DIRECT_BLOCKS = 2,
    DIRECT_TILES = 1,
    SWEEP_TOKENS = 6,
    PREPARED_BYTES = 2 * TILE8_BYTES,
    AHEAD_BYTES = TILE8_BYTES,
    E4M3_SHIFT = 8
};

struct vector {
    __m256 lane;
};

static inline struct vector vector_zero(void) { return (struct vector){_mm256_setzero_ps()}; }

static inline struct vector vector_load(const float *from) { return (struct vector){_mm256_load_ps(from)}; }

static inline struct vector vector_load_any(const float *from) {
    return (struct vector){_mm256_loadu_ps(from)};
}

static inline struct vector vector_broadcast(const float *from) {
    return (struct vector){_mm256_broadcast_ss(from)};
}

static inline void vector_store(float *to, struct vector a) { _mm256_store_ps(to, a.lane); }

static inline struct vector vector_multiply(struct vector a, struct vector b) {
    return (struct vector){_mm256_mul_ps(a.lane, b.lane)};
}

static inline struct vector vector_fma(struct vector a, struct vector b, struct vector c) {
    return (struct vector){_mm256_fmadd_ps(a.lane, b.lane, c.lane)};
}

/* sum += a * *b */
static inline void vector_add_product(struct vector *sum, struct vector a, const float *b) {
    sum->lane = _mm256_fmadd_ps(a.lane, _mm256_broadcast_ss(b), sum->lane);
}

/* ---- decoding ---- */

struct decoder {
    bool is_e5m2;
    int shift;
};

static inline struct decoder decoder_make(bool is_e5m2) {
    return (struct decoder){is_e5m2, is_e5m2 ? 0 : E4M3_SHIFT};
}

/* Of every 16 rows and two columns 16 halves of the first and 16 of the second. */
static inline void halves_store(__m256i first, __m256i second, uint8_t *to) {
    _mm256_store_si256((__m256i *)to, first);
    _mm256_store_si256((__m256i *)(to + 32), second);
}

/* Returns whether the e4m3 codes contain NaN, which is decoded as 480. */
static inline bool block_prepare(const struct decoder *decoder, const uint8_t *codes, uint8_t *scratch,
                                 const uint8_t **prepared) {
    const __m256i sign = _mm256_set1_epi8((char)0x80);
    const __m256i upper = _mm256_set1_epi16((short)0xFF00);
    const __m256i kept = _mm256_set1_epi16((short)0xBF80);
    __m256i largest = sign;
    for (int i = 0; i < TILE8_BYTES; i += 32) {
        const __m256i two = _mm256_load_si256((const __m256i *)(codes + i));
        const __m256i first = _mm256_slli_epi16(two, 8);
        if (i % 64 == 0) {
            __builtin_prefetch(codes + i + AHEAD_BYTES);
        }
        if (decoder->is_e5m2) {
            halves_store(first, _mm256_and_si256(two, upper), scratch + 2 * i);
        } else {
            halves_store(_mm256_and_si256(_mm256_srai_epi16(first, 1), kept),
                         _mm256_and_si256(_mm256_srai_epi16(two, 1), kept), scratch + 2 * i);
            largest = _mm256_max_epu8(largest, _mm256_or_si256(two, sign));
        }
    }
    *prepared = scratch;
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, _mm256_set1_epi8(-1))) != 0;
}

struct codes_pair {
    const __m128i *halves;
};

static inline struct codes_pair pair_load(const struct decoder *decoder, const uint8_t *block, int pair,
                                          int strip) {
    (void)decoder;
    return (struct codes_pair){(const __m128i *)(block + pair * 2 * TILE8_PAIR_BYTES + strip * 64)};
}

static inline void pair_column(const struct codes_pair *pair, int c, struct vector column[2]) {
    column[0].lane = _mm256_cvtph_ps(_mm_load_si128(pair->halves + 2 * c));
    column[1].lane = _mm256_cvtph_ps(_mm_load_si128(pair->halves + 2 * c + 1));
}

static inline void scales_arrange(const uint8_t *codes, uint8_t *to) { memcpy(to, codes, TILE8_ROWS); }

static inline void sums_restore(const float *sums, float *to) { memcpy(to, sums, TILE8_ROWS * sizeof *to); }

#include "cpu/gemm/simd/packed_fp8.h"

const struct packed_table packed_table_avx2_8bit = {
    .name = "avx2",
    .features = OPAQ_CPU_AVX2,
    .kernel = {[PACKED_MXFP8] = {KERNEL(mxfp8, exact, avx2)},
               [PACKED_FP8] = {KERNEL(fp8, exact, avx2)},
               [PACKED_FP8BLK] = {KERNEL(fp8blk, exact, avx2)}}};
#endif
