/* cpu/quant/simd/decode_vec.h: codes and scales to floats, floats to elements, in vectors. Depends on encode_vec.h.
 * Specification: docs/formats.md. */
#ifndef OPAQ_CPU_QUANT_SIMD_DECODE_VEC_H
#define OPAQ_CPU_QUANT_SIMD_DECODE_VEC_H

#include "cpu/quant/simd/encode_vec.h"

/* ---- scales, one byte in each dword ---- */

VEC_INLINE vecf e4m3_values(vec32 codes) {
    const vec32 magnitude = codes & 0x7Fu;
    const vec32 normal = (magnitude << 20) + (120u << 23);
    const vec32 small = (vec32)(to_floats(magnitude) * vecf_set(0x1p-9f));
    const vec32 value = replace32(above32(magnitude, 7), small, normal) | ((codes & 0x80u) << 24);
    return (vecf)replace32(equal32(magnitude, 0x7F), value, vec32_set(0x7FC00000u));
}

VEC_INLINE vecf e8m0_values(vec32 codes) {
    const vec32 value = max32(codes << 23, vec32_set(0x400000u));
    return (vecf)replace32(equal32(codes, 255), value, vec32_set(0x7FC00000u));
}

/* ---- elements; with `may_be_nan` every NaN becomes the canonical one ---- */

/* Rounded to bf16 in the high words. */
VEC_INLINE vec32 round_to_bf16(vecf v, bool may_be_nan) {
    const vec32 bits = (vec32)v;
    const vec32 rounded = add_bit(bits + 0x7FFFu, bits, 16);
    return may_be_nan ? replace32(above32(bits & 0x7FFFFFFFu, 0x7F800000u), rounded, vec32_set(0x7FC00000u))
                      : rounded;
}

VEC_INLINE vecf without_nans(vecf v, bool may_be_nan) {
    const vec32 bits = (vec32)v;
    return may_be_nan ? (vecf)replace32(above32(bits & 0x7FFFFFFFu, 0x7F800000u), bits, vec32_set(0x7FC00000u))
                      : v;
}

/* A step of values, one vector after the other, as elements. */
VEC_INLINE struct step step_of_values(vecf first, vecf second, enum opaq_element dtype, bool may_be_nan) {
    if (dtype == OPAQ_BF16) {
        const vec16 words = high_words(round_to_bf16(first, may_be_nan), round_to_bf16(second, may_be_nan));
        return (struct step){{(vec32)words, vec32_set(0)}};
    }
    first = without_nans(first, may_be_nan);
    second = without_nans(second, may_be_nan);
    if (dtype == OPAQ_F16) {
        return (struct step){{(vec32)to_halves(first, second), vec32_set(0)}};
    }
    return (struct step){{(vec32)first, (vec32)second}};
}

/* The same for even and odd values. */
VEC_INLINE struct step step_of_pairs(vecf even, vecf odd, enum opaq_element dtype, bool may_be_nan) {
    if (dtype == OPAQ_BF16) {
        const vec32 low = round_to_bf16(even, may_be_nan) >> 16;
        const vec32 high = round_to_bf16(odd, may_be_nan);
        return (struct step){{choose_bits(low, high, vec32_set(0xFFFFu)), vec32_set(0)}};
    }
    return step_of_values((vecf)interleave_first((vec32)even, (vec32)odd),
                          (vecf)interleave_second((vec32)even, (vec32)odd), dtype, may_be_nan);
}

VEC_INLINE void step_store(void *to, struct step step, enum opaq_element dtype, bool streams) {
    if (streams) {
        vec_stream(to, step.part[0]);
    } else {
        vec_store(to, step.part[0]);
    }
    if (dtype == OPAQ_F32 && streams) {
        vec_stream((char *)to + VEC_BYTES, step.part[1]);
    } else if (dtype == OPAQ_F32) {
        vec_store((char *)to + VEC_BYTES, step.part[1]);
    }
}

/* ---- codes ---- */

/* One-byte codes shifted into the fields of 16-bit floats, which makes E4M3 values 256 times too small; and which of them
 * are NaN. */
struct moved_codes {
    vec16 halves;
    mask16 nans;
};

VEC_INLINE struct moved_codes move_codes(const uint8_t *codes, enum opaq_element element) {
    const vec16 code = load_bytes_as_words(codes);
    const bool is_e4m3 = element == OPAQ_E4M3;
    const vec16 half = is_e4m3
                           ? (vec16)choose_bits((vec32)(code << 8), (vec32)(code << 7), vec32_set(0x80008000u))
                           : code << 8;
    return (struct moved_codes){half & (uint16_t)(is_e4m3 ? 0xBF80 : 0xFF00),
                                above16(code & 0x7F, is_e4m3 ? 0x7E : 0x7C)};
}

/* Two vectors, one after the other. */
struct decoded {
    vecf first;
    vecf second;
};

/* The values of STEP codes of one byte each. */
VEC_INLINE struct decoded byte_values(const uint8_t *codes, enum opaq_element element) {
    const struct moved_codes moved = move_codes(codes, element);
    const vec16 halves = replace16(moved.nans, moved.halves, vec16_set(0x7E00));
    const float up = element == OPAQ_E4M3 ? 256.0f : 1.0f;
    return (struct decoded){from_halves(halves, false) * up, from_halves(halves, true) * up};
}

/* STEP one-byte codes under one factor. Without `may_be_nan` the factor must be finite, not 0, and small enough to be
 * multiplied with 256; NaN codes are replaced at the end. */
VEC_INLINE struct step decode_bytes(const uint8_t *codes, enum opaq_element element, enum opaq_element dtype,
                                    float factor, bool may_be_nan) {
    if (!may_be_nan && dtype != OPAQ_F32) {
        const struct moved_codes moved = move_codes(codes, element);
        const float apply = element == OPAQ_E4M3 ? factor * 256.0f : factor;
        struct step step = step_of_values(from_halves(moved.halves, false) * apply,
                                          from_halves(moved.halves, true) * apply, dtype, false);
        const vec16 nan = vec16_set(dtype == OPAQ_BF16 ? 0x7FC0 : 0x7E00);
        step.part[0] = (vec32)replace16(moved.nans, (vec16)step.part[0], nan);
        return step;
    }
    const struct decoded values = byte_values(codes, element);
    return step_of_values(values.first * factor, values.second * factor, dtype, true);
}

/* STEP packed codes under the factors of their pairs, which must be finite without `may_be_nan`. */
VEC_INLINE struct step decode_pairs(const uint8_t *codes, enum opaq_element dtype, vecf factors,
                                    bool may_be_nan) {
    const vec32 pairs = load_bytes_as_dwords(codes);
    return step_of_pairs(e2m1_values(pairs) * factors, e2m1_values(pairs >> 4) * factors, dtype, may_be_nan);
}

#endif
