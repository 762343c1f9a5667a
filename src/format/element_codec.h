/* format/element_codec.h: inline conversion of one number to a code and back, for kernels. Depends on base.
 *
 * Specification: docs/formats.md, "Elements". Everything is integer arithmetic on the float's bits, so no
 * rounding mode or flush-to-zero setting can change it; only stochastic rounding adds two floats, and runs
 * inside the library's own floating-point environment. */
#ifndef OPAQ_FORMAT_ELEMENT_CODEC_H
#define OPAQ_FORMAT_ELEMENT_CODEC_H

#include <stdbool.h>
#include <stdint.h>

#include "base/float_bits.h"
#include "opaq/element.h"

/* A binary floating-point code of up to 16 bits, narrower than float32. */
struct narrow {
    int mantissa_bits;
    int bias;
    int sign_shift;        /* position of the sign bit */
    uint32_t largest_code; /* code of the largest finite value */
    uint32_t overflow;     /* IEEE variant: the code of larger values */
    uint32_t nan;          /* the saturating variant's NaN */
    uint32_t nan_ieee;     /* IEEE variant: NaN without the sign */
    bool nan_signed;       /* IEEE variant: whether a NaN keeps its sign */
};

OPAQ_DEVICE_CONSTANT struct narrow narrow_e2m1 = {1, 1, 3, 0x7, 0x7, 0x7, 0x7, false};
OPAQ_DEVICE_CONSTANT struct narrow narrow_e4m3 = {3, 7, 7, 0x7E, 0x7F, 0x7F, 0x7F, true};
OPAQ_DEVICE_CONSTANT struct narrow narrow_e5m2 = {2, 15, 7, 0x7B, 0x7C, 0x7F, 0x7E, true};
OPAQ_DEVICE_CONSTANT struct narrow narrow_f16 = {10, 15, 15, 0x7BFF, 0x7C00, 0x7E00, 0x7E00, true};
OPAQ_DEVICE_CONSTANT struct narrow narrow_bf16 = {7, 127, 15, 0x7F7F, 0x7F80, 0x7FC0, 0x7FC0, true};

/* Splits the bits of |x| (finite) into a significand and the exponent of its last bit. */
OPAQ_DEVICE static inline uint32_t narrow_significand(uint32_t magnitude, int *exponent) {
    const uint32_t field = magnitude >> 23;
    *exponent = (field == 0 ? 1 : (int)field) - 127 - 23;
    return field == 0 ? magnitude : (magnitude & 0x7FFFFFu) | 0x800000u;
}

/* The code of a finite |x| rounded to nearest even (or truncated), which may exceed the largest: codes of
 * positive values are consecutive, so a carry out of the mantissa needs no special case. */
OPAQ_DEVICE static inline uint32_t narrow_round(uint32_t magnitude, struct narrow n, bool cut) {
    const int lowest = 1 - n.bias - n.mantissa_bits; /* exponent of the smallest subnormal */
    int exponent;
    const uint32_t significand = narrow_significand(magnitude, &exponent);
    const int drop = 23 - n.mantissa_bits; /* bits a normal result loses */
    const bool normal = exponent + drop >= lowest;
    const int shift = normal ? drop : lowest - exponent;
    if (shift > 25) {
        return 0;
    }
    uint32_t kept = significand >> shift;
    if (!cut) {
        const uint32_t rest = significand & ((1u << shift) - 1u);
        const uint32_t half = 1u << (shift - 1);
        kept += rest > half || (rest == half && (kept & 1u));
    }
    if (!normal) {
        return kept;
    }
    /* kept has its leading bit at mantissa_bits; that bit stands for one step of the exponent field */
    return kept + ((uint32_t)(exponent + drop - lowest) << n.mantissa_bits);
}

OPAQ_DEVICE static inline uint32_t narrow_encode(float value, struct narrow n, bool ieee) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t sign = (bits >> 31) << n.sign_shift;
    if (magnitude > 0x7F800000u) {
        return ieee ? n.nan_ieee | (n.nan_signed ? sign : 0) : n.nan;
    }
    const uint32_t beyond = ieee ? n.overflow : n.largest_code;
    if (magnitude == 0x7F800000u) {
        return sign | beyond;
    }
    const uint32_t code = narrow_round(magnitude, n, false);
    return sign | (code > n.largest_code ? beyond : code);
}

/* Adds u = random / 2^random_bits of one step to |x|, then truncates the sum to the grid. */
OPAQ_DEVICE static inline uint32_t narrow_encode_stochastic(float value, struct narrow n, uint32_t random,
                                                            int random_bits) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) {
        return n.nan;
    }
    const uint32_t sign = (bits >> 31) << n.sign_shift;
    const int field = (int)(magnitude >> 23);
    const int step_field = (field > 128 - n.bias ? field : 128 - n.bias) - n.mantissa_bits;
    /* step * 2^-random_bits, which may be subnormal for bf16 */
    const int unit_field = step_field - random_bits;
    const float unit = unit_field > 0     ? float_from_bits((uint32_t)unit_field << 23)
                       : unit_field > -23 ? float_from_bits(0x400000u >> -unit_field)
                                          : 0.0f;
    const float jittered = float_from_bits(magnitude) + (float)(random & ((1u << random_bits) - 1u)) * unit;
    const uint32_t jittered_bits = float_to_bits(jittered);
    if (jittered_bits >= 0x7F800000u) {
        return sign | n.largest_code;
    }
    const uint32_t code = narrow_round(jittered_bits, n, true);
    return sign | (code > n.largest_code ? n.largest_code : code);
}

OPAQ_DEVICE static inline float narrow_decode(uint32_t code, struct narrow n, int exponent_bits) {
    const uint32_t sign = ((code >> n.sign_shift) & 1u) << 31;
    const uint32_t field = (code >> n.mantissa_bits) & ((1u << exponent_bits) - 1u);
    const uint32_t mantissa = code & ((1u << n.mantissa_bits) - 1u);
    if (field == 0) {
        const float step = float_from_bits((uint32_t)(128 - n.bias - n.mantissa_bits) << 23);
        return float_from_bits(sign | float_to_bits((float)mantissa * step));
    }
    const uint32_t wide_field = field + 127u - (uint32_t)n.bias;
    return float_from_bits(sign | (wide_field << 23) | (mantissa << (23 - n.mantissa_bits)));
}

/* Encodings of the quantizers: saturating, nearest even. */
OPAQ_DEVICE static inline uint32_t encode_e2m1(float value) { return narrow_encode(value, narrow_e2m1, false); }
OPAQ_DEVICE static inline uint32_t encode_e4m3(float value) { return narrow_encode(value, narrow_e4m3, false); }
OPAQ_DEVICE static inline uint32_t encode_e5m2(float value) { return narrow_encode(value, narrow_e5m2, false); }

OPAQ_DEVICE static inline float decode_e2m1(uint32_t code) { return narrow_decode(code, narrow_e2m1, 2); }

OPAQ_DEVICE static inline float decode_e4m3(uint32_t code) {
    return (code & 0x7Fu) == 0x7Fu ? float_nan() : narrow_decode(code, narrow_e4m3, 4);
}

OPAQ_DEVICE static inline float decode_e5m2(uint32_t code) {
    const uint32_t magnitude = code & 0x7Fu;
    if (magnitude > 0x7Cu) {
        return float_nan();
    }
    return magnitude == 0x7Cu ? float_from_bits(0x7F800000u | (code & 0x80u) << 24)
                              : narrow_decode(code, narrow_e5m2, 5);
}

OPAQ_DEVICE static inline float decode_e8m0(uint32_t code) {
    return code == 255 ? float_nan() : float_from_bits(code == 0 ? 0x400000u : code << 23);
}

OPAQ_DEVICE static inline float decode_f16(uint32_t code) {
    const uint32_t magnitude = code & 0x7FFFu;
    if (magnitude < 0x7C00u) {
        return narrow_decode(code, narrow_f16, 5);
    }
    return float_from_bits((code & 0x8000u) << 16 | 0x7F800000u | (magnitude & 0x3FFu) << 13);
}

OPAQ_DEVICE static inline float decode_bf16(uint32_t code) { return float_from_bits(code << 16); }

/* The largest finite f16, bf16 or f32. */
OPAQ_DEVICE static inline float largest_plain(enum opaq_element dtype) {
    return dtype == OPAQ_F16    ? decode_f16(narrow_f16.largest_code)
           : dtype == OPAQ_BF16 ? decode_bf16(narrow_bf16.largest_code)
                                : float_from_bits(0x7F7FFFFFu);
}

/* Conversions of outputs: IEEE, every NaN positive and quiet. */
OPAQ_DEVICE static inline uint32_t encode_f16_ieee(float value) {
    return float_is_nan(value) ? narrow_f16.nan : narrow_encode(value, narrow_f16, true);
}

OPAQ_DEVICE static inline uint32_t encode_bf16_ieee(float value) {
    const uint32_t bits = float_to_bits(value);
    return float_is_nan(value) ? narrow_bf16.nan : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

#endif
