/* definition/plain_row.h: converts f32, bf16 or f16 elements to float32 and back, in loops that compilers
 * vectorize. Depends on format. */
#ifndef OPAQ_DEFINITION_PLAIN_ROW_H
#define OPAQ_DEFINITION_PLAIN_ROW_H

#include <stdbool.h>

#include "format/element_codec.h"

/* decode_f16 without branches: rebiases the exponent; a subnormal number is given the exponent of the smallest
 * normal one, whose implicit leading one is then subtracted. */
OPAQ_DEVICE static inline float plain_decode_f16(uint32_t code) {
    const uint32_t magnitude = code & 0x7FFFu;
    const bool is_small = magnitude < 0x400u;
    const uint32_t exponent = (is_small ? 113u : 112u) + (magnitude >= 0x7C00u ? 112u : 0u);
    const float lead = float_from_bits(is_small ? 113u << 23 : 0u);
    const float value = float_from_bits((magnitude << 13) + (exponent << 23)) - lead;
    return float_from_bits(float_to_bits(value) | (code & 0x8000u) << 16);
}

/* `step` is a constant 1 in the contiguous case, so that compilers vectorize it. */
OPAQ_DEVICE static inline __attribute__((always_inline)) void plain_row_load_step(const void *data,
                                                                                  enum opaq_element dtype,
                                                                                  int64_t step, int n,
                                                                                  float *__restrict__ to) {
    if (dtype == OPAQ_F32) {
        for (int i = 0; i < n; ++i) {
            to[i] = ((const float *)data)[i * step];
        }
    } else if (dtype == OPAQ_BF16) {
        for (int i = 0; i < n; ++i) {
            to[i] = decode_bf16(((const uint16_t *)data)[i * step]);
        }
    } else {
        for (int i = 0; i < n; ++i) {
            to[i] = plain_decode_f16(((const uint16_t *)data)[i * step]);
        }
    }
}

OPAQ_DEVICE static inline __attribute__((always_inline)) void plain_row_store_step(
    void *data, enum opaq_element dtype, int64_t step, int n, const float *__restrict__ from) {
    if (dtype == OPAQ_F32) {
        for (int i = 0; i < n; ++i) {
            ((float *)data)[i * step] = float_is_nan(from[i]) ? float_nan() : from[i];
        }
    } else if (dtype == OPAQ_BF16) {
        for (int i = 0; i < n; ++i) {
            ((uint16_t *)data)[i * step] = (uint16_t)encode_bf16_ieee(from[i]);
        }
    } else {
        for (int i = 0; i < n; ++i) {
            ((uint16_t *)data)[i * step] = (uint16_t)encode_f16_ieee(from[i]);
        }
    }
}

OPAQ_DEVICE static inline int64_t plain_bytes(enum opaq_element dtype, int64_t count) {
    return dtype == OPAQ_F32 ? 4 * count : 2 * count;
}

/* Loads n elements, `step` apart, starting at element `start`. */
OPAQ_DEVICE static inline void plain_row_load(const void *data, enum opaq_element dtype, int64_t start,
                                              int64_t step, int n, float *to) {
    const char *const first = (const char *)data + plain_bytes(dtype, start);
    if (step == 1) {
        plain_row_load_step(first, dtype, 1, n, to);
    } else {
        plain_row_load_step(first, dtype, step, n, to);
    }
}

/* Rounds once; every NaN becomes the canonical one. */
OPAQ_DEVICE static inline void plain_row_store(void *data, enum opaq_element dtype, int64_t start, int64_t step,
                                               int n, const float *from) {
    char *const first = (char *)data + plain_bytes(dtype, start);
    if (step == 1) {
        plain_row_store_step(first, dtype, 1, n, from);
    } else {
        plain_row_store_step(first, dtype, step, n, from);
    }
}

#endif
