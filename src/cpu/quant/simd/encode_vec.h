/* cpu/quant/simd/encode_vec.h: elements to magnitudes, magnitudes to codes, in vectors. Depends on format;
 * vec_avx512.h or vec_avx2.h comes before it. Specification: docs/formats.md.
 *
 * A step is 2 * FLOATS elements, processed as two vectors of floats, the even elements and the odd ones: 16-bit
 * elements are separated with a shift and an `and`, and codes are joined as words. Signs stay in words and are never
 * converted to floats. */
#ifndef OPAQ_CPU_QUANT_SIMD_ENCODE_VEC_H
#define OPAQ_CPU_QUANT_SIMD_ENCODE_VEC_H

#include <float.h>

#include "opaq/element.h"

enum { STEP = 2 * FLOATS };

/* A step in memory: one vector of 16-bit elements, or two of float32. */
struct step {
    vec32 part[2];
};

struct step_floats {
    vecf even;
    vecf odd;
};

VEC_INLINE int element_bytes(enum opaq_element dtype) { return dtype == OPAQ_F32 ? 4 : 2; }

VEC_INLINE struct step step_load(const void *from, enum opaq_element dtype) {
    struct step step = {{vec_load(from), vec32_set(0)}};
    if (dtype == OPAQ_F32) {
        step.part[1] = vec_load((const char *)from + VEC_BYTES);
    }
    return step;
}

/* |x|, as floats. */
VEC_INLINE struct step_floats step_magnitudes(struct step x, enum opaq_element dtype) {
    if (dtype == OPAQ_BF16) {
        const vec32 magnitude = x.part[0] & 0x7FFF7FFFu;
        return (struct step_floats){(vecf)(magnitude << 16), (vecf)(magnitude & 0xFFFF0000u)};
    }
    vec32 first = x.part[0] & 0x7FFFFFFFu;
    vec32 second = x.part[1] & 0x7FFFFFFFu;
    if (dtype == OPAQ_F16) {
        const vec16 magnitude = (vec16)(x.part[0] & 0x7FFF7FFFu);
        first = (vec32)from_halves(magnitude, false);
        second = (vec32)from_halves(magnitude, true);
    }
    return (struct step_floats){(vecf)split_even(first, second), (vecf)split_odd(first, second)};
}

/* Words with the elements' sign bits on top. */
VEC_INLINE vec16 step_signs(struct step x, enum opaq_element dtype) {
    if (dtype == OPAQ_F32) {
        return join_words(split_even(x.part[0], x.part[1]) >> 16, split_odd(x.part[0], x.part[1]) >> 16);
    }
    return (vec16)x.part[0];
}

/* Which elements are NaN. A float32's low half matters too: a carry out of it increases the high half. */
VEC_INLINE mask16 step_nans(struct step x, enum opaq_element dtype) {
    if (dtype == OPAQ_F32) {
        const vec32 first = (x.part[0] & 0x7FFFFFFFu) + 0xFFFFu;
        const vec32 second = (x.part[1] & 0x7FFFFFFFu) + 0xFFFFu;
        return above16(join_words(split_even(first, second) >> 16, split_odd(first, second) >> 16), 0x7F80);
    }
    return above16((vec16)(x.part[0] & 0x7FFF7FFFu), dtype == OPAQ_BF16 ? 0x7F80 : 0x7C00);
}

/* ---- amax ----
 *
 * Magnitudes are compared as integers. To skip NaNs, magnitudes are doubled and an offset is added that takes the
 * smallest NaN to 2^16 (or 2^32), so that NaNs wrap around below zero's key. */

VEC_INLINE uint32_t key_offset(enum opaq_element dtype) {
    return dtype == OPAQ_F32 ? 0x00FFFFFEu : dtype == OPAQ_BF16 ? 0x00FE00FEu : 0x07FE07FEu;
}

VEC_INLINE vec32 key_of(vec32 part, enum opaq_element dtype, bool drop_nan) {
    if (!drop_nan) {
        return part & (dtype == OPAQ_F32 ? 0x7FFFFFFFu : 0x7FFF7FFFu);
    }
    const vec32 offset = vec32_set(key_offset(dtype));
    return dtype == OPAQ_F32 ? part + part + offset : (vec32)((vec16)part + (vec16)part + (vec16)offset);
}

VEC_INLINE vec32 key_max(vec32 a, vec32 b, enum opaq_element dtype) {
    return dtype == OPAQ_F32 ? max32(a, b) : (vec32)max16((vec16)a, (vec16)b);
}

/* The magnitude behind a key. */
VEC_INLINE vec32 key_magnitude(vec32 key, enum opaq_element dtype, bool drop_nan) {
    if (!drop_nan) {
        return key;
    }
    const vec32 offset = vec32_set(key_offset(dtype));
    return dtype == OPAQ_F32 ? (max32(key, offset) - offset) >> 1
                             : (vec32)(subtract_to_zero16((vec16)key, (vec16)offset) >> 1);
}

/* ---- codes ---- */

VEC_INLINE int mantissa_bits(enum opaq_element element) {
    return element == OPAQ_E2M1 ? 1 : element == OPAQ_E4M3 ? 3 : 2;
}

/* The smallest normal value, as the bits of a float. */
VEC_INLINE uint32_t least_normal(enum opaq_element element) {
    return (element == OPAQ_E2M1 ? 127u : element == OPAQ_E4M3 ? 121u : 113u) << 23;
}

VEC_INLINE float largest_value(enum opaq_element element) {
    return element == OPAQ_E2M1 ? 6.0f : element == OPAQ_E4M3 ? 448.0f : 57344.0f;
}

/* NaN's code minus that of the largest value. E2M1 has no NaN: its largest value is stored instead. */
VEC_INLINE uint16_t nan_bits(enum opaq_element element) {
    return element == OPAQ_E2M1 ? 0 : element == OPAQ_E4M3 ? 1 : 4;
}

/* The float that, added to `a`, makes the processor round to the element's grid: its last place is the distance between
 * the codes around `a`. */
VEC_INLINE vecf grid_of(vecf a, enum opaq_element element) {
    const vec32 power = max32((vec32)a & 0x7F800000u, vec32_set(least_normal(element)));
    return (vecf)(power + ((uint32_t)(23 - mantissa_bits(element)) << 23));
}

/* Codes of floats from 0 to the largest, in the low words, plus code_excess(). `sum` is a + grid_of(a): steps since the
 * power of two below it, and above them that power's exponent. */
VEC_INLINE vec32 codes_of_sum(vecf sum, enum opaq_element element) {
    return (vec32)sum + ((vec32)sum >> (23 - mantissa_bits(element)));
}

VEC_INLINE uint16_t code_excess(enum opaq_element element) {
    const uint32_t shift = 23u - (uint32_t)mantissa_bits(element);
    return (uint16_t)(((least_normal(element) >> 23) + shift) << mantissa_bits(element));
}

/* codes_of_sum() of a + grid_of(a), with one instruction less, for floats that were multiplied with 2^-down. */
VEC_INLINE vec32 round_to_codes(vecf a, enum opaq_element element, uint32_t down) {
    const vec32 power = max32((vec32)a & 0x7F800000u, vec32_set(least_normal(element) - (down << 23)));
    const vecf shift = (vecf)vec32_set((127u + 23u - (uint32_t)mantissa_bits(element)) << 23);
    return codes_of_sum(multiply_add((vecf)power, shift, a), element);
}

/* ---- regular elements: finite, and not scaled beyond the largest value ---- */

/* Factors for regular elements are multiplied with 2^-regular_down(), which makes the excess of codes a multiple of the
 * sign's bit, so that it need not be subtracted. Regular E2M1 codes have no excess. */
VEC_INLINE uint32_t regular_down(enum opaq_element element) {
    return element == OPAQ_E2M1 ? 0 : element == OPAQ_E4M3 ? 13 : 6;
}

VEC_INLINE float regular_factor(enum opaq_element element) {
    return element == OPAQ_E2M1 ? 1.0f : element == OPAQ_E4M3 ? 0x1p-13f : 0x1p-6f;
}

/* E4M3: round_to_codes() with the addend looked up by the exponent. The addend has the code of its power of two in its
 * last bits, so that the sum has that of the element. */
VEC_INLINE vec32 look_up_e4m3(vecf a) {
    static const float grids[16] = {0x1.00004p5f,  0x1.00005p6f,  0x1.00006p7f,  0x1.00007p8f,
                                    0x1.00008p9f,  0x1.00009p10f, 0x1.0000Ap11f, 0x1.0000Bp12f,
                                    0x1.0000Cp13f, 0x1.0000Dp14f, 0x1.0000Ep15f, 0.0f,
                                    0x1p1f,        0x1.00001p2f,  0x1.00002p3f,  0x1.00003p4f};
    const uint32_t least = least_normal(OPAQ_E4M3) - (regular_down(OPAQ_E4M3) << 23);
    return (vec32)(a + choose_float((vecf)vec_load(grids), max32((vec32)a, vec32_set(least)) >> 23));
}

/* Codes, in the low words and below a multiple of the sign's bit, of magnitudes under factors that were multiplied with
 * regular_factor(). */
VEC_INLINE vec32 regular_codes(vecf magnitudes, vecf factors, enum opaq_element element) {
    if (element == OPAQ_E2M1) {
        return (vec32)(magnitudes * factors + e2m1_grid(magnitudes, factors));
    }
    return element == OPAQ_E4M3 && FLOATS == 16
               ? look_up_e4m3(magnitudes * factors)
               : round_to_codes(magnitudes * factors, element, regular_down(element));
}

/* Codes, as words, of a step under factors that were multiplied with regular_factor(). */
VEC_INLINE vec16 encode_regular(struct step x, enum opaq_element dtype, enum opaq_element element, vecf even,
                                vecf odd) {
    const struct step_floats a = step_magnitudes(x, dtype);
    const vec16 codes = join_words(regular_codes(a.even, even, element), regular_codes(a.odd, odd, element));
    const bool is_e2m1 = element == OPAQ_E2M1;
    const vec16 signs = step_signs(x, dtype) >> (is_e2m1 ? 12 : 8);
    return (vec16)choose_bits((vec32)codes, (vec32)signs, (vec32)vec16_set(is_e2m1 ? 0x7 : 0x7F));
}

/* ---- any elements ---- */

/* Codes, as words, of scaled magnitudes, without signs. NaN gets the code of the largest value. */
VEC_INLINE vec16 encode_magnitudes(struct step_floats a, enum opaq_element element) {
    const vecf largest = vecf_set(largest_value(element));
    const vec16 codes = join_words(round_to_codes(minf(a.even, largest), element, 0),
                                   round_to_codes(minf(a.odd, largest), element, 0));
    return codes - code_excess(element);
}

/* How elements become codes. The first three are constants where it is used. */
struct encode_how {
    enum opaq_element dtype;
    enum opaq_element element;
    bool not_te;  /* another rule: the factor may be 0, infinite or NaN; else it is above 0 and finite */
    bool divides; /* not te: x over the factor */
    bool drops_zero_sign; /* not te: elements that are scaled to zero have no sign */
    bool halves_down;     /* not te, E2M1: halfway between two codes is the smaller one, and zero is code 8 */
};

/* Under rule te, with constants. */
VEC_INLINE struct encode_how encode_te(enum opaq_element dtype, enum opaq_element element) {
    return (struct encode_how){.dtype = dtype, .element = element};
}

/* `how`, of a rule other than te, with constants. */
VEC_INLINE struct encode_how encode_not_te(struct encode_how how, enum opaq_element dtype,
                                           enum opaq_element element, bool divides) {
    how.dtype = dtype;
    how.element = element;
    how.not_te = true;
    how.divides = divides;
    return how;
}

/* `how`, for stochastic rounding: the rule, which matters to NaNs only, is no constant. */
VEC_INLINE struct encode_how encode_at_random(struct encode_how how, enum opaq_element dtype,
                                              enum opaq_element element) {
    return (struct encode_how){.dtype = dtype, .element = element, .not_te = how.not_te};
}

/* Adds signs, and NaN's code where `nans` is set. Where `unsigned_ones` is set, which includes NaNs, the sign is
 * dropped. */
VEC_INLINE vec16 finish_codes(vec16 codes, vec16 signs, mask16 nans, mask16 unsigned_ones,
                              enum opaq_element element) {
    const bool is_e2m1 = element == OPAQ_E2M1;
    const vec16 kept = clear16(unsigned_ones, signs >> (is_e2m1 ? 12 : 8));
    if (!is_e2m1) {
        codes = add16_where(nans, codes, vec16_set(nan_bits(element)));
    }
    return (vec16)or_and((vec32)codes, (vec32)kept, (vec32)vec16_set(is_e2m1 ? 0x8 : 0x80));
}

/* Which of the scaled magnitudes are NaN, and which are NaN or zero. */
VEC_INLINE mask16 scaled_nans(struct step_floats a) {
    return join_masks(above32((vec32)a.even & 0x7FFFFFFFu, 0x7F800000u),
                      above32((vec32)a.odd & 0x7FFFFFFFu, 0x7F800000u));
}
VEC_INLINE mask16 scaled_nans_and_zeros(struct step_floats a) {
    return join_masks(above32((vec32)a.even - 1u, 0x7F7FFFFFu), above32((vec32)a.odd - 1u, 0x7F7FFFFFu));
}

/* Which magnitudes are halfway between two codes of E2M1 and would be rounded up, because the larger code is even. */
VEC_INLINE mask32 halves_upwards(vecf a) {
    const vec32 bits = (vec32)a;
    return equal32(bits, 0x3F400000u) | equal32(bits, 0x3FE00000u) | equal32(bits, 0x40600000u);
}

VEC_INLINE vec16 codes_halves_down(struct step_floats a, vec16 signs, mask16 nans) {
    const mask16 zeros = join_masks(equal32((vec32)a.even, 0), equal32((vec32)a.odd, 0));
    const mask16 halves = join_masks(halves_upwards(a.even), halves_upwards(a.odd));
    const vec16 codes = add16_where(halves, encode_magnitudes(a, OPAQ_E2M1), vec16_set(0xFFFF));
    return replace16(zeros, finish_codes(codes, signs, nans, nans, OPAQ_E2M1), vec16_set(8));
}

/* Codes, as words, of a step under the factors of its even and its odd elements. */
VEC_INLINE vec16 encode_step(struct encode_how how, struct step x, vecf even, vecf odd) {
    struct step_floats a = step_magnitudes(x, how.dtype);
    const vec16 signs = step_signs(x, how.dtype);
    if (!how.not_te) {
        const mask16 nans = step_nans(x, how.dtype);
        a = (struct step_floats){a.even * even, a.odd * odd};
        return finish_codes(encode_magnitudes(a, how.element), signs, nans, nans, how.element);
    }
    a = how.divides ? (struct step_floats){a.even / even, a.odd / odd}
                    : (struct step_floats){a.even * even, a.odd * odd};
    const mask16 nans = scaled_nans(a);
    if (how.element == OPAQ_E2M1 && how.halves_down) {
        return codes_halves_down(a, signs, nans);
    }
    const mask16 unsigned_ones = how.drops_zero_sign ? scaled_nans_and_zeros(a) : nans;
    return finish_codes(encode_magnitudes(a, how.element), signs, nans, unsigned_ones, how.element);
}

#endif
