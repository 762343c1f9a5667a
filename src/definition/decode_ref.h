/* definition/decode_ref.h: decodes stored codes. Depends on segment_ref.h. Specification: docs/formats.md. */
#ifndef OPAQ_DEFINITION_DECODE_REF_H
#define OPAQ_DEFINITION_DECODE_REF_H

#include "definition/segment_ref.h"

/* The factor of the codes under scale entry `index`, in operand row r. */
OPAQ_DEVICE static inline float decode_factor_at(const struct opaq_spec *spec, const struct quant_copy *copy,
                                                 int64_t r, int64_t index) {
    switch ((enum opaq_format)spec->format) {
    case OPAQ_MXFP8:
    case OPAQ_MXFP4:
        return decode_e8m0(((const uint8_t *)copy->scale)[index]);
    case OPAQ_NVFP4:
        return nvfp4_decode_factor(spec, ((const uint8_t *)copy->scale)[index],
                                   copy->amax[r * copy->amax_step]);
    case OPAQ_FP8:
    case OPAQ_FP8ROW:
    case OPAQ_FP8BLK1:
    case OPAQ_FP8BLK2:
        break;
    }
    return ((const float *)copy->scale)[index];
}

/* The factor of the codes from (r, c) to the end of their block. */
OPAQ_DEVICE static inline float decode_factor(const struct opaq_spec *spec, const struct quant_copy *copy,
                                              int64_t r, int64_t c) {
    return decode_factor_at(spec, copy, r, scale_index(copy, r, c));
}

OPAQ_DEVICE static inline float decode_element(const struct opaq_spec *spec, uint32_t code) {
    return spec->element == OPAQ_E2M1   ? decode_e2m1(code)
           : spec->element == OPAQ_E5M2 ? decode_e5m2(code)
                                        : decode_e4m3(code);
}

OPAQ_DEVICE static inline void decode_codes(const struct opaq_spec *spec, const uint8_t *codes, int n,
                                            float factor, float *values) {
    for (int i = 0; i < n; ++i) {
        values[i] = decode_element(spec, codes[i]) * factor;
    }
}

/* Decodes n <= SEGMENT elements under one scale, from (r, c) on; if `undo`, through the copy's inverse Hadamard
 * transform (n is then 16). */
OPAQ_DEVICE static inline void decode_segment(const struct opaq_spec *spec, const struct quant_copy *copy,
                                              bool undo, int64_t r, int64_t c, int n, float *values) {
    uint8_t codes[SEGMENT];
    copy_load_codes(copy, r, c, n, codes);
    decode_codes(spec, codes, n, decode_factor(spec, copy, r, c), values);
    if (copy->is_hadamard && undo) {
        hadamard_inverse(values, spec->hadamard_mask);
    }
}

/* Decodes into the copy's operand. */
OPAQ_DEVICE static inline void dequantize_segment(const struct opaq_spec *spec, const struct quant_copy *copy,
                                                  int64_t r, int64_t c, int n) {
    float values[SEGMENT];
    assert(n > 0 && (!copy->is_hadamard || n == HADAMARD_SIZE));
    decode_segment(spec, copy, true, r, c, n, values);
    segment_store(&copy->operand, r, c, n, values);
}

#endif
