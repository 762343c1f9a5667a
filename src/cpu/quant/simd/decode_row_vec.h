/* cpu/quant/simd/decode_row_vec.h: decodes part of an operand row to floats for products, in vectors. Depends on
 * decode_factors_vec.h. Specification: docs/formats.md. */
#ifndef OPAQ_CPU_QUANT_SIMD_DECODE_ROW_VEC_H
#define OPAQ_CPU_QUANT_SIMD_DECODE_ROW_VEC_H

#include "cpu/quant/simd/decode_factors_vec.h"

/* Decodes STEP codes; NaNs are not made canonical. */
VEC_INLINE void decode_row_step(enum opaq_element element, const uint8_t *codes, vecf factors, float *to) {
    if (element == OPAQ_E2M1) {
        const vec32 pairs = load_bytes_as_dwords(codes);
        const vec32 even = (vec32)(e2m1_values(pairs) * factors);
        const vec32 odd = (vec32)(e2m1_values(pairs >> 4) * factors);
        vec_store(to, interleave_first(even, odd));
        vec_store(to + FLOATS, interleave_second(even, odd));
    } else {
        const struct decoded values = byte_values(codes, element);
        vec_store(to, (vec32)(values.first * factors));
        vec_store(to + FLOATS, (vec32)(values.second * factors));
    }
}

VEC_INLINE vecf decode_step_factors(const float *factors, int64_t i, int block) {
    return STEP > block ? set_halves(&factors[2 * i], &factors[2 * i + 1])
                        : vecf_set(factors[i * STEP / block]);
}

VEC_INLINE void decode_row_run(enum opaq_element element, int block, const uint8_t *codes, int n,
                               const float *factors, float *to) {
    const int packing = element == OPAQ_E2M1 ? 2 : 1;
    const int steps = n / STEP;
    for (int i = 0; i < steps; ++i) {
        decode_row_step(element, codes + i * STEP / packing, decode_step_factors(factors, i, block),
                        to + i * STEP);
    }
    const int left = n - steps * STEP;
    if (left > 0) {
        uint8_t staged_codes[STEP] = {0};
        float staged[STEP];
        memcpy(staged_codes, codes + steps * STEP / packing, (size_t)ceil_div(left, packing));
        decode_row_step(element, staged_codes, decode_step_factors(factors, steps, block), staged);
        memcpy(to + steps * STEP, staged, (size_t)left * sizeof *to);
    }
}

/* n codes of operand row `row` from column k on, a multiple of 128; they are contiguous at `codes`. At most
 * SCALED_AT_ONCE. */
void VEC_NAME(decode_row)(const struct opaq_spec *spec, const struct quant_copy *copy, int64_t row, int64_t k,
                          const uint8_t *codes, int n, float *to) {
    struct decode_factors factors;
    if (!format_has_bytes(spec)) {
        factors_of_floats(copy, row, k, n, &factors);
        if (spec->element == OPAQ_E4M3) {
            decode_row_run(OPAQ_E4M3, 128, codes, n, factors.value, to);
        } else {
            decode_row_run(OPAQ_E5M2, 128, codes, n, factors.value, to);
        }
        return;
    }
    const int block = spec->format == OPAQ_NVFP4 ? 16 : 32;
    const int64_t count = ceil_div(n, block);
    factors_of_bytes(copy, spec, row, k / block, count, &factors);
    factors.value[min_int64(count, SCALES_AT_ONCE - 1)] = factors.value[count - 1]; /* read, but not used */
    if (spec->format == OPAQ_NVFP4) {
        decode_row_run(OPAQ_E2M1, 16, codes, n, factors.value, to);
    } else if (spec->format == OPAQ_MXFP4) {
        decode_row_run(OPAQ_E2M1, 32, codes, n, factors.value, to);
    } else if (spec->element == OPAQ_E4M3) {
        decode_row_run(OPAQ_E4M3, 32, codes, n, factors.value, to);
    } else {
        decode_row_run(OPAQ_E5M2, 32, codes, n, factors.value, to);
    }
}

#endif
