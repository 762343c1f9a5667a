/* cpu/quant/simd/scales_vec.h: computes scales from amaxes, one in each lane, as scale_rules.h computes one. Depends
 * on encode_vec.h. Specification: docs/formats.md. */
#ifndef OPAQ_CPU_QUANT_SIMD_SCALES_VEC_H
#define OPAQ_CPU_QUANT_SIMD_SCALES_VEC_H

#include "cpu/quant/simd/encode_vec.h"
#include "cpu/quant/simd/specialize_vec.h"
#include "definition/scale_rules.h"

/* Scale codes in the low bytes, and the factors of elements. */
struct block_scales {
    vec32 codes;
    vecf factors;
    bool is_regular; /* no element is NaN, infinite or scaled beyond the largest value */
};

/* NaN's code and NaN itself where `wanted` is NaN. */
VEC_INLINE struct block_scales with_nans(struct block_scales scales, vecf wanted, uint32_t code) {
    const mask32 nans = above32((vec32)wanted & 0x7FFFFFFFu, 0x7F800000u);
    return (struct block_scales){replace32(nans, scales.codes, vec32_set(code)),
                                 (vecf)replace32(nans, (vec32)scales.factors, vec32_set(0x7FC00000u)), false};
}

/* Rounds nonnegative floats to E4M3; returns codes and values. */
VEC_INLINE struct block_scales e4m3_scales(vecf wanted) {
    const vecf kept = minf(wanted, vecf_set(448.0f));
    const vecf grid = grid_of(kept, OPAQ_E4M3);
    const vecf sum = kept + grid;
    return (struct block_scales){codes_of_sum(sum, OPAQ_E4M3) - code_excess(OPAQ_E4M3), sum - grid, false};
}

/* nvfp4_block(), with `global` from nvfp4_global(), accepted by nvfp4_global_in_range(), and `inverse` = 1 / global.
 * */
VEC_INLINE struct block_scales nvfp4_scales(vecf amax, vecf global, vecf inverse, const struct opaq_spec *spec,
                                            bool is_te) {
    if (is_te) {
        const vecf wanted = amax * (global * (1.0f / 6.0f));
        struct block_scales scales = e4m3_scales(wanted);
        scales.factors = minf(1.0f / (scales.factors * inverse), vecf_set(FLT_MAX));
        /* Where a scale is normal and 448 at most, or rounded down to it, it is at most a sixteenth too small, and
         * what it scales to 6.4 still rounds to 6. A zero block is fine too. */
        const uint32_t low = least_normal(OPAQ_E4M3);
        const vec32 over_low = clear32(equal32((vec32)amax, 0), (vec32)wanted - low);
        scales.is_regular = !any32(above32(over_low, 0x43E80000u - low));
        return scales;
    }
    if (spec->rule == OPAQ_RULE_COMPRESSED_TENSORS) {
        const vecf wanted = global * (amax / 6.0f);
        struct block_scales scales = with_nans(e4m3_scales(wanted), wanted, 0x7F);
        const mask32 zeros = equal32((vec32)scales.factors, 0);
        scales.codes = replace32(zeros, scales.codes, vec32_set(0x20));
        scales.factors = (vecf)replace32(zeros, (vec32)scales.factors, (vec32)vecf_set(0.125f));
        scales.factors = scales.factors / global;
        return scales;
    }
    const mask32 no_global = equal32((vec32)global, 0);
    const vecf wanted = (vecf)replace32(no_global, (vec32)(amax / (6.0f * global)), (vec32)vecf_set(1.0f));
    const vec32 at_least = max32((vec32)wanted & 0x7FFFFFFFu, (vec32)vecf_set(0x1p-9f));
    const vec32 kept = replace32(equal32((vec32)wanted, 0), at_least, (vec32)vecf_set(1.0f));
    struct block_scales scales = with_nans(e4m3_scales((vecf)kept), wanted, 0x7F);
    scales.factors = (vecf)replace32(no_global, (vec32)(scales.factors * global), vec32_set(0x7F800000u));
    return scales;
}

/* Whether nvfp4_scales() handles it: under rule te finite and large enough that no intermediate result is subnormal,
 * else not negative. A caller may pass any amax. */
static inline bool nvfp4_global_in_range(float global, bool is_te) {
    return is_te ? global >= 0x1p-116f && float_is_finite(global) : float_to_bits(global) <= 0x7F800000u;
}

/* Exponents by the rule's own function, one after another. */
VEC_INLINE vec32 mx_exponents(vecf amax, const struct opaq_spec *spec) {
    float each[FLOATS];
    uint32_t exponent[FLOATS];
    vec_store(each, (vec32)amax);
    for (int i = 0; i < FLOATS; ++i) {
        exponent[i] = mx_exponent(spec, each[i]);
    }
    return vec_load(exponent);
}

/* mx_exponent() and mx_factor(). */
VEC_INLINE struct block_scales mx_scales(vecf amax, enum opaq_element element, const struct opaq_spec *spec,
                                         bool is_te) {
    const uint32_t emax = element == OPAQ_E2M1 ? 2 : element == OPAQ_E4M3 ? 8 : 15;
    vec32 codes;
    if (!is_te && spec->rule == OPAQ_RULE_MODELOPT) {
        codes = mx_exponents(amax, spec);
    } else if (is_te || spec->rule == OPAQ_RULE_RCEIL) {
        const vec32 bits = (vec32)(amax * (1.0f / largest_value(element)));
        /* up to the next power of two, of which the smallest is 2^-127, a subnormal number */
        const mask32 normal = above32(bits, 0x7FFFFFu);
        const vec32 up = bits + replace32(normal, vec32_set(0x3FFFFFu), vec32_set(0x7FFFFFu));
        codes = min32(up >> 23, vec32_set(254));
    } else {
        const uint32_t add = spec->rule == OPAQ_RULE_OCP ? 0 : 0x200000u;
        codes = max32(((vec32)amax + add) >> 23, vec32_set(emax)) - emax;
    }
    const vecf factors = (vecf)max32((254u - codes) << 23, vec32_set(0x400000u));
    const struct block_scales scales = {codes, factors, !any32(above32((vec32)amax, 0x7F7FFFFFu))};
    if (is_te || spec->rule == OPAQ_RULE_MODELOPT) {
        return scales;
    }
    /* amaxes whose exponent field becomes that of infinity when `add` is added */
    const uint32_t limit = spec->rule == OPAQ_RULE_COMPRESSED_TENSORS ? 0x7F5FFFFFu : 0x7F7FFFFFu;
    const mask32 infinite = above32((vec32)amax, limit);
    return (struct block_scales){replace32(infinite, codes, vec32_set(255)),
                                 (vecf)replace32(infinite, (vec32)factors, vec32_set(0x7FC00000u)), false};
}

/* The same for any element, out of line. */
VEC_OUTLINE struct block_scales mx_scales_of(vecf amax, enum opaq_element element, const struct opaq_spec *spec,
                                             bool is_te) {
    struct block_scales scales;
    if (is_te) {
        FOR_ELEMENT(element, scales = mx_scales(amax, ELEMENT, spec, true));
    } else {
        scales = mx_scales(amax, element, spec, false);
    }
    return scales;
}

struct fp8_scales {
    vecf apply;
    vecf stored;
};

/* fp8_scale_from_amax() */
VEC_INLINE struct fp8_scales fp8_scales_from_amax(vecf amax, const struct opaq_spec *spec,
                                                  struct encode_how how, float limit) {
    if (how.not_te) {
        const vecf scale = amax / largest_value(how.element);
        const vecf instead = vecf_set(spec->rule == OPAQ_RULE_MODELOPT ? 1.0f : FLT_EPSILON);
        const vec32 used = replace32(equal32((vec32)scale, 0), (vec32)scale, (vec32)instead);
        return (struct fp8_scales){(vecf)used, (vecf)used};
    }
    const vec32 floored = max32((vec32)amax, (vec32)vecf_set(spec->epsilon));
    vec32 scale = (vec32)(largest_value(how.element) / (vecf)floored);
    scale = replace32(above32(scale, 0x7F7FFFFFu), scale, (vec32)vecf_set(limit));
    scale = spec->options & OPAQ_POW2 ? scale & 0xFF800000u : scale;
    const vec32 no_scale = (vec32)vecf_set(1.0f);
    scale = replace32(equal32(floored, 0), scale, no_scale);
    scale = replace32(above32(floored, 0x7F7FFFFFu), scale, no_scale);
    return (struct fp8_scales){(vecf)scale, 1.0f / (vecf)scale};
}

#endif
