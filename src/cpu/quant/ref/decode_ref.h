/* cpu/quant/ref/decode_ref.h: what a stored code is worth. Depends on segment_ref.h. Specification: docs/formats.md. */
#ifndef OPAQ_CPU_QUANT_REF_DECODE_REF_H
#define OPAQ_CPU_QUANT_REF_DECODE_REF_H

#include "cpu/quant/ref/segment_ref.h"

/* What the codes under scale entry `index` are multiplied with, in operand row r. */
static inline float decode_factor_at(const struct opaq_spec *spec, const struct quant_copy *copy, int64_t r,
                                     int64_t index) {
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

/* What the codes at (r, c) and after are multiplied with, up to the end of their block. */
static inline float decode_factor(const struct opaq_spec *spec, const struct quant_copy *copy, int64_t r,
                                  int64_t c) {
    return decode_factor_at(spec, copy, r, scale_index(copy, r, c));
}

static inline float decode_element(const struct opaq_spec *spec, uint32_t code) {
    return spec->element == OPAQ_E2M1   ? decode_e2m1(code)
           : spec->element == OPAQ_E5M2 ? decode_e5m2(code)
                                        : decode_e4m3(code);
}

static inline void decode_codes(const struct opaq_spec *spec, const uint8_t *codes, int n, float factor,
                                float *values) {
    for (int i = 0; i < n; ++i) {
        values[i] = decode_element(spec, codes[i]) * factor;
    }
}

#endif
