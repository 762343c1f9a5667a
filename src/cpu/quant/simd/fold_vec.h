/* cpu/quant/simd/fold_vec.h: the amaxes of FLOATS consecutive blocks, in one vector. Depends on encode_vec.h.
 *
 * Vectors are folded in pairs: each fold halves the bytes per block and the number of vectors, so that all
 * blocks share the shuffles. */
#ifndef OPAQ_CPU_QUANT_SIMD_FOLD_VEC_H
#define OPAQ_CPU_QUANT_SIMD_FOLD_VEC_H

#include "cpu/quant/simd/encode_vec.h"

/* Keys of the blocks' elements, in `count` vectors; it is FLOATS blocks, so a block is count / FLOATS vectors. Gives
 * one key per block, in the order of the blocks. The vectors are used up. */
VEC_INLINE vec32 fold_keys(vec32 *key, int count, enum opaq_element dtype) {
    enum { HALF_BLOCKS = 8 }; /* vectors when every block takes 32 bytes */
    for (; count > FLOATS; count /= 2) {
        for (int i = 0; i < count / 2; ++i) {
            key[i] = key_max(key[2 * i], key[2 * i + 1], dtype);
        }
    }
    if (count > HALF_BLOCKS) {
        for (int i = 0; i < HALF_BLOCKS; ++i) {
            key[i] = key_max(halves_first(key[2 * i], key[2 * i + 1]),
                             halves_second(key[2 * i], key[2 * i + 1]), dtype);
        }
    }
    for (int i = 0; i < HALF_BLOCKS / 2; ++i) {
        key[i] = key_max(lanes_even(key[2 * i], key[2 * i + 1]), lanes_odd(key[2 * i], key[2 * i + 1]), dtype);
    }
    for (int i = 0; i < HALF_BLOCKS / 4; ++i) {
        key[i] =
            key_max(quads_first(key[2 * i], key[2 * i + 1]), quads_second(key[2 * i], key[2 * i + 1]), dtype);
    }
    vec32 folded = key_max(dwords_even(key[0], key[1]), dwords_odd(key[0], key[1]), dtype);
    if (dtype != OPAQ_F32) {
        folded = key_max(folded, folded >> 16, dtype) & 0xFFFFu;
    }
    return gather_deal(folded);
}

/* A magnitude in each dword to floats; a NaN stays one. */
VEC_INLINE vecf magnitudes_as_floats(vec32 magnitude, enum opaq_element dtype) {
    if (dtype == OPAQ_BF16) {
        return (vecf)(magnitude << 16);
    }
    if (dtype == OPAQ_F16) { /* the exponent is moved; a subnormal number becomes normal by the product */
        const vec32 infinite = (magnitude << 13) | 0x7F800000u;
        const vecf finite = (vecf)(magnitude << 13) * vecf_set(0x1p112f);
        return (vecf)replace32(above32(magnitude, 0x7BFF), (vec32)finite, infinite);
    }
    return (vecf)magnitude;
}

/* Converts magnitudes to floats; every NaN becomes the canonical one. */
VEC_INLINE vecf magnitudes_to_floats(vec32 magnitude, enum opaq_element dtype) {
    const vec32 bits = (vec32)magnitudes_as_floats(magnitude, dtype);
    return (vecf)replace32(above32(bits, 0x7F800000u), bits, vec32_set(0x7FC00000u));
}

#endif
