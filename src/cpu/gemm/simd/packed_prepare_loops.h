/* cpu/gemm/simd/packed_prepare_loops.h: the functions of a packed_prepare table, as loops that compilers vectorize;
 * loop_tables.h makes the tables of them. Depends on packed_prepare.h. */
#ifndef OPAQ_CPU_GEMM_SIMD_PACKED_PREPARE_LOOPS_H
#define OPAQ_CPU_GEMM_SIMD_PACKED_PREPARE_LOOPS_H

#include "base/float_bits.h"
#include "cpu/gemm/packed_prepare.h"

/* Bits without the sign are in the order of the numbers, NaN and infinity above all. */
static float finite_amax(const float *x, int n) {
    int32_t most = 0;
    for (int i = 0; i < n; ++i) {
        const int32_t size = (int32_t)(float_to_bits(x[i]) & 0x7FFFFFFFu);
        most = size > most ? size : most;
    }
    return most >= 0x7F800000 ? float_nan() : float_from_bits((uint32_t)most);
}

static inline float nearest(float x) {
    const float shifter = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, ties to even */
    return x + shifter - shifter;
}

static void to_int8(const float *restrict x, int n, float inverse, int8_t *restrict q) {
    for (int i = 0; i < n; ++i) {
        q[i] = (int8_t)(int32_t)nearest(x[i] * inverse);
    }
}

static void to_int16(const float *restrict x, int n, float inverse, int16_t *restrict q) {
    for (int i = 0; i < n; ++i) {
        q[i] = (int16_t)(int32_t)nearest(x[i] * inverse);
    }
}

/* Magnitudes 0 to 4 are the numbers themselves, then come 6, 8 and 12. */
static inline int8_t twice_e2m1(uint8_t code) {
    const int8_t magnitude = (int8_t)(code & 7);
    const int8_t above_4 = (int8_t)(magnitude > 4 ? magnitude - 4 : 0);
    const int8_t size = (int8_t)(magnitude + above_4 + (magnitude == 7 ? 2 : 0));
    return (int8_t)((code & 8) != 0 ? -size : size);
}

static void codes_to_int8(const uint8_t *restrict pairs, int64_t count, int8_t *restrict q) {
    for (int64_t i = 0; i < count; ++i) {
        q[2 * i] = twice_e2m1(pairs[i] & 15);
        q[2 * i + 1] = twice_e2m1((uint8_t)(pairs[i] >> 4));
    }
}

static void correct(const int8_t *restrict q, int64_t count, int32_t *restrict correction) {
    for (int64_t b = 0; b < count; ++b) {
        int32_t sum = 0;
        for (int i = 0; i < 16; ++i) {
            sum += q[b * 16 + i];
        }
        correction[b] = -12 * sum;
    }
}

#endif
