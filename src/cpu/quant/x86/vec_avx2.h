/* cpu/quant/x86/vec_avx2.h: the vector operations that kernels are written with, 32 bytes wide. Depends on
 * format. The functions are documented in vec_avx512.h. */
#ifndef OPAQ_CPU_QUANT_X86_VEC_AVX2_H
#define OPAQ_CPU_QUANT_X86_VEC_AVX2_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* The name of a kernel. */
#define VEC_NAME(name) name##_avx2

#define VEC_INLINE static inline __attribute__((always_inline))

enum { VEC_BYTES = 32, LANES = 2, FLOATS = 8, WORDS = 16 };

typedef uint8_t vec8 __attribute__((vector_size(32)));
typedef uint16_t vec16 __attribute__((vector_size(32)));
typedef uint32_t vec32 __attribute__((vector_size(32)));
typedef float vecf __attribute__((vector_size(32)));

/* All ones in selected elements. */
typedef vec16 mask16;
typedef vec32 mask32;

/* ---- memory ---- */

VEC_INLINE vec32 vec_load(const void *from) {
    vec32 v;
    memcpy(&v, from, sizeof v);
    return v;
}

VEC_INLINE void vec_store(void *to, vec32 v) { memcpy(to, &v, sizeof v); }

VEC_INLINE void vec_stream(void *to, vec32 v) { _mm256_stream_si256(to, (__m256i)v); }

VEC_INLINE void vec_put(void *to, vec32 v, bool streams) {
    if (streams) {
        vec_stream(to, v);
    } else {
        vec_store(to, v);
    }
}

VEC_INLINE void store_low_bytes(void *to, vec32 v) {
    const __m256i first = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8,
                                           12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i bytes = _mm256_shuffle_epi8((__m256i)v, first);
    _mm_storel_epi64(to, _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}

VEC_INLINE vec32 load_bytes_as_dwords(const void *from) {
    return (vec32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(from));
}

VEC_INLINE vec16 load_bytes_as_words(const void *from) {
    return (vec16)_mm256_cvtepu8_epi16(_mm_loadu_si128(from));
}

/* ---- arithmetic ---- */

VEC_INLINE vec32 vec32_set(uint32_t value) { return (vec32)_mm256_set1_epi32((int)value); }
VEC_INLINE vec16 vec16_set(uint16_t value) { return (vec16)_mm256_set1_epi16((short)value); }
VEC_INLINE vecf vecf_set(float value) { return _mm256_set1_ps(value); }

VEC_INLINE vec16 max16(vec16 a, vec16 b) { return (vec16)_mm256_max_epu16((__m256i)a, (__m256i)b); }
VEC_INLINE vec32 max32(vec32 a, vec32 b) { return (vec32)_mm256_max_epu32((__m256i)a, (__m256i)b); }
VEC_INLINE vec32 min32(vec32 a, vec32 b) { return (vec32)_mm256_min_epu32((__m256i)a, (__m256i)b); }
VEC_INLINE vec16 subtract_to_zero16(vec16 a, vec16 b) {
    return (vec16)_mm256_subs_epu16((__m256i)a, (__m256i)b);
}

VEC_INLINE vecf minf(vecf a, vecf b) { return _mm256_min_ps(a, b); }

VEC_INLINE vecf multiply_add(vecf a, vecf b, vecf c) { return _mm256_fmadd_ps(a, b, c); }

VEC_INLINE vec32 or_and(vec32 a, vec32 b, vec32 c) { return a | (b & c); }
VEC_INLINE vec32 choose_bits(vec32 a, vec32 b, vec32 c) { return (a & c) | (b & ~c); }

VEC_INLINE vec32 to_integers(vecf v) { return (vec32)_mm256_cvttps_epi32(v); }
VEC_INLINE vecf to_floats(vec32 v) { return _mm256_cvtepi32_ps((__m256i)v); }

VEC_INLINE vec32 multiply_even(vec32 a, vec32 b) { return (vec32)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
VEC_INLINE vec32 odd_to_even(vec32 a) { return (vec32)_mm256_srli_epi64((__m256i)a, 32); }
VEC_INLINE vec32 even_to_odd(vec32 a) { return (vec32)_mm256_slli_epi64((__m256i)a, 32); }
VEC_INLINE vec32 blend_odd(vec32 a, vec32 b) { return (vec32)_mm256_blend_epi32((__m256i)a, (__m256i)b, 0xAA); }

/* ---- masks ---- */

VEC_INLINE mask16 above16(vec16 a, uint16_t limit) {
    const __m256i next = _mm256_set1_epi16((short)(limit + 1));
    return (mask16)_mm256_cmpeq_epi16(_mm256_max_epu16((__m256i)a, next), (__m256i)a);
}
VEC_INLINE mask32 above32(vec32 a, uint32_t limit) {
    const __m256i next = _mm256_set1_epi32((int)(limit + 1));
    return (mask32)_mm256_cmpeq_epi32(_mm256_max_epu32((__m256i)a, next), (__m256i)a);
}
VEC_INLINE mask32 equal32(vec32 a, uint32_t b) {
    return (mask32)_mm256_cmpeq_epi32((__m256i)a, _mm256_set1_epi32((int)b));
}
VEC_INLINE bool any32(mask32 m) { return _mm256_movemask_ps((__m256)m) != 0; }
VEC_INLINE mask32 below(vecf a, vecf b) { return (mask32)_mm256_cmp_ps(a, b, _CMP_LT_OQ); }

VEC_INLINE vecf where_bit(vec32 w, int bit, vecf a, vecf b) {
    return _mm256_blendv_ps(a, b, (__m256)(w << (31 - bit)));
}

VEC_INLINE vec16 clear16(mask16 m, vec16 v) { return ~m & v; }
VEC_INLINE vec32 clear32(mask32 m, vec32 v) { return ~m & v; }
VEC_INLINE vec16 replace16(mask16 m, vec16 v, vec16 b) {
    return (vec16)_mm256_blendv_epi8((__m256i)v, (__m256i)b, (__m256i)m);
}
VEC_INLINE vec32 replace32(mask32 m, vec32 v, vec32 b) {
    return (vec32)_mm256_blendv_epi8((__m256i)v, (__m256i)b, (__m256i)m);
}

VEC_INLINE mask16 join_masks(mask32 even, mask32 odd) {
    return (mask16)_mm256_blend_epi16((__m256i)even, (__m256i)odd, 0xAA);
}
VEC_INLINE vec16 add16_where(mask16 m, vec16 v, vec16 b) { return v + (m & b); }

/* ---- order ---- */

VEC_INLINE vec32 lanes_even(vec32 x, vec32 y) {
    return (vec32)_mm256_permute2x128_si256((__m256i)x, (__m256i)y, 0x20);
}
VEC_INLINE vec32 lanes_odd(vec32 x, vec32 y) {
    return (vec32)_mm256_permute2x128_si256((__m256i)x, (__m256i)y, 0x31);
}
VEC_INLINE vec32 halves_first(vec32 x, vec32 y) { return lanes_even(x, y); }
VEC_INLINE vec32 halves_second(vec32 x, vec32 y) { return lanes_odd(x, y); }
VEC_INLINE vec32 quads_first(vec32 x, vec32 y) { return (vec32)_mm256_unpacklo_epi64((__m256i)x, (__m256i)y); }
VEC_INLINE vec32 quads_second(vec32 x, vec32 y) { return (vec32)_mm256_unpackhi_epi64((__m256i)x, (__m256i)y); }
VEC_INLINE vec32 words_first(vec32 x, vec32 y) { return (vec32)_mm256_unpacklo_epi16((__m256i)x, (__m256i)y); }
VEC_INLINE vec32 words_second(vec32 x, vec32 y) { return (vec32)_mm256_unpackhi_epi16((__m256i)x, (__m256i)y); }
VEC_INLINE vec32 dwords_first(vec32 x, vec32 y) { return (vec32)_mm256_unpacklo_epi32((__m256i)x, (__m256i)y); }
VEC_INLINE vec32 dwords_second(vec32 x, vec32 y) {
    return (vec32)_mm256_unpackhi_epi32((__m256i)x, (__m256i)y);
}
VEC_INLINE vec32 dwords_even(vec32 x, vec32 y) { return (vec32)_mm256_shuffle_ps((__m256)x, (__m256)y, 0x88); }
VEC_INLINE vec32 dwords_odd(vec32 x, vec32 y) { return (vec32)_mm256_shuffle_ps((__m256)x, (__m256)y, 0xDD); }

/* A half here is a whole vector: it has as many dwords as half an AVX-512 vector. */
VEC_INLINE vec32 max_in_halves(vec32 x) {
    x = max32(x, (vec32)_mm256_permute2x128_si256((__m256i)x, (__m256i)x, 0x01));
    x = max32(x, (vec32)_mm256_shuffle_epi32((__m256i)x, 0x4E));
    return max32(x, (vec32)_mm256_shuffle_epi32((__m256i)x, 0xB1));
}
VEC_INLINE vec32 max_of_all(vec32 x) { return max_in_halves(x); }

VEC_INLINE vecf sum_in_halves(vecf x) {
    x = x + (vecf)_mm256_permute2x128_si256((__m256i)x, (__m256i)x, 0x01);
    x = x + (vecf)_mm256_shuffle_epi32((__m256i)x, 0x4E);
    return x + (vecf)_mm256_shuffle_epi32((__m256i)x, 0xB1);
}

VEC_INLINE vec32 bytes_first(vec32 x, vec32 y) { return (vec32)_mm256_unpacklo_epi8((__m256i)x, (__m256i)y); }
VEC_INLINE vec32 bytes_second(vec32 x, vec32 y) { return (vec32)_mm256_unpackhi_epi8((__m256i)x, (__m256i)y); }

VEC_INLINE vec32 gather_deal(vec32 x) {
    return (vec32)_mm256_permutevar8x32_epi32((__m256i)x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

VEC_INLINE vec32 deal_out(vec32 x) {
    return (vec32)_mm256_permutevar8x32_epi32((__m256i)x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

VEC_INLINE vec32 split_even(vec32 x, vec32 y) {
    return (vec32)_mm256_permute4x64_epi64((__m256i)dwords_even(x, y), 0xD8);
}
VEC_INLINE vec32 split_odd(vec32 x, vec32 y) {
    return (vec32)_mm256_permute4x64_epi64((__m256i)dwords_odd(x, y), 0xD8);
}

VEC_INLINE vec16 join_words(vec32 even, vec32 odd) {
    return (vec16)_mm256_blend_epi16((__m256i)even, (__m256i)(odd << 16), 0xAA);
}

VEC_INLINE vec32 pack_bytes(vec16 x, vec16 y) {
    return (vec32)_mm256_permute4x64_epi64(_mm256_packus_epi16((__m256i)x, (__m256i)y), 0xD8);
}

VEC_INLINE vec32 pack_nibbles(vec16 x0, vec16 x1, vec16 x2, vec16 x3) {
    const __m256i weights = _mm256_set1_epi16(0x1001);
    const __m256i first = _mm256_maddubs_epi16(_mm256_packus_epi16((__m256i)x0, (__m256i)x1), weights);
    const __m256i second = _mm256_maddubs_epi16(_mm256_packus_epi16((__m256i)x2, (__m256i)x3), weights);
    return gather_deal((vec32)_mm256_packus_epi16(first, second));
}

VEC_INLINE vecf from_halves(vec16 x, bool second) {
    return _mm256_cvtph_ps(second ? _mm256_extracti128_si256((__m256i)x, 1)
                                  : _mm256_castsi256_si128((__m256i)x));
}

VEC_INLINE vecf set_halves(const float *a, const float *b) {
    return _mm256_insertf128_ps(_mm256_set1_ps(*a), _mm_set1_ps(*b), 1);
}

VEC_INLINE vecf load_two(const float *from) { return set_halves(&from[0], &from[1]); }

VEC_INLINE vecf load_halves(const float *floats, int i) {
    return set_halves(&floats[2 * i], &floats[2 * i + 1]);
}

VEC_INLINE vec32 interleave_first(vec32 x, vec32 y) {
    return halves_first((vec32)_mm256_unpacklo_epi32((__m256i)x, (__m256i)y),
                        (vec32)_mm256_unpackhi_epi32((__m256i)x, (__m256i)y));
}
VEC_INLINE vec32 interleave_second(vec32 x, vec32 y) {
    return halves_second((vec32)_mm256_unpacklo_epi32((__m256i)x, (__m256i)y),
                         (vec32)_mm256_unpackhi_epi32((__m256i)x, (__m256i)y));
}

VEC_INLINE vec16 high_words(vec32 x, vec32 y) {
    const __m256i words = _mm256_packus_epi32((__m256i)(x >> 16), (__m256i)(y >> 16));
    return (vec16)_mm256_permute4x64_epi64(words, 0xD8);
}

VEC_INLINE vec16 to_halves(vecf x, vecf y) {
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    return (vec16)_mm256_inserti128_si256(_mm256_castsi128_si256(_mm256_cvtps_ph(x, NEAREST)),
                                          _mm256_cvtps_ph(y, NEAREST), 1);
}

VEC_INLINE vec32 add_bit(vec32 v, vec32 w, int bit) { return v + (w >> bit & 1u); }

VEC_INLINE vecf choose_float(vecf floats, vec32 index) {
    return _mm256_permutevar8x32_ps(floats, (__m256i)index);
}

VEC_INLINE vecf e2m1_values(vec32 codes) {
    const __m256 values = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const vecf magnitudes = choose_float(values, codes);
    return (vecf)((vec32)magnitudes | ((codes << 28) & 0x80000000u));
}

/* Compares 13/16 of the product: up to 1 means a product of up to 1.8, up to 3 one of up to 4.3. */
VEC_INLINE vecf e2m1_grid(vecf magnitudes, vecf factors) {
    const __m256 grids = _mm256_setr_ps(0x1p22f, 0x1p22f, 0x1.000004p23f, 0x1.000004p23f, 0x1.000008p24f,
                                        0x1.000008p24f, 0x1.000008p24f, 0x1.000008p24f);
    return choose_float(grids,
                        (vec32)multiply_add(magnitudes, factors * vecf_set(0.8125f), vecf_set(0x1.8p23f)));
}

VEC_INLINE vecf e2m1_all(int part) {
    const __m256 values = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    return part == 0 ? values : _mm256_xor_ps(values, _mm256_set1_ps(-0.0f));
}

/* ---- tables of sixteen words, indexed by codes ---- */

enum { LOOKUP_BYTES = 32 };

/* Low bytes first, then high bytes. */
VEC_INLINE void lookup_store(uint8_t *tables, vec16 words) {
    const __m256i parted = _mm256_shuffle_epi8(
        (__m256i)words, _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8,
                                         10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    vec_store(tables, (vec32)_mm256_permute4x64_epi64(parted, 0xD8));
}

VEC_INLINE void lookup_block(const uint8_t *table, const uint8_t *codes, void *to, bool streams) {
    const __m128i pairs = _mm_loadl_epi64((const __m128i *)codes);
    const __m128i index =
        _mm_and_si128(_mm_unpacklo_epi8(pairs, _mm_srli_epi16(pairs, 4)), _mm_set1_epi8(0x0F));
    const __m128i low = _mm_shuffle_epi8(_mm_load_si128((const __m128i *)table), index);
    const __m128i high = _mm_shuffle_epi8(_mm_load_si128((const __m128i *)(table + 16)), index);
    const __m128i first = _mm_unpacklo_epi8(low, high);
    const __m128i second = _mm_unpackhi_epi8(low, high);
    if (streams) {
        _mm_stream_si128(to, first);
        _mm_stream_si128((__m128i *)to + 1, second);
    } else {
        _mm_storeu_si128(to, first);
        _mm_storeu_si128((__m128i *)to + 1, second);
    }
}

#endif
