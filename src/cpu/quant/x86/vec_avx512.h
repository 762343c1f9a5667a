/* cpu/quant/x86/vec_avx512.h: the vector operations that kernels are written with, 64 bytes wide. Depends on
 * format.
 *
 * vec_avx2.h defines the same names for 32 bytes; a kernel's body includes neither and is compiled once after
 * each. Operations that are the same for any width are written with C operators; this file has the others. A
 * vector consists of LANES lanes of 16 bytes; x.1 is lane 1 of vector x. */
#ifndef OPAQ_CPU_QUANT_X86_VEC_AVX512_H
#define OPAQ_CPU_QUANT_X86_VEC_AVX512_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* The name of a kernel. */
#define VEC_NAME(name) name##_avx512

#define VEC_INLINE static inline __attribute__((always_inline))

enum { VEC_BYTES = 64, LANES = 4, FLOATS = 16, WORDS = 32 };

typedef uint8_t vec8 __attribute__((vector_size(64)));
typedef uint16_t vec16 __attribute__((vector_size(64)));
typedef uint32_t vec32 __attribute__((vector_size(64)));
typedef float vecf __attribute__((vector_size(64)));

/* Selects words, or dwords, of a vector. */
typedef __mmask32 mask16;
typedef __mmask16 mask32;

/* ---- memory ---- */

VEC_INLINE vec32 vec_load(const void *from) {
    vec32 v;
    memcpy(&v, from, sizeof v);
    return v;
}

VEC_INLINE void vec_store(void *to, vec32 v) { memcpy(to, &v, sizeof v); }

/* Non-temporal store; `to` is aligned. */
VEC_INLINE void vec_stream(void *to, vec32 v) { _mm512_stream_si512(to, (__m512i)v); }

VEC_INLINE void vec_put(void *to, vec32 v, bool streams) {
    if (streams) {
        vec_stream(to, v);
    } else {
        vec_store(to, v);
    }
}

/* Stores the low bytes of the dwords. */
VEC_INLINE void store_low_bytes(void *to, vec32 v) { _mm_storeu_si128(to, _mm512_cvtepi32_epi8((__m512i)v)); }

/* Loads FLOATS bytes, one into each dword. */
VEC_INLINE vec32 load_bytes_as_dwords(const void *from) {
    return (vec32)_mm512_cvtepu8_epi32(_mm_loadu_si128(from));
}

/* Loads WORDS bytes, one into each word. */
VEC_INLINE vec16 load_bytes_as_words(const void *from) {
    return (vec16)_mm512_cvtepu8_epi16(_mm256_loadu_si256(from));
}

/* ---- arithmetic ---- */

VEC_INLINE vec32 vec32_set(uint32_t value) { return (vec32)_mm512_set1_epi32((int)value); }
VEC_INLINE vec16 vec16_set(uint16_t value) { return (vec16)_mm512_set1_epi16((short)value); }
VEC_INLINE vecf vecf_set(float value) { return _mm512_set1_ps(value); }

VEC_INLINE vec16 max16(vec16 a, vec16 b) { return (vec16)_mm512_max_epu16((__m512i)a, (__m512i)b); }
VEC_INLINE vec32 max32(vec32 a, vec32 b) { return (vec32)_mm512_max_epu32((__m512i)a, (__m512i)b); }
VEC_INLINE vec32 min32(vec32 a, vec32 b) { return (vec32)_mm512_min_epu32((__m512i)a, (__m512i)b); }
VEC_INLINE vec16 subtract_to_zero16(vec16 a, vec16 b) {
    return (vec16)_mm512_subs_epu16((__m512i)a, (__m512i)b);
}

/* The minimum; b where a is NaN. */
VEC_INLINE vecf minf(vecf a, vecf b) { return _mm512_min_ps(a, b); }

/* a * b + c, rounded once. */
VEC_INLINE vecf multiply_add(vecf a, vecf b, vecf c) { return _mm512_fmadd_ps(a, b, c); }

/* a | (b & c), and a & c | b & ~c. */
VEC_INLINE vec32 or_and(vec32 a, vec32 b, vec32 c) {
    return (vec32)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)c, 0xF8);
}
VEC_INLINE vec32 choose_bits(vec32 a, vec32 b, vec32 c) {
    return (vec32)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)c, 0xE4);
}

VEC_INLINE vec32 to_integers(vecf v) { return (vec32)_mm512_cvttps_epi32(v); }
VEC_INLINE vecf to_floats(vec32 v) { return _mm512_cvtepi32_ps((__m512i)v); }

/* The even dwords of a and b multiplied, 64 bits wide; odd dwords moved to even positions, and back; and the
 * even dwords of a with the odd ones of b. */
VEC_INLINE vec32 multiply_even(vec32 a, vec32 b) { return (vec32)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
VEC_INLINE vec32 odd_to_even(vec32 a) { return (vec32)_mm512_srli_epi64((__m512i)a, 32); }
VEC_INLINE vec32 even_to_odd(vec32 a) { return (vec32)_mm512_slli_epi64((__m512i)a, 32); }
VEC_INLINE vec32 blend_odd(vec32 a, vec32 b) {
    return (vec32)_mm512_mask_mov_epi32((__m512i)a, 0xAAAA, (__m512i)b);
}

/* ---- masks ---- */

VEC_INLINE mask16 above16(vec16 a, uint16_t limit) {
    return _mm512_cmpgt_epu16_mask((__m512i)a, _mm512_set1_epi16((short)limit));
}
VEC_INLINE mask32 above32(vec32 a, uint32_t limit) {
    return _mm512_cmpgt_epu32_mask((__m512i)a, _mm512_set1_epi32((int)limit));
}
VEC_INLINE mask32 equal32(vec32 a, uint32_t b) {
    return _mm512_cmpeq_epi32_mask((__m512i)a, _mm512_set1_epi32((int)b));
}
VEC_INLINE bool any32(mask32 m) { return m != 0; }

/* a < b; false for NaNs. */
VEC_INLINE mask32 below(vecf a, vecf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }

/* b where bit `bit` of w is set, else a. */
VEC_INLINE vecf where_bit(vec32 w, int bit, vecf a, vecf b) {
    return _mm512_mask_mov_ps(a, _mm512_test_epi32_mask((__m512i)w, _mm512_set1_epi32(1 << bit)), b);
}

/* v with the selected elements zeroed, and with b in their place. */
VEC_INLINE vec16 clear16(mask16 m, vec16 v) { return (vec16)_mm512_maskz_mov_epi16((__mmask32)~m, (__m512i)v); }
VEC_INLINE vec32 clear32(mask32 m, vec32 v) { return (vec32)_mm512_maskz_mov_epi32((__mmask16)~m, (__m512i)v); }
VEC_INLINE vec16 replace16(mask16 m, vec16 v, vec16 b) {
    return (vec16)_mm512_mask_mov_epi16((__m512i)v, m, (__m512i)b);
}
VEC_INLINE vec32 replace32(mask32 m, vec32 v, vec32 b) {
    return (vec32)_mm512_mask_mov_epi32((__m512i)v, m, (__m512i)b);
}

/* Selects the words of the selected dwords: even words by `even`, odd ones by `odd`. */
VEC_INLINE mask16 join_masks(mask32 even, mask32 odd) {
    return _mm512_movepi16_mask(
        _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_movm_epi32(even), _mm512_movm_epi32(odd)));
}

/* v + b where selected. */
VEC_INLINE vec16 add16_where(mask16 m, vec16 v, vec16 b) {
    return (vec16)_mm512_mask_add_epi16((__m512i)v, m, (__m512i)v, (__m512i)b);
}

/* ---- permutations ---- */

/* Lanes x.0 x.2 y.0 y.2, and x.1 x.3 y.1 y.3. */
VEC_INLINE vec32 lanes_even(vec32 x, vec32 y) {
    return (vec32)_mm512_shuffle_i32x4((__m512i)x, (__m512i)y, 0x88);
}
VEC_INLINE vec32 lanes_odd(vec32 x, vec32 y) {
    return (vec32)_mm512_shuffle_i32x4((__m512i)x, (__m512i)y, 0xDD);
}
/* The first halves of x and y, and their second halves. */
VEC_INLINE vec32 halves_first(vec32 x, vec32 y) {
    return (vec32)_mm512_shuffle_i32x4((__m512i)x, (__m512i)y, 0x44);
}
VEC_INLINE vec32 halves_second(vec32 x, vec32 y) {
    return (vec32)_mm512_shuffle_i32x4((__m512i)x, (__m512i)y, 0xEE);
}
/* In each lane: the first 8 bytes of x and of y, and the second 8. */
VEC_INLINE vec32 quads_first(vec32 x, vec32 y) { return (vec32)_mm512_unpacklo_epi64((__m512i)x, (__m512i)y); }
VEC_INLINE vec32 quads_second(vec32 x, vec32 y) { return (vec32)_mm512_unpackhi_epi64((__m512i)x, (__m512i)y); }
/* In each lane: the words of x and y interleaved: the first four, and the second four. */
VEC_INLINE vec32 words_first(vec32 x, vec32 y) { return (vec32)_mm512_unpacklo_epi16((__m512i)x, (__m512i)y); }
VEC_INLINE vec32 words_second(vec32 x, vec32 y) { return (vec32)_mm512_unpackhi_epi16((__m512i)x, (__m512i)y); }
/* In each lane: the dwords of x and y interleaved: the first two, and the second two. */
VEC_INLINE vec32 dwords_first(vec32 x, vec32 y) { return (vec32)_mm512_unpacklo_epi32((__m512i)x, (__m512i)y); }
VEC_INLINE vec32 dwords_second(vec32 x, vec32 y) {
    return (vec32)_mm512_unpackhi_epi32((__m512i)x, (__m512i)y);
}
/* In each lane: dwords 0 and 2 of x and of y, and 1 and 3. */
VEC_INLINE vec32 dwords_even(vec32 x, vec32 y) { return (vec32)_mm512_shuffle_ps((__m512)x, (__m512)y, 0x88); }
VEC_INLINE vec32 dwords_odd(vec32 x, vec32 y) { return (vec32)_mm512_shuffle_ps((__m512)x, (__m512)y, 0xDD); }

/* The maximum of each half's dwords, broadcast to that half; and of all dwords. */
VEC_INLINE vec32 max_in_halves(vec32 x) {
    x = max32(x, (vec32)_mm512_shuffle_i32x4((__m512i)x, (__m512i)x, 0xB1));
    x = max32(x, (vec32)_mm512_shuffle_epi32((__m512i)x, 0x4E));
    return max32(x, (vec32)_mm512_shuffle_epi32((__m512i)x, 0xB1));
}
VEC_INLINE vec32 max_of_all(vec32 x) {
    return max_in_halves(max32(x, (vec32)_mm512_shuffle_i32x4((__m512i)x, (__m512i)x, 0x4E)));
}

/* The sum of each half's dwords, broadcast to that half: adds those 4 apart first, then 2, then 1. */
VEC_INLINE vecf sum_in_halves(vecf x) {
    x = x + (vecf)_mm512_shuffle_i32x4((__m512i)x, (__m512i)x, 0xB1);
    x = x + (vecf)_mm512_shuffle_epi32((__m512i)x, 0x4E);
    return x + (vecf)_mm512_shuffle_epi32((__m512i)x, 0xB1);
}

/* In each lane: the bytes of x and y interleaved: the first 8, and the second 8. */
VEC_INLINE vec32 bytes_first(vec32 x, vec32 y) { return (vec32)_mm512_unpacklo_epi8((__m512i)x, (__m512i)y); }
VEC_INLINE vec32 bytes_second(vec32 x, vec32 y) { return (vec32)_mm512_unpackhi_epi8((__m512i)x, (__m512i)y); }

/* Transposes dwords from lane order: dword v * LANES + l of the result is dword 4 * l + v. */
VEC_INLINE vec32 gather_deal(vec32 x) {
    const __m512i from = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return (vec32)_mm512_permutexvar_epi32(from, (__m512i)x);
}

/* The inverse; the same 4 x 4 transpose. */
VEC_INLINE vec32 deal_out(vec32 x) { return gather_deal(x); }

/* The dwords at even positions of x followed by y, and those at odd ones. */
VEC_INLINE vec32 split_even(vec32 x, vec32 y) {
    const __m512i from = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return (vec32)_mm512_permutex2var_epi32((__m512i)x, from, (__m512i)y);
}
VEC_INLINE vec32 split_odd(vec32 x, vec32 y) {
    const __m512i from = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return (vec32)_mm512_permutex2var_epi32((__m512i)x, from, (__m512i)y);
}

/* even's low words at even positions, odd's at odd ones. */
VEC_INLINE vec16 join_words(vec32 even, vec32 odd) {
    const __m512i from = _mm512_set_epi16(62, 30, 60, 28, 58, 26, 56, 24, 54, 22, 52, 20, 50, 18, 48, 16, 46,
                                          14, 44, 12, 42, 10, 40, 8, 38, 6, 36, 4, 34, 2, 32, 0);
    return (vec16)_mm512_permutex2var_epi16((__m512i)even, from, (__m512i)odd);
}

/* Words below 256 to bytes: x's, then y's. */
VEC_INLINE vec32 pack_bytes(vec16 x, vec16 y) {
    const __m512i from = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    return (vec32)_mm512_permutexvar_epi64(from, _mm512_packus_epi16((__m512i)x, (__m512i)y));
}

/* Words below 16 of four vectors to nibbles, two per byte, the first in the low nibble. */
VEC_INLINE vec32 pack_nibbles(vec16 x0, vec16 x1, vec16 x2, vec16 x3) {
    const __m512i weights = _mm512_set1_epi16(0x1001);
    const __m512i first = _mm512_maddubs_epi16(_mm512_packus_epi16((__m512i)x0, (__m512i)x1), weights);
    const __m512i second = _mm512_maddubs_epi16(_mm512_packus_epi16((__m512i)x2, (__m512i)x3), weights);
    return gather_deal((vec32)_mm512_packus_epi16(first, second));
}

/* Converts FLOATS f16 values, the first or the second half of a vector, to floats. */
VEC_INLINE vecf from_halves(vec16 x, bool second) {
    return _mm512_cvtph_ps(second ? _mm512_extracti64x4_epi64((__m512i)x, 1)
                                  : _mm512_castsi512_si256((__m512i)x));
}

/* a in the first half of the vector, b in the second. */
VEC_INLINE vecf set_halves(const float *a, const float *b) {
    return _mm512_mask_broadcastss_ps(_mm512_set1_ps(*a), 0xFF00, _mm_load_ss(b));
}

/* from[0] in the first half of the vector, from[1] in the second. */
VEC_INLINE vecf load_two(const float *from) {
    const __m512i half = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    double two;
    memcpy(&two, from, sizeof two);
    return _mm512_permutevar_ps((__m512)_mm512_set1_pd(two), half);
}

/* Element 2 * i of FLOATS floats in the first half of the vector, element 2 * i + 1 in the second; i is a constant. */
VEC_INLINE vecf load_halves(const float *floats, int i) {
    const int a = 2 * i;
    const int b = 2 * i + 1;
    const __m512i from = _mm512_setr_epi32(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b);
    return _mm512_permutexvar_ps(from, (vecf)vec_load(floats));
}

/* The dwords of x and y interleaved: their first halves, and their second halves. */
VEC_INLINE vec32 interleave_first(vec32 x, vec32 y) {
    const __m512i from = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return (vec32)_mm512_permutex2var_epi32((__m512i)x, from, (__m512i)y);
}
VEC_INLINE vec32 interleave_second(vec32 x, vec32 y) {
    const __m512i from = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return (vec32)_mm512_permutex2var_epi32((__m512i)x, from, (__m512i)y);
}

/* The high words of x's dwords, then of y's. */
VEC_INLINE vec16 high_words(vec32 x, vec32 y) {
    const __m512i from = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31,
                                          29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return (vec16)_mm512_permutex2var_epi16((__m512i)x, from, (__m512i)y);
}

/* Converts floats to f16: x's, then y's. */
VEC_INLINE vec16 to_halves(vecf x, vecf y) {
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    return (vec16)_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(x, NEAREST)),
                                     _mm512_cvtps_ph(y, NEAREST), 1);
}

/* v, plus one where bit `bit` of w is set. */
VEC_INLINE vec32 add_bit(vec32 v, vec32 w, int bit) {
    const __mmask16 m = _mm512_test_epi32_mask((__m512i)w, _mm512_set1_epi32(1 << bit));
    return (vec32)_mm512_mask_add_epi32((__m512i)v, m, (__m512i)v, _mm512_set1_epi32(1));
}

/* Selects from FLOATS floats by the low bits of the dwords. */
VEC_INLINE vecf choose_float(vecf floats, vec32 index) { return _mm512_permutexvar_ps((__m512i)index, floats); }

/* The values of the E2M1 codes in the dwords' low four bits; other bits are ignored. */
VEC_INLINE vecf e2m1_values(vec32 codes) {
    const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                                         -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    return choose_float(values, codes);
}

/* For magnitudes times factors up to 7: the number that, added to the products, rounds them to E2M1 and leaves
 * the codes in the low words of the sums. It depends on twice the product, rounded to an integer: up to 4, up
 * to 8, or above. Around 2 and 4, where the number changes, both give the same rounding. */
VEC_INLINE vecf e2m1_grid(vecf magnitudes, vecf factors) {
    const __m512 grids =
        _mm512_setr_ps(0x1p22f, 0x1p22f, 0x1p22f, 0x1p22f, 0x1p22f, 0x1.000004p23f, 0x1.000004p23f,
                       0x1.000004p23f, 0x1.000004p23f, 0x1.000008p24f, 0x1.000008p24f, 0x1.000008p24f,
                       0x1.000008p24f, 0x1.000008p24f, 0x1.000008p24f, 0x1.000008p24f);
    return choose_float(grids, (vec32)multiply_add(magnitudes, factors, vecf_set(0x1.8p22f)));
}

/* The values of the codes of part `part`: codes 0 to 15 are split into parts of FLOATS, of which there is one
 * here. */
VEC_INLINE vecf e2m1_all(int part) {
    (void)part;
    return _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                          -3.0f, -4.0f, -6.0f);
}

/* ---- tables of sixteen words, indexed by codes ---- */

enum { LOOKUP_BYTES = 32 };

/* Stores the words of as many tables as a vector holds, one table after the other. */
VEC_INLINE void lookup_store(uint8_t *tables, vec16 words) { vec_store(tables, (vec32)words); }

/* Looks up 16 packed codes; with `streams`, non-temporal stores to `to`, aligned to 32 bytes. */
VEC_INLINE void lookup_block(const uint8_t *table, const uint8_t *codes, void *to, bool streams) {
    const __m256i pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
    const __m256i index = _mm256_or_si256(pairs, _mm256_slli_epi32(pairs, 12));
    const __m256i words = _mm256_permutexvar_epi16(index, _mm256_load_si256((const __m256i *)table));
    if (streams) {
        _mm256_stream_si256(to, words);
    } else {
        _mm256_storeu_si256(to, words);
    }
}

#endif
