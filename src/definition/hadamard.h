/* definition/hadamard.h: the 16-point Hadamard transform of NVFP4's columnwise copies. Depends on base.
 * The order of the additions is part of the format: docs/formats.md, "Hadamard". */
#ifndef OPAQ_DEFINITION_HADAMARD_H
#define OPAQ_DEFINITION_HADAMARD_H

#include <stdint.h>

#include "base/float_bits.h"
#include "format/element_codec.h"

enum { HADAMARD_SIZE = 16 };

OPAQ_DEVICE static inline void hadamard_signs(float v[HADAMARD_SIZE], uint16_t mask) {
    for (int i = 0; i < HADAMARD_SIZE; ++i) {
        v[i] = mask >> i & 1 ? -v[i] : v[i];
    }
}

/* Sylvester's matrix over 4, which is its own inverse. Scaling by a quarter comes first, to avoid overflow of
 * the sums. */
OPAQ_DEVICE static inline void hadamard_butterflies(float v[HADAMARD_SIZE]) {
    for (int i = 0; i < HADAMARD_SIZE; ++i) {
        v[i] *= 0.25f;
    }
    for (int h = 1; h < HADAMARD_SIZE; h *= 2) {
        for (int i = 0; i < HADAMARD_SIZE; ++i) {
            if ((i & h) == 0) {
                const float a = v[i];
                const float b = v[i + h];
                v[i] = a + b;
                v[i + h] = a - b;
            }
        }
    }
}

OPAQ_DEVICE static inline void hadamard_forward(float v[HADAMARD_SIZE], uint16_t mask) {
    hadamard_signs(v, mask);
    hadamard_butterflies(v);
    for (int i = 0; i < HADAMARD_SIZE; ++i) {
        v[i] = decode_bf16(encode_bf16_ieee(v[i]));
    }
}

OPAQ_DEVICE static inline void hadamard_inverse(float v[HADAMARD_SIZE], uint16_t mask) {
    hadamard_butterflies(v);
    hadamard_signs(v, mask);
}

#endif
