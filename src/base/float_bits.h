/* base/float_bits.h: a float as its bits. Depends on device.h. */
#ifndef OPAQ_BASE_FLOAT_BITS_H
#define OPAQ_BASE_FLOAT_BITS_H

#include <stdint.h>
#include <string.h>

#include "base/device.h"

OPAQ_DEVICE static inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

OPAQ_DEVICE static inline float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Tests on bits, which -ffast-math cannot remove. */
OPAQ_DEVICE static inline int float_is_nan(float value) {
    return (float_to_bits(value) & 0x7FFFFFFFu) > 0x7F800000u;
}

OPAQ_DEVICE static inline int float_is_finite(float value) {
    return (float_to_bits(value) & 0x7F800000u) != 0x7F800000u;
}

OPAQ_DEVICE static inline float float_nan(void) { return float_from_bits(0x7FC00000u); }

OPAQ_DEVICE static inline float float_abs(float value) {
    return float_from_bits(float_to_bits(value) & 0x7FFFFFFFu);
}

/* The smaller one; the other operand if one is NaN. */
OPAQ_DEVICE static inline float float_min(float a, float b) {
    if (float_is_nan(a)) {
        return b;
    }
    return float_is_nan(b) || a < b ? a : b;
}

#endif
