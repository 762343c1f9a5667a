/* cpu/quant/simd/four_over_six_vec.h: nvfp4's option 4over6 in vectors, a block in each lane, as four_over_six() of
 * the reference computes one. Depends on scales_vec.h. Specification: docs/formats.md.
 *
 * Values are compared as magnitudes: signs do not change the size of a difference. */
#ifndef OPAQ_CPU_QUANT_SIMD_FOUR_OVER_SIX_VEC_H
#define OPAQ_CPU_QUANT_SIMD_FOUR_OVER_SIX_VEC_H

#include "cpu/quant/simd/scales_vec.h"

enum { FOUR_OVER_SIX_BLOCK = 16 };

/* Scales that map the largest value of each of FLOATS blocks to 6, or to 4. */
struct candidate {
    vec32 codes;
    vecf factors; /* the factor of elements */
    /* The values of the codes of 1 and 1.5. The other codes' values are these times a power of two, which is
     * exact: four_over_six_in_range(). */
    vecf one;
    vecf one_and_half;
};

struct candidates {
    struct candidate six;
    struct candidate four;
    bool is_regular; /* no element is infinite or scaled beyond the largest value, by neither */
};

/* The errors of both. */
struct candidate_errors {
    vecf six;
    vecf four;
};

/* Whether the values of codes under the tensor's amax are far from subnormal numbers and from infinity, or all zero. */
static inline bool four_over_six_in_range(float amax) {
    return float_to_bits(amax) == 0 || (amax >= 0x1p-100f && amax <= 0x1p100f);
}

VEC_INLINE struct candidate candidate_of(vecf wanted, vecf inverse, vecf stored, const struct opaq_spec *spec) {
    const struct block_scales scales = e4m3_scales(wanted);
    const vecf denominator = vecf_set(6.0f * (float)spec->e4m3_max);
    return (struct candidate){scales.codes, minf(1.0f / (scales.factors * inverse), vecf_set(FLT_MAX)),
                              scales.factors * stored / denominator,
                              1.5f * scales.factors * stored / denominator};
}

/* From the amaxes of blocks, G, 1 / G, and the tensor's amax. */
VEC_INLINE struct candidates candidates_of(vecf amax, vecf global, vecf inverse, vecf stored,
                                           const struct opaq_spec *spec) {
    const vecf base = amax / 6.0f * global;
    /* the range check of nvfp4_scales() for `base`; with the other, larger scale elements are smaller */
    const uint32_t low = least_normal(OPAQ_E4M3);
    const vec32 over_low = clear32(equal32((vec32)amax, 0), (vec32)base - low);
    return (struct candidates){candidate_of(base, inverse, stored, spec),
                               candidate_of(base * 1.5f, inverse, stored, spec),
                               !any32(above32(over_low, 0x43E80000u - low))};
}

/* The sum with the error of one more element of each block. */
VEC_INLINE vecf add_error(vecf sum, const struct candidate *candidate, vecf magnitude, bool is_mse) {
    const vecf scaled = minf(magnitude * candidate->factors, vecf_set(largest_value(OPAQ_E2M1)));
    const vecf power = (vecf)max32((vec32)scaled & 0x7F800000u, vec32_set(least_normal(OPAQ_E2M1)));
    const vecf rounded =
        multiply_add(power, vecf_set(-0x1p22f), multiply_add(power, vecf_set(0x1p22f), scaled));
    const vecf unit = where_bit((vec32)rounded, 22, candidate->one, candidate->one_and_half);
    const vecf difference = (vecf)((vec32)rounded & 0x7F800000u) * unit - magnitude;
    return is_mse ? sum + difference * difference : sum + (vecf)((vec32)difference & 0x7FFFFFFFu);
}

VEC_INLINE void add_errors(struct candidate_errors *errors, const struct candidates *candidates, vecf magnitude,
                           bool is_mse) {
    errors->six = add_error(errors->six, &candidates->six, magnitude, is_mse);
    errors->four = add_error(errors->four, &candidates->four, magnitude, is_mse);
}

VEC_INLINE struct candidate_errors no_errors(void) {
    return (struct candidate_errors){vecf_set(0.0f), vecf_set(0.0f)};
}

/* The 4 wins only if its error is smaller. */
VEC_INLINE struct block_scales better_scales(const struct candidates *candidates,
                                             const struct candidate_errors *errors) {
    const mask32 four = below(errors->four, errors->six);
    return (struct block_scales){
        replace32(four, candidates->six.codes, candidates->four.codes),
        (vecf)replace32(four, (vec32)candidates->six.factors, (vec32)candidates->four.factors),
        candidates->is_regular};
}

/* ---- contiguous blocks of rows ---- */

/* FLOATS blocks of 8 dwords, in 8 vectors, to dword i of all of them in to[i], dealt out by lane. */
VEC_INLINE void blocks_to_lanes(const vec32 from[8], vec32 to[8]) {
    vec32 half[2][4];
    for (int i = 0; i < 4; ++i) {
        half[0][i] = lanes_even(from[2 * i], from[2 * i + 1]);
        half[1][i] = lanes_odd(from[2 * i], from[2 * i + 1]);
    }
    for (int h = 0; h < 2; ++h) {
        vec32 quad[2][2];
        for (int i = 0; i < 2; ++i) {
            quad[0][i] = quads_first(half[h][2 * i], half[h][2 * i + 1]);
            quad[1][i] = quads_second(half[h][2 * i], half[h][2 * i + 1]);
        }
        for (int q = 0; q < 2; ++q) {
            to[4 * h + 2 * q] = dwords_even(quad[q][0], quad[q][1]);
            to[4 * h + 2 * q + 1] = dwords_odd(quad[q][0], quad[q][1]);
        }
    }
}

/* The magnitudes of element i of FLOATS blocks of a row, dealt out by lane, in to[i]. */
VEC_INLINE void magnitudes_in_lanes(const char *x, enum opaq_element dtype, vecf to[FOUR_OVER_SIX_BLOCK]) {
    vec32 from[8];
    vec32 lanes[16];
    if (dtype == OPAQ_F32) {
        vec32 second[8];
        for (int i = 0; i < 8; ++i) {
            const vec32 a = vec_load(x + (2 * i) * VEC_BYTES);
            const vec32 b = vec_load(x + (2 * i + 1) * VEC_BYTES);
            from[i] = FLOATS == 16 ? halves_first(a, b) : a;
            second[i] = FLOATS == 16 ? halves_second(a, b) : b;
        }
        blocks_to_lanes(from, lanes);
        blocks_to_lanes(second, lanes + 8);
        for (int i = 0; i < 16; ++i) {
            to[i] = (vecf)(lanes[i] & 0x7FFFFFFFu);
        }
        return;
    }
    for (int i = 0; i < 8; ++i) {
        from[i] = vec_load(x + i * VEC_BYTES);
    }
    blocks_to_lanes(from, lanes);
    for (int i = 0; i < 8; ++i) {
        const struct step pair = {{lanes[i], vec32_set(0)}};
        const struct step_floats magnitudes = step_magnitudes(pair, dtype);
        to[2 * i] = magnitudes.even;
        to[2 * i + 1] = magnitudes.odd;
    }
}

VEC_INLINE struct candidate_errors row_errors(const char *x, const struct candidates *candidates,
                                              enum opaq_element dtype, bool is_mse) {
    vecf magnitude[FOUR_OVER_SIX_BLOCK];
    struct candidate_errors errors = no_errors();
    magnitudes_in_lanes(x, dtype, magnitude);
    for (int i = 0; i < FOUR_OVER_SIX_BLOCK; ++i) {
        add_errors(&errors, candidates, magnitude[i], is_mse);
    }
    return errors;
}

/* Of blocks of one row, or of up to 16: a tree of sums over the rows, in which missing rows count as zeros. */
VEC_INLINE struct candidate_errors block_errors(const char *x, int64_t row_bytes, int rows,
                                                const struct candidates *candidates, enum opaq_element dtype,
                                                bool is_mse) {
    if (rows == 1) {
        return row_errors(x, candidates, dtype, is_mse);
    }
    struct candidate_errors errors[FOUR_OVER_SIX_BLOCK];
    for (int i = 0; i < FOUR_OVER_SIX_BLOCK; ++i) {
        errors[i] = i < rows ? row_errors(x + i * row_bytes, candidates, dtype, is_mse) : no_errors();
    }
    for (int half = FOUR_OVER_SIX_BLOCK / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) {
            errors[i].six = errors[i].six + errors[i + half].six;
            errors[i].four = errors[i].four + errors[i + half].four;
        }
    }
    return errors[0];
}

/* The scales of FLOATS contiguous blocks of `rows` rows. */
VEC_INLINE struct block_scales four_over_six_blocks(const char *x, int64_t row_bytes, int rows, vecf amax,
                                                    float global, float stored, const struct opaq_spec *spec,
                                                    enum opaq_element dtype) {
    const struct candidates candidates = candidates_of((vecf)deal_out((vec32)amax), vecf_set(global),
                                                       vecf_set(1.0f / global), vecf_set(stored), spec);
    const struct candidate_errors errors = spec->error_mode == OPAQ_ERROR_MODE_MSE
                                               ? block_errors(x, row_bytes, rows, &candidates, dtype, true)
                                               : block_errors(x, row_bytes, rows, &candidates, dtype, false);
    const struct block_scales scales = better_scales(&candidates, &errors);
    return (struct block_scales){gather_deal(scales.codes), (vecf)gather_deal((vec32)scales.factors),
                                 scales.is_regular};
}

#endif
