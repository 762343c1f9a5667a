/* definition/scale_rules.h: computes scales from amaxes, under every rule. Depends on format. Specification:
 * docs/formats.md, "Arithmetic" and "Scale rules". One rounding per operation: this file is compiled without
 * contraction into fused multiply-adds, like all of opaq. */
#ifndef OPAQ_DEFINITION_SCALE_RULES_H
#define OPAQ_DEFINITION_SCALE_RULES_H

#include <float.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/float_bits.h"
#include "format/element_codec.h"
#include "opaq/spec.h"

/* Whether the rule divides by the scale (true) or multiplies with its inverse. */
OPAQ_DEVICE static inline bool rule_divides(const struct opaq_spec *spec) {
    return spec->rule == OPAQ_RULE_COMPRESSED_TENSORS || spec->rule == OPAQ_RULE_MODELOPT;
}

/* ---- fp8, fp8row, fp8blk1, fp8blk2 ---- */

struct fp8_scale {
    float apply;  /* multiplier of x (rule te), or divisor (rule_divides) */
    float stored; /* multiplier of dequantization */
};

/* The scale that the caller supplied. */
OPAQ_DEVICE static inline struct fp8_scale fp8_scale_given(const struct opaq_spec *spec, float scale) {
    const float stored = rule_divides(spec) ? scale : 1.0f / scale;
    return (struct fp8_scale){scale, float_is_nan(stored) ? float_nan() : stored};
}

/* The replacement of an infinite scale. */
OPAQ_DEVICE static inline float fp8_scale_limit(const struct opaq_spec *spec, enum opaq_element dtype) {
    const bool blockwise = spec->format == OPAQ_FP8BLK1 || spec->format == OPAQ_FP8BLK2;
    return blockwise ? largest_plain(dtype) : FLT_MAX;
}

OPAQ_DEVICE static inline struct fp8_scale fp8_scale_from_amax(const struct opaq_spec *spec, float amax,
                                                               float limit) {
    const float largest = spec->element == OPAQ_E5M2 ? 57344.0f : 448.0f;
    if (rule_divides(spec)) {
        const float scale = amax / largest;
        const float instead = spec->rule == OPAQ_RULE_MODELOPT ? 1.0f : FLT_EPSILON;
        const float used = scale == 0.0f ? instead : float_is_nan(scale) ? float_nan() : scale;
        return (struct fp8_scale){used, used};
    }
    const float floored = amax < spec->epsilon ? spec->epsilon : amax;
    float scale = 1.0f;
    if (float_is_finite(floored) && floored != 0.0f) {
        scale = largest / floored;
        scale = float_is_finite(scale) ? scale : limit;
        if (spec->options & OPAQ_POW2) {
            scale = float_from_bits(float_to_bits(scale) & 0xFF800000u);
        }
    }
    return (struct fp8_scale){scale, 1.0f / scale};
}

/* ---- mxfp8, mxfp4 ---- */

/* The smallest e with 2^(e-127) >= value; value at least 0, not NaN. */
OPAQ_DEVICE static inline uint32_t e8m0_round_up(float value) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t field = bits >> 23;
    const uint32_t mantissa = bits & 0x7FFFFFu;
    if (field >= 254) {
        return 254;
    }
    return field + (field == 0 ? mantissa > 0x400000u : mantissa > 0);
}

/* ceil of log2(value) rounded to a float, for a finite value above 0. log2(2^k (1 + f 2^-23)) rounds to k while
 * f is at most half a unit in the last place of k, which in units of f is ln(2)/2 times the power of two at or
 * below |k| (the next lower one where a negative k is itself a power of two, since the floats above it lie
 * closer). No libm, so that the result is the same everywhere. */
OPAQ_DEVICE static inline int ceil_log2_rounded(float value) {
    static const uint32_t within[8] = {0, 0, 1, 2, 5, 11, 22, 44}; /* floor(2^j ln(2) / 2) */
    uint32_t bits = float_to_bits(value);
    int k = (int)(bits >> 23) - 127;
    uint32_t fraction = bits & 0x7FFFFFu;
    if (k == -127) { /* subnormal */
        for (k = -126; fraction < 0x800000u; --k) {
            fraction <<= 1;
        }
        fraction &= 0x7FFFFFu;
    }
    const unsigned size = (unsigned)(k < 0 ? -k : k);
    int j = 0;
    while (size >> (j + 1)) {
        ++j;
    }
    if (k < 0 && (size & (size - 1)) == 0 && j > 0) {
        --j;
    }
    return k + (fraction > (size == 0 ? 0 : within[j]));
}

OPAQ_DEVICE static inline uint32_t mx_exponent(const struct opaq_spec *spec, float amax) {
    const bool is_e2m1 = spec->element == OPAQ_E2M1;
    const bool is_e5m2 = spec->element == OPAQ_E5M2;
    const float largest = is_e2m1 ? 6.0f : is_e5m2 ? 57344.0f : 448.0f;
    const uint32_t emax = is_e2m1 ? 2 : is_e5m2 ? 15 : 8;
    const uint32_t bits = float_to_bits(amax);
    switch ((enum opaq_rule)spec->rule) {
    case OPAQ_RULE_OCP: {
        const uint32_t field = bits >> 23;
        return field == 255 ? 255 : field > emax ? field - emax : 0;
    }
    case OPAQ_RULE_COMPRESSED_TENSORS: {
        const uint32_t field = (bits + 0x200000u) >> 23;
        return field >= 255 ? 255 : field > emax ? field - emax : 0;
    }
    case OPAQ_RULE_MODELOPT: {
        const float descale = amax / largest;
        if (float_is_nan(descale) || descale == 0.0f) {
            return 0;
        }
        const int e = float_is_finite(descale) ? ceil_log2_rounded(descale) + 127 : 254;
        return e < 0 ? 0 : e > 254 ? 254 : (uint32_t)e;
    }
    case OPAQ_RULE_RCEIL:
        if (!float_is_finite(amax)) {
            return 255;
        }
        break;
    case OPAQ_RULE_TE:
        break;
    }
    return e8m0_round_up(amax * (1.0f / largest));
}

/* 2^(127-e): the multiplier of the data. */
OPAQ_DEVICE static inline float mx_factor(uint32_t exponent) {
    if (exponent >= 254) {
        return exponent == 254 ? 0x1p-127f : float_nan();
    }
    return float_from_bits((254u - exponent) << 23);
}

/* ---- nvfp4 ---- */

struct nvfp4_scale {
    uint32_t code; /* E4M3 */
    float apply;   /* multiplier of x (rule te), or divisor (rule_divides) */
};

/* G of docs/formats.md: the factor of block amaxes, from the tensor's amax. Under rule modelopt: c. */
OPAQ_DEVICE static inline float nvfp4_global(const struct opaq_spec *spec, float amax) {
    if (spec->rule == OPAQ_RULE_MODELOPT) {
        return amax / 2688.0f;
    }
    if (spec->rule == OPAQ_RULE_COMPRESSED_TENSORS) {
        const float global = 1.0f / (amax < FLT_MIN ? FLT_MIN : amax) * 2688.0f;
        return float_is_finite(global) ? global : 1.0f;
    }
    const float global = float_min((float)spec->e4m3_max * 6.0f / amax, FLT_MAX);
    return amax == 0.0f || global == 0.0f ? 1.0f : global;
}

/* t of docs/formats.md, for rule te. */
OPAQ_DEVICE static inline float nvfp4_encode_factor(uint32_t code, float global) {
    return float_min(1.0f / (decode_e4m3(code) * (1.0f / global)), FLT_MAX);
}

OPAQ_DEVICE static inline struct nvfp4_scale nvfp4_block(const struct opaq_spec *spec, float global,
                                                         float amax) {
    if (spec->rule == OPAQ_RULE_COMPRESSED_TENSORS) {
        uint32_t code = encode_e4m3(global * (amax / 6.0f));
        code = code == 0 ? encode_e4m3(0.125f) : code;
        return (struct nvfp4_scale){code, decode_e4m3(code) / global};
    }
    if (spec->rule == OPAQ_RULE_MODELOPT) {
        const float scale = global == 0.0f ? 1.0f : amax / (6.0f * global);
        const float at_least = scale < 0x1p-9f && scale != 0.0f ? 0x1p-9f : scale;
        const uint32_t code = encode_e4m3(at_least == 0.0f ? 1.0f : at_least);
        const float infinity = float_from_bits(0x7F800000u); /* makes every code 0 */
        return (struct nvfp4_scale){code, global == 0.0f ? infinity : decode_e4m3(code) * global};
    }
    const uint32_t code = encode_e4m3(float_min(amax * (global * (1.0f / 6.0f)), FLT_MAX));
    return (struct nvfp4_scale){code, nvfp4_encode_factor(code, global)};
}

/* The float to store for an amax: the amax itself, or with OPAQ_GLOBAL the rule's global scale. */
OPAQ_DEVICE static inline float nvfp4_stored(const struct opaq_spec *spec, float amax) {
    const float stored = spec->options & OPAQ_GLOBAL ? nvfp4_global(spec, amax) : amax;
    return float_is_nan(stored) ? float_nan() : stored;
}

/* G (or c) from the stored float. */
OPAQ_DEVICE static inline float nvfp4_global_of_stored(const struct opaq_spec *spec, float stored) {
    return spec->options & OPAQ_GLOBAL ? stored : nvfp4_global(spec, stored);
}

/* The multiplier of codes, from a block's scale and the stored float. */
OPAQ_DEVICE static inline float nvfp4_decode_factor(const struct opaq_spec *spec, uint32_t code, float stored) {
    const float scale = decode_e4m3(code);
    if (spec->options & OPAQ_GLOBAL) {
        /* zero bytes decode to zeros in every format, so 0/0 is 0 here */
        const bool is_empty = scale == 0.0f && stored == 0.0f;
        return spec->rule == OPAQ_RULE_MODELOPT ? scale * stored : is_empty ? 0.0f : scale / stored;
    }
    return scale * stored * (1.0f / (6.0f * (float)spec->e4m3_max));
}

#endif
